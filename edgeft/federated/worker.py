"""The process of one step of a federation in a run folder: begin and finish on the server, round and keep on a device.

Prepare, export and eval are those of `edgeft finetune`.
"""

from __future__ import annotations

from edgeft.pipeline import worker
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.run.record import Allowance
from edgeft.run.supervise import StageRunner


class Runner(StageRunner):
    """Runs these steps as StageRunner runs stages."""

    worker = "edgeft.federated.worker"
    command = "edgeft federate …"


def do_step(run: Run, name: str, progress: Progress, allowed: Allowance = Allowance()) -> None:
    from edgeft.federated import begin, local
    from edgeft.pipeline import stages

    if name not in ("begin", "round", "keep", "finish"):
        stages.do_stage(run, name, progress, allowed)
        return
    with run.stage(name):
        if name == "begin":
            begin.begin(run, progress, allowed)
        elif name == "round":
            local.local_round(run, progress, allowed)
        elif name == "keep":
            local.keep_model(run, progress)
        else:
            begin.finish(run, progress)


def main() -> None:
    worker.main(do_step)
