"""How much of the rows was read: whole rows, tokens, ROUGE-1 and ROUGE-2; the template's own tokens do not count."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from edgeft.formats.tokenizer import Tokenizer


@dataclass(frozen=True)
class Score:
    """Shares from 0 to 1, over the rows of one message; each row beside the reading that is most like it."""

    rows: int
    exact: int  # rows read token by token
    tokens: float  # of the rows' tokens, counted with repetitions, in whatever order
    rouge1: float  # F1 over words
    rouge2: float  # F1 over pairs of neighbouring words


def score(
    rows: Sequence[Sequence[int]], read: Sequence[Sequence[int]], bag: Sequence[int], tokenizer: Tokenizer
) -> tuple[Score, list[Sequence[int]]]:
    """(the score, the reading of each row). rows: token ids without the template's prefix; bag: tokens without order,
    of which at most as many count as the rows have."""
    best = [max(read, key=lambda one, row=row: _overlap(row, one), default=[]) for row in rows]  # type: ignore[misc]
    found = sum(_common(row, one) for row, one in zip(rows, best, strict=True))
    total = sum(map(len, rows))
    loose = _common([token for row in rows for token in row], list(bag)[:total])
    texts = [(tokenizer.decode(row), tokenizer.decode(one)) for row, one in zip(rows, best, strict=True)]
    rouges = [[rouge(*pair, size) for pair in texts] for size in (1, 2)]
    exact = sum(list(row) == list(one) for row, one in zip(rows, best, strict=True))
    count = max(1, len(rows))
    return Score(len(rows), exact, max(found, loose) / max(1, total), *(sum(r) / count for r in rouges)), best


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum((Counter(a) & Counter(b)).values())


def _overlap(row: Sequence[int], one: Sequence[int]) -> tuple[int, int]:
    """Tokens at their places, then tokens at any place."""
    return sum(a == b for a, b in zip(row, one, strict=False)), _common(row, one)


def rouge(wanted: str, found: str, size: int) -> float:
    """F1 over sequences of `size` words, without case or punctuation."""
    a, b = (_grams(re.findall(r"\w+", text.lower()), size) for text in (wanted, found))
    same, every = sum((a & b).values()), sum(a.values()) + sum(b.values())
    return 2 * same / every if every else 0.0


def _grams(words: list[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[n:] for n in range(size)), strict=False))
