"""Rows for tests: a few of the handbook as files, made-up ones as tokens."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np

from edgeft.data.rows import Row
from edgeft.data.tokens import Encoded
from edgeft.data.tree import PIECE


def small_rows(folder: Path, train: int = 12, heldout: int = 4) -> Path:
    """A folder with a few rows of the handbook: enough to run every stage in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("heldout", heldout)):
        lines = (files("edgeft.demo") / f"{name}.jsonl").read_text("utf-8").splitlines()[:count]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


def encoded(ids: list[int], trained_from: int = 1) -> Encoded:
    return Encoded(np.array(ids, np.int32), np.arange(len(ids)) >= trained_from, Row([], []))


def random_row(count: int, targets: int, seed: int = 0) -> Encoded:
    ids = np.random.default_rng([seed, count]).integers(3, 40_000, count)
    return encoded(ids.tolist(), count - targets)


# A forest: shared prefixes of several lengths.
FOREST_ROWS = [
    encoded([1, 5, 6, 7, 100, 101], 4),
    encoded([1, 5, 6, 8, 102], 4),
    encoded([1, 5, 6, 7, 103], 4),  # the same prompt as the first row, another answer
    encoded([1, 9, 104, 105, 106], 2),
    encoded([50, 51, 52, 53], 1),  # shares nothing
    encoded([1, 5, 6, 7, 100, 101], 4),  # a repeated row
]


def forest_parents(kind: str) -> np.ndarray:
    """Parents of tokens in depth-first order."""
    random = np.random.default_rng(3)
    if kind == "chain":
        return np.arange(-1, 3 * PIECE + 7)
    if kind == "passages":  # a system prompt, passages longer than a piece, questions below them
        parents = [-1, *range(19)]
        for _ in range(3):
            above = 19
            for _ in range(PIECE + 30):
                parents.append(above)
                above = len(parents) - 1
            for _ in range(4):
                at = above
                for _ in range(25):
                    parents.append(at)
                    at = len(parents) - 1
        return np.array(parents)
    parents = [-1]
    for i in range(1, 5 * PIECE):  # depth-first: a parent is the token before or one of its ancestors
        at = i - 1
        while at >= 0 and random.random() < 0.3:
            at = parents[at]
        parents.append(at)
    return np.array(parents)
