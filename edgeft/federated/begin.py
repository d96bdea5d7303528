"""The first and the last step on the server: a run folder to a federation's state, and its result to a trained run.

The directions of low-rank updates, channels, and the support of `--send top:1%` are chosen by the gradients of the
server's own rows: no device sends any for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from edgeft.data.forest import epoch_order
from edgeft.engine.stack import batch_of
from edgeft.errors import ConfigError, EdgeftError, RunError
from edgeft.federated.local import write_result
from edgeft.federated.server import ServerState
from edgeft.federated.task import Terms
from edgeft.federated.update import Indices, Layout
from edgeft.pipeline import stages
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.run.record import Allowance
from edgeft.train.loop import Trainer

SUPPORT_ROWS = 32  # of the server, whose gradient chooses the support


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
        ServerState(self._rated(), self.rule, fixed, trained, self._support()).save(self.run)

    def _rated(self) -> Terms:
        """With the rate that the loss of the server's held-out rows asks for: devices hold none out."""
        rate, far = self.schedule.low_rank_peak, replace(self.schedule, base_loss=self.base_loss).low_rank_peak
        train = self.terms.recipe["train"]
        rated = {**train, "low_rank_lr": (train["low_rank_lr"] or train["lr"]) * far / rate, "lr_loss": 0.0}
        return replace(self.terms, recipe={**self.terms.recipe, "train": rated}) if far > rate else self.terms

    def _support(self) -> Indices | None:
        """The numbers with the largest gradients: squares of single rows, as rows take from each other in a sum."""
        send = self.terms.sends
        if send.dense:
            return None
        rows = epoch_order(self.forest, self.rows, self.recipe.train.seed, 0, grouped=False)[:SUPPORT_ROWS]
        squares = {name: torch.zeros_like(parameter.detach()) for name, parameter in self.parameters.items()}
        for row in rows:
            nodes, batch = batch_of(self.forest, [row], self.live)
            (self.loss(nodes, batch) / self.forest.trained([row])).backward()  # type: ignore[no-untyped-call]
            for name, parameter in self.parameters.items():
                if parameter.grad is not None:
                    squares[name] += parameter.grad.square()
            self.optimizer.clear()
        flat = Layout.of(squares).flatten(squares)
        if not np.isfinite(flat).all():
            raise EdgeftError("the gradient of the server's rows is NaN or infinite", "check the model and --data")
        self.progress.line(f"{send.count(len(flat)):,} numbers are trained: the largest gradients of {len(rows)} rows")
        return send.choose(flat)


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
