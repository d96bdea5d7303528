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

PLAIN = ("loss", "perplexity")  # no percentages, and lower is better


def figure(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name == "perplexity":
        return f"{value:.1f}" if value < 1000 else f"{value:.3g}"
    return f"{value:.4f}" if name == "loss" else f"{value:.1f} %"


def difference(name: str, change: dict[str, Any] | None) -> str:
    """`+84.0 (75.1 to 92.0)`."""
    if change is None:
        return ""
    digits = 3 if name in PLAIN else 1
    interval = "" if change["low"] is None else f" ({change['low']:+.{digits}f} to {change['high']:+.{digits}f})"
    return f"{change['value']:+.{digits}f}{interval}"


def verdict(result: dict[str, Any]) -> str:
    """One sentence: better or not, by how much, with its interval."""
    found = result.get("verdict")
    if not found:
        return ""
    name = found["metric"]
    change = result["difference"][name]
    unit = "nats per token" if name == "loss" else "points"
    digits = 3 if name in PLAIN else 1
    if change["low"] is None:
        return f"{METRICS[name]} changed by {change['value']:+.{digits}f} {unit}; one row gives no interval."
    interval = f"95 % interval {change['low']:+.{digits}f} to {change['high']:+.{digits}f}, {result['rows']} rows"
    if found["result"] == "unclear":
        return (
            f"No clear difference: {METRICS[name]} changed by {change['value']:+.{digits}f} {unit}, and the interval "
            f"contains zero ({interval})."
        )
    word = "rose" if change["value"] > 0 else "fell"
    size = f"{abs(change['value']):.{digits}f} {unit}"
    return f"{found['result'].capitalize()}: {METRICS[name]} {word} by {size} ({interval})."
