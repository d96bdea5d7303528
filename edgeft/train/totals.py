"""What training counts: the totals of a step, skipped steps, and the remaining time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass
class StepTotals:
    """What the passes of one step came to."""

    loss: float = 0.0
    tokens: int = 0  # of the forest
    flops: float = 0.0  # needed


@dataclass
class Guard:
    """Steps whose loss or gradient is NaN or infinite: skipped and counted; too many in a row make training go back.

    It depends on the steps alone and is in every checkpoint, so that a resumed run does the same.
    """

    LIMIT: ClassVar[int] = 3  # skipped steps in a row, after which training goes back

    skipped: int = 0  # steps so far
    in_row: int = 0  # of them, the last ones
    rate: float = 1.0  # the learning rate's factor: below 1 once training has gone back

    def good(self, loss: float, norm: float) -> bool:
        """Counts a step."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_row = 0
            return True
        self.skipped += 1
        self.in_row += 1
        return False

    def why(self, loss: float, norm: float) -> str:
        return f"the gradient's norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"

    def back(self) -> None:
        self.in_row, self.rate = 0, 0.5


class Remaining:
    """How long a run will still take: the plan, corrected by what its steps have really taken."""

    def __init__(self, plan: dict[str, Any], steps: int) -> None:
        stages = plan.get("stages") or {}
        self.seconds = {
            name: float((stages.get(name) or {}).get("seconds") or 0.0) for name in ("train", "export", "eval")
        }
        self.steps, self.taken, self.done = steps, 0.0, 0

    def step(self, seconds: float) -> None:
        """One more is done."""
        self.done += 1
        self.taken += seconds

    def left(self, step: int) -> tuple[float, float] | None:
        """Seconds after so many steps: of training, and with the later stages; None: nothing was planned."""
        planned = self.seconds["train"] / max(1, self.steps)
        if not planned:
            return None
        # The plan counts as one step: the first ones, in which caches and threads warm up, do not decide alone.
        factor = (self.taken + planned) / ((self.done + 1) * planned)
        later = self.seconds["export"] + self.seconds["eval"]
        training = factor * planned * (self.steps - step)
        return training, training + factor * later
