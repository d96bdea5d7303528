"""Calls of the kernels' library, on this machine and on an emulated Cortex-A76, and the instructions that they take.

Needs Debian's g++-aarch64-linux-gnu and qemu-user.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgeft.engine import compiled, kernels
from edgeft.formats import ggml

HERE = Path(__file__).resolve().parent
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
QEMU = (EMULATOR, "-cpu", "cortex-a76", "-L", "/usr/aarch64-linux-gnu")
WARNINGS = ("-Wall", "-Wextra", "-Werror")
INTERFACES = (1, 2, 3, 4, 5)  # of qemu's plugins: it takes those that it knows


def missing() -> str | None:
    """The package of Debian that is not there."""
    packages = {COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user"}
    return next((package for tool, package in packages.items() if shutil.which(tool) is None), None)


def output_of(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-800:]}")
    return done.stdout


@dataclass(frozen=True)
class Buffer:
    number: int


class Calls:
    """Buffers, and calls in order; a buffer may hold addresses of others."""

    def __init__(self) -> None:
        self.buffers: list[np.ndarray] = []
        self.pointers: list[tuple[int, int, int]] = []  # (buffer, offset, buffer that it points at)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def buffer(self, content: Any, pointers: Mapping[int, Buffer] | None = None) -> Buffer:
        """An array, or anything else with bytes, and where in it addresses stand."""
        array = np.array(content) if isinstance(content, np.ndarray) else np.frombuffer(bytes(content), np.uint8).copy()
        self.buffers.append(np.ascontiguousarray(array))
        number = len(self.buffers) - 1
        self.pointers += [(number, offset, target.number) for offset, target in (pointers or {}).items()]
        return Buffer(number)

    def call(self, name: str, *arguments: Buffer | int | float | None) -> None:
        self.calls.append((name, arguments))

    def written(self, calls: int | None = None) -> bytes:
        """As replay.cpp reads it."""
        parts = [struct.pack("<q", len(self.buffers))]
        for array in self.buffers:
            parts += [struct.pack("<q", array.nbytes), array.tobytes()]
        parts.append(struct.pack("<q", len(self.pointers)))
        parts += [struct.pack("<3q", *pointer) for pointer in self.pointers]
        chosen = self.calls[:calls]
        parts.append(struct.pack("<q", len(chosen)))
        for name, arguments in chosen:
            parts.append(struct.pack("<32sq", name.encode(), len(arguments)))
            for argument in arguments:
                if isinstance(argument, Buffer):
                    parts.append(struct.pack("<2q", 1, argument.number))
                elif isinstance(argument, float):
                    parts.append(struct.pack("<qfi", 2, argument, 0))
                else:
                    parts.append(struct.pack("<2q", 0, argument or 0))
        return b"".join(parts)

    def here(self, library: Any) -> list[np.ndarray]:
        """All buffers after the calls, computed by this machine."""
        copies = [array.copy() for array in self.buffers]
        for buffer, offset, target in self.pointers:
            address = struct.pack("<q", copies[target].ctypes.data)
            copies[buffer].view(np.uint8).reshape(-1)[offset : offset + 8] = np.frombuffer(address, np.uint8)
        for name, arguments in self.calls:
            values: list[Any] = []
            for argument in arguments:
                if isinstance(argument, Buffer):
                    values.append(ctypes.c_void_p(copies[argument.number].ctypes.data))
                else:
                    values.append(
                        ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_long(argument or 0)
                    )
            library[name](*values)
        return copies


def product(
    calls: Calls, kind: int, rows: int, cols: int, depth: int, type_name: str | None, turned: bool, threads: int
) -> Buffer:
    """C (rows, cols) = A B by `kind`; B is Wᵀ if turned, else W, of that type (None: float32); cols: whole blocks."""
    random = np.random.default_rng(0)
    a = random.standard_normal((rows, depth)).astype(np.float32)
    w = random.standard_normal((cols, depth) if turned else (depth, cols)).astype(np.float32)
    number, block, width = kernels.DENSE[torch.float32], 1, w.shape[1]
    if type_name is not None:
        number = ggml.type_id(type_name)
        w, block = ggml.pack(w, number).reshape(len(w), -1), ggml.block_values(number)
    c = calls.buffer(np.zeros((rows, cols), np.float32))
    structs = (
        (kernels._Left(None, depth, 1, 0), calls.buffer(a)),
        (kernels._Right(None, None, None, w.strides[0], width, number, block, turned), calls.buffer(w)),
        (kernels._Out(None, None, cols, 1.0, 0, 0), c),
    )
    given = [calls.buffer(struct_, {0: data}) for struct_, data in structs]
    padded = -(-cols // 64) * 64
    scratch = calls.buffer(np.zeros(8 * (padded + rows) * depth + 4096, np.uint8))  # more than any kind needs
    calls.call("multiply_matrices", *given, rows, cols, depth, kind, scratch, threads)
    return c


class CortexA76:
    """Everything is built in `folder`, warnings being errors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.library, self.replay, self.plugin = folder / "kernels.so", folder / "replay", folder / "count.so"
        output_of(COMPILER, "-mcpu=cortex-a76", *compiled.FLAGS, *WARNINGS, compiled.SOURCE, "-o", self.library)
        output_of(COMPILER, "-O1", *WARNINGS, HERE / "replay.cpp", "-ldl", "-o", self.replay)

    def run(self, calls: Calls) -> list[np.ndarray]:
        """All buffers after the calls."""
        self._start(calls)
        data, place, found = (self.folder / "results").read_bytes(), 0, []
        for array in calls.buffers:
            flat = np.frombuffer(data, array.dtype, array.size, place)
            found.append(flat.reshape(array.shape))
            place += array.nbytes
        return found

    def instructions(self, calls: Calls) -> int:
        """That the last call takes."""
        every, without = (int(self._start(calls, count, counted=True)) for count in (None, len(calls.calls) - 1))
        return every - without

    def _start(self, calls: Calls, count: int | None = None, counted: bool = False) -> str:
        written = self.folder / "calls"
        written.write_bytes(calls.written(count))
        program = self.replay, self.library, written, self.folder / "results"
        if not counted:
            return output_of(*QEMU, *program)
        if self.plugin.is_file():
            return output_of(*QEMU, "-plugin", self.plugin, *program)
        for interface in INTERFACES:
            output_of("cc", "-O2", "-shared", "-fPIC", f"-DINTERFACE={interface}", HERE / "count.c", "-o", self.plugin)
            try:
                return output_of(*QEMU, "-plugin", self.plugin, *program)
            except RuntimeError as error:
                self.plugin.unlink()
                if interface == INTERFACES[-1]:
                    raise error
        raise AssertionError
