"""Scores of a model on held-out rows, and the comparison of two models.

Loss is in nats per token; the other scores are from 0 to 100, and None where no row has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edgeft.errors import ConfigError, DataError
from edgeft.evaluate import metrics
from edgeft.evaluate.metrics import LEVEL, bootstrap
from edgeft.evaluate.request import Response, RowProgress, Scorer
from edgeft.evaluate.suite import METRICS, Item, Suite, load_suite, suites
from edgeft.formats.tokenizer import Tokenizer
from edgeft.host import sandbox

__all__ = ["METRICS", "Record", "Scores", "Suite", "compare", "load_suite", "pick_examples", "score_items", "suites"]

LOWER_IS_BETTER = ("loss", "perplexity")
NO_CHANGE = 0.01  # nats per token: a smaller change of a row's loss does not count
CLEAR_POINTS = 5.0  # half the width of a 95 % interval, of 100 points, from which on more rows are not needed
LISTED = 50  # rows that got better, and worse, at most


@dataclass
class Record:
    """One row: accepted answers, the output, and its metrics (0 to 1; None where not measured)."""

    question: str
    answers: list[str]
    output: str | None = None
    exact_match: float | None = None
    f1: float | None = None
    contains: float | None = None
    accuracy: float | None = None  # the right choice or label
    accuracy_norm: float | None = None  # the right choice by likelihood per character
    nll: float = 0.0  # nats over the row's tokens
    tokens: int = 0
    source: str = ""

    @property
    def worth(self) -> float:
        """Sort key of rows; higher is better."""
        if self.f1 is not None:
            return self.f1 + (self.contains or 0.0)
        if self.accuracy is not None:
            return self.accuracy
        return -self.nll / max(self.tokens, 1)


@dataclass
class Scores:
    records: list[Record] = field(default_factory=list)  # in the rows' order

    def figure(self, name: str) -> float | None:
        if name in LOWER_IS_BETTER:
            tokens = sum(r.tokens for r in self.records)
            if not tokens:
                return None
            loss = sum(r.nll for r in self.records) / tokens
            return loss if name == "loss" else math.exp(min(loss, 700))
        values = [v for r in self.records if (v := getattr(r, name)) is not None]
        return 100 * sum(values) / len(values) if values else None

    def figures(self, names: Sequence[str] = METRICS) -> dict[str, float | None]:
        return {name: self.figure(name) for name in names}

    def __getattr__(self, name: str) -> float | None:
        if name in METRICS:
            return self.figure(name)
        raise AttributeError(name)


def score_items(
    scorer: Scorer, tokenizer: Tokenizer, items: Sequence[Item], suite: Suite, progress: RowProgress | None = None
) -> Scores:
    if not items:
        raise DataError("no held-out rows to score", "name a file with --data")
    responses = scorer.respond([item.request for item in items], suite.eval.max_new_tokens, progress)
    labels = labels_of(items, suite)
    pairs = zip(items, responses, strict=True)
    return Scores([make_record(item, one, tokenizer, suite, labels) for item, one in pairs])


def labels_of(items: Sequence[Item], suite: Suite) -> list[str]:
    return suite.labels or sorted({answer for item in items if item.kind == "label" for answer in item.answers})


def make_record(item: Item, response: Response, tokenizer: Tokenizer, suite: Suite, labels: Sequence[str]) -> Record:
    record = Record(item.question, item.answers, source=item.row.source)
    if item.kind == "choice":
        lengths = [len(text) for text in item.texts]
        raw = min(range(len(lengths)), key=lambda i: response.option_nll[i])
        normed = min(range(len(lengths)), key=lambda i: response.option_nll[i] / lengths[i])
        record.output = item.texts[raw]
        record.accuracy, record.accuracy_norm = float(raw == item.right), float(normed == item.right)
        return record
    record.nll = response.prompt_nll + sum(response.option_nll)
    record.tokens = len(item.request.targets) + sum(map(len, item.request.options))
    if item.kind == "loss":
        return record
    output = take(tokenizer.decode(response.output).strip(), suite.take)
    if item.kind == "label":
        label = nearest_label(output, labels)
        record.accuracy = float(label is not None and label in item.answers)
    record.output = output
    record.exact_match = metrics.exact_match(output, item.answers)
    record.f1 = metrics.f1(output, item.answers)
    record.contains = metrics.contains(output, item.answers)
    return record


def take(output: str, how: str) -> str:
    """The part of the output that is the answer; empty where the expression does not match."""
    if how == "all":
        return output
    if how == "first_line":
        return output.split("\n", 1)[0].strip()
    try:
        return sandbox.search(how, output).strip()
    except (sandbox.Broken, sandbox.Failed) as error:
        raise ConfigError(f"`take` is {how[:80]!r}, which cannot be used: {error}") from None


def nearest_label(output: str, labels: Sequence[str]) -> str | None:
    """The label equal to the output, else the longest label in it."""
    words = metrics.normalise(output.replace("_", " "))
    plain = {label: metrics.normalise(label.replace("_", " ")) for label in labels}
    for label, text in plain.items():
        if text == words:
            return label
    inside = [label for label, text in plain.items() if text and f" {text} " in f" {words} "]
    return max(inside, key=lambda label: len(plain[label]), default=None)


def compare(base: Scores | None, tuned: Scores, examples: int = 4, suite: Suite | None = None) -> dict[str, Any]:
    """The JSON of `edgeft eval`; both have the same rows."""
    suite = suite or Suite()
    result: dict[str, Any] = {
        "suite": suite.name or "qa",
        "version": suite.version,
        "rows": len(tuned.records),
        "base": base.figures(suite.metrics) if base else None,
        "tuned": tuned.figures(suite.metrics),
    }
    if base:
        result |= difference(base, tuned, suite.metrics, guard=suite.score == "mixed")
    return result | {"examples": pick_examples(base, tuned, examples)}


def difference(base: Scores, tuned: Scores, names: Sequence[str], guard: bool = False) -> dict[str, Any]:
    """Tuned minus base with its interval, the verdict, and the rows that changed, worst first."""
    differences: dict[str, Any] = {}
    pairs = list(zip(base.records, tuned.records, strict=True))
    for name in names:
        if name == "perplexity" or tuned.figure(name) is None:
            continue  # perplexity is exp(loss): the loss has the interval
        if name == "loss":
            value, low, high = bootstrap([t.nll - b.nll for b, t in pairs], [t.tokens for _, t in pairs])
        else:
            both = [(getattr(b, name), getattr(t, name)) for b, t in pairs]
            value, low, high = bootstrap([100 * (t - b) for b, t in both if t is not None])
        ends = [end if math.isfinite(end) else None for end in (low, high)]
        differences[name] = {"value": value, "low": ends[0], "high": ends[1], "level": LEVEL}
    changes = []
    for before, after in sorted(pairs, key=lambda pair: pair[1].worth - pair[0].worth):
        gain = after.worth - before.worth
        if abs(gain) > (1e-9 if after.f1 is not None or after.accuracy is not None else NO_CHANGE):
            changes.append(_pair(before, after) | {"gain": round(gain, 4)})
    worse, better = [c for c in changes if c["gain"] < 0], [c for c in changes if c["gain"] > 0]
    return {
        "difference": differences,
        "verdict": verdict(differences, guard),
        "changed": {"better": len(better), "worse": len(worse), "same": len(pairs) - len(changes)},
        "worse": worse[:LISTED],
        "better": better[::-1][:LISTED][::-1],  # the largest gains, in the same order: worst first
    }


def verdict(differences: dict[str, Any], guard: bool = False) -> dict[str, Any] | None:
    """By the first of these metrics that was measured; clear only if the interval excludes zero.

    guard: by the first metric that clearly got worse, if any: accuracy may hold while the loss on text rises.
    """
    verdicts = []
    for name in ("f1", "accuracy", "exact_match", "contains", "loss"):
        change = differences.get(name)
        if change is None:
            continue
        sign = -1 if name in LOWER_IS_BETTER else 1
        low, high = change["low"], change["high"]
        clear = low is not None and high is not None and (low > 0 or high < 0)
        better = change["value"] * sign > 0
        verdicts.append({"metric": name, "result": ("better" if better else "worse") if clear else "unclear"})
    worse = [one for one in verdicts if guard and one["result"] == "worse"]
    return next(iter(worse + verdicts), None)


def is_clear(base: Scores, tuned: Scores, suite: Suite) -> bool:
    """More rows are not needed: the verdict's interval excludes zero and is narrow. A loss has no such limit."""
    found = difference(base, tuned, suite.metrics, guard=suite.score == "mixed")
    if not found["verdict"] or found["verdict"]["result"] == "unclear" or found["verdict"]["metric"] in LOWER_IS_BETTER:
        return False
    change = found["difference"][found["verdict"]["metric"]]
    return bool(change["high"] - change["low"] <= 2 * CLEAR_POINTS)


def _pair(before: Record | None, after: Record) -> dict[str, Any]:
    base = before.output if before else None
    return {"question": after.question, "answers": after.answers, "base": base, "tuned": after.output}


def pick_examples(base: Scores | None, tuned: Scores, wanted: int) -> list[dict[str, Any]]:
    """A few rows for the reader: gains, spread over the set, and the worst row last, so that it does not mislead."""
    both = zip((base or tuned).records, tuned.records, strict=True)
    pairs = [(before, after) for before, after in both if after.output is not None]
    gains = [after.worth - before.worth for before, after in pairs]
    order = sorted(range(len(pairs)), key=lambda i: (pairs[i][1].worth, gains[i]))
    worst = [i for i in order[:1] if not (pairs[i][1].contains or pairs[i][1].accuracy)][: max(wanted - 1, 0)]
    others = [i for i in range(len(pairs)) if i not in worst]
    better = [i for i in others if gains[i] > 0 or not base] or others
    room = wanted - len(worst)
    spread = [better[k * len(better) // room] for k in range(room)] if len(better) > room else better
    return [_pair(pairs[i][0] if base else None, pairs[i][1]) for i in [*spread, *worst]]
