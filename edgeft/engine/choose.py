"""Which backend trains, and with which operands of products: the compiled kernels, or plain torch in float32.

They round differently, so a run keeps the one that it began with.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from edgeft.config import Recipe
from edgeft.engine import compiled, kernels
from edgeft.engine.backend import TORCH, Backend
from edgeft.errors import ConfigError, EdgeftError
from edgeft.host import cache
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.run.record import EngineChoice

SLOWER = "training runs in plain torch, at about half the speed"


@dataclass(frozen=True)
class Engine:
    """reason: why, for the run's record and, where it costs speed, for the user."""

    backend: Backend = TORCH
    products: str = "fp32"  # operands: see ExecutionOptions
    reason: str = ""

    @property
    def compiled(self) -> bool:
        return self.backend is not TORCH


def choose(
    recipe: Recipe, head_width: int, gate: str, flops: float, progress: Progress, before: EngineChoice | None = None
) -> Engine:
    """flops: of the planned work; before: what an earlier process of the same run chose."""
    if before is not None:
        wanted, reason = before.kernels, before.why
    else:
        wanted, reason = _wants_kernels(recipe, flops)
        if reason.endswith(SLOWER):
            progress.line(reason)
    backend: Backend = _load(progress) if wanted else TORCH
    if not backend.able(head_width, gate):
        if recipe.how.compile == "on":
            raise EdgeftError("edgeft's kernels cannot run this model's heads", "--set how.compile=off")
        backend, reason = TORCH, f"edgeft's kernels cannot run this model's heads: {SLOWER}"
        progress.line(reason)
    products = before.products if before else _products(recipe.how.products, backend is not TORCH, recipe.how.threads)
    return Engine(backend, products, reason)


def recalled(run: Run) -> Engine | None:
    """The kernels that trained a run, if they are still built; float32, since what is exported is compared with it."""
    before = run.recorded()
    return Engine(kernels.load()) if before and before.engine.kernels and compiled.is_built() else None


def _products(wanted: str, by_kernels: bool, threads: int) -> str:
    if wanted in ("bf16", "int8") and not by_kernels:
        raise ConfigError(
            f"`how.products: {wanted}` needs edgeft's kernels", "--set how.compile=on, or how.products=fp32"
        )
    if wanted == "auto":
        wanted = compiled.fastest_products(threads) if by_kernels else "fp32"
    if wanted == "int8" and not compiled.multiplies_int8():
        raise ConfigError(
            "`how.products: int8`: this processor has no dot products of bytes", "--set how.products=fp32"
        )
    return wanted


def _load(progress: Progress) -> Backend:
    if compiled.is_built():
        return kernels.load()
    begin = time.monotonic()
    backend = kernels.load()
    progress.line(f"compiled edgeft's kernels for this processor, once, in {time.monotonic() - begin:.1f} s")
    return backend


def _wants_kernels(recipe: Recipe, flops: float) -> tuple[bool, str]:
    """(whether, why); auto: where they are built, or the planned work pays for compiling them."""
    if recipe.how.compile != "auto":
        return recipe.how.compile == "on", f"how.compile: {recipe.how.compile}"
    if compiled.is_built():
        return True, "the kernels are built"
    if compiled.compiler() is None or cache.folder() is None:
        missing = "C++ compiler" if compiled.compiler() is None else "home folder to keep compiled kernels in"
        return False, f"no {missing} here: {SLOWER}"
    pays = compiled.pays(flops, compiled.trial_flops_per_s())
    return pays, "the planned work pays for compiling" if pays else "the planned work is too short to compile for"
