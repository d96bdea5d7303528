"""Rows as a prefix forest: a shared prefix is stored once.

Loss and gradients of a batch taken from the forest are those of its rows computed one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter

import numpy as np

from edgeft.data.tokens import Encoded, common_prefix

EVEN = 1.02  # largest of the parts of a forest ÷ their mean, at which no row is moved any more


class Forest:
    """Nodes in depth-first order, so that a parent's number is always below its child's."""

    def __init__(self, rows: Sequence[Encoded], share: bool = True) -> None:
        order = sorted(range(len(rows)), key=lambda i: rows[i].ids.tolist())
        self.paths: list[np.ndarray] = [np.empty(0, np.int32)] * len(rows)  # node numbers of each row's tokens
        self.order = order  # row numbers, neighbours share the longest prefixes
        self.rank = {row: place for place, row in enumerate(order)}
        self.shared = np.zeros(len(rows), np.int32)  # tokens that a row shares with the one before it in `order`
        tokens: list[np.ndarray] = []
        parents: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        count = 0
        previous = np.empty(0, np.int32)
        path = np.empty(0, np.int32)
        for i in order:
            ids = rows[i].ids
            self.shared[i] = common_prefix(previous, ids)  # also without sharing: row order must not depend on it
            common = int(self.shared[i]) if share else 0
            fresh = np.arange(count, count + len(ids) - common, dtype=np.int32)
            path = np.concatenate([path[:common], fresh])
            tokens.append(ids[common:])
            parents.append(np.concatenate([[-1], path[:-1]])[common:].astype(np.int32))
            positions.append(np.arange(common, len(ids), dtype=np.int32))
            self.paths[i] = path
            previous, count = ids, count + len(fresh)
        empty = [np.empty(0, np.int32)]
        self.tokens = np.concatenate(tokens or empty)
        self.parents = np.concatenate(parents or empty)
        self.positions = np.concatenate(positions or empty)
        # a target at place i of a row is predicted from the node before it
        self.at = [path[np.flatnonzero(r.trained[1:])] for r, path in zip(rows, self.paths, strict=True)]
        self.targets = [r.ids[1:][r.trained[1:]] for r in rows]

    def __len__(self) -> int:
        return len(self.tokens)

    def trained(self, rows: Sequence[int]) -> int:
        """Targets in these rows."""
        return sum(len(self.targets[i]) for i in rows)

    def live(self, rows: Sequence[int], tokens: int) -> np.ndarray:
        """(nodes,) true where gradients pass: of each row, from this many tokens above the first that predicts a
        target, and everything below such a token. The others, the context, are whole beginnings of rows."""
        live = np.zeros(len(self), bool)
        for row in rows:
            if len(self.at[row]):
                live[self.paths[row][max(0, int(self.positions[self.at[row][0]]) - tokens) :]] = True
        flags = live.tolist()
        for node, parent in enumerate(self.parents.tolist()):
            flags[node] = flags[node] or (parent >= 0 and flags[parent])
        return np.array(flags, bool)

    def nodes(self, rows: Sequence[int]) -> np.ndarray:
        return np.unique(np.concatenate([self.paths[i] for i in rows]))

    def micro_batches(self, rows: Sequence[int], tokens: int) -> Iterator[list[int]]:
        """Rows in parts of at most `tokens` forest tokens (at least one row); groups are split only if necessary."""
        part: list[int] = []
        held: set[int] = set()
        for group in self.groups(rows):
            if part and len(held.union(*(self.paths[row].tolist() for row in group))) > tokens:
                yield part
                part, held = [], set()
            for row in group:
                path = self.paths[row].tolist()
                if part and len(held.union(path)) > tokens:
                    yield part
                    part, held = [], set()
                part.append(row)
                held.update(path)
        if part:
            yield part

    def split(self, rows: Sequence[int], count: int) -> list[list[int]]:
        """Rows in `count` parts of about as many forest tokens; a group is split only where that helps."""
        parts: list[list[list[int]]] = [[] for _ in range(count)]  # of each part the pieces of groups
        for group in sorted(self.groups(rows), key=self._size, reverse=True):
            min(parts, key=lambda part: self._size([*chain(*part)])).append(group)
        while self._moved(parts):
            pass
        return [[*chain(*part)] for part in parts]

    def _moved(self, parts: list[list[list[int]]]) -> bool:
        """Moves rows of one group out of the largest part, if that makes it smaller."""
        sizes = [self._size([*chain(*part)]) for part in parts]
        largest = max(sizes)
        if largest * len(parts) <= EVEN * sum(sizes):
            return False
        source = parts[sizes.index(largest)]
        best = (largest, source, 0, 0)
        for number, piece in enumerate(source):
            others = [*chain(*source[:number], *source[number + 1 :])]
            for kept in range(len(piece)):
                left = self._size([*others, *piece[:kept]])
                for target in (part for part in parts if part is not source):
                    size = max(left, self._size([*chain(*target), *piece[kept:]])) if left < best[0] else largest
                    best = min(best, (size, target, number, kept), key=itemgetter(0))
        size, target, number, kept = best
        if size == largest:
            return False
        piece = source.pop(number)
        target.append(piece[kept:])
        source += [piece[:kept]] if kept else []
        return True

    def _size(self, rows: Sequence[int]) -> int:
        """Forest tokens of these rows."""
        return len(self.nodes(rows)) if rows else 0

    def groups(self, rows: Sequence[int]) -> list[list[int]]:
        """Rows that share more than half of their own tokens with their neighbour, such as questions on one passage.

        What nearly all rows begin with (the template, a system prompt) does not count: it says nothing about a row.
        """
        common = int(np.percentile(self.shared[self.order[1:]], 10)) if len(self.order) > 1 else 0
        groups: list[list[int]] = []
        for i in sorted(rows, key=self.rank.__getitem__):
            if groups and (self.shared[i] - common) * 2 > len(self.paths[i]) - common:
                groups[-1].append(i)
            else:
                groups.append([i])
        return groups


def epoch_order(forest: Forest, rows: Sequence[int], seed: int, epoch: int, grouped: bool) -> list[int]:
    """The rows of one epoch in their random order; the same for the same seed and epoch."""
    random = np.random.default_rng([seed, epoch])
    groups = forest.groups(rows) if grouped else [[row] for row in rows]
    return [row for g in random.permutation(len(groups)) for row in random.permutation(groups[g]).tolist()]
