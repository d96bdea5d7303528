"""A plan in the terminal: a table of terms by stage, and each stage as a bar against the budget."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgeft.config import UpdateConfig, format_count, format_duration, format_size
from edgeft.plan.memory import EVICTABLE, TERMS

COLOURS = ("white", "blue", "green", "yellow", "magenta", "red", "cyan", "bright_black", "bright_blue", "bright_green")
MARKS = "█▓▒░▉▊▋▌▍▎"  # neighbours differ without colour, too
LEAST_BYTES = 1 << 20  # smaller terms are not drawn
WIDTH = 56


def print_plan(console: Console, plan: dict[str, Any]) -> None:
    """`edgeft plan`."""
    console.print(_table(plan))
    _bars(console, plan)
    for line in lines(plan):
        console.print(line, markup=False, soft_wrap=True)


def _table(plan: dict[str, Any]) -> Table:
    stages = plan["stages"]
    table = Table(title="memory by stage, at its peak", title_justify="left")
    table.add_column("")
    for name in stages:
        table.add_column(name, justify="right")
    for term in TERMS:
        if any(stage["terms"][term] for stage in stages.values()):
            table.add_row(term, *(format_size(n) if (n := stage["terms"][term]) else "" for stage in stages.values()))
    table.add_section()
    totals = [(format_size(stage["bytes"]), name == plan["peak_stage"]) for name, stage in stages.items()]
    table.add_row(Text("total", style="bold"), *(Text(size, style="bold" if peak else "") for size, peak in totals))
    table.add_row(
        f"{EVICTABLE}, evictable", *(format_size(n) if (n := s["terms"][EVICTABLE]) else "" for s in stages.values())
    )
    if plan["seconds"] is not None:
        table.add_row("time", *(format_duration(stage["seconds"]) for stage in stages.values()))
    return table


def _bars(console: Console, plan: dict[str, Any]) -> None:
    """Terms as pieces of a bar for each stage; `|` is the budget."""
    stages, budget = plan["stages"], plan["budget_bytes"]
    most = max(stage["bytes"] for stage in stages.values())
    shown = budget if most <= budget <= 3 * most else most  # against a far larger budget the bars would vanish
    used: list[str] = []
    for name, stage in stages.items():
        bar, at, held = Text(), 0, 0
        for number, term in enumerate(TERMS):
            held += stage["terms"][term]
            end = round(WIDTH * held / shown)
            if end > at and stage["terms"][term] >= LEAST_BYTES:
                bar.append(MARKS[number] * (end - at), style=COLOURS[number])
                used += [] if term in used else [term]
                at = end
        limit = "|" if shown == budget else ""
        console.print(Text(f"{name:<8} "), bar, Text(" " * (WIDTH - at) + limit), sep="", end="\n", soft_wrap=True)
    legend = Text("         ")
    for number, term in enumerate(TERMS):
        if term in used:
            legend.append(MARKS[number], style=COLOURS[number]).append(f" {term}  ")
    console.print(legend)
    console.print()


def lines(plan: dict[str, Any]) -> list[str]:
    """The plan in a few lines, as `finetune` prints it."""
    how, rows, disk = plan["how"], plan["rows"], plan["disk"]
    budget = plan["budget_bytes"]
    allowed = f" of {format_size(budget)} allowed" if budget else ""
    execution = [f"micro-batches of {how['micro_batch_tokens']} tokens"]
    execution += ["gradient checkpointing"] if how["recompute"] else []
    execution += ["trunk block by block"] if how["trunk_order"] == "blocks" and "trunk" in plan["stages"] else []
    execution += ["releasing pages of mapped weights"] if how["spare_memory"] else []
    execution += [f"{how['optimizer_state']} optimiser state"] if how["optimizer_state"] not in ("fp32", "auto") else []
    execution += ["bf16 weights, stochastically rounded"] if how["weights"] == "bf16" else []
    execution += ["each tensor updated as soon as its gradient is complete"] if how["step_in_place"] else []
    engine = "kernels" if plan["engine"]["kernels"] else "plain torch"
    engine += "" if plan["engine"]["products"] == "fp32" else f", {plan['engine']['products']} GEMMs"
    largest = sorted(plan["terms"].items(), key=lambda item: -item[1])[:3]
    terms = ", ".join(f"{name} {format_size(bytes_)}" for name, bytes_ in largest)
    sampled = ", estimated from the first rows" if rows["sampled"] else ""
    text = [
        f"memory: {format_size(plan['peak_bytes'])} planned{allowed}, in the {plan['peak_stage']} stage ({terms})",
        f"how: {', '.join(execution)}; {engine}",
        f"rows: {rows['train']} for training, {format_count(rows['tokens'])} tokens, "
        f"{format_count(rows['tree_tokens'])} computed "
        f"({rows['heldout']} held out, up to {rows['scored']} scored at the end; "
        f"the longest row has {rows['longest']}{sampled}); "
        f"{format_count(plan['trained_parameters'])} trained parameters",
        f"disk: {format_size(sum(disk.values()))} needed "
        f"({', '.join(f'{what} {format_size(bytes_)}' for what, bytes_ in disk.items() if bytes_)}); "
        f"about {format_size(sum(plan['written'].values()))} written in all",
    ]
    if plan["search_seconds"]:
        text.append(
            f"search: runs before training, about {format_duration(plan['search_seconds'])}; "
            f"the figures above and below are for blocks {UpdateConfig().blocks}, the upper limit of what it may choose"
        )
    if plan["seconds"] is not None:
        by = ", ".join(f"{name} {format_duration(stage['seconds'])}" for name, stage in plan["stages"].items())
        text.append(
            f"time: about {format_duration(plan['seconds'])} for {plan['steps']} steps and all stages ({by}); "
            f"most of it in {plan['bound']}; rates: {plan['machine']['rates']}"
        )
    else:
        text.append("time: unknown, the profile has no `gemm_gflops`")
    return text + [f"fitted: {change}" for change in plan["changed"]]
