"""The last stage of a run: within its time, until the difference is clear, and with stored answers of the base model.

Two random models of four blocks; the right answers are those that the second one gives.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import make_model
import pytest
from typer.testing import CliRunner

from edgeft import config
from edgeft.cli import app
from edgeft.data.rows import Row
from edgeft.data.tokens import Encoded, encode_rows, prompt_ids
from edgeft.evaluate import responses
from edgeft.evaluate.compare import evaluate_run, time_limit
from edgeft.evaluate.llamacpp import LlamaFile
from edgeft.evaluate.request import Request, Response, RowProgress
from edgeft.evaluate.responses import StoredResponses
from edgeft.evaluate.subject import Rows, Subject, SubjectScores
from edgeft.evaluate.suite import load_suite, make_items
from edgeft.evaluate.turns import Turns
from edgeft.formats.tokenizer import GgufTokenizer
from edgeft.plan.limits import EVAL_MIN_ROWS
from edgeft.report import words
from edgeft.run.events import EvalEvent, StageEvent, read_events
from edgeft.run.folder import Run
from edgeft.run.progress import Progress

MAX_NEW = 4
COUNT = 60


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny`, with other weights."""
    path = tmp_path_factory.mktemp("other") / "other.gguf"
    make_model.make("tiny", "q4_0", path, seed=4)
    return path


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> GgufTokenizer:
    return GgufTokenizer(tiny)


def encode(tokenizer: GgufTokenizer, answers: Sequence[str]) -> list[Encoded]:
    messages = [f"What is number {n}?" for n in range(len(answers))]
    rows = [
        Row([{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], [answer])
        for asked, answer in zip(messages, answers, strict=True)
    ]
    encoded, dropped = encode_rows(rows, tokenizer, 128)
    assert not dropped
    return encoded


@pytest.fixture(scope="module")
def unclear(tokenizer: GgufTokenizer) -> list[Encoded]:
    """Neither model knows an answer."""
    return encode(tokenizer, ["seventeen days"] * COUNT)


@pytest.fixture(scope="module")
def clear(other: Path, tokenizer: GgufTokenizer, unclear: list[Encoded]) -> list[Encoded]:
    """The second model knows all answers."""
    with LlamaFile(other, threads=1) as file:
        asked = [Request(prompt_ids(row).tolist(), generate=True) for row in unclear]
        answers = [tokenizer.decode(one.output).strip() for one in file.respond(asked, MAX_NEW)]
    return encode(tokenizer, answers)


@dataclass
class Bench:
    """A clock that the models move: seconds of a load and of a row, by file name."""

    load_s: float = 0.0
    row_s: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    opened: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def use(self, monkeypatch: pytest.MonkeyPatch) -> Bench:
        plain_open, plain_respond = LlamaFile.__init__, LlamaFile.respond

        def open_(file: LlamaFile, path: Path, *args: Any, **more: Any) -> None:
            plain_open(file, path, *args, **more | {"threads": 1})
            self.now += self.load_s
            self.opened.append(Path(path).name)

        def respond(
            file: LlamaFile, requests: Sequence[Request], max_new: int, progress: RowProgress | None = None
        ) -> list[Response]:
            self.now += len(requests) * self.row_s.get(file.path.name, 1.0)
            return plain_respond(file, requests, max_new, progress)

        monkeypatch.setattr(LlamaFile, "__init__", open_)
        monkeypatch.setattr(LlamaFile, "respond", respond)
        return self

    def turns(self, base: Path, tuned: Path, encoded: list[Encoded], limit_s: float) -> Turns:
        suite = load_suite("qa")
        suite.eval = config.EvalConfig(max_new_tokens=MAX_NEW)
        rows = Rows(make_items(suite, encoded), suite, GgufTokenizer(base))
        sides = (
            SubjectScores(Subject(who, str(file)), rows, StoredResponses(None, MAX_NEW), Progress(), self.clock)
            for who, file in (("base", base), ("tuned", tuned))
        )
        return Turns(*sides, limit_s, self.now)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench().use(monkeypatch)


# ---------------------------------------------------------------- time


def test_the_limit_holds_for_both_models(bench: Bench, tiny: Path, other: Path, unclear: list[Encoded]) -> None:
    bench.load_s = 0.1
    turns = bench.turns(tiny, other, unclear, limit_s=100.0)
    assert turns.run() == "time limit"
    assert 48 <= turns.count < 50  # a second for a row and model, and some loads
    assert bench.now <= 100
    base, tuned = turns.scores()
    assert [r.question for r in base.records] == [r.question for r in tuned.records]
    assert len(base.records) == turns.count


def test_a_slow_base_model_does_not_break_the_limit(
    bench: Bench, tiny: Path, other: Path, unclear: list[Encoded]
) -> None:
    """Its speed is known only when the tuned model is ahead of it already."""
    bench.load_s, bench.row_s = 10.0, {tiny.name: 3.0}
    turns = bench.turns(tiny, other, unclear, limit_s=190.0)
    assert turns.run() == "time limit"
    assert EVAL_MIN_ROWS < turns.count < COUNT
    assert bench.now <= 190


def test_some_rows_are_scored_however_long_they_take(
    bench: Bench, tiny: Path, other: Path, unclear: list[Encoded]
) -> None:
    turns = bench.turns(tiny, other, unclear, limit_s=0.5)
    assert turns.run() == "time limit"
    assert turns.count == EVAL_MIN_ROWS
    assert bench.opened == [other.name, tiny.name]
    few = bench.turns(tiny, other, unclear[:5], limit_s=0.5)
    assert few.run() == "all rows"
    assert few.count == 5


def test_a_look_must_be_worth_a_load(bench: Bench, tiny: Path, other: Path, unclear: list[Encoded]) -> None:
    bench.load_s = 100.0
    assert bench.turns(tiny, other, unclear, math.inf).run() == "all rows"
    assert bench.opened == [other.name, tiny.name]  # each is loaded once
    bench.load_s, bench.opened = 0.01, []
    assert bench.turns(tiny, other, unclear, math.inf).run() == "all rows"
    assert bench.opened == [other.name, tiny.name, other.name, tiny.name]  # looks at 24 and 48 rows


# ---------------------------------------------------------------- a clear difference


def test_it_ends_when_the_difference_is_clear(bench: Bench, tiny: Path, other: Path, clear: list[Encoded]) -> None:
    turns = bench.turns(tiny, other, clear, math.inf)
    assert turns.run() == "decided"
    assert turns.count == EVAL_MIN_ROWS
    base, tuned = turns.scores()
    assert (tuned.f1 or 0) > (base.f1 or 0) + 50
    assert bench.opened == [other.name, tiny.name]
    worse = bench.turns(other, tiny, clear, math.inf)  # that it got worse is as clear
    assert worse.run() == "decided"


# ---------------------------------------------------------------- the stage, and what it stores


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "eval"


def make_run(folder: Path, base: Path, tuned: Path, *sets: str, worked_s: float = 1e6) -> Run:
    sets = (f"model.path={base}", f"eval.max_new_tokens={MAX_NEW}", *sets)
    run = Run.start(folder, config.apply_sets(config.Recipe(), sets), False)
    shutil.copy(tuned, run.model)
    for stage in ("prepare", "search", "trunk", "train", "export"):
        run.log(StageEvent(stage, 0.0, 1.0, worked_s, 0.0, 1))
    return Run.open(folder)


def test_the_limit_is_a_share_of_the_training_time(tmp_path: Path, tiny: Path, other: Path) -> None:
    run = make_run(tmp_path / "a", tiny, other, worked_s=8.0)
    assert time_limit(run) == 0.25 * 3 * 8.0
    assert time_limit(make_run(tmp_path / "b", tiny, other, "eval.time_share=0")) is None
    run.metrics.unlink()
    assert time_limit(run) == math.inf  # nothing is known


@pytest.mark.usefixtures("cached")
def test_a_result_says_how_many_rows_and_why(
    tmp_path: Path, tiny: Path, other: Path, unclear: list[Encoded], clear: list[Encoded]
) -> None:
    short = make_run(tmp_path / "short", tiny, other, worked_s=0.001)
    found = evaluate_run(short, unclear, Progress())
    assert (found["rows"], found["of"], found["ended"]) == (EVAL_MIN_ROWS, COUNT, "time limit")
    assert found == json.loads(short.evaluation.read_text())
    assert words.scored(found) == "24 of 60 held-out rows (time limit)"
    events = read_events(EvalEvent, short.events())
    assert sorted((event.who, event.rows) for event in events) == [("base", 24), ("tuned", 24)]
    long = evaluate_run(make_run(tmp_path / "long", tiny, other), clear, Progress())
    assert (long["rows"], long["of"], long["ended"]) == (EVAL_MIN_ROWS, COUNT, "decided")
    assert words.scored(long) == "24 of 60 held-out rows (the difference is clear)"
    whole = evaluate_run(make_run(tmp_path / "whole", tiny, other, "eval.time_share=0"), clear, Progress())
    assert (whole["rows"], whole["of"], whole["ended"]) == (COUNT, COUNT, "all rows")
    assert words.scored(whole) == "60 held-out rows"


def test_answers_of_the_base_model_are_reused_by_the_next_run(
    bench: Bench, tmp_path: Path, tiny: Path, other: Path, unclear: list[Encoded], cached: Path
) -> None:
    first = evaluate_run(make_run(tmp_path / "a", tiny, other), unclear[:40], Progress())
    assert sorted(set(bench.opened)) == ["model.gguf", tiny.name]
    bench.opened = []
    copy = shutil.copy(tiny, tmp_path / "elsewhere.gguf")  # the same weights
    second = evaluate_run(make_run(tmp_path / "b", copy, other), unclear[:40], Progress())
    assert bench.opened == ["model.gguf"]
    assert second["base"] == first["base"]
    assert second["tuned"] == pytest.approx(first["tuned"])
    bench.opened = []
    more = evaluate_run(make_run(tmp_path / "c", tiny, other), unclear, Progress())
    assert more["rows"] == COUNT
    assert bench.opened.count(tiny.name) == 1  # for twenty rows
    (stored,) = cached.glob("*/responses.json")
    assert len(json.loads(stored.read_text())["rows"]) == COUNT
    assert "seventeen" not in stored.read_text()
    bench.opened = []
    longer = make_run(tmp_path / "d", tiny, other, "eval.max_new_tokens=5")
    assert evaluate_run(longer, unclear[:5], Progress())["rows"] == 5
    assert tiny.name in bench.opened  # other settings, other answers


def test_an_interrupted_stage_goes_on_where_it_was(
    bench: Bench, tmp_path: Path, tiny: Path, other: Path, unclear: list[Encoded], cached: Path
) -> None:
    run = make_run(tmp_path / "a", tiny, other)
    whole = evaluate_run(run, unclear, Progress())
    run.evaluation.unlink()
    bench.opened = []
    assert evaluate_run(run, unclear, Progress()) == whole
    assert not bench.opened


@pytest.mark.parametrize(
    "damage",
    ["", "{", '{"rows": 3}', *(f'{{"rows": {{"KEY": [1.0, [2.0], [true], [{x}]]}}}}' for x in ('"x"', 10**9, -1))],
)
def test_a_damaged_file_is_ignored(
    damage: str, tmp_path: Path, tiny: Path, other: Path, unclear: list[Encoded], cached: Path
) -> None:
    rows = unclear[:6]
    first = evaluate_run(make_run(tmp_path / "a", tiny, other), rows, Progress())
    (stored,) = cached.glob("*/responses.json")
    good = json.loads(stored.read_text())["rows"]
    stored.write_text(damage.replace("KEY", next(iter(good))))
    second = evaluate_run(make_run(tmp_path / "b", tiny, other), rows, Progress())
    assert second["base"] == pytest.approx(first["base"])
    assert json.loads(stored.read_text())["rows"].keys() == good.keys()


def test_without_a_cache_that_can_be_written_it_is_only_slower(
    tmp_path: Path, tiny: Path, other: Path, unclear: list[Encoded], cached: Path
) -> None:
    cached.parent.mkdir(parents=True)
    cached.write_text("a file where the folder should be")
    assert evaluate_run(make_run(tmp_path / "a", tiny, other), unclear[:4], Progress())["rows"] == 4


def test_a_run_that_keeps_no_data_stores_nothing_in_the_cache(
    bench: Bench, tmp_path: Path, tiny: Path, other: Path, unclear: list[Encoded], cached: Path
) -> None:
    run = make_run(tmp_path / "a", tiny, other, "how.keep_data=false")
    evaluate_run(run, unclear[:4], Progress())
    assert not cached.exists()
    assert {file.name.split("-")[0] for file in (run.path / "eval").iterdir()} == {"base", "tuned"}
    evaluate_run(make_run(tmp_path / "b", tiny, other), unclear[:4], Progress())
    bench.opened = []
    evaluate_run(make_run(tmp_path / "c", tiny, other, "how.keep_data=false"), unclear[:4], Progress())
    assert tiny.name in bench.opened  # it does not read there either


def test_the_store_is_bounded(tmp_path: Path, cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request([1, 2, n], [], [[5]], generate=True) for n in range(12)]
    given = [Response(0.0, [1.5], [False], [n]) for n in range(12)]
    monkeypatch.setattr(responses, "MAX_ROWS", 8)
    for key in ("old", "new"):
        store = responses.SharedResponses(cached, key, MAX_NEW).used_by(tmp_path, "m.gguf")
        for request, response in zip(requests, given, strict=True):
            store.add([request], [response])
    read = responses.SharedResponses(cached, "new", MAX_NEW)
    assert [read.get(request) for request in requests] == [None] * 4 + given[4:]
    assert responses.SharedResponses(cached, "new", MAX_NEW + 1).get(requests[-1]) is None
    monkeypatch.setattr(responses, "MAX_BYTES", 1)
    store.add(requests[:1], given[:1])
    assert [entry.name for entry in cached.iterdir() if entry.is_dir()] == ["new"]  # the one in use stays


def test_the_command_lists_and_clears_answers(
    tmp_path: Path, tiny: Path, other: Path, unclear: list[Encoded], cached: Path
) -> None:
    runner = CliRunner()
    run = make_run(tmp_path / "a", tiny, other)
    evaluate_run(run, unclear[:4], Progress())
    (row,) = json.loads(runner.invoke(app, ["cache", "--json"]).stdout)["entries"]
    assert (row["part"], row["model"], row["rows"], row["state"]) == ("eval", tiny.name, 4, "whole")
    assert "of 4 rows" in runner.invoke(app, ["cache"], env={"COLUMNS": "200"}).stdout
    assert json.loads(runner.invoke(app, ["cache", "--clear", "--json"]).stdout)["freed_bytes"] > 0
    assert not list(cached.glob("*/responses.json"))
    again = make_run(tmp_path / "b", tiny, other)
    evaluate_run(again, unclear[:4], Progress())
    Run.remove(again.path)  # the last run that uses them
    assert not list(cached.glob("*/responses.json"))
