"""Checkpoints: one safetensors file each, with the training state and a checksum as JSON in the file's header.

Writes are atomic. A checkpoint holds everything that the next step depends on, and is rejected if any bit changed.
The best one is a checkpoint as well, under a second name: training can resume from it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from edgeft.errors import DamagedError, EdgeftError, RunError
from edgeft.host.files import atomic_write, sync_folder, wrap_os_errors
from edgeft.run.folder import Run

Checkpoint = tuple[dict[str, torch.Tensor], dict[str, Any]]  # tensors and state
Report = Callable[[Path, str], None]  # a file and what is wrong with it
Allocate = Callable[[str, list[int], torch.dtype], torch.Tensor | None]  # a tensor's destination; None: it is skipped

NO_CRC = "0" * 8  # the checksum covers the whole file, with this in its place
_MARK = rb"\"crc32\": \""  # precedes the checksum in the header: JSON within JSON
_PIECE = 1 << 22  # bytes read at a time
_HEADER_BYTES = 100_000_000  # safetensors' own limit
_DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64", torch.bool: "BOOL",
    torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
_TYPES = {name: dtype for dtype, name in _DTYPES.items()}


def write(path: Path, tensors: Mapping[str, torch.Tensor], state: dict[str, Any]) -> None:
    """Not with safetensors' own writer: it renames a temporary file of its own, which cannot be fsynced."""
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))  # keeps every tensor aligned
    header: dict[str, Any] = {"__metadata__": {"edgeft": json.dumps({"crc32": NO_CRC, **state})}}
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
        crc = zlib.crc32(head)
        for key in order:
            data = tensors[key].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            file.write(data)
            crc = zlib.crc32(data, crc)
        file.seek(head.index(_MARK) + len(_MARK))
        file.write(f"{crc:08x}".encode())


def allocate(_: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def skip(*_: object) -> None:
    """Checks the file; reads no tensor."""


def into(parameters: Mapping[str, torch.Tensor], others: Allocate = allocate) -> Allocate:
    """Reads into these parameters in place; other tensors of the file are allocated, or with `skip` not read."""

    def destination(name: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor | None:
        parameter = parameters.get(name)
        if parameter is None:
            return others(name, shape, dtype)
        if list(parameter.shape) != shape or parameter.dtype != dtype:
            raise EdgeftError(
                f"{name} is {shape} in the checkpoint, and {list(parameter.shape)} in the model",
                "continue with the model and recipe that the run was made with",
            )
        return parameter.detach()

    return destination


def read(path: Path, destination: Allocate = allocate) -> Checkpoint:
    """DamagedError if its bytes changed, RunError if it cannot be read.

    The whole file is verified before any tensor is read.
    """
    try:
        with path.open("rb") as file:
            at = _crc_offset(file)
            file.seek(at)
            stored = file.read(len(NO_CRC))
            if f"{_crc(file, at):08x}".encode() != stored:
                raise ValueError("its checksum is wrong")
            with safe_open(path, framework="pt") as checked:  # checks every length and offset
                state = json.loads((checked.metadata() or {})["edgeft"])
            return _tensors(file, destination), state
    except OSError as error:
        raise RunError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from None


def _tensors(file: IO[bytes], destination: Allocate) -> dict[str, torch.Tensor]:
    """Read, not mapped: a mapped file may be deleted or unreadable by the time of a page fault."""
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        target = None if name == "__metadata__" else destination(name, entry["shape"], _TYPES[entry["dtype"]])
        if target is None:
            continue
        file.seek(8 + size + entry["data_offsets"][0])
        data = memoryview(target.view(-1).view(torch.uint8).numpy().data)
        done = 0
        while done < len(data):
            count = file.readinto(data[done:])  # type: ignore[attr-defined]
            if not count:
                raise ValueError("it is truncated")
            done += count
        tensors[name] = target
    return tensors


def _crc_offset(file: IO[bytes]) -> int:
    """Offset of the checksum in the file."""
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    if size > _HEADER_BYTES:
        raise ValueError("it has no header")
    mark = file.read(size).find(_MARK)
    if mark < 0:
        raise ValueError("it has no checksum")
    return 8 + mark + len(_MARK)


def _crc(file: IO[bytes], offset: int) -> int:
    """Of the whole file, with NO_CRC at `offset`."""
    file.seek(0)
    crc = zlib.crc32(NO_CRC.encode(), zlib.crc32(file.read(offset)))
    file.seek(offset + len(NO_CRC))
    while piece := file.read(_PIECE):
        crc = zlib.crc32(piece, crc)
    return crc


def name(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.safetensors"


def all_of(folder: Path, best: Path | None = None) -> list[Path]:
    """The newest last; with `best`, if the folder does not have it under the name of its step."""
    steps = {path: path for path in sorted(folder.glob("step-*.safetensors"))}  # path → its name in the folder
    step = None if best is None or not best.is_file() else _step(best)
    if best is None or step is None or _same(name(folder, step), best):
        return list(steps)
    return sorted([best, *steps], key=lambda path: steps.get(path, name(folder, step)))


def _step(path: Path) -> int | None:
    """According to its header; None if training cannot resume from it: earlier versions kept the best weights alone."""
    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads((file.metadata() or {})["edgeft"])
        return int(state["step"]) if "optimizer" in state else None
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError):
        return None


def _same(path: Path, other: Path) -> bool:
    return path.is_file() and other.is_file() and path.samefile(other)


def newest(
    folder: Path, report: Report, destination: Allocate = allocate, best: Path | None = None
) -> Checkpoint | None:
    """The newest valid one; damaged ones are reported and deleted, else `make_room` would count them as kept."""
    for path in reversed(all_of(folder, best)):
        try:
            return read(path, destination)
        except RunError as error:
            report(path, error.message)
            if isinstance(error, DamagedError):
                if best is not None and _same(path, best):
                    delete(best)
                delete(path)
    return None


def best(run: Run, best_step: int, report: Report, destination: Allocate = allocate) -> Checkpoint:
    """The run's best one; if it is damaged, the checkpoint of its step takes its place, if there is another."""
    try:
        return read(run.best, destination)
    except RunError as error:
        damage = error
    kept = name(run.checkpoints, best_step)
    try:
        read(kept, skip)
    except RunError:
        raise DamagedError(
            damage.message,
            f"to train the same weights again, delete done.json and checkpoints in {run.path}, then --resume",
        ) from None
    report(run.best, f"{damage.message}; restored from the checkpoint of step {best_step}")
    name_best(kept, run.best)
    return read(run.best, destination)


def name_best(path: Path, best: Path) -> None:
    """Gives a checkpoint the name `best` as well: no byte is written twice.

    Where there are no hard links (FAT, Android), it loses its own name.
    """
    if _same(path, best):
        return
    temporary = best.with_name(f".{best.name}.{os.getpid()}.tmp")
    with wrap_os_errors(best):
        try:
            os.link(path, temporary)
        except OSError:
            os.replace(path, best)
            sync_folder(path.parent)
        else:
            try:
                os.replace(temporary, best)
            finally:
                temporary.unlink(missing_ok=True)
        sync_folder(best.parent)


def make_room(folder: Path, best: Path, keep: int) -> None:
    """Before a checkpoint is written: deletes the oldest until `keep` are left.

    The best stays, or while there is none that of step 0, to roll back to; with `keep` = 1 it alone is left, and a run
    that is killed while it writes resumes from there.
    """
    paths, good = all_of(folder, best), best if best.is_file() else name(folder, 0)
    others = [path for path in paths if not _same(path, good)]
    for path in others[: max(0, len(paths) - keep)]:
        delete(path)


def drop_after(folder: Path, step: int) -> None:
    """Deletes those of later steps, the newest last: if killed here, a resume still starts before the rollback."""
    for path in all_of(folder):
        if path > name(folder, step):
            delete(path)


def delete(path: Path) -> None:
    with wrap_os_errors(path):
        path.unlink(missing_ok=True)
