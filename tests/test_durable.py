"""Nothing is lost: checkpoints that rot, disks that fill, processes that are killed, numbers that go bad."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from edgeft import arch, config, plan
from edgeft.errors import DamagedError, EdgeftError, RunError
from edgeft.host.files import check_space, sweep
from edgeft.methods import scheme as schemes
from edgeft.pipeline import resolve, stages
from edgeft.plan import disk, memory
from edgeft.run.events import ResumeEvent
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.run.record import Allowance
from edgeft.train import build, checkpoint, loop, trunk
from edgeft.train.totals import Remaining
from tests.conftest import Edgeft
from tests.support.rows import random_row
from tests.support.runs import THREE_BLOCKS, Lines, again, start
from tests.support.runs import last_checkpoint as last

HARNESS = Path(__file__).parent / "harness"


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------- files that rot


def test_any_bit_that_changed_is_found(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001.safetensors"
    tensors = {"a": torch.arange(700.0), "b": torch.ones(3, 5)}
    checkpoint.write(path, tensors, {"step": 1, "text": 'with "crc32": "quotes"'})
    found, state = checkpoint.read(path)
    assert same(found, tensors)
    assert state["step"] == 1
    whole = path.read_bytes()
    for place in {*range(0, len(whole), 7), *range(200), len(whole) - 1}:
        for bit in (0, 5):
            torn = bytearray(whole)
            torn[place] ^= 1 << bit
            path.write_bytes(torn)
            with pytest.raises(DamagedError):
                checkpoint.read(path)
    for size in {0, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedError):
            checkpoint.read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DamagedError):
        checkpoint.read(path)
    path.unlink()
    with pytest.raises(RunError, match="no such file"):
        checkpoint.read(path)


def test_the_one_before_a_damaged_checkpoint_is_used_and_told(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.write(checkpoint.name(tmp_path, step), {"a": torch.full((3,), float(step))}, {"step": step})
    newest = checkpoint.name(tmp_path, 3)
    newest.write_bytes(newest.read_bytes()[:-5])
    told: list[tuple[Path, str]] = []
    found = checkpoint.newest(tmp_path, lambda path, what: told.append((path, what)))
    assert found is not None
    assert found[1]["step"] == 2
    assert [path for path, _ in told] == [newest]
    assert "damaged" in told[0][1]
    checkpoint.make_room(tmp_path, tmp_path / "best.safetensors", 2)
    assert [path.name for path in checkpoint.all_of(tmp_path)] == [
        "step-00000001.safetensors",
        "step-00000002.safetensors",
    ]  # the damaged one does not count


@pytest.mark.slow
def test_a_run_goes_on_from_damaged_files_to_the_same_weights(three_blocks: Path, tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", three_blocks)
    stages.train(whole, Progress())
    steps = [path.name for path in checkpoint.all_of(whole.checkpoints)]
    assert steps == ["step-00000006.safetensors", "step-00000008.safetensors"]  # one to fall back to
    best = checkpoint.read(whole.best)
    done = whole.read_json(whole.done)
    assert done is not None
    assert done["best_step"] == 8
    wanted = last(whole)

    flipped = bytearray(checkpoint.all_of(whole.checkpoints)[-1].read_bytes())
    flipped[len(flipped) // 2] ^= 4
    checkpoint.all_of(whole.checkpoints)[-1].write_bytes(flipped)
    whole.done.unlink()
    said = Lines()
    stages.train(again(whole), said)
    assert any("step-00000008.safetensors is damaged: its checksum is wrong" in line for line in said.lines)
    assert any("resumed after step 6" in line for line in said.lines)
    assert [e["file"] for e in whole.events() if e["event"] == "damaged"] == ["step-00000008.safetensors"]
    assert same(last(whole), wanted)
    assert same(checkpoint.read(whole.best)[0], best[0])

    torn = whole.best.read_bytes()[:-1]
    whole.best.unlink()  # in a copied folder it is a file of its own; the last checkpoint is of the same step
    whole.best.write_bytes(torn)
    said = Lines()
    build.trained_stack(whole, said)
    assert "restored from the checkpoint of step 8" in said.lines[-1]
    assert same(checkpoint.read(whole.best)[0], best[0])
    assert checkpoint.read(whole.best)[1] == best[1]

    whole.best.write_bytes(b"")
    for path in checkpoint.all_of(whole.checkpoints):
        path.unlink()
    with pytest.raises(DamagedError, match=r"best\.safetensors is damaged") as caught:
        build.trained_stack(whole)
    assert caught.value.exit_code == 6
    assert "--resume" in caught.value.hint
    whole.done.unlink()
    stages.train(again(whole), Progress())  # as the hint says
    assert same(checkpoint.read(whole.best)[0], best[0])


def test_a_resumed_run_keeps_its_plan(three_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned may need less by then (kernels were compiled), and other micro-batches round otherwise."""
    rows = [random_row(256, 8, seed) for seed in range(48)]
    run = start(tmp_path / "run", three_blocks, "how.micro_batch_tokens=4096", "how.compile=off")

    def resolved(budget_bytes: int) -> tuple[config.ExecutionConfig, int]:
        """As the train stage does: (how, planned peak)."""
        fresh = again(run)
        asked = copy.deepcopy(fresh.recipe)
        record, _ = resolve.resolve(fresh, (rows, rows[:4]), Allowance(budget_bytes=budget_bytes), Progress())
        assert fresh.recipe == asked == record.asked
        figures = fresh.read_json(fresh.plan)
        assert figures is not None
        return record.recipe.how, figures["peak_bytes"]

    asked, free = resolved(64 << 30)
    budget = int(0.95 * free)
    tight, _ = resolved(budget)
    assert tight != asked
    written = run.record.read_bytes()
    monkeypatch.setattr(memory, "TRANSFORMERS_BYTES", 1 << 20)  # everything needs less now
    run.plan.write_text('{"peak_bytes": 1}')  # figures, not the record
    assert resolved(budget)[0] == tight
    assert run.record.read_bytes() == written
    assert resolved(budget + 1)[0] == asked  # told otherwise


def test_what_a_killed_process_left_is_taken_away(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / f".recipe.yaml.{gone.pid}.tmp").write_text("name: sp")  # killed before there was a run
    run = Run.start(folder, config.Recipe(), False)
    (run.checkpoints).mkdir()
    left = [run.checkpoints / f".step-00000003.safetensors.{gone.pid}.tmp", folder / f".base.{gone.pid}.x8_fa.tmp"]
    left[0].write_text("half")
    left[1].mkdir()
    (left[1] / "base.gguf").write_text("half")
    mine = folder / f".done.json.{os.getpid()}.tmp"
    mine.write_text("{")
    again(run)
    assert not any(path.exists() for path in left)
    assert mine.exists()  # somebody writes it
    sweep(tmp_path / "nowhere")


def test_a_line_that_was_cut_off_costs_only_itself(tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", config.Recipe(), False)
    run.log(ResumeEvent(1))
    with run.metrics.open("a") as file:
        file.write('{"time": 1, "eve')
    run.log(ResumeEvent(2))
    run.log(ResumeEvent(3))
    assert [event["step"] for event in run.events()] == [1, 2, 3]


# ---------------------------------------------------------------- numbers that go bad


def poison(monkeypatch: pytest.MonkeyPatch, steps: dict[int, float], times: int = 1) -> None:
    """The gradient of one value is multiplied at these steps, the first so many times that they are taken."""
    plain = loop.Trainer.loss
    left = dict.fromkeys(steps, times)

    def loss(self: loop.Trainer, nodes: Any, batch: Any) -> torch.Tensor:
        found = plain(self, nodes, batch)
        number = self.step + 1
        if torch.is_grad_enabled() and left.get(number, 0):
            left[number] -= 1
            if math.isnan(steps[number]):
                return found * math.nan
            found.register_hook(lambda grad: grad * steps[number])  # a loss that is a number, a gradient that is none
        return found

    monkeypatch.setattr(loop.Trainer, "loss", loss)


@pytest.mark.parametrize("how", [[], ["how.step_in_place=true"]], ids=["together", "in place"])
def test_a_bad_step_changes_nothing_and_is_counted(
    how: list[str], three_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {1: math.nan, 3: math.inf})
    run = start(tmp_path / "run", three_blocks, "train.steps=3", "how.keep_checkpoints=9", "train.validations=1", *how)
    said = Lines()
    stages.train(run, said)
    skipped = [(e["step"], e["why"]) for e in run.events() if e["event"] == "skipped"]
    assert skipped == [(1, "the loss is nan"), (3, "the gradient's norm is nan")]  # 0 × inf
    assert len([line for line in said.lines if line.endswith("skipped")]) == 2
    done = run.read_json(run.done)
    assert done is not None
    assert (done["skipped_steps"], done["rate_factor"], done["best_step"]) == (2, 1.0, 3)
    before, after = (checkpoint.read(checkpoint.name(run.checkpoints, step)) for step in (2, 3))
    assert same(before[0], after[0])  # weights and moments
    assert after[1]["guard"] == {"skipped": 2, "in_row": 1, "rate": 1.0}
    assert all(tensor.isfinite().all() for tensor in after[0].values())


@pytest.mark.slow
def test_several_in_a_row_lead_back_once_at_half_the_rate(
    three_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {5: math.nan, 6: math.inf, 7: math.nan})
    run = start(tmp_path / "run", three_blocks)
    stages.train(run, Progress())
    events = run.events()
    assert [e["step"] for e in events if e["event"] == "back"] == [4]  # the best so far
    taken = [(e["step"], e["lr"]) for e in events if e["event"] == "step"]
    assert [step for step, _ in taken] == [1, 2, 3, 4, 5, 6, 7, 8]
    schedule = loop.Schedule(8, run.recipe.train)
    assert taken[3][1] == pytest.approx(schedule.lr(3))
    assert taken[4][1] == pytest.approx(schedule.lr(4) / 2)
    wanted = last(run)

    class Killed(Exception):
        pass

    for stop in (5, 6, 7):  # killed after each of the bad steps, before and after going back
        monkeypatch.undo()
        poison(monkeypatch, {5: math.nan, 6: math.inf, 7: math.nan}, times=1)
        plain = loop.Trainer._skip_step

        def skipped(self: loop.Trainer, loss: float, norm: float, stop: int = stop, plain: Any = plain) -> None:
            at = self.step
            plain(self, loss, norm)
            if at == stop:
                if at < 7:
                    self.save()
                raise Killed

        monkeypatch.setattr(loop.Trainer, "_skip_step", skipped)
        broken = start(tmp_path / f"killed-{stop}", three_blocks)
        with pytest.raises(Killed):
            stages.train(broken, Progress())
        monkeypatch.setattr(loop.Trainer, "_skip_step", plain)
        stages.train(again(broken), Progress())
        assert same(last(broken), wanted), stop
        assert same(checkpoint.read(broken.best)[0], checkpoint.read(run.best)[0])


def test_a_rate_that_is_far_too_high_ends_with_an_explanation(three_blocks: Path, tmp_path: Path) -> None:
    """For real: weights of 1e30 make every loss infinite, at half the rate as well."""
    run = start(
        tmp_path / "run", three_blocks, "train.lr=1e30", "train.epochs=9", "train.validations=2", "train.warmup=0"
    )
    said = Lines()
    with pytest.raises(EdgeftError, match="diverged again, at half the learning rate") as caught:
        stages.train(run, said)
    assert caught.value.exit_code == 1
    assert "--set train.lr=1.25e+29" in caught.value.hint
    assert "rolled back to step 0, at half the learning rate" in said.lines
    assert not run.done.exists()
    json.loads(run.metrics.read_text().splitlines()[-1])


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from edgeft import config; from edgeft.run.folder import Run; "
        "run = Run.start(Path(sys.argv[1]), config.Recipe(), False); print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(RunError, match="in use by another process"):
        Run.start(tmp_path / "run", config.Recipe(), True)
    process.kill()
    process.wait()
    process.stdout.close()
    assert (tmp_path / "run" / "lock").exists()
    Run.start(tmp_path / "run", config.Recipe(), True)


def test_checkpoints_take_a_small_share_of_the_time(three_blocks: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", three_blocks)
    trainer: Any = loop.Trainer.__new__(loop.Trainer)
    trainer.recipe, trainer.save_s, trainer.save_bytes, trainer.disk_bytes = run.recipe, 6.0, 10, 10**6
    trainer.remaining = Remaining({"stages": {"train": {"seconds": 3600.0}}}, 100)
    assert trainer._save_every() == 0
    trainer.recipe = config.apply_sets(run.recipe, ["how.checkpoint_s=120"])
    assert trainer._save_every() == 300
    trainer.save_s = random.uniform(0, 2.4)
    assert trainer._save_every() == 120
    trainer.disk_bytes = 1000  # a hundred checkpoints fill it
    assert trainer._save_every() == pytest.approx(360)
    trainer.remaining.step(72.0)  # twice as long as planned
    assert trainer._save_every() == pytest.approx(540)


# ---------------------------------------------------------------- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(place)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no disk can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_an_error_and_costs_nothing(small_disk: Path) -> None:
    """For real: checkpoints and the trunk's reservation on a disk that is too small for a second one."""
    first, second = (checkpoint.name(small_disk / "checkpoints", step) for step in (1, 2))
    tensors = {"a": torch.randn(500_000)}  # 2 MB
    checkpoint.write(first, tensors, {"step": 1})
    with pytest.raises(RunError, match="no space left") as caught:
        checkpoint.write(second, tensors, {"step": 2})
    assert caught.value.exit_code == 6
    assert "free some space" in caught.value.hint
    assert list(first.parent.iterdir()) == [first]
    assert same(checkpoint.read(first)[0], tensors)
    states = trunk.RowFile(small_disk / "states.bin", 1, write=True)
    with pytest.raises(OSError, match="No space left"):
        states.reserve(2 << 20)
    states.close()


def test_a_disk_that_is_too_small_is_told_before_the_start(
    three_blocks: Path, small_disk: Path, edgeft: Edgeft
) -> None:
    sets = [part for s in THREE_BLOCKS for part in ("--set", s)]
    options = ["--model", three_blocks.with_name("model.gguf"), "--data", three_blocks, *sets]
    result = edgeft("finetune", "--out", small_disk / "run", *options)
    assert result.returncode == 6
    assert "this run will write" in result.stderr
    assert "exported model" in result.stderr
    assert "2.9 MiB are free" in result.stderr or "3.0 MiB are free" in result.stderr
    assert not (small_disk / "run").exists()  # nothing was begun


def test_what_a_run_will_write(three_blocks: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", three_blocks, "how.keep_checkpoints=3", "train.steps=5", "train.validations=1")
    source = str(run.recipe.model.path)
    shape = plan.shape_of(source, "auto")
    scheme = schemes.make(run.recipe.update, shape.depth, arch.get("llama"))
    foreseen = {what: size for _, what, size in disk.disk_needs(run, shape, scheme)}
    said = Lines()
    stages.train(run, said)
    assert "checkpoints" not in {what for _, what, _ in disk.disk_needs(run, shape, scheme)}  # it is done
    assert [path.name for path in checkpoint.all_of(run.checkpoints)] == [
        f"step-0000000{step}.safetensors" for step in (0, 3, 4, 5)
    ]
    assert run.best.samefile(checkpoint.name(run.checkpoints, 5))
    assert foreseen["checkpoints"] == pytest.approx(4 * run.best.stat().st_size, rel=0.01)
    run.done.unlink()
    first = checkpoint.name(run.checkpoints, 0).stat().st_size  # without moments
    left = {what: size for _, what, size in disk.disk_needs(run, shape, scheme)}["checkpoints"]
    assert left == pytest.approx(run.best.stat().st_size - first, rel=0.1)  # a file with two names counts once
    made = stages.export(run, "gguf", "q8_0", run.model, said)  # `auto` may write less
    assert foreseen["exported model"] == pytest.approx(made["bytes"], rel=0.001)
    with pytest.raises(RunError, match=r"will write 9313225.75 GiB below .* \(checkpoints 9313225.75 GiB\)"):
        check_space([(tmp_path, "checkpoints", 10**16), (tmp_path / "not" / "there", "trunk cache", 0)])
    check_space([(tmp_path, "checkpoints", 1)])


# ---------------------------------------------------------------- all of it, for real


def script(name: str, *args: str) -> str:
    """The last line of what it prints."""
    env = {**os.environ, "PYTHONPATH": str(HARNESS.parents[1])}
    result = subprocess.run(
        [sys.executable, str(HARNESS / name), *args], capture_output=True, text=True, timeout=600, env=env
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()[-1]


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_bits() -> None:
    found = re.match(r"(\d+) of (\d+) kills survived with identical results", script("crash.py", "--rounds", "4"))
    assert found
    assert int(found[1]) == int(found[2]) >= 8


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs LD_PRELOAD and a C compiler")
def test_any_write_may_fail() -> None:
    errors = [part for name in ("ENOSPC", "EIO", "EROFS", "KILL") for part in ("--error", name)]
    assert script("write_failures.py", "--sample", "12", *errors).startswith("12 of 12 write failures recovered from")
