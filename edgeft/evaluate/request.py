"""A request to a model for one prompt, and the response.

Loss, multiple choice and generation are all requested this way, so that a prompt is computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from edgeft.run.progress import Progress

RowProgress = Callable[[int, int], None]  # rows done, rows in total


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    targets: list[int] = field(default_factory=list)  # positions in the prompt whose tokens are scored, not 0
    options: list[list[int]] = field(default_factory=list)  # continuations to score; none is empty
    generate: bool = False  # also the greedy answer


@dataclass
class Response:
    prompt_nll: float = 0.0  # nats, summed over the targets
    option_nll: list[float] = field(default_factory=list)  # nats, summed over each option's tokens
    option_greedy: list[bool] = field(default_factory=list)  # True if every token of the option is the likeliest
    output: list[int] = field(default_factory=list)  # without the token that ends it

    @staticmethod
    def empty(request: Request) -> Response:
        return Response(0.0, [0.0] * len(request.options), [False] * len(request.options))


class Scorer(Protocol):
    """A model that can be scored: a GGUF file in llama.cpp, or the trainer's own stack."""

    def respond(self, requests: Sequence[Request], max_new: int, progress: RowProgress | None = None) -> list[Response]:
        """In the order of `requests`; answers have at most `max_new` tokens."""
        ...


@contextmanager
def row_progress(progress: Progress, title: str, rows: int, unit: str = "rows") -> Iterator[RowProgress]:
    """One stage on the screen; a scorer calls what this yields with the rows done so far."""
    progress.stage(title, rows)
    before = 0

    def advance(done: int, _: int) -> None:
        nonlocal before
        progress.advance(done - before, unit)
        before = done

    yield advance
    progress.end()
