"""Two models on the same rows: `edgeft eval`, and the last stage of a run.

The files that are shipped are scored: GGUF files in llama.cpp, runs and Hugging Face folders in the trainer.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgeft.arch.check import check_model
from edgeft.config import Recipe
from edgeft.data import tokens as data_tokens
from edgeft.data.tokens import Encoded
from edgeft.errors import ConfigError, DataError, RunError
from edgeft.evaluate import leak
from edgeft.evaluate.request import Scorer, row_progress
from edgeft.evaluate.score import Scores, compare, from_json, score_items, to_json
from edgeft.evaluate.suite import Item, Suite, from_run, load_suite, make_items, read_items
from edgeft.formats.gguf import GGUF
from edgeft.formats.source import demo_model, is_gguf, model_id, model_source
from edgeft.formats.tokenizer import Tokenizer, open_tokenizer
from edgeft.run.events import EvalEvent
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train.build import trained_stack


@dataclass(frozen=True)
class Subject:
    """A model to score: a GGUF file in llama.cpp, anything else in the trainer."""

    who: str  # base or tuned
    source: str
    run: Run | None = None  # with its trained weights in place of those of `source`
    frozen: str = "dense"  # storage of frozen weights in the trainer
    trainer: bool = False
    room_bytes: int = 0  # memory limit of scoring; 0: the available memory

    @property
    def identity(self) -> str:
        """Cache key that changes with the weights."""
        file = self.run.best if self.run else Path(self.source)
        changed = file.stat().st_mtime_ns if file.is_file() else 0
        return f"{model_id(self.source)}|{model_id(str(file))}|{changed}|{self.trainer}"

    @contextmanager
    def opened(self, longest: int, tokens: int = 0) -> Iterator[tuple[Scorer, Tokenizer]]:
        """longest: tokens of the longest row with its answer; tokens: of all rows, 0 if no faster copy may be made."""
        tokenizer = open_tokenizer(self.source)
        if not self.trainer:
            from edgeft.evaluate.llamacpp import LlamaFile, with_fast_types

            n_ctx, room = max(2048, 4 * longest), self.room_bytes
            with with_fast_types(self.source, tokens, room) as place, LlamaFile(place, n_ctx, room_bytes=room) as file:
                yield file, tokenizer
            return
        from edgeft.engine.load import load
        from edgeft.evaluate.stack_scorer import StackScorer

        stack = trained_stack(self.run)[0] if self.run else load(self.source, self.frozen)
        yield StackScorer(stack, tokenizer.eog), tokenizer


def score_subject(
    subject: Subject, items: list[Item], suite: Suite, progress: Progress, store: Run | None = None, again: bool = False
) -> Scores:
    """Scores of one model; from the run folder `store` if they are there, unless `again`."""
    file: Path | None = None
    max_new = suite.eval.max_new_tokens
    if store:
        content = [[asdict(item.request), item.answers, item.right] for item in items]
        asked = json.dumps([asdict(suite), max_new, content])
        key = hashlib.sha256(f"{subject.identity}|{asked}".encode()).hexdigest()[:16]
        file = store.path / "eval" / f"{suite.name or 'qa'}-{subject.who}-{key}.json"
        cached = None if again else from_json(store.read_json(file) or {})
        if cached:
            return cached
    lengths = [len(i.request.prompt) + max([len(o) for o in i.request.options], default=0) + max_new for i in items]
    started = time.monotonic()
    with (
        row_progress(progress, f"evaluate {subject.who} model", len(items)) as advance,
        subject.opened(max(lengths), sum(lengths) if suite.eval.unpack else 0) as (scorer, tokenizer),
    ):
        scores = score_items(scorer, tokenizer, items, suite, advance)
    if store and file:
        store.write_json(file, to_json(scores))
        seconds = round(time.monotonic() - started, 2)
        store.log(EvalEvent(suite.name or "qa", subject.who, len(items), seconds))
    return scores


def evaluate_run(run: Run, rows: list[Encoded], progress: Progress, base: str | None = None) -> dict[str, Any]:
    """The base and the tuned model, both in the trainer, on rows of the run."""
    subjects = _in_trainer(run, base, run.effective.model.frozen)
    return _compare_on_rows(subjects, run, rows, run.recipe.eval.max_new_tokens, progress)


def _in_trainer(run: Run, base: str | None, frozen: str) -> list[Subject]:
    source = model_source(run.recipe.model.path)
    before = Subject("base", base or source, frozen=frozen, trainer=True)
    return [before, Subject("tuned", source, run, trainer=True)]


def evaluate_files(
    base: str, tuned: str, rows: list[Encoded], max_new: int, progress: Progress, room_bytes: int = 0
) -> dict[str, Any]:
    """Two GGUF files, both in llama.cpp, on encoded rows."""
    subjects = [Subject(who, path, room_bytes=room_bytes) for who, path in (("base", base), ("tuned", tuned))]
    return _compare_on_rows(subjects, run_of(Path(tuned)), rows, max_new, progress)


def _compare_on_rows(
    subjects: list[Subject], run: Run | None, rows: list[Encoded], max_new: int, progress: Progress
) -> dict[str, Any]:
    suite = load_suite("qa")
    suite.eval = replace(suite.eval, max_new_tokens=max_new)
    result = compare_subjects(subjects, make_items(suite, rows), suite, progress, run)
    if run:
        run.write_json(run.evaluation, result)
    return result


def compare_subjects(
    subjects: list[Subject],
    items: list[Item],
    suite: Suite,
    progress: Progress,
    run: Run | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """The last subject against the first; leaks are reported before anything is scored."""
    leaks = find_leaks(run, items, progress) if run else []
    scores = [score_subject(subject, items, suite, progress, run, again) for subject in subjects]
    result = compare(scores[0] if len(scores) > 1 else None, scores[-1], suite=suite)
    return result | {"leaks": [asdict(leak) for leak in leaks]}


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
    if not is_gguf(target):
        return None
    name = str(GGUF.open(target).get_key("edgeft.base"))
    candidates = [path for path in (Path(target).with_name(Path(name).name), demo_model()) if path is not None]
    return next((str(path) for path in candidates if path.name == name and path.is_file()), None)
