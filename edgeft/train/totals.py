"""Counters of training: totals of a step, skipped steps, remaining time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass
class StepTotals:
    """Sums over the micro-batches of one step."""

    loss: float = 0.0
    tokens: int = 0  # of the forest
    flops: float = 0.0


@dataclass
class Guard:
    """Skips steps whose loss or gradient is NaN or infinite; too many in a row cause a rollback.

    It depends on the steps alone and is in every checkpoint, so that a resumed run does the same.
    """

    LIMIT: ClassVar[int] = 3  # skipped steps in a row that cause a rollback

    skipped: int = 0  # steps so far
    in_row: int = 0  # steps in a row, up to now
    rate: float = 1.0  # factor of the learning rate; below 1 after a rollback

    def good(self, loss: float, norm: float) -> bool:
        """Whether loss and gradient norm are finite; counts the step."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_row = 0
            return True
        self.skipped += 1
        self.in_row += 1
        return False

    def why(self, loss: float, norm: float) -> str:
        return f"the gradient's norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"

    def halve_rate(self) -> None:
        self.in_row, self.rate = 0, 0.5


class Remaining:
    """Remaining time of a run: the plan, corrected by the measured time of its steps."""

    def __init__(self, plan: dict[str, Any], steps: int) -> None:
        stages = plan.get("stages") or {}
        self.seconds = {
            name: float((stages.get(name) or {}).get("seconds") or 0.0) for name in ("train", "export", "eval")
        }
        self.steps, self.taken, self.done = steps, 0.0, 0

    def step(self, seconds: float) -> None:
        """Adds a measured step."""
        self.done += 1
        self.taken += seconds

    def _factor(self) -> float:
        """Measured over planned seconds."""
        planned = self.seconds["train"] / max(1, self.steps)
        # The plan counts as one step: the first steps, in which caches and threads warm up, do not decide alone.
        return (self.taken + planned) / ((self.done + 1) * planned) if planned else 0.0

    def training_s(self) -> float:
        """Seconds of training, from the first step to the last; 0: there is no plan."""
        return self._factor() * self.seconds["train"]

    def left(self, step: int) -> tuple[float, float] | None:
        """Remaining seconds after so many steps: of training, and with the later stages; None: there is no plan."""
        if not self.seconds["train"]:
            return None
        later = self._factor() * (self.seconds["export"] + self.seconds["eval"])
        training = self.training_s() * (self.steps - step) / max(1, self.steps)
        return training, training + later
