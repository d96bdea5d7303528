"""AdamW over the trained tensors: all together, or each as soon as its gradient is there.

What it keeps can be written to a checkpoint and read again, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from edgeft.config import HowConfig, TrainConfig
from edgeft.errors import ConfigError


class Optimizer:
    def __init__(self, parameters: dict[str, nn.Parameter], train: TrainConfig, how: HowConfig) -> None:
        if how.step_in_place and train.clip:
            raise ConfigError(
                "`how.step_in_place` updates a tensor before the norm of the whole gradient is known",
                "turn clipping off with `--set train.clip=0`, or step_in_place",
            )
        self.parameters, self.clip, self.in_place = parameters, train.clip, how.step_in_place
        groups = [[p] for p in parameters.values()] if self.in_place else [list(parameters.values())]
        self.parts = [_adamw(group, train, how) for group in groups]
        self.of = {p: part for part, group in zip(self.parts, groups, strict=True) for p in group}
        self._squares = 0.0  # of the gradients seen so far in this step
        self._good = True  # the step's loss is a number

    def set_rate(self, lr: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr

    @contextmanager
    def last_pass(self, loss: float) -> Iterator[None]:
        """Around the backward pass that completes a step's gradients; `loss` is the whole step's."""
        self._squares = 0.0
        self._good = math.isfinite(loss)
        if not self.in_place:
            yield
            return
        handles = []
        for parameter in self.parameters.values():
            handles.append(parameter.register_post_accumulate_grad_hook(self._use))
            parameter.gradient_ready = self._use  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for handle, parameter in zip(handles, self.parameters.values(), strict=True):
                handle.remove()
                del parameter.gradient_ready  # type: ignore[attr-defined]

    def _use(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        norm = float(parameter.grad.norm())
        self._squares += norm**2
        if self._good and math.isfinite(norm):
            self.of[parameter].step()  # type: ignore[index]
        parameter.grad = None

    def step(self) -> float:
        """The gradient's norm, before it was clipped; gradients are gone after it.

        Where loss or norm is no finite number, nothing is updated (in place: no tensor whose own gradient is none).
        """
        if self.in_place:
            return math.sqrt(self._squares)
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), self.clip or math.inf))
        if self._good and math.isfinite(norm):
            self.parts[0].step()
        self.clear()
        return norm

    def forget(self) -> None:
        """As if no step had been taken."""
        self.clear()
        for part in self.parts:
            part.state.clear()

    def clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    # ------------------------------------------------ checkpoints

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Tensors and plain numbers, by `adamw.PART.TENSOR`."""
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, float] = {}
        for name, parameter in self.parameters.items():
            for part, value in self.of[parameter].state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"adamw.{part}.{name}"] = value
                else:
                    numbers[f"adamw.{part}.{name}"] = value
        return tensors, numbers

    def restore(self, tensors: dict[str, torch.Tensor], numbers: dict[str, float]) -> None:
        found: dict[str, dict[str, Any]] = {}
        for key, value in [*tensors.items(), *numbers.items()]:
            if key.startswith("adamw."):
                _, part, name = key.split(".", 2)
                found.setdefault(name, {})[part] = value
        for name, state in found.items():
            parameter = self.parameters[name]
            self.of[parameter].state[parameter] = state


def _adamw(parameters: list[nn.Parameter], train: TrainConfig, how: HowConfig) -> Any:
    settings = {"lr": train.lr, "betas": (train.beta1, train.beta2), "weight_decay": train.weight_decay}
    if how.optimizer_state == "8bit":
        from bitsandbytes.optim import AdamW8bit  # type: ignore[attr-defined]

        return AdamW8bit(parameters, **settings)
    return torch.optim.AdamW(parameters, fused=True, **settings)  # type: ignore[arg-type]
