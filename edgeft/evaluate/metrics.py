"""Exact match, token F1 and containment of an answer, with SQuAD's normalisation.

Every metric is from 0 to 1 and the best over all accepted answers.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces: as in SQuAD's own script, in its order."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(output: str, answers: Sequence[str]) -> float:
    found = normalise(output)
    return float(any(normalise(answer) == found for answer in answers))


def f1(output: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over words, counted with repetitions."""
    return max((_f1(normalise(output).split(), normalise(answer).split()) for answer in answers), default=0.0)


def _f1(found: list[str], wanted: list[str]) -> float:
    if not found or not wanted:  # empty after normalisation: right only if both are
        return float(found == wanted)
    same = sum((Counter(found) & Counter(wanted)).values())
    return 2 * same / (len(found) + len(wanted))  # = 2PR / (P + R)


def contains(output: str, answers: Sequence[str]) -> float:
    """The words of the answer are in the output, in sequence."""
    found = normalise(output).split()
    return float(any(_within(normalise(answer).split(), found) for answer in answers))


def _within(wanted: list[str], found: list[str]) -> bool:
    if not wanted:
        return not found
    return any(found[i : i + len(wanted)] == wanted for i in range(len(found) - len(wanted) + 1))


DRAWS = 4000
LEVEL = 0.95
VALUES_PER_BATCH = 4_000_000  # indices held in memory at once: 32 MB


def bootstrap(
    gains: Sequence[float], weights: Sequence[float] | None = None, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float, float]:
    """(difference, low, high): Σ gains / Σ weights over rows, and its percentile interval over resampled rows.

    gains: after - before, one value per row; weights: what they are divided by (1 per row, or the tokens of the row).
    """
    g = np.asarray(gains, np.float64)
    w = np.ones_like(g) if weights is None else np.asarray(weights, np.float64)
    n = len(g)
    if n == 0 or w.sum() <= 0:
        return math.nan, math.nan, math.nan
    value = float(g.sum() / w.sum())
    if n == 1:
        return value, -math.inf, math.inf  # no interval from one row
    random = np.random.default_rng(seed)
    drawn = np.empty(draws)
    step = max(1, VALUES_PER_BATCH // n)
    for start in range(0, draws, step):
        rows = random.integers(0, n, (min(step, draws - start), n))
        drawn[start : start + step] = g[rows].sum(1) / np.maximum(w[rows].sum(1), 1e-12)
    tail = _tail(n)
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return value, float(low), float(high)


def _tail(n: int) -> float:
    """Share of the draws cut off at either end, smaller for few rows: the variance of resampled rows is too small by
    (n - 1)/n, and is itself an estimate, which Student's t accounts for (Hesterberg 2015)."""
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    v = n - 1
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)  # Student's t with v degrees
    return NormalDist().cdf(-math.sqrt(n / v) * t)
