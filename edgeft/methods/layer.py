"""A linear layer that a method puts in a frozen one's place.

A checkpoint holds each of its buffers and each trained parameter but a stand-in: none has to be listed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from edgeft.engine.backend import TORCH, Backend
from edgeft.engine.linear import ComputeOptions, LinearSpec, linears
from edgeft.engine.stack import Stack
from edgeft.methods.base import Method

Tensor = torch.Tensor
PLAIN = ComputeOptions(TORCH)


class TrainedLinear(nn.Module):
    """(…, I) → (…, O). Its method sets what is computed and trained; it takes over the frozen layer's bias."""

    stand_in = ""  # the parameter that only carries a gradient: what it stands for is in buffers

    def __init__(self, method: Method, base: Any) -> None:
        super().__init__()
        self.method = method
        self.in_features, self.out_features = int(base.in_features), int(base.out_features)
        self.bias: nn.Parameter | None = base.bias
        base.bias = None
        self.observer: Callable[[Tensor, Tensor], None] | None = None  # see LinearSpec

    def as_layer(self) -> LinearSpec:
        """Of what the method set, by the names of LinearSpec."""
        parts = {field.name: getattr(self, field.name) for field in fields(LinearSpec) if hasattr(self, field.name)}
        return LinearSpec(**{"base": self} | parts)

    def operand(self, backend: Backend, bf16: bool) -> Tensor:
        return self.method.operand(self, backend, bf16)

    def dense_weight(self) -> Tensor:
        return self.method.dense_weight(self)

    def forward(self, x: Tensor) -> Tensor:
        """In plain torch."""
        (out,) = linears(x.reshape(-1, self.in_features), (self,), PLAIN)
        return out.view(*x.shape[:-1], self.out_features)


def stand_in(layer: TrainedLinear) -> nn.Parameter:
    """Has the shape of the weight and receives its gradient, and is a single zero in memory."""
    return nn.Parameter(torch.zeros(1, 1).expand(layer.out_features, layer.in_features))


def trained_linears(stack: Stack) -> dict[str, TrainedLinear]:
    return {name: module for name, module in stack.model.named_modules() if isinstance(module, TrainedLinear)}


def checkpoint_tensors(stack: Stack, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """All that training changes or chooses, by name."""
    layers = trained_linears(stack)
    stand_ins = {f"{path}.{layer.stand_in}" for path, layer in layers.items()}
    buffers = {f"{path}.{name}": b for path, layer in layers.items() for name, b in layer.named_buffers(recurse=False)}
    return {**{name: p for name, p in parameters.items() if name not in stand_ins}, **buffers}
