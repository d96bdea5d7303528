"""A trial: a scheme tuned alone for a few steps, and what that brings on held-out rows.

It begins at its own cut, from what the blocks below give, which is kept in files; the stack is as it was afterwards.
Before any of them the model is warmed up, which is what the others begin from.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from edgeft.config import ExecutionConfig, TrainConfig
from edgeft.engine import optimizer as optimizers
from edgeft.engine.batch import batch_of
from edgeft.engine.optimizer import Optimizer
from edgeft.engine.stack import Stack
from edgeft.methods import SPARSE
from edgeft.methods import scheme as schemes
from edgeft.methods.scheme import Scheme
from edgeft.plan import Shape
from edgeft.plan.flops import STEP_PARTS, WARM_STEPS, Pass, step_flops
from edgeft.plan.schedule import Schedule
from edgeft.search.contribution import Inputs, Sample, temporarily_trainable

STEPS = 6
WARM_RATE = 2e-3  # as in `bias-norm`


class Trials:
    """Trials over one sample, all at the peak of the same learning rates."""

    def __init__(self, stack: Stack, sample: Sample, inputs: Inputs, rates: Schedule, how: ExecutionConfig) -> None:
        self.stack, self.sample, self.inputs = stack, sample, inputs
        self.rates, self.how = rates, how

    def heldout_loss(self, cut: int) -> float:
        """Mean nats per target over the held-out rows, of the stack as it is."""
        rows = [row for part in self.sample.heldout for row in part]
        first = len(self.sample.parts)
        with torch.no_grad():
            total = sum(float(self._loss(cut, first + n)) for n in range(len(self.sample.heldout)))
        return total / self.sample.forest.trained(rows)

    def gain(self, scheme: Scheme, base_loss: float) -> float:
        """By how much the held-out loss falls."""
        with temporarily_trainable(self.stack, scheme) as parameters:
            optimizer = optimizers.make(parameters, self.rates.train, self.how, self.stack.options.backend)
            optimizer.set_rate(self.rates.peak, self.rates.bias_peak)
            _tune(self.sample, optimizer, STEPS, lambda place: self._loss(scheme.cut, place))
            return base_loss - self.heldout_loss(scheme.cut)

    def _loss(self, cut: int, place: int) -> torch.Tensor:
        """Sum over the targets of one part."""
        _, batch = batch_of(self.sample.forest, self.sample.every()[place])
        hidden = self.stack.top(self.inputs.read(cut, place), batch, cut)
        return self.stack.head.loss(hidden, batch.targets)


def warm_up(stack: Stack, sample: Sample, train: TrainConfig, how: ExecutionConfig, tell: Callable[[], None]) -> None:
    """Biases and norms of all blocks, tuned for WARM_STEPS steps and left so; calls `tell` after each.

    What an answer looks like is learned first, on all data in much the same places. Where it is known, gradients show
    what is still to be learned.
    """
    blocks = range(stack.depth)
    able = frozenset((block, tensor) for block in blocks for tensor in stack.arch.biases)
    before = stack.options.recompute
    stack.configure(recompute="full" if before == "full" else "selective")
    parameters = schemes.apply(stack, Scheme(SPARSE, {}, able, frozenset(blocks)), seed=0)
    optimizer = optimizers.make(parameters, replace(train, optimizer="adamw"), how, stack.options.backend)
    optimizer.set_rate(WARM_RATE)

    def loss(place: int) -> torch.Tensor:
        _, batch = batch_of(sample.forest, sample.parts[place])
        return stack.head.loss(stack.top(stack.embed(batch.tokens), batch, 0), batch.targets)

    _tune(sample, optimizer, WARM_STEPS, loss, tell)
    stack.configure(recompute=before)
    for parameter in parameters.values():
        parameter.requires_grad_(False)
        parameter.grad = None


def _tune(
    sample: Sample,
    optimizer: Optimizer,
    steps: int,
    loss_of: Callable[[int], torch.Tensor],
    tell: Callable[[], None] = lambda: None,
) -> None:
    """loss_of: the sum over the targets of one part."""
    for step in range(steps):
        places, total = _places(sample, step), 0.0
        targets = sum(sample.forest.trained(sample.parts[place]) for place in places)
        for place in places:
            loss = loss_of(place) / targets
            total += float(loss.detach())
            with optimizer.last_pass(total) if place == places[-1] else nullcontext():
                loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        tell()


def _places(sample: Sample, step: int) -> list[int]:
    """The parts of a step: one after the other, and again from the first one."""
    count = len(sample.parts)
    return [(STEP_PARTS * step + number) % count for number in range(min(STEP_PARTS, count))]


def trial_flops(sample: Sample, shape: Shape, scheme: Scheme) -> float:
    """What a trial needs."""
    forest, total = sample.forest, 0.0
    used = [(sample.parts[place], True) for step in range(STEPS) for place in _places(sample, step)]
    for part, back in [*used, *((part, False) for part in sample.heldout)]:
        seen, targets = forest.positions[forest.nodes(part)] + 1, forest.trained(part)
        total += step_flops(shape, scheme, Pass(len(seen), int(seen.sum()), targets, 0, targets), back)
    return total
