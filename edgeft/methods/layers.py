"""Linear layers that are trained in part: some input channels, a lite residual branch, int8 weights.

Each says as a `Layer` what is trained, so that both engines compute it by the same code, and gives its merged weight.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import nn

from edgeft.engine.backend import TORCH, Backend
from edgeft.engine.linear import ComputeOptions, LinearSpec, linears
from edgeft.engine.stack import weight_of

Tensor = torch.Tensor
PLAIN = ComputeOptions(TORCH)
LARGEST = 127  # of an int8 weight, to both sides


class _Over(nn.Module):
    """A layer over a frozen one, whose bias it takes over."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = int(base.in_features), int(base.out_features)
        self.bias: nn.Parameter | None = base.bias

    def as_layer(self) -> LinearSpec | None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """(…, I) → (…, O), in plain torch."""
        (out,) = linears(x.reshape(-1, self.in_features), (self,), PLAIN)
        return out.view(*x.shape[:-1], self.out_features)


# ---------------------------------------------------------------- some input channels


class SlicedLinear(_Over):
    """Some columns of the weight are trained, dense; the rest stays as it was stored."""

    columns: Tensor  # (C,) ascending

    def __init__(self, base: Any, columns: Tensor) -> None:
        super().__init__(base)
        base.bias = None
        self.base = base
        self.register_buffer("columns", columns)
        self.part = nn.Parameter(weight_of(base)[:, columns])  # (O, C)
        self.sizes: Tensor | None = None  # (I,) while gradients are looked at: the sum of their squares

    def as_layer(self) -> LinearSpec | None:
        if self.sizes is not None:
            return None  # called as it is
        return LinearSpec(self.base, self.bias, part=self.part, columns=self.columns)

    def forward(self, x: Tensor) -> Tensor:
        if self.sizes is None:
            return super().forward(x)
        seen: Tensor = _Look.apply(x, self.part, self)
        return seen

    def look(self) -> None:
        """From now on backward passes find out how large the gradients of all channels are."""
        self.sizes = torch.zeros(self.in_features)

    def choose(self) -> None:
        """The channels with the largest gradients seen. Only before anything is trained."""
        assert self.sizes is not None
        columns = largest(self.sizes, len(self.columns))
        with torch.no_grad():
            self.columns.copy_(columns)
            self.part.copy_(weight_of(self.base)[:, columns])
        self.sizes = None

    def dense_weight(self) -> Tensor:
        return weight_of(self.base).index_copy_(1, self.columns, self.part.detach())


class _Look(torch.autograd.Function):
    """A layer as it is; its backward pass adds up the squares of every channel's weight gradients, and keeps none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Tensor, module: SlicedLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return nn.functional.linear(x, module.dense_weight(), module.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,), module = ctx.saved_tensors, ctx.module
        dy = grads[0].reshape(-1, module.out_features)
        module.sizes += (dy.T @ x.reshape(-1, module.in_features)).square_().sum(0)
        dx = dy @ module.dense_weight() if ctx.needs_input_grad[0] else None
        return None if dx is None else dx.view(x.shape), None, None


def largest(sizes: Tensor, count: int) -> Tensor:
    """Where the `count` largest stand, ascending; of equal ones the first."""
    return sizes.argsort(descending=True, stable=True)[:count].sort().values


def first_choice(base: Any, count: int, choose: str) -> Tensor:
    """The channels to begin with: by the weight's columns, or the first ones. Gradients are known only later."""
    return largest(weight_of(base).square_().sum(0), count) if choose == "weight" else torch.arange(count)


# ---------------------------------------------------------------- a lite residual branch


class LiteLinear(_Over):
    """y = x Wᵀ + b + scale (x Aᵀ) Bᵀ: W and A frozen, B trained from zero, so that only x Aᵀ (r numbers) is kept.

    A holds random signs, of which every row has length 1. It is made from the seed and the layer's name, never stored.
    """

    def __init__(self, base: Any, rank: int, scale: float, seed: int, name: str) -> None:
        super().__init__(base)
        base.bias = None
        self.base, self.scale = base, scale
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        signs = random.integers(0, 2, (rank, self.in_features), dtype=np.int8)
        self.down = torch.from_numpy(signs).float().mul_(2).sub_(1).mul_(self.in_features**-0.5)  # A (r, I)
        self.up = nn.Parameter(torch.zeros(self.out_features, rank))  # B (O, r)

    def as_layer(self) -> LinearSpec:
        return LinearSpec(self.base, self.bias, self.down, self.up, self.scale)

    def dense_weight(self) -> Tensor:
        return weight_of(self.base).addmm_(self.up.detach(), self.down, alpha=self.scale)


# ---------------------------------------------------------------- int8


class Int8Linear(_Over):
    """W = s W̄ with W̄ in int8 and a scale for each row: trained as it is, there is no other copy of the weight.

    exact: W̄ is float32 and never rounded, to see what rounding does.
    """

    codes: Tensor  # W̄ (O, I)
    scales: Tensor  # s (O,)

    def __init__(self, base: Any, exact: bool) -> None:
        super().__init__(base)
        dense = weight_of(base)
        scales = dense.abs().amax(1).clamp_(min=1e-12).div_(LARGEST)
        codes = dense.div_(scales[:, None])
        self.register_buffer("codes", codes if exact else codes.round_().to(torch.int8))
        self.register_buffer("scales", scales)
        # stands for s W̄: has its shape and takes its gradient, and is a single zero in memory
        self.weight = nn.Parameter(torch.zeros(1, 1).expand(self.out_features, self.in_features))

    def as_layer(self) -> LinearSpec:
        return LinearSpec(self, self.bias)

    def operand(self, backend: Backend, bf16: bool) -> Tensor:
        """As a product reads it, in the buffer that the next weight overwrites."""
        dtype = torch.bfloat16 if bf16 else torch.float32
        out = backend.memory.weights.take(self.out_features, self.in_features, dtype)
        if bf16:
            return torch.mul(self.codes, self.scales[:, None], out=out)  # rounded once
        return out.copy_(self.codes).mul_(self.scales[:, None])  # eight times as fast

    def dense_weight(self) -> Tensor:
        return self.codes * self.scales[:, None]
