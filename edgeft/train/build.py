"""The stack of a recipe: untrained, or with the run's best checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgeft import methods
from edgeft.config import Recipe
from edgeft.errors import RunError
from edgeft.formats.source import model_source as model_source
from edgeft.host import device
from edgeft.run.folder import Run
from edgeft.run.progress import Progress

if TYPE_CHECKING:
    from edgeft.engine.choose import Engine
    from edgeft.engine.stack import Stack
    from edgeft.methods.scheme import Scheme


def compute_threads(count: int) -> int:
    """`how.threads` (0: all cores), at most the cores of this machine; a profile may name more."""
    cores = device.cores()
    return min(count or cores, cores)


def load_stack(recipe: Recipe, engine: Engine | None = None) -> Stack:
    """The model, with all weights frozen."""
    from edgeft.engine.backend import TORCH
    from edgeft.engine.load import load

    backend = engine.backend if engine else TORCH
    backend.memory.set_release(recipe.how.spare_memory)
    backend.use_threads(compute_threads(recipe.how.threads))
    skeleton = backend.runs_blocks and not methods.get(recipe.update.method).uses_peft
    stack = load(model_source(recipe.model.path), recipe.model.frozen, skeleton)
    stack.configure(backend=backend, products=engine.products if engine else "fp32")
    return stack


def build(recipe: Recipe, engine: Engine | None = None) -> tuple[Stack, Scheme, dict[str, Any]]:
    """The model with the recipe's scheme applied, untrained: (stack, scheme, trained parameters by name)."""
    from edgeft.methods import scheme

    stack = load_stack(recipe, engine)
    chosen = scheme.make(recipe.update, stack.depth, stack.arch)
    chosen = scheme.with_weights(chosen, recipe.how.weights, recipe.train.average)
    return stack, chosen, scheme.apply(stack, chosen, recipe.train.seed)


def trained_stack(
    run: Run, progress: Progress = Progress(), engine: Engine | None = None, spare_memory: bool = False
) -> tuple[Stack, Scheme, dict[str, Any]]:
    """The run's model with its best checkpoint loaded."""
    from edgeft.methods.layer import checkpoint_tensors
    from edgeft.train.average import in_place_of
    from edgeft.train.loop import load_trained

    if not run.best.is_file():
        raise RunError(
            f"{run.path} has no trained weights yet", f"continue with `edgeft finetune --resume --out {run.path}`"
        )
    how = replace(run.recipe.how, spare_memory=spare_memory, weights=run.effective.how.weights)
    stack, scheme, parameters = build(replace(run.effective, how=how), engine)
    stored = checkpoint_tensors(stack, parameters)
    load_trained(in_place_of(stored, parameters) if run.effective.train.average else stored, run, progress)
    return stack, scheme, parameters
