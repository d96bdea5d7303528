"""A block of the model run through a backend: the same numbers as transformers', in fewer passes over memory.

Only what the backward pass needs is kept, and no gradient is computed that nothing uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from edgeft.data.tree import Tree
from edgeft.engine import linear
from edgeft.engine.attention import AttentionPlan, Heads
from edgeft.engine.backend import Angles, Backend
from edgeft.engine.linear import ComputeOptions, Gradients, InputGradient, LinearSpec, linears

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
        dw = scale @ torch.mul(dy, total, out=backend.memory.pool.like(dy)).view(-1, len(weight))
    if needed[0]:
        dx = backend.norm_back(total, scale, weight.detach(), dy, None if other is None else other.contiguous())
    return dx, dw


def add_norm(stream: DeferredResidual, module: Any, backend: Backend, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(the residual stream after the deferred sum, its norm); offset: see arch.Norm."""
    weight = module.weight + offset if offset else module.weight
    total, y = _Norm.apply(*stream, weight, norm_eps(module), backend)
    return total, y


def norm_eps(module: Any) -> float:
    return float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, more: Tensor, backend: Backend) -> Tensor:
        return backend.add(x, more)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], grads[0], None


def add(x: Tensor, more: Tensor, backend: Backend) -> Tensor:
    total: Tensor = _Sum.apply(x, more, backend)
    return total


# As torch.utils.checkpoint, without the compiler and sympy that torch loads for it, 70 MB and more.


class _Given(torch.autograd.Function):
    """A scalar with these gradients. Passed to torch.autograd.backward, they would make it load sympy."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.gradients


def go_back(gradients: list[Tensor], *outputs: Tensor) -> None:
    """The backward pass from these outputs, each with its gradient."""
    with torch.enable_grad():
        start = _Given.apply(gradients, *outputs)
    start.backward()


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, function: Callable[..., Any], *stream: Tensor | None) -> Any:
        ctx.function = function
        ctx.save_for_backward(*stream)
        ctx.set_materialize_grads(False)
        return function(stream)  # without autograd, as always in a forward

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given = [
            None if tensor is None else tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        with torch.enable_grad():
            made = ctx.function(given)
        wanted = [(one, grad) for one, grad in zip(made, grads, strict=True) if grad is not None]
        go_back([grad for _, grad in wanted], *(one for one, _ in wanted))
        return None, None, *(None if tensor is None else tensor.grad for tensor in given)


def recomputed(function: Callable[[DeferredResidual], DeferredResidual], stream: DeferredResidual) -> DeferredResidual:
    # the first block's input needs no gradient, and without the anchor autograd would skip what is trained there
    anchor = torch.empty(0, requires_grad=True)
    made: DeferredResidual = _Again.apply(anchor, function, *stream)
    return made


class _FeedForward(torch.autograd.Function):
    """x (T, I) → down(act(gate x) · up x): gate and up are kept, the input of down is computed again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: tuple[LinearSpec, ...], kind: str, compute: ComputeOptions, *trained: Tensor | None
    ) -> Tensor:
        ctx.layers, ctx.kind, ctx.compute, ctx.flags = layers, kind, compute, linear.trained_flags(trained)
        backend, operand = compute.backend, compute.operand(x)
        (gate, up), mids = zip(*(linear.forward(layer, operand, compute) for layer in layers[:2]), strict=True)
        keep = any(ctx.needs_input_grad)
        act = backend.memory.pool.like(gate) if keep else gate
        backend.gated(kind, gate, up, act)
        out, mid = linear.forward(layers[2], act, compute, float32=True)
        if keep:
            kept = linear.kept_inputs(layers[:2], ctx.flags[:2], operand, mids, compute)
            part = linear.kept_part(layers[2], act, mid, compute) if ctx.flags[2].up else None
            ctx.save_for_backward(*kept, part, gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, gate_part, up_part, mid, gate, up = ctx.saved_tensors
        compute: ComputeOptions = ctx.compute
        backend, flags, down = compute.backend, ctx.flags, ctx.layers[2]
        dy = compute.operand(grads[0].contiguous())
        dact = linear.input_gradient(down, dy, compute)
        act = backend.memory.pool.like(gate) if flags[2].reads_input or flags[2].part else None
        backend.gated_back(ctx.kind, gate, up, dact, act)  # the input of down is known only from here on
        del dact
        last = linear.backward(down, flags[2], dy, (act, mid), compute, None)
        del act
        dx = InputGradient(backend) if ctx.needs_input_grad[0] else None
        every: Gradients = []
        for layer, flag, d, part in zip(ctx.layers, flags, (gate, up), (gate_part, up_part), strict=False):
            every += linear.backward(layer, flag, d, (x, part), compute, dx)  # gate and up are their gradients now
        return None if dx is None else dx.total, None, None, None, *every, *last


@dataclass(frozen=True)
class SelectiveSpec:
    """A block whose feed-forward half trains no weight."""

    attended: Callable[[Tensor], Tensor]  # the residual stream after attention, (T, d) → (T, d)
    eps: float  # of the norm, where the block has one here
    layers: tuple[LinearSpec, ...]  # gate, up, down
    gate: str  # the activation
    compute: ComputeOptions


class _SelectiveBlock(torch.autograd.Function):
    """x (T, d) → y = attended(x), and down(act(gate h) · up h) of its norm h: x alone is kept, and what the gradient
    of down's branch reads. All but down is computed again.

    Gradients of what is trained in `attended` arise there; anchor: see `recomputed`.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor | None, spec: SelectiveSpec, *trained: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        layers, compute, backend = spec.layers, spec.compute, spec.compute.backend
        ctx.spec, ctx.flags = spec, linear.trained_flags(trained)
        y = spec.attended(x)
        operand = compute.operand(y if weight is None else backend.norm(y, None, weight.detach(), spec.eps)[1])
        gate, up = (linear.forward(layer, operand, compute)[0] for layer in layers[:2])
        backend.gated(spec.gate, gate, up, gate)
        out, mid = linear.forward(layers[2], gate, compute, float32=True)
        ctx.save_for_backward(x, weight, linear.kept_part(layers[2], gate, mid, compute) if ctx.flags[2].up else None)
        return y, out

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
        dact = linear.input_gradient(layers[2], dy, compute)
        last = linear.backward(layers[2], flags[2], dy, (None, mid), compute, None)
        del dy
        h, scale = (y, None) if weight is None else backend.norm(y, None, weight.detach(), spec.eps)[1:]
        operand = compute.operand(h)
        (gate, up), mids = zip(*(linear.forward(layer, operand, compute) for layer in layers[:2]), strict=True)
        parts = [linear.kept_part(layers[n], operand, mids[n], compute) if flags[n].up else None for n in range(2)]
        backend.gated_back(spec.gate, gate, up, dact, None)
        del dact, operand, h
        dh, every = InputGradient(backend), []
        for layer, flag, d, part in zip(layers, flags, (gate, up), parts, strict=False):
            every += linear.backward(layer, flag, d, (None, part), compute, dh)  # gate and up are their gradients now
        del gate, up, d
        assert dh.total is not None
        needed = again.requires_grad, ctx.needs_input_grad[2]
        dagain, dw = (
            (backend.add(dh.total, other), None)
            if scale is None
            else (norm_gradients(backend, (y, scale, weight), dh.total, other, needed))
        )
        del dh, y
        if dagain is not None:
            go_back([dagain], again)
        return None, x.grad, dw, None, *every, *last


def selective_block(x: Tensor, weight: Tensor | None, spec: SelectiveSpec) -> tuple[Tensor, Tensor]:
    """(the residual stream after attention, the feed-forward half's result); weight: of its norm."""
    anchor = torch.empty(0, requires_grad=True)
    made: tuple[Tensor, Tensor] = _SelectiveBlock.apply(anchor, x, weight, spec, *linear.trained_tensors(spec.layers))
    return made


class _Gate(torch.autograd.Function):
    """act(gate) · up, for layers that are called as they are."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str, backend: Backend) -> Tensor:
        act = backend.memory.pool.like(gate)
        backend.gated(kind, gate, up, act)
        ctx.save_for_backward(gate, up)
        ctx.kind, ctx.backend = kind, backend
        return act

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up = (t.clone() for t in ctx.saved_tensors)  # others may hold them
        ctx.backend.gated_back(ctx.kind, gate, up, grads[0].contiguous(), None)
        return gate, up, None, None


def feed_forward(x: Tensor, modules: tuple[Any, ...], compute: ComputeOptions, kind: str = "silu") -> Tensor:
    """modules: gate, up and down; kind: the activation."""
    layers = linear.linear_specs(modules)
    if layers is not None:
        made: Tensor = _FeedForward.apply(x, layers, kind, compute, *linear.trained_tensors(layers))
        return made
    gate, up = linears(x, modules[:2], compute)
    (out,) = linears(_Gate.apply(gate, up, kind, compute.backend), modules[2:], compute)
    return out


class Context:
    """Tokens that others see and through which no gradient passes: of each block only keys and values are kept."""

    def __init__(self, tree: Tree) -> None:
        assert tree.live is not None
        self.tokens, self.live = torch.from_numpy(tree.context), torch.from_numpy(tree.live)
        self.blocks: dict[Any, tuple[Tensor, Tensor]] = {}  # by module: rotated keys, and values, (R, G·d)

    def joined(self, block: Any, k: Tensor, v: Tensor, backend: Backend) -> list[Tensor]:
        """Keys and values of all tokens (T, G·d), from those of the live ones."""
        every = []
        for kept, x in zip(self.blocks[block], (k, v), strict=True):
            out = backend.memory.pool.take(len(self.tokens) + len(self.live), x.shape[1])
            every.append(out.index_copy_(0, self.tokens, kept).index_copy_(0, self.live, x))
        return every


@dataclass(frozen=True)
class Attention:
    """What attention reads beside q, k and v; turns: angles of q and of k, None where they are not rotated."""

    turns: tuple[Angles, Angles] | None
    plan: AttentionPlan
    backend: Backend
    context: Context | None
    block: Any

    def rotate(self, q: Tensor, k: Tensor, sign: float) -> None:
        for x, angles in zip((q, k), self.turns or (), strict=False):
            self.backend.rotate(x, angles, self.plan.heads.width, sign)

    def all_keys(self, k: Tensor, v: Tensor) -> list[Tensor]:
        return [k, v] if self.context is None else self.context.joined(self.block, k, v, self.backend)

    def live(self, x: Tensor) -> Tensor:
        """The rows of a gradient that are not the context's."""
        if self.context is None:
            return x
        out = self.backend.memory.pool.take(len(self.context.live), x.shape[1])
        return torch.index_select(x, 0, self.context.live, out=out)


class _Attend(torch.autograd.Function):
    """q (A, H·d), k and v (L, G·d) as the layers gave them → (A, H·d); q and k are rotated in place."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: Attention) -> Tensor:
        ctx.spec = spec
        spec.rotate(q, k, 1.0)
        out, more = spec.backend.attend(spec.plan, q, *spec.all_keys(k, v))
        ctx.save_for_backward(q, k, v, out, more)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        spec: Attention = ctx.spec
        q, k, v, out, more = ctx.saved_tensors
        saved = (q, *spec.all_keys(k, v), out, more)
        dq, dk, dv = spec.backend.attend_back(spec.plan, saved, grads[0].contiguous())
        del saved
        dk, dv = spec.live(dk), spec.live(dv)
        spec.rotate(dq, dk, -1.0)
        return dq, dk, dv, None


class Runner:
    """Blocks of one model over one batch, as its architecture lays them out."""

    def __init__(
        self,
        compute: ComputeOptions,
        stack: Any,
        tree: Tree,
        positions: Tensor,
        context: Context | None = None,
    ) -> None:
        """positions (T,) in their rows; context: what is seen beside the tokens that this runs."""
        self.compute, self.backend, self.tree, self.arch = compute, compute.backend, tree, stack.arch
        self.stack, self.context, self.positions = stack, context, positions
        self.sizes, self.scales = self.arch.sizes(stack.config), self.arch.scales(stack.config)
        width = self.sizes.head
        scale = width**-0.5 if self.scales.scores is None else self.scales.scores
        self.heads = Heads(self.sizes.query // width, self.sizes.key // width, width, scale, self.scales.score_cap)
        self.numbers = {block: number for number, block in enumerate(stack.layers)}
        self._plans: dict[int, AttentionPlan] = {}  # by window
        self._angles: dict[str, Angles] = {}  # by rotation

    def _plan(self, block: Any) -> AttentionPlan:
        window = self.arch.window(self.stack.config, self.numbers[block])
        if window not in self._plans:
            live = None if self.context is None else self.context.live
            self._plans[window] = self.backend.attention_plan(self.tree.within(window), self.heads, live)
        return self._plans[window]

    def _turns(self, block: Any) -> Angles | None:
        kind = self.arch.rotation(self.stack.config, self.numbers[block])
        if kind is not None and kind not in self._angles:
            cosines, sines = (t[0].float().contiguous() for t in self.stack.rotary(self.positions[None], kind))
            self._angles[kind] = Angles(cosines, sines, self.arch.neighbours)
        return None if kind is None else self._angles[kind]

    def block(self, block: Any, stream: DeferredResidual) -> DeferredResidual:
        """One block; its last sum is deferred to the next norm."""
        return self._after(block, *self._mixed(block, stream))

    def read_block(self, block: Any, stream: DeferredResidual, context: Context) -> DeferredResidual:
        """As `block`; its keys and values go into the context."""
        x, h = self._norm(block, "attention", stream)
        q, k, v = self._qkv(block, h)
        mixed = self._attend(block, q, k, v, self._plan(block))  # k is rotated by now
        context.blocks[block] = (k, v)
        return self._after(block, x, mixed)

    def read_keys(self, block: Any, stream: DeferredResidual, context: Context) -> None:
        """Of the last block, nothing else is needed."""
        _, h = self._norm(block, "attention", stream)
        k, v = linears(h, self._modules(block, "k", "v"), self.compute)
        k = self._head_norm(block, "k", k)
        if (angles := self._turns(block)) is not None:
            self.backend.rotate(k, angles, self.heads.width, 1.0)
        context.blocks[block] = (k, v)

    def selective_block(self, block: Any, stream: DeferredResidual) -> DeferredResidual:
        """As `block`, but only the residual stream before it is kept. The backward pass computes all again except down,
        whose input nothing needs where its weight is not trained."""
        layers = linear.linear_specs(self._modules(block, "gate", "up", "down"))
        if layers is None:
            return recomputed(partial(self.block, block), stream)
        x = stream[0] if stream[1] is None else add(stream[0], stream[1], self.backend)
        norm, weight, eps = self.arch.norm_at("ffn"), None, 0.0
        if norm is not None:
            module = block.get_submodule(norm.path)
            weight, eps = module.weight + norm.offset if norm.offset else module.weight, norm_eps(module)
        spec = SelectiveSpec(partial(self._attended, block), eps, layers, self.arch.gate, self.compute)
        y, out = selective_block(x, weight, spec)
        return y, self._result(block, "ffn", out)

    def _modules(self, block: Any, *tensors: str) -> tuple[Any, ...]:
        return tuple(block.get_submodule(self.arch.linears[tensor].path) for tensor in tensors)

    def _norm(self, block: Any, place: str, stream: DeferredResidual) -> tuple[Tensor, Tensor]:
        """(the residual stream after the deferred sum, its norm, or itself where the architecture has no norm here)."""
        norm = self.arch.norm_at(place)
        if norm is not None:
            return add_norm(stream, block.get_submodule(norm.path), self.backend, norm.offset)
        x = stream[0] if stream[1] is None else add(stream[0], stream[1], self.backend)
        return x, x

    def _result(self, block: Any, half: str, out: Tensor) -> Tensor:
        """What attention or feed-forward adds to the residual stream."""
        if self.arch.norm_at(f"{half}_out") is not None:
            out = self._norm(block, f"{half}_out", (out, None))[1]
        return out if self.scales.residual == 1 else out * self.scales.residual

    def _attended(self, block: Any, x: Tensor) -> Tensor:
        """The residual stream after attention."""
        x, mixed = self._mixed(block, (x, None))
        (out,) = linears(mixed, self._modules(block, "o"), self.compute)
        return add(x, self._result(block, "attention", out), self.backend)

    def _mixed(self, block: Any, stream: DeferredResidual) -> tuple[Tensor, Tensor]:
        """(the residual stream, the input of o)."""
        x, h = self._norm(block, "attention", stream)
        q, k, v = self._qkv(block, h)
        return x, self._attend(block, q, k, v, self._plan(block))

    def _attend(
        self, block: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, queries: Tensor | None = None
    ) -> Tensor:
        """queries: the rows of q, if not all."""
        angles = self._turns(block)
        turns = None if angles is None else (angles if queries is None else angles.of(queries), angles)
        spec = Attention(turns, plan, self.backend, self.context, block)
        mixed: Tensor = _Attend.apply(q, k, v, spec)
        return mixed

    def last_block(self, block: Any, stream: DeferredResidual, queries: Tensor) -> DeferredResidual:
        """The last block, of which only these rows are needed: of the others, only keys and values."""
        x, h = self._norm(block, "attention", stream)
        q, k, v = self._qkv(block, h, h[queries])
        tokens = queries if self.context is None else self.context.live[queries]
        window = self.arch.window(self.stack.config, self.numbers[block])
        plan = self.backend.attention_plan(self.tree.within(window), self.heads, tokens)
        return self._after(block, x[queries], self._attend(block, q, k, v, plan, queries))

    def _qkv(self, block: Any, h: Tensor, asking: Tensor | None = None) -> tuple[Tensor, ...]:
        """asking: the input of q, if that is not all of h."""
        if asking is None:
            q, k, v = linears(h, self._modules(block, "q", "k", "v"), self.compute)
        else:
            (q,) = linears(asking, self._modules(block, "q"), self.compute)
            k, v = linears(h, self._modules(block, "k", "v"), self.compute)
        return self._head_norm(block, "q", q), self._head_norm(block, "k", k), v

    def _head_norm(self, block: Any, tensor: str, x: Tensor) -> Tensor:
        norm = self.arch.norm_at(tensor)
        return x if norm is None else self._norm(block, tensor, (x, None))[1]  # over as many as its weight has

    def _after(self, block: Any, x: Tensor, mixed: Tensor) -> DeferredResidual:
        """What follows the attention."""
        (out,) = linears(mixed, self._modules(block, "o"), self.compute, shared=True)
        x, h = self._norm(block, "ffn", (x, self._result(block, "attention", out)))
        out = feed_forward(h, self._modules(block, "gate", "up", "down"), self.compute, self.arch.gate)
        return x, self._result(block, "ffn", out)
