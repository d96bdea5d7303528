"""How stages tell what they do; the command line draws it, tests and scripts may leave it silent."""

from __future__ import annotations

from typing import Any


class Progress:
    """Says nothing. The command line has one that draws."""

    def stage(self, name: str, total: float) -> None:
        """A stage begins; `total` is what `advance` will add up to."""

    def advance(self, amount: float, note: str = "") -> None:
        """A part of the stage is done."""

    def left(self, stage_s: float, all_s: float) -> None:
        """So long will the rest of this stage take, and all that follows, later stages included."""

    def plan(self, plan: dict[str, Any]) -> None:
        """What the run will need, before it begins."""

    def line(self, text: str) -> None:
        """Something worth keeping on the screen."""

    def pause(self, text: str) -> None:
        """Work stops for a while: what is left takes no longer for that."""
        self.line(text)

    def go_on(self, text: str) -> None:
        """The pause is over."""
        self.line(text)

    def end(self) -> None:
        """The stage is over."""
