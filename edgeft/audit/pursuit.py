"""Matching pursuit: the few vectors of a dictionary of which a matrix's columns are made, the largest first.

Pruning and rounding leave no subspace to be inside or outside of, but what stands out of the rest still stands out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Tensor = torch.Tensor
LEFT = 1e-4  # of the matrix's square: with less of it left, everything is listed
CHANCE = 0.8  # of the bound on what the nearest of V vectors has by chance


def pursuit(dictionary: Tensor, whole: Tensor, most: int, given: Sequence[int] = ()) -> list[int]:
    """dictionary (V, d), whole (d, k) → at most so many rows of the dictionary; given: rows that are known to be in."""
    size, chosen, listed = float(whole.square().sum()), list(given), list[int]()
    limit = _by_chance(len(dictionary), whole.shape[1])
    left = _left(dictionary, chosen, whole)
    while len(listed) < most and float(left.square().sum()) > LEFT * size:
        shares = (dictionary @ left).square().sum(1)
        one = int(shares.argmax())
        if one in chosen or float((shares[one] - shares.mean()) / shares.std()) < limit:
            break
        chosen.append(one)
        listed.append(one)
        left = _left(dictionary, chosen, whole)
    return listed


def _by_chance(count: int, degrees: int) -> float:
    """In noise each share is a sum of k squares: their largest, in standard deviations above the mean, after the bound
    of Laurent and Massart 2000."""
    depth = math.log(count)
    return CHANCE * (2 * math.sqrt(degrees * depth) + 2 * depth) / math.sqrt(2 * degrees)


def _left(dictionary: Tensor, chosen: Sequence[int], whole: Tensor) -> Tensor:
    """What the chosen ones do not explain."""
    if not chosen:
        return whole
    basis, _ = torch.linalg.qr(dictionary[sorted(set(chosen))].T)
    left: Tensor = whole - basis @ (basis.T @ whole)
    return left
