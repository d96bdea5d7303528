"""Tables of the listing commands: recipes, devices, runs, cache, knobs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from edgeft.config import Device, Knob, Recipe, format_duration, format_size, scalar
from edgeft.report.words import METRICS, figure


def key_values(console: Console, rows: list[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 3))
    for key, value in rows:
        table.add_row(Text(key, style="bold"), Text(value))
    console.print(table)


def print_cache(console: Console, folder: str, rows: list[dict[str, Any]]) -> None:
    """`edgeft cache`."""
    table = Table("model", "cut", "tokens", "dtype", "size", "last used", "state")
    for row in rows:
        values = ("" if row[name] is None else str(row[name]) for name in ("model", "cut", "tokens", "dtype"))
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["used"]))
        table.add_row(*map(Text, values), f"{row['bytes'] / 2**20:.1f} MiB", used, row["state"])
    if rows:
        console.print(table)
    total = sum(row["bytes"] for row in rows) / 2**20
    console.print(f"{folder}: {total:.1f} MiB" if rows else f"{folder} is empty", markup=False, soft_wrap=True)


def print_recipes(console: Console, recipes: Iterable[Recipe]) -> None:
    """`edgeft recipes`."""
    table = Table("recipe", "for")
    for recipe in recipes:
        table.add_row(recipe.name, recipe.about)
    console.print(table)


def print_devices(console: Console, devices: Iterable[Device]) -> None:
    """`edgeft devices`."""
    table = Table("device", "machine", "memory", "budget", "cores")
    for device in devices:
        sizes = (f"{size / 2**30:.1f} GiB" for size in (device.ram_bytes, device.budget_bytes))
        table.add_row(device.name, device.about, *sizes, str(device.cores))
    console.print(table)


def print_runs(console: Console, folder: Path, rows: list[dict[str, Any]]) -> None:
    """`edgeft runs`."""
    # A run's name is an argument of the next command: it is never cut.
    table = Table(Column("run", overflow="fold"), "recipe", "model", "rows", "held-out score", "memory", "time")
    for row in rows:
        table.add_row(
            row["run"],
            row["recipe"],
            row["model"].removesuffix(".gguf"),
            "" if row["train_rows"] is None else str(row["train_rows"]),
            _outcome(row),
            "" if row["peak_bytes"] is None else format_size(row["peak_bytes"]),
            "" if row["seconds"] is None else format_duration(row["seconds"]),
        )
    console.print(table if rows else f"no runs in {folder}")


def _outcome(row: dict[str, Any]) -> str:
    """`F1 0.7 % → 100.0 %`, or how far the run got."""
    score, loss = row["score"], row["best_loss"]
    if score is not None:
        metric = score["metric"]
        return f"{METRICS[metric]} {figure(metric, score['base'])} → {figure(metric, score['tuned'])}"
    change = "" if loss is None else f", loss {figure('loss', row['base_loss'])} → {figure('loss', loss)}"
    return f"{row['state']}{change}"


def print_knobs(console: Console, knobs: Iterable[Knob]) -> None:
    """`edgeft knobs`: the key, then type, limits and default, then the explanation."""
    table = Table(Column("knob", no_wrap=True), "value", box=box.SIMPLE_HEAD, leading=1)
    for knob in knobs:
        key = knob.key if knob.file == "recipe" else f"{knob.key} ({knob.file})"
        kind = f"{knob.type}, {knob.limits}" if knob.limits else knob.type
        default = "none" if knob.default is None else scalar(knob.default)
        table.add_row(Text(key, style="bold"), Text(f"{kind}; default {default}\n").append(knob.about, style="dim"))
    console.print(table)
