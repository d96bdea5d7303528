"""AdamW, or SGD, over the trained tensors: all together, or each as soon as its gradient is there.

What it keeps can be written to a checkpoint and read again, bit for bit.
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
from edgeft.engine.kernels import Kernels, Rule
from edgeft.engine.limits import GROUP
from edgeft.errors import ConfigError, RunError

EPS = 1e-8  # torch's own
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}


class Optimizer:
    """What does not depend on who computes: clipping, and when a tensor is updated."""

    def __init__(self, parameters: dict[str, nn.Parameter], train: TrainConfig, how: ExecutionConfig) -> None:
        self.parameters, self.train, self.in_place = parameters, train, how.step_in_place
        self.names = {parameter: name for name, parameter in parameters.items()}
        self.lr = self.bias_lr = train.lr
        self.kept: dict[str, dict[str, Any]] = {}  # by a parameter's name: tensors and numbers
        self._squares, self._seen = 0.0, 0  # of the gradients seen so far in this step, and how many numbers they have
        self.norm: float | None = None  # of the step before, where tensors are updated in place
        self._good = True  # the step's loss is a number

    def set_rate(self, lr: float, bias_lr: float | None = None) -> None:
        """bias_lr: of biases and norms; None: the same."""
        self.lr, self.bias_lr = lr, lr if bias_lr is None else bias_lr

    def rate(self, parameter: torch.Tensor) -> float:
        return self.bias_lr if parameter.dim() == 1 else self.lr

    @contextmanager
    def last_pass(self, loss: float) -> Iterator[None]:
        """Around the backward pass that completes a step's gradients; `loss` is the whole step's."""
        self._squares, self._seen = 0.0, 0
        self._good = math.isfinite(loss)
        if not self.in_place:
            yield
            return
        handles, active = [], [p for p in self.parameters.values() if p.requires_grad]
        for parameter in active:
            handles.append(parameter.register_post_accumulate_grad_hook(self._use))
            parameter.gradient_ready = self._use  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for handle, parameter in zip(handles, active, strict=True):
                handle.remove()
                del parameter.gradient_ready  # type: ignore[attr-defined]

    def _use(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        square = self._square(parameter.grad)
        self._squares += square
        self._seen += parameter.numel()
        if self._good and math.isfinite(square):
            self._update([self.names[parameter]], self._factor(self._foreseen()))  # type: ignore[index]
        parameter.grad = parameter.spare_gradient = None  # type: ignore[attr-defined]

    def _foreseen(self) -> float:
        """The norm of the whole gradient, of which a part is there: the last step's, or in the first by what is."""
        if self.norm is not None:
            return self.norm
        every = sum(p.numel() for p in self.parameters.values() if p.requires_grad)
        return math.sqrt(self._squares * every / self._seen)

    def _factor(self, norm: float) -> float:
        return min(1.0, self.train.clip / (norm + 1e-6)) if self.train.clip else 1.0

    def step(self) -> float:
        """The gradient's norm, before it was clipped; gradients are gone after it.

        Where loss or norm is no finite number, nothing is updated (in place: no tensor whose own gradient is none).
        """
        if self.in_place:
            norm = math.sqrt(self._squares)
            self.norm = norm if self._good and math.isfinite(norm) else self.norm
            return norm
        there = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        norm = math.sqrt(sum(map(self._square, there.values())))
        if self._good and math.isfinite(norm):
            self._update(there, self._factor(norm))
        self.clear()
        return norm

    def forget(self) -> None:
        """As if no step had been taken."""
        self.clear()
        self.kept.clear()
        self.norm = None

    def keep(self, names: set[str]) -> None:
        """Forgets what it remembers of all others."""
        self.kept = {name: kept for name, kept in self.kept.items() if name in names}

    def clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _square(self, gradient: torch.Tensor) -> float:
        """The sum of its squares."""
        raise NotImplementedError

    def _update(self, names: Iterable[str], factor: float) -> None:
        """A step of these tensors, whose gradients count `factor` times."""
        raise NotImplementedError

    # ------------------------------------------------ checkpoints

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


class Compiled(Optimizer):
    """By edgeft's kernels: one pass over memory, and moments of 4, 2 or 1 byte."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], train: TrainConfig, how: ExecutionConfig, kernels: Kernels
    ) -> None:
        super().__init__(parameters, train, how)
        self.kernels, self.moments = kernels, MOMENTS[how.optimizer_state]

    def restore(self, tensors: dict[str, torch.Tensor], numbers: dict[str, float]) -> None:
        super().restore(tensors, numbers)
        if any("first" not in parts for parts in self.kept.values()):
            raise RunError(
                "the run's checkpoint is of an earlier edgeft, whose AdamW kept other numbers",
                "start the run anew in another folder (--out): its rows and cache are used again",
            )

    def _square(self, gradient: torch.Tensor) -> float:
        return self.kernels.squares(gradient.contiguous())

    def _update(self, names: Iterable[str], factor: float) -> None:
        t = self.train
        for name in names:
            parameter = self.parameters[name]
            kept = self.kept.setdefault(name, {})
            if not kept:
                kept |= {
                    "step": 0.0,
                    "first": torch.zeros(parameter.shape, dtype=self.moments),
                    "second": torch.zeros(parameter.shape, dtype=self.moments),
                }
                if self.moments == torch.uint8:
                    kept["scales"] = torch.zeros(-(-parameter.numel() // GROUP), 2)
            kept["step"] += 1.0
            rule = Rule(
                self.rate(parameter), t.beta1, t.beta2, EPS, t.weight_decay,
                1 - t.beta1 ** kept["step"], 1 - t.beta2 ** kept["step"], factor,
                zlib.crc32(f"{t.seed} {kept['step']:.0f} {name}".encode()),
            )  # fmt: skip
            assert parameter.grad is not None
            gradient = parameter.grad.contiguous()
            self.kernels.adamw(parameter.detach(), gradient, kept["first"], kept["second"], kept.get("scales"), rule)


class Plain(Optimizer):
    """By torch; moments of one byte by bitsandbytes."""

    def __init__(self, parameters: dict[str, nn.Parameter], train: TrainConfig, how: ExecutionConfig) -> None:
        super().__init__(parameters, train, how)
        if how.optimizer_state == "bf16":
            raise ConfigError(
                "`how.optimizer_state: bf16` needs edgeft's kernels", "--set how.compile=on, or optimizer_state=8bit"
            )
        groups = [[p] for p in parameters.values()] if self.in_place else [list(parameters.values())]
        self.parts = [_adamw(_by_rate(group), train, how) for group in groups]
        self.of = {name: self.parts[number if self.in_place else 0] for number, name in enumerate(parameters)}

    def _square(self, gradient: torch.Tensor) -> float:
        return float(gradient.norm()) ** 2

    def _update(self, names: Iterable[str], factor: float) -> None:
        names = list(names)
        if factor != 1.0:
            for name in names:
                gradient = self.parameters[name].grad
                assert gradient is not None
                gradient.mul_(factor)
        for part in {id(part): part for part in map(self.of.__getitem__, names)}.values():
            for group in part.param_groups:
                group["lr"] = self.rate(group["params"][0])
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
        for name, found in self.kept.items():
            self.of[name].state[self.parameters[name]] = found


class Sgd(Optimizer):
    """With momentum, as torch's."""

    def __init__(self, parameters: dict[str, nn.Parameter], train: TrainConfig, how: ExecutionConfig) -> None:
        super().__init__(parameters, train, how)
        if how.optimizer_state != "fp32":
            raise ConfigError(
                "`train.optimizer: sgd` keeps its momentum as float32, unless weights are int8",
                "--set how.optimizer_state=fp32, or --set update.method=qas",
            )

    def _square(self, gradient: torch.Tensor) -> float:
        return float(gradient.norm()) ** 2

    def _update(self, names: Iterable[str], factor: float) -> None:
        for name in names:
            parameter = self.parameters[name].detach()
            gradient = self.parameters[name].grad
            assert gradient is not None
            step = gradient.mul_(factor).add_(parameter, alpha=self.train.weight_decay)
            if self.train.momentum:
                if name not in self.kept:
                    self.kept[name] = {"first": torch.zeros_like(parameter)}
                step = self.kept[name]["first"].mul_(self.train.momentum).add_(step)
            parameter.sub_(step, alpha=self.rate(parameter))


def make(
    parameters: dict[str, nn.Parameter], train: TrainConfig, how: ExecutionConfig, kernels: Kernels | None
) -> Optimizer:
    if train.optimizer == "sgd":
        return Sgd(parameters, train, how)
    return Compiled(parameters, train, how, kernels) if kernels else Plain(parameters, train, how)


def _by_rate(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """torch's groups: weights, and biases and norms."""
    groups = [[p for p in parameters if (p.dim() == 1) == small] for small in (False, True)]
    return [{"params": group} for group in groups if group]


def _adamw(parameters: list[dict[str, Any]], train: TrainConfig, how: ExecutionConfig) -> Any:
    settings = {"lr": train.lr, "betas": (train.beta1, train.beta2), "weight_decay": train.weight_decay}
    if how.optimizer_state == "8bit":
        from bitsandbytes.optim import AdamW8bit  # type: ignore[attr-defined]

        return AdamW8bit(parameters, **settings)
    return torch.optim.AdamW(parameters, fused=True, **settings)  # type: ignore[arg-type]
