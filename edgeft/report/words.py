"""Metrics and verdicts as text, for the command line, the report and the model card."""

from __future__ import annotations

from typing import Any

METRICS = {
    "loss": "loss",
    "perplexity": "perplexity",
    "exact_match": "exact match",
    "f1": "F1",
    "contains": "contains answer",
    "accuracy": "accuracy",
    "accuracy_norm": "accuracy per character",
}

ENDED = {"time limit": "time limit", "decided": "the difference is clear"}  # why not all rows were scored
PLAIN = ("loss", "perplexity")  # no percentages, and lower is better


def figure(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name == "perplexity":
        return f"{value:.1f}" if value < 1000 else f"{value:.3g}"
    return f"{value:.4f}" if name == "loss" else f"{value:.1f} %"


def difference(name: str, change: dict[str, Any] | None) -> str:
    """`+84.0 (+75.1 to +92.0)`."""
    if change is None:
        return ""
    value, low, high = (_signed(name, change[key]) for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})" if low else value


def _signed(name: str, value: float | None) -> str:
    return "" if value is None else f"{value:+.{3 if name in PLAIN else 1}f}"


def scored(result: dict[str, Any]) -> str:
    """`48 of 200 held-out rows (the difference is clear)`."""
    why = ENDED.get(str(result.get("ended")))
    return f"{result['rows']} of {result.get('of')} held-out rows ({why})" if why else f"{result['rows']} held-out rows"


def verdict(result: dict[str, Any]) -> str:
    """One sentence: better or not, by how much, with its interval."""
    if not result.get("verdict"):
        return ""
    name, outcome = result["verdict"]["metric"], result["verdict"]["result"]
    change = result["difference"][name]
    value, low, high = (_signed(name, change[key]) for key in ("value", "low", "high"))
    unit = "nats per token" if name == "loss" else "points"
    changed = f"{METRICS[name]} changed by {value} {unit}"
    if not low:
        return f"{changed}; one row gives no interval."
    interval = f"95 % interval {low} to {high}, {result['rows']} rows"
    if outcome == "unclear":
        return f"No clear difference: {changed}, and the interval contains zero ({interval})."
    word = "rose" if change["value"] > 0 else "fell"
    return f"{outcome.capitalize()}: {METRICS[name]} {word} by {value.lstrip('+-')} {unit} ({interval})."
