"""A transformers block run through edgeft's own kernels: the same numbers, in fewer passes over memory.

Nothing is kept for the backward pass but what it needs, no gradient is computed that nobody uses, and weight gradients
are added to `.grad` where they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from edgeft.model.kernels import Kernels, Plan, heads
from edgeft.model.packed import PackedLinear, Scratch
from edgeft.model.pool import pool
from edgeft.model.recompute import go_back, recomputed

Tensor = torch.Tensor
Pending = tuple[Tensor, Tensor | None]  # the residual stream, and what is still to be added to it


# ---------------------------------------------------------------- linear layers


SLOTS = 5  # tensors of a layer that may be trained


@dataclass(frozen=True)
class Layer:
    """A linear layer whose weight can be had as a matrix: y = x Wᵀ + b, with an adapter + scale x Aᵀ Bᵀ.

    Of W all may be trained, or some columns, `part`, which stand in for those of `base`.
    """

    base: Any  # nn.Linear, PackedLinear, or a layer that makes its weight by `operand`
    bias: nn.Parameter | None
    down: Tensor | None = None  # A (r, I): trained by LoRA, fixed in a lite branch
    up: nn.Parameter | None = None  # B (O, r)
    scale: float = 0.0
    part: nn.Parameter | None = None  # (O, C)
    columns: Tensor | None = None  # (C,) where they stand

    def trained(self) -> list[Tensor | None]:
        """What autograd must see: (weight, bias, A, B, part), None for what is frozen or not there."""
        weight = None if isinstance(self.base, PackedLinear) else self.base.weight
        return [
            None if t is None or not t.requires_grad else t for t in (weight, self.bias, self.down, self.up, self.part)
        ]

    @property
    def lite(self) -> bool:
        """A is fixed: B A can be added to the weight, and is less work there than beside it."""
        return self.down is not None and not self.down.requires_grad

    @property
    def width(self) -> int:
        """Numbers per token that the gradient of a part, or of B, reads."""
        if self.columns is not None:
            return len(self.columns)
        return 0 if self.down is None else len(self.down)

    def reads(self, x: Tensor, way: Way) -> Tensor:
        """These numbers (T, width), from the layer's input."""
        if self.columns is not None:
            out = pool.take(len(x), len(self.columns), x.dtype)
            if way.kernels is None:
                return torch.index_select(x, 1, self.columns, out=out)
            way.kernels.pick_columns(x, self.columns, out)  # torch's own takes half of the time that it saves
            return out
        assert self.down is not None
        if self.lite and way.half and way.kernels is not None and way.kernels.projects(len(self.down)):
            # a bf16 product of this form would leave code behind for every size of a pass
            out = pool.take(len(x), len(self.down))
            way.kernels.project(x, self.down, out)
            return out
        return way.product(x, _small(self.down, way).T)


def as_layer(module: Any) -> Layer | None:
    """None: a layer that is called as it is (bitsandbytes')."""
    if type(module) in (nn.Linear, PackedLinear):
        return Layer(module, module.bias)
    if hasattr(module, "as_layer"):  # those of sparse/layers.py
        made: Layer | None = module.as_layer()
        return made
    base: Any = getattr(module, "base_layer", None)
    if type(base) not in (nn.Linear, PackedLinear) or list(getattr(module, "lora_A", ())) != ["default"]:
        return None
    down, up = module.lora_A["default"].weight, module.lora_B["default"].weight
    return Layer(base, base.bias, down, up, module.scaling["default"])


def as_layers(modules: Sequence[Any]) -> tuple[Layer, ...] | None:
    """None unless all of them are."""
    found = [as_layer(module) for module in modules]
    return None if any(layer is None for layer in found) else tuple(layer for layer in found if layer is not None)


@dataclass(frozen=True)
class Way:
    """How blocks are computed."""

    kernels: Kernels | None  # None: products in plain torch, all that a single layer needs
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


def _weight(layer: Layer, way: Way) -> Tensor:
    """As a product reads it."""
    base = layer.base
    if isinstance(base, PackedLinear):
        found = base.packed.operand(way.kernels, half=way.half)
    elif isinstance(base, nn.Linear):
        found = _small(base.weight, way)
    else:
        found = base.operand(way.half)
    if layer.part is not None and layer.columns is not None:
        # in the buffer that the next weight overwrites, or in the base's own: nobody else reads these columns of it
        if way.kernels is None:
            found.scatter_(1, layer.columns.expand(len(found), -1), layer.part.to(found.dtype))
        else:
            way.kernels.place_columns(layer.part.detach(), layer.columns, found)
    if layer.lite:
        assert layer.up is not None
        assert layer.down is not None
        own = way.half or isinstance(base, PackedLinear)  # a buffer that may be written to
        branch = _small(layer.up.detach(), way), _small(layer.down, way)
        found = torch.addmm(found, *branch, alpha=layer.scale, out=found if own else None)
    return found


def _small(weight: Tensor, way: Way) -> Tensor:
    return weight.bfloat16() if way.half else weight


def _trained(layers: tuple[Layer, ...]) -> list[Tensor | None]:
    return [t for layer in layers for t in layer.trained()]


def _flags(trained: Sequence[Tensor | None]) -> list[list[bool]]:
    """For each layer, which of (weight, bias, A, B, part) are trained."""
    return [[t is not None for t in trained[n : n + SLOTS]] for n in range(0, len(trained), SLOTS)]


def _reads_all(flags: Sequence[bool], way: Way) -> bool:
    """Does a backward pass with these trained read the layer's whole input?"""
    return flags[0] or flags[2] or not way.prune


def _reads_part(flags: Sequence[bool]) -> bool:
    """Or what `Layer.reads` makes of it?"""
    return flags[3] or flags[4]


def _kept(
    layers: Sequence[Layer], flags: Sequence[Sequence[bool]], x: Tensor, mids: Sequence[Tensor | None], way: Way
) -> list[Tensor | None]:
    """What the backward pass needs of an input that several layers read: all of it, or for each layer its part."""
    none: list[Tensor | None] = [None] * len(layers)
    parts = [_reads_part(flag) for flag in flags]
    numbers = sum(layer.width for layer, wanted in zip(layers, parts, strict=True) if wanted)
    if any(_reads_all(flag, way) for flag in flags) or numbers >= x.shape[1]:
        return [x, *none]
    found = zip(layers, parts, mids, strict=True)
    return [None, *((layer.reads(x, way) if mid is None else mid) if part else None for layer, part, mid in found)]


def _forward(layer: Layer, x: Tensor, way: Way) -> tuple[Tensor, Tensor | None]:
    """(y, x Aᵀ of an adapter); x and what comes out are operands."""
    out, mid = way.product(x, _weight(layer, way).T), None
    if layer.bias is not None and way.half:
        assert way.kernels is not None
        way.kernels.add_bias(out, layer.bias)
    elif layer.bias is not None:
        out += layer.bias
    if layer.down is not None and layer.up is not None and not layer.lite:
        mid = way.product(x, _small(layer.down, way).T)  # (T, r)
        out.addmm_(mid, _small(layer.up, way).T, alpha=layer.scale)
    return out, mid


def _backward(
    layer: Layer,
    flags: Sequence[bool],
    dy: Tensor,
    x: Tensor | None,
    part: Tensor | None,
    way: Way,
    rows: int,
    wanted: bool,
    dx: Tensor | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(dx with this layer's part, if wanted; gradients of (weight, bias, A, B, part) for autograd).

    dy and x are operands of so many rows, part what the layer reads of x where x is not there; gradients of a weight or
    some of its columns are added where they belong.
    """
    grads: list[Tensor | None] = [None] * SLOTS
    if wanted:
        dx = _add(dx, dy, _weight(layer, way), way, rows)
    if not (flags[0] or way.prune):  # asked for by `how.prune: false`, to see what it costs
        assert x is not None
        dy.T @ x
    if flags[0]:
        assert x is not None
        _add_gradient(layer.base.weight, dy, x, way)
    if flags[1]:
        grads[1] = way.kernels.sum_rows(dy) if way.half and way.kernels else dy.sum(0)
    if part is None and x is not None and _reads_part(flags):
        part = layer.reads(x, way)
    if flags[4]:
        assert layer.part is not None
        assert part is not None
        _add_gradient(layer.part, dy, part, way)
    if flags[3]:
        assert part is not None
        found = dy.T @ part if part.dtype == dy.dtype or way.kernels is None else way.kernels.expand_back(dy, part)
        grads[3] = found.float().mul_(layer.scale)
    if layer.down is not None and layer.up is not None and not layer.lite and (flags[2] or wanted):
        dmid = way.product(dy, _small(layer.up, way)).mul_(layer.scale)  # (T, r)
        if flags[2]:
            assert x is not None
            grads[2] = (dmid.T @ x).float()
        if wanted:
            dx = _add(dx, dmid, _small(layer.down, way), way, rows)
    return dx, grads


def _add(sum_: Tensor | None, x: Tensor, y: Tensor, way: Way, rows: int) -> Tensor:
    """x y in float32, added to what is there."""
    if sum_ is None:
        return _full(way.product(x, y), rows)
    if not way.half:
        return sum_.addmm_(x, y)
    assert way.kernels is not None
    way.kernels.add(sum_, way.product(x, y)[:rows])
    return sum_


def _add_gradient(parameter: nn.Parameter, dy: Tensor, x: Tensor, way: Way) -> None:
    """dyᵀ x of two operands."""
    if parameter.grad is None:
        # the buffer of the step before, unless the optimiser wants none between steps: fresh pages take time
        spare = getattr(parameter, "spare_gradient", None)
        if spare is None:
            spare = torch.empty(parameter.shape)
        parameter.grad = parameter.spare_gradient = spare  # type: ignore[attr-defined]
        if way.half:
            spare.copy_(_half_product(dy.T, x))
        else:
            torch.mm(dy.T, x, out=spare)
    elif way.half:
        assert way.kernels is not None
        way.kernels.add(parameter.grad, _half_product(dy.T, x))
    else:
        parameter.grad.addmm_(dy.T, x)
    ready = getattr(parameter, "gradient_ready", None)  # autograd's own hooks do not see what is added here
    if ready is not None:
        ready(parameter)


_products = Scratch()


def _half_product(x: Tensor, y: Tensor) -> Tensor:
    """In memory that the next one overwrites."""
    return torch.mm(x, y, out=_products.take(len(x), y.shape[1], torch.bfloat16))


class _Linears(torch.autograd.Function):
    """Several layers over the same input x (T, I); shared: it is kept for the backward pass by others anyway."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: tuple[Layer, ...], way: Way, shared: bool, *trained: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.layers, ctx.flags, ctx.way = layers, _flags(trained), way
        given = way.operand(x)
        outs, mids = zip(*(_forward(layer, given, way) for layer in layers), strict=True)
        if shared and given is x and any(_reads_part(flag) for flag in ctx.flags):
            ctx.save_for_backward(x, *(None for _ in layers))
        elif any(ctx.needs_input_grad):
            ctx.save_for_backward(*_kept(layers, ctx.flags, given, mids, way))
        ctx.set_materialize_grads(False)
        return tuple(_full(out, len(x)) for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *parts = ctx.saved_tensors
        dx = None
        found: list[Tensor | None] = []
        for layer, flags, part, gradient in zip(ctx.layers, ctx.flags, parts, grads, strict=True):
            more: list[Tensor | None] = [None] * SLOTS
            if gradient is not None:
                dy = ctx.way.operand(gradient)
                dx, more = _backward(layer, flags, dy, x, part, ctx.way, len(gradient), ctx.needs_input_grad[0], dx)
            found += more
        return dx, None, None, None, *found


def linears(x: Tensor, modules: tuple[nn.Module, ...], way: Way, shared: bool = False) -> tuple[Tensor, ...]:
    layers = as_layers(modules)
    if layers is None:
        return tuple(module(x).contiguous() for module in modules)
    found: tuple[Tensor, ...] = _Linears.apply(x, layers, way, shared, *_trained(layers))
    return found


# ---------------------------------------------------------------- norms


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


def add_norm(stream: Pending, module: Any, kernels: Kernels) -> tuple[Tensor, Tensor]:
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
        way: Way = ctx.way
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


def _branch(layer: Layer, flags: Sequence[bool], x: Tensor, mid: Tensor | None, way: Way) -> Tensor | None:
    """What the gradient of B reads of the input, if it is wanted."""
    return (layer.reads(x, way) if mid is None else mid) if flags[3] else None


def _input_gradient(layer: Layer, dy: Tensor, way: Way) -> Tensor:
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
        layers: tuple[Layer, ...],
        way: Way,
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
        assert way.kernels is not None
        self.way, self.kernels, self.tree, self.threads = way, way.kernels, tree, threads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape = heads(config.num_attention_heads, config.num_key_value_heads, width, width**-0.5)
        self.cos, self.sin = (t.float().contiguous() for t in rotary)
        self.plan = Plan(tree, self.shape.groups, threads)

    def block(self, block: Any, stream: Pending) -> Pending:
        """One block; what it adds last is left pending, for the next norm to add."""
        return self._after(block, *self._mixed(block, stream))

    def frugal_block(self, block: Any, stream: Pending) -> Pending:
        """As `block`, keeping the residual stream before it and no more. Going back, all is computed again but
        for down, whose input nobody needs where its weight is not trained."""
        layers = as_layers((block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj))
        if layers is None:
            return recomputed(partial(self.block, block), stream)  # type: ignore[no-any-return]
        x = stream[0] if stream[1] is None else _Sum.apply(*stream)
        norm = block.post_attention_layernorm
        eps, anchor = float(norm.variance_epsilon), torch.empty(0, requires_grad=True)
        made: Pending = _FrugalBlock.apply(
            anchor, x, partial(self._attended, block), norm.weight, eps, layers, self.way, *_trained(layers)
        )
        return made

    def _attended(self, block: Any, x: Tensor) -> Tensor:
        """The stream after the block's first half."""
        x, mixed = self._mixed(block, (x, None))
        (out,) = linears(mixed, (block.self_attn.o_proj,), self.way)
        found: Tensor = _Sum.apply(x, out)
        return found

    def _mixed(self, block: Any, stream: Pending) -> tuple[Tensor, Tensor]:
        """The stream, and what o reads."""
        x, h = add_norm(stream, block.input_layernorm, self.kernels)
        angles = (self.cos, self.sin, self.cos, self.sin)
        return x, _Attend.apply(*self._qkv(block, h), angles, self.plan, self.shape, self.kernels)

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
        (out,) = linears(mixed, (block.self_attn.o_proj,), self.way, shared=True)
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
