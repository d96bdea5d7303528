"""A transformers block run through edgeft's own kernels: the same numbers, in fewer passes over memory.

Nothing is kept for the backward pass but what it needs, no gradient is computed that nobody uses, and weight gradients
are added to `.grad` where they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from edgeft.model.kernels import Kernels, Plan, heads
from edgeft.model.packed import PackedLinear, Scratch
from edgeft.model.pool import pool

Tensor = torch.Tensor
Pending = tuple[Tensor, Tensor | None]  # the residual stream, and what is still to be added to it


# ---------------------------------------------------------------- linear layers


@dataclass(frozen=True)
class Layer:
    """A linear layer whose weight can be had as a matrix, perhaps with a LoRA adapter: y = x Wᵀ + b + scale x Aᵀ Bᵀ."""

    base: Any  # nn.Linear or PackedLinear
    down: nn.Parameter | None = None  # A (r, I)
    up: nn.Parameter | None = None  # B (O, r)
    scale: float = 0.0

    def trained(self) -> list[Tensor | None]:
        """What autograd must see: (weight, bias, A, B), None for what is frozen or not there."""
        frozen = isinstance(self.base, PackedLinear)
        return [
            None if t is None or not t.requires_grad else t
            for t in (None if frozen else self.base.weight, self.base.bias, self.down, self.up)
        ]


def as_layer(module: Any) -> Layer | None:
    """None: a layer that is called as it is (bitsandbytes')."""
    if type(module) in (nn.Linear, PackedLinear):
        return Layer(module)
    base = getattr(module, "base_layer", None)
    if type(base) not in (nn.Linear, PackedLinear) or list(getattr(module, "lora_A", ())) != ["default"]:
        return None
    return Layer(base, module.lora_A["default"].weight, module.lora_B["default"].weight, module.scaling["default"])


def as_layers(modules: Sequence[Any]) -> tuple[Layer, ...] | None:
    """None unless all of them are."""
    found = [as_layer(module) for module in modules]
    return None if any(layer is None for layer in found) else tuple(layer for layer in found if layer is not None)


@dataclass(frozen=True)
class Way:
    """How blocks are computed."""

    kernels: Kernels
    prune: bool = True  # false: gradients that nobody uses are computed and thrown away, to see what they cost
    half: bool = False  # products of bf16 operands; sums inside a product and everything between products are float32

    def operand(self, x: Tensor) -> Tensor:
        """What a product reads: x, or in bf16 x and rows of zeros, which change no sum."""
        if not self.half:
            return x
        out = pool.take(padded(len(x)), x.shape[1], torch.bfloat16)
        out[: len(x)] = x
        out[len(x) :] = 0
        return out

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.mm(x, y, out=pool.take(len(x), y.shape[1], x.dtype))


def padded(rows: int) -> int:
    """So many, or somewhat more: the library makes and keeps code for every size of a bf16 product, 0.6 MB each."""
    unit = 32
    while unit * 8 < rows:
        unit *= 2
    return -(-rows // unit) * unit


def _full(x: Tensor, rows: int) -> Tensor:
    """What lies between products: float32, without the operands' further rows."""
    return x if x.dtype == torch.float32 else pool.take(rows, x.shape[1]).copy_(x[:rows])


def _weight(base: Any, way: Way) -> Tensor:
    """As a product reads it."""
    if isinstance(base, PackedLinear):
        return base.packed.operand(way.kernels, half=way.half)
    return _small(base.weight, way)


def _small(weight: Tensor, way: Way) -> Tensor:
    return weight.bfloat16() if way.half else weight


def _trained(layers: tuple[Layer, ...]) -> list[Tensor | None]:
    return [t for layer in layers for t in layer.trained()]


def _keeps_input(flags: Sequence[bool], way: Way) -> bool:
    """Does a backward pass with these of (weight, bias, A, B) trained read the layer's input?"""
    return flags[0] or flags[2] or flags[3] or not way.prune


def _forward(layer: Layer, x: Tensor, way: Way) -> Tensor:
    """x and what comes out: operands."""
    out = way.product(x, _weight(layer.base, way).T)
    if layer.base.bias is not None:
        out += layer.base.bias
    if layer.down is not None and layer.up is not None:
        mid = way.product(x, _small(layer.down, way).T)  # (T, r)
        out.addmm_(mid, _small(layer.up, way).T, alpha=layer.scale)
    return out


def _backward(
    layer: Layer,
    flags: Sequence[bool],
    dy: Tensor,
    x: Tensor | None,
    way: Way,
    rows: int,
    wanted: bool,
    dx: Tensor | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(dx with this layer's part, if wanted; gradients of (weight, bias, A, B) for autograd).

    dy and x are operands of so many rows; the weight's gradient is added where it belongs.
    """
    grads: list[Tensor | None] = [None] * 4
    if wanted:
        dx = _add(dx, dy, _weight(layer.base, way), way, rows)
    if flags[0] or not way.prune:
        assert x is not None
        _add_weight_gradient(layer.base, flags[0], dy, x)
    if flags[1]:
        grads[1] = dy.sum(0, dtype=torch.float32)
    if layer.down is not None and layer.up is not None:
        dmid = way.product(dy, _small(layer.up, way)).mul_(layer.scale)  # (T, r)
        if flags[2] or flags[3]:
            assert x is not None
            mid = way.product(x, _small(layer.down, way).T)
            grads[2] = (dmid.T @ x).float()
            grads[3] = (dy.T @ mid).float().mul_(layer.scale)
        if wanted:
            dx = _add(dx, dmid, _small(layer.down, way), way, rows)
    return dx, grads


def _add(sum_: Tensor | None, x: Tensor, y: Tensor, way: Way, rows: int) -> Tensor:
    """x y in float32, added to what is there."""
    if sum_ is None:
        return _full(way.product(x, y), rows)
    return sum_.add_(way.product(x, y)[:rows]) if way.half else sum_.addmm_(x, y)


def _add_weight_gradient(base: Any, trained: bool, dy: Tensor, x: Tensor) -> None:
    """dyᵀ x of two operands."""
    if not trained:  # asked for by `how.prune: false`, to see what it costs
        dy.T @ x
        return
    weight = base.weight
    if weight.grad is None:
        # the buffer of the step before, unless the optimiser wants none between steps: fresh pages take time
        spare = getattr(weight, "spare_gradient", None)
        weight.grad = weight.spare_gradient = torch.empty_like(weight) if spare is None else spare
        if x.dtype == torch.float32:
            torch.mm(dy.T, x, out=weight.grad)
        else:
            weight.grad.copy_(_half_product(dy.T, x))
    elif x.dtype == torch.float32:
        weight.grad.addmm_(dy.T, x)
    else:
        weight.grad += _half_product(dy.T, x)
    ready = getattr(weight, "gradient_ready", None)  # autograd's own hooks do not see what is added here
    if ready is not None:
        ready(weight)


_products = Scratch()


def _half_product(x: Tensor, y: Tensor) -> Tensor:
    """In memory that the next one overwrites."""
    return torch.mm(x, y, out=_products.take(len(x), y.shape[1], torch.bfloat16))


class _Linears(torch.autograd.Function):
    """Several layers over the same input x (T, I)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: tuple[Layer, ...], way: Way, *trained: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.layers, ctx.flags, ctx.way = layers, [t is not None for t in trained], way
        given = way.operand(x)
        keep = any(_keeps_input(ctx.flags[4 * n : 4 * n + 4], way) for n in range(len(layers)))
        ctx.save_for_backward(given if keep else None)
        ctx.set_materialize_grads(False)
        return tuple(_full(_forward(layer, given, way), len(x)) for layer in layers)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        dx = None
        found: list[Tensor | None] = []
        for number, (layer, gradient) in enumerate(zip(ctx.layers, grads, strict=True)):
            flags = ctx.flags[4 * number : 4 * number + 4]
            more: list[Tensor | None] = [None] * 4
            if gradient is not None:
                dy = ctx.way.operand(gradient)
                dx, more = _backward(layer, flags, dy, x, ctx.way, len(gradient), ctx.needs_input_grad[0], dx)
            found += more
        return dx, None, None, *found


def linears(x: Tensor, modules: tuple[nn.Module, ...], way: Way) -> tuple[Tensor, ...]:
    layers = as_layers(modules)
    if layers is None:
        return tuple(module(x).contiguous() for module in modules)
    found: tuple[Tensor, ...] = _Linears.apply(x, layers, way, *_trained(layers))
    return found


# ---------------------------------------------------------------- norms


class _Norm(torch.autograd.Function):
    """(x, more) → (x + more, weight · (x + more) / rms); without `more` only the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, more: Tensor | None, weight: Tensor, eps: float, kernels: Kernels) -> Any:
        total, y, scale = kernels.norm(x, more, weight.detach(), eps)
        ctx.save_for_backward(total, scale, weight)
        ctx.kernels, ctx.alone = kernels, more is None
        ctx.set_materialize_grads(False)
        return y if more is None else (total, y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total, scale, weight = ctx.saved_tensors
        other, dy = (None, grads[0]) if ctx.alone else grads
        dx = dw = None
        if dy is None:
            dx = other
        else:
            dy = dy.contiguous()
            if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
                other = None if other is None else other.contiguous()
                dx = ctx.kernels.norm_back(total, scale, weight.detach(), dy, other)
            if ctx.needs_input_grad[2]:
                dw = (dy * total * scale[:, None]).sum(0)
        return dx, dx if ctx.needs_input_grad[1] else None, dw, None, None


def add_norm(stream: Pending, module: Any, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """(the residual stream with what was pending, its norm)."""
    x, more = stream
    eps = float(module.variance_epsilon)
    if more is None:
        return x, _Norm.apply(x, None, module.weight, eps, kernels)
    total, y = _Norm.apply(x, more, module.weight, eps, kernels)
    return total, y


# ---------------------------------------------------------------- attention


class _Attend(torch.autograd.Function):
    """q (A, H·d), k and v (T, G·d) as the layers gave them → (A, H·d); q and k are turned in their own memory."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, ...], plan: Plan, shape: Any, kernels: Kernels
    ) -> Tensor:
        cos_q, sin_q, cos_k, sin_k = angles
        kernels.rotate(q, cos_q, sin_q, shape.width, 1.0)
        kernels.rotate(k, cos_k, sin_k, shape.width, 1.0)
        out, lse = kernels.attend(plan, shape, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = angles, plan, shape, kernels
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        angles, plan, shape, kernels = ctx.rest
        dq, dk, dv = kernels.attend_back(plan, shape, q, k, v, out, lse, grads[0].contiguous())
        kernels.rotate(dq, angles[0], angles[1], shape.width, -1.0)
        kernels.rotate(dk, angles[2], angles[3], shape.width, -1.0)
        return dq, dk, dv, None, None, None, None


# ---------------------------------------------------------------- feed-forward


class _FeedForward(torch.autograd.Function):
    """x (T, I) → down(silu(gate x) · up x): gate and up are kept, what down reads is computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: tuple[Layer, ...], way: Way, *trained: Tensor | None) -> Tensor:
        ctx.layers, ctx.way, ctx.flags = layers, way, [t is not None for t in trained]
        given = way.operand(x)
        gate, up = _forward(layers[0], given, way), _forward(layers[1], given, way)
        keep = any(ctx.needs_input_grad)
        act = pool.like(gate) if keep else gate
        way.kernels.swiglu(gate, up, act)
        if keep:
            reads = _keeps_input(ctx.flags[:4], way) or _keeps_input(ctx.flags[4:8], way)
            ctx.save_for_backward(given if reads else None, gate, up)
        return _full(_forward(layers[2], act, way), len(x))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, gate, up = ctx.saved_tensors
        way: Way = ctx.way
        rows, flags = len(grads[0]), [ctx.flags[n : n + 4] for n in (0, 4, 8)]
        dy = way.operand(grads[0].contiguous())
        # what down reads is there only after its input's gradient is known
        dact = way.product(dy, _weight(ctx.layers[2].base, way))
        down = ctx.layers[2]
        if down.down is not None and down.up is not None:
            dmid = way.product(dy, _small(down.up, way))
            dact.addmm_(dmid, _small(down.down, way), alpha=down.scale)
        act = pool.like(gate) if _keeps_input(flags[2], way) else None
        way.kernels.swiglu_back(gate, up, dact, act)
        del dact
        _, last = _backward(down, flags[2], dy, act, way, rows, False, None)
        del act
        dx, found = None, []
        for layer, flag, d in zip(ctx.layers, flags, (gate, up), strict=False):  # these are gradients now
            dx, more = _backward(layer, flag, d, x, way, rows, ctx.needs_input_grad[0], dx)
            found += more
        return dx, None, None, *found, *last


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


def feed_forward(x: Tensor, mlp: Any, way: Way) -> Tensor:
    modules = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    layers = as_layers(modules)
    if layers is not None:
        found: Tensor = _FeedForward.apply(x, layers, way, *_trained(layers))
        return found
    gate, up = linears(x, modules[:2], way)
    (out,) = linears(_Gate.apply(gate, up, way.kernels), modules[2:], way)
    return out


# ---------------------------------------------------------------- a block


class Runner:
    """Blocks of one model over one batch."""

    def __init__(self, way: Way, config: Any, tree: Any, rotary: tuple[Tensor, Tensor], threads: int) -> None:
        """rotary: cosines and sines (T, d)."""
        self.way, self.kernels, self.tree, self.threads = way, way.kernels, tree, threads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape = heads(config.num_attention_heads, config.num_key_value_heads, width, width**-0.5)
        self.cos, self.sin = (t.float().contiguous() for t in rotary)
        self.plan = Plan(tree, self.shape.groups, threads)

    def block(self, block: Any, stream: Pending) -> Pending:
        """One block; what it adds last is left pending, for the next norm to add."""
        x, h = add_norm(stream, block.input_layernorm, self.kernels)
        angles = (self.cos, self.sin, self.cos, self.sin)
        mixed = _Attend.apply(*self._qkv(block, h), angles, self.plan, self.shape, self.kernels)
        return self._after(block, x, mixed)

    def last_block(self, block: Any, stream: Pending, asked: np.ndarray) -> Pending:
        """The last block, of which only the tokens `asked` are wanted: the others give keys and values alone."""
        x, h = add_norm(stream, block.input_layernorm, self.kernels)
        rows = torch.from_numpy(asked)
        q, k, v = self._qkv(block, h, h[rows])
        plan = Plan(self.tree, self.shape.groups, self.threads, asked)
        angles = (self.cos[rows], self.sin[rows], self.cos, self.sin)
        mixed = _Attend.apply(q, k, v, angles, plan, self.shape, self.kernels)
        return self._after(block, x[rows], mixed)

    def _qkv(self, block: Any, h: Tensor, asking: Tensor | None = None) -> tuple[Tensor, ...]:
        """asking: what queries are made from, where that is not all of h."""
        attention = block.self_attn
        if asking is None:
            q, k, v = linears(h, (attention.q_proj, attention.k_proj, attention.v_proj), self.way)
        else:
            (q,) = linears(asking, (attention.q_proj,), self.way)
            k, v = linears(h, (attention.k_proj, attention.v_proj), self.way)
        if hasattr(attention, "q_norm"):  # Qwen 3: a norm over each head
            q, k = self._head_norm(q, attention.q_norm), self._head_norm(k, attention.k_norm)
        return q, k, v

    def _head_norm(self, x: Tensor, module: Any) -> Tensor:
        _, y = add_norm((x.reshape(-1, self.shape.width), None), module, self.kernels)
        return y.view(x.shape)

    def _after(self, block: Any, x: Tensor, mixed: Tensor) -> Pending:
        """What follows the attention."""
        (out,) = linears(mixed, (block.self_attn.o_proj,), self.way)
        x, h = add_norm((x, out), block.post_attention_layernorm, self.kernels)
        return x, feed_forward(h, block.mlp, self.way)


class SplitRunner(Runner):
    """Gradients pass through the tokens `kept` alone (TokenTune); the others are computed, seen, and forgotten."""

    def __init__(self, kept: np.ndarray, *rest: Any) -> None:
        super().__init__(*rest)
        others = np.setdiff1d(np.arange(len(self.tree.size)), kept)
        self.kept, self.others = torch.from_numpy(kept), torch.from_numpy(others)
        self.order = torch.argsort(torch.cat([self.kept, self.others]))  # of both, back to the tokens' own
        self.kept_plan = Plan(self.tree, self.shape.groups, self.threads, kept)
        self.other_plan = Plan(self.tree, self.shape.groups, self.threads, others) if len(others) else None

    def split(self, hidden: Tensor) -> tuple[Pending, Pending]:
        return (hidden[self.kept], None), (hidden[self.others], None)

    def both(self, block: Any, kept: Pending, others: Pending) -> tuple[Pending, Pending]:
        """One block for both."""
        with torch.no_grad():
            y, h = add_norm(others, block.input_layernorm, self.kernels)
            q_others, k_others, v_others = self._qkv(block, h)
        x, h = add_norm(kept, block.input_layernorm, self.kernels)
        q, k_kept, v_kept = self._qkv(block, h)
        k, v = self._in_order(k_kept, k_others), self._in_order(v_kept, v_others)
        angles = (self.cos[self.kept], self.sin[self.kept], self.cos, self.sin)
        mixed = _Attend.apply(q, k, v, angles, self.kept_plan, self.shape, self.kernels)
        if self.other_plan is not None:
            with torch.no_grad():  # k has been turned already
                self.kernels.rotate(q_others, self.cos[self.others], self.sin[self.others], self.shape.width, 1.0)
                seen, _ = self.kernels.attend(self.other_plan, self.shape, q_others, k.detach(), v.detach())
                others = self._after(block, y, seen)
        return self._after(block, x, mixed), others

    def last(self, block: Any, kept: Pending, others: Pending, asked: np.ndarray) -> Pending:
        """The last block, of which only the tokens `asked`, all of them kept, are wanted."""
        with torch.no_grad():
            _, h = add_norm(others, block.input_layernorm, self.kernels)
            _, k_others, v_others = self._qkv(block, h)
        x, h = add_norm(kept, block.input_layernorm, self.kernels)
        rows = torch.from_numpy(np.searchsorted(self.kept.numpy(), asked))
        q, k_kept, v_kept = self._qkv(block, h)
        k, v = self._in_order(k_kept, k_others), self._in_order(v_kept, v_others)
        at = torch.from_numpy(asked)
        angles = (self.cos[at], self.sin[at], self.cos, self.sin)
        plan = Plan(self.tree, self.shape.groups, self.threads, asked)
        mixed = _Attend.apply(q[rows], k, v, angles, plan, self.shape, self.kernels)
        return self._after(block, x[rows], mixed)

    def _in_order(self, kept: Tensor, others: Tensor) -> Tensor:
        return torch.cat([kept, others.detach()])[self.order]
