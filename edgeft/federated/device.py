"""A device that takes part: its run folder under the server's terms, and one task after the other.

No torch here: each round is a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgeft.config import Recipe
from edgeft.errors import EdgeftError
from edgeft.federated import blob
from edgeft.federated.server import Reply
from edgeft.federated.state import DeviceState, task_file
from edgeft.federated.task import Task, Terms, shared_recipe
from edgeft.formats.source import model_id, model_source
from edgeft.run.folder import Run

Step = Callable[[Run, str], object]  # runs one step of `worker` in a run folder


def open_device(folder: Path, terms: Terms, own: Recipe) -> Run:
    """The device's run folder, new or as it was; ModelError for another base model. own: its data, model and knobs."""
    source = model_source(own.model.path)
    terms.check_model(model_id(source), source)
    return Run.start(folder, shared_recipe(terms, own), resume=(folder / "recipe.yaml").exists())


class Device:
    """`answer` turns a task into a reply."""

    def __init__(self, name: str, run: Run, terms: Terms, step: Step) -> None:
        self.name, self.run, self.terms, self.step = name, run, terms, step
        self.finished = False  # the server has ended the federation

    def answer(self, data: bytes) -> Reply:
        """EdgeftError if the round cannot be done; whatever is complete is kept for the next attempt."""
        task = self._read(data)
        if not self.run.tokens.is_file():
            self.step(self.run, "prepare")
        blob.write(task_file(self.run), data)
        self.step(self.run, "round")
        return self.result(task)

    def finish(self, data: bytes) -> None:
        """Keeps the federation's model as the result of this device's run."""
        if self._read(data).final:
            blob.write(task_file(self.run), data)
            self.step(self.run, "keep")
            self.finished = True

    def _read(self, data: bytes) -> Task:
        task = Task.unpack(data)
        if task.terms != self.terms:
            raise EdgeftError("the server changed its terms", "join again")
        return task

    def result(self, task: Task) -> Reply:
        state = DeviceState.load(self.run)
        if state is None or state.digest != task.digest:
            raise EdgeftError(f"round {task.round + 1} left no update in {self.run.path}")
        return Reply(self.name, state.update, state.rows)
