"""The shape of a model: its sizes, and the bytes of each of its tensors.

Read from a GGUF header or a Hugging Face configuration; no weight is read.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from edgeft.arch import Architecture, Sizes, of_gguf
from edgeft.arch.base import plain_rotation
from edgeft.engine.limits import KERNEL_TYPES
from edgeft.formats import ggml
from edgeft.formats.ggml import SLOW, check_type
from edgeft.formats.gguf import GGUF, TensorInfo
from edgeft.formats.source import is_gguf

if TYPE_CHECKING:
    from edgeft.methods.scheme import Scheme

STATE_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 + 8 / 256}  # AdamW's moments, per parameter; 8bit: with scales
# Cost of unpacking a value with ggml, as FLOPs of a float32 GEMM in the same time; measured with AVX-512
UNPACK_FLOPS = {"iq": 290.0, "": 27.0}


@dataclass(frozen=True)
class Shape(Sizes):
    """Everything about a model that memory and time depend on."""

    arch: Architecture
    gate: str  # the activation between gate and up
    file_bytes: int = 0  # packed weights, in memory or mapped
    header_bytes: int = 0  # of a GGUF file: metadata, including the vocabulary
    lean: bool = False  # runs without transformers
    blocks: tuple[tuple[int, ...], ...] = ()  # packed bytes by block and linear, in the order of `arch.linears`
    embedding_bytes: int = 0
    head_bytes: int = 0  # 0: the head is the embedding
    unpack_flops: float = 0.0  # per value unpacked by ggml, on average
    slow_types: bool = False  # some types are slow in llama.cpp, see llamacpp.with_fast_types
    mapped: bool = False  # weights are in a mapped GGUF file
    dense: bool = False  # frozen weights are unpacked to float32 at load
    windows: tuple[int, ...] = ()  # of each block: tokens that one sees, 0 for all before it
    scaled: bool = False  # what attention and feed-forward add to the residual stream is multiplied

    def linear(self, tensor: str) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.arch.linears[tensor].shape(self)

    def linears(self) -> list[tuple[str, int, int]]:
        """(tensor, outputs, inputs) of a block."""
        return [(name, *self.linear(name)) for name in self.arch.linears]

    @cached_property
    def block_parameters(self) -> int:
        return sum(rows * cols for _, rows, cols in self.linears())

    @property
    def weights(self) -> int:
        """Of the linears of all blocks."""
        return self.depth * self.block_parameters

    def attended(self, blocks: range, tokens: int, pairs: int) -> int:
        """Pairs of tokens in these blocks, for queries that are in `pairs` of them where there is no window."""
        return sum(
            min(pairs, tokens * window) if window else pairs for window in self.windows[blocks.start : blocks.stop]
        )

    @property
    def more_norms(self) -> int:
        """Values of a token that norms read, beside those before attention and feed-forward."""
        sizes = {"q": self.query, "k": self.key, "attention_out": self.width, "ffn_out": self.width}
        return sum(sizes.get(norm.place, 0) for norm in self.arch.norms)

    def packed_bytes(self, block: int, tensor: str | None = None) -> int:
        """Of one linear of a block, or of all of them."""
        sizes = self.blocks[block]
        return sum(sizes) if tensor is None else sizes[list(self.arch.linears).index(tensor)]


def shape_of_config(arch: Architecture, config: Any, file_bytes: int = 0) -> Shape:
    """From a transformers configuration."""
    sizes = arch.sizes(config)
    return Shape(
        **vars(sizes),
        arch=arch,
        gate=arch.gate,
        file_bytes=file_bytes,
        windows=tuple(arch.window(config, block) for block in range(sizes.depth)),
        scaled=arch.scales(config).residual != 1,
    )


def shape_of(source: str, frozen: str) -> Shape:
    """From a GGUF header or a Hugging Face configuration."""
    return _of_gguf(source, frozen) if is_gguf(source) else _of_folder(source, frozen)


def _of_gguf(source: str, frozen: str) -> Shape:
    gguf = GGUF.open(source)
    arch = of_gguf(gguf)
    values = arch.values(gguf)
    shape = shape_of_config(arch, SimpleNamespace(**values), sum(t.nbytes for t in gguf.tensors.values()))
    rows = [(linear.gguf, linear.shape(shape)[0]) for linear in arch.linears.values()]
    linears = [[gguf.tensors[f"blk.{n}.{name}.weight"] for name, _ in rows] for n in range(shape.depth)]
    head = gguf.tensors.get("output.weight")
    return dataclasses.replace(
        shape,
        header_bytes=gguf.data.size - shape.file_bytes,
        lean=plain_rotation(values),
        blocks=tuple(
            tuple(info.nbytes * count // info.shape[1] for info, (_, count) in zip(block, rows, strict=True))
            for block in linears
        ),
        embedding_bytes=gguf.tensors["token_embd.weight"].nbytes,
        head_bytes=head.nbytes if head else 0,
        unpack_flops=_unpack_flops([info for block in linears for info in block]),
        slow_types=any(ggml.type_name(info.type) in SLOW for block in linears for info in block),
        mapped=True,
        dense=frozen == "dense",
    )


def _unpack_flops(linears: list[TensorInfo]) -> float:
    work = 0.0
    for info in linears:
        name = ggml.type_name(info.type)
        if info.type not in KERNEL_TYPES:
            work += info.shape[0] * info.shape[1] * next(f for kind, f in UNPACK_FLOPS.items() if name.startswith(kind))
    return work / sum(info.shape[0] * info.shape[1] for info in linears)


def _of_folder(source: str, frozen: str) -> Shape:
    from edgeft.arch.check import read_config
    from edgeft.formats.source import resolve

    arch, config = read_config(resolve(source))
    shape = shape_of_config(arch, config)
    value_bytes = {"dense": 4.0, "int8": 1.01}.get(frozen, 0.57)  # bytes per value; nf4 with its scales
    sizes = tuple(int(value_bytes * rows * cols) for _, rows, cols in shape.linears())
    table = 2 * shape.vocabulary * shape.width  # as stored, in 16 bits
    head = 0 if getattr(config, "tie_word_embeddings", False) else table
    return dataclasses.replace(
        shape,
        file_bytes=shape.depth * sum(sizes) + table + head,
        blocks=(sizes,) * shape.depth,
        embedding_bytes=table,
        head_bytes=head,
        dense=frozen == "dense",
    )


def trained_tensors(shape: Shape, scheme: Scheme) -> list[int]:
    """Parameters in each trained tensor."""
    sizes = [norm.size(shape) for block in scheme.blocks if block in scheme.norms for norm in shape.arch.norms]
    for block in scheme.blocks:
        for tensor, rows, cols in shape.linears():
            if update := scheme.updates.get((block, tensor)):
                sizes += scheme.method.trained_sizes(update, rows, cols)
            if (block, tensor) in scheme.biases:
                sizes.append(rows)
    return sizes


def trained_parameters(shape: Shape, scheme: Scheme) -> int:
    return sum(trained_tensors(shape, scheme))


def exported_bytes(shape: Shape, scheme: Scheme, type_name: str) -> int:
    """Of the exported GGUF file."""
    check_type(type_name)
    if not shape.mapped:  # 16 bits, plus the converted base
        return 2 * 2 * (shape.weights + 2 * shape.vocabulary * shape.width)
    total = shape.header_bytes + shape.file_bytes
    for block, tensor in scheme.updates:
        rows, cols = shape.linear(tensor)
        packed = shape.packed_bytes(block, tensor)
        if type_name == "keep" or (type_name == "auto" and packed >= 2 * rows * cols):
            continue
        total += rows * ggml.row_bytes(ggml.type_id("q8_0" if type_name == "auto" else type_name), cols) - packed
    return total + sum(4 * shape.linear(tensor)[0] for _, tensor in scheme.biases)
