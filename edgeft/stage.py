"""Stages in processes of their own: what one needed is given back to the system before the next one begins.

The parent stays small (neither numpy nor torch), holds the run's lock and passes signals on; no stage outlives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from edgeft.errors import DoesNotFitError, EdgeftError, KilledError, StoppedError
from edgeft.limit import Limit, hard_limit
from edgeft.run import Run, read_json, write_json

STAGES = ("prepare", "train", "export", "eval")
STOPPED = 130  # the exit code after Ctrl-C or SIGTERM
PR_SET_PDEATHSIG = 1  # linux/prctl.h
ERROR_BYTES = 4000  # of a message handed to the parent: always fits into a pipe

# Not `python -m edgeft`: that would look for modules in the current folder first, among the user's own files.
BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "import json; sys.path[:] = json.loads(sys.argv[1])['path']; from edgeft.stage import main; main()"
)


def complete(run: Run, name: str) -> bool:
    """A stage that is complete is not done again."""
    made = {
        "prepare": (run.tokens,),
        "train": (run.done,),
        "export": (run.model, run.exported),
        "eval": (run.evaluation,),
    }
    return all(file.is_file() and (file.suffix != ".json" or read_json(file) is not None) for file in made[name])


def finetune(
    run: Run,
    until: str,
    budget_bytes: int = 0,
    to_stderr: bool = False,
    fit: bool = False,
    enforce: bool = False,
) -> dict[str, Any]:
    """Every stage up to `until`; what comes out stands in the run folder, and is put together here.

    fit: what is learned may shrink to fit the budget; enforce: the system holds the stages to it.
    """
    peaks = read_json(run.peaks) or {}
    with contextlib.ExitStack() as contexts:
        limit = contexts.enter_context(hard_limit(budget_bytes)) if enforce else None
        children = contexts.enter_context(Children(run, budget_bytes, to_stderr, fit, limit))
        for name in STAGES[: STAGES.index(until) + 1]:
            if complete(run, name):
                continue
            if name == "train" and Run.open(run.path).recipe.update.unknown:
                peaks["search"] = children.do("search")  # what it found stands in the run's recipe
                write_json(run.peaks, peaks)
            try:
                peaks[name] = children.do(name)
            except EdgeftError:
                if name == "prepare":
                    run.discard_if_empty()  # a mistake in the call leaves no folder behind
                raise
            write_json(run.peaks, peaks)
    if until == STAGES[-1] and not run.recipe.how.keep_data:
        run.drop_data()
    wanted = STAGES[: STAGES.index(until) + 1]
    result: dict[str, Any] = {"run": str(run.path)}
    if "train" in wanted:
        result |= read_json(run.done) or {}
    result["peaks"] = {name: peaks[name] for name in peaks if name in (*wanted, "search")}
    if limit is not None:
        result["limit"] = {"bytes": limit.bytes, "by": limit.kind}
    if "export" in wanted:
        result["export"] = read_json(run.exported)
    if "eval" in wanted:
        result["eval"] = read_json(run.evaluation)
    return result


# ---------------------------------------------------------------- the parent's side


class Children:
    """Runs one stage at a time; as a context, it passes on what asks this process to stop."""

    def __init__(
        self, run: Run, budget_bytes: int, to_stderr: bool, fit: bool = False, limit: Limit | None = None
    ) -> None:
        self.run, self.budget_bytes, self.to_stderr, self.fit = run, budget_bytes, to_stderr, fit
        self.limit = limit
        self.child: subprocess.Popen[bytes] | None = None
        self.asked = 0  # how often this process was asked to stop
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Children:
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


# ---------------------------------------------------------------- the stage's side


def main() -> None:
    """A stage's process. It prints progress; an error goes to the parent, which prints it."""
    given = json.loads(sys.argv[1])
    _die_with(given["parent"])
    for handle in (given["answer"], given["lock"]):
        if handle is not None:
            os.set_inheritable(handle, False)
    asked: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) == 1 or number == signal.SIGINT:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    code, said = 0, {}
    try:
        run = Run.open(given["run"])
        stand_back(run.recipe.how.nice)
        from rich.console import Console

        from edgeft import pipeline
        from edgeft.screen import Screen

        with Screen(Console(stderr=given["to_stderr"], highlight=False)) as screen:
            pipeline.do_stage(run, given["stage"], screen, given["budget_bytes"], given["fit"])
        sys.stdout.flush()
    except EdgeftError as error:
        code, said["error"] = error.exit_code, [error.message[:ERROR_BYTES], error.hint[:ERROR_BYTES]]
    except (MemoryError, RuntimeError) as error:
        from edgeft.train.watch import is_refusal

        if not is_refusal(error):
            raise
        hint = f"what is complete is kept: `edgeft finetune --resume --out {given['run']}` goes on when there is more"
        code = DoesNotFitError.exit_code
        said["error"] = [f"the system gave the {given['stage']} stage no more memory", hint]
    except KeyboardInterrupt:
        code = STOPPED
    except BrokenPipeError:
        said["pipe"] = []
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to write has no reader
    os.write(given["answer"], json.dumps({**said, "peak": peak_bytes()}).encode())
    sys.exit(code)


def _die_with(parent: int) -> None:
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


def stand_back(nice: int) -> None:
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
