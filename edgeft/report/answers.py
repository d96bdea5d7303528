"""Answers of the base and the tuned model side by side, with the words that differ marked."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from edgeft.evaluate import metrics

SHOWN = 6  # rows in view; the others are folded
FOLDED = 20  # rows in each folded list
MAX_CHARS = 600  # of a question or an answer


@dataclass
class Side:
    model: str  # base or tuned
    right: bool  # the expected answer is in it
    text: Markup


@dataclass
class Answer:
    question: str
    expected: str
    sides: list[Side]


def side_by_side(result: dict[str, Any]) -> dict[str, list[Answer]]:
    """`shown`, and the folded lists `worse` and `better`, largest change first."""
    shown = [e for e in result.get("examples", []) if e.get("tuned") is not None]
    worse, better = (
        [{k: v for k, v in e.items() if k != "gain"} for e in result.get(key, []) if e.get("tuned") is not None]
        for key in ("worse", "better")
    )
    better.reverse()
    for example in [*worse[:2], *better]:
        if len(shown) < SHOWN and example not in shown:
            shown.append(example)
    lists = {"shown": shown, "worse": worse[:FOLDED], "better": better[:FOLDED]}
    return {name: [_answer(example) for example in rows] for name, rows in lists.items()}


def _answer(example: dict[str, Any]) -> Answer:
    base, tuned, accepted = example.get("base"), example["tuned"], example["answers"]
    old, new = difference_marked(base, tuned) if base is not None else (Markup(), escape(tuned))
    sides = [
        Side(model, bool(metrics.contains(text, accepted)), marked)
        for model, text, marked in (("base", base, old), ("tuned", tuned, new))
        if text is not None
    ]
    return Answer(example["question"][:MAX_CHARS], accepted[0][:MAX_CHARS] if accepted else "", sides)


def difference_marked(before: str, after: str) -> tuple[Markup, Markup]:
    """Words that only the first text has are in <del>, words that only the second has in <ins>."""
    a, b = (re.findall(r"\S+\s*", text[:MAX_CHARS]) for text in (before, after))  # words with the space behind them
    old, new = Markup(), Markup()
    matched = difflib.SequenceMatcher(None, [w.strip() for w in a], [w.strip() for w in b], autojunk=False)
    for kind, a0, a1, b0, b1 in matched.get_opcodes():
        old += _marked("del", "".join(a[a0:a1]), kind)
        new += _marked("ins", "".join(b[b0:b1]), kind)
    return old, new


def _marked(tag: str, text: str, kind: str) -> Markup:
    inner = text.rstrip()  # the space behind a mark stays outside
    if kind == "equal" or not inner:
        return escape(text)
    return Markup("<{0}>{1}</{0}>{2}").format(tag, inner, text[len(inner) :])
