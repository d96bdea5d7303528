"""A GGUF file, mapped: its keys, its tensors' offsets, and a writer that copies what did not change.

Every count, length and offset is checked against the file size before it is used, and values are read on demand.
"""

from __future__ import annotations

import builtins
import math
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUFValueType

from edgeft.errors import ModelError
from edgeft.host.system import advise

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = (
    int(GGUFValueType[name]) for name in ("UINT32", "INT32", "FLOAT32", "BOOL", "STRING", "ARRAY")
)
_CODES = {"UINT8": "B", "INT8": "b", "UINT16": "H", "INT16": "h", "UINT32": "I", "INT32": "i", "FLOAT32": "f"}
_CODES |= {"BOOL": "?", "UINT64": "Q", "INT64": "q", "FLOAT64": "d"}
SCALARS = {int(GGUFValueType[name]): code for name, code in _CODES.items()}  # value type → code of `struct`
QUANT_SIZES = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}  # (values, bytes) of a block
STRUCTS = {code: struct.Struct("<" + code) for code in SCALARS.values()}
# Far above any real header; a hostile one is rejected in bounded time and memory, even in a sparse file.
MAX_KEYS, MAX_TENSORS, MAX_DIMS = 1 << 16, 1 << 16, 4
MAX_ITEMS = 1 << 22  # values of all arrays together; a vocabulary of 256,000 with its merges has about a million
MAX_KEY_BYTES, MAX_NAME_BYTES = (1 << 16) - 1, 63  # of the format, and of ggml
MAX_STRING_BYTES, MAX_HEADER_BYTES = 1 << 24, 1 << 28
MAX_ALIGNMENT = 1 << 20
MAX_DIRTY_BYTES = 256 << 20  # dirty pages: they cannot be evicted when memory is short


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # as in the file: innermost (input) dimension first
    type: int
    offset: int  # from the start of the file
    nbytes: int


@dataclass
class NewTensor:
    """A tensor to write; the writer computes its data when it gets there."""

    name: str
    shape: tuple[int, ...]
    type: int
    nbytes: int
    data: Callable[[], np.ndarray]


class GGUF:
    """One file, open for reading; values are decoded on demand."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path = path
        self.data = data
        self.tensors: dict[str, TensorInfo] = {}
        self.records: dict[str, tuple[int, int, int]] = {}  # key → (start of record, start of value, end)
        self._view = memoryview(data)  # type: ignore[arg-type]  # numpy's types do not say so before Python 3.12
        self._limit = min(data.size, MAX_HEADER_BYTES)
        self._at = self._items = 0
        self._parse()

    @staticmethod
    def open(path: str | Path) -> GGUF:
        path = Path(path)
        again = "give a .gguf file or a Hugging Face folder"
        try:
            status = path.stat()
            if stat.S_ISDIR(status.st_mode):
                raise ModelError(f"{path} is a folder, not a GGUF file", again)
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(f"{path} is not a regular file", again)
            if status.st_size < 24:
                raise ModelError(f"{path} is not a GGUF file: it has only {status.st_size} bytes", again)
            data = np.memmap(path, dtype=np.uint8, mode="r")
        except FileNotFoundError:
            raise ModelError(f"there is no model file {path}", "check the path given with --model") from None
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        return GGUF(path, data)

    def _bad(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is damaged or cut short: {what}", "download or copy it again")

    def _skip(self, count: int) -> None:
        if count > self._limit - self._at:  # also when already past the end
            raise self._bad("the header points past the end of the file")
        self._at += count

    def _take(self, count: int) -> builtins.bytes:
        self._skip(count)
        return self._view[self._at - count : self._at].tobytes()

    def _number(self, code: str) -> Any:
        size = STRUCTS[code].size
        self._skip(size)
        return STRUCTS[code].unpack_from(self._view, self._at - size)[0]

    def _raw(self, most: int = MAX_STRING_BYTES) -> builtins.bytes:
        length = self._number("Q")
        if length > most:
            raise self._bad(f"a text of {length} bytes")
        return self._take(length)

    def _string(self, most: int = MAX_STRING_BYTES) -> str:
        return self._raw(most).decode("utf-8", errors="replace")

    def _skip_value(self, kind: int) -> None:
        if kind in SCALARS:
            self._skip(STRUCTS[SCALARS[kind]].size)
        elif kind == STRING:
            self._raw()
        elif kind == ARRAY:
            item, count = self._number("I"), self._number("Q")
            self._items += count
            if self._items > MAX_ITEMS:
                raise self._bad(f"arrays of {self._items} values")
            if item in SCALARS:
                self._skip(count * STRUCTS[SCALARS[item]].size)
            elif item == STRING:
                self._skip_strings(count)
            else:  # nested arrays: llama.cpp does not read them either
                raise self._bad(f"an array of type {item}")
        else:
            raise self._bad(f"value type {kind} is unknown")

    def _skip_strings(self, count: int) -> None:
        unpack, view, at, limit = STRUCTS["Q"].unpack_from, self._view, self._at, self._limit
        for _ in range(count):
            if at + 8 > limit:
                raise self._bad("the header points past the end of the file")
            at += 8 + unpack(view, at)[0]
        self._at = at
        self._skip(0)

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._string()
        item, count = self._number("I"), self._number("Q")
        if item in SCALARS:
            code = SCALARS[item]
            return np.frombuffer(self._take(count * STRUCTS[code].size), dtype="<" + code).tolist()
        return [self._string() for _ in range(count)]

    def _parse(self) -> None:
        if self._take(4) != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file", "give a .gguf file or a Hugging Face directory")
        self.version = self._number("I")
        if self.version not in (2, 3):
            raise ModelError(f"{self.path} is GGUF version {self.version}", "versions 2 and 3 can be read")
        tensors, keys = self._number("Q"), self._number("Q")
        if tensors > MAX_TENSORS or keys > MAX_KEYS:
            raise self._bad(f"it claims {tensors} tensors and {keys} keys")
        for _ in range(keys):
            start = self._at
            key = self._string(MAX_KEY_BYTES)
            value = self._at
            self._skip_value(self._number("I"))
            if key in self.records:
                raise self._bad(f"the key {key[:80]!r} occurs twice")
            self.records[key] = (start, value, self._at)
        infos = [self._tensor_info() for _ in range(tensors)]
        after = self._at
        kind, alignment = UINT32, 32
        if "general.alignment" in self.records:
            kind, alignment = self.described("general.alignment")[0], self.get_key("general.alignment")
        if kind != UINT32 or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._bad(f"its alignment is {str(alignment)[:80]}")
        self.alignment = alignment
        base = -(-after // alignment) * alignment
        for name, shape, kind, offset, nbytes in infos:
            if name in self.tensors:
                raise self._bad(f"tensor {name} occurs twice")
            if offset % alignment or base + offset + nbytes > self.data.size:
                raise self._bad(f"tensor {name} lies past the end")
            self.tensors[name] = TensorInfo(name, shape, kind, base + offset, nbytes)
        end = base
        for info in sorted(self.tensors.values(), key=lambda t: t.offset):
            if info.offset < end:
                raise self._bad(f"tensor {info.name} overlaps another")
            end = info.offset + info.nbytes

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int, int]:
        name = self._string(MAX_NAME_BYTES)
        dims = self._number("I")
        if not 1 <= dims <= MAX_DIMS:
            raise self._bad(f"tensor {name} has {dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(dims))
        kind, offset = self._number("I"), self._number("Q")
        if kind not in QUANT_SIZES:
            raise self._bad(f"tensor {name} has the unknown type {kind}")
        block_values, block_bytes = QUANT_SIZES[kind]
        values = math.prod(shape)
        if not 0 < values <= self.data.size * 64 or shape[0] % block_values:
            raise self._bad(f"tensor {name} has the shape {shape}")
        return name, shape, kind, offset, values // block_values * block_bytes

    def get_key(self, key: str, default: Any = None) -> Any:
        """The value of a key as it is named in the file."""
        record = self.records.get(key)
        if record is None:
            return default
        self._at = record[1]
        return self._value(self._number("I"))

    def described(self, key: str) -> tuple[int, int, int]:
        """(type, type of an array's values or -1, count); the value itself is not read."""
        self._at = self.records[key][1]
        kind = self._number("I")
        return (kind, self._number("I"), self._number("Q")) if kind == ARRAY else (kind, -1, 1)

    def texts(self, key: str) -> list[builtins.bytes]:
        """An array of texts as their bytes."""
        _, item, count = self.described(key)
        assert item == STRING, key
        return [self._raw() for _ in range(count)]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.<key>`."""
        return self.get_key(f"{self.arch}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise self._bad(f"the key {self.arch}.{key} is missing")
        return value

    @cached_property
    def arch(self) -> str:
        name = self.get_key("general.architecture", "")
        return name[:80] if isinstance(name, str) else ""

    def bytes(self, name: str) -> np.ndarray:
        """A tensor's packed bytes, mapped: no copy."""
        info = self.tensors[name]
        return self.data[info.offset : info.offset + info.nbytes]

    def unchanged(self, name: str) -> NewTensor:
        """A tensor to copy into another file."""
        info = self.tensors[name]
        return NewTensor(name, info.shape, info.type, info.nbytes, lambda: self.bytes(name))

    def record(self, key: str) -> builtins.bytes:
        """A key-value record, to copy into another file."""
        start, _, end = self.records[key]
        return self.data[start:end].tobytes()


def release_pages(data: np.ndarray) -> None:
    """Drop the pages of a mapped array from this process; the next access reads them again. Others are unchanged."""
    _advise(data, "MADV_DONTNEED")


def prefetch_pages(data: np.ndarray) -> None:
    """Read ahead a mapped array in large pieces, not page by page."""
    _advise(data, "MADV_WILLNEED")


def _advise(data: np.ndarray, advice: str) -> None:
    mapped = getattr(data, "_mmap", None)  # numpy's: none for a copy in memory
    if not isinstance(mapped, mmap.mmap) or not data.nbytes:
        return
    offset = data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    begin = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages: other arrays may share those at the edges
    end = (offset + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        advise(mapped, advice, begin, end - begin)


def encode_string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def encode_record(key: str, kind: int, value: Any, item: int | None = None) -> bytes:
    """One key-value record; for arrays `item` is the type of their values."""

    def raw(kind: int, value: Any) -> bytes:
        return encode_string(value) if kind == STRING else struct.pack("<" + SCALARS[kind], value)

    head = encode_string(key) + struct.pack("<I", kind)
    if item is None:
        return head + raw(kind, value)
    return head + struct.pack("<IQ", item, len(value)) + b"".join(raw(item, v) for v in value)


def write(file: BinaryIO, records: Iterable[bytes], tensors: list[NewTensor], alignment: int = 32) -> None:
    """Stream a whole GGUF file: at most one tensor is in memory, and few dirty pages."""
    records = list(records)
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(records)))
    for record in records:
        file.write(record)
    offset = 0
    for tensor in tensors:
        file.write(encode_string(tensor.name) + struct.pack("<I", len(tensor.shape)))
        file.write(struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape))
        file.write(struct.pack("<IQ", tensor.type, offset))
        offset += -(-tensor.nbytes // alignment) * alignment
    file.write(b"\0" * (-file.tell() % alignment))
    dirty = 0
    for tensor in tensors:
        data = tensor.data()
        assert data.nbytes == tensor.nbytes, tensor.name
        file.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
        file.write(b"\0" * (-tensor.nbytes % alignment))
        release_pages(data)
        dirty += tensor.nbytes
        if dirty > MAX_DIRTY_BYTES:
            file.flush()
            os.fsync(file.fileno())
            dirty = 0
    file.flush()
    os.fsync(file.fileno())
