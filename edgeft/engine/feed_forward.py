"""The feed-forward half of a block, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from edgeft.engine.backend import Backend
from edgeft.engine.linear import (
    ComputeOptions,
    Gradients,
    InputGradient,
    LinearSpec,
    backward,
    forward,
    input_gradient,
    kept_inputs,
    kept_part,
    linear_specs,
    linears,
    trained_flags,
    trained_tensors,
)
from edgeft.engine.norm import norm_gradients
from edgeft.engine.recompute import go_back

Tensor = torch.Tensor


class _FeedForward(torch.autograd.Function):
    """x (T, I) → down(silu(gate x) · up x): gate and up are kept, the input of down is computed again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: tuple[LinearSpec, ...], compute: ComputeOptions, *trained: Tensor | None
    ) -> Tensor:
        ctx.layers, ctx.compute, ctx.flags = layers, compute, trained_flags(trained)
        backend, operand = compute.backend, compute.operand(x)
        (gate, gate_mid), (up, up_mid) = forward(layers[0], operand, compute), forward(layers[1], operand, compute)
        keep = any(ctx.needs_input_grad)
        act = backend.memory.pool.like(gate) if keep else gate
        backend.swiglu(gate, up, act)
        out, mid = forward(layers[2], act, compute)
        if keep:
            kept = kept_inputs(layers[:2], ctx.flags[:2], operand, (gate_mid, up_mid), compute)
            part = kept_part(layers[2], act, mid, compute) if ctx.flags[2].up else None
            ctx.save_for_backward(*kept, part, gate, up)
        return backend.to_float32(out, len(x))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, gate_part, up_part, mid, gate, up = ctx.saved_tensors
        compute: ComputeOptions = ctx.compute
        backend, flags, down = compute.backend, ctx.flags, ctx.layers[2]
        dy = compute.operand(grads[0].contiguous())
        dact = input_gradient(down, dy, compute)
        act = backend.memory.pool.like(gate) if flags[2].reads_input or flags[2].part else None
        backend.swiglu_back(gate, up, dact, act)  # the input of down is known only from here on
        del dact
        last = backward(down, flags[2], dy, (act, mid), compute, None)
        del act
        dx = InputGradient(len(grads[0]), backend) if ctx.needs_input_grad[0] else None
        every: Gradients = []
        for layer, flag, d, part in zip(ctx.layers, flags, (gate, up), (gate_part, up_part), strict=False):
            every += backward(layer, flag, d, (x, part), compute, dx)  # gate and up are their gradients now
        return None if dx is None else dx.total, None, None, *every, *last


@dataclass(frozen=True)
class SelectiveSpec:
    """A block whose feed-forward half trains no weight."""

    attended: Callable[[Tensor], Tensor]  # the residual stream after attention, (T, d) → (T, d)
    eps: float  # of the norm
    layers: tuple[LinearSpec, ...]  # gate, up, down
    compute: ComputeOptions


class _SelectiveBlock(torch.autograd.Function):
    """x (T, d) → y = attended(x), and down(silu(gate h) · up h) of its norm h: x alone is kept, and what the gradient
    of down's branch reads. All but down is computed again.

    Gradients of what is trained in `attended` arise there; anchor: see recompute.py.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, spec: SelectiveSpec, *trained: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        layers, compute, backend = spec.layers, spec.compute, spec.compute.backend
        ctx.spec, ctx.flags = spec, trained_flags(trained)
        y = spec.attended(x)
        operand = compute.operand(backend.norm(y, None, weight.detach(), spec.eps)[1])
        gate, up = (forward(layer, operand, compute)[0] for layer in layers[:2])
        backend.swiglu(gate, up, gate)
        out, mid = forward(layers[2], gate, compute)
        ctx.save_for_backward(x, weight, kept_part(layers[2], gate, mid, compute) if ctx.flags[2].up else None)
        return y, backend.to_float32(out, len(y))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, mid = ctx.saved_tensors
        spec, flags = ctx.spec, ctx.flags
        layers, compute, backend = spec.layers, spec.compute, spec.compute.backend
        other, gradient = grads
        x = x.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            again = spec.attended(x)
        y = again.detach()
        dy = compute.operand(gradient.contiguous())
        dact = input_gradient(layers[2], dy, compute)
        last = backward(layers[2], flags[2], dy, (None, mid), compute, None)
        del dy
        _, h, scale = backend.norm(y, None, weight.detach(), spec.eps)
        operand = compute.operand(h)
        (gate, up), mids = zip(*(forward(layer, operand, compute) for layer in layers[:2]), strict=True)
        parts = [kept_part(layers[n], operand, mids[n], compute) if flags[n].up else None for n in range(2)]
        backend.swiglu_back(gate, up, dact, None)
        del dact, operand, h
        dh, every = InputGradient(len(y), backend), []
        for layer, flag, d, part in zip(layers, flags, (gate, up), parts, strict=False):
            every += backward(layer, flag, d, (None, part), compute, dh)  # gate and up are their gradients now
        del gate, up, d
        assert dh.total is not None
        needed = again.requires_grad, ctx.needs_input_grad[2]
        dagain, dw = norm_gradients(backend, (y, scale, weight), dh.total, other, needed)
        del dh, y
        if dagain is not None:
            go_back([dagain], again)
        return None, x.grad, dw, None, *every, *last


def selective_block(x: Tensor, weight: Tensor, spec: SelectiveSpec) -> tuple[Tensor, Tensor]:
    """(the residual stream after attention, what the feed-forward half adds to it); weight: of its norm."""
    anchor = torch.empty(0, requires_grad=True)
    made: tuple[Tensor, Tensor] = _SelectiveBlock.apply(anchor, x, weight, spec, *trained_tensors(spec.layers))
    return made


class _Gate(torch.autograd.Function):
    """silu(gate) · up, for layers that are called as they are."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, backend: Backend) -> Tensor:
        act = backend.memory.pool.like(gate)
        backend.swiglu(gate, up, act)
        ctx.save_for_backward(gate, up)
        ctx.backend = backend
        return act

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up = (t.clone() for t in ctx.saved_tensors)  # others may hold them
        ctx.backend.swiglu_back(gate, up, grads[0].contiguous(), None)
        return gate, up, None


def feed_forward(x: Tensor, mlp: Any, compute: ComputeOptions) -> Tensor:
    modules = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    layers = linear_specs(modules)
    if layers is not None:
        made: Tensor = _FeedForward.apply(x, layers, compute, *trained_tensors(layers))
        return made
    gate, up = linears(x, modules[:2], compute)
    (out,) = linears(_Gate.apply(gate, up, compute.backend), modules[2:], compute)
    return out
