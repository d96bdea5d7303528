"""The trunk: blocks below the cut run once over the data, and what the cut sees is kept in a file.

The file is good for exactly one model, cut, set of tokens and format; anything else makes it anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import numpy as np
import torch

from edgeft.data.tree import Forest
from edgeft.errors import ModelError
from edgeft.model.stack import Batch, Stack
from edgeft.run import Run, writing
from edgeft.train.progress import Progress

FORMAT = 1
DTYPES = {"fp16": np.float16, "fp32": np.float32}
ROWS_PER_SYNC = 256  # after so many rows the place reached is written down
WITHOUT_GRADIENT = 2  # micro-batches may be so many times larger where no activation is kept for a backward pass


def key(stack: Stack, forest: Forest, cut: int, dtype: str, model_id: str) -> str:
    """Changes when anything changes that the cached states depend on."""
    digest = hashlib.sha256(f"{FORMAT}|{model_id}|{cut}|{dtype}|{stack.width}".encode())
    for part in (forest.tokens, forest.parents):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


class Trunk:
    """What the cut sees, by forest node."""

    def __init__(self, stack: Stack, cut: int, states: np.ndarray | None) -> None:
        self.stack, self.cut, self.states = stack, cut, states

    def hidden(self, nodes: np.ndarray, batch: Batch) -> torch.Tensor:
        """(T, d) float32."""
        if self.cut == 0:
            return self.stack.embed(batch.tokens)  # type: ignore[no-any-return]
        if self.states is None:
            return self.stack.trunk(batch, self.cut)
        return torch.from_numpy(self.states[nodes].astype(np.float32))


def prepare(
    run: Run,
    stack: Stack,
    forest: Forest,
    cut: int,
    model_id: str,
    progress: Progress,
    stopping: Callable[[], bool],
) -> Trunk | None:
    """Fills the cache, or takes it as it is when it is whole; None when asked to stop on the way."""
    how = run.recipe.how
    if cut == 0 or how.trunk == "rerun":
        return Trunk(stack, cut, None)
    wanted = key(stack, forest, cut, how.trunk_dtype, model_id)
    note = run.path / "trunk.json"
    state = run.read_json(note) or {}
    shape = (len(forest), stack.width)
    dtype = DTYPES[how.trunk_dtype]
    whole = len(forest) * stack.width * np.dtype(dtype).itemsize
    same = state.get("key") == wanted and run.trunk.is_file() and run.trunk.stat().st_size == whole
    done = int(state.get("rows", 0)) if same else 0
    with writing(run.trunk):
        if not same:
            run.write_json(note, {"key": wanted, "rows": 0})
            with run.trunk.open("wb") as file:
                file.truncate(whole)
                _reserve(file.fileno(), whole)
        states = np.memmap(run.trunk, dtype=dtype, mode="r+", shape=shape)
    rows = forest.order
    progress.stage("trunk", len(rows))
    progress.advance(done)
    while done < len(rows):
        for part in forest.micro_batches(rows[done : done + ROWS_PER_SYNC], WITHOUT_GRADIENT * how.micro_batch_tokens):
            if stopping():
                return None
            nodes, batch = forest.batch(part)
            hidden = stack.trunk(batch, cut).numpy()
            if how.trunk_dtype == "fp16" and np.abs(hidden).max() > np.finfo(np.float16).max:
                raise ModelError(
                    "this model's hidden states are too large for the fp16 trunk cache", "--set how.trunk_dtype=fp32"
                )
            states[nodes] = hidden.astype(dtype)
            progress.advance(len(part))
        done = min(done + ROWS_PER_SYNC, len(rows))
        states.flush()
        run.write_json(note, {"key": wanted, "rows": done})
    progress.end()
    return Trunk(stack, cut, np.memmap(run.trunk, dtype=dtype, mode="r", shape=shape))


def _reserve(handle: int, size: int) -> None:
    """Takes the disk space now: a mapped write into a full disk would kill the process."""
    import os

    if hasattr(os, "posix_fallocate") and size:
        os.posix_fallocate(handle, 0, size)


def model_id(path: str) -> str:
    """Names the weights: the file's size and a hash of its header and of samples across it, or a folder's files."""
    from pathlib import Path

    digest = hashlib.sha256()
    source = Path(path)
    files = [source] if source.is_file() else sorted(source.glob("*.safetensors")) + sorted(source.glob("config.json"))
    if not files:
        digest.update(path.encode())
    for file in files:
        size = file.stat().st_size
        digest.update(json.dumps([file.name, size]).encode())
        with file.open("rb") as handle:
            for place in range(64):  # 64 samples of 64 KiB
                handle.seek(size * place // 64)
                digest.update(handle.read(1 << 16))
    return digest.hexdigest()
