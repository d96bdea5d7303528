"""Models from files, as stacks of frozen weights: a GGUF file's as packed there, a Hugging Face folder's as wanted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from edgeft.arch import Architecture, Linear, Norm, Sizes, of_gguf
from edgeft.arch.base import plain_rotation
from edgeft.arch.check import check_frozen, read_config
from edgeft.engine.backend import TORCH, Backend
from edgeft.engine.linear import empty_linear
from edgeft.engine.packed import Packed, PackedEmbedding, PackedHead, PackedLinear
from edgeft.engine.stack import Stack
from edgeft.errors import ModelError
from edgeft.formats.gguf import GGUF
from edgeft.formats.safetensors import Weights
from edgeft.formats.source import is_gguf, resolve

Tensor = torch.Tensor


def load(path: str | Path, frozen: str = "auto", lean: bool = False) -> Stack:
    """A GGUF file, a Hugging Face directory or a hub id.

    lean: blocks that the kernels alone can run; without importing transformers, where that is possible.
    """
    return load_gguf(Path(path), frozen, lean) if is_gguf(path) else load_hf(str(path), frozen)


def _stack(arch: Architecture, config: Any, model: Any, ends: tuple[Packed, Packed], source: str) -> Stack:
    """ends: embedding and head."""
    model.embed_tokens = None  # the packed embedding is used instead
    if meta := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ModelError(f"{source} lacks {len(meta)} tensors, for example {meta[0]}", "download or copy it again")
    embed = PackedEmbedding(ends[0], arch.scales(config).embedding)
    return Stack(arch, config, model, embed, PackedHead(ends[1], arch.scales(config).logit_cap), source)


def _dense(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = empty_linear(weight.shape[1], weight.shape[0])
    linear.weight, linear.bias = _frozen(weight), None if bias is None else _frozen(bias)  # type: ignore[assignment]
    return linear


def _frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.float(), requires_grad=False)


# Named as in transformers, which is not imported: it takes 150 MB. Tests hold it to the same numbers as its blocks.


class _Norm(nn.Module):
    def __init__(self, norm: Norm, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.empty(width)), norm.offset
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return x * scale * (self.weight + self.offset if self.offset else self.weight)


class _Block(nn.Module):
    """The linears and norms of a block, under transformers' names; `engine/block.py` runs it."""

    def __init__(self, config: Any, arch: Architecture) -> None:
        super().__init__()
        sizes = arch.sizes(config)
        for linear in arch.linears.values():
            outputs, inputs = linear.shape(sizes)
            self._add(linear.path, empty_linear(inputs, outputs))
        for norm in arch.norms:
            self._add(norm.path, _Norm(norm, norm.size(sizes), config.rms_norm_eps))

    def _add(self, path: str, module: nn.Module) -> None:
        parent: nn.Module = self
        *parents, name = path.split(".")
        for part in parents:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(name, module)


class _Rotary(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head, self.rope = config.head_dim, config.rope_parameters
        if "rope_type" in self.rope:
            self.inv_freq = self._frequencies(self.rope)

    def _frequencies(self, rope: dict[str, Any]) -> Tensor:
        with torch.device("cpu"):  # computed on `meta`, it would make torch load its compiler, which takes 70 MB
            turned = int(self.head * rope.get("partial_rotary_factor", 1.0))
            steps = torch.arange(0, turned, 2, dtype=torch.int64).float() / turned
            divisor: float = rope["factor"] if rope["rope_type"] == "linear" else 1.0
            frequencies: Tensor = 1.0 / rope["rope_theta"] ** steps / divisor
            return frequencies

    def forward(self, x: Tensor, positions: Tensor, kind: str = "") -> tuple[Tensor, Tensor]:
        """positions (B, T) → cosines and sines (B, T, rotated values), in two equal halves; kind: see
        Architecture.rotation."""
        rope = self.rope[kind] if kind else self.rope
        frequencies, scale = self._frequencies(rope) if kind else self.inv_freq, 1.0
        if rope["rope_type"] == "longrope":
            long = bool(positions.max() >= rope["original_max_position_embeddings"])
            frequencies = frequencies / torch.tensor(rope["long_factor" if long else "short_factor"])
            scale = rope["attention_factor"]
        angles = positions[..., None].float() * frequencies
        both = torch.cat([angles, angles], -1)
        return both.cos() * scale, both.sin() * scale


class Skeleton(nn.Module):
    def __init__(self, config: Any, arch: Architecture) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(config, arch) for _ in range(config.num_hidden_layers))
        self.norm = _Norm(arch.final_norm, config.hidden_size, config.rms_norm_eps)
        self.embed_tokens: nn.Module | None = None
        self.rotary_emb: nn.Module = _Rotary(config)


class _Joined(nn.Module):
    """Linears that transformers has as one: their outputs, side by side."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.children()], -1)


def _split_shared(block: Any, arch: Architecture) -> None:
    """Makes room for each linear of a shared tensor, in transformers' block."""
    for path in {linear.stored for linear in arch.linears.values() if linear.shared}:
        block.set_submodule(path, _Joined())


def packed(gguf: GGUF, name: str) -> Packed:
    info = gguf.tensors.get(name)
    if info is None:
        raise ModelError(f"{gguf.path.name} lacks the tensor {name}", "download or copy it again")
    if len(info.shape) != 2:
        raise ModelError(f"{gguf.path.name}: tensor {name} is no matrix")
    return Packed(gguf.bytes(name), info.type, info.shape[1], info.shape[0])


def vector(gguf: GGUF, name: str) -> Tensor | None:
    info = gguf.tensors.get(name)
    if info is None:
        return None
    return Packed(gguf.bytes(name), info.type, 1, info.shape[0]).copy()[0]


def matrix_and_bias(
    gguf: GGUF, block: int, tensor: str, arch: Architecture, sizes: Sizes
) -> tuple[Packed, Tensor | None]:
    """A linear of the file, rows in transformers' order; of a tensor that several linears share, its rows."""
    linear, order = arch.linears[tensor], arch.row_order(tensor, sizes)
    name = f"blk.{block}.{linear.gguf}"
    matrix, bias = packed(gguf, f"{name}.weight"), vector(gguf, f"{name}.bias")
    if linear.shared:
        rows = linear.rows(sizes)
        matrix = Packed(matrix.data[rows], matrix.type, rows.stop - rows.start, matrix.cols)
        bias = None if bias is None else bias[rows]
    if order is None:
        return matrix, bias
    return matrix.permuted(order), bias[torch.from_numpy(order)] if bias is not None else None


def norm_weight(gguf: GGUF, prefix: str, norm: Norm) -> Tensor | None:
    """As transformers has it."""
    weight = vector(gguf, f"{prefix}{norm.gguf}.weight")
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
            model = Skeleton(config, arch)
    else:
        from transformers import AutoModel

        config = arch.config(gguf)
        with torch.device("meta"):
            model = AutoModel.from_config(config)
    sizes = arch.sizes(config)
    for number, block in enumerate(model.layers):
        _split_shared(block, arch)
        for tensor, linear in arch.linears.items():  # their shapes were checked with the header
            matrix, bias = matrix_and_bias(gguf, number, tensor, arch, sizes)
            dense = frozen == "dense"
            block.set_submodule(linear.path, _dense(matrix.copy(), bias) if dense else PackedLinear(matrix, bias))
        for norm in arch.norms:
            weight = norm_weight(gguf, f"blk.{number}.", norm)
            if weight is not None:
                block.get_submodule(norm.path).weight = _frozen(weight)
    last = norm_weight(gguf, "", arch.final_norm)
    assert last is not None  # checked with the header
    model.norm.weight = _frozen(last)
    model.rotary_emb = type(model.rotary_emb)(config=config)
    factors = vector(gguf, "rope_freqs.weight")
    if factors is not None:  # LLaMA 3: every frequency has its own divisor
        model.rotary_emb.inv_freq = model.rotary_emb.inv_freq / factors
    embed = packed(gguf, "token_embd.weight")
    head = packed(gguf, "output.weight") if "output.weight" in gguf.tensors else embed
    return _stack(arch, config, model, (embed, head), str(path))


class _Held(Packed):
    """In memory, in a packing that ggml does not know."""

    def operand(self, backend: Backend, bf16: bool = False) -> Tensor:
        dense = self.dense(backend)
        return dense.bfloat16() if bf16 else dense

    def copy(self) -> Tensor:
        return self.dense().clone()


class Nf4(_Held):
    """4-bit normal floats in blocks of 64 with a float32 scale each, as QLoRA's."""

    def __init__(self, weight: Tensor) -> None:
        from bitsandbytes import functional

        self.quantised, self.state = functional.quantize_4bit(weight.float(), quant_type="nf4")
        rows, cols = weight.shape
        super().__init__(self.quantised.numpy(), -1, rows, cols)

    def dense(self, backend: Backend = TORCH) -> Tensor:
        from bitsandbytes import functional

        # bitsandbytes cannot unpack into a given buffer on a CPU
        return functional.dequantize_4bit(self.quantised, self.state)


class Int8(_Held):
    """8-bit rows with a float32 scale each, as LLM.int8's; inputs stay float32, and so their gradient is exact."""

    def __init__(self, weight: Tensor) -> None:
        from bitsandbytes import functional

        values, scale, _ = functional.int8_vectorwise_quant(weight.half())
        self.values, self.scale = values, scale.float()[:, None] / 127
        super().__init__(values.numpy(), -1, *weight.shape)

    def dense(self, backend: Backend = TORCH) -> Tensor:
        return backend.memory.weights.take(self.rows, self.cols).copy_(self.values).mul_(self.scale)


def load_hf(path_or_hub_id: str, frozen: str = "auto") -> Stack:
    """A stack over a Hugging Face directory or hub id; frozen: auto (= nf4), nf4, int8 or dense (float32)."""
    from transformers import AutoModel

    folder = resolve(path_or_hub_id)
    arch, config = read_config(folder)
    weights = Weights(folder, arch.renamed)
    _check_shapes(arch, config, weights)
    sizes = arch.sizes(config)
    with torch.device("meta"):
        model = AutoModel.from_config(config, attn_implementation="eager")  # type: ignore[no-untyped-call]
    for number, block in enumerate(model.layers):
        prefix = f"layers.{number}."
        modules = {linear.path: block.get_submodule(linear.stored) for linear in arch.linears.values()}
        _split_shared(block, arch)
        for linear in arch.linears.values():
            weight, bias = _hf_tensors(weights, prefix, linear, sizes, modules[linear.path].bias is not None)
            block.set_submodule(linear.path, _hf_linear(prefix + linear.path, weight, bias, frozen))
        for norm in arch.norms:
            name = f"{prefix}{norm.path}.weight"
            if name in weights:
                module = block.get_submodule(norm.path)
                module.weight = _frozen(weights.tensor(name, tuple(module.weight.shape)))
    model.norm.weight = _frozen(weights.tensor("norm.weight", (config.hidden_size,)))
    model.rotary_emb = type(model.rotary_emb)(config=config)  # its frequencies are computed, not stored
    shape = (int(config.vocab_size), int(config.hidden_size))
    embed = Packed(*weights.mapped("embed_tokens.weight", shape), *shape)
    head = embed if config.tie_word_embeddings else Packed(*weights.mapped("lm_head.weight", shape), *shape)
    return _stack(arch, config, model, (embed, head), path_or_hub_id)


def _check_shapes(arch: Architecture, config: Any, weights: Weights) -> None:
    """No number in config.json exceeds what the weights have; ends with the first block that they lack."""
    sizes = arch.sizes(config)
    weights.place("embed_tokens.weight", (sizes.vocabulary, sizes.width))
    for number in range(sizes.depth):
        for linear in arch.linears.values():
            weights.place(f"layers.{number}.{linear.stored}.weight", arch.stored_shapes(sizes)[linear.gguf])


def _hf_tensors(
    weights: Weights, prefix: str, linear: Linear, sizes: Sizes, biased: bool
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear, in the folder's own type; of a shared tensor, its rows. biased: it has a bias."""
    name, rows = prefix + linear.stored, linear.rows(sizes)
    weight = weights.rows(f"{name}.weight", rows)
    if (f"{name}.bias" in weights) != biased:
        state = "lacks" if biased else "has"
        raise ModelError(f"{weights.folder} {state} {name}.bias, against its config.json", "download or copy it again")
    return weight, weights.rows(f"{name}.bias", rows).float() if biased else None


def _hf_linear(name: str, weight: Tensor, bias: Tensor | None, frozen: str) -> nn.Module:
    if frozen == "dense":
        return _dense(weight, bias)
    if weight.shape[1] % 2:
        what = f"{name} has rows of {weight.shape[1]} values, which cannot be packed"
        raise ModelError(what, "use `--set model.frozen=dense`")
    return PackedLinear(Int8(weight) if frozen == "int8" else Nf4(weight), bias)
