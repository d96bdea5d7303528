"""What differs between operating systems, behind one interface that the rest of the package calls.

Importing it needs nothing that a system lacks; `missing` lists what this one cannot do.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
KILLED = 137  # the exit code of a process that was ended by SIGKILL


def missing() -> list[tuple[str, str]]:
    """(feature, what happens without it) on this system; what depends on the machine is up to doctor.py."""
    if sys.platform == "linux":
        return [] if _libc("malloc_trim") else [("return of freed memory", "this C library has no malloc_trim")]
    lacks = [
        ("control groups", "only Linux has them"),
        ("weights in fast types", "only Linux has memfd: evaluation reads the file as it is"),
        ("temperatures and throttling", "only Linux's sensors are read: runs do not pause for heat"),
        ("return of freed memory", "only glibc has malloc_trim: how.spare_memory saves less"),
        ("end with the parent", "a stage polls for its parent and may outlive it for a second"),
        ("disk priority", "how.nice lowers the priority at the processor only"),
    ]
    if sys.platform == "darwin":
        return [*lacks, ("processor affinity", "all cores count as available")]
    return [
        *lacks,
        ("hard memory limit", "--enforce is refused"),
        ("shared locks", "an entry of the shared cache is used by one run at a time"),
        ("page advice", "how.spare_memory cannot release pages of mapped weights"),
        ("memory limit for templates", "a model's chat template is limited in time only"),
        ("Ctrl-Z", "a run cannot be suspended from the terminal"),
    ]


def die_with_parent(parent: int) -> None:
    """Ends this process when its parent ends, even by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), signal.SIGKILL)
        return
    import psutil

    def watch() -> None:  # not os.getppid: on Windows, a virtual environment's launcher stands between
        with contextlib.suppress(psutil.Error):
            psutil.Process(parent).wait()
        os._exit(KILLED)

    threading.Thread(target=watch, daemon=True).start()


def lower_priority(nice: int) -> None:
    """Lowers the CPU and disk priority; call it before threads start, which inherit it."""
    if not nice:
        return
    import psutil

    process = psutil.Process()
    if sys.platform == "win32":
        process.nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
        return
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    if sys.platform == "linux":
        with contextlib.suppress(OSError, psutil.Error):
            process.ionice(psutil.IOPRIO_CLASS_BE, 7)  # the lowest level that is not starved


def peak_bytes() -> int:
    """Highest resident memory of this process so far."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def allowed_cpus() -> set[int]:
    """Logical CPUs that this process may run on."""
    if sys.platform == "linux":
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _libc(name: str) -> Any:
    """A function of the C library; None where it has none of this name (musl, macOS, Windows)."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def set_malloc_option(option: int, value: int) -> None:
    """glibc's mallopt, for this process from now on."""
    if (mallopt := _libc("mallopt")) is not None:
        mallopt(option, value)


def trim_malloc() -> None:
    """Returns freed memory to the system."""
    if (trim := _libc("malloc_trim")) is not None:
        trim(0)


def advise(mapped: mmap.mmap, advice: str, start: int, length: int) -> None:
    """madvise by the advice's name, on whole pages."""
    if sys.platform != "win32" and hasattr(mmap, advice):
        mapped.madvise(getattr(mmap, advice), start, length)


def child_options(handles: Sequence[int] = (), before: Callable[[], None] | None = None) -> dict[str, Any]:
    """For Popen: a process group of its own, so that Ctrl-C in the terminal reaches this process alone.

    Not a session: Linux weighs sessions against each other before it looks at niceness (autogroup), so that a program
    of the lowest priority in another one takes half of the cores.
    handles: from `inheritable`; before: called in the child before it becomes its program, not on Windows.
    """
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP, "close_fds": not handles}

    def begin() -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it may write to the terminal, whatever `stty tostop` says
        if before is not None:
            before()

    return {"pass_fds": handles, "preexec_fn": begin}


def inheritable(handle: int) -> int:
    """The number by which a child knows this file descriptor."""
    if sys.platform == "win32":
        import msvcrt

        number = msvcrt.get_osfhandle(handle)
        os.set_handle_inheritable(number, True)
        return number
    return handle


def inherited(number: int) -> int:
    """In the child: the file descriptor behind that number; its own children do not inherit it."""
    handle = number
    if sys.platform == "win32":
        import msvcrt

        handle = msvcrt.open_osfhandle(number, os.O_BINARY)
    os.set_inheritable(handle, False)
    return handle


def read_available(handle: int, size: int) -> bytes:
    """The content of a pipe whose writer has ended; a grandchild may still hold the other end open."""
    if sys.platform == "win32":  # handles are inherited by name only: there is no grandchild to wait for
        return os.read(handle, size)
    os.set_blocking(handle, False)
    with contextlib.suppress(BlockingIOError):
        return os.read(handle, size)
    return b""


def stop_signals() -> tuple[int, ...]:
    """Signals that ask a process to stop."""
    if sys.platform == "win32":
        return signal.SIGINT, signal.SIGBREAK
    return signal.SIGINT, signal.SIGTERM


def request_stop(child: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
    """Windows has one request that reaches another process group; any other signal there ends the child."""
    if sys.platform == "win32":
        child.send_signal(signal.CTRL_BREAK_EVENT if number == signal.SIGTERM else signal.SIGTERM)
    else:
        child.send_signal(number)


def handle_suspend(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Sets a handler for Ctrl-Z, unless there is one; {signal: previous handler}."""
    if sys.platform != "win32" and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
        return {signal.SIGTSTP: signal.signal(signal.SIGTSTP, handler)}
    return {}


def suspend_with(child: subprocess.Popen[bytes] | None) -> None:
    """Suspends the child and this process until `fg` or `bg`."""
    if sys.platform != "win32":
        if child is not None:
            child.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if child is not None:
            child.send_signal(signal.SIGCONT)


def was_killed(code: int) -> bool:
    """By SIGKILL, as the system ends a process when memory is short."""
    return sys.platform != "win32" and code == -signal.SIGKILL


def set_alarm(seconds: float) -> None:
    """SIGALRM ends this process after so many seconds; 0 cancels it. Not on Windows."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)


def ended_by_alarm(code: int) -> bool:
    return sys.platform != "win32" and code == -signal.SIGALRM


@contextlib.contextmanager
def time_limit(child: subprocess.Popen[bytes], seconds: float) -> Iterator[threading.Event]:
    """Where a child can set no alarm, its parent kills it; the event is set if it did."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(seconds, kill)
    if sys.platform == "win32":
        timer.start()
    try:
        yield late
    finally:
        timer.cancel()
