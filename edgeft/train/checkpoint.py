"""Checkpoints: one safetensors file each, with its place in the run and a checksum as JSON in the file's header.

One is written whole or not at all, holds all that the next step depends on, and is not used if any bit of it changed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from edgeft.errors import DamagedError, EdgeftError, RunError
from edgeft.host.files import atomic_write, wrap_os_errors
from edgeft.run.folder import Run

Found = tuple[dict[str, torch.Tensor], dict[str, Any]]  # tensors and state
Tell = Callable[[Path, str], None]  # what is wrong with a file
Place = Callable[[str, list[int], torch.dtype], torch.Tensor | None]  # what a tensor is read into; None: it is not

SHARE = 0.02  # of the time may go into writing checkpoints: they come less often where the disk is slow
UNSUMMED = "0" * 8  # the checksum is taken with this in its place, over the whole file
_MARK = rb"\"crc32\": \""  # as it stands in the header: JSON within JSON
_PIECE = 1 << 22  # bytes summed at a time
_HEADER_BYTES = 100_000_000  # safetensors' own limit
_DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64", torch.bool: "BOOL",
    torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
_TYPES = {name: dtype for dtype, name in _DTYPES.items()}


def write(path: Path, tensors: Mapping[str, torch.Tensor], state: dict[str, Any]) -> None:
    """Not by safetensors' own writer: that one writes another file and renames it, so that nobody can fsync it."""
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))  # every tensor aligned
    header: dict[str, Any] = {"__metadata__": {"edgeft": json.dumps({"crc32": UNSUMMED, **state})}}
    end = 0
    for key in order:
        begin, end = end, end + tensors[key].nbytes
        dtype = _DTYPES[tensors[key].dtype]
        header[key] = {"dtype": dtype, "shape": list(tensors[key].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    with atomic_write(path) as file:
        file.write(head)
        found = zlib.crc32(head)
        for key in order:
            data = tensors[key].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            file.write(data)
            found = zlib.crc32(data, found)
        file.seek(head.index(_MARK) + len(_MARK))
        file.write(f"{found:08x}".encode())


def fresh(_: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def nowhere(*_: object) -> None:
    """A file that is only looked at."""


def into(parameters: Mapping[str, torch.Tensor]) -> Place:
    """Weights where they are used; only what else the file holds takes memory of its own."""

    def place(name: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        found = parameters.get(name)
        if found is None:
            return fresh(name, shape, dtype)
        if list(found.shape) != shape or found.dtype != dtype:
            raise EdgeftError(
                f"{name} is {shape} in the checkpoint, and {list(found.shape)} in the model",
                "go on with the model and recipe that the run was made with",
            )
        return found.detach()

    return place


def read(path: Path, place: Place = fresh) -> Found:
    """What was written; DamagedError if it is not that any more, RunError if it cannot be read at all.

    Nothing is read into its place before the whole file was found to be good.
    """
    try:
        with path.open("rb") as file:
            at = _sum_place(file)
            file.seek(at)
            said = file.read(len(UNSUMMED))
            if f"{_crc(file, at):08x}".encode() != said:
                raise ValueError("its checksum is wrong")
            with safe_open(path, framework="pt") as checked:  # every length and offset
                state = json.loads((checked.metadata() or {})["edgeft"])
            return _tensors(file, place), state
    except OSError as error:
        raise RunError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from None


def _tensors(file: IO[bytes], place: Place) -> dict[str, torch.Tensor]:
    """Read, not mapped: a mapped file may be gone, or unreadable, by the time that a page of it is wanted."""
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    found: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        target = None if name == "__metadata__" else place(name, entry["shape"], _TYPES[entry["dtype"]])
        if target is None:
            continue
        file.seek(8 + size + entry["data_offsets"][0])
        data = memoryview(target.view(-1).view(torch.uint8).numpy().data)
        at = 0
        while at < len(data):
            got = file.readinto(data[at:])  # type: ignore[attr-defined]
            if not got:
                raise ValueError("it is cut short")
            at += got
        found[name] = target
    return found


def _sum_place(file: IO[bytes]) -> int:
    """Where the checksum stands."""
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    if size > _HEADER_BYTES:
        raise ValueError("it has no header")
    found = file.read(size).find(_MARK)
    if found < 0:
        raise ValueError("it has no checksum")
    return 8 + found + len(_MARK)


def _crc(file: IO[bytes], place: int) -> int:
    """Of the whole file, with UNSUMMED at `place`."""
    file.seek(0)
    found = zlib.crc32(UNSUMMED.encode(), zlib.crc32(file.read(place)))
    file.seek(place + len(UNSUMMED))
    while piece := file.read(_PIECE):
        found = zlib.crc32(piece, found)
    return found


def name(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.safetensors"


def all_of(folder: Path) -> list[Path]:
    """The newest last."""
    return sorted(folder.glob("step-*.safetensors"))


def newest(folder: Path, tell: Tell, place: Place = fresh) -> Found | None:
    """The last one that is whole; damaged ones after it are told and taken away: they would count among those kept."""
    for path in reversed(all_of(folder)):
        try:
            return read(path, place)
        except RunError as error:
            tell(path, error.message)
            if isinstance(error, DamagedError):
                _delete(path)
    return None


def best(run: Run, best_step: int, tell: Tell, place: Place = fresh) -> Found:
    """The run's best one; if it is damaged, it is made again from the checkpoint of its step, where that is kept."""
    try:
        return read(run.best, place)
    except RunError as error:
        damage = error
    try:
        tensors, state = read(name(run.checkpoints, best_step))
    except RunError:
        raise DamagedError(
            damage.message,
            f"train it again, to the same weights: delete done.json and checkpoints in {run.path}, then --resume",
        ) from None
    tell(run.best, f"{damage.message}; made again from the checkpoint of step {best_step}")
    kept = {key: value for key, value in tensors.items() if not key.startswith("adamw.")}
    found = {"step": best_step, "heldout_loss": state["best_loss"]}
    write(run.best, kept, found)
    del tensors, kept
    return read(run.best, place)


def rotate(folder: Path, keep: int, start: bool) -> None:
    """Leaves the newest `keep`, and with `start` the one of step 0."""
    for path in all_of(folder)[:-keep]:
        if not start or path != name(folder, 0):
            _delete(path)


def drop_after(folder: Path, step: int) -> None:
    """Takes away those of later steps, the newest last: whoever is killed here finds one from before going back."""
    for path in all_of(folder):
        if path > name(folder, step):
            _delete(path)


def _delete(path: Path) -> None:
    with wrap_os_errors(path):
        path.unlink(missing_ok=True)
