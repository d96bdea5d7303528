"""Blocks whose activations are computed again in the backward pass: only their inputs are kept.

As torch.utils.checkpoint, without the compiler and sympy that torch loads for it, 70 MB and more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Stream = tuple[torch.Tensor, torch.Tensor | None]


class _Given(torch.autograd.Function):
    """A scalar with these gradients. Passed to torch.autograd.backward, they would make it load sympy."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.gradients


def go_back(gradients: list[torch.Tensor], *outputs: torch.Tensor) -> None:
    """The backward pass from these outputs, each with its gradient."""
    with torch.enable_grad():
        start = _Given.apply(gradients, *outputs)
    start.backward()


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, function: Callable[..., Any], *given: torch.Tensor | None) -> Any:
        ctx.function = function
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        return function(*given)  # without autograd, as always in a forward

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given = [
            None if tensor is None else tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        with torch.enable_grad():
            made = ctx.function(*given)
        wanted = [(one, grad) for one, grad in zip(made, grads, strict=True) if grad is not None]
        go_back([grad for _, grad in wanted], *(one for one, _ in wanted))
        return None, None, *(None if tensor is None else tensor.grad for tensor in given)


def recomputed(function: Callable[..., Any], *streams: Stream) -> Any:
    """function(stream), or of several streams a tuple of as many."""
    alone = len(streams) == 1  # not the streams themselves: autograd keeps `flat` for longer than what it saved

    def flat(*parts: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        made = function(*zip(parts[::2], parts[1::2], strict=True))
        return tuple(made) if alone else tuple(part for stream in made for part in stream)

    # the first block's input needs no gradient, and without the anchor autograd would skip what is trained there
    anchor = torch.empty(0, requires_grad=True)
    made = _Again.apply(anchor, flat, *(part for stream in streams for part in stream))
    return made if alone else tuple(zip(made[::2], made[1::2], strict=True))
