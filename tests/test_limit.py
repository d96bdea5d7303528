"""Hard limits: a process that takes more is ended, one that takes less is not, and nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgeft.host import limit
from edgeft.host.device import control_groups, memory

MIB = 2**20
TAKE = "import sys; data = bytearray(int(sys.argv[1]) << 20); print('took it')"


def take(mib: int, under: limit.Limit) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TAKE, str(mib)]
    return subprocess.run(command, preexec_fn=under.join, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(not limit.can_make_group(), reason="no control group can be made here")
def test_a_group_ends_who_takes_more() -> None:
    with limit.hard_limit(64 * MIB) as under:
        assert under.kind in ("cgroup v1", "cgroup v2")
        assert under.group is not None
        assert take(20, under).stdout == "took it\n"
        assert under.kills == 0
        assert 20 * MIB < (under.peak_bytes or 0) <= 64 * MIB
        before = under.peak_bytes or 0
        assert take(200, under).returncode == -9
        assert under.kills == 1
        assert (under.peak_bytes or 0) >= before
        group = under.group
    assert not group.exists()


@pytest.mark.skipif(not limit.can_make_group(), reason="no control group can be made here")
def test_what_a_killed_process_left_is_taken_away() -> None:
    code = (
        "import os, signal; from edgeft.host.limit import hard_limit; context = hard_limit(1 << 26); "
        "print(context.__enter__().group, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    left = Path(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout.strip())
    assert left.is_dir()
    with limit.hard_limit(64 * MIB) as under:
        assert under.group is not None
        assert not left.exists()


@pytest.mark.skipif(not limit.can_make_group(), reason="no control group can be made here")
def test_a_process_sees_its_limit_and_ends_with_the_group() -> None:
    script = (
        "from edgeft.host.device import memory; print(memory().limit_bytes, flush=True); import time; time.sleep(60)"
    )
    with limit.hard_limit(128 * MIB) as under:
        child = subprocess.Popen([sys.executable, "-c", script], preexec_fn=under.join, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert int(child.stdout.readline()) == 128 * MIB
        assert 0 < (under.used_bytes or 0) < 128 * MIB
    assert child.wait(timeout=10) == -9
    assert memory().limit_bytes != 128 * MIB  # this process stayed where it was


def test_without_groups_the_system_refuses_data(tmp_path: Path) -> None:
    with limit.hard_limit(64 * MIB, root=tmp_path) as under:  # a machine whose files say nothing of groups
        assert under.kind == "RLIMIT_DATA"
        assert under.peak_bytes is under.used_bytes is under.kills is None
        assert take(20, under).stdout == "took it\n"
        assert "MemoryError" in take(200, under).stderr


def _v2(root: Path, limits: dict[str, str], hands_on: set[str]) -> Path:
    """A machine with version 2 groups, and this process in /a/b/c."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/a/b/c\n")
    (root / "proc/self/mountinfo").write_text("30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    top = root / "sys/fs/cgroup"
    for path in ("", "a", "a/b", "a/b/c"):
        (top / path).mkdir(parents=True, exist_ok=True)
        (top / path / "memory.max").write_text(limits.get(path, "max"))
        (top / path / "cgroup.subtree_control").write_text("cpu memory" if path in hands_on else "cpu")
    return top


def test_version_2_goes_up_to_who_hands_limits_on(tmp_path: Path) -> None:
    top = _v2(tmp_path, {}, {"", "a"})
    assert next(group for _, group in control_groups(tmp_path, "memory")) == top / "a/b/c"
    assert list(limit._parents(tmp_path)) == [(2, top / "a"), (2, top)]


def test_a_limit_is_never_left(tmp_path: Path) -> None:
    top = _v2(tmp_path, {"a": "1000000"}, {"", "a"})
    assert list(limit._parents(tmp_path)) == [(2, top / "a")]
