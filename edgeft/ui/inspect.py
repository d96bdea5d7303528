"""`edgeft data` and `edgeft doctor` in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from edgeft.ui.listing import key_values


def marked(pieces: list[dict[str, Any]]) -> Text:
    """A row as the model sees it; what is trained stands out, also without colour."""
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


def print_data(console: Console, found: dict[str, Any]) -> None:
    """`edgeft data`: counts, lengths, what is lost and why, one row as the model sees it."""
    shared = found["shared_prefix"]
    key_values(
        console,
        [
            ("format", found["format"]),
            ("files", ", ".join(found["files"])),
            ("rows", f"{found['rows']['train']} to train on, {found['rows']['heldout']} held out ({found['split']})"),
            (
                "usable",
                f"{found['usable']['train']} and {found['usable']['heldout']} within {found['max_tokens']} tokens",
            ),
            (
                "cut",
                f"{found['cut']['rows']} rows lose {found['cut']['tokens']} tokens of their context or oldest turns",
            ),
            (
                "shared prefixes",
                f"{shared['row_tokens']} row tokens are {shared['tree_tokens']} computed ({shared['times']} ×)",
            ),
        ],
    )
    for kind in ("dropped", "skipped"):
        for item in found[kind]:
            console.print(
                f"{kind}: {item['rows']} × {item['reason']} (first: {item['first']})", markup=False, soft_wrap=True
            )
    tokens = found["tokens"]
    console.print("\ntokens per row", style="bold")
    highest = max([bin["rows"] for bin in tokens["histogram"]] or [1]) or 1
    for bin in tokens["histogram"]:
        bar = "█" * round(40 * bin["rows"] / highest) or ("▏" if bin["rows"] else "")
        upper = f"{bin['to']:>6}" if bin["to"] is not None else "  more"
        console.print(f"{bin['from']:>6} – {upper}  {bar} {bin['rows']}", markup=False)
    if found["example"]:
        console.print(f"\none row ({found['example']['source']}); what is trained stands in ⟦ ⟧", style="bold")
        console.print(marked(found["example"]["pieces"]))


def print_doctor(console: Console, found: dict[str, Any]) -> None:
    """`edgeft doctor`."""
    gib = 2**30
    memory, cpu, gemm, disk = found["memory"], found["cpu"], found["gemm"], found["disk"]
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in gemm["gflops"].items()) or gemm["error"] or "not measured"
    limit = f", limited to {memory['limit_bytes'] / gib:.1f} GiB" if memory["limit_bytes"] else ""
    accelerator, compiler, power = found["accelerator"], found["compiler"], found["power"]
    heat = ", ".join(f"{t['sensor']} {t['celsius']:.0f} °C" for t in found["temperatures"]) or "no sensor"
    heat += f" · slowed down now by {', '.join(found['throttled'])}" if found["throttled"] else ""
    batteries = ", ".join(f"{b['name']} {b['percent']} % {b['status']}" for b in power["batteries"]) or "no battery"
    profile = found["profile"]
    key_values(
        console,
        [
            ("system", " · ".join(str(v) for v in found["system"].values() if v)),
            (
                "memory",
                f"{memory['physical_bytes'] / gib:.1f} GiB{limit}, {memory['available_bytes'] / gib:.1f} GiB free, "
                f"budget {memory['budget_bytes'] / gib:.1f} GiB",
            ),
            (
                "processor",
                f"{cpu['name']} · {cpu['cores']} cores · {' '.join(cpu['simd']) or 'no vector extensions known'}",
            ),
            ("matrix products", f"{rates} GFLOPS on {gemm['threads']} threads"),
            ("bytes", ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in found["bytes"].items()) or "not measured"),
            ("accelerator", f"{accelerator['kind']} {accelerator['name'] or ''}".strip()),
            ("compiler", compiler["version"] if compiler else "none"),
            ("temperature", heat),
            ("power", batteries),
            ("disk", f"{disk['free_bytes'] / gib:.1f} GiB free in {disk['folder']} ({disk['kind'] or 'kind unknown'})"),
            ("versions", " · ".join(f"{k} {v or 'missing'}" for k, v in found["versions"].items())),
            ("profile", f"{profile['name']}: {profile['reason']}"),
        ],
    )
