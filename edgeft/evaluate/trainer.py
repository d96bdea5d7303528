"""The trainer's own model as something that can be scored."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgeft.data.tokens import Encoded
from edgeft.data.tree import Forest
from edgeft.model.stack import Stack

TOKENS_AT_A_TIME = 2048


class StackScorer:
    """Loss on shared prefixes once; greedy answers in batches."""

    def __init__(self, stack: Stack, stop: frozenset[int]) -> None:
        self.stack, self.stop = stack, stop

    def loss(self, rows: Sequence[Encoded]) -> tuple[float, int]:
        forest = Forest(rows)
        everything = list(range(len(rows)))
        total = 0.0
        with torch.no_grad():
            for part in forest.micro_batches(everything, TOKENS_AT_A_TIME):
                _, batch = forest.batch(part)
                states = self.stack.top(self.stack.trunk(batch, 0), batch, 0)
                total += float(self.stack.head.loss(states, batch.targets))
        return total, forest.trained(everything)

    def generate(self, prompts: Sequence[Sequence[int]], max_new: int) -> list[list[int]]:
        return self.stack.generate(prompts, max_new, self.stop)
