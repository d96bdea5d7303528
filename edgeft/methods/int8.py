"""Quantisation-aware scaling: steps on weights that exist as int8 alone, W = s W̄ with a scale s for each row.

The gradient of W̄ is s times that of W, and W̄ is 1/s times as large: a step of plain SGD is s² too small, and is
multiplied by s⁻². Adam's step does not depend on the scale of the gradient, and is divided by s. Both then update W as
in float32, up to rounding, which is stochastic (unbiased).
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
LARGEST = 127  # magnitude of an int8 weight
PIECE = 1 << 20  # weights updated at a time, in float32


def stochastic_round(values: Tensor, draw: Draw) -> Tensor:
    """In place, to one of the two neighbouring integers; unbiased."""
    return values.add_(torch.from_numpy(draw.random(values.shape, dtype=np.float32))).floor_()


class Int8Optimizer(Optimizer):
    """For int8 weights; float32 tensors (biases and norms) have an optimiser of their own."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], layers: dict[str, TrainedLinear], recipe: Recipe, backend: Backend
    ) -> None:
        """layers: by the names of the parameters that hold their gradients."""
        super().__init__(parameters, recipe.train, recipe.how, backend)
        if recipe.how.optimizer_state == "bf16":
            raise ConfigError("the moments of int8 weights are fp32 or 8bit", "--set how.optimizer_state=8bit")
        self.layers = layers
        self.moments_8bit = recipe.how.optimizer_state == "8bit"
        others = {name: p for name, p in parameters.items() if name not in layers}
        how = replace(recipe.how, optimizer_state="fp32")  # they are few
        self.others = (optimizer.make if others else Optimizer)(others, recipe.train, how, backend)
        self.taken = 0  # steps so far; seeds the rounding

    def set_rate(self, lr: float, bias_lr: float | None = None, low_rank_lr: float | None = None) -> None:
        super().set_rate(lr, bias_lr, low_rank_lr)
        self.others.set_rate(lr, bias_lr, low_rank_lr)

    def step(self) -> float:
        norm = super().step()
        self.taken += 1
        return norm

    def _update(self, names: Iterable[str], factor: float) -> None:
        rest = []
        for name in names:
            if name in self.layers:
                self._update_weight(name, self.layers[name], factor)
            else:
                rest.append(name)
        if rest:
            self.others._update(rest, factor)

    def _update_weight(self, name: str, layer: Any, factor: float) -> None:
        """PIECE values at a time."""
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
            layer.codes[piece] = stochastic_round(step.neg_().add_(codes), draw).clamp_(-LARGEST, LARGEST)

    def _sgd(self, kept: dict[str, Any], layer: Any, piece: slice, gradient: Tensor, draw: Draw) -> Tensor:
        """The step of W̄, with momentum."""
        scales = layer.scales[piece, None]
        gradient.mul_(scales).mul_(scales**-2)  # of W̄, scaled
        gradient.add_(layer.codes[piece], alpha=self.train.weight_decay)
        if self.train.momentum:
            gradient.add_(self._load_moment(kept, layer, "first", piece), alpha=self.train.momentum)
            self._store_moment(kept, "first", piece, gradient, draw)
        return gradient.mul(self.lr)

    def _adam(self, kept: dict[str, Any], layer: Any, piece: slice, gradient: Tensor, draw: Draw) -> Tensor:
        """The step of W."""
        beta1, beta2 = self.train.beta1, self.train.beta2
        mean = self._load_moment(kept, layer, "first", piece).lerp_(gradient, 1 - beta1)
        root = self._load_moment(kept, layer, "root", piece).square_().mul_(beta2)
        root.addcmul_(gradient, gradient, value=1 - beta2).sqrt_()
        self._store_moment(kept, "first", piece, mean, draw)
        self._store_moment(kept, "root", piece, root, draw)
        root.div_(math.sqrt(1 - beta2 ** kept["step"])).add_(EPS)
        return mean.div_(root).mul_(self.lr / (1 - beta1 ** kept["step"]))

    def _load_moment(self, kept: dict[str, Any], layer: Any, part: str, piece: slice) -> Tensor:
        """A copy in float32; initially zeros."""
        if part not in kept:
            kind = torch.float32 if not self.moments_8bit else torch.uint8 if part == "root" else torch.int8
            kept[part] = torch.zeros(layer.out_features, layer.in_features, dtype=kind)
            if self.moments_8bit:
                kept[f"{part}_scales"] = torch.zeros(layer.out_features)
        if not self.moments_8bit:
            return kept[part][piece].clone()  # type: ignore[no-any-return]
        return kept[part][piece].float().mul_(kept[f"{part}_scales"][piece, None])  # type: ignore[no-any-return]

    def _store_moment(self, kept: dict[str, Any], part: str, piece: slice, values: Tensor, draw: Draw) -> None:
        """8bit: with a scale for each row. First moments are stochastically rounded (unbiased), so that small gradients
        add up. Roots of second moments divide the step and are rounded up: too long a step harms, too short hardly."""
        if not self.moments_8bit:
            kept[part][piece] = values
            return
        largest = 255 if part == "root" else LARGEST
        scales = values.abs().amax(1).clamp_(min=1e-30).div_(largest)
        codes = values / scales[:, None]
        codes = codes.ceil_() if part == "root" else stochastic_round(codes, draw)
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
