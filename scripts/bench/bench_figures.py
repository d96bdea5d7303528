"""What `bench.py` makes of the events that contenders write down: curves, ratios, the table, the plot.

Nothing here runs a model. Seconds are training seconds: from the start of the process, without validations.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
from bench_peers import PEFT

NAMES = (*PEFT, "mlx-lm", "edgeft")
Curve = list[list[float]]  # [[seconds, held-out loss], …]
Events = Sequence[dict[str, Any]]


class BenchError(Exception):
    """What is wrong with the call or the files, in one line."""


# ---------------------------------------------------------------- events to figures


def validation_seconds(events: Events) -> list[float]:
    """Seconds of each validation: what its event says, else the time since the event before it (its step).

    Before the first step that would be the trunk pass as well; the others' median stands in.
    """
    found: list[float | None] = []
    for before, event in zip([None, *events], events, strict=False):
        if event["event"] != "validation":
            continue
        if "seconds" in event:
            found.append(float(event["seconds"]))
        elif before is not None and event["step"] > 0:
            found.append(float(event["time"] - before["time"]))
        else:
            found.append(None)
    typical = statistics.median([s for s in found if s is not None] or [0.0])
    return [typical if s is None else s for s in found]


def make_curve(events: Events, started: float, extra_s: float = 0.0) -> Curve:
    """Held-out loss against training seconds. `started`: Unix time; `extra_s`: work done for it elsewhere."""
    curve, spent = [], 0.0
    validations = [event for event in events if event["event"] == "validation"]
    for event, seconds in zip(validations, validation_seconds(events), strict=True):
        spent += seconds
        curve.append([round(event["time"] - started - spent + extra_s, 3), float(event["heldout_loss"])])
    return curve


def reaches(curve: Curve, loss: float) -> float | None:
    """The first moment at which the curve, straight between its points, is at `loss` or below; None if never."""
    before: list[float] | None = None
    for seconds, value in curve:
        if value <= loss:
            if before is None:
                return seconds
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (seconds - before[0])
        before = [seconds, value]
    return None


def step_gflops(events: Events) -> float | None:
    """Work needed ÷ time of the steps, in GFLOPS; None where a step does not say what it needed."""
    steps = [event for event in events if event["event"] == "step"]
    seconds = sum(event["seconds"] for event in steps)
    if not seconds or any(event.get("flops") is None for event in steps):
        return None
    return float(sum(event["flops"] for event in steps) / seconds / 1e9)


def tokens(events: Events) -> int:
    return sum(event["tokens"] for event in events if event["event"] == "step")


# ---------------------------------------------------------------- results together


def earlier(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Results of an earlier call with the same settings; none if the file is not there."""
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        results, before = list(found["results"]), dict(found["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        raise BenchError(f"{path} is there already and is no result of this script: name another --out") from None
    keys = dict.fromkeys([*before, *settings])
    changed = [f"{k} {before.get(k)!r} → {settings.get(k)!r}" for k in keys if before.get(k) != settings.get(k)]
    if changed:
        raise BenchError(f"{path} was made with other settings ({'; '.join(changed)}): name another --out")
    return results


def reference(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The peer that everything is measured against: the fastest of those on the same rows. Empty if none ran."""
    peers = [r for r in results if r["comparable"] and r["name"] != "edgeft"]
    return min(peers, key=lambda r: float(r["seconds"]), default={})


def merge(kept: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """New results in the place of kept ones of the same name, in a fixed order, measured against the reference.

    The goal is the held-out loss of the model that the reference hands over: its best one.
    """
    by_name = {result["name"]: dict(result) for result in [*kept, *new]}
    results = [by_name[name] for name in NAMES if name in by_name]
    goal = reference(results).get("heldout_loss")
    for result in results:
        at = None if goal is None or not result["comparable"] else reaches(result["curve"], goal)
        result["seconds_to_reference"] = None if at is None else round(at, 2)
    return results


# ---------------------------------------------------------------- for people


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown; `×` columns are against the reference's whole time and its memory, `±` against its F1."""
    against = reference(results)
    titles = ["", "seconds", "to reference", "× time", "peak GiB", "× memory"]
    titles += ["held-out loss", "F1", "± F1", "exact match", "share of GEMM", "of fp32 GEMM"]

    def ratio(value: float | None, of: float | None) -> str:
        return "" if value is None or not of else f"{value / of:.3f}"

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    lines = []
    for r in results:
        base = against if r["comparable"] else {}
        f1, base_f1 = r["f1"], base.get("f1")
        cells = [
            f"{r['name']} (reference)" if r is against else r["name"],
            number(r["seconds"], 1),
            number(r["seconds_to_reference"], 1),
            ratio(r["seconds_to_reference"], base.get("seconds")),
            f"{r['peak_bytes'] / 2**30:.2f}",
            ratio(r["peak_bytes"], against.get("peak_bytes")),
            number(r["heldout_loss"], 4),
            number(f1, 1),
            "" if f1 is None or base_f1 is None else f"{f1 - base_f1:+.1f}",
            number(r["exact_match"], 1),
            *("" if r.get(key) is None else f"{100 * r[key]:.0f} %" for key in ("share_of_gemm", "share_of_fp32_gemm")),
        ]
        lines.append(cells)
    return common.table(titles, lines)


def plot(results: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Held-out loss against training seconds; the dashed line is what the reference hands over."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    against = reference(results)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for r in results:
        if not r["comparable"]:
            continue
        points = axes.plot(*zip(*r["curve"], strict=True), marker="o", markersize=3, label=r["name"])
        if r is against:
            axes.axhline(r["heldout_loss"], color=points[0].get_color(), linestyle="--", linewidth=0.8)
    axes.set(xlabel="training seconds, loading included, validation not", ylabel="held-out loss", title=title)
    axes.set_yscale("log")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
