"""What a block's q, k and v gradients say of its input: every token's input lies in the span of their rows.

G = dYᵀ X is a sum over tokens: its rows are combinations of the inputs x, its rank is at most the number of different
ones (Petrov et al. 2024, DAGER). A gradient of all input channels shows x itself, one of some channels these, and one
of a low-rank update x Aᵀ, r numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from edgeft.audit.sent import Tensors
from edgeft.engine.stack import Stack

Tensor = torch.Tensor
READERS = ("v", "k", "q")  # they read the same input
FLOOR = 2e-7  # singular values below this share of the largest are rounding, in float32
FREE = 8  # directions at least that an exact span leaves out
DIRECTIONS = 128  # the largest, that stand for a gradient in which none is certain
WHOLE = 0.5  # with fewer numbers than this share, the gradient was pruned, and spans something else
ROOM = 0.97  # a span of more than this share of all directions excludes too little


@dataclass(frozen=True)
class Span:
    """basis (n, k), orthonormal. exact: it holds every token's input, up to rounding, and excludes others; else it is
    the part of a pruned or noisy gradient that stands out of the noise. strong (n, k'): its largest directions by their
    sizes."""

    basis: Tensor
    exact: bool
    strong: Tensor
    columns: Tensor | None = None  # the input channels that it is about; None: all
    down: Tensor | None = None  # A (r, I), of a low-rank update

    def distances(self, x: Tensor) -> Tensor:
        """x (T, I) → (T,) the share of each that is outside, from 0 to 1."""
        x = self.seen(x.double())
        outside: Tensor = (x - x @ self.basis @ self.basis.T).norm(dim=1)  # 1 - cos² would cancel
        return outside.float()

    def seen(self, x: Tensor) -> Tensor:
        """What the gradient is about, of inputs x (T, I): (T, n), each of length 1."""
        if self.columns is not None:
            x = x[:, self.columns]
        if self.down is not None:
            x = x @ self.down.T.to(x.dtype)
        return torch.nn.functional.normalize(x)

    @property
    def rank(self) -> int:
        return self.basis.shape[1]


def spans_of(tensors: Tensors, stack: Stack, block: int) -> list[Span]:
    """Of one block; empty if nothing of what is sent shows its input."""
    whole: list[Tensor] = []
    parts: list[Span] = []
    for tensor in READERS:
        path = f"layers.{block}.{stack.arch.linears[tensor].path}"
        module: Any = stack.linear(block, tensor)
        if f"{path}.weight" in tensors:
            whole.append(tensors[f"{path}.weight"])
        if f"{path}.part" in tensors:
            parts += _span([tensors[f"{path}.part"]], columns=module.columns)
        if f"{path}.up" in tensors:
            parts += _span([tensors[f"{path}.up"]], down=module.down)
    # each of these is about other numbers; v's has every token, and q's lacks a row's first, which sees only itself
    return _span(whole) if whole else ([span for span in parts if span.exact] or parts)[:1]


def _span(gradients: list[Tensor], columns: Tensor | None = None, down: Tensor | None = None) -> list[Span]:
    """Of gradients (O, n) over the same input; empty if they say nothing."""
    matrix = torch.cat(gradients).double()
    if not matrix.any():
        return []
    whole = float((matrix != 0).double().mean()) > WHOLE
    if whole:  # as much of each: v's is 20 times q's
        matrix = torch.cat([part / part.norm() for part in matrix.split([len(g) for g in gradients]) if part.any()])
    _, values, rows = torch.linalg.svd(matrix, full_matrices=False)
    rank = int((values > FLOOR * values[0]).sum())
    exact = whole and rank < ROOM * min(matrix.shape) and rank <= matrix.shape[1] - FREE
    rank = rank if exact else _above_noise(values, matrix.shape)
    if not 0 < rank < ROOM * matrix.shape[1]:
        return []
    strong = (rows.T * values)[:, :DIRECTIONS].float()
    return [Span(rows[:rank].T.contiguous(), exact, strong, columns, down)]


def _above_noise(values: Tensor, shape: torch.Size) -> int:
    """Those that noise alone would not have: above this multiple of the median (Gavish and Donoho 2014)."""
    b = min(shape) / max(shape)
    return int((values > (0.56 * b**3 - 0.95 * b**2 + 1.82 * b + 1.43) * values.median()).sum())


def read_input(stack: Stack, block: int, hidden: Tensor) -> Tensor:
    """What q, k and v of a block read, from the residual stream (T, d) before it."""
    norm = stack.arch.norm_at("attention")
    if norm is None:
        return hidden
    normed: Tensor = stack.layers[block].get_submodule(norm.path)(hidden)
    return normed.detach()
