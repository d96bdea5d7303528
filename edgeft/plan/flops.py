"""Steps of a run, their learning rates, and the floating-point operations that a scheme needs; no torch.

Operations are those of a perfect engine: products only, a multiply and an add as two, without norms and optimiser.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from edgeft.config import TrainConfig

if TYPE_CHECKING:
    from edgeft.methods.scheme import Scheme
    from edgeft.plan import Shape

# What a search looks at, in tokens of the forest: about a minute for a model of 135 M parameters on two cores
SAMPLE_TOKENS, HELDOUT_TOKENS = 6144, 3072
PART_TOKENS = 384  # of one pass: a trial from a low cut keeps activations of all blocks above it
WARM_STEPS = 16  # of biases and norms, before it looks
STEP_PARTS = 2  # of the sample, that make up a step
WITHOUT_GRADIENT = 2  # micro-batches may be so many times larger where no activation is kept for a backward pass
ATTENTION_BACK = 2.5  # products of its backward pass over those of the forward pass: five against two


class Pass(NamedTuple):
    """One forward pass, and perhaps a backward pass, over a few rows."""

    tokens: int  # of the forest
    pairs: int  # of tokens that see each other
    asked: int  # tokens at which something is predicted
    asked_pairs: int
    targets: int


def step_flops(shape: Shape, scheme: Scheme, sizes: Pass, back: bool = True) -> float:
    """Of one pass over the blocks from the cut on, forward and backward."""
    tokens, pairs, asked, asked_pairs, targets = sizes
    numbers = {name: rows * cols for name, rows, cols in shape.linears()}
    everywhere = numbers["k"] + numbers["v"]  # all that the last block computes for every token
    whole = shape.block_parameters
    last = 2.0 * (everywhere * tokens + (whole - everywhere) * asked)
    between = shape.depth - scheme.cut - 1
    forward = 2.0 * whole * tokens * between + last
    attention = 4.0 * shape.query * (pairs * between + asked_pairs)
    head = 2.0 * shape.vocabulary * shape.width * targets
    if not back:
        return forward + attention + head
    below = numbers["q"] + numbers["k"] + numbers["v"]  # of the cut: its input needs no gradient
    above = 2.0 * whole * tokens * max(0, between - 1) + last + 2.0 * (whole - below) * tokens
    updated = 0.0
    for number in scheme.blocks:
        for name, outputs, inputs in shape.linears():
            rows = asked if number == shape.depth - 1 and name not in ("k", "v") else tokens
            if share := scheme.share(number, name):
                updated += scheme.method.update_flops(scheme, share, outputs, inputs) * rows
    return forward + above + updated + (1 + ATTENTION_BACK) * attention + 2 * head


def part_tokens(sample_tokens: int) -> int:
    """Of one pass over a sample: both of its halves have rows, even if it is small."""
    return min(PART_TOKENS, max(1, sample_tokens // 4))


def search_tokens(train_tokens: int, heldout_tokens: int) -> float:
    """Tokens whose forward pass through all blocks is as much work as a search without trials."""
    sample = min(SAMPLE_TOKENS, train_tokens)
    warm = WARM_STEPS * STEP_PARTS * part_tokens(sample)
    # warm-up: forward, most of it again, and back; then forward, and block by block again, back, and for weights
    return 4 * warm + (1 + 4) * sample + min(HELDOUT_TOKENS, heldout_tokens)


def search_pays(train_tokens: int, heldout_tokens: int, epochs: float) -> bool:
    """Is training more work than the search before it?"""
    return 3 * train_tokens * epochs > search_tokens(train_tokens, heldout_tokens)


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
