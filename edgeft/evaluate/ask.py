"""What is wanted of a model for one prompt, and what it said.

Loss, multiple choice and answers are all asked this way, so that a prompt is computed once, whatever is wanted of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Progress = Callable[[int, int], None]  # rows done, rows in all


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    targets: list[int] = field(default_factory=list)  # places in the prompt whose tokens are to be foretold, not 0
    options: list[list[int]] = field(default_factory=list)  # continuations whose likelihood is wanted; none is empty
    generate: bool = False  # the greedy answer, too


@dataclass
class Response:
    prompt_nll: float = 0.0  # nats, summed over the targets
    option_nll: list[float] = field(default_factory=list)  # nats, summed over each option's tokens
    option_greedy: list[bool] = field(default_factory=list)  # is each of an option's tokens the likeliest?
    output: list[int] = field(default_factory=list)  # without the token that ends it


class Scorer(Protocol):
    """A model that can be scored: a GGUF file in llama.cpp, or the trainer's own stack."""

    def ask(self, asks: Sequence[Ask], max_new: int, progress: Progress | None = None) -> list[Response]:
        """In the order of `asks`; answers have at most `max_new` tokens."""
        ...
