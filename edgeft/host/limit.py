"""A hard limit on the memory of processes: a control group made for them, or RLIMIT_DATA where none can be made.

The group lies below one that this process is in, so that limits which hold for it go on to hold; it is gone afterwards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgeft.host.device import ROOT, control_groups, read_int, read_text, stat_value

ENDING_S = 5.0  # that processes of a group are given to be gone after they were killed


@dataclass(frozen=True)
class Limit:
    """`join` is called in a child before it becomes its program: Popen(…, preexec_fn=limit.join)."""

    bytes: int
    kind: str  # `cgroup v2`, `cgroup v1` or `RLIMIT_DATA`
    join: Callable[[], None]
    group: Path | None = None

    @property
    def peak_bytes(self) -> int | None:
        """Most that was in memory at a time, pages of files included: those fill a group to its limit, and give way.
        None where only the process itself can say (RLIMIT_DATA)."""
        if self.group is None:
            return None
        names = ("memory.peak", "memory.max_usage_in_bytes")  # the first since Linux 5.19
        return next((n for n in (read_int(self.group / name) for name in names) if n is not None), None)

    @property
    def used_bytes(self) -> int | None:
        """Memory that is in use now and could not be given back: no pages of files."""
        if self.group is None:
            return None
        stat = self.group / "memory.stat"
        found = stat_value(stat, "anon") if self.kind == "cgroup v2" else stat_value(stat, "total_rss")
        shared = stat_value(stat, "shmem") or 0  # files in memory alone
        return None if found is None else found + shared

    @property
    def kills(self) -> int | None:
        """Processes that the system has ended because the limit was reached."""
        if self.group is None:
            return None
        place = "memory.events" if self.kind == "cgroup v2" else "memory.oom_control"
        return stat_value(self.group / place, "oom_kill") or 0


@contextmanager
def hard_limit(bytes: int, root: Path = ROOT) -> Iterator[Limit]:
    """For processes that are started within the context, and their children: more than so much is refused or killed."""
    found = _make_group(bytes, root)
    if found is None:
        yield Limit(bytes, "RLIMIT_DATA", lambda: _limit_data(bytes))
        return
    version, group = found
    try:
        yield Limit(bytes, f"cgroup v{version}", lambda: _enter(group), group)
    finally:
        _remove(group)


def can_make_group(root: Path = ROOT) -> bool:
    """Tries it: permissions alone do not tell."""
    found = _make_group(64 << 20, root)
    if found:
        _remove(found[1])
    return found is not None


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
            with contextlib.suppress(OSError):  # there is none where the system does not count swap
                swap[0].write_text(swap[1])
            return version, group
        except OSError:
            _remove(group)
    return None


def _parents(root: Path) -> Iterator[tuple[int, Path]]:
    """Groups in which one for a limited process may be made.

    Version 1: this process's own. Version 2 lets no group hold both processes and limited groups, the topmost aside, so
    there it is the nearest one above that hands memory limits on; but never above a limit that this process is under.
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
    """Takes away empty groups of processes that were killed before they could."""
    for group in parent.glob("edgeft-*-*"):
        pid = group.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):  # somebody is still in it
                group.rmdir()


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _limit_data(bytes: int) -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    least = bytes if hard == resource.RLIM_INFINITY else min(bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (least, least))


def _remove(group: Path) -> None:
    """Whoever is still in it was started for it, and ends with it."""
    deadline = time.monotonic() + ENDING_S
    while True:
        for pid in read_text(group / "cgroup.procs").split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:  # busy: somebody is still ending
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
