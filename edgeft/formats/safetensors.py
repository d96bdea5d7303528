"""Tensors of a safetensors folder, mapped on demand; every offset is checked."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from edgeft.errors import ModelError
from edgeft.formats import ggml
from edgeft.formats.source import INDEX, read_json_file

DTYPES = {"F32": (torch.float32, ggml.F32), "F16": (torch.float16, ggml.F16), "BF16": (torch.bfloat16, ggml.BF16)}
MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format
MAX_TENSORS = 1 << 18


@dataclass(frozen=True)
class Place:
    """File, type, shape and offset of a tensor."""

    file: Path
    dtype: str  # as safetensors names it: F32, F16, BF16 …
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int


def _header(file: Path) -> Iterator[tuple[str, Place]]:
    """The tensors of one safetensors file; every offset is checked against the file's size."""
    bad = ModelError(f"{file} is damaged or cut short", "download or copy it again")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise bad
            entries = json.loads(stream.read(length))
            if not isinstance(entries, dict) or len(entries) > MAX_TENSORS:
                raise bad
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}", "download or copy the model again") from None
    except (ValueError, RecursionError):
        raise bad from None
    try:
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            numbers = all(type(n) is int and n >= 0 for n in (start, end, *shape))
            if not numbers or not start <= end <= size - 8 - length:
                raise bad
            if entry["dtype"] in DTYPES and end - start != DTYPES[entry["dtype"]][0].itemsize * math.prod(shape):
                raise bad
            yield name, Place(file, entry["dtype"], shape, 8 + length + start, end - start)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise bad from None


def _renamed(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    for theirs, ours in pairs:
        name = name.replace(theirs, ours)
    return name


class Weights:
    """The tensors of a folder, by transformers' names without the leading `model.`; renamed: see Architecture."""

    def __init__(self, folder: Path, renamed: Sequence[tuple[str, str]] = ()) -> None:
        self.folder = folder
        self.files = self._files()
        self.stored = {name: place for file in self.files for name, place in _header(file)}  # by the files' own names
        self.prefix = "model." if any(name.startswith("model.") for name in self.stored) else ""
        self.places = {_renamed(name.removeprefix("model."), renamed): place for name, place in self.stored.items()}

    def _files(self) -> list[Path]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                names = sorted({str(name) for name in read_json_file(index)["weight_map"].values()})
            except (ValueError, KeyError, AttributeError, TypeError):
                raise ModelError(f"{index} cannot be read", "download or copy the model again") from None
            if any(Path(name).name != name for name in names):  # a shard is in the folder itself
                raise ModelError(f"{index} points outside its folder")
            return [self.folder / name for name in names]
        if (self.folder / "model.safetensors").is_file():
            return [self.folder / "model.safetensors"]
        if list(self.folder.glob("*.bin")) or list(self.folder.glob("*.pth")):
            raise ModelError(
                f"{self.folder} has its weights only as pickles, which can execute code when loaded",
                "convert them with save_pretrained(…, safe_serialization=True), or use a safetensors version",
            )
        hint = "give the folder that transformers' save_pretrained wrote"
        raise ModelError(f"{self.folder} has no model.safetensors", hint)

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def place(self, name: str, shape: tuple[int, ...]) -> Place:
        place = self.places.get(name)
        if place is None:
            raise ModelError(f"{self.folder} lacks the tensor {name}", "download or copy the model again")
        if place.shape != shape:
            raise ModelError(f"{self.folder}: {name} is {place.shape}, not {shape} as config.json says")
        if place.dtype not in DTYPES:
            raise ModelError(f"{self.folder}: {name} is of type {place.dtype}", f"supported: {', '.join(DTYPES)}")
        return place

    def mapped(self, name: str, shape: tuple[int, int]) -> tuple[np.ndarray, int]:
        """(mapped bytes, ggml type) of a matrix."""
        place = self.place(name, shape)
        data = np.memmap(place.file, np.uint8, "r", place.offset, (place.nbytes,))
        return data, DTYPES[place.dtype][1]

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A copy in the file's own type."""
        return self._read(self.place(name, shape), shape)

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """A copy of these rows of a matrix, or numbers of a vector."""
        known = self.places.get(name)
        place = self.place(name, known.shape if known else ())
        if not 0 <= rows.start < rows.stop <= place.shape[0]:
            raise ModelError(f"{self.folder}: {name} has no rows {rows.start} to {rows.stop}")
        row_bytes = place.nbytes // place.shape[0]
        shape = (rows.stop - rows.start, *place.shape[1:])
        offset = place.offset + rows.start * row_bytes
        return self._read(replace(place, offset=offset, nbytes=shape[0] * row_bytes), shape)

    def _read(self, place: Place, shape: tuple[int, ...]) -> torch.Tensor:
        with place.file.open("rb") as stream:
            stream.seek(place.offset)
            data = bytearray(stream.read(place.nbytes))
        return torch.frombuffer(data, dtype=DTYPES[place.dtype][0]).view(shape)
