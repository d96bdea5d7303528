"""The cache folder that all runs share: trunk states and responses of base models by a key of their inputs, and hashes
of weight files.

One process writes an entry, any number read it at once, and it is deleted only while no process uses it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edgeft.host.files import LockFile, read_json, write_json

LISTED = ("trunk", "eval")  # parts that `edgeft cache` lists, and that know the runs that use them
POLL_S = 0.2  # while another process writes the entry
PIECE = 1 << 20  # bytes hashed at a time


def folder(part: str = "") -> Path | None:
    """`part` of EDGEFT_CACHE, or of `edgeft` in the user's cache folder; None without a home folder."""
    override, base = os.environ.get("EDGEFT_CACHE"), os.environ.get("XDG_CACHE_HOME", "")  # a relative base is ignored
    try:
        if override:
            return Path(override).expanduser().absolute() / part
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "edgeft" / part
    except RuntimeError:
        return None


def private(path: Path) -> None:
    """Makes a folder that only its user can read: its files are made from the user's data, or are executed."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(OSError):  # another user's, or a file system without modes
        path.chmod(0o700)


class Entry:
    """A folder with a lock: exclusive while it is written, shared while it is used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.note_file, self.states, self.lock_file = path / "note.json", path / "states.bin", path / "lock"
        self._lock: LockFile | None = None

    @property
    def note(self) -> dict[str, Any]:
        return read_json(self.note_file) or {}

    def write_note(self, values: dict[str, Any]) -> None:
        write_json(self.note_file, values)

    def bytes(self) -> int:
        """Its size on the disk."""
        total = 0
        with contextlib.suppress(OSError):
            for file in self.path.iterdir():
                with contextlib.suppress(OSError):
                    total += file.stat().st_size
        return total

    def used(self) -> float:
        """When it was last acquired, in seconds since 1970."""
        with contextlib.suppress(OSError):
            return self.lock_file.stat().st_mtime
        return 0.0

    def _try(self, shared: bool = False) -> bool:
        """Acquires the lock if it is free and its file is still the one in this folder."""
        if self._lock is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)  # it is made from the user's data
            self._lock = LockFile(self.lock_file)
        locked = False
        with contextlib.suppress(OSError):
            locked = (self._lock.shared() if shared else self._lock.exclusive()) and self._lock.is_current()
        if not locked:
            self.close()
        return locked

    def acquire(self, complete: Callable[[], bool], stopping: Callable[[], bool], waiting: Callable[[], None]) -> str:
        """`make`: exclusive, to be written; `use`: complete and shared; "": stop requested."""
        reported = False
        while not stopping():
            state = "make" if self._try() else "use" if self._try(shared=True) and complete() else ""
            if state:
                os.utime(self.lock_file)
                return state
            self.close()
            if not reported:
                waiting()
                reported = True
            time.sleep(POLL_S)
        return ""

    def share(self) -> None:
        """Turns the exclusive lock into a shared one: other processes may use the entry, and none may delete it."""
        assert self._lock is not None
        self._lock.shared()

    def lock_if_unused(self) -> bool:
        return self.path.is_dir() and self._try()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def delete(self) -> None:
        """The caller holds the exclusive lock, which goes last."""
        assert self._lock is not None
        for file in self.path.iterdir():
            if file != self.lock_file:
                file.unlink(missing_ok=True)
        self._lock.delete()
        self.path.rmdir()
        self._lock = None


def entries(root: Path) -> list[Entry]:
    """The least recently used first."""
    every = [Entry(path) for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return sorted(every, key=lambda entry: entry.used())


@contextlib.contextmanager
def changing(root: Path) -> Iterator[None]:
    """One process at a time deletes entries and reserves space."""
    private(root.parent)
    private(root)
    with contextlib.closing(LockFile(root / "lock")) as lock:
        lock.exclusive(wait=True)
        yield


def make_room(root: Path, keep: Entry, need: int, limit: int) -> list[str]:
    """Deletes the least recently used entries until `need` more bytes stay within the limit; their names."""
    others = [entry for entry in entries(root) if entry.path != keep.path]
    total = sum(entry.bytes() for entry in others) + need
    deleted = []
    for entry in others:
        if total <= limit:
            break
        size = entry.bytes()
        if _delete_if_unused(entry):
            total -= size
            deleted.append(entry.path.name)
    return deleted


def add_user(entry: Entry, run: Path) -> None:
    """Records that a run uses a shared entry."""
    with changing(entry.path.parent):
        note = entry.note
        entry.write_note({**note, "runs": sorted({*_users(note), str(run.resolve())})})


def _users(note: dict[str, Any]) -> list[str]:
    """Runs that use an entry and still exist."""
    runs = note.get("runs")
    return [str(run) for run in runs if Path(str(run), "recipe.yaml").is_file()] if isinstance(runs, list) else []


def remove_user(run: Path) -> int:
    """Deletes a run's entries in the shared cache unless another run uses them; bytes freed."""
    roots = [root for part in LISTED if (root := folder(part)) and root.is_dir()]
    return sum(_remove_user(root, str(run.resolve())) for root in roots)


def _remove_user(root: Path, mine: str) -> int:
    freed = 0
    with changing(root):
        for entry in entries(root):
            users = _users(entry.note)
            if mine not in users:
                continue
            size = entry.bytes()
            if users == [mine] and _delete_if_unused(entry):
                freed += size
            elif entry.note_file.is_file():
                entry.write_note({**entry.note, "runs": [user for user in users if user != mine]})
    return freed


def clear(root: Path) -> tuple[int, int]:
    """(bytes freed, entries kept because they are in use)."""
    freed = kept = 0
    for entry in entries(root):
        size = entry.bytes()
        if _delete_if_unused(entry):
            freed += size
        else:
            kept += 1
    return freed, kept


def _delete_if_unused(entry: Entry) -> bool:
    try:
        if not entry.lock_if_unused():
            return False
        entry.delete()
    except OSError:  # another user's, or a read-only disk
        return False
    finally:
        entry.close()
    return True


def listing(root: Path) -> list[dict[str, Any]]:
    """The rows of `edgeft cache`, the last used first."""
    rows = []
    for entry in reversed(entries(root)):
        note, size, used = entry.note, entry.bytes(), entry.used()
        free = False
        with contextlib.suppress(OSError):
            free = entry.lock_if_unused()
        entry.close()
        whole = "crc32" in note or "rows" in note
        rows.append(
            {
                "key": entry.path.name,
                "part": root.name,
                "model": note.get("model"),
                "cut": note.get("cut"),
                "dtype": note.get("dtype"),
                "tokens": note.get("tokens"),
                "rows": note.get("rows"),
                "bytes": size,
                "used": used,
                "state": "in use" if not free else "whole" if whole else "not finished",
            }
        )
    return rows


def file_hash(file: Path) -> str:
    """SHA-256 of a whole file, cached for as long as its size and times stay the same."""
    status = file.stat()
    state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    memory = folder("weights.json")
    known = (read_json(memory) if memory else None) or {}
    cached = known.get(str(file.resolve()))
    if isinstance(cached, list) and cached[:-1] == state:
        return str(cached[-1])
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while piece := handle.read(PIECE):
            digest.update(piece)
    if memory is not None:
        kept = list(known.items())[-255:]
        with contextlib.suppress(Exception):  # without the cache it is only slower
            private(memory.parent)
            write_json(memory, {**dict(kept), str(file.resolve()): [*state, digest.hexdigest()]})
    return digest.hexdigest()
