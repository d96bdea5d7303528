"""A GGUF file for the time of a scoring, in types that llama.cpp multiplies quickly.

Every weight is the file's own to 11 bits: what is scored is still what is shipped. llama.cpp itself unpacks weights
like this where it is built with a BLAS library; where it multiplies them packed, it rounds the other side to 8 bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edgeft.evaluate.llamacpp import room
from edgeft.formats import ggml
from edgeft.formats.gguf import GGUF, NewTensor, TensorInfo, write
from edgeft.formats.types import SLOW
from edgeft.plan.limits import LEAST_TOKENS, MEMORY_SHARE

WIDE = ggml.F16


@contextmanager
def with_fast_types(path: str | Path, tokens: int, room_bytes: int = 0) -> Iterator[Path]:
    """The file itself, or a copy in memory if that is worth it for so many tokens; it is gone when the context ends.

    room_bytes: memory that this process may use, 0 = what is available here.
    """
    source = Path(path)
    if tokens < LEAST_TOKENS or not hasattr(os, "memfd_create"):  # which only Linux has
        yield source
        return
    base = GGUF.open(source)
    tensors = [_widened(base, info) if _slow(base, info) else _kept(base, info) for info in base.tensors.values()]
    size = sum(tensor.nbytes for tensor in tensors)
    if size == sum(i.nbytes for i in base.tensors.values()) or size > MEMORY_SHARE * room(room_bytes):
        yield source
        return
    with open(os.memfd_create(source.name), "wb") as file:
        write(file, [base.record(key) for key in base.records], tensors, base.alignment)
        yield Path(f"/proc/self/fd/{file.fileno()}")


def _slow(base: GGUF, info: TensorInfo) -> bool:
    """A matrix that tokens are multiplied with; an embedding that is not the head, too, is only looked up."""
    multiplied = info.name != "token_embd.weight" or "output.weight" not in base.tensors
    return ggml.type_name(info.type) in SLOW and len(info.shape) == 2 and multiplied


def _kept(base: GGUF, info: TensorInfo) -> NewTensor:
    return NewTensor(info.name, info.shape, info.type, info.nbytes, lambda: base.bytes(info.name))


def _widened(base: GGUF, info: TensorInfo) -> NewTensor:
    columns, rows = info.shape

    def values() -> np.ndarray:
        dense = np.empty((rows, columns), np.float32)
        ggml.unpack(base.bytes(info.name), info.type, dense)
        return ggml.pack(dense, WIDE)

    return NewTensor(info.name, info.shape, WIDE, rows * ggml.row_bytes(WIDE, columns), values)
