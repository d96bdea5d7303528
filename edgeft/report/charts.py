"""The drawings of the report: which figures of a run go into which chart.

A chart without data is an empty string, and the page leaves its card out.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from edgeft import config
from edgeft.report import plots, words
from edgeft.report.summary import MAP_ROWS, RunSummary, TensorMap

MIB, GIB = 2**20, 2**30
FAR = 3.0  # a memory limit this many times the memory used is a note, not a line: it would flatten the plot
MAX_POINTS = 600  # of one line


def charts(run: RunSummary) -> dict[str, Markup]:
    result = run.result or {}
    parts = [("better", "better", "good"), ("unchanged", "same", "line"), ("worse", "worse", "bad")]
    changed = [(name, result["changed"][key], style) for name, key, style in parts if result.get("changed")]
    sizes = [("base", run.base_bytes), ("tuned", run.tuned_bytes)]
    files = [(name, float(count), config.format_size(count)) for name, count in sizes if count]
    return {
        "intervals": _interval_chart(result),
        "rows": plots.split_bar("Rows that changed", changed),
        "loss": _loss_chart(run),
        "memory": _memory_chart(run),
        "time": plots.bars("Time by stage", [(name, s, config.format_duration(s)) for name, s in run.stages]),
        "heat": _temperature_chart(run),
        "sizes": plots.bars("File size", files, [name for name, _, _ in files]),
        "files": _file_chart(run),
        "map": _tensor_chart(run.map) if run.map else Markup(),
    }


def comparison_charts(runs: Sequence[RunSummary]) -> dict[str, Markup]:
    """`loss` and `memory` of several runs."""
    loss = [plots.Line(run.name, run.heldout_loss, colour(i), dots=True) for i, run in enumerate(runs)]
    memory = [plots.Line(run.name, _gib(run.memory), colour(i)) for i, run in enumerate(runs)]
    return {
        "loss": _loss_lines("Held-out loss of each run", loss),
        "memory": plots.LineChart("Memory of each run", memory, "seconds of training", "GiB", from_zero=True).draw(),
    }


def colour(number: int) -> str:
    """Of a compared run."""
    return f"c{number % 5}"


def _tensor_chart(map: TensorMap) -> Markup:
    """With rows for norms and biases only where one moved."""
    rows = [row for row in MAP_ROWS if row not in ("norms", "biases") or any(key[1] == row for key in map.moved)]
    return plots.heat_map("What was updated: blocks and tensors", rows, map.depth, map.moved)


def far_limit(run: RunSummary) -> int | None:
    """The memory limit in bytes, where it is too far above the memory used to be drawn."""
    budget = run.plan.get("budget_bytes")
    used = [run.plan.get("peak_bytes") or 0, run.done.get("peak_bytes") or 0, *(count for _, count in run.memory)]
    return budget if budget and budget > FAR * max(used) else None


def _interval_chart(result: dict[str, object]) -> Markup:
    differences = result.get("difference")
    rows = [
        (words.METRICS[name], found["value"], found["low"], found["high"], found["value"] > 0)
        for name, found in (differences.items() if isinstance(differences, dict) else ())
        if name not in words.PLAIN and found["low"] is not None
    ]
    return plots.intervals("Change against the base model, in points", rows)


def _loss_chart(run: RunSummary) -> Markup:
    train = _thin(run.train_loss)
    each = plots.Line("training loss, each step", train, "faint")
    mean = plots.Line("training loss, running mean", _smooth(train), "base")
    heldout = plots.Line("held-out loss", run.heldout_loss, "tuned", dots=True)
    return _loss_lines("Loss over steps", [each, mean, heldout])


def _loss_lines(title: str, lines: list[plots.Line]) -> Markup:
    log = plots.needs_log_scale([y for line in lines for _, y in line.points])
    return plots.LineChart(title, lines, "step", "nats per token" + (", log scale" if log else ""), log=log).draw()


def _file_chart(run: RunSummary) -> Markup:
    """Size against loss of the files that `edgeft export --compare` wrote."""
    lines = [
        plots.Line(str(one["name"]), [(one["bytes"] / MIB, one["loss"])], colour(i), dots=True)
        for i, one in enumerate(run.compared)
    ]
    return plots.LineChart("Size and held-out loss of each file", lines, "MiB", "nats per token").draw()


def _memory_chart(run: RunSummary) -> Markup:
    planned, budget = run.plan.get("peak_bytes"), run.plan.get("budget_bytes")
    limits = [plots.Limit(f"planned {config.format_size(planned)}", planned / GIB, "c1")] if planned else []
    if budget and not far_limit(run):
        limits.append(plots.Limit(f"limit {config.format_size(budget)}", budget / GIB))
    lines = [plots.Line("resident memory", _gib(run.memory), "tuned")]
    axes = ("seconds of training", "GiB")
    return plots.LineChart("Memory while training", lines, *axes, limits, from_zero=True, area=True).draw()


def _temperature_chart(run: RunSummary) -> Markup:
    governor = run.recipe.governor
    named = (("target", governor.target_celsius, "c1"), ("limit", governor.limit_celsius, "bad"))
    limits = [plots.Limit(f"{name} {value:g} °C", value, style) for name, value, style in named if value]
    lines = [plots.Line("processor", _thin(run.heat), "tuned")]
    return plots.LineChart("Temperature", lines, "seconds since the first reading, with pauses", "°C", limits).draw()


def _gib(memory: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(seconds, count / GIB) for seconds, count in _thin(memory)]


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return points[:: -(-len(points) // MAX_POINTS) or 1]


def _smooth(points: plots.Points, share: float = 0.1) -> list[tuple[float, float]]:
    """A running mean, so that the trend is visible in the noise of the steps."""
    width = max(1, round(len(points) * share))
    return [
        (x, sum(y for _, y in points[max(0, i - width + 1) : i + 1]) / min(i + 1, width))
        for i, (x, _) in enumerate(points)
    ]
