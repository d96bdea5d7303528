"""Held-out rows that are equal or similar to a training row.

Another question on the same passage is no leak: questions are compared, and the words of plain texts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from edgeft.data.rows import Row

NEAR = 0.8  # least Jaccard similarity of two questions that count as similar
LETTERS = 5  # n-grams of a question, in letters
WORDS = 8  # n-grams of a text, in words
TEXT_SHARE = 0.5  # least share of a held-out text's n-grams in one training text


@dataclass(frozen=True)
class Leak:
    row: int  # number of the held-out row
    source: str  # file and line
    train_source: str
    kind: str  # exact or near
    similarity: float
    text: str  # the held-out question, or the start of the text


def find(train: Sequence[Row], heldout: Sequence[Row]) -> list[Leak]:
    """One leak per held-out row, with the most similar training row."""
    whole: dict[str, int] = {}
    for i, row in enumerate(train):
        whole.setdefault(_key(row), i)
    index = _Index([_pieces(row) for row in train])
    contexts = [_plain(row.context) for row in train]
    leaks = []
    for number, row in enumerate(heldout):
        same = whole.get(_key(row))
        if same is not None:
            leaks.append(Leak(number, row.source, train[same].source, "exact", 1.0, _shown(row)))
            continue
        text = row.text is not None
        context = _plain(row.context)
        best, at = 0.0, -1
        for i, share in index.like(_pieces(row), TEXT_SHARE if text else NEAR, contained=text):
            if (train[i].text is not None) == text and share > best and _same_context(context, contexts[i]):
                best, at = share, i
        if at >= 0:
            leaks.append(Leak(number, row.source, train[at].source, "near", round(best, 3), _shown(row)))
    return leaks


class _Index:
    """Rows by n-gram. Two sets that are similar enough share one of the rarest n-grams of either: only rows with one of
    those are compared."""

    def __init__(self, rows: list[frozenset[str]]) -> None:
        self.rows = rows
        self.where: dict[str, list[int]] = defaultdict(list)
        for i, row in enumerate(rows):
            for piece in row:
                self.where[piece].append(i)

    def like(self, pieces: frozenset[str], least: float, contained: bool) -> list[tuple[int, float]]:
        """(row, similarity) from `least` up: Jaccard, or with `contained` the share of `pieces` in the row."""
        rarest = sorted(pieces, key=lambda p: (len(self.where.get(p, ())), p))[: int((1 - least) * len(pieces)) + 1]
        near = {i for piece in rarest for i in self.where.get(piece, ())}
        sizes = ((i, len(pieces) if contained else len(pieces | self.rows[i])) for i in near)
        shares = ((i, len(pieces & self.rows[i]) / size) for i, size in sizes)
        return sorted((i, share) for i, share in shares if share >= least)


def _plain(text: str) -> str:
    """Lower case words and numbers only."""
    return " ".join(re.findall(r"\w+", text.lower()))


def _asked(row: Row) -> str:
    """All questions, without the context."""
    return " ".join(m["content"].removeprefix(row.context) for m in row.messages if m["role"] == "user")


def _key(row: Row) -> str:
    if row.text is not None:
        return "text|" + _plain(row.text)
    return f"{_plain(row.context)}|{_plain(_asked(row))}"


def _pieces(row: Row) -> frozenset[str]:
    if row.text is not None:
        words = _plain(row.text).split()
        return frozenset(" ".join(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1)))
    text = _plain(_asked(row))
    return frozenset(text[i : i + LETTERS] for i in range(max(1, len(text) - LETTERS + 1)))


def _same_context(a: str, b: str) -> bool:
    if a == b:
        return True
    first, second = set(a.split()), set(b.split())
    return bool(first and second) and len(first & second) >= NEAR * len(first | second)


def _shown(row: Row) -> str:
    return (_asked(row) if row.text is None else row.text).strip()[:200]
