"""Rows as branches of a prefix tree in llama.cpp's KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(eq=False)
class Cell:
    """One token in the KV cache; free when no branch contains it."""

    branches: int = 0


@dataclass(eq=False)
class Branch:
    """One sequence: its tokens from the start of the row, each with a cell of the KV cache."""

    seq: int
    ids: list[int] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    wanted: dict[int, int | None] = field(
        default_factory=dict
    )  # position → next token to score; None: only the likeliest
    nll: dict[int, float] = field(default_factory=dict)  # position → nats of that token
    likeliest: dict[int, int] = field(default_factory=dict)  # position → the likeliest next token
    first: int = 0  # position of its first step; earlier tokens are in the cache
    steps: list[Step] = field(default_factory=list)  # including those shared with other branches


@dataclass(eq=False)
class Step:
    """One token to compute, for all branches that contain it."""

    token: int
    position: int
    cell: Cell
    branches: list[Branch]

    @property
    def needs_logits(self) -> bool:
        return any(self.position in branch.wanted for branch in self.branches)


def token_nll(logits: Floats, token: int) -> float:
    """-log p(token), in nats."""
    top = logits.max()
    return float(np.log(np.exp(logits - top).sum(dtype=np.float64)) + float(top) - float(logits[token]))
