"""How long a run will still take: the plan, corrected by what its steps have really taken."""

from __future__ import annotations

from typing import Any


class Remaining:
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
