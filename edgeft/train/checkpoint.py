"""Checkpoints: one safetensors file each, with its place in the run as JSON in the file's header.

A checkpoint is written whole or not at all, and holds all that the next step depends on.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from edgeft.run import replacing


def write(path: Path, tensors: Mapping[str, torch.Tensor], state: dict[str, Any]) -> None:
    with replacing(path) as file:  # written through its name: the bytes are never a second time in memory
        plain = {k: v.detach().contiguous() for k, v in tensors.items()}
        try:
            save_file(plain, file.name, {"edgeft": json.dumps(state)})
        except SafetensorError as error:  # how it says that the disk is full
            raise OSError(errno.ENOSPC if "os error 28" in str(error) else errno.EIO, str(error)) from None


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        state = dict(json.loads((file.metadata() or {})["edgeft"]))
        return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118


def newest(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """The last checkpoint that can be read."""
    for path in sorted(folder.glob("step-*.safetensors"), reverse=True):
        with contextlib.suppress(SafetensorError, KeyError, ValueError, TypeError, RecursionError, OSError):
            return read(path)
    return None


def rotate(folder: Path, keep: int) -> None:
    for path in sorted(folder.glob("step-*.safetensors"))[:-keep]:
        path.unlink(missing_ok=True)


def name(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.safetensors"
