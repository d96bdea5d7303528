"""One record says what runs: no stage changes the recipe, and runs of earlier versions still open."""

from __future__ import annotations

import copy
import functools
import json
import re
import shutil
from pathlib import Path

import pytest

from edgeft import config
from edgeft.errors import ConfigError, DamagedError
from edgeft.pipeline import stages
from edgeft.report.render import write_report
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.run.record import Allowance, EngineChoice, Resolved
from edgeft.train import build, checkpoint
from tests.support.runs import Lines, last_checkpoint, start

EARLIER = Path(__file__).parent / "fixtures" / "earlier_run"  # a quickstart, without its weights
MEMORY = Allowance("auto", 4 << 30)


def make_earlier(run: Run) -> None:
    """Rewrites a folder as the version before the record left it."""
    record = run.recorded()
    assert record is not None
    engine = {"kernels": record.engine.kernels, "products": record.engine.products}
    run.write_json(run.path / "engine.json", engine)
    run.recipe_file.write_text(config.dump(config.build(config.Recipe, {}, base=record.asked)))
    run.record.unlink()
    weights, state = checkpoint.read(run.best)
    weights = {name: value for name, value in weights.items() if not name.startswith("adamw.")}
    run.best.unlink()
    checkpoint.write(run.best, weights, {"step": state["step"], "heldout_loss": state["best_loss"]})
    if run._lock is not None:
        run._lock.close()


def test_no_stage_changes_the_recipe_or_the_record(three_blocks: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", three_blocks, "train.steps=2", "how.micro_batch_tokens=512")
    asked, written = copy.deepcopy(run.recipe), run.recipe_file.read_bytes()
    record = b""
    for name in ("prepare", "train", "export", "eval"):
        stages.do_stage(run, name, Progress(), MEMORY)
        assert run.recipe == asked
        assert run.recipe_file.read_bytes() == written
        if name == "train":
            record = run.record.read_bytes()
    assert run.record.read_bytes() == record
    resolved = Run.open(run.path).recorded()
    assert resolved is not None
    assert resolved.asked == asked
    assert (resolved.device, resolved.budget_bytes) == ("auto", 4 << 30)
    assert resolved.recipe.how.compile == "off"
    assert resolved.engine.why == "how.compile: off"
    assert "fits in" in resolved.execution_why
    assert [event.stage for event in run.stages()] == ["prepare", "trunk", "train", "export", "eval"]


def test_a_damaged_record_is_an_error(three_blocks: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", three_blocks)
    for content in ("", "[]", "{}", '{"asked": {}, "recipe": {"hw": 1}}', '{"asked": {}, "recipe": {}, "engine": 3}'):
        run.record.write_text(content)
        with pytest.raises(DamagedError, match=r"resolved\.json is damaged"):
            Run.open(run.path).recorded()


WRONG = {
    "engine is missing": (("engine",), None, "the record has no `engine`"),
    "kernels is missing": (("engine", "kernels"), None, "`engine` has no `kernels`"),
    "engine": (("engine",), 3, "`engine` is not a table of keys"),
    "kernels": (("engine", "kernels"), "yes", "`engine.kernels` must be true or false, not 'yes'"),
    "budget": (("budget_bytes",), "2 GiB", "`budget_bytes` must be a whole number, not '2 GiB'"),
    "device": (("device",), [], "`device` must be text"),
    "search": (("search",), 1, "`search` must be a table of keys"),
    "another key": (("extra",), 1, "unknown key `extra`"),
    "recipe": (("recipe", "train", "lr"), "fast", "`train.lr` must be a number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_in_a_record_is_named(tmp_path: Path, case: str) -> None:
    engine = EngineChoice(kernels=True, products="fp32")
    run = Run.start(tmp_path / "run", config.Recipe(), resume=False)
    run.write_record(Resolved(run.recipe, run.recipe, "auto", 0, engine, "as asked", "as asked"))
    assert Run.open(run.path).recorded() == run.recorded()
    (*path, last), value, says = WRONG[case]
    values = json.loads(run.record.read_text())
    part = functools.reduce(dict.__getitem__, path, values)
    part[last] = value
    if value is None:
        del part[last]
    run.record.write_text(json.dumps(values))
    with pytest.raises(DamagedError, match=re.escape(f"resolved.json is damaged: {says}")) as caught:
        Run.open(run.path).recorded()
    assert "start another run" in caught.value.hint


def test_a_run_of_an_earlier_version_says_what_ran(tmp_path: Path) -> None:
    folder = tmp_path / "earlier"
    shutil.copytree(EARLIER, folder)
    run = Run.open(folder)
    record = run.recorded()
    assert record is not None
    assert (record.engine.kernels, record.engine.products) == (True, "bf16")
    assert record.recipe.how.optimizer_state == "bf16"  # as the search and the plan chose; recipe.yaml says fp32
    assert (record.recipe.how.compile, record.recipe.how.products) == ("on", "bf16")
    assert len(record.recipe.update.parts) > 10
    assert record.search["trained_parameters"] == 46152768
    assert not run.needs_search
    assert run.peaks()["search"] == json.loads((EARLIER / "peaks.json").read_text())["search"]
    assert "SmolLM2" in write_report(run).read_text()


def test_a_damaged_plan_of_an_earlier_version_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "earlier"
    shutil.copytree(EARLIER, folder)
    (folder / "plan.json").write_text('{"budget_bytes": "much", "how": 3}')
    record = Run.open(folder).recorded()
    assert record is not None
    assert record.budget_bytes == 0


def test_what_this_version_cannot_do_is_not_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "earlier"
    shutil.copytree(EARLIER, folder)
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text.replace("rounding: stochastic", "rounding: carry"))
    recipe = Run.open(folder).recipe  # it opens, to be scored and exported
    with pytest.raises(ConfigError, match=r"update\.rounding.*carry"):
        Run.start(folder, recipe, resume=True)


def test_a_run_of_an_earlier_version_is_exported_and_resumed(three_blocks: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", three_blocks, "train.steps=4", "train.validations=1", "how.keep_checkpoints=2")
    stages.train(run, Progress())
    weights = last_checkpoint(run)
    make_earlier(run)
    earlier = Run.open(run.path)
    assert earlier.effective.how.products == "fp32"
    build.trained_stack(earlier)
    made = stages.export(earlier, "gguf", "auto", earlier.model, Progress())
    assert made["check"]["top1"] > 90
    run.done.unlink()
    checkpoint.all_of(run.checkpoints)[-1].unlink()
    said = Lines()
    again = Run.start(run.path, earlier.recipe, True)
    stages.train(again, said)
    assert any("resumed after step 3" in line for line in said.lines)
    assert all(value.equal(weights[name]) for name, value in last_checkpoint(run).items())
    assert again.record.is_file()
