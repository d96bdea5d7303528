"""A scheme: which blocks, tensors, biases and norms of a model are trained, and how they are put into its stack.

Gradients of everything else are never computed; below the cut, the lowest trained block, not even activations are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgeft.config import UpdateConfig
from edgeft.errors import ConfigError
from edgeft.model.header import BIASES, LINEARS, NORMS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from edgeft.model.stack import Stack

BLOCKS_HINT = "`6` is the top six, `11-19` a range, `[3, 7]` single ones, `37%-67%` a share of the depth, or `all`"


@dataclass(frozen=True)
class Scheme:
    method: str  # sparse or lora
    blocks: tuple[int, ...]
    tensors: tuple[str, ...]
    weights: bool
    biases: tuple[str, ...]
    norms: bool
    rank: int = 0
    alpha: float = 0.0

    @property
    def cut(self) -> int:
        """The lowest trained block; all below it is the trunk."""
        return min(self.blocks)


def parse_blocks(spec: Any, depth: int) -> tuple[int, ...]:
    """Block numbers, from any of the ways to write them."""
    if isinstance(spec, bool) or spec is None:
        raise ConfigError(f"`update.blocks` cannot be {spec!r}", BLOCKS_HINT)
    if isinstance(spec, (list, tuple)):
        chosen = {number for item in spec for number in _one(item, depth, single=True)}
    else:
        chosen = set(_one(spec, depth, single=False))
    if not chosen:
        raise ConfigError("`update.blocks` chooses no block", BLOCKS_HINT)
    return tuple(sorted(chosen))


def _one(item: Any, depth: int, single: bool) -> range:
    text = str(item).strip()
    if len(text) > 40:  # no number may have thousands of digits
        raise ConfigError(f"`update.blocks` cannot be {text[:40]!r}…", BLOCKS_HINT)
    if text == "all":
        return range(depth)
    if match := re.fullmatch(r"(?:last\s+)?(\d+)", text):
        number = int(match[1])
        if single and not text.startswith("last"):
            first, last = number, number
        else:  # a plain number counts from the top
            if not 1 <= number <= depth:
                raise ConfigError(f"`update.blocks` asks for the top {number} of {depth} blocks", BLOCKS_HINT)
            first, last = depth - number, depth - 1
    elif match := re.fullmatch(r"(\d+)\s*-\s*(\d+)", text):
        first, last = int(match[1]), int(match[2])
    elif match := re.fullmatch(r"(\d+(?:\.\d+)?)%\s*-\s*(\d+(?:\.\d+)?)%", text):
        low, high = float(match[1]) / 100, float(match[2]) / 100
        if not 0 <= low < high <= 1:
            raise ConfigError(f"`update.blocks` cannot be {text!r}: shares rise from 0% to 100%", BLOCKS_HINT)
        first = min(round(low * depth), depth - 1)
        last = max(first, round(high * depth) - 1)
    else:
        raise ConfigError(f"`update.blocks` cannot be {item!r}", BLOCKS_HINT)
    if first > last or last >= depth:
        raise ConfigError(f"`update.blocks` is {text!r}, and the model has blocks 0 to {depth - 1}", BLOCKS_HINT)
    return range(first, last + 1)


def make(update: UpdateConfig, depth: int, arch: str) -> Scheme:
    """The scheme that a recipe means for a model of this depth and architecture."""
    biases: tuple[str, ...] = ()
    if update.biases:
        biases = tuple(t for t in update.tensors if t in BIASES[arch])
        if not biases:
            able = ", ".join(BIASES[arch]) or "none"
            raise ConfigError(
                f"llama.cpp reads no biases for these tensors of a `{arch}` model (it reads: {able})",
                "use `--set update.biases=false`, and `--set update.weights=true` or `--set update.norms=true`",
            )
    scheme = Scheme(
        method=update.method,
        blocks=parse_blocks(update.blocks, depth),
        tensors=tuple(t for t in LINEARS if t in update.tensors),
        weights=update.weights,
        biases=biases,
        norms=update.norms,
        rank=update.rank,
        alpha=update.alpha,
    )
    if not ((scheme.weights and scheme.tensors) or scheme.biases or scheme.norms):
        raise ConfigError("the recipe updates nothing", "turn on update.weights, update.biases or update.norms")
    if scheme.method == "lora" and not (scheme.weights and scheme.tensors):
        raise ConfigError("`update.method: lora` needs update.weights and update.tensors")
    return scheme


def apply(stack: Stack, scheme: Scheme, seed: int) -> dict[str, nn.Parameter]:
    """Puts the scheme into the stack; returns what is trained, by its name in transformers' model."""
    import torch
    from torch import nn

    from edgeft.model.stack import _set, weight_of

    for parameter in stack.model.parameters():
        parameter.requires_grad_(False)
    for number in scheme.blocks:
        block = stack.layers[number]
        for tensor in scheme.tensors:
            path = LINEARS[tensor][0]
            module: Any = block.get_submodule(path)
            if scheme.weights and scheme.method == "sparse":
                linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
                linear.weight = nn.Parameter(weight_of(module))
                linear.bias = module.bias
                _set(block, path, linear)
                module = linear
            if tensor in scheme.biases:
                start = (
                    torch.zeros(module.out_features) if module.bias is None else module.bias.detach().float().clone()
                )
                module.bias = nn.Parameter(start)
        if scheme.norms:
            for name in NORMS:
                try:
                    norm: Any = block.get_submodule(name)
                except AttributeError:
                    continue
                norm.weight = nn.Parameter(norm.weight.detach().float().clone())
    if scheme.method == "lora":
        _inject_lora(stack, scheme, seed)
    return {name: p for name, p in stack.model.named_parameters() if p.requires_grad}


def _inject_lora(stack: Stack, scheme: Scheme, seed: int) -> None:
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    names = "|".join(re.escape(LINEARS[t][0]) for t in scheme.tensors)
    numbers = "|".join(str(n) for n in scheme.blocks)
    config = LoraConfig(
        r=scheme.rank,
        lora_alpha=scheme.alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=rf"layers\.({numbers})\.({names})",
    )
    kept = [p for p in stack.model.parameters() if p.requires_grad]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, stack.model)
    for parameter in kept:  # PEFT freezes everything but its adapters
        parameter.requires_grad_(True)


def updated(stack: Stack, scheme: Scheme) -> Iterator[tuple[str, torch.Tensor]]:
    """What training changed, merged and dense, in transformers' names and row order; one tensor at a time.

    Names: layers.11.self_attn.q_proj.weight, layers.3.mlp.up_proj.bias, layers.3.input_layernorm.weight.
    """
    from edgeft.model.stack import weight_of

    for number in scheme.blocks:
        block = stack.layers[number]
        for tensor in scheme.tensors:
            name = f"layers.{number}.{LINEARS[tensor][0]}"
            module: Any = block.get_submodule(LINEARS[tensor][0])
            if scheme.method == "lora":
                down, up = module.lora_A["default"].weight, module.lora_B["default"].weight
                base = module.base_layer
                yield f"{name}.weight", weight_of(base) + module.scaling["default"] * (up @ down).detach()
                module = base
            elif scheme.weights:
                yield f"{name}.weight", module.weight.detach()
            if tensor in scheme.biases:
                yield f"{name}.bias", module.bias.detach()
        if scheme.norms:
            for norm in NORMS:
                try:
                    yield f"layers.{number}.{norm}.weight", block.get_submodule(norm).weight.detach()  # type: ignore[operator]
                except AttributeError:
                    continue
