"""The C++ kernels as a backend, called through ctypes, in the order of Backend; kernels.cpp says what each computes.

Only here and in kernels.cpp is the width of a vector known.
"""

from __future__ import annotations

import ctypes
from dataclasses import astuple, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgeft.data.tree import Tree
from edgeft.engine import compiled
from edgeft.engine.attention import AttentionPlan, Heads
from edgeft.engine.backend import TORCH, AdamRule, Backend, Moments
from edgeft.engine.limits import KERNEL_TYPES, kernels_can_run
from edgeft.engine.memory import Memory
from edgeft.formats import ggml

Tensor = torch.Tensor


class _Tree(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("pieces", "queries", "rows", "keys", "size", "items", "bounds")]


def _numbers(kind: type[Any], whole: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass of numbers."""
    return [(field.name, ctypes.c_float if field.type == "float" else whole) for field in fields(kind)]


class _Heads(ctypes.Structure):
    _fields_ = _numbers(Heads, ctypes.c_int32)


class _Rule(ctypes.Structure):
    _fields_ = _numbers(AdamRule, ctypes.c_uint32)


class KernelPlan(AttentionPlan):
    """As the attention kernel reads it: pieces of the tree, and which thread works on which of them."""

    def __init__(self, tree: Tree, heads: Heads, queries: Tensor | None, threads: int) -> None:
        super().__init__(tree, heads, queries)
        pieces, tokens_of, rows, keys = [], [], [], []
        row = key = 0
        for piece in tree.pieces:
            _, tokens = piece.queries(self.queries)
            if not len(tokens):
                continue
            own = int(tokens[-1]) + 1 - piece.start  # no query sees what follows the last one
            pieces.append((row, len(tokens), key, len(piece.above), piece.start, own))
            tokens_of.append(tokens)
            rows.append(np.arange(row, row + len(tokens)))
            keys += [piece.above, np.arange(piece.start, piece.start + own)]
            row, key = row + len(tokens), key + len(piece.above) + own
        costs = [(count * (above + own), number) for number, (_, count, _, above, _, own) in enumerate(pieces)]
        lists: list[list[int]] = [[] for _ in range(threads)]
        load = [0] * threads
        for cost, number in sorted(costs, reverse=True):  # the largest first, to the thread with the least work
            for group in range(heads.key):
                thread = load.index(min(load))
                lists[thread].append(number * heads.key + group)
                load[thread] += cost
        self.threads = threads
        self._arrays = [
            np.array(pieces, np.int32),
            *(np.concatenate(part).astype(np.int32) for part in (tokens_of, rows, keys)),
            tree.size.astype(np.int32),
            np.array([item for items in lists for item in sorted(items)], np.int32),
            np.concatenate([[0], np.cumsum([len(items) for items in lists])]).astype(np.int32),
        ]
        self._structs = _Tree(*(array.ctypes.data for array in self._arrays)), _Heads(*astuple(heads))
        self.arguments = tuple(map(ctypes.byref, self._structs))


def _at(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> ctypes.c_void_p | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    assert tensor.dtype == dtype
    return ctypes.c_void_p(tensor.data_ptr())


def _longs(*numbers: int) -> tuple[ctypes.c_long, ...]:
    return tuple(map(ctypes.c_long, numbers))


class KernelBackend(Backend):
    name, runs_blocks, fused_adamw = "kernels", True, True

    def __init__(self, file: Path, memory: Memory) -> None:
        super().__init__(memory)
        self.library: Any = ctypes.CDLL(str(file))
        self.library.squares.restype = ctypes.c_double
        self.lanes: int = self.library.vector_lanes()

    def able(self, head_width: int, gate: str) -> bool:
        return kernels_can_run(head_width, gate, self.lanes)

    def project(self, x: Tensor, a: Tensor) -> Tensor:
        """From bf16 to float32: a bf16 product of this form would leave code behind for every size of a pass."""
        if x.dtype == torch.float32 or len(a) % self.lanes:
            return super().project(x, a)
        out = self.memory.pool.take(len(x), len(a))
        self.library.project_half(_at(x, x.dtype), _at(a), _at(out), *_longs(*x.shape, len(a)), self.threads)
        return out

    def project_back(self, dy: Tensor, mid: Tensor) -> Tensor:
        if mid.dtype == dy.dtype:
            return super().project_back(dy, mid)
        out = torch.empty(dy.shape[1], mid.shape[1])
        shape = _longs(*dy.shape, mid.shape[1])
        self.library.expand_back_half(_at(dy, torch.bfloat16), _at(mid), _at(out), *shape, self.threads)
        return out

    def add_bf16(self, total: Tensor, x: Tensor) -> Tensor:
        self.library.add_half(_at(total), _at(x, torch.bfloat16), *_longs(total.numel()), self.threads)
        return total

    def add_bias(self, x: Tensor, bias: Tensor) -> None:
        if x.dtype == torch.float32:
            super().add_bias(x, bias)
        else:
            self.library.add_bias_half(_at(x, x.dtype), _at(bias), *_longs(*x.shape), self.threads)

    def sum_rows(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return super().sum_rows(x)
        out = torch.empty(x.shape[1])
        self.library.sum_rows_half(_at(x, x.dtype), _at(out), *_longs(*x.shape), self.threads)
        return out

    def gather_columns(self, x: Tensor, columns: Tensor) -> Tensor:
        """torch's own takes half of the time that it saves."""
        out = self.memory.pool.take(len(x), len(columns), x.dtype)
        function = self.library.pick_columns if x.dtype == torch.float32 else self.library.pick_columns_half
        shape = _longs(*x.shape, len(columns))
        function(_at(x, x.dtype), _at(columns, torch.int64), _at(out, x.dtype), *shape, self.threads)
        return out

    def scatter_columns(self, part: Tensor, columns: Tensor, out: Tensor) -> None:
        function = self.library.place_columns if out.dtype == torch.float32 else self.library.place_columns_half
        shape = _longs(*out.shape, len(columns))
        function(_at(part), _at(columns, torch.int64), _at(out, out.dtype), *shape, self.threads)

    def unpacks(self, type_id: int) -> bool:
        return type_id in KERNEL_TYPES or (type_id >= 0 and ggml.to_float(type_id) is not None)

    def unpack(self, packed: np.ndarray, type_id: int, out: Tensor) -> None:
        """ggml's own code is several times slower for the types that the kernels have."""
        source = ctypes.c_void_p(packed.ctypes.data)
        if type_id in KERNEL_TYPES:
            function = self.library.unpack if out.dtype == torch.float32 else self.library.unpack_half
            blocks = ctypes.c_long(out.numel() // ggml.block_values(type_id))
            function(source, type_id, _at(out, out.dtype), blocks, self.threads)
        elif out.dtype == torch.float32:
            super().unpack(packed, type_id, out)
        else:
            sizes = _longs(*out.shape, ggml.row_bytes(type_id, out.shape[1]))
            self.library.unpack_rows_half(source, ggml.to_float(type_id), _at(out, out.dtype), *sizes, self.threads)

    def norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        total = x if more is None else self.memory.pool.like(x)
        y, scale = self.memory.pool.like(x), torch.empty(len(x))
        given = _at(x), _at(more), _at(weight), ctypes.c_float(eps)
        self.library.norm(*given, _at(total), _at(y), _at(scale), *_longs(*x.shape), self.threads)
        return total, y, scale

    def norm_back(self, total: Tensor, scale: Tensor, weight: Tensor, dy: Tensor, other: Tensor | None) -> Tensor:
        dx = self.memory.pool.like(total)
        tensors = map(_at, (total, scale, weight, dy, other, dx))
        self.library.norm_back(*tensors, *_longs(*total.shape), self.threads)
        return dx

    def swiglu(self, gate: Tensor, up: Tensor, out: Tensor) -> None:
        function = self.library.swiglu if gate.dtype == torch.float32 else self.library.swiglu_half
        function(*(_at(t, gate.dtype) for t in (gate, up, out)), *_longs(gate.numel()), self.threads)

    def swiglu_back(self, gate: Tensor, up: Tensor, dact: Tensor, act: Tensor | None) -> None:
        function = self.library.swiglu_back if gate.dtype == torch.float32 else self.library.swiglu_back_half
        function(*(_at(t, gate.dtype) for t in (gate, up, dact, act)), *_longs(gate.numel()), self.threads)

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, width: int, sign: float) -> None:
        shape = _longs(len(x), x.shape[1] // width, width)
        self.library.rotate(_at(x), _at(cosines), _at(sines), *shape, ctypes.c_float(sign), self.threads)

    def attention_plan(self, tree: Tree, heads: Heads, queries: Tensor | None = None) -> KernelPlan:
        return KernelPlan(tree, heads, queries, self.threads)

    def attend(self, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Beside the result: each query's log of its sum of exponentials, (A, H)."""
        assert isinstance(plan, KernelPlan)
        out, lse = self.memory.pool.like(q), torch.empty(len(q), plan.heads.query)
        self.library.attend(*plan.arguments, *map(_at, (q, k, v, out, lse)), plan.threads)
        return out, lse

    def attend_back(
        self, plan: AttentionPlan, saved: tuple[Tensor, ...], dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(plan, KernelPlan)
        q, k, _, _, _ = saved
        dq = self.memory.pool.like(q)
        dk, dv = ([self.memory.pool.like(k).zero_() for _ in range(plan.threads)] for _ in range(2))
        tensors = map(_at, (*saved, dout, dq))
        self.library.attend_back(*plan.arguments, *tensors, _addresses(dk), _addresses(dv), plan.threads)
        return dq, _sum(dk), _sum(dv)

    def adamw(self, weight: Tensor, gradient: Tensor, moments: Moments, rule: AdamRule) -> None:
        kind = moments.first.dtype
        name = {torch.float32: "adamw", torch.bfloat16: "adamw_bf16", torch.uint8: "adamw_bytes"}[kind]
        held = [_at(moments.first, kind), _at(moments.second, kind)]
        held += [] if moments.scales is None else [_at(moments.scales)]
        last = *_longs(weight.numel()), ctypes.byref(_Rule(*astuple(rule))), self.threads
        half = weight.dtype == torch.bfloat16
        self.library[name](_at(weight, weight.dtype), half, _at(gradient), *held, *last)

    def square_sum(self, x: Tensor) -> float:
        return float(self.library.squares(_at(x), *_longs(x.numel()), self.threads))


def _addresses(tensors: list[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


def _sum(parts: list[Tensor]) -> Tensor:
    for part in parts[1:]:
        parts[0].add_(part)
    return parts[0]


@lru_cache(maxsize=1)
def load() -> KernelBackend:
    """Compiled now if they are not built. In plain torch's memory: layers called on their own use the same buffers."""
    return KernelBackend(compiled.build(), TORCH.memory)
