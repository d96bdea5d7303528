"""Many updates to one: weighted mean, trimmed mean or Krum, after a look at each.

An update that is not finite never reaches the model, and none moves it by more than LIMIT times the median. numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from edgeft.errors import DataError
from edgeft.federated.update import Vector

RULES = ("mean", "trimmed", "krum")
LIMIT = 3.0  # an update is clipped to this multiple of the median norm
GROSS = 100.0  # with noise, where nothing else may depend on an update, one this much larger is refused
MOST_ROWS = 10.0  # a device counts for at most this multiple of the median rows: rows are what it claims
TRIMMED = 0.2  # share left out at either end


@dataclass(frozen=True)
class Received:
    """One device's update, decoded."""

    name: str
    vector: Vector
    rows: int


def check(received: Received) -> None:
    """DataError if it must not be used."""
    if not np.isfinite(received.vector).all():
        raise DataError("its update has numbers that are NaN or infinite")
    if received.rows < 1:
        raise DataError(f"it claims {received.rows} rows")


def clip_large(updates: list[Received], reference: float) -> tuple[list[Received], list[str], float]:
    """(updates, what was done, median norm). reference: the median norm of the round before; 0: there was none.

    The lower median: of two updates, one a hundred times the other, the small one counts as usual.
    """
    norms = [_norm(one.vector) for one in updates]
    usual = float(np.sort(norms)[(len(norms) - 1) // 2])
    bound = LIMIT * (usual if len(norms) > 2 or not reference else min(usual, LIMIT * reference))
    kept, said = [], []
    for one, norm in zip(updates, norms, strict=True):
        if norm > bound > 0:
            said.append(f"{one.name}: its update is {norm / (bound / LIMIT):.3g} times the usual size; clipped")
            one = replace(one, vector=(one.vector * np.float32(bound / norm)).astype(np.float32))
        kept.append(one)
    return kept, said, usual


def refuse_gross(updates: list[Received]) -> tuple[list[Received], list[str]]:
    """Instead of `clip_large` where devices add noise: what they sent is summed as it is."""
    norms = [_norm(one.vector) for one in updates]
    usual = float(np.sort(norms)[(len(norms) - 1) // 2])
    good = [one for one, norm in zip(updates, norms, strict=True) if norm <= GROSS * usual]
    names = {one.name for one in good}
    return good, [f"{one.name}: its update is over {GROSS:g} times the usual size; refused"
                  for one in updates if one.name not in names]  # fmt: skip


def combine(updates: list[Received], rule: str, by_rows: bool = True) -> tuple[Vector, list[str]]:
    """(the update of the model, what was left out)."""
    if rule == "trimmed":
        return trimmed_mean([one.vector for one in updates]), []
    said = []
    if rule == "krum":
        chosen = krum([one.vector for one in updates])
        said = [f"{one.name}: left out, its update is far from the others" for number, one in enumerate(updates)
                if number not in chosen]  # fmt: skip
        updates = [updates[number] for number in chosen]
    return weighted_mean([one.vector for one in updates], weights(updates) if by_rows else np.ones(len(updates))), said


def weights(updates: list[Received]) -> npt.NDArray[np.float64]:
    rows = np.array([one.rows for one in updates], np.float64)
    return np.minimum(rows, MOST_ROWS * np.sort(rows)[(len(rows) - 1) // 2])  # type: ignore[no-any-return]


def weighted_mean(vectors: list[Vector], shares: npt.NDArray[np.float64]) -> Vector:
    total = np.zeros(len(vectors[0]), np.float64)
    for vector, share in zip(vectors, shares / shares.sum(), strict=True):
        total += share * vector
    return total.astype(np.float32)


def trimmed_mean(vectors: list[Vector]) -> Vector:
    """Of each number, without the largest and smallest ones."""
    count = len(vectors)
    cut = min(max(1, int(TRIMMED * count)), (count - 1) // 2)
    out = np.empty(len(vectors[0]), np.float32)
    for begin in range(0, len(out), 1 << 16):  # sorted in pieces: no second copy of all updates
        piece = np.sort(np.stack([vector[begin : begin + (1 << 16)] for vector in vectors]), 0)
        out[begin : begin + (1 << 16)] = piece[cut : count - cut].mean(0)
    return out


def krum(vectors: list[Vector]) -> list[int]:
    """Multi-Krum (Blanchard et al., 2017): numbers of the updates that are closest to their neighbours.

    Up to a quarter may be hostile; with fewer than five updates none can be told apart, and all stay.
    """
    count = len(vectors)
    hostile = max(0, min(max(1, count // 4), (count - 3) // 2))
    if not hostile:
        return list(range(count))
    distances = np.zeros((count, count))
    for row in range(count):
        for column in range(row):
            distances[row, column] = distances[column, row] = _norm(vectors[row] - vectors[column]) ** 2
    # The distance to itself, 0, is the first of each row.
    scores = np.sort(distances, 1)[:, 1 : count - hostile - 1].sum(1)
    return sorted(int(number) for number in np.argsort(scores, kind="stable")[: count - hostile])


def _norm(vector: Vector) -> float:
    return float(np.sqrt(np.einsum("i,i->", vector, vector, dtype=np.float64)))
