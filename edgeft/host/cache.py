"""The folder that all runs share: trunk states by the key of all they depend on, and the hashes of weight files.

An entry is made by one process, used by any number at once, and taken away only when nobody uses it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edgeft.host.files import read_json, write_json
from edgeft.host.locks import LockFile

POLL_S = 0.2  # while another process makes what is wanted

PIECE = 1 << 20  # bytes hashed at a time


def folder() -> Path | None:
    """EDGEFT_CACHE, or `edgeft` in the user's cache folder; None where there is no home folder."""
    override = os.environ.get("EDGEFT_CACHE")
    if override:
        return Path(override).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "edgeft"  # relative ones: ignored
    except RuntimeError:
        return None


def private(path: Path) -> None:
    """Makes a folder that nobody else may look into: what lies here is made from the user's data, or is run."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(OSError):  # of another user, or a file system that knows no modes
        path.chmod(0o700)


def trunks() -> Path | None:
    found = folder()
    return found / "trunk" if found else None


def searches() -> Path | None:
    """Contributions that `edgeft search` has found."""
    found = folder()
    return found / "search" if found else None


class Entry:
    """A folder with a lock: held alone while it is being made, together with others while it is used."""

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
        """What it takes on the disk."""
        total = 0
        with contextlib.suppress(OSError):
            for file in self.path.iterdir():
                with contextlib.suppress(OSError):
                    total += file.stat().st_size
        return total

    def used(self) -> float:
        """When it was last taken into use, in seconds since 1970."""
        with contextlib.suppress(OSError):
            return self.lock_file.stat().st_mtime
        return 0.0

    # ------------------------------------------------ the lock

    def _try(self, shared: bool = False) -> bool:
        """Takes the lock if it is free and its file is still the one in this folder."""
        if self._lock is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)  # it is made from the user's data
            self._lock = LockFile(self.lock_file)
        taken = False
        with contextlib.suppress(OSError):
            taken = (self._lock.shared() if shared else self._lock.exclusive()) and self._lock.is_current()
        if not taken:
            self.close()
        return taken

    def acquire(self, whole: Callable[[], bool], stopping: Callable[[], bool], waiting: Callable[[], None]) -> str:
        """`make`: this process alone has it; `use`: it is complete and others may use it too; "": asked to stop."""
        reported = False
        while not stopping():
            state = "make" if self._try() else "use" if self._try(shared=True) and whole() else ""
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
        """Others may use it too from now on, and nobody may delete it."""
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
    found = [Entry(path) for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return sorted(found, key=lambda entry: entry.used())


@contextlib.contextmanager
def changing(root: Path) -> Iterator[None]:
    """One process at a time makes room and takes it."""
    private(root.parent)
    private(root)
    with contextlib.closing(LockFile(root / "lock")) as lock:
        lock.exclusive(wait=True)
        yield


def make_room(root: Path, keep: Entry, need: int, limit: int) -> list[str]:
    """Takes away the least recently used entries until `need` bytes more stay within the limit; their names."""
    there = [entry for entry in entries(root) if entry.path != keep.path]
    total = sum(entry.bytes() for entry in there) + need
    gone = []
    for entry in there:
        if total <= limit:
            break
        size = entry.bytes()
        if _take_away(entry):
            total -= size
            gone.append(entry.path.name)
    return gone


def remember(entry: Entry, run: Path) -> None:
    """Writes down that a run uses a shared entry."""
    with changing(entry.path.parent):
        note = entry.note
        entry.write_note({**note, "runs": sorted({*_users(note), str(run.resolve())})})


def _users(note: dict[str, Any]) -> list[str]:
    """Runs that use an entry, and are still there."""
    found = note.get("runs")
    return [str(run) for run in found if Path(str(run), "recipe.yaml").is_file()] if isinstance(found, list) else []


def forget(run: Path) -> int:
    """Takes a run's entries out of the shared cache, if no other run uses them; bytes freed."""
    root, freed = trunks(), 0
    if root is None or not root.is_dir():
        return 0
    mine = str(run.resolve())
    with changing(root):
        for entry in entries(root):
            users = _users(entry.note)
            if mine not in users:
                continue
            size = entry.bytes()
            if users == [mine] and _take_away(entry):
                freed += size
            elif entry.note_file.is_file():
                entry.write_note({**entry.note, "runs": [user for user in users if user != mine]})
    return freed


def clear(root: Path) -> tuple[int, int]:
    """(bytes freed, entries kept because they are in use)."""
    freed = kept = 0
    for entry in entries(root):
        size = entry.bytes()
        if _take_away(entry):
            freed += size
        else:
            kept += 1
    return freed, kept


def _take_away(entry: Entry) -> bool:
    try:
        if not entry.lock_if_unused():
            return False
        entry.delete()
    except OSError:  # of another user, or a read-only disk
        return False
    finally:
        entry.close()
    return True


def listing(root: Path) -> list[dict[str, Any]]:
    """What `edgeft cache` shows, the last used first."""
    rows = []
    for entry in reversed(entries(root)):
        note, size, used = entry.note, entry.bytes(), entry.used()
        free = False
        with contextlib.suppress(OSError):
            free = entry.lock_if_unused()
        entry.close()
        rows.append(
            {
                "key": entry.path.name,
                "model": note.get("model"),
                "cut": note.get("cut"),
                "dtype": note.get("dtype"),
                "tokens": note.get("tokens"),
                "bytes": size,
                "used": used,
                "state": "in use" if not free else "whole" if "crc32" in note else "not finished",
            }
        )
    return rows


def file_hash(file: Path) -> str:
    """SHA-256 of a whole file, remembered for as long as its size and its times stay."""
    status = file.stat()
    state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    root = folder()
    memory = root / "weights.json" if root else None
    known = (read_json(memory) if memory else None) or {}
    found = known.get(str(file.resolve()))
    if isinstance(found, list) and found[:-1] == state:
        return str(found[-1])
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while piece := handle.read(PIECE):
            digest.update(piece)
    if memory is not None:
        kept = list(known.items())[-255:]
        with contextlib.suppress(Exception):  # without it, it is only slower
            private(memory.parent)
            write_json(memory, {**dict(kept), str(file.resolve()): [*state, digest.hexdigest()]})
    return digest.hexdigest()
