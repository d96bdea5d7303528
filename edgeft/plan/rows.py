"""The passes that training, validation and the trunk make over the rows, counted from the rows themselves.

Of many rows the first ones are counted and stand for the rest; `Workload.sampled` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from edgeft.config import Recipe
from edgeft.data.forest import Forest, epoch_order
from edgeft.data.tokens import Encoded
from edgeft.engine.limits import padded
from edgeft.plan.flops import WITHOUT_GRADIENT, Pass, Schedule

SAMPLE_ROWS = 1024  # looked at; counting them all would take longer than a plan should


class Sizes(NamedTuple):
    """How many sizes passes have, as the kernels round them up."""

    whole: int = 0
    asked: int = 0  # further ones, which only the last block has


def total(passes: Sequence[Pass]) -> Pass:
    """All of them together."""
    return Pass(*np.sum(passes, axis=0).tolist()) if passes else Pass(0, 0, 0, 0, 0)


class Workload:
    """The rows of one run."""

    def __init__(
        self, train: Sequence[Encoded], heldout: Sequence[Encoded], recipe: Recipe, counts: tuple[int, int] = (0, 0)
    ) -> None:
        """counts: how many training and held-out rows there are, where those given are only the first of them."""
        self.recipe = recipe
        self.train_rows, self.heldout_rows = counts[0] or len(train), counts[1] or len(heldout)
        train, heldout = list(train[:SAMPLE_ROWS]), list(heldout[:SAMPLE_ROWS])
        self.sample = train, heldout
        self.sampled = len(train) < self.train_rows or len(heldout) < self.heldout_rows
        self.forest = Forest([*train, *heldout], share=recipe.how.tree)
        self.rows, self.held = range(len(train)), range(len(train), len(train) + len(heldout))
        self.scale = self.train_rows / max(1, len(train))
        self.held_scale = self.heldout_rows / max(1, len(heldout))
        self.longest = max((len(row.ids) for row in (*train, *heldout)), default=1)
        self.row_tokens = int(self.scale * sum(len(row.ids) for row in train))
        self.steps = Schedule(self.train_rows, recipe.train).steps
        self.answer_tokens = int(np.mean([row.trained.sum() for row in heldout])) if heldout else 0
        self.held_tokens = int(self.held_scale * sum(len(row.ids) for row in heldout))
        rows = self.train_rows + self.heldout_rows
        self.tree_tokens = int(len(self.forest) * rows / max(1, len(self.rows) + len(self.held)))  # the trunk's
        self.train_tree_tokens = int(self.scale * len(self.forest.nodes(self.rows))) if train else 0
        self.unique_tokens = len(np.unique(self.forest.tokens))
        self.passes, self.validation, self.trunk = cache(self._passes), cache(self._validation), cache(self._trunk)
        self.widest, self.sizes = cache(self._widest), cache(self._sizes)

    def _pass(self, rows: Sequence[int]) -> Pass:
        forest = self.forest
        nodes = forest.nodes(rows)
        at = np.unique(np.concatenate([forest.at[row] for row in rows]))
        seen = forest.positions + 1
        return Pass(len(nodes), int(seen[nodes].sum()), len(at), int(seen[at].sum()), forest.trained(rows))

    def _passes(self, micro_batch: int) -> list[list[Pass]]:
        """By step, of the first epoch over the rows that are looked at."""
        train, size = self.recipe.train, self.recipe.train.batch_rows
        order = epoch_order(self.forest, self.rows, train.seed, 0, train.order == "grouped")
        steps = [order[start : start + size] for start in range(0, len(order), size)][: self.steps]
        return [[self._pass(part) for part in self.forest.micro_batches(step, micro_batch)] for step in steps]

    def _validation(self, micro_batch: int) -> list[Pass]:
        return [self._pass(part) for part in self.forest.micro_batches(self.held, micro_batch)] if self.held else []

    def _trunk(self, micro_batch: int) -> list[Pass]:
        size = WITHOUT_GRADIENT * micro_batch
        return [self._pass(part) for part in self.forest.micro_batches(self.forest.order, size)]

    def _sizes(self, micro_batch: int) -> Sizes:
        every = [*(one for step in self.passes(micro_batch) for one in step), *self.validation(micro_batch)]
        whole = {padded(one.tokens) for one in every}
        return Sizes(len(whole), len({padded(one.asked) for one in every} - whole))

    def cut(self, longest: int) -> Workload:
        """With this data.max_tokens; trained tokens are at the rows' ends."""
        train, heldout = (
            [replace(row, ids=row.ids[-longest:], trained=row.trained[-longest:]) for row in side]
            for side in self.sample
        )
        return Workload(train, heldout, self.recipe, (self.train_rows, self.heldout_rows))

    def _widest(self, micro_batch: int) -> Pass:
        """What the largest pass of training has of each."""
        every = [one for step in self.passes(micro_batch) for one in step]
        return Pass(*np.max(every, axis=0).tolist()) if every else Pass(self.longest, 0, 1, 0, 1)
