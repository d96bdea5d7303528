"""Other operating systems: no module needs what only Linux has when it is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeft.host import files, system
from edgeft.host.files import LockFile

# Libraries choose their own code by sys.platform: they are imported before it changes, the package after it.
ELSEWHERE = """
import importlib, os, signal, sys
import ctypes, mmap, subprocess, filelock, psutil
platform = sys.argv[1]
sys.platform = platform
for name in ("fcntl", "resource", "termios", "tty", "pwd", "grp", "_posixsubprocess"):
    sys.modules[name] = None  # import raises ModuleNotFoundError
if platform == "win32":
    for name in ("SIGKILL", "SIGSTOP", "SIGCONT", "SIGTSTP", "SIGALRM", "setitimer"):
        delattr(signal, name)
    for name in ("O_CLOEXEC", "sched_getaffinity", "setpriority", "getpriority", "preadv", "pwrite", "memfd_create"):
        delattr(os, name)
"""

LIBRARIES = "import lm_eval.tasks, lm_eval.api.model, gguf.constants, jinja2, matplotlib\n"
LIBRARIES += "import rich.live, rich.progress, safetensors, torch, typer, yaml\n"


def elsewhere(platform: str, code: str, before: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", before + ELSEWHERE + code, platform], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_every_module_can_be_imported_on_other_systems(platform: str) -> None:
    package = Path(system.__file__).parents[1]
    modules = [
        ".".join(file.relative_to(package.parent).with_suffix("").parts)
        for file in sorted(package.rglob("*.py"))
        if not file.stem.startswith("__")
    ]
    code = f"for name in {modules}: importlib.import_module(name)\nprint(len(sys.modules))"
    assert int(elsewhere(platform, code, LIBRARIES)) > len(modules)


@pytest.mark.parametrize(("platform", "count"), [("darwin", 7), ("win32", 11)])
def test_each_system_says_what_it_lacks(platform: str, count: int) -> None:
    code = "from edgeft.host.system import missing\nfor what, why in missing(): print(what, '|', why)"
    lines = elsewhere(platform, code).splitlines()
    assert len(lines) == count
    assert "control groups | only Linux has them" in lines


def test_a_limit_is_refused_on_windows() -> None:
    code = (
        "from edgeft.errors import ConfigError\nfrom edgeft.host.limit import hard_limit\nfrom pathlib import Path\n"
        "try:\n with hard_limit(1 << 26, Path('/none')): print('limited')\n"
        "except ConfigError as error: print(error)"
    )
    assert "not available on Windows" in elsewhere("win32", code)


def test_files_are_read_and_written_at_offsets_on_windows(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\nfrom edgeft.host import files\n"
        f"handle = files.open_handle(Path({str(tmp_path / 'rows')!r}), os.O_RDWR | os.O_CREAT)\n"
        "files.write_at(handle, b'abcdef', 4)\nbuffer = bytearray(9)\n"
        "print(files.read_at(handle, memoryview(buffer), 6), bytes(buffer[:4]).decode())"
    )
    assert elsewhere("win32", code) == "4 cdef\n"


def test_files_are_read_and_written_at_offsets(tmp_path: Path) -> None:
    handle = files.open_handle(tmp_path / "rows", os.O_RDWR | os.O_CREAT)
    files.write_at(handle, b"abcdef", 4)
    buffer = bytearray(9)
    assert files.read_at(handle, memoryview(buffer), 6) == 4
    assert files.read_at(handle, memoryview(buffer), 10) == 0
    assert buffer[:4] == b"cdef"
    assert os.fstat(handle).st_mode & 0o777 == 0o600
    os.close(handle)


def test_a_process_without_prctl_ends_with_its_parent() -> None:
    """As on macOS and Windows: a thread waits for the parent."""
    code = (
        "import subprocess, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import sys, time; sys.platform = \"darwin\"; "
        "from edgeft.host.system import die_with_parent; die_with_parent(int(sys.argv[1])); "
        "print(1, flush=True); time.sleep(60)', str(os.getpid())], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid)"
    )
    done = subprocess.run([sys.executable, "-c", "import os, sys\n" + code], capture_output=True, text=True, timeout=60)
    import psutil

    psutil.wait_procs([psutil.Process(int(done.stdout))] if psutil.pid_exists(int(done.stdout)) else [], timeout=10)
    assert not psutil.pid_exists(int(done.stdout))


# ---------------------------------------------------------------- locks


def test_locks_are_shared_or_exclusive(tmp_path: Path) -> None:
    first, second = LockFile(tmp_path / "lock"), LockFile(tmp_path / "lock")
    assert first.exclusive()
    assert not second.shared()
    assert first.shared()  # from exclusive to shared
    assert second.shared()
    assert not first.exclusive()
    second.close()
    assert first.exclusive()


def test_a_lock_is_held_by_the_child_that_inherits_it_after_its_parent_was_killed(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys; from pathlib import Path; from edgeft.host.files import LockFile\n"
        "lock = LockFile(Path(sys.argv[1])); assert lock.exclusive()\n"
        "child = subprocess.Popen(['sleep', '60'], pass_fds=[lock.handle], stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE, timeout=60)
    lock = LockFile(tmp_path / "lock")
    assert not lock.exclusive()
    os.kill(int(done.stdout), signal.SIGKILL)
    assert lock.exclusive(wait=True)


def test_a_deleted_lock_file_is_not_current(tmp_path: Path) -> None:
    lock = LockFile(tmp_path / "lock")
    assert lock.is_current()
    LockFile(tmp_path / "lock").delete()
    assert not lock.is_current()
    LockFile(tmp_path / "lock")
    assert not lock.is_current()
