"""Tables of the commands that only show: data, doctor, recipes, devices, runs, cache, knobs."""

from __future__ import annotations

import itertools
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


def key_values(console: Console, rows: dict[str, str]) -> None:
    table = Table.grid(padding=(0, 3))
    for key, value in rows.items():
        table.add_row(Text(key, style="bold"), Text(value))
    console.print(table)


def print_cache(console: Console, folder: str, rows: list[dict[str, Any]]) -> None:
    """`edgeft cache`."""
    table = Table("part", "model", "cut", "tokens", "dtype", "size", "last used", "state")
    for row in rows:
        tokens = row["tokens"] if row["rows"] is None else f"of {row['rows']} rows"
        cells = (row["part"], row["model"], row["cut"], tokens, row["dtype"])
        values = ("" if cell is None else str(cell) for cell in cells)
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["used"]))
        table.add_row(*map(Text, values), f"{row['bytes'] / 2**20:.1f} MiB", used, row["state"])
    if rows:
        console.print(table)
    total = f"{sum(row['bytes'] for row in rows) / 2**20:.1f} MiB" if rows else "the cache is empty"
    console.print(f"{folder}: {total}", markup=False, soft_wrap=True)


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
        count = "" if row["train_rows"] is None else str(row["train_rows"])
        memory = "" if row["peak_bytes"] is None else format_size(row["peak_bytes"])
        duration = "" if row["seconds"] is None else format_duration(row["seconds"])
        model = row["model"].removesuffix(".gguf")
        table.add_row(row["run"], row["recipe"], model, count, _outcome(row), memory, duration)
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


def marked(pieces: list[dict[str, Any]]) -> Text:
    """A row as the model sees it; trained text is in ⟦ ⟧, so that it is visible without colour."""
    text = Text()
    for trained, group in itertools.groupby(pieces, key=lambda piece: piece["trained"]):
        inner = "".join(piece["text"] for piece in group)
        text.append(f"⟦{inner}⟧" if trained else inner, style="bold green" if trained else "dim")
    return text


def print_data(console: Console, summary: dict[str, Any]) -> None:
    """`edgeft data`: counts, lengths, dropped rows with the reason, one row as the model sees it."""
    shared, rows, usable, cut = (summary[key] for key in ("shared_prefix", "rows", "usable", "cut"))
    facts = {
        "format": summary["format"],
        "files": ", ".join(summary["files"]),
        "rows": f"{rows['train']} for training, {rows['heldout']} held out ({summary['split']})",
        "usable": f"{usable['train']} and {usable['heldout']} within {summary['max_tokens']} tokens",
        "truncated": f"{cut['rows']} rows lose {cut['tokens']} tokens of their context or oldest turns",
        "shared prefixes": f"{shared['row_tokens']} row tokens are {shared['tree_tokens']} computed "
        f"({shared['times']} ×)",
    }
    key_values(console, facts)
    for kind in ("dropped", "skipped"):
        for item in summary[kind]:
            text = f"{kind}: {item['rows']} × {item['reason']} (first: {item['first']})"
            console.print(text, markup=False, soft_wrap=True)
    histogram = summary["tokens"]["histogram"]
    console.print("\ntokens per row", style="bold")
    highest = max((bin["rows"] for bin in histogram), default=0) or 1
    for bin in histogram:
        bar = "█" * round(40 * bin["rows"] / highest) or ("▏" if bin["rows"] else "")
        upper = f"{bin['to']:>6}" if bin["to"] is not None else "  more"
        console.print(f"{bin['from']:>6} – {upper}  {bar} {bin['rows']}", markup=False)
    if summary["example"]:
        console.print(f"\none row ({summary['example']['source']}); trained text is in ⟦ ⟧", style="bold")
        console.print(marked(summary["example"]["pieces"]))


def _products(trials: dict[str, float]) -> dict[str, str]:
    """One line for each type and shape."""
    lines: dict[str, list[str]] = {}
    for name, value in trials.items():
        products, what, type_name, shape = name.split()
        if what == "error":
            lines.setdefault(f"  {type_name} {shape}", [products])[-1] += f" ({100 * value:.1g} %)"
        else:
            lines.setdefault(f"  {type_name} {shape}", []).append(f"{products} {what} {value:.0f}")
    return {name: ", ".join(parts) for name, parts in lines.items()}


def print_doctor(console: Console, machine: dict[str, Any]) -> None:
    """`edgeft doctor`."""
    gib = 2**30
    memory, cpu, gemm, disk = machine["memory"], machine["cpu"], machine["gemm"], machine["disk"]
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in gemm["gflops"].items()) or gemm["error"] or "not measured"
    limit = f", limited to {memory['limit_bytes'] / gib:.1f} GiB" if memory["limit_bytes"] else ""
    accelerator, compiler, power = machine["accelerator"], machine["compiler"], machine["power"]
    heat = ", ".join(f"{t['sensor']} {t['celsius']:.0f} °C" for t in machine["temperatures"]) or "no sensor"
    heat += f" · throttled now: {', '.join(machine['throttled'])}" if machine["throttled"] else ""
    batteries = ", ".join(f"{b['name']} {b['percent']} % {b['status']}" for b in power["batteries"]) or "no battery"
    bandwidth = ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in machine["bytes"].items()) or "not measured"
    vectors = " ".join(cpu["simd"]) or "no vector extensions detected"
    facts = {
        "system": " · ".join(str(v) for v in machine["system"].values() if v),
        "memory": f"{memory['physical_bytes'] / gib:.1f} GiB{limit}, {memory['available_bytes'] / gib:.1f} GiB free, "
        f"budget {memory['budget_bytes'] / gib:.1f} GiB",
        "processor": f"{cpu['name']} · {cpu['cores']} cores · {vectors}",
        "GEMM": f"{rates} GFLOPS on {gemm['threads']} threads",
        "memory bandwidth": bandwidth,
        "accelerator": f"{accelerator['kind']} {accelerator['name'] or ''}".strip(),
        "compiler": compiler["version"] if compiler else "none",
        "temperature": heat,
        "power": batteries,
        "disk": f"{disk['free_bytes'] / gib:.1f} GiB free in {disk['folder']} ({disk['kind'] or 'kind unknown'})",
        "versions": " · ".join(f"{k} {v or 'missing'}" for k, v in machine["versions"].items()),
        "profile": f"{machine['profile']['name']}: {machine['profile']['reason']}",
    }
    key_values(console, facts)
    if machine["products"]:
        console.print("\nproducts of edgeft's kernels with packed weights, GFLOPS (error against fp32):", style="bold")
        key_values(console, _products(machine["products"]))
    if machine["unavailable"]:
        console.print("\nnot available on this system:", style="bold")
        key_values(console, {f"  {row['what']}": row["why"] for row in machine["unavailable"]})
