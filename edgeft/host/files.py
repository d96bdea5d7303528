"""Atomic writes, JSON files, temporary files of killed processes, access at an offset, locks, and free disk space."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from edgeft.config import format_size
from edgeft.errors import RunError

MAX_JSON_BYTES = 256 << 20  # a file is read whole
_SEEK = threading.Lock()  # Windows cannot read or write at an offset: it seeks first
_TMP = re.compile(r"\..+\.(\d{1,9})(?:\.[^.]*)?\.tmp")  # the number is its process


@contextlib.contextmanager
def wrap_os_errors(path: Path, hint: str = "choose another place with -o") -> Iterator[None]:
    """Turns an OSError of a write into a RunError with a hint."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = f"free some space (an interrupted run continues with --resume), or {hint}"
        raise RunError(f"cannot write {path}: {(error.strerror or str(error)).lower()}", hint) from None


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file that replaces `path` only once it is complete and on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with wrap_os_errors(path):
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to report
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A rename is on the disk only when its folder is."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):  # some file systems cannot do this
            raise


def sweep(folder: Path, locked: bool = False) -> None:
    """Deletes temporary files of killed processes; locked: no other process writes in this folder."""
    import psutil

    for path in folder.glob(".*.tmp"):
        owner = _TMP.fullmatch(path.name)
        # by its number, a process that is still ending, or another with the same number, would seem alive
        if owner and (int(owner[1]) != os.getpid() if locked else not psutil.pid_exists(int(owner[1]))):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def read_json(path: Path) -> dict[str, Any] | None:
    """None for a missing or damaged file."""
    try:
        small = path.is_file() and path.stat().st_size <= MAX_JSON_BYTES
        values = json.loads(path.read_text(encoding="utf-8")) if small else None
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def write_json(path: Path, values: dict[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write(json.dumps(values, indent=1).encode())


def remove_tree(path: Path) -> None:
    """Deletes a file, a link itself, or a folder with all that is in it, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)  # it does not follow links
    else:
        path.unlink(missing_ok=True)


def open_handle(path: Path, flags: int) -> int:
    """os.open for bytes; a new file is readable by its user alone."""
    return os.open(path, flags | getattr(os, "O_BINARY", 0), 0o600)


def read_at(handle: int, buffer: memoryview, offset: int) -> int:
    """Bytes read into the buffer; 0 at the end of the file."""
    if sys.platform != "win32":
        return os.preadv(handle, [buffer], offset)
    with _SEEK:
        os.lseek(handle, offset, os.SEEK_SET)
        data = os.read(handle, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def write_at(handle: int, data: memoryview | bytes, offset: int) -> None:
    """Writes all of it."""
    done = 0
    while done < len(data):
        if sys.platform != "win32":
            done += os.pwrite(handle, data[done:], offset + done)
            continue
        with _SEEK:
            os.lseek(handle, offset + done, os.SEEK_SET)
            done += os.write(handle, data[done:])


class LockFile:
    """An open file and the lock on it, which a child that inherits `handle` holds as well (not on Windows).

    The system releases it when its process ends, however it ends. Exclusive locks are filelock's. Its ReadWriteLock is
    an SQLite transaction, which cannot turn from exclusive into shared and is not inherited by a child: shared locks
    are flock's, on the same descriptor. Windows has exclusive ones only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "rb+", buffering=0)

    @property
    def handle(self) -> int:
        return self._file.fileno()

    def exclusive(self, wait: bool = False) -> bool:
        """Acquires the lock if no other process has it; with `wait`, as soon as none has."""
        from filelock import lock_descriptor  # 30 ms that most commands do not need

        return lock_descriptor(self.handle, blocking=wait)

    def shared(self) -> bool:
        """Acquires a shared lock, or turns the exclusive one into a shared one."""
        if sys.platform == "win32":
            return self.exclusive()
        import fcntl

        try:
            fcntl.flock(self.handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_current(self) -> bool:
        """Is the path still this file? Another process may have deleted it, and made it again."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.handle))
        except OSError:
            return False

    def close(self) -> None:
        """Releases the lock, unless a child holds it too."""
        self._file.close()

    def delete(self) -> None:
        """Deletes the file, then releases the lock."""
        if sys.platform == "win32":  # an open file cannot be deleted there
            self.close()
            self.path.unlink(missing_ok=True)
        else:
            self.path.unlink(missing_ok=True)
            self.close()


Need = tuple[Path, str, int]  # the folder, what is written there, bytes


def check_space(needs: list[Need]) -> None:
    """RunError if one of the disks has less free space than is written to it."""
    disks: dict[int, list[Need]] = {}
    for need in needs:
        disks.setdefault(os.stat(_existing(need[0])).st_dev, []).append(need)
    for group in disks.values():
        free, total = shutil.disk_usage(_existing(group[0][0])).free, sum(size for _, _, size in group)
        if total > free:
            largest_first = sorted(group, key=lambda need: -need[2])
            terms = ", ".join(f"{what} {format_size(size)}" for _, what, size in largest_first if size)
            raise RunError(
                f"this run will write {format_size(total)} below {group[0][0]}; {format_size(free)} are free ({terms})",
                "free some space, or choose another folder (--out, EDGEFT_CACHE)",
            )


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def disk_size(folder: Path) -> int:
    """Bytes of the disk that holds this folder, or will."""
    return shutil.disk_usage(_existing(folder)).total


def path_size(*paths: Path) -> int:
    """Bytes of these files, and of the files in these folders; a file with several names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for path in paths:
        for file in path.iterdir() if path.is_dir() else [path]:
            if file.is_file():
                status = file.stat()
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
