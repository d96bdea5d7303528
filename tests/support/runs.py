"""Short runs for tests: started in this process or as a command, and what is read from them."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path

import torch

from edgeft import config
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train import checkpoint

# few and small tensors above a high cut: a step takes a fraction of a second
QUICK = ["update.tensors=v,o", "train.batch_rows=2", "train.lr=1e-3", "how.threads=1", "how.trunk_place=run"]
WHOLE_MODEL = [*QUICK, "update.blocks=27-28"]
THREE_BLOCKS = [*QUICK, "update.blocks=[1]", "train.epochs=2", "how.checkpoint_s=0", "how.compile=off"]


class Lines(Progress):
    """Remembers the lines that were printed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def start(folder: Path, data: Path, *sets: str, resume: bool = False) -> Run:
    """A run on these rows; of the model beside them, where there is one (the fixture `three_blocks`)."""
    recipe = config.load_recipe("sparse-search")
    cut = data.with_name("model.gguf")
    quick = [f"model.path={cut}", *THREE_BLOCKS] if cut.exists() else WHOLE_MODEL
    return Run.start(folder, config.apply_sets(recipe, [f"data.path={data}", *quick, *sets]), resume)


def again(run: Run) -> Run:
    """As another process would open it."""
    if run._lock is not None:
        run._lock.close()
    gc.collect()  # a trainer that is done with holds its run, and so the lock
    return Run.start(run.path, Run.open(run.path).recipe, True)


def last_checkpoint(run: Run) -> dict[str, torch.Tensor]:
    return checkpoint.read(checkpoint.all_of(run.checkpoints)[-1])[0]


def command(folder: Path, data: Path, *more: str) -> list[str]:
    sets = [part for s in [*WHOLE_MODEL, "train.epochs=3", "how.checkpoint_s=0"] for part in ("--set", s)]
    return [sys.executable, "-m", "edgeft", "finetune", "--data", str(data), "--out", str(folder), *sets, *more]


def wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        events = Run.open(run).events() if (run / "recipe.yaml").exists() else []
        if any(event["event"] == "step" and event["step"] >= step for event in events):
            return
        assert process.poll() is None, "it ended before it could be stopped"
        time.sleep(0.02)
    raise AssertionError("it did not get there")
