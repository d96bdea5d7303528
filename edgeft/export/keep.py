"""`--type keep`: what was learned, on the grid of the base file's own types, so that the file does not grow.

Block by block, the trained matrices are rounded for the inputs that training rows give them (rounding.py); what follows
a block sees it rounded. Where that is not enough, a short last phase trains the norms, which are float32 in any file,
with the rounded matrices: from there on trainer and file compute the same. Only training rows are learned from.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from edgeft.config import Recipe
from edgeft.data import tokens
from edgeft.data.forest import Forest
from edgeft.data.tokens import Encoded
from edgeft.engine import optimizer
from edgeft.engine.backend import TORCH
from edgeft.engine.linear import ComputeOptions, LinearSpec, linear_spec, linears
from edgeft.engine.packed import Packed, PackedLinear
from edgeft.engine.stack import Batch, Stack, batch_of
from edgeft.errors import ExportError
from edgeft.export.gguf import PackedRows
from edgeft.export.rounding import Sensitivity, round_matrix
from edgeft.formats import ggml
from edgeft.formats.gguf import GGUF
from edgeft.formats.grid import FORMATS, grid_of
from edgeft.methods.base import weight_of
from edgeft.methods.scheme import Scheme
from edgeft.plan.flops import Schedule
from edgeft.plan.limits import BATCH_TOKENS, ROUND_TOKENS, last_steps, round_part_tokens
from edgeft.run.progress import Progress

if TYPE_CHECKING:
    from edgeft.export import Job

Tensor = torch.Tensor
MAX_ROWS = 1024  # that these are taken from
ACTIVATION_BYTES = 96 << 20  # of them: of one layer's inputs
ROUNDS = 1  # of refitting scales and codes: with a second one, held-out rows lose as much
FLOOR = 0.1  # of the mean weight, that each token has at least
ENOUGH = 1.01  # held-out loss after rounding against that before, up to which there is no last phase
PHASES = 2  # of so many steps, at most
NORM_LR = 3e-3
LOSS_ROWS = 64  # held-out rows on which the loss is compared
INPUTS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))  # linears that read the same input
EXACT = (*ggml.WIDE, ggml.Q8_0)  # whose step is small against an update: ggml's own rounding does


def has_grid(kind: int) -> bool:
    return kind in EXACT or ggml.type_name(kind) in FORMATS


def keep(job: Job, kept: Kept) -> None:
    """Rounds the job's stack, and measures what that costs."""
    train, heldout = tokens.load(job.run.tokens, texts=False)
    if not train:
        raise ExportError("there are no training rows whose inputs matrices could be rounded for", "use --type q8_0")
    rows = [row for row in (heldout or train)[:LOSS_ROWS] if row.trained[1:].any()]
    kept.trained_loss = mean_loss(job.stack, rows, job.scheme.cut)
    with kept.as_in_training():
        kept.round(train)
    kept.loss = mean_loss(job.stack, rows, job.scheme.cut)
    steps = Schedule(len(train), job.run.effective.train).steps
    steps = last_steps(steps)
    for phase in range(PHASES):
        if kept.loss <= ENOUGH * kept.trained_loss:
            break
        with kept.as_in_training():
            kept.settle(train, steps, seed=phase)
        settled = mean_loss(job.stack, rows, job.scheme.cut)
        if settled >= kept.loss:
            kept.undo()
            break
        kept.loss = settled


class Rounding(nn.Module):
    """A trained linear while it is looked at; computes what it did."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.in_features, self.out_features = int(layer.in_features), int(layer.out_features)
        self.observer: Any = None
        self.reader: Any = None
        self.stand_in = nn.Parameter(torch.zeros(1))  # what autograd takes for the trained part of a dense layer

    def as_layer(self) -> LinearSpec:
        spec = linear_spec(self.layer)
        assert spec is not None
        if self.observer is not None and spec.up is None and spec.part is None:
            spec = replace(spec, up=self.stand_in)
        return replace(spec, observer=self.observer, reader=self.reader)

    def dense_weight(self) -> Tensor:
        return weight_of(self.layer)

    @property
    def bias(self) -> Any:
        return self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """In plain torch."""
        (out,) = linears(x.reshape(-1, self.in_features), (self,), ComputeOptions(TORCH))
        return out.view(*x.shape[:-1], self.out_features)


@dataclass(frozen=True)
class Rows:
    """Training rows in passes, of one forest."""

    forest: Forest
    parts: list[tuple[np.ndarray, Batch]]  # (nodes, batch)

    @staticmethod
    def of(rows: Sequence[Encoded], limit: int, part_tokens: int) -> Rows:
        """Some of them, by a seed, with at most so many tokens; shared beginnings count once."""
        forest = Forest(random.Random(0).sample(list(rows), min(len(rows), MAX_ROWS)))
        chosen, seen = 0, np.zeros(len(forest), bool)
        while chosen < len(forest.paths) and (not chosen or seen.sum() < limit):
            seen[forest.paths[chosen]] = True
            chosen += 1
        parts = forest.micro_batches(range(chosen), part_tokens)
        return Rows(forest, [batch_of(forest, part) for part in parts])


class Kept:
    """The trained layers of a stack, rounded one after the other; `restore` puts the trained ones back."""

    trained_loss = loss = math.nan  # on held-out rows, before and after

    def __init__(self, stack: Stack, scheme: Scheme, base: GGUF, recipe: Recipe, progress: Progress) -> None:
        self.stack, self.scheme, self.base, self.recipe, self.progress = stack, scheme, base, recipe, progress
        self.sizes = stack.arch.sizes(SimpleNamespace(**stack.arch.values(base)))
        self.trained: dict[tuple[int, str], Any] = {key: stack.linear(*key) for key in scheme.updates}
        self.norms = self._norms()
        self.before = {name: norm.weight for name, norm in self.norms.items()}
        self.previous = self.before
        for key in self.trained:
            self._check_type(*key)

    def _check_type(self, number: int, tensor: str) -> None:
        name = self._name(number, tensor)
        if name not in self.base.tensors:
            hint = "export with the base model the run was trained on"
            raise ExportError(f"{self.base.path.name} has no place for {name}", hint)
        kind = self.base.tensors[name].type
        if not has_grid(kind):
            what = f"{name} is {ggml.type_name(kind)}, into which no update can be rounded"
            raise ExportError(what, f"use --type q8_0; these can be kept: {', '.join(FORMATS)}")

    def _name(self, number: int, tensor: str) -> str:
        return f"blk.{number}.{self.stack.arch.linears[tensor].gguf}.weight"

    def _norms(self) -> dict[str, Any]:
        """Of the blocks above the cut, by their names."""
        found = {}
        for number in range(self.scheme.cut, self.stack.depth):
            for norm in self.stack.arch.norms:
                module = self.stack.layers[number].get_submodule(norm.path)
                found[f"layers.{number}.{norm.path}.weight"] = module
        return found

    @contextmanager
    def as_in_training(self) -> Iterator[None]:
        """With the operands of products that training had; the export's are float32, which its check needs."""
        before, wanted = self.stack.options.products, self.recipe.how.products
        able = self.stack.options.backend.runs_blocks and wanted != "auto"
        self.stack.configure(products=wanted if able else "fp32")
        try:
            yield
        finally:
            self.stack.configure(products=before)

    @property
    def _part_tokens(self) -> int:
        return round_part_tokens(self.recipe.how.micro_batch_tokens)

    def round(self, rows: Sequence[Encoded]) -> None:
        """All trained matrices, block by block."""
        widest = max(layer.in_features for layer in self.trained.values())
        chosen = Rows.of(rows, min(ROUND_TOKENS, ACTIVATION_BYTES // (4 * widest)), self._part_tokens)
        weights = self._token_weights(chosen)
        with torch.no_grad():
            self.progress.stage("round", self.stack.depth - self.scheme.cut)
            states = [self.stack.trunk(batch, self.scheme.cut) for _, batch in chosen.parts]
            for number in range(self.scheme.cut, self.stack.depth):
                self._round_block(number, chosen, states, weights)
                for i, (_, batch) in enumerate(chosen.parts):
                    states[i] = self.stack.run(states[i], batch, range(number, number + 1))
                self.progress.advance(1)
        self.progress.end()

    def _token_weights(self, rows: Rows) -> dict[tuple[int, str], Tensor]:
        """By layer, how much each token of the forest counts: the size of the loss's gradient at the layer's output."""
        squares: dict[tuple[int, str], Tensor] = {}
        now: list[np.ndarray] = []

        def look(key: tuple[int, str]) -> Any:
            total = squares[key] = torch.zeros(len(rows.forest))

            def add(dy: Tensor, x: Tensor) -> None:
                found = dy.float().square().mean(1)
                if len(found) == len(now[0]):  # the last block runs for the predicting tokens only
                    total[torch.from_numpy(now[0])] += found

            return add

        before = self.stack.options.recompute
        self.stack.configure(recompute="full")  # observed layers keep their whole inputs
        with self._wrapped(self.trained) as layers:
            for key, layer in layers.items():
                layer.observer = look(key)
            for nodes, batch in rows.parts:
                now[:] = [nodes]
                self._loss(batch).backward()  # type: ignore[no-untyped-call]
            for parameter in self.stack.model.parameters():
                parameter.grad = None
        self.stack.configure(recompute=before)
        return {key: _weights(total) for key, total in squares.items()}

    def _loss(self, batch: Batch) -> Tensor:
        """Summed over the trained tokens."""
        cut = self.scheme.cut
        return self.stack.head.loss(self.stack.top(self.stack.trunk(batch, cut), batch, cut), batch.targets)

    @contextmanager
    def _wrapped(self, layers: dict[tuple[int, str], Any]) -> Iterator[dict[tuple[int, str], Rounding]]:
        made = {key: Rounding(layer) for key, layer in layers.items()}
        for key, layer in made.items():
            self._put(key, layer)
        try:
            yield made
        finally:
            for key, whole in layers.items():
                self._put(key, whole)

    def _put(self, key: tuple[int, str], layer: Any) -> None:
        number, tensor = key
        self.stack.layers[number].set_submodule(self.stack.arch.linears[tensor].path, layer)

    def _round_block(
        self, number: int, rows: Rows, states: list[Tensor], weights: dict[tuple[int, str], Tensor]
    ) -> None:
        own = {key: layer for key, layer in self.trained.items() if key[0] == number}
        groups = [[(number, t) for t in names if (number, t) in own] for names in INPUTS]
        backend = self.stack.options.backend
        seen = {group[0]: Sensitivity(own[group[0]].in_features, backend) for group in groups if group}
        now: list[np.ndarray] = []

        def read(group: list[tuple[int, str]]) -> Any:
            weight = torch.stack([weights[key] for key in group]).mean(0)
            return lambda x: seen[group[0]].add(x.float(), weight[torch.from_numpy(now[0])])

        with self._wrapped(own) as layers:
            for group in filter(None, groups):
                layers[group[0]].reader = read(group)
            for (nodes, batch), hidden in zip(rows.parts, states, strict=True):
                now[:] = [nodes]
                self.stack.run(hidden, batch, range(number, number + 1))
        for group in filter(None, groups):
            sensitivity = seen.pop(group[0])
            sensitivity.finish()
            for key in group:
                self._put(key, self._rounded(key, own[key], sensitivity))

    def _rounded(self, key: tuple[int, str], layer: Any, sensitivity: Sensitivity) -> PackedLinear:
        name = self._name(*key)
        info, dense = self.base.tensors[name], weight_of(layer)
        if not torch.isfinite(dense).all():
            raise ExportError(f"{name} holds values that are not finite", "training diverged: use a lower train.lr")
        rows, cols = dense.shape
        if info.type in EXACT:
            packed = ggml.pack(dense.numpy(), info.type, name).reshape(rows, -1)
        else:
            grid = grid_of(self._stored(key), info.type, cols)
            packed = round_matrix(dense, sensitivity, grid, ROUNDS, self.stack.options.backend)
        bias = None if layer.bias is None else layer.bias.detach()
        return PackedLinear(Packed(packed, info.type, rows, cols), bias)

    def _stored(self, key: tuple[int, str]) -> np.ndarray:
        """The base's packed rows, in transformers' order."""
        linear, name = self.stack.arch.linears[key[1]], self._name(*key)
        whole = self.base.bytes(name).reshape(self.base.tensors[name].shape[1], -1)
        part: np.ndarray = whole[linear.rows(self.sizes)]
        order = self.stack.arch.row_order(key[1], self.sizes)
        return part if order is None else part[order]

    def settle(self, rows: Sequence[Encoded], steps: int, seed: int = 0) -> None:
        """The last phase: the norms' weights, with all matrices on their grid. `undo` takes it back."""
        self.previous = {name: norm.weight for name, norm in self.norms.items()}
        for norm in self.norms.values():
            norm.weight = nn.Parameter(norm.weight.detach().float().clone())
        parameters = {name: norm.weight for name, norm in self.norms.items()}
        train = replace(self.recipe.train, optimizer="adamw", weight_decay=0.0, clip=0.0)
        how = replace(self.recipe.how, optimizer_state="fp32", weights="fp32", step_in_place=False)
        tuner = optimizer.make(parameters, train, how, self.stack.options.backend)
        order = random.Random(seed)
        before = self.stack.options.recompute
        self.stack.configure(recompute="selective")  # no weight is trained
        waiting: list[Encoded] = []
        self.progress.stage("last phase", steps)
        for step in range(steps):
            if len(waiting) < min(train.batch_rows, len(rows)):
                waiting = order.sample(list(rows), len(rows))
            chosen, waiting = waiting[: train.batch_rows], waiting[train.batch_rows :]
            tuner.set_rate(NORM_LR * min(1.0, (step + 1) / 3) * (1 - step / steps))
            self._step(Forest(chosen), tuner)
            self.progress.advance(1)
        self.progress.end()
        for norm in self.norms.values():
            norm.weight.requires_grad_(False)
        self.stack.configure(recompute=before)

    def _step(self, forest: Forest, tuner: optimizer.Optimizer) -> None:
        rows = range(len(forest.paths))
        live = forest.live(rows, self.scheme.tokens) if self.scheme.tokens else None
        targets = sum(len(forest.at[row]) for row in rows)
        parts = list(forest.micro_batches(rows, self._part_tokens))
        total = 0.0
        for part in parts:
            loss = self._loss(batch_of(forest, part, live)[1]) / targets
            total += float(loss.detach())
            with tuner.last_pass(total):
                loss.backward()  # type: ignore[no-untyped-call]
        tuner.step()

    def updates(self) -> Iterator[tuple[str, Tensor | PackedRows]]:
        """As schemes.updated: matrices packed, biases and norms in float32."""
        for number in range(self.scheme.cut, self.stack.depth):
            for tensor, linear in self.stack.arch.linears.items():
                module: Any = self.stack.linear(number, tensor)
                if (number, tensor) in self.trained:
                    yield f"layers.{number}.{linear.path}.weight", PackedRows(module.packed.data, module.packed.type)
                if (number, tensor) in self.scheme.biases:
                    yield f"layers.{number}.{linear.path}.bias", module.bias.detach()
        for name, norm in self.norms.items():
            yield name, norm.weight.detach()

    def restore(self) -> None:
        for key, layer in self.trained.items():
            self._put(key, layer)
        self.previous = self.before
        self.undo()

    def undo(self) -> None:
        for name, norm in self.norms.items():
            norm.weight = self.previous[name]


def _weights(squares: Tensor) -> Tensor:
    """Roots, so that few tokens do not decide all; their mean is 1, and the least FLOOR."""
    roots = squares.sqrt()
    mean = roots.mean()
    return torch.ones(len(roots)) if not mean > 0 else roots / mean + FLOOR


def mean_loss(stack: Stack, rows: Sequence[Encoded], cut: int) -> float:
    """Nats per trained token, in the trainer."""
    forest, total, count = Forest(rows), 0.0, 0
    with torch.no_grad():
        for part in forest.micro_batches(range(len(rows)), BATCH_TOKENS):
            _, batch = batch_of(forest, part)
            states = stack.top(stack.trunk(batch, cut), batch, cut)
            total, count = total + float(stack.head.loss(states, batch.targets)), count + len(batch.targets)
    return total / count
