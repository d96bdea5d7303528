"""`edgeft export --compare`: files of one run, their sizes and scores; and the default, which takes the smallest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeft.errors import ExportError
from edgeft.export.compare import parse_names
from edgeft.pipeline import stages
from edgeft.plan import limits
from edgeft.report.charts import charts
from edgeft.report.render import write_report
from edgeft.report.summary import load_run_summary
from edgeft.run.folder import Run
from tests.conftest import Edgeft
from tests.support.runs import Lines


@pytest.fixture(scope="module")
def finished(edgeft: Edgeft, three_blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    steps = ["--set", "train.steps=6", "--set", "train.batch_rows=4", "--set", "update.blocks=1-2"]
    model = three_blocks.with_name("model.gguf")
    made = edgeft("finetune", "-m", model, "-d", three_blocks, "-o", folder, "--until", "export", *steps)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.slow
def test_the_default_says_which_file_it_took_and_why(finished: Path) -> None:
    """The smallest whose held-out loss is within 2 % of what was trained."""
    made = json.loads((finished / "export.json").read_text())
    base = Path(Run.open(finished).recipe.model.path or "").stat().st_size
    kept = "loss" in made
    assert made["types"] == ({"q4_1": 14, "f32": 4} if kept else {"q8_0": 14})
    assert (abs(made["bytes"] - base) < 2000) == kept
    if kept:
        assert made["loss"]["file"] <= 1.02 * made["loss"]["trained"]
        assert "before rounding" in made["why"]


@pytest.mark.slow
def test_a_large_model_is_rounded_only_if_asked(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "AUTO_KEEP_WEIGHTS", 1)
    lines = Lines()
    made = stages.export(Run.open(finished), "gguf", "auto", tmp_path / "m.gguf", lines)
    assert made["types"] == {"q8_0": 14}
    assert "--type keep" in str(vars(lines))


@pytest.mark.slow
def test_files_are_compared_on_the_same_rows(edgeft: Edgeft, finished: Path) -> None:
    done = edgeft("export", finished, "--compare", "keep,q8_0,gguf-lora,q4_k", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    keep, eight, lora, fourth = result["files"]
    assert [one["name"] for one in result["files"]] == ["keep", "q8_0", "gguf-lora", "q4_k"]
    assert "whole blocks" in fourth["error"]
    assert lora["bytes"] < 0.1 * result["base_bytes"] < keep["bytes"] < eight["bytes"]
    assert lora["loss"] == pytest.approx(eight["loss"], rel=0.02)
    assert keep["loss"] < 1.05 * eight["loss"]
    refused = edgeft("export", finished, "--compare", "keep", "--type", "q8_0")
    assert refused.returncode == 2
    assert "leave out" in refused.stderr
    again = edgeft("export", finished, "--compare", "keep,q8_0,gguf-lora")
    assert "gguf-lora" in again.stdout
    run = load_run_summary(Run.open(finished))
    assert [one["name"] for one in run.compared] == ["keep", "q8_0", "gguf-lora"]
    assert "q8_0" in write_report(Run.open(finished)).read_text()
    assert charts(run)["files"]


def test_names_are_checked_before_anything_is_written() -> None:
    assert parse_names("keep, q8_0,keep") == ["keep", "q8_0"]
    for text, says in (("q9_0", "q9_0"), (",", "names no type")):
        with pytest.raises(ExportError, match=says):
            parse_names(text)
