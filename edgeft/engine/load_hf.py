"""A Hugging Face folder as a stack; frozen weights in nf4, int8 or float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgeft.arch import Architecture
from edgeft.arch.config import read_config
from edgeft.engine.backend import TORCH, Backend
from edgeft.engine.packed import Packed, PackedEmbedding, PackedHead, PackedLinear
from edgeft.engine.stack import Stack, set_submodule
from edgeft.errors import ModelError
from edgeft.formats.hub import resolve
from edgeft.formats.safetensors import Weights


class _Held(Packed):
    """In memory, in a packing that ggml does not know."""

    def copy(self) -> torch.Tensor:
        return self.dense().clone()


class Nf4(_Held):
    """4-bit normal floats in blocks of 64 with a float32 scale each, as QLoRA's."""

    def __init__(self, weight: torch.Tensor) -> None:
        from bitsandbytes import functional

        self.quantised, self.state = functional.quantize_4bit(weight.float(), quant_type="nf4")
        rows, cols = weight.shape
        super().__init__(self.quantised.numpy(), -1, rows, cols)

    def dense(self, start: int = 0, stop: int | None = None, backend: Backend = TORCH) -> torch.Tensor:
        from bitsandbytes import functional

        # bitsandbytes cannot unpack into a given buffer on a CPU
        return functional.dequantize_4bit(self.quantised, self.state)[start:stop]


class Int8(_Held):
    """8-bit rows with a float32 scale each, as LLM.int8's; inputs stay float32, and so their gradient is exact."""

    def __init__(self, weight: torch.Tensor) -> None:
        from bitsandbytes import functional

        values, scale, _ = functional.int8_vectorwise_quant(weight.half())
        self.values, self.scale = values, scale.float()[:, None] / 127
        super().__init__(values.numpy(), -1, *weight.shape)

    def dense(self, start: int = 0, stop: int | None = None, backend: Backend = TORCH) -> torch.Tensor:
        part = self.values[start:stop]
        out = backend.memory.weights.take(*part.shape)
        return out.copy_(part).mul_(self.scale[start:stop])


def load_hf(path_or_hub_id: str, frozen: str = "auto") -> Stack:
    """A stack over a Hugging Face directory or hub id; frozen: auto (= nf4), nf4, int8 or dense (float32)."""
    from transformers import AutoModel

    folder = resolve(path_or_hub_id)
    arch, config = read_config(folder)
    weights = Weights(folder)
    _check_shapes(arch, config, weights)
    with torch.device("meta"):
        model = AutoModel.from_config(config, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    for number, block in enumerate(model.layers):
        prefix = f"layers.{number}."
        for linear in arch.linears.values():
            module = block.get_submodule(linear.path)
            set_submodule(block, linear.path, _linear(weights, prefix + linear.path, module, frozen, folder))
        for norm in arch.norms:
            name = f"{prefix}{norm.path}.weight"
            if name in weights:
                module = block.get_submodule(norm.path)
                module.weight = _frozen(weights.tensor(name, tuple(module.weight.shape)))
    model.norm.weight = _frozen(weights.tensor("norm.weight", (config.hidden_size,)))
    model.rotary_emb = type(model.rotary_emb)(config=config)  # its frequencies are computed, not stored
    model.embed_tokens = None  # the mapped embedding is used instead
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if meta:
        raise ModelError(f"{folder} lacks {len(meta)} tensors, for example {meta[0]}", "download or copy it again")
    shape = (int(config.vocab_size), int(config.hidden_size))
    embed = Packed(*weights.mapped("embed_tokens.weight", shape), *shape)
    head = embed if config.tie_word_embeddings else Packed(*weights.mapped("lm_head.weight", shape), *shape)
    return Stack(arch, config, model, PackedEmbedding(embed), PackedHead(head), path_or_hub_id)


def _check_shapes(arch: Architecture, config: Any, weights: Weights) -> None:
    """No number in config.json exceeds what the weights have; ends with the first block that they lack."""
    sizes = arch.sizes(config)
    weights.place("embed_tokens.weight", (sizes.vocabulary, sizes.width))
    for number in range(sizes.depth):
        for linear in arch.linears.values():
            weights.place(f"layers.{number}.{linear.path}.weight", linear.shape(sizes))


def _frozen(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values.float(), requires_grad=False)


def _linear(weights: Weights, name: str, wanted: Any, frozen: str, folder: Path) -> nn.Module:
    shape = (wanted.out_features, wanted.in_features)
    weight = weights.tensor(f"{name}.weight", shape)
    if (f"{name}.bias" in weights) != (wanted.bias is not None):
        state = "has" if wanted.bias is None else "lacks"
        raise ModelError(f"{folder} {state} {name}.bias, against its config.json", "download or copy it again")
    bias = None if wanted.bias is None else weights.tensor(f"{name}.bias", shape[:1]).float()
    if frozen == "dense":
        linear = nn.Linear(shape[1], shape[0], bias=False, device="meta")
        linear.weight = _frozen(weight)
        if bias is not None:
            linear.bias = _frozen(bias)
        return linear
    if shape[1] % 2:
        raise ModelError(
            f"{name} has rows of {shape[1]} values, which cannot be packed", "use `--set model.frozen=dense`"
        )
    return PackedLinear(Int8(weight) if frozen == "int8" else Nf4(weight), bias)
