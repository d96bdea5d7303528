"""What a device keeps between rounds: the update as it was sent, and what was not sent. numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeft.federated import blob
from edgeft.federated.task import Task
from edgeft.federated.update import Vector, decode
from edgeft.run.folder import Run


def task_file(run: Run) -> Path:
    return run.path / "task.bin"


def device_file(run: Run) -> Path:
    return run.path / "device.bin"


@dataclass(frozen=True)
class DeviceState:
    """What a device keeps after a round: the update as it was sent, and what was not sent."""

    federation: str
    round: int
    digest: str  # of the task
    rows: int
    update: bytes
    residual: Vector

    @staticmethod
    def load(run: Run) -> DeviceState | None:
        found = blob.read(device_file(run), "delete it: what this device has not sent yet is lost")
        if found is None:
            return None
        header, arrays = found
        return DeviceState(**header, update=arrays["update"].tobytes(), residual=arrays["residual"])

    def save(self, run: Run) -> None:
        header = {"federation": self.federation, "round": self.round, "digest": self.digest, "rows": self.rows}
        arrays: blob.Arrays = {"update": np.frombuffer(self.update, np.uint8), "residual": self.residual}
        blob.write(device_file(run), blob.pack(header, arrays))

    def kept(self, task: Task) -> Vector | None:
        """What is added to the next update: what was not sent, and what was sent and did not reach the model."""
        layout, send = task.layout, task.terms.sends
        if self.federation != task.terms.federation or send.dense or len(self.residual) != layout.size:
            return None
        lost = self.round > task.accepted
        return self.residual + decode(self.update, layout, send) if lost else self.residual
