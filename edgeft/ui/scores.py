"""Scores in the terminal: base beside tuned, and some answers of both."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from edgeft.report.words import METRICS, difference, figure, verdict
from edgeft.ui.console import one_line

SHOWN_CHARACTERS = 300  # of a question or an answer


def print_tasks(console: Console, result: dict[str, Any]) -> None:
    """`edgeft eval --lm-eval`."""
    table = Table("task", "metric", "base", "tuned")
    for task, values in result["tuned"].items():
        for metric, value in values.items():
            before = ((result["base"] or {}).get(task) or {}).get(metric)
            table.add_row(task, metric, "–" if before is None else f"{before:.4f}", f"{value:.4f}")
    console.print()
    console.print(table)


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
    table = Table(title=f"{result['rows']} held-out rows", title_justify="left")
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
