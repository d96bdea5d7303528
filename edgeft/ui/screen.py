"""What the commands draw: progress, tables and marked text; plain lines where the output is no terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from edgeft.config import format_duration, format_size
from edgeft.run.progress import Progress

PLAIN_EVERY_S = 10.0  # without a terminal, one line so often


class Screen(Progress):
    """A bar in a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: Bar | None = None
        self.name, self.total, self.done = "", 0.0, 0.0
        self.began = self.said = 0.0
        self.paused_at: float | None = None
        self.paused_s = 0.0
        self.stage_left_s: float | None = None  # how long this stage and
        self.all_left = ""  # the whole run will take, where somebody said so

    def clock(self) -> float:
        """Stands still in a pause, so that the time left is that of work."""
        return (time.monotonic() if self.paused_at is None else self.paused_at) - self.paused_s

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    def stage(self, name: str, total: float) -> None:
        self.end()
        self.name, self.total, self.done = name, total, 0.0
        self.stage_left_s, self.all_left = None, ""
        self.began = self.said = self.clock()
        if self.console.is_terminal:
            self.bar = Bar(
                TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"), console=self.console, transient=True,
                get_time=self.clock,
            )  # fmt: skip
            self.bar.add_task(name, total=total, note="")
            self.bar.start()

    def left(self, stage_s: float, all_s: float) -> None:

        self.stage_left_s, self.all_left = stage_s, f", {format_duration(all_s)} with the stages to come"

    def plan(self, plan: dict[str, Any]) -> None:
        from edgeft.ui.plan import print_plan

        print_plan(self.console, plan)

    def advance(self, amount: float, note: str = "") -> None:

        self.done += amount
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], advance=amount, note=note + self.all_left)
        elif amount and self.clock() - self.said >= PLAIN_EVERY_S:
            self.said = self.clock()
            left = self.stage_left_s
            if left is None:
                left = (self.said - self.began) / max(self.done, 1e-9) * (self.total - self.done)
            told = f"{note} · {format_duration(left)} left{self.all_left}"
            self.console.print(f"{self.name} {self.done:g}/{self.total:g} · {told}", soft_wrap=True)

    def line(self, text: str) -> None:
        target = self.bar.console if self.bar is not None else self.console
        target.print(text, markup=False, soft_wrap=True)

    def pause(self, text: str) -> None:
        self.line(text)
        self.paused_at = time.monotonic()

    def go_on(self, text: str) -> None:
        if self.paused_at is not None:
            self.paused_s += time.monotonic() - self.paused_at
            self.paused_at = None
        self.line(text)

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


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


MARKS = {0.0: "·", 0.125: "░", 0.25: "▒", 0.5: "▓", 1.0: "█"}  # share of the channels that is trained


def heat_map(found: dict[str, Any]) -> Text:
    """Blocks from left to right: a digit for what a tensor contributes (9 = the most), a mark for what is trained."""
    from edgeft.config import TENSORS

    values, shares = found["contribution"], found["shares"]
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
    if found["biased_blocks"]:
        start = depth - found["biased_blocks"]
        text.append("biases " + "· " * start + "▔▔" * found["biased_blocks"] + "\n")
    return text


def print_search(console: Console, found: dict[str, Any]) -> None:
    """`edgeft search`: the heat map, how sure it is, and evolution beside other ways to search."""

    compared, every = found["compared"], found["all_gain"] or 1.0
    console.print()
    console.print(heat_map(found), no_wrap=True, overflow="ignore", crop=False)
    console.print(
        "digits: contribution, 9 = the most · trained: █ whole ▓ 1/2 ▒ 1/4 ░ 1/8 of the channels\n", style="dim"
    )
    agreed = found["rank_correlation"]
    measured = f"{len(found['measured'])} candidates" + (
        "" if agreed is None else f"; rank correlation of first order and measured gain {agreed:.2f}"
    )
    table = Table("search", "contribution", "of all")
    rows = [
        (f"evolution, {compared['evaluations']} schemes", compared["evolution"]),
        ("  without greedy's answer to begin with", compared["evolution_alone"]),
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
                "to expect",
                f"{found['trained_parameters'] / 1e6:.2f} M parameters from block {found['cut']} on, "
                f"{format_size(found['peak_bytes'])}, {format_duration(found['seconds'])} of training",
            ),
            ("how", ", ".join(f"{key} {value}" for key, value in found["how"].items()) or "as the recipe says"),
        ],
    )
