"""Which token sees which in a prefix forest, and the pieces that attention computes.

Tokens are in depth-first order, so that a subtree is a range.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property

import numpy as np

PIECE = 128  # queries computed at a time; a few rows' answers, or a part of a passage


class Piece:
    """Queries [start, stop) and the tokens that any of them sees: those above, seen by all, and themselves."""

    def __init__(self, tree: Tree, start: int, stop: int, above: np.ndarray) -> None:
        self.tree, self.start, self.stop, self.above = tree, start, stop, above

    def queries(self, chosen: np.ndarray | None) -> tuple[slice, np.ndarray]:
        """(where they are in `chosen`, token numbers) of the piece's queries; None: all tokens are queries."""
        if chosen is None:
            return slice(self.start, self.stop), np.arange(self.start, self.stop)
        span = slice(*(int(np.searchsorted(chosen, end)) for end in (self.start, self.stop)))
        return span, chosen[span]

    @cached_property
    def keys(self) -> np.ndarray:
        """(K,) token numbers."""
        return np.concatenate([self.above, np.arange(self.start, self.stop)])

    @cached_property
    def blocked(self) -> np.ndarray:
        """(stop - start, K) true where a query does not see a key."""
        blocked: np.ndarray = ~self.tree.sees(np.arange(self.start, self.stop), self.keys)
        return blocked


class Tree:
    """Tokens in depth-first order: a token's subtree is [i, i + size[i])."""

    def __init__(self, parents: np.ndarray, live: np.ndarray | None = None) -> None:
        """live: (T,) true where gradients pass, see Forest.live; None: everywhere."""
        size = np.ones(len(parents), np.int64)
        for i in range(len(parents) - 1, 0, -1):
            if parents[i] >= 0:
                size[parents[i]] += size[i]
        self._lay_out(size, None if live is None or live.all() else live)

    def _lay_out(self, size: np.ndarray, live: np.ndarray | None) -> None:
        self.size = size
        self.live = None if live is None else np.flatnonzero(live)  # tokens through which gradients pass; None: all
        self.context = np.flatnonzero([] if live is None else ~live)  # the others, none of which sees a live one
        self.pieces: list[Piece] = []
        self.window = 0  # see `within`
        self._split(0, len(size), [])

    @cached_property
    def depth(self) -> np.ndarray:
        """(T,) how many tokens are above each, which is its position in a row."""
        tokens = np.arange(len(self.size))
        steps = np.zeros(len(self.size) + 1, np.int64)
        np.add.at(steps, tokens + 1, 1)
        np.add.at(steps, tokens + self.size, -1)
        depth: np.ndarray = np.cumsum(steps)[:-1]
        return depth

    def within(self, window: int) -> Tree:
        """The same tokens, of which each sees itself and the `window` - 1 before it in its row; 0: all before it."""
        if not window or window > self.depth.max(initial=0):
            return self
        tree = copy.copy(self)
        tree.window = window
        tree.pieces = []
        for piece in self.pieces:
            nearest = self.depth[piece.start : piece.stop].min(initial=len(self.size)) - window
            tree._add(piece.start, piece.stop, piece.above[self.depth[piece.above] > nearest])
        return tree

    def context_tree(self) -> Tree:
        """The context alone."""
        inside = np.zeros(len(self.size), np.int64)
        inside[self.context] = 1
        before = np.concatenate([[0], np.cumsum(inside)])
        tree = Tree.__new__(Tree)
        tree._lay_out(before[self.context + self.size[self.context]] - before[self.context], None)
        return tree

    @staticmethod
    def chain(length: int) -> Tree:
        """One row: every token sees all before it."""
        return Tree(np.arange(-1, length - 1))

    def _split(self, start: int, stop: int, above: list[int]) -> None:
        """Sibling subtrees [start, stop) below the tokens `above`: small ones together, large ones cut up."""
        begin = i = start
        while i < stop:
            size = int(self.size[i])
            if i - begin + size <= PIECE:
                i += size
            elif i > begin:
                self._add(begin, i, above)
                begin = i
            else:
                fork = i + 1  # the subtree begins with a chain [i, fork): a system prompt, a passage
                while fork < i + size and self.size[fork] == self.size[fork - 1] - 1:
                    fork += 1
                for part in range(i, fork, PIECE):
                    self._add(part, min(part + PIECE, fork), [*above, *range(i, part)])
                self._split(fork, i + size, [*above, *range(i, fork)])
                begin = i = i + size
        if begin < stop:
            self._add(begin, stop, above)

    def _add(self, start: int, stop: int, above: Sequence[int] | np.ndarray) -> None:
        self.pieces.append(Piece(self, start, stop, np.array(above, np.int64)))

    def sees(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """(Q, K): a key is seen by its own subtree, or by what of it lies within the window."""
        below: np.ndarray = (keys <= queries[:, None]) & (queries[:, None] < keys + self.size[keys])
        if self.window:
            below &= self.depth[keys] > self.depth[queries][:, None] - self.window
        return below

    def dense(self) -> np.ndarray:
        """The whole (T, T) table, true where a token sees another; for checks."""
        every = np.arange(len(self.size))
        return self.sees(every, every)
