"""The seam under which everything is computed: matrix products, the operations between them, and memory.

`Backend` is the interface, and computes each operation in plain torch; a backend overrides what it does faster. Code
above calls these methods, and plain torch operations on the tensors they return. T: tokens, d: width of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from edgeft.data.tree import Tree
from edgeft.engine.attention import AttentionPlan, Heads, tree_attention, tree_attention_back
from edgeft.engine.limits import padded
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


class Backend:
    """Tensors are contiguous; "operand": float32, or bf16 with rows of zeros below (limits.padded)."""

    name = "torch"  # in cache keys: backends round differently
    runs_blocks = False  # transformers' own modules run the blocks
    fused_adamw = False  # has `adamw`; else torch.optim's is used

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def able(self, head_width: int, gate: str) -> bool:
        """Whether it runs models with such heads and such a gate (`silu`, …)."""
        return True

    def operand(self, x: Tensor, bf16: bool) -> Tensor:
        """x (T, d), float32, as a product reads it: x itself, or a bf16 copy with rows of zeros, which add nothing."""
        if not bf16:
            return x
        out = self.memory.pool.take(padded(len(x)), x.shape[1], torch.bfloat16)
        out[: len(x)] = x
        out[len(x) :] = 0
        return out

    def to_float32(self, x: Tensor, rows: int) -> Tensor:
        """The first rows of an operand; x itself if it is float32."""
        return x if x.dtype == torch.float32 else self.memory.pool.take(rows, x.shape[1]).copy_(x[:rows])

    def mm(self, x: Tensor, y: Tensor) -> Tensor:
        """x y, in x's type, in a pooled buffer; sums are float32."""
        return torch.mm(x, y, out=self.memory.pool.take(len(x), y.shape[1], x.dtype))

    def add_mm(self, total: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """total (T, d), float32, plus x y, in place; operands may have more rows."""
        if x.dtype == torch.float32:
            return total.addmm_(x, y)
        return self.add_bf16(total, self.mm(x, y)[: len(total)])

    def add_gradient(self, gradient: Tensor, dy: Tensor, x: Tensor, first: bool) -> None:
        """gradient (O, I), float32, plus dyᵀ x of two operands, in place; first: instead of what is in it."""
        if dy.dtype == torch.float32:
            if first:
                torch.mm(dy.T, x, out=gradient)
            else:
                gradient.addmm_(dy.T, x)
            return
        product = torch.mm(dy.T, x, out=self.memory.products.take(dy.shape[1], x.shape[1], torch.bfloat16))
        if first:
            gradient.copy_(product)
        else:
            self.add_bf16(gradient, product)

    def project(self, x: Tensor, a: Tensor) -> Tensor:
        """x aᵀ (T, r): x an operand, a (r, d) float32; in x's type or float32, in a pooled buffer."""
        return self.mm(x, a.to(x.dtype).T)

    def project_back(self, dy: Tensor, mid: Tensor) -> Tensor:
        """dyᵀ mid (O, r): dy (T, O) an operand, mid what `project` returned; in dy's type or float32."""
        return dy.T @ mid.to(dy.dtype)

    def add_bf16(self, total: Tensor, x: Tensor) -> Tensor:
        """total, float32, plus x, bf16, of the same shape, in place."""
        return total.add_(x)

    def add_bias(self, x: Tensor, bias: Tensor) -> None:
        """x (T, d), an operand, plus bias (d,), float32, in place."""
        x += bias

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

    def norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """RMSNorm of the sum of x and more, (T, d) float32 → (the sum, its norm, 1 / rms (T,))."""
        total = x if more is None else x + more
        scale = torch.rsqrt(total.square().mean(1) + eps)
        return total, total * scale[:, None] * weight, scale

    def norm_back(self, total: Tensor, scale: Tensor, weight: Tensor, dy: Tensor, other: Tensor | None) -> Tensor:
        """Gradient of the sum: dy at its norm, other at itself; (T, d) float32."""
        scaled = dy * weight * scale[:, None]
        along = (scaled * total).mean(1, keepdim=True) * scale[:, None] ** 2
        dx = scaled - total * along
        return dx if other is None else dx.add_(other)

    def swiglu(self, gate: Tensor, up: Tensor, out: Tensor) -> None:
        """silu(gate) · up into `out`, which may be one of them; all float32 or all bf16."""
        out.copy_(functional.silu(gate.float()) * up)

    def swiglu_back(self, gate: Tensor, up: Tensor, dact: Tensor, act: Tensor | None) -> None:
        """gate and up become their gradients; act, if given, becomes silu(gate) · up. All float32 or all bf16."""
        share = torch.sigmoid(gate.float())
        silu, slope = gate * share, share * (1 + gate * (1 - share))
        if act is not None:
            act.copy_(silu * up)
        gate.copy_(dact * up * slope)
        up.copy_(dact * silu)

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, width: int, sign: float) -> None:
        """x (T, heads · width), float32, in place: the two halves of each head, by angles (T, width); sign -1: back."""
        halves = x.view(len(x), -1, 2, width // 2)
        turned = torch.stack([-halves[:, :, 1], halves[:, :, 0]], 2).view(len(x), -1, width)
        x.copy_((x.view(turned.shape) * cosines[:, None] + sign * turned * sines[:, None]).view(x.shape))

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

    def square_sum(self, x: Tensor) -> float:
        """Of a float32 tensor's numbers."""
        return float(x.norm()) ** 2


def _by_head(x: Tensor, heads: Heads) -> Tensor:
    """(T, heads · d) → (heads, T, d)."""
    return x.view(len(x), -1, heads.width).transpose(0, 1).contiguous()


def _flat(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(x.shape[1], -1)


TORCH = Backend(Memory())  # layers that are called on their own compute by it, too
