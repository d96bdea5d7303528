"""A temporary copy of a GGUF file in types that llama.cpp multiplies fast, for scoring.

Every weight keeps 11 bits, so the scores are those of the shipped file. llama.cpp itself unpacks weights like this
where it is built with a BLAS library; where it multiplies them packed, it rounds the activations to 8 bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edgeft.evaluate.llamacpp import usable_bytes
from edgeft.formats import ggml
from edgeft.formats.gguf import GGUF, NewTensor, TensorInfo, write
from edgeft.formats.types import SLOW
from edgeft.plan.limits import LEAST_TOKENS, MEMORY_SHARE

WIDE = ggml.F16


@contextmanager
def with_fast_types(path: str | Path, tokens: int, room_bytes: int = 0) -> Iterator[Path]:
    """The file itself, or a copy in memory if that pays off for this many tokens, deleted with the context.

    room_bytes: memory limit of this process, 0: the available memory.
    """
    source = Path(path)
    if tokens < LEAST_TOKENS or not hasattr(os, "memfd_create"):  # Linux only
        yield source
        return
    base = GGUF.open(source)
    tensors = [_widened(base, info) if _slow(base, info) else _kept(base, info) for info in base.tensors.values()]
    size = sum(tensor.nbytes for tensor in tensors)
    if size == sum(i.nbytes for i in base.tensors.values()) or size > MEMORY_SHARE * usable_bytes(room_bytes):
        yield source
        return
    with open(os.memfd_create(source.name), "wb") as file:
        write(file, [base.record(key) for key in base.records], tensors, base.alignment)
        yield Path(f"/proc/self/fd/{file.fileno()}")


def _slow(base: GGUF, info: TensorInfo) -> bool:
    """True for a matrix in a slow type that is multiplied; an embedding that is not also the head is only looked up."""
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
