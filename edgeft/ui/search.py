"""A search in the terminal: the heat map of contributions, and the compared searches."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgeft.config import TENSORS, format_duration, format_size
from edgeft.ui.listing import key_values

MARKS = {0.0: "·", 0.125: "░", 0.25: "▒", 0.5: "▓", 1.0: "█"}  # trained share of the channels


def heat_map(result: dict[str, Any]) -> Text:
    """Blocks from left to right: a digit for a tensor's contribution (9 = the most), a mark for its trained share."""

    values, shares = result["contribution"], result["shares"]
    highest = max(max(row) for row in values) or 1.0
    depth = len(values)
    text = Text("block  " + "".join(f"{n:<10}" for n in range(0, depth, 5)).rstrip() + "\n", style="dim")
    for number, tensor in enumerate(TENSORS):
        text.append(f"{tensor:<7}")
        for value, share in ((values[b][number], shares[b][number]) for b in range(depth)):
            level = max(0.0, value) / highest
            text.append(str(min(9, int(10 * level))), style=f"rgb({int(80 + 175 * level)},{int(90 + 60 * level)},90)")
            text.append(MARKS[share], style="bold" if share else "dim")
        text.append("\n")
    if result["biased_blocks"]:
        start = depth - result["biased_blocks"]
        text.append("biases " + "· " * start + "▔▔" * result["biased_blocks"] + "\n")
    return text


def print_search(console: Console, result: dict[str, Any]) -> None:
    """`edgeft search`: the heat map, the check by trials, and evolution beside other searches."""
    compared, every = result["compared"], result["all_gain"] or 1.0
    console.print()
    console.print(heat_map(result), no_wrap=True, overflow="ignore", crop=False)
    console.print(
        "digits: contribution, 9 = the most · trained: █ whole ▓ 1/2 ▒ 1/4 ░ 1/8 of the channels\n", style="dim"
    )
    agreed = result["rank_correlation"]
    measured = f"{len(result['measured'])} candidates" + (
        "" if agreed is None else f"; rank correlation of first order and measured gain {agreed:.2f}"
    )
    table = Table("search", "contribution", "of all")
    rows = [
        (f"evolution, {compared['evaluations']} schemes", compared["evolution"]),
        ("  not started from greedy", compared["evolution_alone"]),
        ("greedy, contribution per cost", compared["greedy"]),
        (f"random, {compared['evaluations']} schemes", compared["random"]),
        (f"the last {compared['last_blocks']} blocks, whole", compared["last_blocks_gain"]),
    ]
    for name, gain in rows:
        table.add_row(name, f"{gain:.4g}", f"{gain / every:.1%}")
    console.print(table)
    key_values(
        console,
        [
            ("measured", measured),
            (
                "expected",
                f"{result['trained_parameters'] / 1e6:.2f} M parameters from block {result['cut']} on, "
                f"{format_size(result['peak_bytes'])}, {format_duration(result['seconds'])} of training",
            ),
            ("how", ", ".join(f"{key} {value}" for key, value in result["how"].items()) or "as the recipe says"),
        ],
    )
