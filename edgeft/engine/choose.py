"""Which engine trains: the compiled kernels, with float32 or bf16 products, or transformers' own blocks in plain torch.

They round differently, so a run keeps the one that it began with.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from edgeft.engine import compiled, kernels
from edgeft.engine.kernels import Kernels
from edgeft.errors import ConfigError, EdgeftError
from edgeft.host import cache
from edgeft.run.folder import Run
from edgeft.run.progress import Progress

SLOWER = "training runs in plain torch, at about half the speed"


@dataclass(frozen=True)
class Engine:
    kernels: Kernels | None  # None: plain torch
    half: bool = False  # products of bf16 operands


def choose(run: Run, head_width: int, gate: str, flops: float, progress: Progress) -> Engine:
    """flops: work that is planned."""
    note = run.path / "engine.json"
    before = run.read_json(note) or {}  # damaged or of another form: as if there were none
    kernels_before, half_before = before.get("kernels"), before.get("half")
    wanted = kernels_before if isinstance(kernels_before, bool) else _wanted(run, flops, progress)
    found = _load(progress) if wanted else None
    if found is not None and not found.able(head_width, gate):
        if run.recipe.how.compile == "on" or run.recipe.train.token_share < 1:
            raise EdgeftError("edgeft's kernels cannot run this model's heads", "--set how.compile=off")
        progress.line(f"edgeft's kernels cannot run this model's heads: {SLOWER}")
        found = None
    half = half_before if isinstance(half_before, bool) else _half(run.recipe.how.products, found is not None)
    run.write_json(note, {"kernels": found is not None, "half": half})
    return Engine(found, half)


def recalled(run: Run) -> Engine | None:
    """The kernels that trained a run, if they are still here; float32, since what is exported is compared with it."""
    before = run.read_json(run.path / "engine.json") or {}
    return Engine(kernels.load()) if before.get("kernels") is True and compiled.is_built() else None


def _half(products: str, kernels: bool) -> bool:
    if products == "bf16" and not kernels:
        raise ConfigError("`how.products: bf16` needs edgeft's kernels", "--set how.compile=on, or how.products=fp32")
    if products != "auto" or not kernels:
        return products == "bf16"
    return compiled.multiplies_bf16()


def _load(progress: Progress) -> Kernels:
    if compiled.is_built():
        return kernels.load()
    begin = time.monotonic()
    found = kernels.load()
    progress.line(f"compiled edgeft's kernels for this processor, once, in {time.monotonic() - begin:.1f} s")
    return found


def _wanted(run: Run, flops: float, progress: Progress) -> bool:
    """auto: where they are there already, or the planned work pays for compiling them."""
    recipe = run.recipe
    if recipe.train.token_share < 1:
        if recipe.how.compile == "off" or not recipe.how.supervised_only:
            raise ConfigError(
                "`train.token_share` below 1 needs edgeft's kernels and `how.supervised_only`", "--set how.compile=on"
            )
        return True
    if recipe.how.compile != "auto":
        return recipe.how.compile == "on"
    if compiled.is_built():
        return True
    if compiled.compiler() is None or cache.folder() is None:
        what = "C++ compiler" if compiled.compiler() is None else "home folder to keep compiled kernels in"
        progress.line(f"no {what} here: {SLOWER}")
        return False
    return compiled.pays(flops, trial_flops_per_s())


def trial_flops_per_s() -> float:
    """Rate of a matrix product here; a few hundredths of a second."""
    a = torch.randn(512, 512)
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begin)
    return 2 * 512**3 / best
