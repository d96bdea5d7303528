"""Linear layers, several over one input: forward and backward, no gradient that nobody uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edgeft.engine.kernels import Kernels
from edgeft.engine.limits import padded
from edgeft.engine.packed import PackedLinear, Scratch
from edgeft.engine.pool import pool

Tensor = torch.Tensor

SLOTS = 5  # tensors of a layer that may be trained


@dataclass(frozen=True)
class LinearSpec:
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

    def reads(self, x: Tensor, way: ComputeOptions) -> Tensor:
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


def linear_spec(module: Any) -> LinearSpec | None:
    """None: a layer that is called as it is (bitsandbytes')."""
    if type(module) in (nn.Linear, PackedLinear):
        return LinearSpec(module, module.bias)
    if hasattr(module, "as_layer"):  # those of sparse/layers.py
        made: LinearSpec | None = module.as_layer()
        return made
    base: Any = getattr(module, "base_layer", None)
    if type(base) not in (nn.Linear, PackedLinear) or list(getattr(module, "lora_A", ())) != ["default"]:
        return None
    down, up = module.lora_A["default"].weight, module.lora_B["default"].weight
    return LinearSpec(base, base.bias, down, up, module.scaling["default"])


def linear_specs(modules: Sequence[Any]) -> tuple[LinearSpec, ...] | None:
    """None unless all of them are."""
    found = [linear_spec(module) for module in modules]
    return None if any(layer is None for layer in found) else tuple(layer for layer in found if layer is not None)


@dataclass(frozen=True)
class ComputeOptions:
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


def _full(x: Tensor, rows: int) -> Tensor:
    """What lies between products: float32, without the operands' further rows."""
    return x if x.dtype == torch.float32 else pool.take(rows, x.shape[1]).copy_(x[:rows])


def _weight(layer: LinearSpec, way: ComputeOptions) -> Tensor:
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


def _small(weight: Tensor, way: ComputeOptions) -> Tensor:
    return weight.bfloat16() if way.half else weight


def _trained(layers: tuple[LinearSpec, ...]) -> list[Tensor | None]:
    return [t for layer in layers for t in layer.trained()]


def _flags(trained: Sequence[Tensor | None]) -> list[list[bool]]:
    """For each layer, which of (weight, bias, A, B, part) are trained."""
    return [[t is not None for t in trained[n : n + SLOTS]] for n in range(0, len(trained), SLOTS)]


def _reads_all(flags: Sequence[bool], way: ComputeOptions) -> bool:
    """Does a backward pass with these trained read the layer's whole input?"""
    return flags[0] or flags[2] or not way.prune


def _reads_part(flags: Sequence[bool]) -> bool:
    """Or what `Layer.reads` makes of it?"""
    return flags[3] or flags[4]


def _kept(
    layers: Sequence[LinearSpec],
    flags: Sequence[Sequence[bool]],
    x: Tensor,
    mids: Sequence[Tensor | None],
    way: ComputeOptions,
) -> list[Tensor | None]:
    """What the backward pass needs of an input that several layers read: all of it, or for each layer its part."""
    none: list[Tensor | None] = [None] * len(layers)
    parts = [_reads_part(flag) for flag in flags]
    numbers = sum(layer.width for layer, wanted in zip(layers, parts, strict=True) if wanted)
    if any(_reads_all(flag, way) for flag in flags) or numbers >= x.shape[1]:
        return [x, *none]
    found = zip(layers, parts, mids, strict=True)
    return [None, *((layer.reads(x, way) if mid is None else mid) if part else None for layer, part, mid in found)]


def _forward(layer: LinearSpec, x: Tensor, way: ComputeOptions) -> tuple[Tensor, Tensor | None]:
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
    layer: LinearSpec,
    flags: Sequence[bool],
    dy: Tensor,
    x: Tensor | None,
    part: Tensor | None,
    way: ComputeOptions,
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


def _add(sum_: Tensor | None, x: Tensor, y: Tensor, way: ComputeOptions, rows: int) -> Tensor:
    """x y in float32, added to what is there."""
    if sum_ is None:
        return _full(way.product(x, y), rows)
    if not way.half:
        return sum_.addmm_(x, y)
    assert way.kernels is not None
    way.kernels.add(sum_, way.product(x, y)[:rows])
    return sum_


def _add_gradient(parameter: nn.Parameter, dy: Tensor, x: Tensor, way: ComputeOptions) -> None:
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
        ctx: Any, x: Tensor, layers: tuple[LinearSpec, ...], way: ComputeOptions, shared: bool, *trained: Tensor | None
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


def linears(x: Tensor, modules: tuple[nn.Module, ...], way: ComputeOptions, shared: bool = False) -> tuple[Tensor, ...]:
    layers = linear_specs(modules)
    if layers is None:
        return tuple(module(x).contiguous() for module in modules)
    found: tuple[Tensor, ...] = _Linears.apply(x, layers, way, shared, *_trained(layers))
    return found
