"""Frozen weights that stay packed: a linear layer, an embedding and a head over ggml's formats.

A dense copy exists only for the product that needs it, in one buffer that the next product reuses.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from edgeft.engine.backend import TORCH, Backend, Product
from edgeft.engine.limits import HEAD_ROWS, LOGITS_BYTES
from edgeft.engine.memory import Memory
from edgeft.formats.gguf import prefetch_pages, release_pages


def tensor_of(data: np.ndarray) -> torch.Tensor:
    """A read-only mapped array as a tensor, without a copy; nothing writes into it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(data)


class Packed:
    """One matrix (rows, cols) in a ggml type, mapped from its file or held in memory.

    order: its rows as indices of the stored ones. Packing runs along rows, so they are put in order as packed bytes,
    when they are used: an ordered copy of them all would take as much memory as the file has of them.
    """

    def __init__(self, data: np.ndarray, type_id: int, rows: int, cols: int, order: np.ndarray | None = None) -> None:
        self.data = data if data.ndim == 2 else data.reshape(rows, -1)  # uint8 (rows, bytes of a row), as stored
        self.type, self.rows, self.cols, self.order = type_id, rows, cols, order

    def stored(self, memory: Memory) -> np.ndarray:
        """Packed rows in order; valid until the next call for any matrix."""
        self.prefetch(memory)
        if self.order is None:
            return self.data
        out = memory.packed_rows.take(len(self.order), self.data.shape[1], torch.uint8).numpy()
        return np.take(self.data, self.order, axis=0, out=out, mode="clip")  # the mode that needs no copy in between

    def prefetch(self, memory: Memory) -> None:
        """Reads the pages that a product is about to use, if they were released."""
        if memory.release_pages:
            prefetch_pages(self.data)

    def release(self, memory: Memory) -> None:
        if memory.release_pages:
            release_pages(self.data)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def T(self) -> PackedTransposed:
        return PackedTransposed(self)

    def part(self, start: int, stop: int) -> Packed:
        """Rows [start, stop)."""
        if self.order is None:
            return Packed(self.data[start:stop], self.type, stop - start, self.cols)
        order = self.order[start:stop]
        return Packed(self.data, self.type, len(order), self.cols, order)

    def dense(self, backend: Backend = TORCH) -> torch.Tensor:
        """In float32, in a buffer that the next call for any matrix overwrites."""
        return self._unpack(torch.float32, backend)

    def operand(self, backend: Backend, bf16: bool = False) -> torch.Tensor:
        """As `dense`, as a product reads it."""
        return self._unpack(torch.bfloat16 if bf16 else torch.float32, backend)

    def gather_rows(self, numbers: np.ndarray, backend: Backend = TORCH) -> torch.Tensor:
        """These rows, (n, cols), in memory of their own."""
        out = torch.empty(len(numbers), self.cols)
        stored = self.data[numbers if self.order is None else self.order[numbers]]
        backend.unpack(np.ascontiguousarray(stored), self.type, out)
        self.release(backend.memory)
        return out

    def copy(self) -> torch.Tensor:
        """A dense matrix of its own, for a tensor that will be trained; nothing reads the packed one any more."""
        out = torch.empty(self.rows, self.cols)
        TORCH.unpack(self.stored(TORCH.memory), self.type, out)
        release_pages(self.data)
        return out

    def permuted(self, order: np.ndarray) -> Packed:
        """The same matrix with its rows in another order."""
        return Packed(self.data, self.type, self.rows, self.cols, order if self.order is None else self.order[order])

    def _unpack(self, dtype: torch.dtype, backend: Backend) -> torch.Tensor:
        stored = self.stored(backend.memory)
        out = backend.memory.weights.take(len(stored), self.cols, dtype)
        backend.unpack(stored, self.type, out)
        self.release(backend.memory)
        return out


class PackedTransposed(NamedTuple):
    """The right-hand side of x Wᵀ."""

    packed: Packed

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.cols, self.packed.rows

    def dense(self, backend: Backend) -> torch.Tensor:
        return self.packed.dense(backend).T


class _FrozenLinear(torch.autograd.Function):
    """y = x Wᵀ + b with W frozen and packed: no activation is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: Packed, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.packed = packed
        return nn.functional.linear(x, packed.dense(), bias)  # x (…, I) → (…, O)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        dx = dy @ ctx.packed.dense() if ctx.needs_input_grad[0] else None
        db = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, db


class PackedLinear(nn.Linear):
    """A frozen linear layer. It is an nn.Linear so that PEFT can put its adapters on it."""

    def __init__(self, packed: Packed, bias: torch.Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = packed.cols, packed.rows
        self.packed = packed
        self.weight = nn.Parameter(tensor_of(packed.data), requires_grad=False)  # uint8, for its device and size
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _FrozenLinear.apply(input, self.packed, self.bias)
        return result

    def dense_weight(self) -> torch.Tensor:
        return self.packed.copy()


class PackedEmbedding:
    """Rows of a packed matrix by token id; only these are unpacked."""

    def __init__(self, packed: Packed, scale: float = 1.0) -> None:
        self.packed, self.scale = packed, scale

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        unique, inverse = torch.unique(ids, return_inverse=True)
        rows = self.packed.gather_rows(unique.numpy())
        return (rows if self.scale == 1 else rows.mul_(self.scale))[inverse]


class PackedHead:
    """Logits, loss and its gradient, at given positions; the dense head never exists as a whole.

    In float32 always: a logit of 20 in bf16 would be off by up to 0.06.
    """

    def __init__(self, packed: Packed, cap: float = 0.0) -> None:
        """cap: logits become cap · tanh(logits / cap); 0: they stay."""
        self.packed, self.cap = packed, cap
        self.backend: Backend = TORCH

    def chunk(self) -> int:
        """Positions whose logits are held at a time."""
        return max(1, LOGITS_BYTES // (4 * self.packed.rows))

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden (n, d) → (n, vocabulary)."""
        out = self.products(hidden, torch.empty(len(hidden), self.packed.rows) if out is None else out)
        if self.cap:
            self.backend.cap_(out, self.cap)
        return out

    def products(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Logits without a cap."""
        for start, part in self._parts():
            self.backend.mm(hidden, part.T, out[:, start : start + part.rows])
        return out

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of the cross-entropy over n positions: hidden (n, d), targets (n,)."""
        result: torch.Tensor = _HeadLoss.apply(hidden, targets, self)
        return result

    def back(self, dlogits: torch.Tensor) -> torch.Tensor:
        """(n, vocabulary) → (n, d)."""
        out = torch.empty(len(dlogits), self.packed.cols)
        for start, part in self._parts():
            self.backend.mm(dlogits[:, start : start + part.rows], part, out, Product(add=start > 0))
        return out

    def _parts(self) -> Iterator[tuple[int, Packed]]:
        """(first row, rows of the vocabulary that are unpacked at a time)."""
        for start in range(0, self.packed.rows, HEAD_ROWS):
            yield start, self.packed.part(start, min(start + HEAD_ROWS, self.packed.rows))


class _HeadLoss(torch.autograd.Function):
    """Cross-entropy through a frozen head. The forward pass computes the input gradient, while the logits exist."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, targets: torch.Tensor, head: PackedHead) -> torch.Tensor:
        total, scratch = torch.zeros((), dtype=torch.float64), head.backend.memory.logits
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), head.chunk()):
            part = slice(start, start + head.chunk())
            logits = head.products(hidden[part], scratch.take(len(hidden[part]), head.packed.rows))
            total += head.backend.cross_entropy(logits, targets[part], head.cap)
            if dhidden is not None:
                dhidden[part] = head.back(logits)
        ctx.dhidden = dhidden
        return total.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.dhidden * grads[0], None, None
