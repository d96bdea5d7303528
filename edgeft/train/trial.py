"""A trial: a scheme tuned alone for a few steps, and what that brings on held-out rows.

It begins at its own cut, from what the blocks below give, which is kept in files; the stack is as it was afterwards.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from edgeft.config import HowConfig, TrainConfig
from edgeft.model.stack import Stack
from edgeft.plan import Shape
from edgeft.sparse.contribution import Inputs, Sample, opened
from edgeft.sparse.scheme import Scheme
from edgeft.train import optimizer as optimizers
from edgeft.work import step_flops

STEPS = 6
PARTS = 2  # of the sample, that make up a step


class Trials:
    """Trials over one sample, all at the same learning rate."""

    def __init__(
        self, stack: Stack, sample: Sample, inputs: Inputs, train: TrainConfig, how: HowConfig, lr: float
    ) -> None:
        self.stack, self.sample, self.inputs = stack, sample, inputs
        self.train, self.how, self.lr = train, how, lr

    def heldout_loss(self, cut: int) -> float:
        """Mean nats per target over the held-out rows, of the stack as it is."""
        rows = [row for part in self.sample.heldout for row in part]
        first = len(self.sample.parts)
        with torch.no_grad():
            total = sum(float(self._loss(cut, first + n)) for n in range(len(self.sample.heldout)))
        return total / self.sample.forest.trained(rows)

    def gain(self, scheme: Scheme, base_loss: float) -> float:
        """By how much the held-out loss falls."""
        with opened(self.stack, scheme) as parameters:
            optimizer = optimizers.make(parameters, self.train, self.how, self.stack.kernels)
            optimizer.set_rate(self.lr)
            for step in range(STEPS):
                places, total = _places(self.sample, step), 0.0
                targets = sum(self.sample.forest.trained(self.sample.parts[place]) for place in places)
                for place in places:
                    loss = self._loss(scheme.cut, place) / targets
                    total += float(loss.detach())
                    with optimizer.last_pass(total) if place == places[-1] else nullcontext():
                        loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            return base_loss - self.heldout_loss(scheme.cut)

    def _loss(self, cut: int, place: int) -> torch.Tensor:
        """Sum over the targets of one part."""
        _, batch = self.sample.forest.batch(self.sample.every()[place])
        hidden = self.stack.top(self.inputs.read(cut, place), batch, cut)
        return self.stack.head.loss(hidden, batch.targets)


def _places(sample: Sample, step: int) -> list[int]:
    """The parts of a step: one after the other, and again from the first one."""
    count = len(sample.parts)
    return [(PARTS * step + number) % count for number in range(min(PARTS, count))]


def trial_flops(sample: Sample, shape: Shape, scheme: Scheme) -> float:
    """What a trial needs."""
    forest, total = sample.forest, 0.0
    used = [(sample.parts[place], True) for step in range(STEPS) for place in _places(sample, step)]
    for part, back in [*used, *((part, False) for part in sample.heldout)]:
        seen, targets = forest.positions[forest.nodes(part)] + 1, forest.trained(part)
        total += step_flops(shape, scheme, len(seen), int(seen.sum()), targets, 0, targets, back)
    return total
