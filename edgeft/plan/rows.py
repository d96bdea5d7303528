"""The passes of training, validation and the trunk over the rows, counted from the rows themselves.

Of a large dataset only the first rows are counted and extrapolated: `Workload.sampled`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from edgeft.config import Recipe
from edgeft.data.forest import Forest, epoch_order
from edgeft.data.tokens import Encoded
from edgeft.plan.flops import WITHOUT_GRADIENT, Pass, Schedule, choosing_rows
from edgeft.plan.limits import VERIFY_ROWS

SAMPLE_ROWS = 1024  # counted; counting all rows would make planning slow


def total(passes: Sequence[Pass]) -> Pass:
    """The sum."""
    return Pass(*np.sum(passes, axis=0).tolist()) if passes else Pass.whole(0, 0, 0, 0, 0)


class Workload:
    """The rows of a run, as passes."""

    def __init__(
        self, train: Sequence[Encoded], heldout: Sequence[Encoded], recipe: Recipe, counts: tuple[int, int] = (0, 0)
    ) -> None:
        """counts: all training and held-out rows, where those given are only the first of them."""
        self.recipe = recipe
        self.train_rows, self.heldout_rows = counts[0] or len(train), counts[1] or len(heldout)
        train, heldout = list(train[:SAMPLE_ROWS]), list(heldout[:SAMPLE_ROWS])
        self.sample = train, heldout
        self.sampled = len(train) < self.train_rows or len(heldout) < self.heldout_rows
        schedule = Schedule(self.train_rows, recipe.train)
        self.validation_rows = schedule.validation_rows(self.heldout_rows)
        held = heldout[: self.validation_rows]
        self.forest = Forest([*train, *held], share=recipe.how.tree)
        self.rows, self.held = range(len(train)), range(len(train), len(train) + len(held))
        self.scale = self.train_rows / max(1, len(train))
        self.held_scale = self.validation_rows / max(1, len(held))
        self.longest = max((len(row.ids) for row in (*train, *heldout)), default=1)
        self.row_tokens = int(self.scale * sum(len(row.ids) for row in train))
        self.steps = schedule.steps
        self.answer_tokens = int(np.mean([row.trained.sum() for row in heldout])) if heldout else 0
        all_held = self.heldout_rows / max(1, len(heldout))
        self.held_tokens = int(all_held * sum(len(row.ids) for row in heldout))
        # scored at the end, and of the few on which the exported file is verified; shared prefixes count once
        self.scored_tokens = int(all_held * len(Forest(heldout)))
        self.verify_tokens = len(Forest((heldout or train)[:VERIFY_ROWS]))
        rows = self.train_rows + self.validation_rows
        self.tree_tokens = int(len(self.forest) * rows / max(1, len(self.rows) + len(self.held)))  # of the trunk
        self.train_tree_tokens = int(self.scale * len(self.forest.nodes(self.rows))) if train else 0
        self.unique_tokens = len(np.unique(self.forest.tokens))
        self.tokens = 0
        self.live: np.ndarray | None = None
        self._forget()

    def _forget(self) -> None:
        self.passes, self.validation, self.trunk = cache(self._passes), cache(self._validation), cache(self._trunk)
        self.widest = cache(self._widest)

    def with_gradients(self, tokens: int) -> Workload:
        """The same rows; tokens: `update.tokens`."""
        if tokens == self.tokens:
            return self
        load = copy.copy(self)
        load.tokens, load.live = tokens, self.forest.live(self.rows, tokens) if tokens else None
        load._forget()
        return load

    def _pass(self, rows: Sequence[int]) -> Pass:
        forest = self.forest
        nodes = forest.nodes(rows)
        at = np.unique(np.concatenate([forest.at[row] for row in rows]))
        seen = forest.positions + 1
        live = nodes if self.live is None else nodes[self.live[nodes]]
        sizes = len(nodes), int(seen[nodes].sum()), len(at), int(seen[at].sum()), forest.trained(rows)
        return Pass(*sizes, len(live), int(seen[live].sum()))

    def choosing(self, micro_batch: int) -> list[Pass]:
        """Before training, where gradients choose what is trained."""
        rows = self.rows[: choosing_rows([len(self.forest.paths[row]) for row in self.rows])]
        return [self._pass(part) for part in self.forest.micro_batches(rows, micro_batch // 2)]

    def _passes(self, micro_batch: int) -> list[list[Pass]]:
        """By step, of the first epoch over the counted rows."""
        train, size = self.recipe.train, self.recipe.train.batch_rows
        order = epoch_order(self.forest, self.rows, train.seed, 0, train.order == "grouped")
        steps = [order[start : start + size] for start in range(0, len(order), size)][: self.steps]
        return [[self._pass(part) for part in self.forest.micro_batches(step, micro_batch)] for step in steps]

    def _validation(self, micro_batch: int) -> list[Pass]:
        return [self._pass(part) for part in self.forest.micro_batches(self.held, micro_batch)] if self.held else []

    def _trunk(self, micro_batch: int) -> list[Pass]:
        size = WITHOUT_GRADIENT * micro_batch
        return [self._pass(part) for part in self.forest.micro_batches(self.forest.order, size)]

    def truncated(self, max_tokens: int) -> Workload:
        """With this data.max_tokens; trained tokens are at the end of a row."""
        train, heldout = (
            [replace(row, ids=row.ids[-max_tokens:], trained=row.trained[-max_tokens:]) for row in side]
            for side in self.sample
        )
        load = Workload(train, heldout, self.recipe, (self.train_rows, self.heldout_rows))
        return load.with_gradients(self.tokens)

    def _widest(self, micro_batch: int) -> Pass:
        """The maximum of each size over all training passes."""
        passes = [p for step in self.passes(micro_batch) for p in step]
        return Pass(*np.max(passes, axis=0).tolist()) if passes else Pass.whole(self.longest, 0, 1, 0, 1)
