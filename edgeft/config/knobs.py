"""The list of all knobs, read from the dataclasses that declare them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from edgeft.config.reader import scalar, suggest, type_name
from edgeft.config.schema import Device, Recipe
from edgeft.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Knob:
    key: str  # as `--set` takes it
    file: str  # recipe or device
    type: str
    default: Any
    choices: list[Any]  # empty: no fixed choices
    low: float | None  # limits, both included
    high: float | None
    about: str

    @property
    def limits(self) -> str:
        if self.choices:
            return "one of " + ", ".join(map(scalar, self.choices))
        if self.high is not None:
            return f"from {self.low:.12g} to {self.high:.12g}"
        return "" if self.low is None else f"at least {self.low:.12g}"


def knobs(word: str = "") -> list[Knob]:
    """Those with `word` in their key, explanation or kind of file, upper and lower case alike."""
    every = [*_knobs_of(Recipe, "recipe"), *_knobs_of(Device, "device")]
    matching = [knob for knob in every if word.lower() in f"{knob.key}\n{knob.about}\n{knob.file}".lower()]
    if not matching:
        names = sorted({part for knob in every for part in (knob.key, knob.key.rpartition(".")[2])})
        raise ConfigError(
            f"no knob has `{word}` in its key or explanation",
            hint if (hint := suggest(word, names)).startswith("did") else "`edgeft knobs` lists all of them",
        )
    return matching


def _knobs_of(cls: type[Any], file: str, prefix: str = "") -> Iterator[Knob]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _knobs_of(typing.cast(type, hint), file, f"{key}.")
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        meta = field.metadata
        yield Knob(
            key=key,
            file=file,
            type="any" if hint is Any else type_name(hint),
            default=default,
            choices=list(meta.get("choices", ())),
            low=meta.get("low"),
            high=meta.get("high"),
            about=meta["about"],
        )
        for item in typing.get_args(hint):  # update.parts: a list of tables
            if dataclasses.is_dataclass(item):
                yield from _knobs_of(typing.cast(type, item), file, f"{key}[].")
