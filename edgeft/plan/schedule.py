"""Steps of a run and their learning rates; no torch, so that they can be planned."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgeft.config import TrainConfig

WITHOUT_GRADIENT = 2  # micro-batches may be so many times larger where no activation is kept for a backward pass


@dataclass
class Schedule:
    """Steps and learning rates of a run."""

    rows: int
    train: TrainConfig
    width: int = 0  # of the model

    @property
    def peak(self) -> float:
        """Adam moves every weight by the rate; the more of them a sum has, the less each may move."""
        scaled = self.train.lr_width and self.width
        return self.train.lr * self.train.lr_width / self.width if scaled else self.train.lr

    @property
    def bias_peak(self) -> float:
        """Of biases and norms: they are in no sum over a width."""
        return self.train.bias_lr or self.peak

    @property
    def per_epoch(self) -> int:
        return -(-self.rows // self.train.batch_rows)

    @property
    def steps(self) -> int:
        steps = max(1, math.ceil(self.train.epochs * self.per_epoch))
        return min(steps, self.train.steps) if self.train.steps else steps

    @property
    def passes(self) -> float:
        """Over the rows: epochs, or fewer where `train.steps` ends it."""
        return self.steps / self.per_epoch

    def lr(self, step: int) -> float:
        return self.peak * self._share(step)

    def bias_lr(self, step: int) -> float:
        return self.bias_peak * self._share(step)

    def _share(self, step: int) -> float:
        """Of the peak: linear warm-up, then half a cosine down to final_lr."""
        warm = max(1, round(self.train.warmup * self.steps))
        if step < warm:
            return (step + 1) / warm
        share = (step - warm) / max(1, self.steps - warm)
        low = self.train.final_lr
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))

    def validate_after(self) -> set[int]:
        """Counts of finished steps after which the held-out loss is taken; the end is one of them."""
        times = self.train.validations
        return {max(1, round(self.steps * (i + 1) / times)) for i in range(times)}
