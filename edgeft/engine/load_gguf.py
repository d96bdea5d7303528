"""A GGUF file as a stack of frozen, packed weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from edgeft.arch import Norm, of_gguf
from edgeft.arch.check import check_frozen
from edgeft.arch.header import plain_rotation
from edgeft.engine import skeleton
from edgeft.engine.packed import Packed, PackedEmbedding, PackedHead, PackedLinear
from edgeft.engine.stack import Stack, set_submodule
from edgeft.errors import ModelError
from edgeft.formats.gguf import GGUF
from edgeft.formats.source import is_gguf


def load(path: str | Path, frozen: str = "auto", lean: bool = False) -> Stack:
    """A GGUF file, a Hugging Face directory or a hub id.

    lean: blocks that the kernels alone can run; without importing transformers, where that is possible.
    """
    if is_gguf(path):
        return load_gguf(Path(path), frozen, lean)
    from edgeft.engine.load_hf import load_hf

    return load_hf(str(path), frozen)


def packed(gguf: GGUF, name: str) -> Packed:
    info = gguf.tensors.get(name)
    if info is None:
        raise ModelError(f"{gguf.path.name} lacks the tensor {name}", "download or copy it again")
    if len(info.shape) != 2:
        raise ModelError(f"{gguf.path.name}: tensor {name} is no matrix")
    return Packed(gguf.bytes(name), info.type, info.shape[1], info.shape[0])


def vector(gguf: GGUF, name: str) -> torch.Tensor | None:
    info = gguf.tensors.get(name)
    if info is None:
        return None
    return Packed(gguf.bytes(name), info.type, 1, info.shape[0]).copy()[0]


def matrix_and_bias(gguf: GGUF, name: str, order: np.ndarray | None) -> tuple[Packed, torch.Tensor | None]:
    """A linear of the file, rows in transformers' order; order: see Architecture.row_order."""
    matrix, bias = packed(gguf, f"{name}.weight"), vector(gguf, f"{name}.bias")
    if order is None:
        return matrix, bias
    return matrix.permuted(order), bias[torch.from_numpy(order)] if bias is not None else None


def norm_weight(gguf: GGUF, block: int, norm: Norm) -> torch.Tensor | None:
    """As transformers has it."""
    weight = vector(gguf, f"blk.{block}.{norm.gguf}.weight")
    return weight - norm.offset if weight is not None and norm.offset else weight


def load_gguf(path: Path, frozen: str, lean: bool) -> Stack:
    check_frozen(path, frozen)
    gguf = GGUF.open(path)
    arch = of_gguf(gguf)
    config: Any
    model: Any
    if lean and plain_rotation(arch.values(gguf)):
        config = SimpleNamespace(**arch.values(gguf))
        with torch.device("meta"):
            model = skeleton.Model(config, arch)
    else:
        from transformers import AutoModel

        config = arch.config(gguf)
        with torch.device("meta"):
            model = AutoModel.from_config(config)
    sizes = arch.sizes(config)
    for number, block in enumerate(model.layers):
        for tensor, linear in arch.linears.items():  # their shapes were checked with the header
            matrix, bias = matrix_and_bias(gguf, f"blk.{number}.{linear.gguf}", arch.row_order(tensor, sizes))
            set_submodule(block, linear.path, _linear(matrix, bias, frozen))
        for norm in arch.norms:
            weight = norm_weight(gguf, number, norm)
            if weight is not None:
                block.get_submodule(norm.path).weight = nn.Parameter(weight, requires_grad=False)
    last = vector(gguf, "output_norm.weight")
    assert last is not None  # checked with the header
    model.norm.weight = nn.Parameter(last, requires_grad=False)
    model.embed_tokens = None  # the packed embedding is used instead
    model.rotary_emb = type(model.rotary_emb)(config=config)
    factors = vector(gguf, "rope_freqs.weight")
    if factors is not None:  # LLaMA 3: every frequency has its own divisor
        model.rotary_emb.inv_freq = model.rotary_emb.inv_freq / factors
    meta = [name for name, p in model.named_parameters() if p.is_meta]
    if meta:
        raise ModelError(f"{path.name} lacks {len(meta)} tensors, for example {meta[0]}", "download or copy it again")
    embed = packed(gguf, "token_embd.weight")
    head = packed(gguf, "output.weight") if "output.weight" in gguf.tensors else embed
    return Stack(arch, config, model, PackedEmbedding(embed), PackedHead(head), str(path))


def _linear(matrix: Packed, bias: torch.Tensor | None, frozen: str) -> nn.Module:
    if frozen != "dense":
        return PackedLinear(matrix, bias)
    linear = nn.Linear(matrix.cols, matrix.rows, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(matrix.copy(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
