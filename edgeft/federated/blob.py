"""A header and named arrays as bytes: tasks on the wire, and the state files of server and devices.

The bytes are those of a safetensors file behind a checksum; whatever else is read is a DataError. numpy only.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from edgeft.errors import DamagedError, DataError
from edgeft.host.files import atomic_write

Arrays = dict[str, npt.NDArray[Any]]
_CRC_BYTES = 4


def pack(header: dict[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    data = safetensors.numpy.save(whole, {"edgeft": json.dumps(header, sort_keys=True)})
    return zlib.crc32(data).to_bytes(_CRC_BYTES, "little") + data


def unpack(data: bytes) -> tuple[dict[str, Any], Arrays]:
    body = data[_CRC_BYTES:]
    if zlib.crc32(body) != int.from_bytes(data[:_CRC_BYTES], "little") or len(body) < 8:
        raise DataError("its checksum is wrong")
    try:
        arrays = safetensors.numpy.load(body)  # checks every length and offset
        size = int.from_bytes(body[:8], "little")
        header = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["edgeft"])
    except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"it cannot be read: {error}") from None
    if not isinstance(header, dict):
        raise DataError("its header is no table of keys")
    return header, arrays


def part(arrays: Arrays, mark: str) -> Arrays:
    """Those whose names begin with the mark, without it."""
    return {name[len(mark) :]: array for name, array in arrays.items() if name.startswith(mark)}


def write(path: Path, data: bytes) -> None:
    with atomic_write(path) as file:
        file.write(data)


def read(path: Path, hint: str) -> tuple[dict[str, Any], Arrays] | None:
    """None if the file does not exist; DamagedError with this hint if it is not what was written."""
    try:
        return unpack(path.read_bytes())
    except FileNotFoundError:
        return None
    except DataError as error:
        raise DamagedError(f"{path} is damaged: {error.message}", hint) from None
