"""ggml's own quantisation code, called through ctypes in the library of llama-cpp-python.

Unpacked values are bit for bit those that llama.cpp computes with.
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

# llama.cpp has no GEMM for these on any processor (neither sgemm.cpp nor repack.cpp), and multiplies token by token: a
# prompt runs at 270 tokens/s in Q4_1 and 580 in float16, on two cores with AVX-512.
SLOW = ("q4_1", "q5_1", "q3_k", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs")

# What ggml_quantize_chunk can pack, widest first; on any other type it aborts the whole process.
PACKABLE = (
    *("f32", "f16", "bf16", "q8_0", "q6_k", "q5_1", "q5_k", "q5_0", "q4_1", "q4_k", "q4_0", "iq4_nl", "nvfp4"),
    *("iq4_xs", "mxfp4", "q3_k", "iq3_s", "iq3_xxs", "q2_k", "iq2_s", "iq2_xs", "iq2_xxs", "tq2_0", "iq1_m"),
    *("tq1_0", "iq1_s", "q1_0"),
)

WIDE = (F32, F16, BF16)  # `auto` keeps these


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
    # without importing llama_cpp, which would load the whole runtime (and its memory) into the trainer
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise ModelError("llama-cpp-python is not installed", "pip install llama-cpp-python")
    name = {"darwin": "libggml-base.dylib", "win32": "ggml-base.dll"}.get(sys.platform, "libggml-base.so")
    library = ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name))
    library.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)
    library.ggml_get_type_traits.argtypes = [ctypes.c_int]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    library.ggml_quantize_requires_imatrix.argtypes = [ctypes.c_int]
    return library


@functools.cache
def to_float(type_id: int) -> Callable[[int, int, int], None] | None:
    """ggml's function that unpacks (packed, floats, count) of a type; None: there is none."""
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
        hint = "for example keep, f16, q8_0, q6_k, q5_k, q4_k, q4_0, q4_1"
        raise ExportError(f"unknown tensor type `{name}`", hint) from None


def block_values(type_id: int) -> int:
    """Values that are packed together."""
    return GGML_QUANT_SIZES[GGMLQuantizationType(type_id)][0]


def row_bytes(type_id: int, values: int) -> int:
    """Bytes of a packed row of `values` values."""
    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    return values // block_values * block_bytes


def fits_row(type_id: int, values: int) -> bool:
    """Whether a row holds whole blocks: packing runs in blocks along a row."""
    return values % GGML_QUANT_SIZES[GGMLQuantizationType(type_id)][0] == 0


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def unpack(packed: np.ndarray, type_id: int, out: np.ndarray, threads: int = 1) -> None:
    """Packed rows (uint8, C order) into `out` (rows, cols) float32, in place; ctypes releases the GIL."""
    rows, cols = out.shape
    if type_id == F32:
        np.copyto(out, packed.view(np.float32).reshape(rows, cols))
        return
    function = to_float(type_id)
    if function is None:
        raise ModelError(f"tensors of type {type_name(type_id)} cannot be unpacked")
    source, target, stride = packed.ctypes.data, out.ctypes.data, row_bytes(type_id, cols)
    if threads == 1 or out.size < 1 << 22:  # below 4 M values threads cost more than they save
        function(source, target, out.size)
        return
    step = -(-rows // threads)
    jobs = [
        _pool(threads).submit(function, source + r * stride, target + r * cols * 4, min(step, rows - r) * cols)
        for r in range(0, rows, step)
    ]
    for job in jobs:
        job.result()


def pack(values: np.ndarray, type_id: int, name: str = "the tensor") -> np.ndarray:
    """(rows, cols) float32 → packed bytes; errors call the tensor `name`."""
    (rows, cols), label = values.shape, type_name(type_id)
    values = np.ascontiguousarray(values, dtype=np.float32)
    if type_id == F32:
        return values.reshape(-1).view(np.uint8)
    if label not in PACKABLE:  # a type that exists only inside ggml
        raise ExportError(f"ggml cannot pack {name} into {label}", "--type q8_0 or --type f16 always work")
    if not fits_row(type_id, cols):
        raise ExportError(
            f"{label} packs whole blocks, and {name} has rows of {cols} values",
            "--type q8_0, q5_1, q5_0, q4_1 and q4_0 fit here" if cols % 32 == 0 else "--type f16 takes any width",
        )
    if _library().ggml_quantize_requires_imatrix(type_id):
        raise ExportError(
            f"{label} cannot be packed without an importance matrix, and there is none for {name}",
            "use a type of 3 bits or more, for example --type q8_0",
        )
    out = np.empty(rows * row_bytes(type_id, cols), dtype=np.uint8)
    written = _library().ggml_quantize_chunk(type_id, values.ctypes.data, out.ctypes.data, 0, rows, cols, None)
    if written != out.size:
        raise ExportError(f"ggml cannot pack into {label}", "--type q8_0 or --type f16 always work")
    return out


def check_type(type_name: str) -> None:
    if type_name not in ("auto", "keep", *PACKABLE):
        raise ExportError(f"tensors cannot be written as `{type_name}`", f"valid: auto, keep, {', '.join(PACKABLE)}")


def chosen_type(base_type: int, type_name: str) -> int:
    """The ggml type of an updated matrix that is `base_type` in the base file."""
    if type_name == "keep" or (type_name == "auto" and base_type in WIDE):
        return base_type
    return type_id("q8_0" if type_name == "auto" else type_name)
