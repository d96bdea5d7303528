"""Progress in the terminal: a bar, or plain lines where the output is not a terminal."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from edgeft.config import format_duration
from edgeft.run.progress import Progress

PLAIN_EVERY_S = 10.0  # between two lines, without a terminal


class Screen(Progress, AbstractContextManager["Screen"]):
    """A bar in a terminal, a line every 10 seconds elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: Bar | None = None
        self.name, self.total, self.done = "", 0.0, 0.0
        self.began = self.printed = 0.0
        self.paused_at: float | None = None
        self.paused_s = 0.0
        self.stage_left_s: float | None = None  # remaining seconds of this stage; None: extrapolated
        self.all_left = ""  # remaining time of the whole run

    def clock(self) -> float:
        """Stops during a pause, so that the remaining time counts work only."""
        return (time.monotonic() if self.paused_at is None else self.paused_at) - self.paused_s

    def __exit__(self, *error: object) -> None:
        self.end()

    def stage(self, name: str, total: float) -> None:
        self.end()
        self.name, self.total, self.done = name, total, 0.0
        self.stage_left_s, self.all_left = None, ""
        self.began = self.printed = self.clock()
        if self.console.is_terminal:
            self.bar = Bar(
                TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"), console=self.console, transient=True, get_time=self.clock,
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
        elif amount and self.clock() - self.printed >= PLAIN_EVERY_S:
            self.printed = self.clock()
            left = self.stage_left_s
            if left is None:
                left = (self.printed - self.began) / max(self.done, 1e-9) * (self.total - self.done)
            parts = [f"{self.name} {self.done:g}/{self.total:g}", *([note] if note else [])]
            parts.append(f"{format_duration(left)} left{self.all_left}")
            self.console.print(" · ".join(parts), soft_wrap=True)

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)  # above the bar, which has the same console

    def pause(self, text: str) -> None:
        self.line(text)
        self.paused_at = time.monotonic()

    def resume(self, text: str) -> None:
        if self.paused_at is not None:
            self.paused_s += time.monotonic() - self.paused_at
            self.paused_at = None
        self.line(text)

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
