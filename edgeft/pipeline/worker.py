"""The process of one stage."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from edgeft.errors import DoesNotFitError, EdgeftError
from edgeft.host.system import die_with_parent, inherited, lower_priority, peak_bytes, stop_signals
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.run.record import Allowance
from edgeft.run.supervise import ERROR_BYTES, STOPPED

DoStage = Callable[[Run, str, Progress, Allowance], None]


def main(do_stage: DoStage | None = None) -> None:
    """A stage's process. It prints progress; an error goes to the parent, which prints it.

    do_stage: in place of `stages.do_stage`.
    """
    job = json.loads(sys.argv[1])
    die_with_parent(job["parent"])
    answer = inherited(job["answer"])
    if job["lock"] is not None:
        inherited(job["lock"])
    stop_requests: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        stop_requests.append(number)
        if len(stop_requests) == 1 or number == signal.SIGINT:
            raise KeyboardInterrupt

    for number in stop_signals():
        signal.signal(number, interrupt)
    code, result = 0, {}
    try:
        run = Run.open(job["run"])
        lower_priority(run.recipe.how.nice)
        from rich.console import Console

        from edgeft.pipeline import stages
        from edgeft.ui.screen import Screen

        with Screen(Console(stderr=job["to_stderr"], highlight=False)) as screen:
            (do_stage or stages.do_stage)(run, job["stage"], screen, Allowance(**job["allowed"]))
        sys.stdout.flush()
    except EdgeftError as error:
        code, result["error"] = error.exit_code, [error.message[:ERROR_BYTES], error.hint[:ERROR_BYTES]]
    except (MemoryError, RuntimeError) as error:
        from edgeft.train.watch import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        hint = f"completed work is kept; with more memory, continue with `edgeft finetune --resume --out {job['run']}`"
        code = DoesNotFitError.exit_code
        result["error"] = [f"out of memory in the {job['stage']} stage", hint]
    except KeyboardInterrupt:
        code = STOPPED
    except BrokenPipeError:
        result["pipe"] = []
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads the rest
    os.write(answer, json.dumps({**result, "peak": peak_bytes()}).encode())
    sys.exit(code)
