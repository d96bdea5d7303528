"""Sizes that the engine keeps to and the planner counts on; no torch."""

from __future__ import annotations

from gguf.constants import GGMLQuantizationType

HEAD_ROWS = 8192  # vocabulary rows unpacked at a time

LOGITS_BYTES = 64 << 20  # the largest piece of logits that exists at a time

# types that the kernels unpack themselves; of the others ggml unpacks each row
_NAMES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
KERNEL_TYPES = tuple(int(GGMLQuantizationType[name]) for name in _NAMES)

MAX_LANES = 16  # float32 numbers in the widest vector register

MOMENT_GROUP = 256  # moments that share a scale where they are bytes, as kernels.cpp has it


INT8_GROUP = 32  # numbers that share a scale where operands are bytes, as products.h has it

LISTS = 8  # of attention's work, whatever the threads: each sums gradients of its own


KERNEL_GATES = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}  # activation → prefix of its kernels


def kernels_can_run(head_width: int, gate: str, lanes: int = MAX_LANES) -> bool:
    """Heads are whole vectors and the gate has kernels; by default on any processor."""
    return head_width % lanes == 0 and gate in KERNEL_GATES
