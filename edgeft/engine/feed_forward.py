"""The feed-forward half of a block, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from edgeft.engine.kernels import Kernels
from edgeft.engine.linear import (
    ComputeOptions,
    LinearSpec,
    _backward,
    _flags,
    _forward,
    _full,
    _kept,
    _reads_all,
    _small,
    _trained,
    _weight,
    linear_specs,
    linears,
)
from edgeft.engine.norm import _norm_back
from edgeft.engine.pool import pool
from edgeft.engine.recompute import go_back

Tensor = torch.Tensor


class _FeedForward(torch.autograd.Function):
    """x (T, I) → down(silu(gate x) · up x): gate and up are kept, what down reads is computed again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: tuple[LinearSpec, ...], way: ComputeOptions, *trained: Tensor | None
    ) -> Tensor:
        ctx.layers, ctx.way, ctx.flags = layers, way, _flags(trained)
        given = way.operand(x)
        (gate, gate_mid), (up, up_mid) = _forward(layers[0], given, way), _forward(layers[1], given, way)
        keep = any(ctx.needs_input_grad)
        act = pool.like(gate) if keep else gate
        assert way.kernels is not None
        way.kernels.swiglu(gate, up, act)
        out, mid = _forward(layers[2], act, way)
        if keep:
            kept = _kept(layers[:2], ctx.flags[:2], given, (gate_mid, up_mid), way)
            ctx.save_for_backward(*kept, _branch(layers[2], ctx.flags[2], act, mid, way), gate, up)
        return _full(out, len(x))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, gate_part, up_part, mid, gate, up = ctx.saved_tensors
        way: ComputeOptions = ctx.way
        rows, flags, down = len(grads[0]), ctx.flags, ctx.layers[2]
        dy = way.operand(grads[0].contiguous())
        # what down reads is there only after its input's gradient is known
        dact = _input_gradient(down, dy, way)
        act = pool.like(gate) if _reads_all(flags[2], way) or flags[2][4] else None
        assert way.kernels is not None
        way.kernels.swiglu_back(gate, up, dact, act)
        del dact
        _, last = _backward(down, flags[2], dy, act, mid, way, rows, False, None)
        del act
        dx, found = None, []
        for layer, flag, d, part in zip(ctx.layers, flags, (gate, up), (gate_part, up_part), strict=False):
            # gate and up are their gradients now
            dx, more = _backward(layer, flag, d, x, part, way, rows, ctx.needs_input_grad[0], dx)
            found += more
        return dx, None, None, *found, *last


def _branch(
    layer: LinearSpec, flags: Sequence[bool], x: Tensor, mid: Tensor | None, way: ComputeOptions
) -> Tensor | None:
    """What the gradient of B reads of the input, if it is wanted."""
    return (layer.reads(x, way) if mid is None else mid) if flags[3] else None


def _input_gradient(layer: LinearSpec, dy: Tensor, way: ComputeOptions) -> Tensor:
    """As an operand."""
    found = way.product(dy, _weight(layer, way))
    if layer.down is not None and layer.up is not None and not layer.lite:
        found.addmm_(way.product(dy, _small(layer.up, way)), _small(layer.down, way), alpha=layer.scale)
    return found


class _FrugalBlock(torch.autograd.Function):
    """x (T, d) → y = attended(x), and down(silu(gate h) · up h) of its norm h, where no weight is trained: x alone is
    kept, and what the gradient of down's branch reads. All but down is computed again.

    What is trained in `attended` takes its gradients there; anchor: see recompute.py.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        attended: Callable[[Tensor], Tensor],
        weight: Tensor,
        eps: float,
        layers: tuple[LinearSpec, ...],
        way: ComputeOptions,
        *trained: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        assert way.kernels is not None
        ctx.rest = attended, layers, way, eps, _flags(trained)
        y = attended(x)
        given = way.operand(way.kernels.norm(y, None, weight.detach(), eps)[1])
        gate, up = (_forward(layer, given, way)[0] for layer in layers[:2])
        way.kernels.swiglu(gate, up, gate)
        out, mid = _forward(layers[2], gate, way)
        ctx.save_for_backward(x, weight, _branch(layers[2], ctx.rest[-1][2], gate, mid, way))
        return y, _full(out, len(y))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, mid = ctx.saved_tensors
        attended, layers, way, eps, flags = ctx.rest
        other, gradient = grads
        x = x.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            made = attended(x)
        y = made.detach()
        dy = way.operand(gradient.contiguous())
        dact = _input_gradient(layers[2], dy, way)
        _, last = _backward(layers[2], flags[2], dy, None, mid, way, len(y), False, None)
        del dy
        _, h, scale = way.kernels.norm(y, None, weight.detach(), eps)
        given = way.operand(h)
        (gate, up), mids = zip(*(_forward(layer, given, way) for layer in layers[:2]), strict=True)
        parts = [_branch(layers[n], flags[n], given, mids[n], way) for n in range(2)]
        way.kernels.swiglu_back(gate, up, dact, None)
        del dact, given, h
        dh, found = None, []
        for layer, flag, d, part in zip(layers, flags, (gate, up), parts, strict=False):
            # gate and up are their gradients now
            dh, more = _backward(layer, flag, d, None, part, way, len(y), True, dh)
            found += more
        del gate, up, d
        assert dh is not None
        dmade, dw = _norm_back(y, scale, weight, dh, other, way.kernels, (made.requires_grad, ctx.needs_input_grad[3]))
        del dh, y
        if dmade is not None:
            go_back([dmade], made)
        return None, x.grad, None, dw, None, None, None, *found, *last


class _Gate(torch.autograd.Function):
    """silu(gate) · up, for layers that are called as they are."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: Kernels) -> Tensor:
        act = pool.like(gate)
        kernels.swiglu(gate, up, act)
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return act

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up = (t.clone() for t in ctx.saved_tensors)  # others may hold them
        ctx.kernels.swiglu_back(gate, up, grads[0].contiguous(), None)
        return gate, up, None


def feed_forward(x: Tensor, mlp: Any, way: ComputeOptions) -> Tensor:
    modules = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    layers = linear_specs(modules)
    if layers is not None:
        found: Tensor = _FeedForward.apply(x, layers, way, *_trained(layers))
        return found
    gate, up = linears(x, modules[:2], way)
    (out,) = linears(_Gate.apply(gate, up, way.kernels), modules[2:], way)
    return out
