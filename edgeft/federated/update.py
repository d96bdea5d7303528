"""An update as bytes: what a device sends after a round, all numbers or those of the support.

The support is the share of the numbers that a federation trains; the server names it, so no indices are sent. `decode`
returns bit for bit the numbers that `encode` says it sent, and refuses any other bytes with a DataError, in time and
memory that the layout bounds. numpy only.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeft.errors import ConfigError, DataError

Vector = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

# magic, version, kind, numbers sent, mark of the layout, checksum of all other bytes
_HEAD = struct.Struct("<4sBBxxIII")
_MAGIC, _VERSION = b"EFTU", 2
_DENSE, _SUPPORT = 0, 1
_LEVELS = 127  # of int8: -128 is not used, so that both signs have the same


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the trained tensors, in the order in which their numbers follow each other, and the support:
    the places of those that a vector holds, ascending; None: all."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    support: Indices | None = field(default=None, compare=False)

    @staticmethod
    def of(tensors: Mapping[str, Any], support: Indices | None = None) -> Layout:
        return Layout(tuple((name, tuple(map(int, tensors[name].shape))) for name in sorted(tensors)), support)

    @cached_property
    def bounds(self) -> Indices:
        """(tensors + 1,): where each tensor begins, and the end."""
        return np.concatenate([[0], np.cumsum([math.prod(shape) for _, shape in self.shapes])]).astype(np.int64)

    @property
    def total(self) -> int:
        """Numbers of all tensors."""
        return int(self.bounds[-1])

    @property
    def size(self) -> int:
        """Numbers of a vector."""
        return self.total if self.support is None else len(self.support)

    @cached_property
    def owner(self) -> Indices:
        """(size,): the tensor of each number of a vector."""
        places = np.arange(self.total) if self.support is None else self.support
        return np.searchsorted(self.bounds[1:], places, "right")  # type: ignore[no-any-return]

    @cached_property
    def mark(self) -> int:
        """32 bits of names, shapes and support: an update of another layout is refused."""
        return zlib.crc32(
            repr(self.shapes).encode(), zlib.crc32(b"" if self.support is None else self.support.tobytes())
        )

    def flatten(self, tensors: Mapping[str, Any]) -> Vector:
        """A vector, in memory of its own."""
        out = np.empty(self.total, np.float32)
        for (name, _), begin, end in zip(self.shapes, self.bounds[:-1], self.bounds[1:], strict=True):
            out[begin:end] = np.asarray(tensors[name], np.float32).reshape(-1)
        return out if self.support is None else out[self.support]

    def split(self, vector: Vector) -> dict[str, Vector]:
        """Its tensors, 0 where the vector has no number."""
        if self.support is not None:
            whole = np.zeros(self.total, np.float32)
            whole[self.support] = vector
            vector = whole
        spans = zip(self.shapes, self.bounds[:-1], self.bounds[1:], strict=True)
        return {name: vector[begin:end].reshape(shape) for (name, shape), begin, end in spans}


@dataclass(frozen=True)
class Send:
    """The share of the numbers that is trained and sent, in int8; 1: all, in float32."""

    share: float = 1.0

    @staticmethod
    def parse(text: str) -> Send:
        if text == "dense":
            return Send()
        match = re.fullmatch(r"top:(\d{1,3}(?:\.\d{1,6})?)\s*%", text.strip())
        if match is None or not 0 < float(match[1]) <= 100:
            raise ConfigError(f"`--send {text}` is unknown", "use `dense`, or a share of the numbers: `top:1%`")
        return Send(float(match[1]) / 100)

    def __str__(self) -> str:
        return "dense" if self.dense else f"top:{100 * self.share:g}%"

    @property
    def dense(self) -> bool:
        return self.share >= 1

    def count(self, total: int) -> int:
        """Numbers of the support, of so many."""
        return total if self.dense else max(1, math.ceil(self.share * total))

    def choose(self, sizes: Vector) -> Indices | None:
        """The support: the places of the largest, ascending; of equal ones the first."""
        if self.dense:
            return None
        return np.sort(np.argsort(-sizes, kind="stable")[: self.count(len(sizes))]).astype(np.int64)

    def check(self, support: Indices | None, total: int) -> None:
        """DataError unless `choose` can have made it."""
        if (support is None) != self.dense:
            raise DataError(f"`{self}` {'has no' if self.dense else 'needs a'} support")
        if support is None:
            return
        if support.dtype != np.int64 or support.shape != (self.count(total),):
            raise DataError(f"the support does not name {self.count(total)} numbers")
        if support[0] < 0 or support[-1] >= total or not (np.diff(support) > 0).all():
            raise DataError("the support names numbers that the model does not have")

    def bytes_of(self, layout: Layout) -> int:
        """Of an encoded update, exactly."""
        return _HEAD.size + (4 * layout.size if self.dense else 4 * len(layout.shapes) + layout.size)


def encode(vector: Vector, layout: Layout, send: Send) -> tuple[bytes, Vector]:
    """(bytes, the numbers that they carry): the rest is for the sender to keep and to add next time."""
    if vector.shape != (layout.size,) or vector.dtype != np.float32:
        raise ValueError(f"a vector of {layout.size} float32 numbers is needed, not {vector.shape} {vector.dtype}")
    if send.dense:
        return _pack(_DENSE, layout, np.ascontiguousarray(vector, "<f4").tobytes()), vector.copy()
    scales = np.zeros(len(layout.shapes), np.float32)  # of each tensor: its largest number, over the levels of int8
    np.maximum.at(scales, layout.owner, np.abs(vector))
    scales /= np.float32(_LEVELS)
    each = scales[layout.owner]
    levels = np.rint(np.divide(vector, each, out=np.zeros_like(vector), where=each > 0))
    values = np.clip(levels, -_LEVELS, _LEVELS).astype(np.int8)
    return _pack(_SUPPORT, layout, scales.astype("<f4").tobytes() + values.tobytes()), values * each


def decode(data: bytes, layout: Layout, send: Send) -> Vector:
    """The numbers that `encode` sent; DataError for anything else."""
    if len(data) != send.bytes_of(layout):
        raise DataError(f"the update has {len(data)} bytes; `{send}` has {send.bytes_of(layout)}")
    magic, version, kind, count, mark, crc = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise DataError("the update is not in this version's format", "use the same version of edgeft everywhere")
    if crc != _checksum(data):
        raise DataError("the update is damaged: its checksum is wrong")
    if (kind, count, mark) != (_DENSE if send.dense else _SUPPORT, layout.size, layout.mark):
        raise DataError(f"the update is not `{send}` of this federation's numbers")
    body = memoryview(data)[_HEAD.size :]
    if send.dense:
        return np.frombuffer(body, "<f4").astype(np.float32)
    scales = np.frombuffer(body[: 4 * len(layout.shapes)], "<f4").astype(np.float32)
    values = np.frombuffer(body[4 * len(layout.shapes) :], np.int8)
    if not (np.isfinite(scales).all() and (scales >= 0).all()):
        raise DataError("the update has a scale that is NaN, infinite or negative")
    if (values < -_LEVELS).any():
        raise DataError("the update has a value outside its range")
    with np.errstate(over="ignore"):  # whoever uses the numbers checks that they are finite
        return values * scales[layout.owner]


def _pack(kind: int, layout: Layout, body: bytes) -> bytes:
    data = bytearray(_HEAD.pack(_MAGIC, _VERSION, kind, layout.size, layout.mark, 0) + body)
    struct.pack_into("<I", data, _HEAD.size - 4, _checksum(data))
    return bytes(data)


def _checksum(data: bytes | bytearray) -> int:
    """Of all bytes but its own."""
    whole = memoryview(data)
    return zlib.crc32(whole[_HEAD.size :], zlib.crc32(whole[: _HEAD.size - 4]))


class Feedback:
    """Error feedback: what was not sent is kept on the device, and added to the next update."""

    def __init__(self, layout: Layout, residual: Vector | None = None) -> None:
        self.layout = layout
        self.residual = np.zeros(layout.size, np.float32) if residual is None else residual

    def encode(self, vector: Vector, send: Send) -> tuple[bytes, Vector]:
        """(bytes to send, the residual once they are sent); this object stays as it was."""
        whole = vector + self.residual
        data, sent = encode(whole, self.layout, send)
        return data, whole - sent
