"""Progress reports of the stages: the command line draws them, tests and scripts may ignore them."""

from __future__ import annotations

from typing import Any


class Progress:
    """Ignores all reports; `ui.screen.Screen` draws them."""

    def stage(self, name: str, total: float) -> None:
        """A stage begins; `total` is the sum of all `advance` calls."""

    def advance(self, amount: float, note: str = "") -> None:
        """A part of the stage is done."""

    def left(self, stage_s: float, all_s: float) -> None:
        """Remaining seconds of this stage, and of the run with all later stages."""

    def plan(self, plan: dict[str, Any]) -> None:
        """The plan of the run, before it begins."""

    def line(self, text: str) -> None:
        """A line that stays on the screen."""

    def pause(self, text: str) -> None:
        """A pause begins; it does not count in the remaining time."""
        self.line(text)

    def resume(self, text: str) -> None:
        """The pause is over."""
        self.line(text)

    def end(self) -> None:
        """The stage is over."""
