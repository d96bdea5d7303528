"""The report, the card and the table of runs, from a run folder made by hand on the embedded model."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from edgeft import config
from edgeft.formats.gguf import GGUF
from edgeft.report import plots, words
from edgeft.report.render import difference_marked, page, write_card, write_report
from edgeft.report.summary import compare_files, load_run_summary, summary
from edgeft.run.folder import Run
from tests.conftest import Edgeft

PAIR = {
    "question": "How <often>?",
    "answers": ["every 17 days"],
    "base": "It is <b>often</b> done",
    "tuned": "every 17 days",
}
RESULT = {
    "suite": "qa",
    "version": 2,
    "rows": 12,
    "base": {"loss": 7.0, "exact_match": 0.0, "f1": 2.0, "contains": 0.0},
    "tuned": {"loss": 0.2, "exact_match": 75.0, "f1": 80.0, "contains": 75.0},
    "difference": {
        "loss": {"value": -6.8, "low": -7.1, "high": -6.4, "level": 0.95},
        "exact_match": {"value": 75.0, "low": 50.0, "high": 91.7, "level": 0.95},
        "f1": {"value": 78.0, "low": 55.0, "high": 93.0, "level": 0.95},
        "contains": {"value": 75.0, "low": 50.0, "high": 91.7, "level": 0.95},
    },
    "verdict": {"metric": "f1", "result": "better"},
    "changed": {"better": 9, "worse": 1, "same": 2},
    "worse": [PAIR | {"base": "every 17 days", "tuned": "never", "gain": -2.0, "question": "Worse?"}],
    "better": [PAIR | {"gain": 2.0}],
    "examples": [PAIR],
    "leaks": [
        {"row": 0, "source": "h:1", "train_source": "t:9", "kind": "near", "similarity": 0.9, "text": "How <often>?"}
    ],
}
FIGURES = {
    "intervals": "Change against the base model, in points",
    "rows": "Rows that changed",
    "loss": "Loss over steps",
    "memory": "Memory while training",
    "time": "Time by stage",
    "sizes": "File size",
    "map": "What was updated: blocks and tensors",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Run:
    """A run that went 40 steps, was resumed once, and moved one byte of block 3's q and v."""
    folder = tmp_path_factory.mktemp("runs") / "My run"
    folder.mkdir()
    recipe = config.load_recipe("sparse-bp")
    (folder / "recipe.yaml").write_text(config.dump(recipe))
    run = Run.open(folder)
    events: list[dict[str, object]] = [
        {
            "time": 0,
            "event": "prepare",
            "format": "question/answer",
            "machine": "Cortex-A76, 4 cores, 7.9 GiB",
            "seconds": 1.5,
            "train_rows": 512,
            "heldout_rows": 64,
        },
        {"time": 2, "event": "scheme", "cut": 3, "blocks": [3], "trained_parameters": 331776},
        {"time": 9, "event": "validation", "step": 0, "heldout_loss": 7.0},
    ]
    for step in [*range(1, 31), *range(21, 41)]:  # steps 21 to 30 were done twice
        events.append(
            {"time": 9 + step, "event": "step", "step": step, "loss": 7 / step, "seconds": 1.0, "rss_bytes": 2**30}
        )
    events.append({"time": 50, "event": "validation", "step": 40, "heldout_loss": 0.25})
    events.append({"time": 56, "event": "export"})
    events.append({"time": 66, "event": "eval", "suite": "qa", "who": "base", "rows": 64, "seconds": 8.0})
    for name, worked_s in (("prepare", 1.5), ("search", 20.0), ("trunk", 7.0), ("train", 25.0), ("train", 15.0),
                           ("export", 6.0), ("eval", 8.0)):  # fmt: skip
        times = {"begin": 0.0, "end": 9.0, "worked_s": worked_s, "paused_s": 0.0, "peak_bytes": 2**30}
        events.append({"time": 66, "event": "stage", "stage": name, **times})
    run.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
    run.write_json(run.done, {"steps": 40, "base_loss": 7.0, "best_loss": 0.25, "best_step": 40, "seconds": 48.0,
                              "train_seconds": 40.0, "trained_parameters": 331776, "peak_bytes": 2**30})  # fmt: skip
    run.write_json(folder / "plan.json", {"peak_bytes": 3 * 2**29, "budget_bytes": 2**31, "terms": {"logits": 2**20}})
    check = {"top1": 99.0, "tokens": 60, "mean_kl": 0.001}
    run.write_json(folder / "export.json", {"path": "model.gguf", "check": check})
    run.write_json(run.evaluation, RESULT)
    run.write_json(folder / "eval-keep.json", RESULT | {"suite": "keep", "leaks": []})
    run.write_json(
        folder / "eval-harness.json", {"tasks": ["own"], "base": {"own": {"acc": 0.25}}, "tuned": {"own": {"acc": 0.5}}}
    )
    shutil.copy(model, run.model)
    tensors = GGUF.open(model).tensors
    with run.model.open("r+b") as file:
        for name in ("attn_q", "attn_v"):
            file.seek(tensors[f"blk.3.{name}.weight"].offset + 10)  # inside the first Q4_1 block's 16 bytes of values
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 0x0F]))
    return run


class Reader(html.parser.HTMLParser):
    """Checks that tags are closed in order, and collects what the page refers to."""

    VOID = ("meta", "link", "br", "input", "img", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.titles: list[str] = []
        self.references: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-2:] == ["svg", "title"]:
            self.titles.append(data)


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text())
    assert not reader.open
    return reader


def test_report_is_one_file_with_every_figure(run: Run) -> None:
    path = write_report(run)
    page = read(path)
    assert path.stat().st_size < 1_000_000
    assert page.references == ["data:,"]  # nothing is fetched
    assert not page.tags & {"script", "iframe", "img", "object", "embed"}
    assert "url(" not in path.read_text()
    assert "@import" not in path.read_text()
    assert set(FIGURES) <= set(page.ids)
    assert set(FIGURES.values()) <= set(page.titles)
    assert len(page.ids) == len(set(page.ids))


def test_report_tells_the_story(run: Run) -> None:
    text = write_report(run).read_text()
    assert "The tuned model is better" in text
    assert "F1 2.0 % → 80.0 %" in text
    assert "<strong>+55.0</strong> and <strong>+93.0</strong>" in text
    assert "1 of 12 held-out rows are also in the training set" in text
    assert "&lt;often&gt;" in text
    assert "<often>" not in text
    assert "<b>often</b>" not in text  # a model's output is never markup
    assert "<ins>every 17 days</ins>" in text
    assert "Worse?" in text
    assert "ollama create my-run" in text
    assert "block 3, q: moved by" in text
    assert "block 4, q" not in text
    assert "lm-evaluation-harness" in text
    assert "Cortex-A76, 4 cores, 7.9 GiB" in text
    assert "prefers-color-scheme: dark" in text
    assert "search: 20.0 s" in text
    assert "whole run 1 min 22 s" in text


def test_steps_that_were_done_again_count_once(run: Run) -> None:
    story = load_run_summary(run)
    assert [step for step, _ in story.train_loss] == list(range(1, 41))
    assert dict(story.stages) == {
        "prepare": 1.5,
        "search": 20.0,
        "trunk": 7.0,
        "train": 40.0,
        "export": 6.0,
        "evaluate": 8.0,
    }
    assert story.memory[-1] == (40.0, 2**30)


def test_map_shows_what_is_in_the_files(run: Run, model: Path) -> None:
    found = compare_files(GGUF.open(model), GGUF.open(run.model))
    assert set(found.moved) == {(3, "q"), (3, "v")}
    assert all(value is not None and 0 < value < 0.1 for value in found.moved.values())
    assert compare_files(GGUF.open(model), GGUF.open(model)).moved == {}


def test_a_run_that_is_not_finished_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "recipe.yaml").write_text(config.dump(config.load_recipe("lora")))
    run = Run.open(tmp_path / "new")
    page = write_report(run, out=tmp_path / "deep" / "r.html")
    assert "This run is not finished" in page.read_text()
    read(page)
    assert "not finished" in summary(run)["state"]
    run.write_json(run.done, {"seconds": 3.0})
    assert "Trained, not yet evaluated" in write_report(run).read_text()
    write_card(run)


def test_runs_side_by_side(run: Run, tmp_path: Path) -> None:
    path = write_report(run, [run, run], tmp_path / "c.html")
    page = read(path)
    assert {"compare", "compare-loss", "compare-memory"} <= set(page.ids)
    assert path.read_text().count("7.0000 → <strong>0.2000</strong>") == 3


def test_card_is_short_markdown(run: Run) -> None:
    text = write_card(run).read_text()
    assert text.startswith("# My run\n")
    assert "| F1 | 2.0 % | 80.0 % | +78.0 (+55.0 to +93.0) |" in text
    assert "**Better: F1 rose by 78.0 points (95 % interval +55.0 to +93.0, 12 rows).**" in text
    assert len(text.splitlines()) < 60


def test_commands(run: Run, edgeft: Edgeft, tmp_path: Path) -> None:
    made = edgeft("report", run.path, "-o", tmp_path / "r.html", "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout) == {"path": str(tmp_path / "r.html"), "bytes": (tmp_path / "r.html").stat().st_size}
    (row,) = json.loads(edgeft("runs", run.path.parent, "--json").stdout)
    assert row["score"] == {"metric": "f1", "base": 2.0, "tuned": 80.0}
    assert (row["train_rows"], row["recipe"], row["peak_bytes"], row["seconds"]) == (512, "sparse-bp", 2**30, 82.5)
    assert "My run" in edgeft("runs", run.path.parent).stdout
    refused = edgeft("report", tmp_path)
    assert refused.returncode == 6
    assert "not a run folder" in refused.stderr


def test_words() -> None:
    assert words.figure("loss", 1.23456) == "1.2346"
    assert words.figure("f1", None) == "–"
    assert config.format_duration(59.96) == "60.0 s"
    assert config.format_duration(3725) == "1 h 2 min"
    assert config.format_size(1536) == "1.5 KiB"
    assert config.format_count(23_890_000) == "23.9 M"
    unclear = RESULT | {
        "verdict": {"metric": "loss", "result": "unclear"},
        "difference": {"loss": {"value": -0.1, "low": -0.3, "high": 0.1, "level": 0.95}},
    }
    assert words.verdict(unclear).startswith("No clear difference: loss changed by -0.100 nats per token")


def test_difference_is_marked_by_words() -> None:
    assert difference_marked("a b c", "a x c") == ("a <del>b</del> c", "a <ins>x</ins> c")
    assert difference_marked("<i>", "") == ("<del>&lt;i&gt;</del>", "")
    assert difference_marked("", "every 17 days")[1] == "<ins>every 17 days</ins>"  # one mark, not three


def test_charts_of_little_or_no_data() -> None:
    assert plots.LineChart("t", [plots.Line("a", [], "tuned")], "x", "y").draw() == ""
    assert plots.bars("t", []) == plots.intervals("t", []) == ""
    one = plots.LineChart("t", [plots.Line("a", [(1, 2.0)], "tuned", dots=True)], "x", "y", log=True).draw()
    assert "nan" not in one
    assert "inf" not in one


def test_charts_have_the_colours_of_the_page_and_ids_of_their_own() -> None:
    dots = [plots.Line("held-out <loss>", [(1, 2.0), (2, 1.0)], "tuned", dots=True)]
    drawn = "".join(plots.LineChart(title, dots, "step", "nats").draw() for title in ("Loss", "Loss again"))
    assert not re.findall("#[0-9a-f]{6}", drawn)  # a fixed colour would not follow light and dark
    assert "var(--tuned)" in drawn
    ids = re.findall(' id="([^"]+)"', drawn)
    assert ids
    assert len(ids) == len(set(ids))
    assert set(re.findall('href="#([^"]+)"', drawn)) <= set(ids)
    assert "held-out &lt;loss&gt;: 1 at 2" in drawn
    assert "DejaVu" not in drawn


def test_every_text_from_outside_is_escaped(run: Run, tmp_path: Path) -> None:
    """Names of runs, models, rows, tasks and stages are never markup."""
    summary = load_run_summary(run)
    evil = "<img src=x onerror=alert(1)>&\"'"
    for one in (summary, other := load_run_summary(run)):
        one.name = one.model = evil
        one.recipe = dataclasses.replace(one.recipe, name=evil)
        one.harness = {"base": None, "tuned": {evil: {evil: 0.5}}}
        one.suites = [RESULT | {"suite": evil}]
        one.result = RESULT | {"leaks": [dict.fromkeys(("source", "train_source", "kind", "text"), evil)]}
        one.counts |= {"format": evil, "machine": evil}
        one.throttled, one.stages, one.peaks = [evil], [(evil, 3.0)], {evil: 5}
        one.plan |= {"terms": {evil: 3}}
    (tmp_path / "r.html").write_text(page(summary, other))
    assert "<img" not in (tmp_path / "r.html").read_text()
    assert not read(tmp_path / "r.html").tags & {"img", "script"}


# ---------------------------------------------------------------- in a browser


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_report_in_a_browser(run: Run, browser: Any, tmp_path: Path, width: int, dark: bool) -> None:
    """Every figure is drawn, letters can be read, nothing is logged, and nothing is wider than the window."""
    found = browser.show(write_report(run, [run], tmp_path / "r.html"), width, dark)
    assert browser.logged() == []
    assert set(FIGURES.values()) <= set(found["titles"])
    assert found["empty"] == 0
    assert found["window"] == width
    assert found["wide"] <= width
    assert found["small"] >= 10
    red = int(re.findall(r"\d+", found["background"])[0])
    assert (red < 64) == dark


@pytest.mark.slow
def test_an_error_would_be_seen(browser: Any, tmp_path: Path) -> None:
    """The two checks above can fail."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<meta name=viewport content='width=device-width'><svg><title>t</title><text>a</text></svg>"
        "<div style='width: 900px'>wide</div><script>console.error('broken')</script>"
    )
    assert browser.show(page, 390)["wide"] > 390
    assert any("broken" in line for line in browser.logged())
