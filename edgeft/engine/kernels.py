"""The C++ kernels as a backend, called through ctypes, in the order of Backend; kernels.cpp says what each computes.

Only here and in kernels.cpp is the width of a vector known.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import astuple, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgeft.data.tree import Tree
from edgeft.engine import compiled
from edgeft.engine.attention import AttentionPlan, Heads
from edgeft.engine.backend import PLAIN, TORCH, AdamRule, Angles, Backend, GridJob, Matrix, Moments, Product
from edgeft.engine.limits import INT8_GROUP, KERNEL_GATES, KERNEL_TYPES, LISTS, kernels_can_run
from edgeft.engine.memory import Memory
from edgeft.engine.packed import Packed, PackedTransposed
from edgeft.formats import ggml

Tensor = torch.Tensor


class _Tree(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("pieces", "queries", "rows", "keys", "size", "depth", "items", "bounds")
        ),
        ("lists", ctypes.c_int32),
        ("window", ctypes.c_int32),
    ]


def _numbers(kind: type[Any], whole: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass of numbers."""
    return [(field.name, ctypes.c_float if field.type == "float" else whole) for field in fields(kind)]


class _Heads(ctypes.Structure):
    _fields_ = _numbers(Heads, ctypes.c_int32)


class _Rule(ctypes.Structure):
    _fields_ = _numbers(AdamRule, ctypes.c_uint32)


class _Grid(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("target", "scale", "low", "d", "m", "codes", "levels", "h", "lower")),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "block")),
        *((name, ctypes.c_int32) for name in ("count", "even", "rounds")),
        ("ridge", ctypes.c_float),
    ]


class _Left(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("row", ctypes.c_int64), ("col", ctypes.c_int64), ("half", ctypes.c_int32)
    ]  # fmt: skip


class _Right(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("order", ctypes.c_void_p), ("to_float", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64), ("cols", ctypes.c_int64),
        ("type", ctypes.c_int32), ("block", ctypes.c_int32), ("turned", ctypes.c_int32),
    ]  # fmt: skip


class _Out(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("row", ctypes.c_int64),
        ("factor", ctypes.c_float), ("half", ctypes.c_int32), ("add", ctypes.c_int32),
    ]  # fmt: skip


FP32, BF16, INT8 = range(3)  # the kinds of products.h
F32 = 0  # ggml's number
DENSE = {torch.float32: -1, torch.bfloat16: -2}  # its types of weights that are not packed
ONLY_TORCH = platform.system() == "Darwin"  # its float32 products run on Apple's matrix unit


def _right(y: Matrix) -> _Right:
    if isinstance(y, Tensor):
        turned = y.stride(1) != 1
        w = y.T if turned else y
        assert w.stride(1) == 1 or w.shape[1] == 1
        kind = DENSE[w.dtype]
        return _Right(w.data_ptr(), None, None, w.stride(0) * w.element_size(), w.shape[1], kind, 1, turned)
    turned = isinstance(y, PackedTransposed)
    packed: Packed = y.packed if turned else y
    order = None if packed.order is None else packed.order.ctypes.data
    kind = DENSE[torch.float32] if packed.type == F32 else packed.type
    to_float = None if kind < 0 or kind in KERNEL_TYPES else ctypes.cast(ggml.to_float(packed.type), ctypes.c_void_p)  # type: ignore[arg-type]
    size = packed.data.strides[0], packed.cols
    return _Right(packed.data.ctypes.data, order, to_float, *size, kind, ggml.block_values(packed.type), turned)


class KernelPlan(AttentionPlan):
    """As the attention kernel reads it: pieces of the tree, in lists of about the same work. Each list adds to
    gradients of its own, so that their sums depend on no thread."""

    def __init__(self, tree: Tree, heads: Heads, queries: Tensor | None, count: int) -> None:
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
        lists: list[list[int]] = [[] for _ in range(count)]
        load = [0] * count
        for cost, number in sorted(costs, reverse=True):  # the largest first, to the list with the least work
            for group in range(heads.key):
                least = load.index(min(load))
                lists[least].append(number * heads.key + group)
                load[least] += cost
        self.lists = count
        self._arrays = [
            np.array(pieces, np.int32),
            *(np.concatenate(part).astype(np.int32) for part in (tokens_of, rows, keys)),
            tree.size.astype(np.int32),
            tree.depth.astype(np.int32),
            np.array([item for items in lists for item in sorted(items)], np.int32),
            np.concatenate([[0], np.cumsum([len(items) for items in lists])]).astype(np.int32),
        ]
        addresses = (array.ctypes.data for array in self._arrays)
        self._structs = _Tree(*addresses, count, tree.window), _Heads(*astuple(heads))
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
    name, runs_blocks, fused_adamw, rounds_rows = "kernels", True, True, True

    def __init__(self, file: Path, memory: Memory) -> None:
        super().__init__(memory)
        self.library: Any = ctypes.CDLL(str(file))
        self.library.squares.restype = ctypes.c_double
        self.library.product_bytes.restype = ctypes.c_int64
        self.lanes: int = self.library.vector_lanes()
        self.multiplies_int8 = bool(self.library.multiplies_bytes())
        self._threads = torch.get_num_threads()

    @property
    def threads(self) -> int:
        return self._threads

    def use_threads(self, count: int) -> None:
        """torch's own operations, few and small, run on one: its threads spin while they wait, and each pool would keep
        the other from the cores."""
        self._threads = count
        torch.set_num_threads(1)

    def able(self, head_width: int, gate: str) -> bool:
        return kernels_can_run(head_width, gate, self.lanes)

    def operand(self, x: Tensor, bf16: bool) -> Tensor:
        if not bf16:
            return x
        out = self.memory.pool.take(len(x), x.shape[1], torch.bfloat16)
        self.library.to_bf16(_at(x), _at(out, out.dtype), *_longs(x.numel()), self.threads)
        return out

    def mm(self, x: Tensor, y: Matrix, out: Tensor | None = None, options: Product = PLAIN) -> Tensor:
        """In bf16 if x is; what is not is rounded on the way."""
        packed = None if isinstance(y, Tensor) else getattr(y, "packed", y)
        if packed is not None and packed.type < 0:  # a packing that ggml does not know
            y, packed = y.dense(self), None
        rows, depth, cols = *x.shape, y.shape[1]
        by_bytes = options.int8 and depth % INT8_GROUP == 0 and x.stride(1) == 1
        kind = INT8 if by_bytes else FP32 if x.dtype == torch.float32 else BF16
        if out is None:
            out = self.memory.pool.take(rows, cols, torch.float32 if options.float32 else x.dtype)
        if kind == FP32 and ONLY_TORCH:
            return super().mm(x, y, out, options)
        assert out.stride(1) == 1 or cols == 1
        left = _Left(x.data_ptr(), *x.stride(), x.dtype == torch.bfloat16)
        right, bias = _right(y), None if options.bias is None else options.bias.data_ptr()
        half = out.dtype == torch.bfloat16
        target = _Out(out.data_ptr(), bias, out.stride(0), options.scale, half, options.add)
        shape = _longs(rows, cols, depth)
        size = self.library.product_bytes(ctypes.byref(left), *shape, kind)
        scratch = self.memory.products.take(1, size, torch.uint8)
        if packed is not None:
            packed.prefetch(self.memory)
        every = map(ctypes.byref, (left, right, target))
        self.library.multiply_matrices(*every, *shape, kind, _at(scratch, torch.uint8), self.threads)
        if packed is not None:
            packed.release(self.memory)
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.memory.pool.like(x)
        self.library.add(*map(_at, (x, y, out)), *_longs(x.numel()), self.threads)
        return out

    def cap_(self, logits: Tensor, cap: float) -> None:
        self.library.cap_rows(_at(logits), *_longs(*logits.shape), ctypes.c_float(cap), self.threads)

    def cross_entropy(self, logits: Tensor, targets: Tensor, cap: float = 0.0) -> Tensor:
        losses = torch.empty(len(logits), dtype=torch.float64)
        given = _at(logits), _at(targets, torch.int64), _at(losses, torch.float64)
        self.library.cross_entropy(*given, *_longs(*logits.shape), ctypes.c_float(cap), self.threads)
        return losses.sum()

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
            values = ggml.block_values(type_id)
            blocks = ctypes.c_long(out.numel() // values)
            function(
                source, type_id, _at(out, out.dtype), blocks, ggml.row_bytes(type_id, values), values, self.threads
            )
        elif out.dtype == torch.float32:
            super().unpack(packed, type_id, out)
        else:
            sizes = _longs(*out.shape, ggml.row_bytes(type_id, out.shape[1]))
            self.library.unpack_rows_half(source, ggml.to_float(type_id), _at(out, out.dtype), *sizes, self.threads)

    def norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        total = x if more is None else self.memory.pool.like(x)
        rows, width = x.numel() // len(weight), len(weight)
        y, scale = self.memory.pool.like(x), torch.empty(rows)
        given = _at(x), _at(more), _at(weight), ctypes.c_float(eps)
        self.library.norm(*given, _at(total), _at(y), _at(scale), *_longs(rows, width), self.threads)
        return total, y, scale

    def norm_back(self, total: Tensor, scale: Tensor, weight: Tensor, dy: Tensor, other: Tensor | None) -> Tensor:
        dx = self.memory.pool.like(total)
        tensors = map(_at, (total, scale, weight, dy, other, dx))
        self.library.norm_back(*tensors, *_longs(len(scale), len(weight)), self.threads)
        return dx

    def gated(self, kind: str, gate: Tensor, up: Tensor, out: Tensor) -> None:
        self._gate(kind, "", gate, up, out)

    def gated_back(self, kind: str, gate: Tensor, up: Tensor, dact: Tensor, act: Tensor | None) -> None:
        self._gate(kind, "_back", gate, up, dact, act)

    def _gate(self, kind: str, way: str, gate: Tensor, *others: Tensor | None) -> None:
        function = self.library[KERNEL_GATES[kind] + way + ("" if gate.dtype == torch.float32 else "_half")]
        function(*(_at(t, gate.dtype) for t in (gate, *others)), *_longs(gate.numel()), self.threads)

    def rotate(self, x: Tensor, angles: Angles, width: int, sign: float) -> None:
        shape = _longs(len(x), x.shape[1] // width, width, angles.cosines.shape[1])
        way = angles.neighbours, ctypes.c_float(sign)
        self.library.rotate(_at(x), _at(angles.cosines), _at(angles.sines), *shape, *way, self.threads)

    def attention_plan(self, tree: Tree, heads: Heads, queries: Tensor | None = None) -> KernelPlan:
        return KernelPlan(tree, heads, queries, LISTS)

    def attend(self, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Beside the result: each query's log of its sum of exponentials, (A, H)."""
        assert isinstance(plan, KernelPlan)
        out, lse = self.memory.pool.like(q), torch.empty(len(q), plan.heads.query)
        self.library.attend(*plan.arguments, *map(_at, (q, k, v, out, lse)), self.threads)
        return out, lse

    def attend_back(
        self, plan: AttentionPlan, saved: tuple[Tensor, ...], dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(plan, KernelPlan)
        q, k, _, _, _ = saved
        dq = self.memory.pool.like(q)
        dk, dv = ([self.memory.pool.like(k) for _ in range(plan.lists)] for _ in range(2))
        tensors = map(_at, (*saved, dout, dq))
        self.library.attend_back(
            *plan.arguments, *tensors, _addresses(dk), _addresses(dv), *_longs(len(k)), self.threads
        )
        return dq, dk[0], dv[0]

    def adamw(self, weight: Tensor, gradient: Tensor, moments: Moments, rule: AdamRule) -> None:
        kind = moments.first.dtype
        name = {torch.float32: "adamw", torch.bfloat16: "adamw_bf16", torch.uint8: "adamw_bytes"}[kind]
        held = [_at(moments.first, kind), _at(moments.second, kind)]
        held += [] if moments.scales is None else [_at(moments.scales)]
        last = *_longs(weight.numel()), ctypes.byref(_Rule(*astuple(rule))), self.threads
        half = weight.dtype == torch.bfloat16
        self.library[name](_at(weight, weight.dtype), half, _at(gradient), *held, *last)

    def round_rows(self, job: GridJob) -> None:
        given = [_at(one) for one in (job.target, job.scale, job.low, job.d, job.m)]
        sides = (_at(job.codes, torch.uint8), *map(_at, (job.levels, job.h, job.lower)))
        even = int(bool((job.levels.diff() == 1).all()))
        sizes = (*job.target.shape, job.target.shape[1] // job.d.shape[1], len(job.levels), even, job.rounds, job.ridge)
        self.library.round_rows(ctypes.byref(_Grid(*given, *sides, *sizes)), self.threads)

    def square_sum(self, x: Tensor) -> float:
        return float(self.library.squares(_at(x), *_longs(x.numel()), self.threads))


def _addresses(tensors: list[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


@lru_cache(maxsize=1)
def load() -> KernelBackend:
    """Compiled now if they are not built. In plain torch's memory: layers called on their own use the same buffers."""
    return KernelBackend(compiled.build(), TORCH.memory)
