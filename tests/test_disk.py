"""Checkpoints take the space of two, wherever a run is killed, and a plan counts the bytes that are written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from edgeft import config, plan
from edgeft.config import TrainConfig
from edgeft.errors import DamagedError
from edgeft.host.files import path_size
from edgeft.methods import scheme as schemes
from edgeft.pipeline import stages
from edgeft.plan import disk, fit
from edgeft.plan.fit import Job, Machine
from edgeft.plan.rows import Workload
from edgeft.plan.seconds import Rates
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.run.record import Allowance
from edgeft.train import build, checkpoint, loop
from edgeft.ui.plan import lines as plan_lines
from tests.support.rows import random_row
from tests.support.runs import Lines, start

GB = 10**9
LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0, 5: 2.5, 6: 2.2}  # held-out; the best before the last
SIX = ["train.steps=6", "train.validations=6"]


def again(run: Run) -> Run:
    if run._lock is not None:
        run._lock.close()
    return Run.start(run.path, Run.open(run.path).recipe, True)


@pytest.fixture(params=["hard links", "no hard links"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # as FAT and Android say

    if request.param == "no hard links":
        monkeypatch.setattr(os, "link", refuse)
    return bool(request.param == "hard links")


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.Trainer, "heldout_loss", lambda self: LOSSES.get(self.step, 9.0))


def steps(run: Run) -> list[int]:
    return [checkpoint.read(path, checkpoint.skip)[1]["step"] for path in checkpoint.all_of(run.checkpoints, run.best)]


def newest(run: Run) -> bytes:
    return checkpoint.all_of(run.checkpoints, run.best)[-1].read_bytes()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


# ---------------------------------------------------------------- space


@pytest.mark.usefixtures("losses", "links")
@pytest.mark.parametrize("keep", [1, 2])
def test_checkpoints_never_take_more_space_than_planned(
    three_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    """Measured around every rename: before it, the file being written is complete."""
    run = start(tmp_path / "run", three_blocks, *SIX, f"how.keep_checkpoints={keep}")
    sizes: list[int] = []
    complete: list[int] = []
    plain = os.replace

    def measure() -> None:
        temporary = list(run.path.glob(".best*.tmp"))
        sizes.append(path_size(run.checkpoints, run.best, *temporary))
        complete.append(len(checkpoint.all_of(run.checkpoints, run.best)))

    def replace(source: Any, target: Any) -> None:
        measure()
        plain(source, target)
        measure()

    monkeypatch.setattr(os, "replace", replace)
    stages.train(run, Progress())
    each = checkpoint.name(run.checkpoints, 6).stat().st_size
    assert max(sizes) == (keep + 1) * each  # it is used, not exceeded
    saved = complete.index(1)  # that of step 0
    assert min(complete[saved:]) == 1
    assert steps(run) == ([4, 6] if keep == 1 else [4, 5, 6])
    assert checkpoint.read(run.best, checkpoint.skip)[1]["best_step"] == 4


@pytest.mark.usefixtures("losses")
def test_killed_at_every_write_it_ends_with_the_same_bytes(
    three_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    whole = start(tmp_path / "whole", three_blocks, *SIX)
    stages.train(whole, Progress())
    assert whole.best.stat().st_nlink == (2 if links else 1)
    killed: set[tuple[str, str]] = set()

    class Killed(Exception):
        pass

    def kill_once(function: str) -> None:
        """Before it, once for each file that it is called with."""
        plain: Callable[..., Any] = getattr(checkpoint, function)

        def call(path: Path, *args: Any) -> Any:
            if (function, path.name) not in killed:
                killed.add((function, path.name))
                raise Killed
            return plain(path, *args)

        monkeypatch.setattr(checkpoint, function, call)

    kill_once("write")
    kill_once("name_best")
    run = start(tmp_path / "run", three_blocks, *SIX)
    for _ in range(20):
        try:
            stages.train(run, Progress())
            break
        except Killed:
            run = again(run)
    assert {name for function, name in killed if function == "write"} == {
        f"step-0000000{step}.safetensors" for step in range(7)
    }
    assert sum(function == "name_best" for function, _ in killed) == 3  # steps 1, 2 and 4
    assert newest(run) == newest(whole)
    assert run.best.read_bytes() == whole.best.read_bytes()
    done = run.read_json(run.done)
    assert done is not None
    assert done["train_seconds"] > 0


@pytest.mark.usefixtures("losses", "links")
def test_the_best_is_resumed_from_when_the_newest_is_damaged(three_blocks: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", three_blocks, *SIX)
    stages.train(run, Progress())
    last, best = newest(run), run.best.read_bytes()
    flip(checkpoint.name(run.checkpoints, 6))
    run.done.unlink()
    said = Lines()
    stages.train(run := again(run), said)
    assert "resumed after step 4" in said.lines
    assert [e["file"] for e in run.events() if e["event"] == "damaged"] == ["step-00000006.safetensors"]
    assert newest(run) == last
    assert run.best.read_bytes() == best

    flip(checkpoint.name(run.checkpoints, 6))
    flip(run.best)
    with pytest.raises(DamagedError, match=r"best\.safetensors is damaged"):
        build.trained_stack(run)
    run.done.unlink()
    said = Lines()
    stages.train(run := again(run), said)
    assert "no checkpoint is left to resume from: training starts again" in said.lines
    assert newest(run) == last
    assert run.best.read_bytes() == best


def test_the_best_is_listed_once_and_before_what_replaces_it(tmp_path: Path) -> None:
    folder, best = tmp_path / "checkpoints", tmp_path / "best.safetensors"
    state: dict[str, Any] = {"optimizer": {}}
    for step in (3, 5, 8):
        checkpoint.write(checkpoint.name(folder, step), {"a": torch.full((3,), float(step))}, {"step": step, **state})
    three, five, eight = (checkpoint.name(folder, step) for step in (3, 5, 8))
    assert checkpoint.all_of(folder, best) == [three, five, eight]
    checkpoint.name_best(five, best)
    checkpoint.name_best(five, best)  # nothing to do
    assert checkpoint.all_of(folder, best) == [three, five, eight]
    assert not list(tmp_path.glob(".*"))
    five.unlink()
    assert checkpoint.all_of(folder, best) == [three, best, eight]
    checkpoint.write(five, {"a": torch.zeros(3)}, {"step": 5, **state})  # rolled back to the best
    assert checkpoint.all_of(folder, best) == [three, best, five, eight]
    checkpoint.make_room(folder, best, 2)
    assert checkpoint.all_of(folder, best) == [best, eight]
    checkpoint.write(best, {"a": torch.zeros(3)}, {"step": 5, "heldout_loss": 1.0})  # of an earlier version
    assert checkpoint.all_of(folder, best) == [eight]
    checkpoint.make_room(folder, best, 1)
    assert checkpoint.all_of(folder, best) == [eight]  # the only one to resume from


# ---------------------------------------------------------------- how often


def test_checkpoints_are_rarer_on_a_disk_that_they_would_wear_out() -> None:
    hour, day = 3600.0, 86400.0
    assert disk.save_every(0, day, 9.0, 0.5) == 0  # asked for
    assert disk.save_every(120, hour, 0.1, 0.0) == 120  # an unknown disk
    assert disk.save_every(120, 0.0, 0.1, 0.5) == 120  # no plan
    assert disk.save_every(120, hour, 6.0, 1e-6) == 300  # 2 % of the time
    assert disk.save_every(120, hour, 1.0, 50e6 / 32e9) == 120  # 30 × 50 MB of a card of 32 GB
    rarer = disk.save_every(120, hour, 1.0, 500e6 / 32e9)
    assert hour / rarer * 500e6 == pytest.approx(32e9 / 10)
    assert disk.save_every(120, day, 1.0, 300e6 / 32e9) == 1200  # 72 × 300 MB: 0.7 of the card
    assert disk.save_every(1800, day, 1.0, 300e6 / 32e9) == 1800
    tiny = disk.save_every(120, day, 1.0, 1e9 / 16e9)
    assert day / tiny * 1e9 == pytest.approx(16e9)


def test_saves_are_counted() -> None:
    train = TrainConfig(validations=4)
    assert disk.expected_saves(train, 100, 1000.0, 0) == 100  # after every step
    assert disk.expected_saves(train, 100, 400.0, 120) == 4
    assert disk.expected_saves(train, 100, 1000.0, 120) == 4 * 3
    assert disk.expected_saves(train, 2, 1000.0, 120) == 2


# ---------------------------------------------------------------- the plan


def job(source: Path, recipe: config.Recipe, disk_bytes: int = 0) -> Job:
    rows = [random_row(64, 8, seed) for seed in range(12)]
    machine = Machine("a board", Rates(1e9, 0.0, 0.0, 1e9, 3e7, "made up"), True, 2, "fp32", False, False, disk_bytes)
    shape = plan.shape_of(str(source), recipe.model.frozen)
    return Job(recipe, shape, Workload(rows[4:], rows[:4], recipe), machine)


KINDS = {
    "adamw": ("sparse-bp", "update.low_rank=0"),
    "low rank": ("sparse-bp", "update.low_rank=16", "train.average=0"),
    "averaged": ("sparse-bp", "update.low_rank=16", "train.average=0.9"),
    "lora": ("lora", "model.frozen=auto"),
    "tinytl": ("tinytl",),
    "8bit": ("sparse-bp", "update.low_rank=0", "how.optimizer_state=8bit", "how.compile=on"),
    "bf16 weights": ("sparse-rule", "how.weights=bf16", "how.optimizer_state=8bit", "how.compile=on"),
    "sgd": ("sparse-bp", "train.optimizer=sgd"),
    "sgd without momentum": ("sparse-bp", "update.low_rank=0", "train.optimizer=sgd", "train.momentum=0"),
    "qas": ("qas-int8",),
    "qas, sgd, 8bit": ("qas-int8", "train.optimizer=sgd", "how.optimizer_state=8bit"),
    "cycle": ("cycle", "update.cycle_blocks=1", "update.cycle_steps=1"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_the_size_that_is_planned(three_blocks: Path, tmp_path: Path, kind: str) -> None:
    name, *sets = KINDS[kind]
    source = three_blocks.with_name("model.gguf")
    files = [f"data.path={three_blocks}", f"model.path={source}", "how.compile=off", "how.trunk_place=run"]
    small = ["update.blocks=1-2", "update.tensors=v,up", "train.steps=2", "train.batch_rows=2", "how.threads=1"]
    recipe = config.apply_sets(config.load_recipe(name), [*files, *small, *sets])
    run = Run.start(tmp_path / "run", recipe, False)
    shape = plan.shape_of(str(source), "auto")
    scheme = schemes.make(recipe.update, shape.depth, shape.arch)
    needs = {what: size for _, what, size in disk.disk_needs(run, shape, scheme)}
    assert needs["checkpoints"] == disk.disk_bytes(job(source, recipe))["checkpoints"]
    stages.train(run, Progress())
    assert needs["checkpoints"] == pytest.approx(2 * len(newest(run)), rel=0.02)


@pytest.mark.parametrize(
    "sets",
    [
        ["train.steps=5"],
        ["train.steps=6", "how.checkpoint_s=120"],
        ["train.steps=2", "train.validations=1", "update.blocks=[2]", "how.trunk_order=blocks"],
    ],
    ids=["every step", "at validations", "trunk by blocks"],
)
def test_the_plan_foresees_what_is_written(three_blocks: Path, tmp_path: Path, sets: list[str]) -> None:
    run = start(tmp_path / "run", three_blocks, "update.tensors=v,o,up,down", *sets)
    process = psutil.Process()
    before = process.io_counters().write_chars
    stages.train(run, Progress(), Allowance(budget_bytes=4 << 30))
    stages.export(run, "gguf", "q8_0", run.model, Progress())  # `auto` may write less
    written = process.io_counters().write_chars - before
    figures = run.read_json(run.plan)
    assert figures is not None
    assert figures["written"].keys() == figures["disk"].keys()
    assert sum(figures["written"].values()) == pytest.approx(written, rel=0.2)
    saved = [event for event in run.events() if event["event"] == "checkpoint"]
    weights = sum(value.nbytes for name, value in checkpoint.read(run.best)[0].items() if not name.startswith("adamw."))
    size = (len(saved) - 1) * run.best.stat().st_size + weights  # that of step 0 has no moments
    assert figures["written"]["checkpoints"] == pytest.approx(size, rel=0.03)
    assert figures["written"]["exported model"] == pytest.approx(run.model.stat().st_size, rel=0.01)
    states = path_size(run.trunk / "states.bin")
    assert figures["written"]["trunk cache"] == states == figures["disk"]["trunk cache"]


def test_the_plan_says_what_is_needed_and_written(three_blocks: Path) -> None:
    recipe = config.apply_sets(config.load_recipe("sparse-bp"), ["update.blocks=1-2"])
    _, figures = fit.make(job(three_blocks.with_name("model.gguf"), recipe), 4 << 30)
    needed, written = (config.format_size(sum(figures[key].values())) for key in ("disk", "written"))
    (line,) = [line for line in plan_lines(figures) if line.startswith("disk:")]
    assert line.startswith(f"disk: {needed} needed (trunk cache ")
    assert line.endswith(f"); about {written} written in all")
    assert "best" not in line  # it is one of the checkpoints


def test_a_small_disk_is_written_less(three_blocks: Path) -> None:
    recipe = config.apply_sets(
        config.load_recipe("sparse-bp"), ["update.blocks=1-2", "update.low_rank=0", "train.epochs=2000"]
    )
    source = three_blocks.with_name("model.gguf")
    written = []
    for size in (0, 10_000 * GB, 100 * GB, GB):
        planned = job(source, recipe, size)
        clock = planned.clock()
        took = clock.stages()["train"]
        each = sum(disk.checkpoint_bytes(recipe, planned.shape, planned.scheme))
        written.append(disk.written_bytes(planned, clock.saves)["checkpoints"])
        assert written[-1] == pytest.approx(clock.saves * each, rel=0.2)
        if size:
            limit = min(size, max(0.1 * size, took / disk.RARE_S * each))
            assert written[-1] <= limit + (recipe.train.validations + 1) * each
    assert written[0] == written[1] > written[2] > written[3]
