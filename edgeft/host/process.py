"""This process: its priority, its peak memory, and that it ends with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Ends this process when its parent does, even by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:

        def watch() -> None:
            while os.getppid() == parent:
                time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()
    if os.getppid() != parent:  # it was gone before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def lower_priority(nice: int) -> None:
    """Lets other programs go first, at the processor and at the disk; before there are threads, which inherit it."""
    if not nice:
        return
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    # Linux weighs sessions against each other before processes, and a stage has a session of its own.
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
        file.write(str(nice))
    import psutil

    if hasattr(psutil, "IOPRIO_CLASS_BE"):  # Linux
        with contextlib.suppress(OSError, psutil.Error):
            psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)  # the last that is not starved


def peak_bytes() -> int:
    """Highest resident memory of this process so far."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
