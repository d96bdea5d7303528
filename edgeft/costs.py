"""What schemes cost, as the search needs it: the planner's own formulas, asked once for every part that a scheme has.

Blocks between the cut and the last one cost the same; so what one of them adds stands for all. Where parts share a
buffer their sum is more than the whole, so that the search asks for the whole in the end (`Job.cost`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from edgeft import plan, work
from edgeft.config import TENSORS, HowConfig, Recipe
from edgeft.data.tokens import Encoded
from edgeft.data.tree import Forest, epoch_order
from edgeft.model.header import BIASES
from edgeft.plan import Shape
from edgeft.sparse.evolve import SHARES, Problem
from edgeft.sparse.scheme import Scheme
from edgeft.train.schedule import Schedule

LOOKED_AT = 1024  # rows; counting the passes over more of them would take longer than the search itself

Floats = npt.NDArray[np.float64]


class Job:
    """Training on these rows by this recipe, with any scheme."""

    def __init__(
        self, recipe: Recipe, shape: Shape, arch: str, train: Sequence[Encoded], heldout: Sequence[Encoded], rate: float
    ) -> None:
        """rate: floating-point operations a second."""
        self.recipe, self.shape, self.arch, self.rate = recipe, shape, arch, rate
        self.longest = max(len(row.ids) for row in (*train, *heldout))
        self.scale = len(train) / len(train[:LOOKED_AT])
        self.forest = Forest([*train[:LOOKED_AT], *heldout], share=recipe.how.tree)
        self.rows = range(len(train[:LOOKED_AT]))
        self.held = range(len(self.rows), len(self.forest.paths))
        schedule = Schedule(len(train), recipe.train)
        self.epochs = schedule.steps / schedule.per_epoch
        self.passes = cache(self._passes)

    def _pass(self, rows: Sequence[int]) -> npt.NDArray[np.int64]:
        """(tokens, pairs of them that see each other, tokens that ask, their pairs, targets)."""
        nodes, seen = self.forest.nodes(rows), self.forest.positions + 1
        at = np.unique(np.concatenate([self.forest.at[row] for row in rows]))
        return np.array([len(nodes), seen[nodes].sum(), len(at), seen[at].sum(), self.forest.trained(rows)])

    def _passes(self, micro_batch: int) -> tuple[list[int], list[int]]:
        """Summed: of an epoch's passes, and of one validation's."""
        train = self.recipe.train
        order = epoch_order(self.forest, self.rows, train.seed, 0, train.order == "grouped")
        steps = [order[start : start + train.batch_rows] for start in range(0, len(order), train.batch_rows)]
        parts = [part for step in steps for part in self.forest.micro_batches(step, micro_batch)]
        held = [self._pass(part) for part in self.forest.micro_batches(self.held, micro_batch)] if self.held else []
        epoch = self.scale * np.sum([self._pass(part) for part in parts], axis=0)
        return epoch.astype(int).tolist(), np.sum([np.zeros(5, int), *held], axis=0).tolist()

    def ways(self) -> list[HowConfig]:
        """Ways to run it: as asked, with smaller micro-batches, computing activations again."""
        asked = self.recipe.how
        sizes = sorted({max(s, self.longest) for s in (asked.micro_batch_tokens, 512, 256, 128, 64)}, reverse=True)
        sizes = [size for size in sizes if size <= max(asked.micro_batch_tokens, self.longest)]
        again = [True] if asked.recompute else [False, True]
        return [dataclasses.replace(asked, micro_batch_tokens=s, recompute=r) for r in again for s in sizes]

    def cost(self, scheme: Scheme, how: HowConfig) -> Floats:
        """(bytes at the peak of training, seconds of all of it)."""
        epoch, held = self.passes(how.micro_batch_tokens)
        flops = self.epochs * work.step_flops(self.shape, scheme, *epoch)
        if how.recompute:
            flops += self.epochs * work.step_flops(self.shape, scheme, *epoch, back=False)
        flops += (1 + self.recipe.train.validations) * work.step_flops(self.shape, scheme, *held, back=False)
        tokens = self.scale * len(self.forest)
        flops += scheme.cut * 2.0 * self.shape.block_parameters * tokens  # the trunk, once
        terms = plan.estimate(self.shape, scheme, how, self.longest)
        return np.array([sum(terms.values()), flops / self.rate])

    def problem(self, gain: Floats, small_gain: Floats, budget: Floats) -> Problem:
        """gain (depth, tensors, shares), small_gain (depth,)."""
        depth, ways = self.shape.depth, self.ways()
        fixed, small = np.zeros((len(ways), depth, 2)), np.zeros((len(ways), depth, 2))
        cost = np.zeros((len(ways), depth, len(TENSORS), len(SHARES), 2))
        for number, how in enumerate(ways):
            for block in range(depth):
                fixed[number, block] = self.cost(_scheme({}, norms=[block]), how)
            lowest = fixed[number, 0]
            for block in {min(1, depth - 1), depth - 1}:
                same = slice(None, -1) if block < depth - 1 else slice(-1, None)
                for t, tensor in enumerate(TENSORS):
                    for s, share in enumerate(SHARES[1:], 1):
                        added = self.cost(_scheme({(block, tensor): share}, norms=[0]), how) - lowest
                        cost[number, same, t, s] = added
                biases = [(block, tensor) for tensor in BIASES[self.arch]]
                small[number, same] = self.cost(_scheme({}, biases, [0, block]), how) - lowest
        return Problem(gain, small_gain, fixed, np.maximum(cost, 0), np.maximum(small, 0), budget)


def _scheme(
    shares: dict[tuple[int, str], float], biases: Sequence[tuple[int, str]] = (), norms: Sequence[int] = ()
) -> Scheme:
    return Scheme("sparse", shares, frozenset(biases), frozenset(norms))
