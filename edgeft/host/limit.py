"""A hard limit on the memory of child processes: a control group for them, or RLIMIT_DATA where none can be made.

The group lies below a group of this process, so that its limits still hold; it is deleted afterwards.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgeft.errors import ConfigError
from edgeft.host.device import ROOT, control_groups, read_int, read_text, stat_value

ENDING_S = 5.0  # longest wait for killed processes of a group to end


@dataclass(frozen=True)
class Limit:
    """A child calls `join` before it becomes its program: Popen(…, preexec_fn=limit.join)."""

    bytes: int
    kind: str  # `cgroup v2`, `cgroup v1` or `RLIMIT_DATA`
    join: Callable[[], None]
    group: Path | None = None

    @property
    def peak_bytes(self) -> int | None:
        """Peak, with the page cache, which fills a group up to its limit and is evictable.
        None with RLIMIT_DATA, where only the process itself knows."""
        if self.group is None:
            return None
        names = ("memory.peak", "memory.max_usage_in_bytes")  # the first since Linux 5.19
        return next((n for n in (read_int(self.group / name) for name in names) if n is not None), None)

    @property
    def used_bytes(self) -> int | None:
        """Memory in use now that cannot be reclaimed: without the page cache."""
        if self.group is None:
            return None
        stat = self.group / "memory.stat"
        anonymous = stat_value(stat, "anon") if self.kind == "cgroup v2" else stat_value(stat, "total_rss")
        shared = stat_value(stat, "shmem") or 0  # tmpfs
        return None if anonymous is None else anonymous + shared

    @property
    def kills(self) -> int | None:
        """Processes that the system killed at the limit."""
        if self.group is None:
            return None
        place = "memory.events" if self.kind == "cgroup v2" else "memory.oom_control"
        return stat_value(self.group / place, "oom_kill") or 0


@contextmanager
def hard_limit(bytes: int, root: Path = ROOT) -> Iterator[Limit]:
    """For processes started within the context, and their children: more memory is refused, or the process killed."""
    made = _make_group(bytes, root)
    if made is None and sys.platform == "win32":
        raise ConfigError("--enforce is not available on Windows", "leave it out: the plan keeps to --memory by itself")
    if made is None:
        yield Limit(bytes, "RLIMIT_DATA", lambda: _limit_data(bytes))
        return
    version, group = made
    try:
        yield Limit(bytes, f"cgroup v{version}", lambda: _enter(group), group)
    finally:
        _remove(group)


def can_make_group(root: Path = ROOT) -> bool:
    """By trial: permissions alone do not show it."""
    made = _make_group(64 << 20, root)
    if made:
        _remove(made[1])
    return made is not None


def _make_group(bytes: int, root: Path) -> tuple[int, Path] | None:
    for version, parent in _parents(root):
        _sweep(parent)
        group = parent / f"edgeft-{os.getpid()}-{time.monotonic_ns()}"
        try:
            group.mkdir()
        except OSError:  # not permitted, or mounted read-only
            continue
        try:
            if version == 2:
                (group / "memory.max").write_text(str(bytes))
                swap = group / "memory.swap.max", "0"
            else:
                (group / "memory.limit_in_bytes").write_text(str(bytes))
                swap = group / "memory.memsw.limit_in_bytes", str(bytes)
            with contextlib.suppress(OSError):  # absent where the system does not count swap
                swap[0].write_text(swap[1])
            return version, group
        except OSError:
            _remove(group)
    return None


def _parents(root: Path) -> Iterator[tuple[int, Path]]:
    """Groups in which a limited group may be made.

    Version 1: this process's own. In version 2 no group but the topmost may hold both processes and limited groups, so
    it is the nearest ancestor that passes memory limits on, but never above a limit on this process.
    """
    limited = False
    own_v1 = False
    for version, group in control_groups(root, "memory"):
        if version == 1 and not own_v1:
            own_v1 = True
            yield version, group
        if version == 2 and not limited:
            limited = read_text(group / "memory.max") not in ("", "max")
            if "memory" in read_text(group / "cgroup.subtree_control").split():
                yield version, group


def _sweep(parent: Path) -> None:
    """Deletes empty groups that killed processes left."""
    for group in parent.glob("edgeft-*-*"):
        pid = group.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):  # not empty
                group.rmdir()


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _limit_data(bytes: int) -> None:
    if sys.platform != "win32":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        lowest = bytes if hard == resource.RLIM_INFINITY else min(bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (lowest, lowest))


def _remove(group: Path) -> None:
    """Kills the processes that are still in it, and deletes it."""
    import psutil

    deadline = time.monotonic() + ENDING_S
    while True:
        for pid in read_text(group / "cgroup.procs").split():
            with contextlib.suppress(psutil.Error):
                psutil.Process(int(pid)).kill()
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:  # busy: a process is still ending
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
