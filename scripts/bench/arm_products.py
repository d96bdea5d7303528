#!/usr/bin/env python3
"""Instructions that a Cortex-A76 executes for each multiply-add of a product with a frozen weight, float32 and bytes.

    scripts/bench/arm_products.py [--tokens 256] [--types q4_k q8_0 q4_0] [--shapes 576x576 1536x576 …] [--backward]

The whole product counts: weights are unpacked from their type and packed, activations rounded to bytes. Counted under
qemu (a plugin, no timing), with one thread. A shape is outputs × inputs.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import emulated

from edgeft.formats import ggml

SHAPES = ("576x576", "1536x576", "1536x1536", "8960x1536")  # of SmolLM2-135M and Qwen2.5-1.5B
KINDS = {"fp32": 0, "int8": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--backward", action="store_true", help="the gradient of the input")
    parser.add_argument("--types", nargs="+", default=["q4_k", "q8_0", "q4_0"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    given = parser.parse_args()
    if missing := emulated.missing():
        raise SystemExit(f"error: no cross compiler or emulator\nhint: apt install {missing}")
    with tempfile.TemporaryDirectory() as folder:
        board = emulated.CortexA76(Path(folder))
        print(f"{given.tokens} tokens   {'type':6}" + "".join(f"{kind:>9}" for kind in KINDS) + f"{'ratio':>9}")
        for shape in given.shapes:
            outputs, inputs = map(int, shape.split("x"))
            for name in given.types:
                if inputs % ggml.block_values(ggml.type_id(name)):
                    continue  # llama.cpp packs such a tensor in another type
                counts = []
                for kind in KINDS.values():
                    calls = emulated.Calls()
                    cols, depth = (inputs, outputs) if given.backward else (outputs, inputs)
                    emulated.product(calls, kind, given.tokens, cols, depth, name, not given.backward, threads=1)
                    counts.append(board.instructions(calls) / (given.tokens * outputs * inputs))
                print(
                    f"{shape:12} {name:6}" + "".join(f"{count:9.4f}" for count in counts)
                    + f"{counts[1] / counts[0]:9.3f}", flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    main()
