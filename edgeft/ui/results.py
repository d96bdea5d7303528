"""Results in the terminal: scores of base and tuned with some answers, and what a search chose."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgeft.config import TENSORS, format_duration, format_size
from edgeft.report.words import METRICS, difference, figure, scored, verdict
from edgeft.ui.console import one_line
from edgeft.ui.listing import key_values

SHOWN_CHARACTERS = 300  # of a question or an answer
MARKS = {0.0: "·", 0.125: "░", 0.25: "▒", 0.5: "▓", 1.0: "█"}  # trained share of the channels


def print_tasks(console: Console, result: dict[str, Any]) -> None:
    """`edgeft eval --lm-eval`."""
    table = Table("task", "metric", "base", "tuned")
    for task, values in result["tuned"].items():
        for metric, value in values.items():
            before = ((result["base"] or {}).get(task) or {}).get(metric)
            table.add_row(task, metric, "–" if before is None else f"{before:.4f}", f"{value:.4f}")
    console.print()
    console.print(table)


def print_compared(console: Console, result: dict[str, Any]) -> None:
    """`edgeft export --compare`: size, time and scores of each file."""
    table = Table(title=Text(f"{result['rows']} held-out rows, in llama.cpp"), title_justify="left")
    for title in ("file", "size", "of the base", "seconds", "loss", "F1", "contains answer"):
        table.add_column(title, justify="left" if title == "file" else "right")
    for one in result["files"]:
        if "error" in one:
            table.add_row(one["name"], "–", "–", "–", "–", "–", "–")
            continue
        base = result["base_bytes"]
        share = f"{one['bytes'] / base:.3f}" if base else "–"
        scores = (figure(name, one.get(name)) for name in ("loss", "f1", "contains"))
        table.add_row(one["name"], format_size(one["bytes"]), share, f"{one['seconds']:.0f}", *scores)
    console.print()
    console.print(table)
    if result["trained_loss"] is not None:
        console.print(f"held-out loss in training: {result['trained_loss']:.4f}")


def print_scores(console: Console, result: dict[str, Any]) -> None:
    """`edgeft eval`: metrics, verdict, counts of changed rows, examples."""
    console.print()
    console.print(_metrics(result))
    if result.get("verdict"):
        console.print(verdict(result), markup=False, soft_wrap=True)
    if counts := result.get("changed"):
        console.print(f"rows: {counts['better']} better, {counts['worse']} worse, {counts['same']} unchanged")
    examples = result.get("examples", [])
    for example in examples:
        _print_example(console, example)
    shown = [example["question"] for example in examples]
    for example in result.get("worse", [])[:3]:
        if example["tuned"] is not None and example["question"] not in shown:
            _print_example(console, example, " [red](worse than before)[/]")


def _metrics(result: dict[str, Any]) -> Table:
    table = Table(title=Text(scored(result)), title_justify="left")
    table.add_column("")
    names = [name for name in METRICS if name in result["tuned"]]
    for name in names:
        table.add_column(METRICS[name], justify="right")
    for who in ("base", "tuned"):
        if result.get(who) is not None:
            table.add_row(who, *(figure(name, result[who].get(name)) for name in names))
    if result.get("difference"):
        table.add_row("change", *(difference(name, result["difference"].get(name)) for name in names))
    return table


def _print_example(console: Console, example: dict[str, Any], mark: str = "") -> None:
    console.print(f"\n[bold]{one_line(example['question'])[:SHOWN_CHARACTERS]}[/]{mark}")
    console.print(f"  expected  {one_line(example['answers'][0])}")
    for who in ("base", "tuned"):
        if example.get(who) is not None:
            console.print(f"  {who:<8}  {one_line(example[who])[:SHOWN_CHARACTERS]}")


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
    legend = "digits: contribution, 9 = the most · trained: █ whole ▓ 1/2 ▒ 1/4 ░ 1/8 of the channels\n"
    console.print(legend, style="dim")
    agreed = result["rank_correlation"]
    correlation = "" if agreed is None else f"; rank correlation of first order and measured gain {agreed:.2f}"
    table = Table("search", "contribution", "of all")
    gains = {
        f"evolution, {compared['evaluations']} schemes": compared["evolution"],
        "  not started from greedy": compared["evolution_alone"],
        "greedy, contribution per cost": compared["greedy"],
        f"random, {compared['evaluations']} schemes": compared["random"],
        f"the last {compared['last_blocks']} blocks, whole": compared["last_blocks_gain"],
    }
    for name, gain in gains.items():
        table.add_row(name, f"{gain:.4g}", f"{gain / every:.1%}")
    console.print(table)
    facts = {
        "measured": f"{len(result['measured'])} candidates{correlation}",
        "expected": f"{result['trained_parameters'] / 1e6:.2f} M parameters from block {result['cut']} on, "
        f"{format_size(result['peak_bytes'])}, {format_duration(result['seconds'])} of training",
        "how": ", ".join(f"{key} {value}" for key, value in result["how"].items()) or "as the recipe says",
    }
    key_values(console, facts)
