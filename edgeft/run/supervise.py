"""Runs each stage in its own process, so that the memory peak of one is not added to the next.

A stage ends with this process, gets each stop request once, and holds the lock of the run until it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from edgeft.errors import DoesNotFitError, EdgeftError, KilledError, StoppedError
from edgeft.host import system
from edgeft.host.limit import Limit
from edgeft.run.folder import Run
from edgeft.run.record import Allowance

STOPPED = 130  # the exit code after Ctrl-C or SIGTERM
ERROR_BYTES = 4000  # of a message to the parent: fits into a pipe buffer

# Not `python -m edgeft`: that would import modules from the current folder first, where the user's own files are.
BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "import json; job = json.loads(sys.argv[1]); sys.path[:] = job['path']; "
    "import importlib; importlib.import_module(job['worker']).main()"
)


class StageRunner:
    """Runs one stage at a time; as a context manager, it forwards stop requests to the stage."""

    worker = "edgeft.pipeline.worker"  # the module whose `main` is the stage's process
    command = "edgeft finetune"

    def __init__(
        self, run: Run, allowed: Allowance = Allowance(), to_stderr: bool = False, limit: Limit | None = None
    ) -> None:
        self.run, self.allowed, self.to_stderr, self.limit = run, allowed, to_stderr, limit
        self.child: subprocess.Popen[bytes] | None = None
        self.stop_requests = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StageRunner:
        with contextlib.suppress(ValueError):  # not the main thread: signals are the caller's
            for number in system.stop_signals():
                self._before[number] = signal.signal(number, self._stop)
            self._before |= system.handle_suspend(self._suspend)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: Any) -> None:
        """The first request is forwarded as SIGTERM, whatever it was: a stage that also got the SIGINT still sees one
        request only. A second Ctrl-C is forwarded as it is."""
        self.stop_requests += 1
        if self.child is not None:
            system.request_stop(self.child, signal.SIGTERM if self.stop_requests == 1 else number)

    def _suspend(self, number: int, frame: Any) -> None:
        """Ctrl-Z does not reach the stage, which is in a process group of its own."""
        system.suspend_with(self.child)

    def do(self, name: str) -> int:
        """Runs one stage to its end; returns its peak in bytes."""
        if self.stop_requests:
            raise KeyboardInterrupt
        answers, answer = os.pipe()
        lock = self.run.lock_handle()
        handles = [system.inheritable(handle) for handle in (answer, lock) if handle is not None]
        given = {
            "path": sys.path,
            "worker": self.worker,
            "run": str(self.run.path),
            "stage": name,
            "allowed": asdict(self.allowed),
            "to_stderr": self.to_stderr,
            "answer": handles[0],
            "lock": handles[1] if len(handles) > 1 else None,
            "parent": os.getpid(),
        }
        command = [sys.executable, "-c", BOOT, json.dumps(given), f"edgeft {name}"]
        sys.stdout.flush()
        try:
            child = subprocess.Popen(command, **system.child_options(handles, self.limit.join if self.limit else None))
            self.child = child
            os.close(answer)
            if self.stop_requests:  # while it was starting
                system.request_stop(child)
            code = child.wait()
            self.child = None
            data = system.read_available(answers, 1 << 16)
        finally:
            os.close(answers)
        return self._result(name, code, data)

    def _result(self, name: str, code: int, data: bytes) -> int:
        try:
            result = json.loads(data)
        except ValueError:
            result = {}
        if "error" in result:
            error = (DoesNotFitError if code == DoesNotFitError.exit_code else EdgeftError)(*result["error"])
            error.exit_code = code
            raise error
        if "pipe" in result:
            raise BrokenPipeError
        if code == STOPPED:
            raise KeyboardInterrupt
        hint = f"continue with `{self.command} --resume --out {self.run.path}`"
        if code < 0 and self.stop_requests:  # before it could handle signals
            raise StoppedError(f"stopped in the {name} stage; completed work is kept", hint)
        if system.was_killed(code) and self.limit is not None and self.limit.kills:
            raise DoesNotFitError(
                f"the {name} stage used more than {self.limit.bytes >> 20} MiB and was killed by the limit that "
                f"--enforce set ({self.limit.kind})",
                f"{hint} and a larger --memory; completed work is kept",
            )
        if code < 0:
            killed = signal.Signals(-code)
            memory = " (out of memory?)" if system.was_killed(code) else ""
            smaller = "; `--set how.micro_batch_tokens=256` needs less memory" if memory and name == "train" else ""
            raise KilledError(f"the {name} stage was killed by {killed.name}{memory}", hint + smaller, killed)
        if code:  # a bug: its traceback is on the screen
            raise SystemExit(code)
        return int(result["peak"])
