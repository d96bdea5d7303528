"""A trial: a scheme tuned alone for a few steps, and what that brings on held-out rows.

It begins at its own cut, from what the blocks below give, which is kept in files; the stack is as it was afterwards.
"""

from __future__ import annotations

import torch

from edgeft.config import HowConfig, TrainConfig
from edgeft.model.stack import Stack
from edgeft.plan import Shape
from edgeft.sparse.contribution import Inputs, Sample, opened
from edgeft.sparse.scheme import Scheme
from edgeft.train import optimizer as optimizers
from edgeft.work import step_flops

STEPS = 6  # one part of the sample each


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
        parts = self.sample.parts
        with opened(self.stack, scheme) as parameters:
            optimizer = optimizers.make(parameters, self.train, self.how, self.stack.kernels)
            optimizer.set_rate(self.lr)
            for step in range(STEPS):
                place = step % len(parts)
                loss = self._loss(scheme.cut, place) / self.sample.forest.trained(parts[place])
                with optimizer.last_pass(float(loss.detach())):
                    loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            return base_loss - self.heldout_loss(scheme.cut)

    def _loss(self, cut: int, place: int) -> torch.Tensor:
        """Sum over the targets of one part."""
        _, batch = self.sample.forest.batch(self.sample.every()[place])
        hidden = self.stack.top(self.inputs.read(cut, place), batch, cut)
        return self.stack.head.loss(hidden, batch.targets)


def trial_flops(sample: Sample, shape: Shape, scheme: Scheme) -> float:
    """What a trial needs."""
    forest, total = sample.forest, 0.0
    used = [(sample.parts[step % len(sample.parts)], True) for step in range(STEPS)]
    for part, back in [*used, *((part, False) for part in sample.heldout)]:
        seen, targets = forest.positions[forest.nodes(part)] + 1, forest.trained(part)
        total += step_flops(shape, scheme, len(seen), int(seen.sum()), targets, 0, targets, back)
    return total
