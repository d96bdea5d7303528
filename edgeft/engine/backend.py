"""The seam under which everything is computed: matrix products, the operations between them, and memory.

`Backend` is the interface, and computes each operation in plain torch; a backend overrides what it does faster. Code
above calls these methods, and plain torch operations on the tensors they return. T: tokens, d: width of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from edgeft.data.tree import Tree
from edgeft.engine.attention import AttentionPlan, Heads, tree_attention, tree_attention_back
from edgeft.engine.memory import Memory
from edgeft.formats import ggml

Tensor = torch.Tensor


@dataclass(frozen=True)
class AdamRule:
    """One step of AdamW; correction1 and correction2: 1 - beta^step; factor: multiplies the gradient (clipping);
    seed: of the stochastic rounding of weights and moments."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    correction1: float
    correction2: float
    factor: float
    seed: int


@dataclass
class Moments:
    """Of one tensor: float32, bf16, or bytes with two float32 scales for each MOMENT_GROUP of numbers, (groups, 2)."""

    first: Tensor
    second: Tensor
    scales: Tensor | None = None


@dataclass
class GridJob:
    """Rows to round onto a grid: value = d · scale · level(code) + m · low. codes, d and m are written; see
    export/rounding.py for what each step does."""

    target: Tensor  # (O, I)
    scale: Tensor  # (O, I)
    low: Tensor | None  # (O, I)
    d: Tensor  # (O, blocks)
    m: Tensor | None
    codes: Tensor  # (O, I) uint8
    levels: Tensor
    h: Tensor  # (I, I)
    lower: Tensor  # (I, I): the upper Cholesky factor of H⁻¹, transposed
    rounds: int
    ridge: float


class Angles(NamedTuple):
    """By which rows are rotated: cosines and sines (T, turned), in two equal halves; the rest of a head stays."""

    cosines: Tensor
    sines: Tensor
    neighbours: bool = False  # an angle turns neighbours instead of two numbers half of `turned` apart

    def of(self, rows: Tensor) -> Angles:
        return Angles(self.cosines[rows], self.sines[rows], self.neighbours)


Matrix = Any  # a tensor, or a weight that products unpack: engine.packed.Packed or its transpose


class Product(NamedTuple):
    """out = scale · x y + bias, or out += it. float32: the type of a buffer that is not given; int8: operands are
    rounded to bytes, with a scale for each 32 of them, where the backend multiplies these."""

    scale: float = 1.0
    bias: Tensor | None = None
    add: bool = False
    float32: bool = False
    int8: bool = False


PLAIN = Product()


class Backend:
    """Tensors are contiguous but for operands of products; "operand": float32 or bf16."""

    name = "torch"  # in cache keys: backends round differently
    runs_blocks = False  # transformers' own modules run the blocks
    fused_adamw = False  # has `adamw`; else torch.optim's is used
    multiplies_int8 = False
    rounds_rows = False  # has `round_rows`

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def use_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def able(self, head_width: int, gate: str) -> bool:
        """Whether it runs models with such heads and such a gate (`silu`, …)."""
        return True

    def operand(self, x: Tensor, bf16: bool) -> Tensor:
        """x (T, d), float32, as products read it: x itself, or a bf16 copy."""
        return self.memory.pool.take(len(x), x.shape[1], torch.bfloat16).copy_(x) if bf16 else x

    def mm(self, x: Tensor, y: Matrix, out: Tensor | None = None, options: Product = PLAIN) -> Tensor:
        """x y, summed in float32: in `out`, or in a pooled buffer of x's type."""
        dense = y if isinstance(y, Tensor) else y.dense(self)
        product = options.scale * torch.mm(x.float(), dense.float())
        if options.bias is not None:
            product += options.bias
        if out is None:
            kind = torch.float32 if options.float32 else x.dtype
            out = self.memory.pool.take(len(x), y.shape[1], kind)
        return out.add_(product) if options.add else out.copy_(product)

    def sum_rows(self, x: Tensor) -> Tensor:
        """x (T, d), an operand → (d,), float32."""
        return x.sum(0, dtype=torch.float32)

    def gather_columns(self, x: Tensor, columns: Tensor) -> Tensor:
        """x (T, d), float32 or bf16, columns (C,) → (T, C) of x's type, in a pooled buffer."""
        out = self.memory.pool.take(len(x), len(columns), x.dtype)
        return torch.index_select(x, 1, columns, out=out)

    def scatter_columns(self, part: Tensor, columns: Tensor, out: Tensor) -> None:
        """part (T, C), float32, as these columns of `out` (T, d), float32 or bf16."""
        out.scatter_(1, columns.expand(len(out), -1), part.to(out.dtype))

    def unpacks(self, type_id: int) -> bool:
        """Whether `unpack` writes bf16 for this ggml type, too."""
        return False

    def unpack(self, packed: np.ndarray, type_id: int, out: Tensor) -> None:
        """Packed rows (uint8, C order) of a ggml type into `out` (rows, cols), float32."""
        ggml.unpack(packed, type_id, out.numpy(), self.threads)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y, float32, in a pooled buffer."""
        return torch.add(x, y, out=self.memory.pool.like(x))

    def cap_(self, logits: Tensor, cap: float) -> None:
        """logits (n, vocabulary) become cap · tanh(logits / cap)."""
        logits.div_(cap).tanh_().mul_(cap)

    def cross_entropy(self, logits: Tensor, targets: Tensor, cap: float = 0.0) -> Tensor:
        """logits (n, vocabulary), targets (n,) → the sum of the losses, float64; logits become their gradients.

        cap: the losses are those of the capped logits; 0: there is no cap.
        """
        slope = None
        if cap:
            self.cap_(logits, cap)
            slope = 1 - (logits / cap).square_()
        rows = torch.arange(len(logits))
        logits -= logits.amax(1, keepdim=True)
        wanted = logits[rows, targets]
        sums = logits.exp_().sum(1, keepdim=True)
        logits /= sums
        logits[rows, targets] -= 1
        if slope is not None:
            logits *= slope
        return (sums.squeeze(1).log() - wanted).sum().double()

    def norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """RMSNorm of the sum of x and more, (T, n · d) float32, over each d numbers, as many as the weight has → (the
        sum, its norm, 1 / rms (T · n,))."""
        total = x if more is None else x + more
        parts = total.view(-1, len(weight))
        scale = torch.rsqrt(parts.square().mean(1) + eps)
        return total, (parts * scale[:, None] * weight).view(x.shape), scale

    def norm_back(self, total: Tensor, scale: Tensor, weight: Tensor, dy: Tensor, other: Tensor | None) -> Tensor:
        """Gradient of the sum: dy at its norm, other at itself; of the shape of the sum, float32."""
        parts = total.view(-1, len(weight))
        scaled = dy.view(parts.shape) * weight * scale[:, None]
        along = (scaled * parts).mean(1, keepdim=True) * scale[:, None] ** 2
        dx = (scaled - parts * along).view(total.shape)
        return dx if other is None else dx.add_(other)

    def gated(self, kind: str, gate: Tensor, up: Tensor, out: Tensor) -> None:
        """act(gate) · up into `out`, which may be one of them; all float32 or all bf16. kind: silu, …, see `able`."""
        out.copy_(_GATES[kind][0](gate.float()) * up)

    def gated_back(self, kind: str, gate: Tensor, up: Tensor, dact: Tensor, act: Tensor | None) -> None:
        """gate and up become their gradients; act, if given, becomes act(gate) · up. All float32 or all bf16."""
        value, slope = _GATES[kind][0](gate.float()), _GATES[kind][1](gate.float())
        if act is not None:
            act.copy_(value * up)
        gate.copy_(dact * up * slope)
        up.copy_(dact * value)

    def rotate(self, x: Tensor, angles: Angles, width: int, sign: float) -> None:
        """x (T, heads · width), float32, in place: the first numbers of each head; sign -1: back."""
        half = angles.cosines.shape[1] // 2
        cosines, sines = angles.cosines[:, None, :half], sign * angles.sines[:, None, :half]
        heads = x.view(len(x), -1, width)[..., : 2 * half]
        a, b = (heads[..., ::2], heads[..., 1::2]) if angles.neighbours else (heads[..., :half], heads[..., half:])
        turned = a * cosines - b * sines, b * cosines + a * sines
        for part, value in zip((a, b), turned, strict=True):
            part.copy_(value)

    def attention_plan(self, tree: Tree, heads: Heads, queries: Tensor | None = None) -> AttentionPlan:
        """For `attend`; queries: (A,) tokens that are queries, ascending; None: all. Every token is a key."""
        return AttentionPlan(tree, heads, queries)

    def attend(self, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q (A, H · d), k and v (T, G · d) → (A, H · d), and what `attend_back` needs beside it."""
        return _flat(tree_attention(plan, *(_by_head(t, plan.heads) for t in (q, k, v)))), torch.empty(0)

    def attend_back(
        self, plan: AttentionPlan, saved: tuple[Tensor, ...], dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """saved: (q, k, v, and both results of `attend`); dq, dk and dv, of their shapes."""
        *given, dout = (_by_head(t, plan.heads) for t in (*saved[:4], dout))
        dq, dk, dv = tree_attention_back(plan, tuple(given), dout)
        return _flat(dq), _flat(dk), _flat(dv)

    def adamw(self, weight: Tensor, gradient: Tensor, moments: Moments, rule: AdamRule) -> None:
        """One step of a tensor, float32 or stochastically rounded bf16, in place."""
        raise NotImplementedError

    def round_rows(self, job: GridJob) -> None:
        """Rounds rows onto their grid; only a backend that `rounds_rows` does."""
        raise NotImplementedError

    def square_sum(self, x: Tensor) -> float:
        """Of a float32 tensor's numbers."""
        return float(x.norm()) ** 2


def _silu_slope(x: Tensor) -> Tensor:
    share = torch.sigmoid(x)
    return share * (1 + x * (1 - share))


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _gelu_slope(x: Tensor) -> Tensor:
    """As x · sigmoid(z), z = 2 √(2/π) (x + 0.044715 x³)."""
    twice = 2 * (2 / torch.pi) ** 0.5
    share = torch.sigmoid(twice * (x + 0.044715 * x * x.square()))
    slope: Tensor = share * (1 + x * (1 - share) * twice * (1 + 3 * 0.044715 * x.square()))
    return slope


# activation of a gate, as transformers names it → (its value, its derivative)
_GATES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (functional.silu, _silu_slope),
    "gelu_pytorch_tanh": (_gelu, _gelu_slope),
}


def _by_head(x: Tensor, heads: Heads) -> Tensor:
    """(T, heads · d) → (heads, T, d)."""
    return x.view(len(x), -1, heads.width).transpose(0, 1).contiguous()


def _flat(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(x.shape[1], -1)


TORCH = Backend(Memory())  # layers that are called on their own compute by it, too
