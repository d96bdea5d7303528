"""The trunk: blocks below the cut run once over the data, and the hidden states at the cut are cached in a file.

The file is valid for exactly one set of frozen weights, cut, set of tokens and format; all runs with these share it.
"""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgeft.config import Recipe
from edgeft.data.forest import Forest
from edgeft.engine.packed import PackedLinear
from edgeft.engine.stack import Batch, Stack, batch_of
from edgeft.errors import RunError
from edgeft.formats import gguf
from edgeft.formats.source import is_gguf
from edgeft.formats.source import model_id as model_id
from edgeft.host import cache
from edgeft.host.files import open_handle, read_at, sweep, wrap_os_errors, write_at
from edgeft.plan.flops import WITHOUT_GRADIENT
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train.codecs import CODECS, Codec

FORMAT = 2
ROWS_PER_SYNC = 256  # rows between two records of the progress
SYNC_S = 10.0  # the same in seconds, block by block
CACHE_HINT = "list and clear the cache with `edgeft cache`, or keep it in the run folder: --set how.trunk_place=run"


@dataclass(frozen=True)
class Job:
    """All that the hidden states depend on."""

    stack: Stack
    forest: Forest
    cut: int
    recipe: Recipe
    model_id: str
    engine: str = ""  # the backend that computes them

    @property
    def cached(self) -> bool:
        return self.cut > 0 and self.recipe.how.trunk != "rerun"

    @property
    def frozen(self) -> str:
        frozen = self.recipe.model.frozen
        return frozen if frozen != "auto" else "packed" if is_gguf(self.stack.source) else "nf4"

    def key(self) -> str:
        """A hash of all that the cached states depend on."""
        dtype, width = self.recipe.how.trunk_dtype, self.stack.width
        identity = f"{FORMAT}|{self.engine}|{self.model_id}|{self.frozen}|{self.cut}|{dtype}|{width}"
        digest = hashlib.sha256(identity.encode())
        for part in (self.forest.tokens, self.forest.parents):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    def describe(self) -> tuple[Codec, dict[str, Any]]:
        """(format, note of the cache entry)."""
        dtype = self.recipe.how.trunk_dtype
        codec = CODECS[dtype](self.stack.width)
        return codec, {
            "key": self.key(),
            "model": Path(self.stack.source).name,
            "cut": self.cut,
            "dtype": dtype,
            "tokens": len(self.forest),
            "bytes": len(self.forest) * codec.row_bytes + codec.tail_bytes,
        }


class RowFile:
    """Rows of bytes in a file, by number. Not mapped: mapped pages count as memory of this process."""

    def __init__(self, path: Path, row_bytes: int, write: bool = False) -> None:
        self.path, self.row_bytes = path, row_bytes
        self.handle = open_handle(path, os.O_RDWR | os.O_CREAT if write else os.O_RDONLY)

    def _runs(self, numbers: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """(index in `numbers`, first number, count) of each consecutive run; `numbers` are ascending."""
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        for start, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(numbers)], strict=True):
            yield start, int(numbers[start]), stop - start

    def read(self, numbers: np.ndarray) -> np.ndarray:
        out = np.empty((len(numbers), self.row_bytes), np.uint8)
        for at, first, count in self._runs(numbers):
            self._fill(out[at : at + count], first * self.row_bytes)
        return out

    def read_bytes(self, size: int, offset: int) -> bytes:
        out = np.empty(size, np.uint8)
        self._fill(out, offset)
        return out.tobytes()

    def _fill(self, part: np.ndarray, offset: int) -> None:
        flat, at = part.reshape(-1).data, 0
        while at < len(flat):
            count = read_at(self.handle, flat[at:], offset + at)
            if count == 0:
                raise RunError(f"{self.path} is truncated", "continue with --resume: it is computed again")
            at += count

    def write(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        for at, first, count in self._runs(numbers):
            data = np.ascontiguousarray(rows[at : at + count]).data.cast("B")
            write_at(self.handle, data, first * self.row_bytes)

    def close(self) -> None:
        os.close(self.handle)

    def reserve(self, size: int) -> None:
        """Allocates the disk space now, so that a full disk is an error at once."""
        os.ftruncate(self.handle, 0)
        os.ftruncate(self.handle, size)
        if hasattr(os, "posix_fallocate") and size:
            os.posix_fallocate(self.handle, 0, size)


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            crc = zlib.crc32(piece, crc)
    return crc


class Trunk:
    """The hidden states at the cut, by forest node."""

    def __init__(self, stack: Stack, cut: int, states: RowFile | None, codec: Codec | None = None) -> None:
        self.stack, self.cut, self.states, self.codec = stack, cut, states, codec
        self.entry: cache.Entry | None = None  # locked, so that no process deletes the file

    def hidden(self, nodes: np.ndarray, batch: Batch) -> torch.Tensor:
        """(T, d) float32."""
        if self.cut == 0:
            return self.stack.embed(batch.tokens)  # type: ignore[no-any-return]
        if self.states is None or self.codec is None:
            return self.stack.trunk(batch, self.cut)
        return self.codec.decode(self.states.read(nodes))

    def cached_value(self, name: str, of: str, compute: Callable[[], float]) -> float:
        """A number that depends on the frozen model and these rows alone: computed once, cached with the states."""
        key = f"{name}: {of}"
        if self.entry is None:
            return compute()
        value = self.entry.note.get(key)
        if not isinstance(value, float):
            value = compute()
            with suppress(RunError):  # for later runs: this one does not need it
                self.entry.write_note({**self.entry.note, key: value})
        return value

    def close(self) -> None:
        """Unlocks the cache entry, as the end of the process does."""
        if self.states is not None:
            self.states.close()
        if self.entry is not None:
            self.entry.close()


@dataclass(frozen=True)
class _Target:
    """Where the states are written, and in which format."""

    entry: cache.Entry
    shared: bool
    codec: Codec
    note: dict[str, Any]

    def complete(self) -> bool:
        known, states = self.entry.note, self.entry.states
        return (
            known.get("key") == self.note["key"]
            and "crc32" in known
            and states.is_file()
            and states.stat().st_size == self.note["bytes"]
            and _crc(states) == known["crc32"]
        )


def prepare(
    run: Run, job: Job, progress: Progress, stopping: Callable[[], bool], tokens: Callable[[], int] | None = None
) -> Trunk | None:
    """Computes the states unless the cache has them; None: stop requested.

    tokens: the present size of a micro-batch, which shrinks when memory is short.
    """
    if not job.cached:
        return Trunk(job.stack, job.cut, None)
    codec, note = job.describe()
    entry, shared = _place(run, job, note, progress)
    target = _Target(entry, shared, codec, note)
    with ExitStack() as undo, wrap_os_errors(entry.path, CACHE_HINT if shared else "choose another place with -o"):
        undo.callback(entry.close)
        state = entry.acquire(
            target.complete,
            stopping,
            lambda: progress.line("trunk: waiting for another process that computes the same states"),
        )
        if not state:
            return None
        compute = state == "make" and not target.complete()
        size = tokens or (lambda: job.recipe.how.micro_batch_tokens)
        if compute and not _Writer(job, target, progress, stopping, size).write_all():
            return None
        if not compute:
            progress.line(f"trunk: {len(job.forest)} tokens read from the cache of an earlier run")
        entry.share()
        if shared:
            with suppress(RunError, OSError):  # `edgeft runs rm` reads it
                cache.add_user(entry, run.path)
        release_blocks(job.stack, 0, job.cut)
        states = RowFile(entry.states, codec.row_bytes)
        if codec.tail_bytes:
            codec.read_tail(states.read_bytes(codec.tail_bytes, len(job.forest) * codec.row_bytes))
        undo.pop_all()
    trunk = Trunk(job.stack, job.cut, states, codec)
    trunk.entry = entry
    return trunk


def missing(run: Run, job: Job) -> list[tuple[Path, str, int]]:
    """Disk space that `prepare` still needs: (folder, what, bytes)."""
    if not job.cached:
        return []
    _, note = job.describe()
    entry, _ = _place(run, job, note, Progress())
    present = entry.bytes()
    complete = "crc32" in entry.note and present >= note["bytes"]
    by_blocks = job.recipe.how.trunk_order == "blocks" and job.cut > 1
    between = 2 * 4 * job.stack.width * len(job.forest) if by_blocks else 0
    return [(entry.path, "trunk cache", 0 if complete else max(0, note["bytes"] + between - present))]


def _place(run: Run, job: Job, note: dict[str, Any], progress: Progress) -> tuple[cache.Entry, bool]:
    """The entry in the shared cache if it can be there, else the one in the run folder."""
    how, root = job.recipe.how, cache.folder("trunk")
    if how.trunk_place == "shared" and root is not None:
        if note["bytes"] > how.trunk_cache_bytes:
            progress.line(
                f"trunk: {note['bytes'] / 2**30:.1f} GiB exceed the shared cache's limit (how.trunk_cache_bytes); "
                f"the cache is in the run folder"
            )
            return cache.Entry(run.trunk), False
        try:
            with cache.changing(root):
                return cache.Entry(root / note["key"][:32]), True
        except OSError as error:  # no home folder, a read-only disk
            progress.line(f"trunk: {root} cannot be used ({error.strerror}); the cache is in the run folder")
    return cache.Entry(run.trunk), False


class _Writer:
    """Computes all states; the progress is recorded only after the data before it is fsynced."""

    def __init__(
        self,
        job: Job,
        target: _Target,
        progress: Progress,
        stopping: Callable[[], bool],
        micro_batch: Callable[[], int],
    ) -> None:
        self.job, self.target, self.progress = job, target, progress
        self.stopping, self._micro_batch = stopping, micro_batch
        self.stack, self.forest, self.cut = job.stack, job.forest, job.cut
        self.entry, self.codec, self.note = target.entry, target.codec, target.note
        self.tail_at = len(self.forest) * self.codec.row_bytes
        self.between_files = [self.entry.path / name for name in ("even.bin", "odd.bin")]
        order = job.recipe.how.trunk_order
        self.blocks = order == "blocks" and job.cut > 1
        # a partial file also depends on how the rows are split
        self.split = {"order": order, "micro_batch": self.tokens if self.blocks else 0, "format": FORMAT}

    @property
    def tokens(self) -> int:
        """Of a micro-batch; it shrinks when memory is short."""
        return WITHOUT_GRADIENT * self._micro_batch()

    def write_all(self) -> bool:
        """False: stop requested."""
        sweep(self.entry.path)
        known = self.entry.note
        same = (
            known.get("key") == self.note["key"]
            and known.get("way") == self.split
            and self.entry.states.is_file()
            and self.entry.states.stat().st_size == self.note["bytes"]
        )
        reached = known.get("reached") if same else None
        with ExitStack() as files:
            states = RowFile(self.entry.states, self.codec.row_bytes, write=True)
            files.callback(states.close)
            if not isinstance(reached, int) or reached <= 0:
                reached = 0
                self._reserve(states)
            elif self.codec.tail_bytes:
                self.codec.read_tail(states.read_bytes(self.codec.tail_bytes, self.tail_at))
            if not (self._by_blocks(states, reached, files) if self.blocks else self._by_rows(states, reached)):
                return False
        self._delete_between()
        self.entry.write_note({**self.note, "crc32": _crc(self.entry.states)})
        self.progress.end()
        return True

    def _reserve(self, states: RowFile) -> None:
        """Makes room in the shared cache, then allocates the disk space."""
        self.entry.note_file.unlink(missing_ok=True)
        try:
            if self.target.shared:
                root, limit = self.entry.path.parent, self.job.recipe.how.trunk_cache_bytes
                with cache.changing(root):
                    cache.make_room(root, self.entry, self.note["bytes"], limit)
                    states.reserve(self.note["bytes"])
            else:
                states.reserve(self.note["bytes"])
        except OSError:
            self.entry.states.unlink(missing_ok=True)  # a partial allocation is useless
            raise
        self._record(0)

    def _record(self, reached: int) -> None:
        self.entry.write_note({**self.note, "way": self.split, "reached": reached})

    def _parts(self, first_row: int) -> Iterator[tuple[int, list[list[int]]]]:
        """(rows done after it, its micro-batches) for each ROWS_PER_SYNC rows."""
        rows = self.forest.order
        for start in range(first_row, len(rows), ROWS_PER_SYNC):
            part = rows[start : start + ROWS_PER_SYNC]
            yield start + len(part), list(self.forest.micro_batches(part, self.tokens))

    def _write(self, states: RowFile, nodes: np.ndarray, hidden: torch.Tensor) -> None:
        first = self.codec.tail() == b""
        states.write(nodes, self.codec.encode(hidden))
        if first and self.codec.tail_bytes:
            write_at(states.handle, self.codec.tail(), self.tail_at)

    def _by_rows(self, states: RowFile, reached: int) -> bool:
        """`reached`: nodes done; they are the first ones, since rows are in the order of nodes."""
        forest, rows = self.forest, self.forest.order
        ends = np.maximum.accumulate([int(forest.paths[row][-1]) + 1 for row in rows])
        # a multiple of ROWS_PER_SYNC: the same micro-batches, and so the same bits, as without a stop
        done = len(rows) if reached >= ends[-1] else int(np.searchsorted(ends, reached, "right"))
        done = done // ROWS_PER_SYNC * ROWS_PER_SYNC if done < len(rows) else done
        self.progress.stage("trunk", len(rows))
        self.progress.advance(done)
        for after, parts in self._parts(done):
            for part in parts:
                if self.stopping():
                    return False
                nodes, batch = batch_of(forest, part)
                self._write(states, nodes, self.stack.trunk(batch, self.cut))
                self.progress.advance(len(part))
            os.fsync(states.handle)
            self._record(int(ends[after - 1]))
        return True

    def _by_blocks(self, states: RowFile, reached: int, files: ExitStack) -> bool:
        """`reached`: micro-batches done, counted through all blocks.

        A block reads the output of the previous one from one file and writes to the other, so it can be restarted.
        States between blocks are float32, and a token that several micro-batches share is stored once in each: the
        result is bit for bit that of `_by_rows`.
        """
        parts = [part for _, batches in self._parts(0) for part in batches]
        sizes = [len(self.forest.nodes(part)) for part in parts]
        starts = np.cumsum([0, *sizes])
        between, reached = self._open_between(int(starts[-1]), reached, files)
        exact = Codec(self.stack.width)
        self.progress.stage("trunk, by blocks", self.cut * len(parts))
        self.progress.advance(reached)
        synced = time.monotonic()
        for turn in range(reached, self.cut * len(parts)):
            if self.stopping():
                return False
            block, number = divmod(turn, len(parts))
            source, target = between[(block + 1) % 2], between[block % 2]
            places = np.arange(starts[number], starts[number + 1])
            nodes, batch = batch_of(self.forest, parts[number])
            with torch.no_grad():
                hidden = self.stack.embed(batch.tokens) if block == 0 else exact.decode(source.read(places))
                hidden = self.stack.run(hidden, batch, range(block, block + 1))
            if block == self.cut - 1:
                self._write(states, nodes, hidden)
            else:
                target.write(places, exact.encode(hidden))
            self.progress.advance(1)
            last = number == len(parts) - 1
            if last or time.monotonic() - synced >= SYNC_S:
                os.fsync((states if block == self.cut - 1 else target).handle)
                self._record(turn + 1)
                synced = time.monotonic()
            if last:
                release_blocks(self.stack, block, block + 1)
        return True

    def _open_between(self, rows: int, reached: int, files: ExitStack) -> tuple[list[RowFile], int]:
        """(the two files between blocks, `reached`: 0 if one of them is new)."""
        between = [RowFile(path, 4 * self.stack.width, write=True) for path in self.between_files]
        for file in between:
            files.callback(file.close)
            size = rows * file.row_bytes
            if os.fstat(file.handle).st_size != size or not reached:
                reached = 0
                try:
                    file.reserve(size)
                except OSError:
                    self._delete_between()
                    raise
        return between, reached

    def _delete_between(self) -> None:
        for path in self.between_files:
            path.unlink(missing_ok=True)


def release_blocks(stack: Stack, start: int, stop: int) -> None:
    """Releases the pages of mapped weights in these blocks; the next access reads them again."""
    for block in stack.layers[start:stop]:
        for module in block.modules():
            if isinstance(module, PackedLinear):
                gguf.release_pages(module.packed.data)
