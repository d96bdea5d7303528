"""AdamW, or SGD, over the trained tensors: all together, or each as soon as its gradient is complete.

Its state comes back from a checkpoint bit for bit.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from edgeft.config import ExecutionConfig, TrainConfig
from edgeft.engine.backend import AdamRule, Backend, Moments
from edgeft.engine.limits import MOMENT_GROUP
from edgeft.errors import ConfigError, RunError

EPS = 1e-8  # torch's own
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
Parameters = dict[str, nn.Parameter]


def is_bias_or_norm(name: str) -> bool:
    """layers.0.self_attn.q_proj.bias, layers.0.input_layernorm.weight: they have a learning rate of their own."""
    module, _, kind = name.rpartition(".")
    return kind == "bias" or module.endswith("norm")


class Optimizer:
    """What all have in common: clipping, and when a tensor is updated."""

    def __init__(self, parameters: Parameters, train: TrainConfig, how: ExecutionConfig, backend: Backend) -> None:
        self.parameters, self.train, self.how, self.backend = parameters, train, how, backend
        self.in_place = how.step_in_place
        self.names = {parameter: name for name, parameter in parameters.items()}
        self.bf16_weights: dict[str, torch.Tensor] = {}  # that a parameter stands for, where it only has the gradient
        self.masks: dict[str, torch.Tensor] = {}  # bool, of a parameter's numbers those that are trained; none: all
        self.lr = self.bias_lr = self.low_rank_lr = train.lr
        self.kept: dict[str, dict[str, Any]] = {}  # by a parameter's name: tensors and numbers
        self._squares, self._seen = 0.0, 0  # of the gradients complete in this step: their square sum, and numbers
        self.norm: float | None = None  # of the step before, where tensors are updated in place
        self._good = True  # the step's loss is finite

    def set_rate(self, lr: float, bias_lr: float | None = None, low_rank_lr: float | None = None) -> None:
        """bias_lr: of biases and norms; low_rank_lr: of low-rank updates; None: the same."""
        self.lr, self.bias_lr = lr, lr if bias_lr is None else bias_lr
        self.low_rank_lr = lr if low_rank_lr is None else low_rank_lr

    def rate(self, name: str) -> float:
        if name.endswith(".up"):  # the trained factor of a low-rank update
            return self.low_rank_lr
        return self.bias_lr if is_bias_or_norm(name) else self.lr

    @contextmanager
    def last_pass(self, loss: float) -> Iterator[None]:
        """Around the backward pass that completes a step's gradients; `loss` is the whole step's."""
        self._squares, self._seen = 0.0, 0
        self._good = math.isfinite(loss)
        if not self.in_place:
            yield
            return
        active = [p for p in self.parameters.values() if p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(self._use) for p in active]
        gradients = self.backend.memory.gradients
        gradients.on_ready = self._use
        try:
            yield
        finally:
            gradients.on_ready = None
            for handle in handles:
                handle.remove()

    def _use(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        self._mask(parameter)
        square = self._square(parameter.grad)
        self._squares += square
        self._seen += parameter.numel()
        if self._good and math.isfinite(square):
            self._update([self.names[parameter]], self._factor(self._expected_norm()))  # type: ignore[index]
        self.backend.memory.gradients.release(parameter)

    def _expected_norm(self) -> float:
        """Of the whole gradient, of which a part is complete: the last step's, or in the first step by that part."""
        if self.norm is not None:
            return self.norm
        every = sum(p.numel() for p in self.parameters.values() if p.requires_grad)
        return math.sqrt(self._squares * every / self._seen)

    def _factor(self, norm: float) -> float:
        return min(1.0, self.train.clip / (norm + 1e-6)) if self.train.clip else 1.0

    def step(self) -> float:
        """The gradient's norm, before it was clipped; gradients are cleared.

        Where loss or norm is NaN or infinite, nothing is updated (in place: no tensor whose own gradient is).
        """
        if self.in_place:
            norm = math.sqrt(self._squares)
            self.norm = norm if self._good and math.isfinite(norm) else self.norm
            return norm
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        for name in gradients.keys() & self.masks.keys():
            self._mask(self.parameters[name])
        norm = math.sqrt(sum(map(self._square, gradients.values())))
        if self._good and math.isfinite(norm):
            self._update(gradients, self._factor(norm))
        self.clear()
        return norm

    def forget(self) -> None:
        """As if no step had been taken."""
        self.clear()
        self.kept.clear()
        self.norm = None

    def keep(self, names: set[str]) -> None:
        """Drops the state of all others, and their gradients' buffers."""
        self.kept = {name: kept for name, kept in self.kept.items() if name in names}
        for name in self.parameters.keys() - names:
            self.backend.memory.gradients.release(self.parameters[name])

    def clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _mask(self, parameter: torch.Tensor) -> None:
        """Its gradient becomes 0 where it is not trained: without weight decay the number then stays as it is."""
        mask = self.masks.get(self.names[parameter])  # type: ignore[index]
        if mask is not None and parameter.grad is not None:
            parameter.grad.mul_(mask)

    def _square(self, gradient: torch.Tensor) -> float:
        """The sum of its squares."""
        return float(gradient.norm()) ** 2

    def _update(self, names: Iterable[str], factor: float) -> None:
        """A step of these tensors, their gradients times `factor`."""
        raise NotImplementedError

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Tensors and plain numbers, by `adamw.PART.TENSOR`."""
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, float] = {} if self.norm is None else {"norm": self.norm}
        for name, parts in self.kept.items():
            for part, value in parts.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"adamw.{part}.{name}"] = value
                else:
                    numbers[f"adamw.{part}.{name}"] = value
        return tensors, numbers

    def restore(self, tensors: dict[str, torch.Tensor], numbers: dict[str, float]) -> None:
        self.norm = numbers.get("norm")
        for key, value in [*tensors.items(), *numbers.items()]:
            if key.startswith("adamw."):
                _, part, name = key.split(".", 2)
                self.kept.setdefault(name, {})[part] = value


class Fused(Optimizer):
    """AdamW by the backend: one pass over memory, and moments of 4, 2 or 1 byte."""

    def restore(self, tensors: dict[str, torch.Tensor], numbers: dict[str, float]) -> None:
        super().restore(tensors, numbers)
        if any("first" not in parts for parts in self.kept.values()):
            raise RunError(
                "the run's checkpoint is of an earlier edgeft, with another optimiser state",
                "start the run again in another folder (--out): its rows and cache are reused",
            )

    def _square(self, gradient: torch.Tensor) -> float:
        return self.backend.square_sum(gradient.contiguous())

    def _update(self, names: Iterable[str], factor: float) -> None:
        t, dtype = self.train, MOMENTS[self.how.optimizer_state]
        for name in names:
            parameter = self.parameters[name]
            kept = self.kept.setdefault(name, {})
            if not kept:
                zeros = torch.zeros(parameter.shape, dtype=dtype)
                kept |= {"step": 0.0, "first": zeros, "second": zeros.clone()}
                if dtype == torch.uint8:
                    kept["scales"] = torch.zeros(-(-parameter.numel() // MOMENT_GROUP), 2)
            kept["step"] += 1.0
            rule = AdamRule(
                self.rate(name), t.beta1, t.beta2, EPS, t.weight_decay,
                1 - t.beta1 ** kept["step"], 1 - t.beta2 ** kept["step"], factor,
                zlib.crc32(f"{t.seed} {kept['step']:.0f} {name}".encode()),
            )  # fmt: skip
            assert parameter.grad is not None
            moments = Moments(kept["first"], kept["second"], kept.get("scales"))
            weight = self.bf16_weights.get(name, parameter.detach())
            self.backend.adamw(weight, parameter.grad.contiguous(), moments, rule)


class Plain(Optimizer):
    """AdamW by torch; moments of one byte by bitsandbytes."""

    def __init__(self, parameters: Parameters, train: TrainConfig, how: ExecutionConfig, backend: Backend) -> None:
        super().__init__(parameters, train, how, backend)
        groups = [[name] for name in parameters] if self.in_place else [list(parameters)]
        self.parts = [self._adamw(group) for group in groups]
        self.of = {name: self.parts[number if self.in_place else 0] for number, name in enumerate(parameters)}

    def _adamw(self, names: list[str]) -> Any:
        """With a group for each learning rate."""
        t, kinds = self.train, dict[tuple[bool, bool], list[nn.Parameter]]()
        for name in names:
            kinds.setdefault((is_bias_or_norm(name), name.endswith(".up")), []).append(self.parameters[name])
        groups = [{"params": kinds[kind]} for kind in sorted(kinds)]
        settings: dict[str, Any] = {"lr": t.lr, "betas": (t.beta1, t.beta2), "weight_decay": t.weight_decay}
        if self.how.optimizer_state == "8bit":
            from bitsandbytes.optim import AdamW8bit  # type: ignore[attr-defined]

            return AdamW8bit(groups, **settings)
        return torch.optim.AdamW(groups, fused=True, **settings)

    def _update(self, names: Iterable[str], factor: float) -> None:
        names = list(names)
        if factor != 1.0:
            for name in names:
                gradient = self.parameters[name].grad
                assert gradient is not None
                gradient.mul_(factor)
        for part in {id(part): part for part in map(self.of.__getitem__, names)}.values():
            for group in part.param_groups:
                group["lr"] = self.rate(self.names[group["params"][0]])
            part.step()
        for name in names:  # torch keeps its state by parameter
            self.kept[name] = self.of[name].state[self.parameters[name]]

    def forget(self) -> None:
        super().forget()
        for part in self.parts:
            part.state.clear()

    def keep(self, names: set[str]) -> None:
        super().keep(names)
        for name, parameter in self.parameters.items():
            if name not in names:
                self.of[name].state.pop(parameter, None)

    def restore(self, tensors: dict[str, torch.Tensor], numbers: dict[str, float]) -> None:
        super().restore(tensors, numbers)
        for name, state in self.kept.items():
            self.of[name].state[self.parameters[name]] = state


class Sgd(Optimizer):
    """With momentum, as torch's."""

    def _update(self, names: Iterable[str], factor: float) -> None:
        for name in names:
            parameter, gradient = self.parameters[name].detach(), self.parameters[name].grad
            assert gradient is not None
            step = gradient.mul_(factor).add_(parameter, alpha=self.train.weight_decay)
            if self.train.momentum:
                if name not in self.kept:
                    self.kept[name] = {"first": torch.zeros_like(parameter)}
                step = self.kept[name]["first"].mul_(self.train.momentum).add_(step)
            parameter.sub_(step, alpha=self.rate(name))


def make(parameters: Parameters, train: TrainConfig, how: ExecutionConfig, backend: Backend) -> Optimizer:
    kind = Sgd if train.optimizer == "sgd" else Fused if backend.fused_adamw else Plain
    if kind is Sgd and how.optimizer_state != "fp32":
        raise ConfigError(
            "`train.optimizer: sgd` keeps its momentum as float32, unless weights are int8",
            "--set how.optimizer_state=fp32, or --set update.method=qas",
        )
    if how.weights == "bf16" and kind is not Fused:
        needed = "--set how.compile=on and train.optimizer=adamw, or how.weights=fp32"
        raise ConfigError("`how.weights: bf16` needs edgeft's kernels and AdamW", needed)
    if kind is Plain and how.optimizer_state == "bf16":
        needed = "--set how.compile=on, or optimizer_state=8bit"
        raise ConfigError("`how.optimizer_state: bf16` needs edgeft's kernels", needed)
    return kind(parameters, train, how, backend)
