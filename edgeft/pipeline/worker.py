"""The process of one stage."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from edgeft.errors import DoesNotFitError, EdgeftError
from edgeft.host.system import die_with_parent, inherited, lower_priority, peak_bytes, stop_signals
from edgeft.run.folder import Run
from edgeft.run.record import Allowance
from edgeft.run.supervise import ERROR_BYTES, STOPPED


def main() -> None:
    """A stage's process. It prints progress; an error goes to the parent, which prints it."""
    given = json.loads(sys.argv[1])
    die_with_parent(given["parent"])
    answer = inherited(given["answer"])
    if given["lock"] is not None:
        inherited(given["lock"])
    asked: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) == 1 or number == signal.SIGINT:
            raise KeyboardInterrupt

    for number in stop_signals():
        signal.signal(number, interrupt)
    code, said = 0, {}
    try:
        run = Run.open(given["run"])
        lower_priority(run.recipe.how.nice)
        from rich.console import Console

        from edgeft.pipeline import stages
        from edgeft.ui.screen import Screen

        with Screen(Console(stderr=given["to_stderr"], highlight=False)) as screen:
            stages.do_stage(run, given["stage"], screen, Allowance(**given["allowed"]))
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
    os.write(answer, json.dumps({**said, "peak": peak_bytes()}).encode())
    sys.exit(code)
