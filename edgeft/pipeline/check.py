"""Checks before any work: the model, the scheme, the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgeft.arch import of_gguf
from edgeft.config import Recipe
from edgeft.formats.gguf import GGUF
from edgeft.formats.source import is_gguf
from edgeft.formats.source import model_source as model_source
from edgeft.run.folder import Run

if TYPE_CHECKING:
    pass


def check_scheme(recipe: Recipe, source: str) -> None:
    """Refuses blocks and tensors that the model does not have, before any work is done."""
    from edgeft.methods import scheme

    if is_gguf(source):
        header = GGUF.open(source)
        scheme.make(recipe.update, int(header.need("block_count")), of_gguf(header))


def check_disk(run: Run, source: str) -> None:
    """Refuses a run that the disk has no room for, as far as that can be known without its rows."""
    from edgeft import plan
    from edgeft.host.disk import check
    from edgeft.methods import scheme
    from edgeft.plan import disk

    if is_gguf(source):
        shape = plan.shape_of(source, run.recipe.model.frozen)
        chosen = scheme.make(run.recipe.update, shape.depth, shape.arch)
        check(disk.needs(run, shape, chosen))
