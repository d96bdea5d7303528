"""Training for real: it learns, it can be killed at any time, and the result does not depend on how it got there."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from edgeft.config import TrainConfig
from edgeft.errors import RunError
from edgeft.pipeline import stages
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train import checkpoint
from edgeft.train.loop import Schedule
from tests.conftest import Edgeft
from tests.support.runs import command, start, wait_for_step


def weights(run: Run) -> dict[str, torch.Tensor]:
    return checkpoint.read(run.best)[0]


def test_schedule() -> None:
    schedule = Schedule(10, TrainConfig(epochs=2.0, batch_rows=4, lr=1.0, warmup=0.34, final_lr=0.1))
    assert (schedule.per_epoch, schedule.steps) == (3, 6)
    rates = [schedule.lr(step) for step in range(6)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates == [*rates[:2], *sorted(rates[2:], reverse=True)]
    assert schedule.lr(6) == pytest.approx(0.1)
    assert max(schedule.validate_after()) == 6
    assert Schedule(10, TrainConfig(epochs=5.0, batch_rows=4, steps=2)).steps == 2
    scaled = TrainConfig(lr=1e-3, lr_width=576)
    assert Schedule(10, scaled, width=2048).peak == pytest.approx(1e-3 * 576 / 2048)
    assert Schedule(10, scaled, width=576).peak == 1e-3
    assert Schedule(10, TrainConfig(lr=1e-3), width=2048).peak == 1e-3
    assert Schedule(10, scaled, width=2048).bias_lr(0) == Schedule(10, scaled, width=2048).lr(0)
    apart = Schedule(10, TrainConfig(lr=1e-3, lr_width=576, bias_lr=2e-3, warmup=0.0), width=2048)
    assert apart.bias_lr(0) == 2e-3  # whatever the width
    assert apart.bias_lr(2) / apart.lr(2) == pytest.approx(2e-3 / apart.peak)
    low_rank = TrainConfig(lr=1e-3, lr_width=576, low_rank_lr=2e-3)
    assert Schedule(10, low_rank, width=2304).low_rank_peak == pytest.approx(5e-4)  # a quarter of the width
    assert Schedule(10, TrainConfig(low_rank_lr=2e-3), width=2304).low_rank_peak == 2e-3
    assert Schedule(10, TrainConfig(lr=1e-3, lr_width=576), width=2304).low_rank_peak == pytest.approx(2.5e-4)
    far = TrainConfig(low_rank_lr=1e-3, lr_loss=3.5)
    peaks = [Schedule(10, far, base_loss=loss).low_rank_peak for loss in (math.nan, 1.0, 3.5, 5.25, 7.0, 70.0)]
    assert peaks == pytest.approx([1e-3, 1e-3, 1e-3, 2.25e-3, 4e-3, 4e-3])
    assert Schedule(10, far, base_loss=7.0).peak == far.lr  # of dense updates it does not change


def test_it_learns_and_the_loss_is_written_down(data: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", data, "train.epochs=3")
    stages.train(run, Progress())
    done = run.read_json(run.done)
    assert done is not None
    assert done["steps"] == 18
    losses = [e["loss"] for e in run.events() if e["event"] == "step"]
    assert len(losses) == 18
    assert sum(losses[-6:]) < 0.8 * sum(losses[:6])
    assert done["best_loss"] == min(e["heldout_loss"] for e in run.events() if e["event"] == "validation" and e["step"])
    assert (run.path.stat().st_mode & 0o777) == 0o700


def test_how_does_not_change_what_is_learned(data: Path, tmp_path: Path) -> None:
    """Micro-batches, recomputation, trees and the trunk cache give the same weights (up to rounding)."""
    ways = {
        "plain": ["how.micro_batch_tokens=4096", "how.trunk_dtype=fp32"],
        "small": ["how.micro_batch_tokens=64", "how.trunk_dtype=fp32"],
        "recompute": ["how.recompute=true", "how.trunk_dtype=fp32"],
        "rows": ["how.tree=false", "how.trunk_dtype=fp32"],
        "rerun": ["how.trunk=rerun"],
        "bf16": ["how.products=bf16"],
    }
    found = {}
    for name, sets in ways.items():
        run = start(tmp_path / name, data, "train.steps=3", "how.compile=on", "how.products=fp32", *sets)
        stages.train(run, Progress())
        done = run.read_json(run.done)
        assert done is not None
        found[name] = done["best_loss"]
    for name in ways:
        assert found[name] == pytest.approx(found["plain"], rel=5e-3 if name == "bf16" else 2e-4), name
    assert found["bf16"] != found["plain"]


def test_a_run_folder_is_for_one_run(data: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", data)
    with pytest.raises(RunError, match="in use"):
        start(tmp_path / "run", data, resume=True)
    assert run._lock is not None
    run._lock.close()
    with pytest.raises(RunError, match="already contains a run"):
        start(tmp_path / "run", data)
    with pytest.raises(RunError, match=r"another recipe: train\.epochs"):
        start(tmp_path / "run", data, "train.epochs=7", resume=True)
    with pytest.raises(RunError, match="no run in"):
        start(tmp_path / "none", data, resume=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="not a run folder"):
        start(tmp_path / "full", data)


@pytest.mark.slow
def test_killed_and_resumed_is_the_same_bit_for_bit(data: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    subprocess.run(command(whole, data, "--until", "export"), check=True, capture_output=True)
    broken = tmp_path / "broken"
    for step in (3, 11):  # killed twice, at different places
        more = ["--resume"] if (broken / "recipe.yaml").exists() else []
        process = subprocess.Popen(command(broken, data, *more), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_step(broken, step, process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run([*command(broken, data, "--resume"), "--until", "export"], check=True, capture_output=True)
    assert (broken / "best.safetensors").read_bytes() == (whole / "best.safetensors").read_bytes()
    assert (broken / "model.gguf").read_bytes() == (whole / "model.gguf").read_bytes()
    last = checkpoint.read(checkpoint.name(broken / "checkpoints", 18))[0]
    for name, tensor in checkpoint.read(checkpoint.name(whole / "checkpoints", 18))[0].items():
        assert torch.equal(tensor, last[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_saves_and_says_how_to_go_on(
    data: Path, tmp_path: Path, edgeft: Edgeft, number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(command(folder, data), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_step(folder, 2, process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert f"edgeft finetune --resume --out {folder}" in stderr.decode()
    assert b"Traceback" not in stderr
    again = edgeft("finetune", "--resume", "--out", folder, "--until", "train", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["steps"] == 18
