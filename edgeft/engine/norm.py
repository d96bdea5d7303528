"""RMSNorm with the residual sum before it, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from edgeft.engine.kernels import Kernels
from edgeft.engine.pool import pool

Tensor = torch.Tensor
DeferredResidual = tuple[Tensor, Tensor | None]  # the residual stream, and what is still to be added to it


class _Norm(torch.autograd.Function):
    """(x, more) → (x + more, weight · (x + more) / rms): both gradients are added in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, more: Tensor | None, weight: Tensor, eps: float, kernels: Kernels) -> Any:
        total, y, scale = kernels.norm(x, more, weight.detach(), eps)
        ctx.save_for_backward(total, scale, weight)
        ctx.kernels = kernels
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        other, dy = grads
        dx = dw = None
        if dy is None:
            dx = other
        else:
            wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1], ctx.needs_input_grad[2]
            total, scale, weight = ctx.saved_tensors
            dx, dw = _norm_back(total, scale, weight, dy.contiguous(), other, ctx.kernels, wanted)
        return dx, dx if ctx.needs_input_grad[1] else None, dw, None, None


def _norm_back(
    total: Tensor,
    scale: Tensor,
    weight: Tensor,
    dy: Tensor,
    other: Tensor | None,
    kernels: Kernels,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of what is normed, with that of the residual stream beside it, and of the weight."""
    dx = dw = None
    if wanted[1]:
        dw = scale @ torch.mul(dy, total, out=pool.like(dy))
    if wanted[0]:
        dx = kernels.norm_back(total, scale, weight.detach(), dy, None if other is None else other.contiguous())
    return dx, dw


def add_norm(stream: DeferredResidual, module: Any, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """(the residual stream with what was pending, its norm)."""
    total, y = _Norm.apply(*stream, module.weight, float(module.variance_epsilon), kernels)
    return total, y


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, more: Tensor) -> Tensor:
        return torch.add(x, more, out=pool.like(x))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], grads[0]
