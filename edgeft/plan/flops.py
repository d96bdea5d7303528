"""Steps of a run, their learning rates, and the FLOPs of a scheme; no torch.

FLOPs are those of an ideal engine: GEMMs only, a multiply-add counts as two, without norms and optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from edgeft.config import TrainConfig

if TYPE_CHECKING:
    from edgeft.methods.scheme import Scheme
    from edgeft.plan import Shape

# Sample of a search, in tokens of the forest: about a minute for a model of 135 M parameters on two cores
SAMPLE_TOKENS, HELDOUT_TOKENS = 6144, 3072
PART_TOKENS = 384  # of one pass: a trial with a low cut saves activations of all blocks above it
WARM_STEPS = 16  # on biases and norms, before gradients are measured
STEP_PARTS = 2  # parts of the sample in one step
MIN_VALIDATION_ROWS = 32
# Rows whose gradients choose channels or directions: until they have this many tokens
CHOOSING_ROWS, MIN_CHOOSING_ROWS, CHOOSING_TOKENS = 16, 4, 1536
FARTHEST = 4.0  # the largest factor that `train.lr_loss` makes
WITHOUT_GRADIENT = 2  # micro-batches may be this much larger where no activation is saved for a backward pass
ATTENTION_BACK = 2.5  # GEMMs of the backward pass over those of the forward pass: five to two


class Pass(NamedTuple):
    """Sizes of one forward pass, with or without a backward pass, over a few rows."""

    tokens: int  # of the forest
    pairs: int  # of tokens, one attending to the other
    outputs: int  # tokens whose logits are needed
    output_pairs: int
    targets: int
    live: int  # tokens through which gradients pass
    live_pairs: int

    @classmethod
    def whole(cls, tokens: int, pairs: int, outputs: int, output_pairs: int, targets: int) -> Pass:
        """Gradients pass through every token."""
        return cls(tokens, pairs, outputs, output_pairs, targets, tokens, pairs)


def attended(shape: Shape, cut: int, sizes: Pass, live: bool = False) -> int:
    """Pairs of tokens in the blocks from the cut on; live: of those through which gradients pass."""
    last = range(shape.depth - 1, shape.depth)
    tokens, pairs = (sizes.live, sizes.live_pairs) if live else (sizes.tokens, sizes.pairs)
    between = shape.attended(range(cut, shape.depth - 1), tokens, pairs)
    return between + shape.attended(last, sizes.outputs, sizes.output_pairs)


def step_flops(shape: Shape, scheme: Scheme, sizes: Pass, back: bool = True) -> float:
    """Of one pass over the blocks from the cut on; back: with the backward pass."""
    tokens, _, outputs, _, targets, live, _ = sizes
    parameters = {name: rows * cols for name, rows, cols in shape.linears()}
    everywhere = parameters["k"] + parameters["v"]  # the last block computes only these for every token
    block = shape.block_parameters

    def last(count: int) -> float:
        return 2.0 * (everywhere * count + (block - everywhere) * outputs)

    between = shape.depth - scheme.cut - 1
    forward = 2.0 * block * tokens * between + last(tokens)
    attention = 4.0 * shape.query * attended(shape, scheme.cut, sizes)
    head = 2.0 * shape.vocabulary * shape.width * targets
    if not back:
        return forward + attention + head
    below = parameters["q"] + parameters["k"] + parameters["v"]  # the cut's input needs no gradient
    above = 2.0 * block * live * max(0, between - 1) + last(live) + 2.0 * (block - below) * live
    updated = 0.0
    for number in scheme.blocks:
        for name, out_features, in_features in shape.linears():
            rows = outputs if number == shape.depth - 1 and name not in ("k", "v") else live
            if update := scheme.updates.get((number, name)):
                updated += scheme.method.update_flops(update, out_features, in_features) * rows
    attention_back = ATTENTION_BACK * 4.0 * shape.query * attended(shape, scheme.cut, sizes, live=True)
    return forward + above + updated + attention + attention_back + 2 * head


def part_tokens(sample_tokens: int) -> int:
    """Of one pass over a sample, small enough that both halves of the sample have rows."""
    return min(PART_TOKENS, max(1, sample_tokens // 4))


def search_tokens(train_tokens: int, heldout_tokens: int) -> float:
    """The work of a search without trials, in tokens of a forward pass through all blocks."""
    sample = min(SAMPLE_TOKENS, train_tokens)
    warm = WARM_STEPS * STEP_PARTS * part_tokens(sample)
    # warm-up: forward, partly recomputed, backward; then forward, and by block: recomputed, input and weight gradients
    return 4 * warm + (1 + 4) * sample + min(HELDOUT_TOKENS, heldout_tokens)


def search_pays(train_tokens: int, heldout_tokens: int, epochs: float) -> bool:
    """Whether training is more work than the search before it."""
    return 3 * train_tokens * epochs > search_tokens(train_tokens, heldout_tokens)


def choosing_rows(tokens: Sequence[int]) -> int:
    """Of rows of these lengths, how many are looked at before training, where gradients choose what is trained."""
    few = sum(total < CHOOSING_TOKENS for total in accumulate(tokens[:CHOOSING_ROWS]))
    return min(len(tokens), CHOOSING_ROWS, max(MIN_CHOOSING_ROWS, few + 1))


def support_rate(share: float) -> float:
    """Factor of the learning rates where only this share of the numbers is trained: about 3 for 1 %. A step is then a
    third as long as one of all numbers; at higher rates the few numbers jump about."""
    return math.pow(share, -0.25)


@dataclass
class Schedule:
    """Steps and learning rates of a run."""

    rows: int
    train: TrainConfig
    width: int = 0  # of the model
    base_loss: float = math.nan  # on held-out rows, before training

    @property
    def peak(self) -> float:
        """Adam moves every weight by about the learning rate: the wider the layer, the lower it must be."""
        scaled = self.train.lr_width and self.width
        return self.train.lr * self.train.lr_width / self.width if scaled else self.train.lr

    @property
    def bias_peak(self) -> float:
        """Of biases and norms, which do not depend on the width."""
        return self.train.bias_lr or self.peak

    @property
    def low_rank_peak(self) -> float:
        """Of low-rank updates. A step moves them equally far on all rows; what the model knows least is farther."""
        scaled = self.train.lr_width and self.width
        rate = self.train.low_rank_lr or self.train.lr
        rate = rate * self.train.lr_width / self.width if scaled else rate
        far = self.base_loss / self.train.lr_loss if self.train.lr_loss else 1.0
        return rate * min(FARTHEST, far**2) if far > 1 else rate

    @property
    def per_epoch(self) -> int:
        return -(-self.rows // self.train.batch_rows)

    @property
    def steps(self) -> int:
        steps = max(1, math.ceil(self.train.epochs * self.per_epoch))
        return min(steps, self.train.steps) if self.train.steps else steps

    @property
    def passes(self) -> float:
        """Over the rows: epochs, or fewer where `train.steps` ends training."""
        return self.steps / self.per_epoch

    def lr(self, step: int) -> float:
        return self.peak * self._share(step)

    def bias_lr(self, step: int) -> float:
        return self.bias_peak * self._share(step)

    def low_rank_lr(self, step: int) -> float:
        return self.low_rank_peak * self._share(step)

    def _share(self, step: int) -> float:
        """Factor of the peak: linear warm-up, then cosine decay to final_lr."""
        warm = max(1, round(self.train.warmup * self.steps))
        if step < warm:
            return (step + 1) / warm
        share = (step - warm) / max(1, self.steps - warm)
        low = self.train.final_lr
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))

    def validation_rows(self, heldout: int) -> int:
        """Held-out rows whose loss is taken; a training row costs a forward and about two in the backward pass."""
        if not self.train.validation_share:
            return heldout
        work = self.train.validation_share * 3 * self.passes * self.rows
        return min(heldout, max(MIN_VALIDATION_ROWS, int(work / (1 + min(self.train.validations, self.steps)))))

    def validate_after(self) -> set[int]:
        """Finished steps after which the held-out loss is measured; the last step is one of them."""
        times = self.train.validations
        return {max(1, round(self.steps * (i + 1) / times)) for i in range(times)}
