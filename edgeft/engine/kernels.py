"""The C++ kernels over tensors, called through ctypes.

The torch path computes the same without them; nothing here decides which of the two is used.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edgeft.engine import compiled
from edgeft.engine.limits import UNPACKED
from edgeft.engine.pool import pool

if TYPE_CHECKING:
    from edgeft.data.tree import Tree


class _Tree(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("pieces", "queries", "rows", "keys", "size", "items", "bounds")]


class _Heads(ctypes.Structure):
    _fields_ = [
        ("heads", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


class Rule(ctypes.Structure):
    """How AdamW steps; first and second: 1 - beta^step; factor: of the gradient."""

    _fields_ = [
        *((name, ctypes.c_float) for name in ("lr", "beta1", "beta2", "eps", "decay", "first", "second", "factor")),
        ("seed", ctypes.c_uint32),
    ]


class Plan:
    """A tree as the attention kernel reads it: its pieces, and which thread works on which of them.

    asked: the token numbers that ask, ascending; the others are only seen. None: all.
    """

    def __init__(self, tree: Tree, groups: int, threads: int, asked: np.ndarray | None = None) -> None:
        pieces, queries, rows, keys = [], [], [], []
        row = key = 0
        for piece in tree.pieces:
            if asked is None:
                tokens = np.arange(piece.start, piece.stop)
            else:
                tokens = asked[np.searchsorted(asked, piece.start) : np.searchsorted(asked, piece.stop)]
            if not len(tokens):
                continue
            own = int(tokens[-1]) + 1 - piece.start  # what follows the last that asks is not seen
            pieces.append((row, len(tokens), key, len(piece.above), piece.start, own))
            queries.append(tokens)
            rows.append(np.arange(row, row + len(tokens)))
            keys += [piece.above, np.arange(piece.start, piece.start + own)]
            row, key = row + len(tokens), key + len(piece.above) + own
        costs = [(count * (above + own), number) for number, (_, count, _, above, _, own) in enumerate(pieces)]
        lists: list[list[int]] = [[] for _ in range(threads)]
        load = [0] * threads
        for cost, number in sorted(costs, reverse=True):  # the largest first, to whoever has least
            for group in range(groups):
                thread = load.index(min(load))
                lists[thread].append(number * groups + group)
                load[thread] += cost
        self.asked, self.tokens, self.threads = row, len(tree.size), threads
        self._kept = [
            np.array(pieces, np.int32),
            *(np.concatenate(part).astype(np.int32) for part in (queries, rows, keys)),
            tree.size.astype(np.int32),
            np.array([item for items in lists for item in sorted(items)], np.int32),
            np.concatenate([[0], np.cumsum([len(items) for items in lists])]).astype(np.int32),
        ]
        self.struct = _Tree(*(array.ctypes.data for array in self._kept))


def _at(tensor: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> ctypes.c_void_p | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    assert tensor.dtype == dtype
    return ctypes.c_void_p(tensor.data_ptr())


class Kernels:
    """The library's functions over tensors; see kernels.cpp for what each computes."""

    def __init__(self, file: Path) -> None:
        self.library: Any = ctypes.CDLL(str(file))
        self.library.squares.restype = ctypes.c_double
        self.lanes: int = self.library.vector_lanes()

    def able(self, head_width: int, gate: str) -> bool:
        """Can they run such a model? Heads are whole vectors, the gate is SiLU."""
        return head_width % self.lanes == 0 and gate == "silu"

    def attend(self, plan: Plan, heads: _Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out, lse = pool.like(q), torch.empty(len(q), heads.heads)
        self.library.attend(
            ctypes.byref(plan.struct), ctypes.byref(heads), _at(q), _at(k), _at(v), _at(out), _at(lse), plan.threads
        )
        return out, lse

    def attend_back(
        self,
        plan: Plan,
        heads: _Heads,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq = pool.like(q)
        dk, dv = ([pool.like(k).zero_() for _ in range(plan.threads)] for _ in range(2))
        self.library.attend_back(
            ctypes.byref(plan.struct),
            ctypes.byref(heads),
            *map(_at, (q, k, v, out, lse, dout, dq)),
            _each(dk),
            _each(dv),
            plan.threads,
        )
        return dq, _total(dk), _total(dv)

    def rotate(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, width: int, sign: float) -> None:
        """x (rows, heads * width), in place."""
        shape = (ctypes.c_long(len(x)), ctypes.c_long(x.shape[1] // width), ctypes.c_long(width))
        self.library.rotate(_at(x), _at(cosines), _at(sines), *shape, ctypes.c_float(sign), torch.get_num_threads())

    def norm(
        self, x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (rows, width) → x + more, its norm, 1 / rms (rows,)."""
        total = x if more is None else pool.like(x)
        y, scale = pool.like(x), torch.empty(len(x))
        shape = (ctypes.c_long(len(x)), ctypes.c_long(x.shape[1]))
        self.library.norm(
            _at(x), _at(more), _at(weight), ctypes.c_float(eps), _at(total), _at(y), _at(scale),
            *shape, torch.get_num_threads(),
        )  # fmt: skip
        return total, y, scale

    def norm_back(
        self, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, other: torch.Tensor | None
    ) -> torch.Tensor:
        dx = pool.like(x)
        shape = (ctypes.c_long(len(x)), ctypes.c_long(x.shape[1]))
        self.library.norm_back(*map(_at, (x, scale, weight, dy, other, dx)), *shape, torch.get_num_threads())
        return dx

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
        """float32, or all of them bf16."""
        function = self.library.swiglu if gate.dtype == torch.float32 else self.library.swiglu_half
        tensors = (_at(t, gate.dtype) for t in (gate, up, out))
        function(*tensors, ctypes.c_long(gate.numel()), torch.get_num_threads())

    def swiglu_back(self, gate: torch.Tensor, up: torch.Tensor, dact: torch.Tensor, act: torch.Tensor | None) -> None:
        """gate and up become their gradients; act what swiglu gave. float32, or all of them bf16."""
        function = self.library.swiglu_back if gate.dtype == torch.float32 else self.library.swiglu_back_half
        tensors = (_at(t, gate.dtype) for t in (gate, up, dact, act))
        function(*tensors, ctypes.c_long(gate.numel()), torch.get_num_threads())

    def add(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """total (rows, width), float32, plus as many rows of x, bf16, in place."""
        count = ctypes.c_long(total.numel())
        self.library.add_half(_at(total), _at(x, torch.bfloat16), count, torch.get_num_threads())

    def add_bias(self, x: torch.Tensor, bias: torch.Tensor) -> None:
        """x (rows, width), bf16, plus bias (width,), float32, in place."""
        shape = (ctypes.c_long(len(x)), ctypes.c_long(x.shape[1]))
        self.library.add_bias_half(_at(x, torch.bfloat16), _at(bias), *shape, torch.get_num_threads())

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width), bf16 → (width,), float32."""
        out = torch.empty(x.shape[1])
        shape = (ctypes.c_long(len(x)), ctypes.c_long(x.shape[1]))
        self.library.sum_rows_half(_at(x, torch.bfloat16), _at(out), *shape, torch.get_num_threads())
        return out

    def projects(self, rank: int) -> bool:
        """Are there kernels for branches of so many numbers a token?"""
        return rank % self.lanes == 0

    def project(self, x: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
        """x (rows, width), bf16, times aᵀ, a (r, width), float32, into `out` (rows, r), float32."""
        shape = map(ctypes.c_long, (*x.shape, len(a)))
        self.library.project_half(_at(x, torch.bfloat16), _at(a), _at(out), *shape, torch.get_num_threads())

    def expand_back(self, dy: torch.Tensor, mid: torch.Tensor) -> torch.Tensor:
        """dyᵀ mid (width, r), float32, of dy (rows, width), bf16, and mid (rows, r), float32."""
        out = torch.empty(dy.shape[1], mid.shape[1])
        shape = map(ctypes.c_long, (*dy.shape, mid.shape[1]))
        self.library.expand_back_half(_at(dy, torch.bfloat16), _at(mid), _at(out), *shape, torch.get_num_threads())
        return out

    def pick_columns(self, x: torch.Tensor, columns: torch.Tensor, out: torch.Tensor) -> None:
        """These columns of x (rows, width), float32 or bf16, into `out` (rows, count) of the same kind."""
        function = self.library.pick_columns if x.dtype == torch.float32 else self.library.pick_columns_half
        self._columns(function, _at(x, x.dtype), _at(out, x.dtype), x, columns)

    def place_columns(self, part: torch.Tensor, columns: torch.Tensor, out: torch.Tensor) -> None:
        """part (rows, count), float32, as these columns of `out` (rows, width), float32 or bf16."""
        function = self.library.place_columns if out.dtype == torch.float32 else self.library.place_columns_half
        self._columns(function, _at(part), _at(out, out.dtype), out, columns)

    def _columns(self, function: Any, source: Any, target: Any, wide: torch.Tensor, columns: torch.Tensor) -> None:
        shape = map(ctypes.c_long, (*wide.shape, len(columns)))
        function(source, _at(columns, torch.int64), target, *shape, torch.get_num_threads())

    def unpacks(self, type_id: int) -> bool:
        """Has it code of its own for this type of packed weights? ggml's own is several times slower."""
        return type_id in UNPACKED

    def unpack(self, packed: np.ndarray, type_id: int, out: torch.Tensor) -> None:
        """Packed rows (uint8, C order) into `out` (rows, cols), float32 or bf16."""
        function = self.library.unpack if out.dtype == torch.float32 else self.library.unpack_half
        blocks = ctypes.c_long(out.numel() // 32)
        function(ctypes.c_void_p(packed.ctypes.data), type_id, _at(out, out.dtype), blocks, torch.get_num_threads())

    def adamw(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        scales: torch.Tensor | None,
        rule: Rule,
    ) -> None:
        """One step, in place; moments are float32, bf16, or bytes with (groups of GROUP numbers, 2) scales."""
        function = {
            torch.float32: self.library.adamw,
            torch.bfloat16: self.library.adamw_bf16,
            torch.uint8: self.library.adamw_bytes,
        }[first.dtype]
        moments = [_at(first, first.dtype), _at(second, first.dtype), *([_at(scales)] if scales is not None else [])]
        count = ctypes.c_long(weight.numel())
        function(_at(weight), _at(gradient), *moments, count, ctypes.byref(rule), torch.get_num_threads())

    def squares(self, x: torch.Tensor) -> float:
        """Their sum."""
        return float(self.library.squares(_at(x), ctypes.c_long(x.numel()), torch.get_num_threads()))


def _each(tensors: list[torch.Tensor]) -> Any:
    """Their addresses."""
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


def _total(parts: list[torch.Tensor]) -> torch.Tensor:
    for part in parts[1:]:
        parts[0].add_(part)
    return parts[0]


@lru_cache(maxsize=1)
def load() -> Kernels:
    return Kernels(compiled.build())


def heads(query: int, key: int, width: int, scale: float) -> Any:
    return _Heads(query, key, width, scale)
