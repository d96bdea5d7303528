"""Linear layers, several over one input: forward and backward. No gradient is computed that nothing uses.

Gradients of weights are added to `.grad` here; those of biases and adapters go back through autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from edgeft.engine.backend import Backend, Matrix, Product
from edgeft.engine.packed import PackedLinear

Tensor = torch.Tensor
Gradients = list[Tensor | None]  # of (weight, bias, A, B, part), for autograd


class Trained(NamedTuple):
    """Which tensors of a layer are trained."""

    weight: bool
    bias: bool
    down: bool
    up: bool
    part: bool

    @property
    def reads_input(self) -> bool:
        """The backward pass needs the layer's whole input."""
        return self.weight or self.down

    @property
    def reads_part(self) -> bool:
        """It needs what `LinearSpec.reads` makes of it."""
        return self.up or self.part


SLOTS = len(Trained._fields)
FLOAT32 = Product(float32=True)


@dataclass(frozen=True)
class ComputeOptions:
    """What computes layers. bf16: operands of products; int8: those of products with packed weights. Sums in products
    and all between them are float32."""

    backend: Backend
    bf16: bool = False
    int8: bool = False

    def operand(self, x: Tensor) -> Tensor:
        return self.backend.operand(x, self.bf16)

    def multiplies_bytes(self, weight: Matrix) -> bool:
        return self.int8 and not isinstance(weight, Tensor)


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer y = x Wᵀ + b, with an adapter + scale x Aᵀ Bᵀ.

    All of W may be trained, or some columns, `part`, which replace those of `base`.
    """

    base: Any  # nn.Linear, PackedLinear, or a layer with `operand(backend, bf16)`
    bias: nn.Parameter | None
    down: Tensor | None = None  # A (r, I): trained by LoRA, fixed in a lite branch
    up: nn.Parameter | None = None  # B (O, r)
    scale: float = 0.0
    part: nn.Parameter | None = None  # (O, C)
    columns: Tensor | None = None  # (C,) their indices
    # while set, backward passes give it (dy (T, O), x (T, I)), operands, and no gradient of the weight is computed
    observer: Callable[[Tensor, Tensor], None] | None = None
    reader: Callable[[Tensor], None] | None = None  # while set, forward passes give it x, before they read the weight

    def trained(self) -> list[Tensor | None]:
        """(weight, bias, A, B, part) for autograd; None for what is frozen or absent."""
        if self.observer is not None:  # what would be trained stands for the whole weight
            return [self.up if self.part is None else self.part, *[None] * (SLOTS - 1)]
        weight = None if isinstance(self.base, PackedLinear) else self.base.weight
        return [
            None if t is None or not t.requires_grad else t for t in (weight, self.bias, self.down, self.up, self.part)
        ]

    @property
    def width(self) -> int:
        """Numbers per token that the gradient of a part, or of B, reads."""
        if self.columns is not None:
            return len(self.columns)
        return 0 if self.down is None else len(self.down)

    @property
    def adapts(self) -> bool:
        """An adapter is computed beside the weight."""
        return self.down is not None

    def reads(self, x: Tensor, compute: ComputeOptions) -> Tensor:
        """These numbers (T, width), from the layer's input."""
        if self.columns is not None:
            return compute.backend.gather_columns(x, self.columns)
        assert self.down is not None
        return compute.backend.mm(x, self.down.detach().T, options=FLOAT32)


def empty_linear(inputs: int, outputs: int) -> nn.Linear:
    """Without a weight yet. On `meta`, nn.Linear's initialisation makes some versions of torch load sympy: 34 MiB."""
    linear = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(linear)
    linear.in_features, linear.out_features = inputs, outputs
    linear.weight = nn.Parameter(torch.empty(outputs, inputs, device="meta"), requires_grad=False)
    linear.register_parameter("bias", None)
    return linear


def linear_spec(module: Any) -> LinearSpec | None:
    """A module describes itself by `as_layer()`. None: a layer that is called as it is (bitsandbytes')."""
    if type(module) in (nn.Linear, PackedLinear):
        return LinearSpec(module, module.bias)
    made: LinearSpec | None = module.as_layer() if hasattr(module, "as_layer") else None
    return made


def linear_specs(modules: Sequence[Any]) -> tuple[LinearSpec, ...] | None:
    """None if one of them has none."""
    specs = [spec for spec in map(linear_spec, modules) if spec is not None]
    return tuple(specs) if len(specs) == len(modules) else None


def trained_tensors(layers: tuple[LinearSpec, ...]) -> list[Tensor | None]:
    return [t for layer in layers for t in layer.trained()]


def trained_flags(tensors: Sequence[Tensor | None]) -> list[Trained]:
    """Of each layer, from its slots."""
    every = [t is not None for t in tensors]
    return [Trained(*every[n : n + SLOTS]) for n in range(0, len(every), SLOTS)]


def _weight(layer: LinearSpec, compute: ComputeOptions) -> Matrix:
    """W, as products read it."""
    base, backend = layer.base, compute.backend
    if layer.part is not None and layer.columns is not None:
        # in the buffer that the next weight overwrites, or in the base's own, whose columns nothing else reads
        packed = isinstance(base, PackedLinear)
        weight = base.packed.operand(backend, bf16=compute.bf16) if packed else base.weight.detach()
        backend.scatter_columns(layer.part.detach(), layer.columns, weight)
        return weight  # type: ignore[no-any-return]
    if isinstance(base, PackedLinear):
        return base.packed
    return base.weight.detach() if isinstance(base, nn.Linear) else base.operand(backend, compute.bf16)  # type: ignore[no-any-return]


def kept_inputs(
    layers: Sequence[LinearSpec],
    flags: Sequence[Trained],
    x: Tensor,
    mids: Sequence[Tensor | None],
    compute: ComputeOptions,
) -> list[Tensor | None]:
    """What the backward pass needs of an input that several layers read: (all of it, each layer's part)."""
    numbers = sum(layer.width for layer, flag in zip(layers, flags, strict=True) if flag.reads_part)
    if any(flag.reads_input for flag in flags) or numbers >= x.shape[1]:
        return [x, *(None for _ in layers)]
    every = zip(layers, flags, mids, strict=True)
    return [None, *(kept_part(layer, x, mid, compute) if flag.reads_part else None for layer, flag, mid in every)]


def kept_part(layer: LinearSpec, x: Tensor, mid: Tensor | None, compute: ComputeOptions) -> Tensor:
    """mid: what `forward` has computed of it."""
    return layer.reads(x, compute) if mid is None else mid


def forward(
    layer: LinearSpec, x: Tensor, compute: ComputeOptions, float32: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(y, what the adapter reads); y as an operand, or in float32."""
    if layer.reader is not None:
        layer.reader(x)
    backend, weight = compute.backend, _weight(layer, compute)
    options = Product(bias=layer.bias, float32=float32, int8=compute.multiplies_bytes(weight))
    out = backend.mm(x, weight.T, options=options)
    mid = None
    if layer.adapts:
        assert layer.up is not None
        mid = layer.reads(x, compute)
        backend.mm(mid, layer.up.detach().T, out, Product(layer.scale, add=True))
    return out, mid


def input_gradient(layer: LinearSpec, dy: Tensor, compute: ComputeOptions) -> Tensor:
    """As an operand."""
    backend = compute.backend
    weight = _weight(layer, compute)
    dx = backend.mm(dy, weight, options=Product(int8=compute.multiplies_bytes(weight)))
    if layer.adapts:
        backend.mm(_adapter_gradient(layer, dy, compute), _down(layer), dx, Product(add=True))
    return dx


def _down(layer: LinearSpec) -> Tensor:
    assert layer.down is not None
    return layer.down.detach()


def _adapter_gradient(layer: LinearSpec, dy: Tensor, compute: ComputeOptions) -> Tensor:
    """Of x Aᵀ: (T, r), float32."""
    assert layer.up is not None
    return compute.backend.mm(dy, layer.up.detach(), options=Product(layer.scale, float32=True))


class InputGradient:
    """The gradient of what several layers read, (T, I) float32, summed layer by layer."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.total: Tensor | None = None

    def add(self, x: Tensor, y: Matrix, int8: bool = False) -> None:
        """x y of two operands."""
        self.total = self.backend.mm(x, y, self.total, Product(add=self.total is not None, float32=True, int8=int8))


Saved = tuple[Tensor | None, Tensor | None]  # of a layer's input: all of it, or what `LinearSpec.reads` makes of it


def backward(
    layer: LinearSpec, flags: Trained, dy: Tensor, saved: Saved, compute: ComputeOptions, dx: InputGradient | None
) -> Gradients:
    """dy and the saved input are operands; dx: None if it is not needed."""
    x, part = saved
    grads: Gradients = [None] * SLOTS
    backend = compute.backend
    if dx is not None:
        weight = _weight(layer, compute)
        dx.add(dy, weight, compute.multiplies_bytes(weight))
    if flags.weight:
        assert x is not None
        if layer.observer is None:
            _add_gradient(layer.base.weight, dy, x, backend)
        else:
            layer.observer(dy, x)
    if flags.bias:
        grads[1] = backend.sum_rows(dy)
    if part is None and x is not None and flags.reads_part:
        part = layer.reads(x, compute)
    if flags.part:
        assert layer.part is not None
        assert part is not None
        _add_gradient(layer.part, dy, part, backend)
    if flags.up:
        assert part is not None
        assert layer.up is not None
        grads[3] = backend.mm(dy.T, part, torch.empty_like(layer.up), Product(layer.scale))
    if layer.adapts and (flags.down or dx is not None):
        dmid = _adapter_gradient(layer, dy, compute)
        if flags.down:
            assert x is not None
            grads[2] = backend.mm(dmid.T, x, torch.empty_like(_down(layer)))
        if dx is not None:
            dx.add(dmid, _down(layer))
    return grads


def _add_gradient(parameter: nn.Parameter, dy: Tensor, x: Tensor, backend: Backend) -> None:
    """dyᵀ x of two operands."""
    gradients, first = backend.memory.gradients, parameter.grad is None
    gradient = gradients.allocate(parameter) if parameter.grad is None else parameter.grad
    backend.mm(dy.T, x, gradient, Product(add=not first))
    if gradients.on_ready is not None:
        gradients.on_ready(parameter)


class _Linears(torch.autograd.Function):
    """Several layers over the same input x (T, I); shared: something else keeps x for the backward pass anyway."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: tuple[LinearSpec, ...], compute: ComputeOptions, shared: bool, *trained: Any
    ) -> tuple[Tensor, ...]:
        ctx.layers, ctx.flags, ctx.compute = layers, trained_flags(trained), compute
        operand = compute.operand(x)
        outs, mids = zip(*(forward(layer, operand, compute, float32=True) for layer in layers), strict=True)
        if shared and operand is x and any(flag.reads_part for flag in ctx.flags):
            ctx.save_for_backward(x, *(None for _ in layers))
        elif any(ctx.needs_input_grad):
            ctx.save_for_backward(*kept_inputs(layers, ctx.flags, operand, mids, compute))
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *parts = ctx.saved_tensors
        compute: ComputeOptions = ctx.compute
        dx = InputGradient(compute.backend) if ctx.needs_input_grad[0] else None
        every: Gradients = []
        for layer, flags, part, gradient in zip(ctx.layers, ctx.flags, parts, grads, strict=True):
            if gradient is None:
                every += [None] * SLOTS
            else:
                every += backward(layer, flags, compute.operand(gradient), (x, part), compute, dx)
        return None if dx is None else dx.total, None, None, None, *every


def linears(
    x: Tensor, modules: tuple[nn.Module, ...], compute: ComputeOptions, shared: bool = False
) -> tuple[Tensor, ...]:
    layers = linear_specs(modules)
    if layers is None:
        return tuple(module(x).contiguous() for module in modules)
    outs: tuple[Tensor, ...] = _Linears.apply(x, layers, compute, shared, *trained_tensors(layers))
    return outs
