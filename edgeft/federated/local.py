"""One round on a device: from the server's tensors, over this device's rows, to an update that is ready to be sent.

It works in a run folder with the same planner, trunk cache, governor and Trainer as `edgeft finetune`; frozen blocks
never change, so the trunk's cache is valid in all rounds. A round that is killed continues with the same bits, and one
that is complete is sent again as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from edgeft.data import tokens as data_tokens
from edgeft.errors import DataError, EdgeftError, StoppedError
from edgeft.federated.state import DeviceState, task_file
from edgeft.federated.task import Task
from edgeft.federated.update import Feedback
from edgeft.host.files import remove_tree
from edgeft.methods.layer import trained_linears
from edgeft.pipeline import stages
from edgeft.plan.flops import Schedule, support_rate
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.run.record import Allowance
from edgeft.train import checkpoint
from edgeft.train.loop import Trainer


@dataclass
class RoundSchedule(Schedule):
    """The part of one schedule over all rounds that belongs to one of them."""

    number: int = 0
    rounds: int = 1
    factor: float = 1.0  # of all rates

    def _share(self, step: int) -> float:
        steps = self.steps * self.rounds
        whole = Schedule(self.rows, replace(self.train, epochs=float(steps), steps=steps), self.width)
        return self.factor * whole._share(self.number * self.steps + step)


class RoundTrainer(Trainer):
    """Starts from a task's tensors; what it ends with is the result, whatever the loss was on the way."""

    def __init__(self, *given: Any, task: Task) -> None:
        run, stack, scheme, parameters, (rows, _), progress, nodes = given
        super().__init__(run, stack, scheme, parameters, (rows, []), progress, nodes)
        self.task = task
        plain = self.schedule
        terms = task.terms
        self.schedule = RoundSchedule(
            plain.rows,
            plain.train,
            plain.width,
            number=task.round,
            rounds=terms.rounds,
            factor=support_rate(terms.sends.share),
        )
        self._check_tensors()
        if not terms.sends.dense:
            masks = task.layout.split(np.ones(task.layout.size, np.float32))
            self.optimizer.masks = {name: torch.from_numpy(mask != 0) for name, mask in masks.items()}

    def step_rows(self, step: int) -> list[int]:
        """Each round has an order of its own."""
        epochs = -(-self.schedule.steps // self.schedule.per_epoch)
        return super().step_rows(step + self.task.round * epochs * self.schedule.per_epoch)

    def _begin(self) -> None:
        checkpoint.delete(self.run.best)
        with torch.no_grad():
            for name, array in {**self.task.fixed, **self.task.trained}.items():
                self.stored[name].copy_(torch.from_numpy(array))
        self.save()

    def _validate(self) -> None:
        self.best_step = self.step
        self.save()

    def _stopped(self) -> StoppedError:
        return StoppedError(
            f"stopped at step {self.step} of {self.schedule.steps} of a round; everything so far is saved",
            "continue with the same `edgeft federate` command",
        )

    def _check_tensors(self) -> None:
        """DataError unless the task has exactly the tensors of this device's scheme."""
        arrays = {**self.task.fixed, **self.task.trained}
        wanted = {name: tuple(tensor.shape) for name, tensor in self.stored.items()}
        wrong = sorted(wanted.items() ^ {name: array.shape for name, array in arrays.items()}.items())
        if wrong or self.task.trained.keys() != set(self.parameters):
            raise DataError(f"the server's tensors are not those of its scheme{f': {wrong[0]}' if wrong else ''}")
        inputs = {path: layer.in_features for path, layer in trained_linears(self.stack).items()}
        for name, array in self.task.fixed.items():
            if array.dtype != self.stored[name].numpy().dtype:
                raise DataError(f"the server's {name} is {array.dtype}")
            indices = array.dtype.kind in "iu" and array.size  # the channels that are trained
            ascends = indices and (np.diff(array) > 0).all()
            if indices and not (ascends and array[0] >= 0 and array[-1] < inputs[name.rpartition(".")[0]]):
                raise DataError(f"the server's {name} names channels that the model does not have")


def local_round(run: Run, progress: Progress, allowed: Allowance = Allowance()) -> None:
    """The task in `task.bin`; the result is in `device.bin`."""
    task, before = Task.unpack(task_file(run).read_bytes()), DeviceState.load(run)
    if before is not None and before.digest == task.digest:
        return
    _clear_if_other(run, task)
    stages.train(run, progress, allowed, partial(RoundTrainer, task=task))
    layout = task.layout
    trained = {name: tensor.numpy() for name, tensor in checkpoint.read(run.best)[0].items() if name in task.trained}
    delta = layout.flatten(trained) - layout.flatten(task.trained)
    if not np.isfinite(delta).all():
        raise EdgeftError("this round's update has numbers that are NaN or infinite", "it is not sent")
    terms = task.terms
    if terms.noise is not None:
        delta = terms.noise.protect(delta, terms.min_clients)
    feedback = Feedback(layout, before.kept(task) if before else None)
    data, residual = feedback.encode(delta, terms.sends)
    rows = len(data_tokens.load(run.tokens, texts=False)[0])
    DeviceState(terms.federation, task.round, task.digest, rows, data, residual).save(run)


def _clear_if_other(run: Run, task: Task) -> None:
    """Deletes checkpoints of another task; the mark is written last, so that a kill in between starts over."""
    mark = run.path / "round.json"
    if (run.read_json(mark) or {}).get("digest") == task.digest:
        return
    for path in (run.done, run.best, run.checkpoints):
        remove_tree(path)
    run.write_json(mark, {"round": task.round, "digest": task.digest})


def keep_model(run: Run, progress: Progress) -> None:
    """The final task's model as the result of this device's run, which `edgeft export` and `edgeft chat` read."""
    task = Task.unpack(task_file(run).read_bytes())
    write_result(run, task, {})
    progress.line(f"the model of round {task.round} is here: `edgeft export {run.path}` writes it")


def write_result(run: Run, task: Task, more: dict[str, Any]) -> None:
    """As a complete training: the best checkpoint, and done.json."""
    tensors = {name: torch.from_numpy(array) for name, array in {**task.fixed, **task.trained}.items()}
    checkpoint.write(run.best, tensors, {"step": task.round, "best_step": task.round})
    done = {"steps": task.round, "best_step": task.round, "trained_parameters": task.layout.total}
    run.write_json(run.done, {**done, **more})
