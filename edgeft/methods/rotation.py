"""Rotation of the active blocks (`update.cycle_blocks`), over any method: a few neighbouring blocks train at a time.

Neighbours, because gradients then pass only through the blocks above the lowest of them. Which blocks a step trains
depends on the seed and the step alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from edgeft.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from edgeft.engine.optimizer import Optimizer
    from edgeft.methods.scheme import Scheme


def check(scheme: Scheme) -> None:
    if scheme.cycle_blocks > len(scheme.blocks):
        raise ConfigError(
            f"`update.cycle_blocks` is {scheme.cycle_blocks}, but the recipe trains {len(scheme.blocks)} blocks",
            "use fewer at a time, or 0 for all of them",
        )


def active_blocks(scheme: Scheme, step: int, seed: int) -> tuple[int, ...]:
    """Of this step: each group trains once before any trains again."""
    if not scheme.cycle_blocks:
        return scheme.blocks
    groups = range(0, len(scheme.blocks), scheme.cycle_blocks)
    round_, place = divmod(step // scheme.cycle_steps, len(groups))
    start = groups[int(np.random.default_rng([seed, round_]).permutation(len(groups))[place])]
    return scheme.blocks[start : start + scheme.cycle_blocks]


def restricted(scheme: Scheme, blocks: tuple[int, ...]) -> Scheme:
    """The scheme of these blocks alone."""
    return replace(
        scheme,
        shares={key: share for key, share in scheme.shares.items() if key[0] in blocks},
        biases=frozenset(key for key in scheme.biases if key[0] in blocks),
        norms=scheme.norms & set(blocks),
        cycle_blocks=0,
    )


class Rotation:
    """The blocks that the present step trains."""

    def __init__(self, scheme: Scheme, seed: int) -> None:
        self.scheme, self.seed = scheme, seed
        self.active = scheme

    def advance(self, step: int, parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
        """Moments of blocks that go to rest are dropped: when they train again all others have moved, and old moments
        would say little."""
        blocks = active_blocks(self.scheme, step, self.seed)
        if blocks == self.active.blocks:
            return
        self.active = restricted(self.scheme, blocks)
        active = {name for name in parameters if int(name.split(".")[1]) in blocks}
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in active)
        optimizer.keep(active)
