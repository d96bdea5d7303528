"""ggml's own packing code, called through ctypes in the library that llama-cpp-python brings.

What is unpacked here is bit for bit what llama.cpp computes with.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from edgeft.errors import ExportError, ModelError

F32, F16, Q8_0, BF16 = (int(GGMLQuantizationType[name]) for name in ("F32", "F16", "Q8_0", "BF16"))


class _TypeTraits(ctypes.Structure):
    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("block_values", ctypes.c_int64),
        ("block_values_interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    ]


_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


@functools.cache
def _library() -> ctypes.CDLL:
    # found without importing llama_cpp, which would load the whole runtime (and its memory) into the trainer
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise ModelError("llama-cpp-python is not installed", "pip install llama-cpp-python")
    name = {"darwin": "libggml-base.dylib", "win32": "ggml-base.dll"}.get(sys.platform, "libggml-base.so")
    library = ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name))
    library.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)
    library.ggml_get_type_traits.argtypes = [ctypes.c_int]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    library.ggml_quantize_requires_imatrix.argtypes = [ctypes.c_int]
    return library


@functools.cache
def _to_float(type_id: int) -> Callable[[int, int, int], None] | None:
    pointer = _library().ggml_get_type_traits(type_id).contents.to_float
    return _TO_FLOAT(pointer) if pointer else None


def type_name(type_id: int) -> str:
    """8 → q8_0."""
    return GGMLQuantizationType(type_id).name.lower()


def type_id(name: str) -> int:
    """q8_0 → 8."""
    try:
        return int(GGMLQuantizationType[name.upper()])
    except KeyError:
        raise ExportError(
            f"unknown tensor type `{name}`", "for example keep, f16, q8_0, q6_k, q5_k, q4_k, q4_0, q4_1"
        ) from None


def row_bytes(type_id: int, values: int) -> int:
    """Bytes of one packed row of so many values."""
    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    return values // block_values * block_bytes


def fits_row(type_id: int, values: int) -> bool:
    """Packing runs in blocks along a row; the row must hold whole ones."""
    return values % GGML_QUANT_SIZES[GGMLQuantizationType(type_id)][0] == 0


def needs_imatrix(type_id: int) -> bool:
    """The smallest types cannot be packed without knowing which inputs matter."""
    return bool(_library().ggml_quantize_requires_imatrix(type_id))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def unpack(packed: np.ndarray, type_id: int, out: np.ndarray, threads: int = 1) -> None:
    """Packed rows (uint8, C order) into `out` (rows, cols) float32, in place; ctypes lets go of the GIL meanwhile."""
    rows, cols = out.shape
    if type_id == F32:
        np.copyto(out, packed.view(np.float32).reshape(rows, cols))
        return
    function = _to_float(type_id)
    if function is None:
        raise ModelError(f"tensors of type {type_name(type_id)} cannot be unpacked")
    source, target, stride = packed.ctypes.data, out.ctypes.data, row_bytes(type_id, cols)
    if threads == 1 or out.size < 1 << 22:  # below 4 M values handing over costs more than it saves
        function(source, target, out.size)
        return
    step = -(-rows // threads)
    jobs = [
        _pool(threads).submit(function, source + r * stride, target + r * cols * 4, min(step, rows - r) * cols)
        for r in range(0, rows, step)
    ]
    for job in jobs:
        job.result()


def pack(values: np.ndarray, type_id: int, importance: np.ndarray | None = None) -> np.ndarray:
    """(rows, cols) float32 → packed bytes; `importance` (cols,) weighs the rounding error of each input channel."""
    rows, cols = values.shape
    values = np.ascontiguousarray(values, dtype=np.float32)
    if type_id == F32:
        return values.reshape(-1).view(np.uint8)
    if not fits_row(type_id, cols):
        raise ExportError(
            f"{type_name(type_id)} packs whole blocks of {GGML_QUANT_SIZES[GGMLQuantizationType(type_id)][0]} values, "
            f"and a row has {cols}",
            "--type q8_0 needs multiples of 32, --type f16 takes any width",
        )
    if importance is None and needs_imatrix(type_id):
        raise ExportError(
            f"{type_name(type_id)} cannot be packed without an importance matrix",
            "use a type of 3 bits or more, for example --type q8_0",
        )
    out = np.empty(rows * row_bytes(type_id, cols), dtype=np.uint8)
    weight = None if importance is None else np.ascontiguousarray(importance, dtype=np.float32)
    written = _library().ggml_quantize_chunk(
        type_id, values.ctypes.data, out.ctypes.data, 0, rows, cols, None if weight is None else weight.ctypes.data
    )
    if written != out.size:
        raise ExportError(f"ggml cannot pack into {type_name(type_id)}", "--type q8_0 or --type f16 always work")
    return out
