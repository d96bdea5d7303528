"""Ctrl-C and SIGTERM as a question that the training loop answers at its next safe place."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from edgeft.host.system import stop_signals

SAME_S = 0.5  # requests to stop within this time are one


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask; the loop answers at the next safe place. A second Ctrl-C is not held back.

    One that comes along with another signal is no second one: this process and its parent were both told.
    """
    asked: list[float] = []  # when
    before: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        now = time.monotonic()
        if asked and number == signal.SIGINT and now - asked[0] > SAME_S:
            raise KeyboardInterrupt
        asked.append(now)

    try:
        for number in stop_signals():
            before[number] = signal.signal(number, note)
    except ValueError:  # not the main thread: the caller stops us in its own way
        pass
    try:
        yield lambda: bool(asked)
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
