"""Two models on the same rows: `edgeft eval`, and the last stage of a run.

The files that are shipped are scored: GGUF files in llama.cpp, runs and Hugging Face folders in the trainer.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgeft.arch.check import check_model
from edgeft.config import Recipe
from edgeft.data import tokens as data_tokens
from edgeft.data.tokens import Encoded
from edgeft.errors import ConfigError, DataError, ModelError, RunError
from edgeft.evaluate import leak
from edgeft.evaluate.score import Scores, compare
from edgeft.evaluate.subject import Rows, Subject, SubjectScores
from edgeft.evaluate.suite import Item, Suite, from_run, load_suite, make_items, read_items
from edgeft.evaluate.turns import ALL_ROWS, Turns
from edgeft.formats.adapter import BASE, BASE_KEY, is_adapter, named_base
from edgeft.formats.gguf import GGUF
from edgeft.formats.source import is_gguf, model_source
from edgeft.formats.tokenizer import open_tokenizer
from edgeft.run.folder import Run
from edgeft.run.progress import Progress


def score_subject(
    subject: Subject, items: list[Item], suite: Suite, progress: Progress, store: Run | None = None, again: bool = False
) -> Scores:
    """Scores of one model; responses stored by the run `store`, or for its base model, are used, unless `again`."""
    rows = Rows(items, suite, open_tokenizer(subject.source))
    scored = SubjectScores(subject, rows, rows.stored(subject, store, again), progress)
    try:
        scored.extend(len(items))
    finally:
        scored.close()
    if store:
        scored.log(store)
    return scored.scores


def evaluate_run(run: Run, encoded: list[Encoded], progress: Progress, room_bytes: int = 0) -> dict[str, Any]:
    """The last stage of a run: base and tuned model, both in llama.cpp or both in the trainer, within `time_share`."""
    began = time.monotonic()
    suite = load_suite("qa")
    suite.eval = run.recipe.eval
    items, subjects = make_items(suite, encoded), _of_run(run, room_bytes)
    limit_s = time_limit(run)
    if limit_s is None:
        result = compare_subjects(subjects, items, suite, progress, run)
    else:
        leaks = find_leaks(run, items, progress)
        rows = Rows(items, suite, open_tokenizer(subjects[-1].source))
        base, tuned = (SubjectScores(one, rows, rows.stored(one, run), progress) for one in subjects)
        turns = Turns(base, tuned, limit_s, began)
        ended = turns.run()
        for scored in (base, tuned):
            scored.log(run)
        result = _result([*turns.scores()], suite, len(items), ended, leaks)
    run.write_json(run.evaluation, result)
    return result


def time_limit(run: Run) -> float | None:
    """Seconds of the last stage of a run; None: all rows are scored."""
    share = run.recipe.eval.time_share
    worked_s = sum(event.worked_s for event in run.stages() if event.stage in ("trunk", "search", "train"))
    return (share * worked_s or math.inf) if share else None  # a run of an earlier version has no times


def _of_run(run: Run, room_bytes: int) -> list[Subject]:
    source = model_source(run.recipe.model.path)
    if not is_gguf(source):
        return _in_trainer(run, None, run.effective.model.frozen)
    pairs = (("base", source), ("tuned", str(run.model)))
    return [Subject(who, path, room_bytes=room_bytes) for who, path in pairs]


def _in_trainer(run: Run, base: str | None, frozen: str) -> list[Subject]:
    source = model_source(run.recipe.model.path)
    before = Subject("base", base or source, frozen=frozen, trainer=True)
    return [before, Subject("tuned", source, run, trainer=True)]


def compare_subjects(
    subjects: list[Subject],
    items: list[Item],
    suite: Suite,
    progress: Progress,
    run: Run | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """The last subject against the first, on all rows; leaks are reported before anything is scored."""
    leaks = find_leaks(run, items, progress) if run else []
    scores = [score_subject(subject, items, suite, progress, run, again) for subject in subjects]
    return _result(scores, suite, len(items), ALL_ROWS, leaks)


def _result(scores: list[Scores], suite: Suite, total: int, ended: str, leaks: list[leak.Leak]) -> dict[str, Any]:
    """Of the rows that were scored, and why no more were."""
    result = compare(scores[0] if len(scores) > 1 else None, scores[-1], suite=suite)
    leaks = [one for one in leaks if one.row < result["rows"]]
    return result | {"of": total, "ended": ended, "leaks": [asdict(one) for one in leaks]}


def find_leaks(run: Run, items: list[Item], progress: Progress) -> list[leak.Leak]:
    """Held-out rows that are equal or similar to a training row."""
    if not run.tokens.is_file():
        return []
    train = data_tokens.load(run.tokens)[0]
    texts, rows = [encoded.row for encoded in train], [item.row for item in items]
    if not all(row.messages for row in texts):  # plain text is stored as its tokens
        tokenizer = open_tokenizer(model_source(run.recipe.model.path))
        texts = [replace(e.row, text=tokenizer.decode(e.ids)) if not e.row.messages else e.row for e in train]
        rows = [
            replace(i.row, text=i.row.text or tokenizer.decode(i.request.prompt)) if not i.row.messages else i.row
            for i in items
        ]
    leaks = leak.find(texts, rows)
    if leaks:
        exact = sum(one.kind == "exact" for one in leaks)
        progress.line(
            f"warning: {len(leaks)} of {len(items)} held-out rows are also in the training set ({exact} identical, "
            f"{len(leaks) - exact} similar): scores on them say little; first: {leaks[0].source} is like "
            f"{leaks[0].train_source}"
        )
    return leaks


def run_of(place: Path) -> Run | None:
    """The run of this folder, or of the folder of this file."""
    folder = place if (place / "recipe.yaml").is_file() else place.parent
    return Run.open(folder) if (folder / "recipe.yaml").is_file() else None


def sources(target: str) -> list[str | None]:
    """Default sources of the model and the rows of `edgeft eval TARGET`."""
    run = run_of(Path(target))
    return [model_source(run.recipe.model.path), run.recipe.data.path, run.recipe.data.heldout] if run else []


def subjects_of(target: str, base: str | None, progress: Progress) -> tuple[list[Subject], Run | None]:
    """The models that `edgeft eval TARGET` compares, base first; the run they belong to."""
    run = run_of(Path(target))
    if run is not None and run.path == Path(target):
        return _in_trainer(run, base, run.effective.model.frozen if not base else "auto"), run
    if is_adapter(target):
        below = base or str(base_of_adapter(Path(target), run))
        return [Subject("base", below), Subject("tuned", below, adapter=target)], run
    check_model(target)
    origin = base or (model_source(run.recipe.model.path) if run else base_of(target))
    if origin is None:
        progress.line("base model unknown, no comparison (name it with --base)")
    pairs = [("base", origin)] if origin else []
    return [Subject(who, path, trainer=not is_gguf(path)) for who, path in [*pairs, ("tuned", target)]], run


@dataclass(frozen=True)
class Evaluation:
    """The options of `edgeft eval`."""

    target: str  # a run, a Hugging Face folder or a GGUF file
    data: str | None = None  # rows in place of the run's or the suite's
    base: str | None = None  # the model to compare with
    limit: int | None = None  # rows
    suite: str | None = None
    again: bool = False  # also where scores are in the run folder


def evaluate(options: Evaluation, progress: Progress) -> dict[str, Any]:
    """The target and its base model on the same rows; the result is also written to the run folder."""
    data = options.data
    suite = load_suite(options.suite or "qa")
    subjects, run = subjects_of(options.target, options.base, progress)
    recipe = run.recipe if run else Recipe()
    if options.suite is None:
        suite.eval = recipe.eval
    rows = options.limit or suite.eval.rows
    own = run if data is None and suite.data.path is None else None
    if own and not own.tokens.is_file():
        raise RunError(f"{own.path} holds no rows to score", "name a file with --data")
    if own and suite.prompt == "chat" and suite.score not in ("choice", "mixed"):
        items = make_items(suite, data_tokens.load(own.tokens)[1][:rows])
        if not items:
            raise DataError(f"{own.path} has no held-out rows", "name a file with --data")
    else:
        config = replace(recipe.data, path=data, heldout=None) if data else from_run(suite, recipe.data)
        items = read_items(suite, config, open_tokenizer(subjects[-1].source), rows)
    result = compare_subjects(subjects, items, suite, progress, run, options.again)
    if run and data is None and options.base is None and options.limit is None:
        name = "" if suite.name == "qa" else f"-{suite.name}"
        run.write_json(run.path / f"eval{name}{'-trainer' if subjects[-1].run else ''}.json", result)
    return result


def evaluate_harness(
    target: str, tasks: list[str], base: str | None, limit: int | None, progress: Progress
) -> dict[str, Any]:
    """Tasks of lm-evaluation-harness on the tuned and the base model."""
    try:
        from edgeft.evaluate.harness import run_tasks
    except ImportError:
        hint = "install it with `pip install 'edgeft[lm-eval]'`"
        raise ConfigError("lm-evaluation-harness is not installed", hint) from None
    subjects, run = subjects_of(target, base, progress)
    result: dict[str, Any] = {"tasks": tasks, "base": None}
    for subject in subjects:
        with subject.opened(512) as (scorer, tokenizer):
            result[subject.who] = run_tasks(scorer, tokenizer, tasks, limit, progress, subject.who)
    if run and base is None and limit is None:
        run.write_json(run.path / "eval-harness.json", result)
    return result


def base_of(target: str) -> str | None:
    """The base model of an exported file, if it is in the same folder or is the embedded one."""
    found = named_base(target) if is_gguf(target) else None
    return str(found) if found else None


def base_of_adapter(adapter: Path, run: Run | None) -> Path:
    """The file that an adapter is applied to: that of its run, or the one it names."""
    source = model_source(run.recipe.model.path) if run else ""
    candidates = [Path(source) if is_gguf(source) else None, adapter.with_name(BASE), named_base(adapter)]
    for found in candidates:
        if found is not None and found.is_file():
            return found
    name = GGUF.open(adapter).get_key(BASE_KEY)
    raise ModelError(f"{adapter} is an adapter, and its base model {name} is not here", "put it into the same folder")
