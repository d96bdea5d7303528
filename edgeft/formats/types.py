"""GGUF tensor types: which an updated tensor is written in, and which llama.cpp multiplies slowly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgeft.errors import ExportError
from edgeft.formats import ggml
from edgeft.formats.gguf import TensorInfo

if TYPE_CHECKING:
    pass

# llama.cpp multiplies these with one token at a time, on any processor: they are neither in its sgemm.cpp nor in its
# repack.cpp. Of Q4_1 it reads 270 tokens/s on two cores with AVX-512, of float16 580.
SLOW = ("q4_1", "q5_1", "q3_k", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs")


# What ggml_quantize_chunk can pack, widest first; on any other type it aborts the whole process.
PACKABLE = (
    *("f32", "f16", "bf16", "q8_0", "q6_k", "q5_1", "q5_k", "q5_0", "q4_1", "q4_k", "q4_0", "iq4_nl", "nvfp4"),
    *("iq4_xs", "mxfp4", "q3_k", "iq3_s", "iq3_xxs", "q2_k", "iq2_s", "iq2_xs", "iq2_xxs", "tq2_0", "iq1_m"),
    *("tq1_0", "iq1_s", "q1_0"),
)

WIDE = (ggml.F32, ggml.F16, ggml.BF16)  # `auto` keeps these


def check_type(type_name: str) -> None:
    if type_name not in ("auto", "keep", *PACKABLE):
        raise ExportError(f"tensors cannot be written as `{type_name}`", f"valid: auto, keep, {', '.join(PACKABLE)}")


def chosen_type(base: TensorInfo, type_name: str) -> int:
    """The ggml type of an updated matrix."""
    if type_name == "keep" or (type_name == "auto" and base.type in WIDE):
        return base.type
    return ggml.type_id("q8_0" if type_name == "auto" else type_name)
