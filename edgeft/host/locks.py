"""Locks on files, shared or exclusive: the system releases them when their process ends, however it ends.

Exclusive locks are filelock's. Its ReadWriteLock is an SQLite transaction, which cannot turn from exclusive into shared
and is not inherited by a child: shared locks are flock's, on the same descriptor. Windows has exclusive ones only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


class LockFile:
    """An open file and the lock on it, which a child that inherits `handle` holds as well (not on Windows)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "rb+", buffering=0)

    @property
    def handle(self) -> int:
        return self._file.fileno()

    def exclusive(self, wait: bool = False) -> bool:
        """Takes the lock if no other process has it; with `wait`, as soon as none has."""
        from filelock import lock_descriptor  # 30 ms that most commands do not need

        return lock_descriptor(self.handle, blocking=wait)

    def shared(self) -> bool:
        """Takes the lock together with others, or turns an exclusive one into a shared one."""
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
