"""RMSNorm with the residual sum before it, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from edgeft.engine.backend import Backend

Tensor = torch.Tensor
DeferredResidual = tuple[Tensor, Tensor | None]  # the residual stream, and what is still to be added to it


class _Norm(torch.autograd.Function):
    """(x, more) → (x + more, weight · (x + more) / rms): both gradients are added in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, more: Tensor | None, weight: Tensor, eps: float, backend: Backend) -> Any:
        total, y, scale = backend.norm(x, more, weight.detach(), eps)
        ctx.save_for_backward(total, scale, weight)
        ctx.backend = backend
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        other, dy = grads
        if dy is None:
            dx, dw = other, None
        else:
            needed = ctx.needs_input_grad[0] or ctx.needs_input_grad[1], ctx.needs_input_grad[2]
            dx, dw = norm_gradients(ctx.backend, ctx.saved_tensors, dy.contiguous(), other, needed)
        return dx, dx if ctx.needs_input_grad[1] else None, dw, None, None


def norm_gradients(
    backend: Backend, saved: tuple[Tensor, ...], dy: Tensor, other: Tensor | None, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Of the sum, with `other`, the residual stream's own, and of the weight; saved: (the sum, 1 / rms, weight)."""
    total, scale, weight = saved
    dx = dw = None
    if needed[1]:
        dw = scale @ torch.mul(dy, total, out=backend.memory.pool.like(dy))
    if needed[0]:
        dx = backend.norm_back(total, scale, weight.detach(), dy, None if other is None else other.contiguous())
    return dx, dw


def add_norm(stream: DeferredResidual, module: Any, backend: Backend) -> tuple[Tensor, Tensor]:
    """(the residual stream after the deferred sum, its norm)."""
    total, y = _Norm.apply(*stream, module.weight, float(module.variance_epsilon), backend)
    return total, y


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, more: Tensor, backend: Backend) -> Tensor:
        return torch.add(x, more, out=backend.memory.pool.like(x))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], grads[0], None


def add(x: Tensor, more: Tensor, backend: Backend) -> Tensor:
    total: Tensor = _Sum.apply(x, more, backend)
    return total
