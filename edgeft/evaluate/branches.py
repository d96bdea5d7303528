"""Rows as branches of a prefix tree in llama.cpp's KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(eq=False)
class Cell:
    """One token in the KV cache; free when no branch goes through it."""

    branches: int = 0


@dataclass(eq=False)
class Branch:
    """One sequence: its tokens from the row's start, each in a cell of the KV cache or about to get one."""

    seq: int
    ids: list[int] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    wanted: dict[int, int | None] = field(default_factory=dict)  # position → the next token whose likelihood is wanted
    nll: dict[int, float] = field(default_factory=dict)  # position → nats of that token
    likeliest: dict[int, int] = field(default_factory=dict)  # position → the likeliest next token
    first: int = 0  # position of the first of its steps; what stands before is in the cache
    steps: list[Step] = field(default_factory=list)  # also those that it shares with other branches


@dataclass(eq=False)
class Step:
    """One token to be computed, for all branches that go through it."""

    token: int
    position: int
    cell: Cell
    branches: list[Branch]

    @property
    def asked(self) -> bool:
        return any(self.position in branch.wanted for branch in self.branches)


def common(a: list[int], b: list[int], limit: int) -> int:
    """Length of the common start, at most `limit`."""
    n = min(len(a), len(b), limit)
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


def surprise(logits: Floats, token: int) -> float:
    """-log p(token), in nats."""
    top = logits.max()
    return float(np.log(np.exp(logits - top).sum(dtype=np.float64)) + float(top) - float(logits[token]))
