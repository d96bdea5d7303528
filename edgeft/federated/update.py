"""An update as bytes: what a device sends after a round, dense or only its largest numbers.

`decode` returns bit for bit the numbers that `encode` says it sent, and refuses any other bytes with a DataError, in
time and memory that the layout bounds. numpy only.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeft.errors import ConfigError, DataError

Vector = npt.NDArray[np.float32]

# magic, version, kind, Rice parameter, numbers sent, bytes of the unary part, checksum of all other bytes
_HEAD = struct.Struct("<4sBBBxIII")
_MAGIC, _VERSION = b"EFTU", 1
_DENSE, _TOP = 0, 1
_MAX_RICE = 31
_LEVELS = 127  # of int8: -128 is not used, so that both signs have the same


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the trained tensors, in the order in which their numbers follow each other in a vector."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @staticmethod
    def of(tensors: Mapping[str, Any]) -> Layout:
        return Layout(tuple((name, tuple(map(int, tensors[name].shape))) for name in sorted(tensors)))

    @cached_property
    def bounds(self) -> npt.NDArray[np.int64]:
        """(tensors + 1,): where each tensor begins, and the end."""
        return np.concatenate([[0], np.cumsum([math.prod(shape) for _, shape in self.shapes])]).astype(np.int64)

    @property
    def size(self) -> int:
        return int(self.bounds[-1])

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.shapes).encode()).hexdigest()[:32]

    def flatten(self, tensors: Mapping[str, Any]) -> Vector:
        """A copy, in float32."""
        out = np.empty(self.size, np.float32)
        for (name, _), begin, end in zip(self.shapes, self.bounds[:-1], self.bounds[1:], strict=True):
            out[begin:end] = np.asarray(tensors[name], np.float32).reshape(-1)
        return out

    def split(self, vector: Vector) -> dict[str, Vector]:
        """Views of the vector."""
        spans = zip(self.shapes, self.bounds[:-1], self.bounds[1:], strict=True)
        return {name: vector[begin:end].reshape(shape) for (name, shape), begin, end in spans}


@dataclass(frozen=True)
class Send:
    """What of an update is sent: `share` of its numbers, the largest ones; 1 is all, in float32."""

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

    def count(self, size: int) -> int:
        """Numbers that are sent of so many."""
        return size if self.dense else min(size, max(1, math.ceil(self.share * size)))

    def max_bytes(self, layout: Layout) -> int:
        """Of an encoded update: no receiver has to read more."""
        if self.dense:
            return _HEAD.size + 4 * layout.size
        count, rice = self.count(layout.size), _rice_parameter(self.count(layout.size), layout.size)
        # The quotients sum to at most size / 2^rice, and each ends with one bit.
        bits = [(layout.size >> rice) + count, rice * count]
        return _HEAD.size + 4 * len(layout.shapes) + sum(-(-n // 8) for n in bits) + count


def encode(vector: Vector, layout: Layout, send: Send) -> tuple[bytes, Vector]:
    """(bytes, the numbers that they carry): what they do not carry is for the sender to keep and to add next time."""
    if vector.shape != (layout.size,) or vector.dtype != np.float32:
        raise ValueError(f"a vector of {layout.size} float32 numbers is needed, not {vector.shape} {vector.dtype}")
    if send.dense:
        body = np.ascontiguousarray(vector, "<f4").tobytes()
        return _pack(_DENSE, 0, layout.size, 0, body), vector.copy()
    count = send.count(layout.size)
    chosen = np.sort(np.argpartition(np.abs(vector), layout.size - count)[layout.size - count :])
    scales = _scales(vector, chosen, layout)
    owner = _owner(chosen, layout)
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.where(scales[owner] > 0, np.rint(vector[chosen] / scales[owner]), 0)
    values = np.clip(levels, -_LEVELS, _LEVELS).astype(np.int8)
    rice = _rice_parameter(count, layout.size)
    unary, rest = _rice_encode(np.diff(chosen, prepend=-1) - 1, rice)
    body = scales.astype("<f4").tobytes() + unary + rest + values.tobytes()
    sent = np.zeros(layout.size, np.float32)
    sent[chosen] = values * scales[owner]
    return _pack(_TOP, rice, count, len(unary), body), sent


def decode(data: bytes, layout: Layout, send: Send) -> Vector:
    """The numbers that `encode` sent; DataError for anything else."""
    if len(data) > send.max_bytes(layout):
        raise DataError(f"the update has {len(data)} bytes; at most {send.max_bytes(layout)} are expected")
    if len(data) < _HEAD.size:
        raise DataError(f"the update has only {len(data)} bytes")
    magic, version, kind, rice, count, unary_bytes, crc = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise DataError("the update is not in this version's format", "use the same version of edgeft everywhere")
    if crc != zlib.crc32(data[_HEAD.size :], zlib.crc32(data[: _HEAD.size - 4])):
        raise DataError("the update is damaged: its checksum is wrong")
    if kind != (_DENSE if send.dense else _TOP) or count != send.count(layout.size):
        raise DataError(f"the update is not `{send}` of {layout.size} numbers")
    body = memoryview(data)[_HEAD.size :]
    if kind == _DENSE:
        if len(body) != 4 * layout.size:
            raise DataError(f"the update has {len(body) // 4} numbers instead of {layout.size}")
        return np.frombuffer(body, "<f4").astype(np.float32)
    return _decode_top(body, layout, rice, count, unary_bytes)


def _decode_top(body: memoryview, layout: Layout, rice: int, count: int, unary_bytes: int) -> Vector:
    scale_bytes, rest_bytes = 4 * len(layout.shapes), -(-rice * count // 8)
    if rice > _MAX_RICE or len(body) != scale_bytes + unary_bytes + rest_bytes + count:
        raise DataError("the update's parts do not have the lengths that it states")
    scales = np.frombuffer(body[:scale_bytes], "<f4").astype(np.float32)
    if not (np.isfinite(scales).all() and (scales >= 0).all()):
        raise DataError("the update has a scale that is NaN, infinite or negative")
    values = np.frombuffer(body[len(body) - count :], np.int8)
    if (values < -_LEVELS).any():
        raise DataError("the update has a value outside its range")
    unary = body[scale_bytes : scale_bytes + unary_bytes]
    gaps = _rice_decode(unary, body[scale_bytes + unary_bytes : len(body) - count], rice, count)
    chosen = np.cumsum(gaps + 1) - 1
    if chosen[-1] >= layout.size:  # gaps are not negative: they ascend
        raise DataError("the update names a number that the model does not have")
    out = np.zeros(layout.size, np.float32)
    with np.errstate(over="ignore"):  # whoever uses the numbers checks that they are finite
        out[chosen] = values * scales[_owner(chosen, layout)]
    return out


def _pack(kind: int, rice: int, count: int, unary_bytes: int, body: bytes) -> bytes:
    head = _HEAD.pack(_MAGIC, _VERSION, kind, rice, count, unary_bytes, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


def _owner(chosen: npt.NDArray[np.int64], layout: Layout) -> npt.NDArray[np.int64]:
    """The tensor of each number."""
    return np.searchsorted(layout.bounds[1:], chosen, "right")  # type: ignore[no-any-return]


def _scales(vector: Vector, chosen: npt.NDArray[np.int64], layout: Layout) -> Vector:
    """(tensors,): the largest number sent of each, over the levels of int8; 0 where none is sent."""
    largest = np.zeros(len(layout.shapes), np.float32)
    np.maximum.at(largest, _owner(chosen, layout), np.abs(vector[chosen]))
    return largest / np.float32(_LEVELS)


def _rice_parameter(count: int, size: int) -> int:
    """Low bits that are written as they are: about log2 of the mean gap times ln 2, the best for random gaps."""
    return min(_MAX_RICE, max(0, round(math.log2(max(1.0, 0.69 * size / count)))))


def _rice_encode(gaps: npt.NDArray[np.int64], rice: int) -> tuple[bytes, bytes]:
    """Golomb-Rice: (quotients in unary, a one after as many zeros; remainders of `rice` bits each)."""
    ends = np.cumsum((gaps >> rice) + 1) - 1
    unary = np.zeros(int(ends[-1]) + 1, np.uint8)
    unary[ends] = 1
    low = (gaps[:, None] >> np.arange(rice)) & 1
    return np.packbits(unary).tobytes(), np.packbits(low.astype(np.uint8).reshape(-1)).tobytes()


def _rice_decode(unary: memoryview, rest: memoryview, rice: int, count: int) -> npt.NDArray[np.int64]:
    ends = np.flatnonzero(np.unpackbits(np.frombuffer(unary, np.uint8)))
    if len(ends) != count:
        raise DataError(f"the update names {len(ends)} numbers and states {count}")
    quotients = np.diff(ends, prepend=-1) - 1
    low = np.unpackbits(np.frombuffer(rest, np.uint8), count=rice * count).reshape(count, rice).astype(np.int64)
    return (quotients << rice) + (low << np.arange(rice)).sum(1)  # type: ignore[no-any-return]


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
