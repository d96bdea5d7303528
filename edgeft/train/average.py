"""An exponential moving average of the trained tensors, which is validated and exported in their place.

Training itself never reads it. It is saved with the weights, so that a resumed run ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

PREFIX = "average."  # of its tensors' names in a checkpoint


class Average:
    """decay: `train.average`; 0: there is none, and the weights stand for themselves."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], decay: float) -> None:
        self.decay, self.parameters = decay, parameters if decay else {}
        self.values = {name: torch.zeros_like(parameter.detach()) for name, parameter in self.parameters.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """By their names in a checkpoint."""
        return {PREFIX + name: value for name, value in self.values.items()}

    def add(self, step: int) -> None:
        """After this step, from 1 on: Σ dˢ⁻ⁱ wᵢ / Σ dˢ⁻ⁱ over the steps so far."""
        if not self.decay:
            return
        share = (1 - self.decay) / (1 - self.decay**step)
        for name, parameter in self.parameters.items():
            self.values[name].lerp_(parameter.detach(), share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The average in place of the weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            self.values[name], parameter.data = parameter.data, self.values[name]


def in_place_of(stored: Mapping[str, torch.Tensor], names: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The tensors of a stack by the names of their averages in a checkpoint; names: those that are averaged."""
    return {PREFIX + name if name in names else name: tensor for name, tensor in stored.items()}
