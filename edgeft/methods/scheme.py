"""A scheme: which blocks, tensors, biases and norms of a model are trained, and how they are put into its stack.

Gradients of everything else are never computed; below the cut, the lowest trained block, not even activations are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeft import methods
from edgeft.arch import Architecture
from edgeft.config import PartConfig, UpdateConfig
from edgeft.config.schema import BY_SIZE
from edgeft.errors import ConfigError
from edgeft.methods import Method
from edgeft.methods.base import Update

if TYPE_CHECKING:
    import torch

    from edgeft.engine.optimizer import Optimizer
    from edgeft.engine.stack import Stack

BLOCKS_HINT = (
    "`6` is the top six, `11-19` a range, `[3, 7]` single ones, `37%-67%` a share of the depth, `all`, `by size` or "
    "`auto`"
)
# Weights of all blocks: from here on the lower third of the depth stays frozen, and gradients pass through few tokens
# (recipes/sparse-bp)
LARGE = 500_000_000
LARGE_TOKENS = 8


@dataclass(frozen=True)
class Scheme:
    """What is trained, by block and tensor; nothing else is."""

    method: Method
    updates: dict[tuple[int, str], Update]  # of weights, by (block, tensor)
    biases: frozenset[tuple[int, str]] = frozenset()
    norms: frozenset[int] = frozenset()  # blocks
    choose: str = "gradient"  # how channels are chosen where a share is below 1
    alpha: float = 0.0
    tokens: int = 0  # before a row's first trained one, through which gradients pass; 0: all
    bf16_weights: bool = False  # weights that are trained whole are kept in bf16
    cycle_blocks: int = 0  # trained at a time; 0: all
    cycle_steps: int = 1

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Those in which anything is trained, ascending."""
        return tuple(sorted({block for block, _ in (*self.updates, *self.biases)} | self.norms))

    @property
    def cut(self) -> int:
        """The lowest trained block; all below it is the trunk."""
        return self.blocks[0]

    @property
    def frugal(self) -> bool:
        """No gradient needs the input of a layer, so that most of a block can be computed again from little."""
        return all(self.method.traits_of(update).frugal for update in self.updates.values())

    def recompute(self, requested: bool) -> str:
        """Gradient checkpointing: none, full or selective, as ExecutionOptions has it."""
        if self.frugal and (requested or all(self.method.traits_of(one).selective for one in self.updates.values())):
            return "selective"
        return "full" if requested else "none"

    @property
    def chooses(self) -> bool:
        """Gradients of a few rows choose channels or directions before training."""
        parts = any(update.rank or update.share < 1 for update in self.updates.values())
        return self.method.partial and self.choose == "gradient" and parts

    @cached_property
    def replaced(self) -> frozenset[tuple[int, str]]:
        """Weights that are trained whole, and whose packed form is never read again."""
        every = self.updates.items()
        return frozenset(key for key, one in every if one.share >= 1 and self.method.traits_of(one).replaces_base)

    def share(self, block: int, tensor: str) -> float:
        """Of the input channels of this weight, how much is trained: 0 = frozen. Low-rank updates see all of them."""
        update = self.updates.get((block, tensor))
        return update.share if update else 0.0


def parse_blocks(spec: Any, depth: int) -> tuple[int, ...]:
    """Block numbers, from any of the ways to write them."""
    if isinstance(spec, bool) or spec is None:
        raise ConfigError(f"`update.blocks` cannot be {spec!r}", BLOCKS_HINT)
    if spec == "auto":  # not found yet: what they will cost is at most what these do
        spec = UpdateConfig().blocks
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


def with_blocks(update: UpdateConfig, depth: int, weights: int) -> UpdateConfig:
    """With numbers in place of `by size`. weights: of all blocks together."""
    large = weights >= LARGE
    if update.tokens == BY_SIZE:
        update = replace(update, tokens=LARGE_TOKENS if large else 0)
    blocks = parse_blocks("37%-100%" if large else "10%-100%", depth)
    numbers = f"{blocks[0]}-{blocks[-1]}"
    parts = [replace(part, blocks=numbers if part.blocks == BY_SIZE else part.blocks) for part in update.parts]
    return replace(update, blocks=numbers if update.blocks == BY_SIZE else update.blocks, parts=parts)


def make(update: UpdateConfig, depth: int, arch: Architecture) -> Scheme:
    """The scheme that a recipe means for a model of this depth and architecture."""
    names = [field.name for field in fields(PartConfig)]
    parts = update.parts or [PartConfig(**{name: getattr(update, name) for name in names})]
    method, updates = methods.get(update.method), dict[tuple[int, str], Update]()
    biases: set[tuple[int, str]] = set()
    norms: set[int] = set()
    for part in parts:
        able = [tensor for tensor in part.tensors if tensor in arch.biases]
        if part.biases and not able:
            raise ConfigError(
                f"llama.cpp reads no biases for these tensors of a `{arch.name}` model "
                f"(it reads: {', '.join(arch.biases) or 'none'})",
                "use `--set update.biases=false`, and `--set update.weights=true` or `--set update.norms=true`",
            )
        for block in parse_blocks(part.blocks, depth):
            for tensor in part.tensors:
                rank = update.rank if method.ranked else part.low_rank
                updates[block, tensor] = Update(part.channels if update.weights else 0.0, rank)
                biases.discard((block, tensor))
            biases |= {(block, tensor) for tensor in able if part.biases}
            norms |= {block} if part.norms else set()
    scheme = Scheme(
        method=method,
        updates={
            key: updates[key]
            for key in sorted(updates, key=lambda key: (key[0], list(arch.linears).index(key[1])))
            if updates[key].share
        },
        biases=frozenset(biases),
        norms=frozenset(norms),
        choose=update.choose,
        alpha=update.alpha,
        tokens=0 if update.tokens == BY_SIZE else update.tokens,
        cycle_blocks=update.cycle_blocks,
        cycle_steps=update.cycle_steps,
    )
    if not scheme.blocks:
        raise ConfigError("the recipe updates nothing", "turn on update.weights, update.biases or update.norms")
    scheme.method.validate(scheme)
    if scheme.cycle_blocks > len(scheme.blocks):
        raise ConfigError(
            f"`update.cycle_blocks` is {scheme.cycle_blocks}, but the recipe trains {len(scheme.blocks)} blocks",
            "use fewer at a time, or 0 for all of them",
        )
    return scheme


def with_weights(scheme: Scheme, kind: str, average: float) -> Scheme:
    """kind: `how.weights`; average: `train.average`."""
    if average and (kind == "bf16" or scheme.method.weight_bytes != 4):
        raise ConfigError("`train.average` is for float32 weights", "use `--set train.average=0`")
    if kind == "bf16" and not (scheme.method.bf16_weights and scheme.replaced):
        raise ConfigError(
            "`how.weights: bf16` is for tensors that are trained whole, and this recipe trains none",
            "--set how.weights=fp32, or a recipe that does, such as `sparse-rule`",
        )
    return replace(scheme, bf16_weights=kind == "bf16")


def apply(stack: Stack, scheme: Scheme, seed: int) -> dict[str, torch.nn.Parameter]:
    """Puts the scheme into the stack; returns what is trained, by its name in transformers' model."""
    import torch

    for parameter in stack.model.parameters():
        parameter.requires_grad_(False)
    for number in scheme.blocks:
        block = stack.layers[number]
        for tensor, linear in stack.arch.linears.items():
            path = linear.path
            module: Any = block.get_submodule(path)
            if update := scheme.updates.get((number, tensor)):
                module = scheme.method.build(module, scheme, update, seed, f"layers.{number}.{path}")
                block.set_submodule(path, module)
            if (number, tensor) in scheme.biases:
                start = torch.zeros(module.out_features) if module.bias is None else module.bias.detach().float()
                module.bias = torch.nn.Parameter(start.clone())
        if number in scheme.norms:
            for part in stack.arch.norms:
                norm: Any = block.get_submodule(part.path)
                norm.weight = torch.nn.Parameter(norm.weight.detach().float().clone())
    if scheme.updates:
        scheme.method.inject(stack, scheme, seed)
    return {name: p for name, p in stack.model.named_parameters() if p.requires_grad}


def updated(stack: Stack, scheme: Scheme) -> Iterator[tuple[str, torch.Tensor]]:
    """What training changed, merged and dense, in transformers' names and row order; one tensor at a time.

    Names: layers.11.self_attn.q_proj.weight, layers.3.mlp.up_proj.bias, layers.3.input_layernorm.weight.
    """
    for number in scheme.blocks:
        block: Any = stack.layers[number]
        for tensor, linear in stack.arch.linears.items():
            name = f"layers.{number}.{linear.path}"
            module: Any = block.get_submodule(linear.path)
            if (number, tensor) in scheme.updates:
                weight = module.dense_weight() if hasattr(module, "dense_weight") else module.weight.detach()
                yield f"{name}.weight", weight
            if (number, tensor) in scheme.biases:
                yield f"{name}.bias", module.bias.detach()
        if number in scheme.norms:
            for norm in stack.arch.norms:
                yield f"layers.{number}.{norm.path}.weight", block.get_submodule(norm.path).weight.detach()


def active_blocks(scheme: Scheme, step: int, seed: int) -> tuple[int, ...]:
    """Of this step, by seed and step alone: each group trains once before any trains again.

    Neighbours, because gradients then pass only through the blocks above the lowest of them.
    """
    if not scheme.cycle_blocks:
        return scheme.blocks
    groups = range(0, len(scheme.blocks), scheme.cycle_blocks)
    round_, place = divmod(step // scheme.cycle_steps, len(groups))
    start = groups[int(np.random.default_rng([seed, round_]).permutation(len(groups))[place])]
    return scheme.blocks[start : start + scheme.cycle_blocks]


def restricted(scheme: Scheme, blocks: tuple[int, ...]) -> Scheme:
    """The scheme of these blocks alone."""
    return replace(
        scheme,
        updates={key: update for key, update in scheme.updates.items() if key[0] in blocks},
        biases=frozenset(key for key in scheme.biases if key[0] in blocks),
        norms=scheme.norms & set(blocks),
        cycle_blocks=0,
    )


class Rotation:
    """The blocks that the present step trains."""

    def __init__(self, scheme: Scheme, seed: int) -> None:
        self.scheme, self.seed = scheme, seed
        self.active = scheme

    def advance(self, step: int, parameters: dict[str, torch.nn.Parameter], optimizer: Optimizer) -> None:
        """Moments of blocks that go to rest are dropped: when they train again all others have moved, and old moments
        would say little."""
        blocks = active_blocks(self.scheme, step, self.seed)
        if blocks == self.active.blocks:
            return
        self.active = restricted(self.scheme, blocks)
        active = {name for name in parameters if int(name.split(".")[1]) in blocks}
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in active)
        optimizer.keep(active)
