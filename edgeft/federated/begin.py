"""The first and the last step on the server: a run folder to a federation's state, and its result to a trained run.

The directions of low-rank updates, and channels, are chosen by the gradients of the server's own rows: no device sends
any for that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from edgeft.errors import ConfigError, RunError
from edgeft.federated.local import write_result
from edgeft.federated.server import ServerState
from edgeft.federated.task import Terms
from edgeft.pipeline import stages
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.run.record import Allowance
from edgeft.train.loop import Trainer


class BeginTrainer(Trainer):
    """Chooses what the scheme leaves open, and trains nothing."""

    def __init__(self, *given: Any, terms: Terms, rule: str) -> None:
        super().__init__(*given)
        self.terms, self.rule = terms, rule
        stand_ins = self.parameters.keys() - self.stored.keys()
        if stand_ins:
            raise ConfigError(
                f"`update.method: {self.recipe.update.method}` trains no float32 numbers that could be averaged",
                "use `sparse-bp`",
            )

    def _fit(self, stopping: Callable[[], bool]) -> None:
        self._begin()
        trained = {name: self.stored[name].detach().numpy() for name in self.parameters}
        fixed = {name: tensor.numpy() for name, tensor in self.stored.items() if name not in trained}
        ServerState(self.terms, self.rule, fixed, trained).save(self.run)


def begin(run: Run, progress: Progress, allowed: Allowance = Allowance()) -> None:
    """The terms are in `terms.json`; the state of round 0 is in `federation.bin`."""
    if ServerState.file(run).is_file():
        return
    given = run.read_json(run.path / "terms.json")
    if given is None:
        raise RunError(f"{run.path} has no terms of a federation", "start it with `edgeft federate serve`")
    rule = given.pop("rule")
    stages.train(run, progress, allowed, partial(BeginTrainer, terms=Terms.read(given), rule=rule))


def finish(run: Run, progress: Progress) -> None:
    """The federation's model as the best checkpoint of its run: export, eval and report read it as any other."""
    state = ServerState.load(run)
    if state is None or not state.round:
        raise RunError(f"{run.path} has no complete round", "start it with `edgeft federate serve`")
    seconds = round(sum(one["seconds"] for one in state.history), 2)
    write_result(run, state.final_task(), {"train_seconds": seconds, "federation": state.summary()})
    progress.line(f"the model of round {state.round} is the run's result")
