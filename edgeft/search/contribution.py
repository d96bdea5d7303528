"""First-order contribution: by how much a step on a tensor, or on some of its channels, is expected to lower the loss.

One backward pass over a sample of rows, block by block from the top: the dense weights and gradients of one block are
in memory at a time. The inputs of all blocks are kept in files.

A trial tunes a scheme alone for a few steps, from its cut on, and measures the gain on held-out rows; then the stack is
restored. Both gradients and trials start from a warmed-up model.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from edgeft.arch import Architecture
from edgeft.config import CHANNELS, ExecutionConfig, TrainConfig
from edgeft.data.forest import Forest, epoch_order
from edgeft.data.tokens import Encoded
from edgeft.engine import optimizer as optimizers
from edgeft.engine.optimizer import Optimizer
from edgeft.engine.stack import Batch, Stack, batch_of
from edgeft.errors import DataError
from edgeft.host.files import open_handle
from edgeft.methods import SPARSE
from edgeft.methods import scheme as schemes
from edgeft.methods.base import Update, channel_count
from edgeft.methods.scheme import Scheme
from edgeft.plan import Shape
from edgeft.plan.flops import (
    HELDOUT_TOKENS,
    PART_TOKENS,
    SAMPLE_TOKENS,
    STEP_PARTS,
    WARM_STEPS,
    Pass,
    Schedule,
    part_tokens,
    step_flops,
)

# Channels are chosen by their gradients. On SmolLM2-135M with SQuAD rows an eighth of them has 34 % of the full gain,
# a quarter 53 %, half 74 %; chosen by weight magnitude 12, 26 and 46 %, no more than the first channels.
CHOOSE = "gradient"
STEPS = 6  # of a trial
WARM_RATE = 2e-3  # as in `bias-norm`
SHARES = tuple(reversed(CHANNELS))  # 1/8, 1/4, 1/2, 1 of the ranked channels: each contains the previous one

Floats = npt.NDArray[np.float64]
Tensor = torch.Tensor


@dataclass(frozen=True)
class Sample:
    """Rows in parts of one pass each. Training parts are in random order; even and odd ones form the two halves."""

    forest: Forest
    parts: list[list[int]]
    heldout: list[list[int]]

    def all_parts(self) -> list[list[int]]:
        return self.parts + self.heldout

    def tokens(self, parts: Sequence[list[int]]) -> int:
        return sum(len(self.forest.nodes(part)) for part in parts)

    def sizes(self) -> dict[str, int]:
        rows, heldout = (sum(map(len, side)) for side in (self.parts, self.heldout))
        return {"rows": rows, "tokens": self.tokens(self.parts), "heldout_rows": heldout}

    def digest(self) -> str:
        """Identifies the rows by their tokens."""
        sha = hashlib.sha256(repr((self.parts, self.heldout)).encode())
        for array in (self.forest.tokens, self.forest.parents, *self.forest.at, *self.forest.targets):
            sha.update(np.ascontiguousarray(array).tobytes())
        return sha.hexdigest()


def draw(train: Sequence[Encoded], heldout: Sequence[Encoded], seed: int, tokens: int = SAMPLE_TOKENS) -> Sample:
    """A random sample; rows that share a passage stay together, as in training, and in the same half."""
    forest = Forest(train)
    order = epoch_order(forest, list(range(len(train))), seed, 0, grouped=True)
    chosen = _take_tokens(forest, order, tokens)
    others = list(heldout) or [train[i] for i in order[len(chosen) :]]
    if not others and len(chosen) > 1:
        others, chosen = [train[chosen[-1]]], chosen[:-1]
    if not others:
        raise DataError("one row is too few for a search", "give at least two")
    held = _take_tokens(Forest(others), np.random.default_rng(seed).permutation(len(others)).tolist(), HELDOUT_TOKENS)
    sampled = Forest([train[i] for i in chosen] + [others[i] for i in held])
    rows = list(range(len(chosen)))
    parts = list(sampled.micro_batches(rows, part_tokens(len(sampled.nodes(rows)))))
    permutation = np.random.default_rng(seed).permutation(len(parts))
    last = list(range(len(chosen), len(chosen) + len(held)))
    return Sample(sampled, [parts[i] for i in permutation], list(sampled.micro_batches(last, PART_TOKENS)))


def _take_tokens(forest: Forest, order: Sequence[int], tokens: int) -> list[int]:
    """Rows in this order up to this many tokens, at least one."""
    chosen: list[int] = []
    nodes: set[int] = set()
    for row in order:
        nodes.update(forest.paths[row].tolist())
        if chosen and len(nodes) > tokens:
            break
        chosen.append(row)
    return chosen


class Inputs:
    """Hidden states (T, d) by block and part of the sample, one file per block, in lossless float32."""

    def __init__(self, folder: Path, sample: Sample, depth: int, width: int) -> None:
        self.folder, self.depth, self.width = folder, depth, width
        sizes = [len(sample.forest.nodes(part)) for part in sample.all_parts()]
        self.starts = np.cumsum([0, *sizes])
        self.complete = folder / "inputs.whole"  # marks that all files are complete

    def _file(self, block: int) -> Path:
        return self.folder / f"inputs.{block}.bin"

    def fill(self, stack: Stack, sample: Sample, tick: Callable[[], None]) -> None:
        """One forward pass over all parts, unless an earlier process wrote the files."""
        if self.complete.is_file():
            return
        for number, part in enumerate(sample.all_parts()):
            _, batch = batch_of(sample.forest, part)
            with torch.no_grad():
                hidden = stack.embed(batch.tokens)
                for block in range(self.depth):
                    self._write(block, number, hidden)
                    if block < self.depth - 1:
                        hidden = run_block(stack, hidden, batch, block)
            tick()
        self.complete.touch()

    def _write(self, block: int, part: int, hidden: Tensor) -> None:
        with os.fdopen(open_handle(self._file(block), os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.seek(4 * self.width * int(self.starts[part]))
            file.write(hidden.contiguous().numpy().data)

    def read(self, block: int, part: int) -> Tensor:
        count = int(self.starts[part + 1] - self.starts[part])
        offset = 4 * self.width * int(self.starts[part])
        values = np.fromfile(self._file(block), np.float32, count * self.width, offset=offset)
        return torch.from_numpy(values).view(count, self.width).clone()

    def delete(self) -> None:
        """They are large, and derived from the user's rows."""
        self.complete.unlink(missing_ok=True)
        for block in range(self.depth):
            self._file(block).unlink(missing_ok=True)


def run_block(stack: Stack, hidden: Tensor, batch: Batch, block: int) -> Tensor:
    """One block: (T, d) → (T, d)."""
    return stack.run(hidden, batch, range(block, block + 1))


@contextmanager
def temporarily_trainable(stack: Stack, scheme: Scheme) -> Iterator[dict[str, nn.Parameter]]:
    """Applies the scheme to the stack; on exit everything is frozen, and packed, as before."""
    linears: list[tuple[Any, str, Any, Any]] = []
    norms: list[tuple[Any, Any]] = []
    for number in scheme.blocks:
        block = stack.layers[number]
        for linear in stack.arch.linears.values():
            module: Any = block.get_submodule(linear.path)
            linears.append((block, linear.path, module, module.bias))
        modules = [block.get_submodule(norm.path) for norm in stack.arch.norms]
        norms += [(module, module.weight) for module in modules]
    try:
        yield schemes.apply(stack, scheme, seed=0)
    finally:
        for block, path, module, bias in linears:
            module.bias = bias
            block.set_submodule(path, module)
        for module, weight in norms:
            module.weight = weight


@dataclass(frozen=True)
class FirstOrder:
    """Expected decrease of the mean loss on unseen rows, in nats per unit of learning rate, by one step."""

    weights: Floats  # (depth, tensors, shares)
    biases: Floats  # (depth, tensors); 0 where the architecture has no bias
    norms: Floats  # (depth,)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name).tolist() for name in ("weights", "biases", "norms")}

    @staticmethod
    def from_json(values: dict[str, Any]) -> FirstOrder:
        return FirstOrder(*(np.array(values[name], np.float64) for name in ("weights", "biases", "norms")))


def expected_decrease(a: Tensor, b: Tensor, optimizer: str) -> Tensor:
    """Expected loss decrease of a step at learning rate 1, by weight, from the gradients of two halves of the sample.

    AdamW's first steps move a weight by lr · sign(g), so the loss falls by lr · |g|: summed, the gradient's L1 norm.
    But a gradient over few rows is mostly noise, whose L1 norm is large too, with no gain on other rows. So one half's
    gradient makes the step and the other's measures it: sign(a) · b, and sign(b) · a. Where both agree this is the L1
    norm of the mean; for pure noise it is 0 on average. A step of SGD is lr · g.
    """
    return 0.5 * (_step(a, b, optimizer) + _step(b, a, optimizer))


def _step(by: Tensor, on: Tensor, optimizer: str) -> Tensor:
    """A step along one gradient, measured by another."""
    return by * on if optimizer == "sgd" else by.sign() * on


def first_order(stack: Stack, sample: Sample, inputs: Inputs, optimizer: str, tick: Callable[[], None]) -> FirstOrder:
    """`inputs` must be filled; calls `tick` after each block."""
    forest, depth = sample.forest, stack.depth
    tensors = len(stack.arch.linears)
    weights = np.zeros((depth, tensors, len(SHARES)))
    biases, norms = np.zeros((depth, tensors)), np.zeros(depth)
    halves = [sample.parts[0::2], sample.parts[1::2] or sample.parts[0::2]]
    targets = [forest.trained([row for part in half for row in part]) for half in halves]
    above: list[Tensor | None] = [None] * len(sample.parts)  # gradient of the loss with respect to the block's output
    for block in reversed(range(depth)):
        with temporarily_trainable(stack, _whole_block(block, stack.arch)) as parameters:
            gradients: list[dict[str, Tensor]] = []
            for side in range(2):
                for part in range(side, len(sample.parts), 2):
                    _, batch = batch_of(forest, sample.parts[part])
                    above[part] = _backward(stack, block, inputs.read(block, part), batch, targets[side], above[part])
                gradients.append({name: p.grad for name, p in parameters.items() if p.grad is not None})
                for parameter in parameters.values():
                    stack.options.backend.memory.gradients.release(parameter)
            if not gradients[1]:  # a single part: no other half to measure with
                gradients[1] = dict(gradients[0])
            for name in list(gradients[0]):
                a, b = (half.pop(name) for half in gradients)
                index = _linear_index(name, stack.arch)
                if index is None:
                    norms[block] += float(expected_decrease(a, b, optimizer).sum())
                elif name.endswith(".bias"):
                    biases[block, index] = float(expected_decrease(a, b, optimizer).sum())
                else:
                    weights[block, index] = gain_by_share(a, b, optimizer)
        tick()
    return FirstOrder(weights, np.maximum(biases, 0), np.maximum(norms, 0))


def _whole_block(block: int, arch: Architecture) -> Scheme:
    biases = frozenset((block, tensor) for tensor in arch.biases)
    return Scheme(SPARSE, {(block, tensor): Update() for tensor in arch.linears}, biases, frozenset([block]))


def _linear_index(name: str, arch: Architecture) -> int | None:
    """layers.3.mlp.up_proj.weight → index of `up`; None for a norm."""
    path = name.split(".", 2)[2].rpartition(".")[0]
    return next((index for index, linear in enumerate(arch.linears.values()) if linear.path == path), None)


def _backward(stack: Stack, block: int, x: Tensor, batch: Batch, targets: int, above: Tensor | None) -> Tensor | None:
    """Recomputes one block for one part and runs its backward pass; the gradient of its input."""
    x.requires_grad_(block > 0)
    if block == stack.depth - 1:
        loss = stack.head.loss(stack.top(x, batch, block), batch.targets) / targets
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        run_block(stack, x, batch, block).backward(above)  # type: ignore[no-untyped-call]
    return x.grad


def gain_by_share(a: Tensor, b: Tensor, optimizer: str) -> Floats:
    """(shares,) gain of the channels with the largest gradients; more channels never gain less.

    Channels are chosen by the half that makes the step; their gain is measured by the other half.
    """
    sums = np.zeros(len(SHARES))
    for by, on in ((a, b), (b, a)):
        channels = _step(by, on, optimizer).sum(0).double().numpy()
        order = torch.argsort(by.norm(dim=0), descending=True, stable=True).numpy()
        sums += [0.5 * channels[order[: channel_count(share, len(order))]].sum() for share in SHARES]
    return np.maximum.accumulate(np.maximum(sums, 0.0))


class Trials:
    """Trials over one sample, all at the peak learning rates."""

    def __init__(self, stack: Stack, sample: Sample, inputs: Inputs, rates: Schedule, how: ExecutionConfig) -> None:
        self.stack, self.sample, self.inputs = stack, sample, inputs
        self.rates, self.how = rates, how

    def heldout_loss(self, cut: int) -> float:
        """Of the current stack: mean nats per target over the held-out rows."""
        rows = [row for part in self.sample.heldout for row in part]
        first = len(self.sample.parts)
        with torch.no_grad():
            total = sum(float(self._loss(cut, first + n)) for n in range(len(self.sample.heldout)))
        return total / self.sample.forest.trained(rows)

    def gain(self, scheme: Scheme, base_loss: float) -> float:
        """Decrease of the held-out loss."""
        with temporarily_trainable(self.stack, scheme) as parameters:
            optimizer = optimizers.make(parameters, self.rates.train, self.how, self.stack.options.backend)
            optimizer.set_rate(self.rates.peak, self.rates.bias_peak, self.rates.low_rank_peak)
            _tune(self.sample, optimizer, STEPS, lambda part: self._loss(scheme.cut, part), lambda: None)
            return base_loss - self.heldout_loss(scheme.cut)

    def _loss(self, cut: int, part: int) -> Tensor:
        """Sum over the targets of one part."""
        _, batch = batch_of(self.sample.forest, self.sample.all_parts()[part])
        hidden = self.stack.top(self.inputs.read(cut, part), batch, cut)
        return self.stack.head.loss(hidden, batch.targets)


def warm_up(stack: Stack, sample: Sample, train: TrainConfig, how: ExecutionConfig, tick: Callable[[], None]) -> None:
    """Tunes biases and norms of all blocks for WARM_STEPS steps, permanently; calls `tick` after each.

    The format of an answer is learned first, on all data in much the same blocks. Afterwards gradients show what else
    is to be learned.
    """
    blocks = range(stack.depth)
    biases = frozenset((block, tensor) for block in blocks for tensor in stack.arch.biases)
    before = stack.options.recompute
    stack.configure(recompute="full" if before == "full" else "selective")
    parameters = schemes.apply(stack, Scheme(SPARSE, {}, biases, frozenset(blocks)), seed=0)
    optimizer = optimizers.make(parameters, replace(train, optimizer="adamw"), how, stack.options.backend)
    optimizer.set_rate(WARM_RATE)

    def loss(part: int) -> Tensor:
        _, batch = batch_of(sample.forest, sample.parts[part])
        return stack.head.loss(stack.top(stack.embed(batch.tokens), batch, 0), batch.targets)

    _tune(sample, optimizer, WARM_STEPS, loss, tick)
    stack.configure(recompute=before)
    for parameter in parameters.values():
        parameter.requires_grad_(False)
        parameter.grad = None


def _tune(
    sample: Sample, optimizer: Optimizer, steps: int, loss_of: Callable[[int], Tensor], tick: Callable[[], None]
) -> None:
    """loss_of: the sum over the targets of one part."""
    for step in range(steps):
        parts, total = _step_parts(sample, step), 0.0
        targets = sum(sample.forest.trained(sample.parts[part]) for part in parts)
        for part in parts:
            loss = loss_of(part) / targets
            total += float(loss.detach())
            with optimizer.last_pass(total) if part == parts[-1] else nullcontext():
                loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        tick()


def _step_parts(sample: Sample, step: int) -> list[int]:
    """Indices of a step's parts, cycling over the sample."""
    count = len(sample.parts)
    return [(STEP_PARTS * step + i) % count for i in range(min(STEP_PARTS, count))]


def trial_flops(sample: Sample, shape: Shape, scheme: Scheme) -> float:
    """Of one trial."""
    forest, total = sample.forest, 0.0
    passes = [(sample.parts[n], True) for step in range(STEPS) for n in _step_parts(sample, step)]
    for part, back in [*passes, *((part, False) for part in sample.heldout)]:
        seen, targets = forest.positions[forest.nodes(part)] + 1, forest.trained(part)
        total += step_flops(shape, scheme, Pass.whole(len(seen), int(seen.sum()), targets, 0, targets), back)
    return total


def ranks(values: Sequence[float]) -> Floats:
    """1 for the smallest; ties get their mean rank."""
    array = np.asarray(values, np.float64)
    return np.array([(array < v).sum() + ((array == v).sum() + 1) / 2 for v in array])


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's; NaN for fewer than three pairs, or if one side is constant."""
    if len(one) < 3:
        return math.nan
    a, b = ranks(one) - (len(one) + 1) / 2, ranks(other) - (len(one) + 1) / 2
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size else math.nan
