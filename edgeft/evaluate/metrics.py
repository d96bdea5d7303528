"""Exact match, token F1 and containment of an answer, with SQuAD's normalisation.

Every metric is from 0 to 1 and the best over all accepted answers.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

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
