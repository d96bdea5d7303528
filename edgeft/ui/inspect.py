"""`edgeft data` and `edgeft doctor` in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from edgeft.ui.listing import key_values


def marked(pieces: list[dict[str, Any]]) -> Text:
    """A row as the model sees it; trained text is in ⟦ ⟧, so that it is visible without colour."""
    text = Text()
    inside = False
    for piece in pieces:
        if piece["trained"] != inside:
            text.append("⟦" if piece["trained"] else "⟧", style="bold green")
            inside = piece["trained"]
        text.append(piece["text"], style="bold green" if inside else "dim")
    if inside:
        text.append("⟧", style="bold green")
    return text


def print_data(console: Console, summary: dict[str, Any]) -> None:
    """`edgeft data`: counts, lengths, dropped rows with the reason, one row as the model sees it."""
    shared, rows, usable, cut = (summary[key] for key in ("shared_prefix", "rows", "usable", "cut"))
    key_values(
        console,
        [
            ("format", summary["format"]),
            ("files", ", ".join(summary["files"])),
            ("rows", f"{rows['train']} for training, {rows['heldout']} held out ({summary['split']})"),
            ("usable", f"{usable['train']} and {usable['heldout']} within {summary['max_tokens']} tokens"),
            ("truncated", f"{cut['rows']} rows lose {cut['tokens']} tokens of their context or oldest turns"),
            (
                "shared prefixes",
                f"{shared['row_tokens']} row tokens are {shared['tree_tokens']} computed ({shared['times']} ×)",
            ),
        ],
    )
    for kind in ("dropped", "skipped"):
        for item in summary[kind]:
            console.print(
                f"{kind}: {item['rows']} × {item['reason']} (first: {item['first']})", markup=False, soft_wrap=True
            )
    tokens = summary["tokens"]
    console.print("\ntokens per row", style="bold")
    highest = max([bin["rows"] for bin in tokens["histogram"]] or [1]) or 1
    for bin in tokens["histogram"]:
        bar = "█" * round(40 * bin["rows"] / highest) or ("▏" if bin["rows"] else "")
        upper = f"{bin['to']:>6}" if bin["to"] is not None else "  more"
        console.print(f"{bin['from']:>6} – {upper}  {bar} {bin['rows']}", markup=False)
    if summary["example"]:
        console.print(f"\none row ({summary['example']['source']}); trained text is in ⟦ ⟧", style="bold")
        console.print(marked(summary["example"]["pieces"]))


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
    profile = machine["profile"]
    key_values(
        console,
        [
            ("system", " · ".join(str(v) for v in machine["system"].values() if v)),
            (
                "memory",
                f"{memory['physical_bytes'] / gib:.1f} GiB{limit}, {memory['available_bytes'] / gib:.1f} GiB free, "
                f"budget {memory['budget_bytes'] / gib:.1f} GiB",
            ),
            (
                "processor",
                f"{cpu['name']} · {cpu['cores']} cores · {' '.join(cpu['simd']) or 'no vector extensions detected'}",
            ),
            ("GEMM", f"{rates} GFLOPS on {gemm['threads']} threads"),
            (
                "memory bandwidth",
                ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in machine["bytes"].items()) or "not measured",
            ),
            ("accelerator", f"{accelerator['kind']} {accelerator['name'] or ''}".strip()),
            ("compiler", compiler["version"] if compiler else "none"),
            ("temperature", heat),
            ("power", batteries),
            ("disk", f"{disk['free_bytes'] / gib:.1f} GiB free in {disk['folder']} ({disk['kind'] or 'kind unknown'})"),
            ("versions", " · ".join(f"{k} {v or 'missing'}" for k, v in machine["versions"].items())),
            ("profile", f"{profile['name']}: {profile['reason']}"),
        ],
    )
    if machine["unavailable"]:
        console.print("\nnot available on this system:", style="bold")
        key_values(console, [(f"  {row['what']}", row["why"]) for row in machine["unavailable"]])
