"""Stages in processes of their own: the peak of one is not added to the next."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from edgeft.errors import DoesNotFitError, EdgeftError, KilledError, StoppedError
from edgeft.host.limit import Limit
from edgeft.run.folder import Run

STOPPED = 130  # the exit code after Ctrl-C or SIGTERM

ERROR_BYTES = 4000  # of a message handed to the parent: always fits into a pipe

# Not `python -m edgeft`: that would look for modules in the current folder first, among the user's own files.
BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "import json; sys.path[:] = json.loads(sys.argv[1])['path']; from edgeft.pipeline.worker import main; main()"
)


class StageRunner:
    """Runs one stage at a time; as a context, it passes on what asks this process to stop."""

    def __init__(
        self, run: Run, budget_bytes: int, to_stderr: bool, fit: bool = False, limit: Limit | None = None
    ) -> None:
        self.run, self.budget_bytes, self.to_stderr, self.fit = run, budget_bytes, to_stderr, fit
        self.limit = limit
        self.child: subprocess.Popen[bytes] | None = None
        self.asked = 0  # how often this process was asked to stop
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StageRunner:
        with contextlib.suppress(ValueError):  # not the main thread: the caller stops us in its own way
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._stop)
            if signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
                self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._pause)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: Any) -> None:
        """The first request goes on as SIGTERM, whatever it was: if the stage was sent a SIGINT as well, it still sees
        one request only. A second Ctrl-C is not held back."""
        self.asked += 1
        if self.child is not None:
            self.child.send_signal(signal.SIGTERM if self.asked == 1 else number)

    def _pause(self, number: int, frame: Any) -> None:
        """Ctrl-Z: the stage is in a session of its own and does not hear it."""
        if self.child is not None:
            self.child.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # until `fg` or `bg`
        if self.child is not None:
            self.child.send_signal(signal.SIGCONT)

    def do(self, name: str) -> int:
        """One stage from start to end; its peak in bytes."""
        if self.asked:
            raise KeyboardInterrupt
        answers, answer = os.pipe()
        lock = self.run.lock_handle()
        given = {
            "path": sys.path,
            "run": str(self.run.path),
            "stage": name,
            "budget_bytes": self.budget_bytes,
            "fit": self.fit,
            "to_stderr": self.to_stderr,
            "answer": answer,
            "lock": lock,
            "parent": os.getpid(),
        }
        command = [sys.executable, "-c", BOOT, json.dumps(given), f"edgeft {name}"]
        sys.stdout.flush()
        try:
            # A session of its own: Ctrl-C in the terminal reaches this process alone, and the stage exactly once.
            child = subprocess.Popen(
                command,
                pass_fds=[answer] if lock is None else [answer, lock],
                start_new_session=True,
                preexec_fn=self.limit.join if self.limit else None,
            )
            self.child = child
            os.close(answer)
            if self.asked:  # while it was being started
                child.send_signal(signal.SIGTERM)
            code = child.wait()
            self.child = None
            os.set_blocking(answers, False)
            said = b""
            with contextlib.suppress(BlockingIOError):  # a grandchild may hold the other end
                said = os.read(answers, 1 << 16)
        finally:
            os.close(answers)
        return self._result(name, code, said)

    def _result(self, name: str, code: int, said: bytes) -> int:
        try:
            found = json.loads(said)
        except ValueError:
            found = {}
        if "error" in found:
            error = (DoesNotFitError if code == DoesNotFitError.exit_code else EdgeftError)(*found["error"])
            error.exit_code = code
            raise error
        if "pipe" in found:
            raise BrokenPipeError
        if code == STOPPED:
            raise KeyboardInterrupt
        hint = f"go on with `edgeft finetune --resume --out {self.run.path}`"
        if code < 0 and self.asked:  # before it could listen
            raise StoppedError(f"stopped in the {name} stage; what was complete is kept", hint)
        if code == -signal.SIGKILL and self.limit is not None and self.limit.kills:
            raise DoesNotFitError(
                f"the {name} stage took more than {self.limit.bytes >> 20} MiB and was ended by the limit that "
                f"--enforce set ({self.limit.kind})",
                f"{hint} and a larger --memory; what was complete is kept",
            )
        if code < 0:
            killed = signal.Signals(-code)
            memory = " (out of memory?)" if killed == signal.SIGKILL else ""
            smaller = "; `--set how.micro_batch_tokens=256` needs less memory" if memory and name == "train" else ""
            raise KilledError(f"the {name} stage was killed by {killed.name}{memory}", hint + smaller, killed)
        if code:  # a bug: its traceback stands on the screen
            raise SystemExit(code)
        return int(found["peak"])
