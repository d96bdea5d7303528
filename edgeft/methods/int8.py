"""Quantisation-aware scaling: steps on weights that exist as int8 alone, W = s W̄ with a scale s for each row.

The gradient of W̄ is s times that of W, and W̄ is 1/s times as large: a step of plain SGD comes out s² too small, and is
multiplied by s⁻². Adam's step does not depend on the gradient's size, and is divided by s. Both then move W as they
would in float32, up to rounding, which is random and right on average.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from edgeft.config import Recipe
from edgeft.engine import optimizer
from edgeft.engine.backend import Backend
from edgeft.engine.optimizer import EPS, Optimizer
from edgeft.errors import ConfigError
from edgeft.methods.layer import TrainedLinear

Tensor = torch.Tensor
Draw = np.random.Generator
LARGEST = 127  # of an int8 weight, to both sides
PIECE = 1 << 20  # weights that are float32 at a time while they are updated


def by_chance(values: Tensor, draw: Draw) -> Tensor:
    """Rounded in place to one of the two whole numbers beside each, the nearer the likelier."""
    return values.add_(torch.from_numpy(draw.random(values.shape, dtype=np.float32))).floor_()


class Int8Optimizer(Optimizer):
    """For int8 weights; trained tensors of float32, biases and norms, are left to another."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], layers: dict[str, TrainedLinear], recipe: Recipe, backend: Backend
    ) -> None:
        """layers: by the names of the parameters that stand for their weights."""
        super().__init__(parameters, recipe.train, recipe.how, backend)
        if recipe.how.optimizer_state == "bf16":
            raise ConfigError("the moments of int8 weights are fp32 or 8bit", "--set how.optimizer_state=8bit")
        self.layers = layers
        self.small = recipe.how.optimizer_state == "8bit"
        others = {name: p for name, p in parameters.items() if name not in layers}
        how = replace(recipe.how, optimizer_state="fp32")  # they are few
        self.others = (optimizer.make if others else Optimizer)(others, recipe.train, how, backend)
        self.taken = 0  # steps: what rounding draws depends on it

    def set_rate(self, lr: float, bias_lr: float | None = None) -> None:
        super().set_rate(lr, bias_lr)
        self.others.set_rate(lr, bias_lr)

    def step(self) -> float:
        norm = super().step()
        self.taken += 1
        return norm

    def _update(self, names: Iterable[str], factor: float) -> None:
        rest = []
        for name in names:
            if name in self.layers:
                self._move(name, self.layers[name], factor)
            else:
                rest.append(name)
        if rest:
            self.others._update(rest, factor)

    def _move(self, name: str, layer: Any, factor: float) -> None:
        """One weight, some rows at a time."""
        kept = self.kept.setdefault(name, {"step": 0.0})
        kept["step"] += 1.0
        draw = np.random.default_rng([self.train.seed, self.taken, zlib.crc32(name.encode())])
        rows = max(1, PIECE // layer.in_features)
        assert layer.weight.grad is not None
        for start in range(0, layer.out_features, rows):
            piece = slice(start, start + rows)
            codes, scales = layer.codes[piece], layer.scales[piece, None]
            gradient = layer.weight.grad[piece].mul_(factor)  # of W
            if self.train.optimizer == "sgd":
                step = self._sgd(kept, layer, piece, gradient, draw)
            else:
                step = self._adam(kept, layer, piece, gradient, draw).div_(scales)
                step.add_(codes, alpha=self.lr * self.train.weight_decay)
            layer.codes[piece] = by_chance(step.neg_().add_(codes), draw).clamp_(-LARGEST, LARGEST)

    def _sgd(self, kept: dict[str, Any], layer: Any, piece: slice, gradient: Tensor, draw: Draw) -> Tensor:
        """With momentum: how far W̄ goes."""
        scales = layer.scales[piece, None]
        gradient.mul_(scales).mul_(scales**-2)  # of W̄, scaled
        gradient.add_(layer.codes[piece], alpha=self.train.weight_decay)
        if self.train.momentum:
            gradient.add_(self._recall(kept, layer, "first", piece), alpha=self.train.momentum)
            self._remember(kept, "first", piece, gradient, draw)
        return gradient.mul(self.lr)

    def _adam(self, kept: dict[str, Any], layer: Any, piece: slice, gradient: Tensor, draw: Draw) -> Tensor:
        """How far W would go."""
        beta1, beta2 = self.train.beta1, self.train.beta2
        mean = self._recall(kept, layer, "first", piece).lerp_(gradient, 1 - beta1)
        root = self._recall(kept, layer, "root", piece).square_().mul_(beta2)
        root.addcmul_(gradient, gradient, value=1 - beta2).sqrt_()
        self._remember(kept, "first", piece, mean, draw)
        self._remember(kept, "root", piece, root, draw)
        root.div_(math.sqrt(1 - beta2 ** kept["step"])).add_(EPS)
        return mean.div_(root).mul_(self.lr / (1 - beta1 ** kept["step"]))

    def _recall(self, kept: dict[str, Any], layer: Any, part: str, piece: slice) -> Tensor:
        """A copy in float32; zeros to begin with."""
        if part not in kept:
            kind = torch.float32 if not self.small else torch.uint8 if part == "root" else torch.int8
            kept[part] = torch.zeros(layer.out_features, layer.in_features, dtype=kind)
            if self.small:
                kept[f"{part}_scales"] = torch.zeros(layer.out_features)
        if not self.small:
            return kept[part][piece].clone()  # type: ignore[no-any-return]
        return kept[part][piece].float().mul_(kept[f"{part}_scales"][piece, None])  # type: ignore[no-any-return]

    def _remember(self, kept: dict[str, Any], part: str, piece: slice, values: Tensor, draw: Draw) -> None:
        """8bit: with a scale for each row. Means are rounded at random, so that what is small adds up; roots of
        squares, which steps are divided by, upwards: too long a step does harm, too short a one little."""
        if not self.small:
            kept[part][piece] = values
            return
        largest = 255 if part == "root" else LARGEST
        scales = values.abs().amax(1).clamp_(min=1e-30).div_(largest)
        codes = values / scales[:, None]
        codes = codes.ceil_() if part == "root" else by_chance(codes, draw)
        kept[part][piece] = codes.clamp_(-largest, largest)
        kept[f"{part}_scales"][piece] = scales

    def forget(self) -> None:
        super().forget()
        self.others.forget()

    def keep(self, names: set[str]) -> None:
        super().keep(names)
        self.others.keep(names)

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        tensors, numbers = super().state()
        more_tensors, more_numbers = self.others.state()
        return tensors | more_tensors, numbers | more_numbers | {"taken": self.taken}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        self.taken = int(numbers["taken"])
        super().restore(tensors, numbers)
        rest = {name: self.kept.pop(name) for name in list(self.kept) if name not in self.layers}
        self.others.restore({f"adamw.{part}.{name}": v for name, kept in rest.items() for part, v in kept.items()}, {})
