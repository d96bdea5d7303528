"""Sizes that the engine keeps to and the planner counts on; no torch."""

from __future__ import annotations

from gguf.constants import GGMLQuantizationType

HEAD_ROWS = 8192  # vocabulary rows unpacked at a time

LOGITS_BYTES = 64 << 20  # the largest piece of logits that exists at a time


def padded(rows: int) -> int:
    """So many, or somewhat more: the library makes and keeps code for every size of a bf16 product, 0.6 MB each."""
    unit = 32
    while unit * 8 < rows:
        unit *= 2
    return -(-rows // unit) * unit


# types that the kernels unpack themselves; ggml unpacks the others, to float32 alone
UNPACKED = tuple(int(GGMLQuantizationType[name]) for name in ("Q4_0", "Q4_1", "Q8_0"))

GROUP = 256  # moments that share a scale where they are bytes, as kernels.cpp has it
