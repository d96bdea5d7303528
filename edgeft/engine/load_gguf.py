"""A GGUF file as a stack of frozen, packed weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from edgeft.arch.header import LINEARS, NORMS, check_frozen, header_values, plain_rotation
from edgeft.engine import skeleton as lean_model
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


def gguf_config(gguf: GGUF) -> Any:
    """transformers' configuration of the same model."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    values = header_values(gguf)
    if gguf.arch == "llama":
        return LlamaConfig(**values)
    return Qwen2Config(**values) if gguf.arch == "qwen2" else Qwen3Config(**values)


def head_order(heads: int, rows: int) -> np.ndarray:
    """Rows of attn_q and attn_k in `llama` files → their Hugging Face order (llama.cpp rotates neighbours)."""
    half = rows // heads // 2
    return np.arange(rows).reshape(heads, half, 2).swapaxes(1, 2).reshape(-1)


def row_order(gguf: GGUF, tensor: str) -> np.ndarray | None:
    if gguf.arch != "llama" or tensor not in ("q", "k"):
        return None
    heads = int(gguf.need("attention.head_count"))
    count = heads if tensor == "q" else int(gguf.get("attention.head_count_kv", heads))
    rows = count * int(gguf.get("attention.key_length", int(gguf.need("embedding_length")) // heads))
    return head_order(count, rows)


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


def load_gguf(path: Path, frozen: str, lean: bool) -> Stack:
    check_frozen(path, frozen)
    gguf = GGUF.open(path)
    config: Any
    model: Any
    if lean and plain_rotation(header_values(gguf)):
        config = SimpleNamespace(**header_values(gguf))
        with torch.device("meta"):
            model = lean_model.Model(config, gguf.arch)
    else:
        from transformers import AutoModel

        config = gguf_config(gguf)
        with torch.device("meta"):
            model = AutoModel.from_config(config)
    for number, block in enumerate(model.layers):
        for tensor, (module_name, name) in LINEARS.items():
            matrix = packed(gguf, f"blk.{number}.{name}.weight")
            wanted = block.get_submodule(module_name)
            if (matrix.rows, matrix.cols) != (wanted.out_features, wanted.in_features):
                raise ModelError(
                    f"{path.name}: blk.{number}.{name} is {matrix.rows} × {matrix.cols}, "
                    f"not {wanted.out_features} × {wanted.in_features} as its header says"
                )
            bias = vector(gguf, f"blk.{number}.{name}.bias")
            order = row_order(gguf, tensor)
            if order is not None:
                matrix = matrix.permuted(order)
                bias = bias[torch.from_numpy(order)] if bias is not None else None
            set_submodule(block, module_name, _linear(matrix, bias, frozen))
        for module_name, name in NORMS.items():
            weight = vector(gguf, f"blk.{number}.{name}.weight")
            if weight is not None:
                block.get_submodule(module_name).weight = nn.Parameter(weight, requires_grad=False)
    last = vector(gguf, "output_norm.weight")
    assert last is not None  # gguf_config has looked
    model.norm.weight = nn.Parameter(last, requires_grad=False)
    model.embed_tokens = None  # the packed embedding stands in its place
    model.rotary_emb = type(model.rotary_emb)(config=config)
    factors = vector(gguf, "rope_freqs.weight")
    if factors is not None:  # LLaMA 3: every frequency has its own divisor
        model.rotary_emb.inv_freq = model.rotary_emb.inv_freq / factors
    meta = [name for name, p in model.named_parameters() if p.is_meta]
    if meta:
        raise ModelError(f"{path.name} lacks {len(meta)} tensors, for example {meta[0]}", "download or copy it again")
    embed = packed(gguf, "token_embd.weight")
    head = packed(gguf, "output.weight") if "output.weight" in gguf.tensors else embed
    return Stack(gguf.arch, config, model, PackedEmbedding(embed), PackedHead(head), str(path))


def _linear(matrix: Packed, bias: torch.Tensor | None, frozen: str) -> nn.Module:
    if frozen != "dense":
        return PackedLinear(matrix, bias)
    linear = nn.Linear(matrix.cols, matrix.rows, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(matrix.copy(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
