"""A federation on one machine, for trials: devices in turns, each with a run folder of its own, and no network.

What passes between server and devices is the same bytes as over the network.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeft.config import Recipe
from edgeft.data.files import Paragraph, Unusable, find
from edgeft.errors import ConfigError, DataError, EdgeftError
from edgeft.federated.device import Device, Step, open_device
from edgeft.federated.server import Reply
from edgeft.federated.task import Terms
from edgeft.host.files import atomic_write
from edgeft.run.progress import Progress

SPLIT_HINT = "use `random`, or a column of the rows: `by:article`"
SIGNALS = 128  # exit codes from here on: a device that was stopped or killed ends the simulation, too


class LocalFleet:
    """Devices of this machine, one at a time."""

    def __init__(self, devices: list[Device], progress: Progress) -> None:
        self.devices, self.progress = devices, progress

    def wait_for(self, count: int) -> int:
        return len(self.devices)

    def ask(self, task_of: Callable[[str], bytes]) -> Iterable[Reply]:
        for device in self.devices:
            try:
                yield device.answer(task_of(device.name))
            except EdgeftError as error:
                if error.exit_code >= SIGNALS:
                    raise
                yield Reply(device.name, error=error.message)


def open_devices(folder: Path, terms: Terms, own: Recipe, how: tuple[int, str], step: Step) -> list[Device]:
    """own: with all rows; how: the number of devices, and how the rows are split over them."""
    devices = []
    for number, file in enumerate(split(str(own.data.path), how[1], how[0], folder / "rows", limit=own.data.rows), 1):
        recipe = replace(own, data=replace(own.data, path=str(file), rows=None))
        run = open_device(folder / "devices" / str(number), terms, recipe)
        devices.append(Device(f"device-{number}", run, terms, step))
    return devices


def records(path: str) -> Iterator[dict[str, Any]]:
    """The training rows of a file or folder, as they stand there."""
    for source in find(path)[0]:
        for where, record in source.records:
            if isinstance(record, Paragraph | Unusable) or not isinstance(record, dict):
                raise DataError(f"{where} is no row with named columns", "split tables: JSON, JSONL, CSV or Parquet")
            yield record


def split(path: str, how: str, count: int, folder: Path, seed: int = 0, limit: int | None = None) -> list[Path]:
    """One file of rows for each of so many devices; with `by:COLUMN`, equal values are on the same device.

    Values go, the most frequent first, to the device with the fewest rows.
    """
    rows = [record for record, _ in zip(records(path), range(limit or 1 << 62), strict=False)]
    if how != "random" and not (how.startswith("by:") and how[3:]):
        raise ConfigError(f"`--split {how}` is unknown", SPLIT_HINT)
    groups: dict[Any, list[dict[str, Any]]] = {}
    for number, row in enumerate(rows):
        if how != "random" and how[3:] not in row:
            raise ConfigError(f"row {number + 1} has no column `{how[3:]}`; it has {', '.join(row)[:200]}", SPLIT_HINT)
        groups.setdefault(number if how == "random" else json.dumps(row[how[3:]], sort_keys=True), []).append(row)
    if len(groups) < count:
        what = f"{len(rows)} rows" if how == "random" else f"{len(groups)} values in column `{how[3:]}`"
        raise ConfigError(f"{what} cannot be split over {count} devices", "use fewer with --clients")
    order = list(groups)
    random.Random(seed).shuffle(order)
    shares: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    for key in sorted(order, key=lambda key: -len(groups[key])):
        min(shares, key=len).extend(groups[key])
    files = []
    for number, share in enumerate(shares):
        file = folder / f"device-{number + 1}.jsonl"
        with atomic_write(file) as out:
            out.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in share).encode())
        files.append(file)
    return files
