"""What happens in a run, as typed lines of metrics.jsonl.

A line is one JSON object with `time` and `event`; a line of another version that does not fit its type is skipped.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar


@dataclass(frozen=True)
class Event:
    name: ClassVar[str]  # `step` for StepEvent, unless the class sets another

    def __init_subclass__(cls) -> None:
        cls.name = cls.__dict__.get("name", cls.__name__.removesuffix("Event").lower())

    def to_json(self) -> dict[str, Any]:
        """Without the fields that are None."""
        return {"event": self.name, **{key: value for key, value in asdict(self).items() if value is not None}}


E = TypeVar("E", bound=Event)


def read_events(kind: type[E], lines: Iterable[dict[str, Any]]) -> list[E]:
    """The events of one kind; lines that do not fit are skipped."""
    hints = typing.get_type_hints(kind)
    known = [f.name for f in fields(kind)]
    events = []
    for line in lines:
        values = {key: line[key] for key in known if key in line}
        if line.get("event") == kind.name and all(_fits(value, hints[key]) for key, value in values.items()):
            try:
                events.append(kind(**values))
            except TypeError:  # a field is missing
                continue
    return events


def _fits(value: Any, hint: Any) -> bool:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    allowed = tuple(typing.get_origin(option) or option for option in options)
    if isinstance(value, bool):
        return bool in allowed
    return isinstance(value, (*allowed, int) if float in allowed else allowed)


@dataclass(frozen=True)
class StageEvent(Event):
    """The part of a stage in one process; a resumed stage has several. A nested stage (trunk in train) has its own, and
    its seconds count only there."""

    stage: str  # prepare, search, trunk, train, export, eval
    begin: float  # seconds since 1970
    end: float
    worked_s: float  # without pauses
    paused_s: float
    peak_bytes: int  # highest resident memory of the process so far
    complete: bool = True  # False: it failed or was stopped


@dataclass(frozen=True)
class PrepareEvent(Event):
    format: str
    seconds: float
    machine: str
    train_rows: int
    heldout_rows: int
    train_tokens: int
    dropped: int
    skipped: int
    cut: int  # rows whose context was shortened


@dataclass(frozen=True)
class SchemeEvent(Event):
    cut: int  # blocks below it are frozen and run once
    blocks: list[int]
    trained_parameters: int


@dataclass(frozen=True)
class ExportEvent(Event):
    path: str
    format: str
    bytes: int
    types: dict[str, int]
    check: dict[str, Any]


@dataclass(frozen=True)
class EvalEvent(Event):
    suite: str
    who: str  # base or tuned
    rows: int
    seconds: float


@dataclass(frozen=True)
class StepEvent(Event):
    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    flops: float
    seconds: float
    rss_bytes: int
    planned_bytes: int
    left_s: float | None = None  # remaining seconds, all later stages included


@dataclass(frozen=True)
class ValidationEvent(Event):
    step: int
    heldout_loss: float
    seconds: float
    best: bool | None = None  # None: before the first step


@dataclass(frozen=True)
class CheckpointEvent(Event):
    step: int
    seconds: float


@dataclass(frozen=True)
class ResumeEvent(Event):
    step: int


@dataclass(frozen=True)
class SkippedEvent(Event):
    """A step whose loss or gradient is NaN or infinite."""

    step: int
    why: str
    in_row: int


@dataclass(frozen=True)
class RollbackEvent(Event):
    name = "back"
    step: int
    rate: float  # factor of the learning rate from here on


@dataclass(frozen=True)
class DamagedEvent(Event):
    file: str
    what: str


@dataclass(frozen=True)
class MemoryEvent(Event):
    """Memory was short: micro-batches are smaller from here on, or the run stopped."""

    why: str
    rss_bytes: int
    micro_batch_tokens: int | None = None
    available_bytes: int | None = None
    stopped: bool | None = None


@dataclass(frozen=True)
class PauseEvent(Event):
    """Every 30 s: temperature, battery, and the paused time since the last one."""

    name = "governor"
    paused_s: dict[str, float] = field(default_factory=dict)  # by reason
    throttled: list[str] = field(default_factory=list)
    celsius: float | None = None
    battery_percent: float | None = None
    pausing: str | None = None  # reason of the present pause
    share: float | None = None  # duty cycle, if below 1
