"""Data parallel training: the rows of a step are split over several nodes, and their gradients summed.

After every step all nodes have the same weights: each adds the same sums to them. torch.distributed over gloo; one node
alone does nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edgeft.errors import ConfigError, EdgeftError
from edgeft.host import cluster
from edgeft.host.files import atomic_write
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train import checkpoint
from edgeft.train.totals import StepTotals

WAIT = timedelta(minutes=30)  # for a node that has not come, or that pauses
TRUNK = timedelta(days=2)  # for one whose trunk takes longer
BUCKET = 1 << 20  # gradients that are sent together


class NodeLostError(EdgeftError):
    """The connection to another node ended."""


class Nodes:
    def __init__(self, place: cluster.Place = cluster.Place()) -> None:
        self.rank, self.count = place.rank, place.count

    @property
    def several(self) -> bool:
        return self.count > 1

    def sum(self, *numbers: float) -> list[float]:
        """Each, over all nodes."""
        if not self.several:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        with _connected():
            torch.distributed.all_reduce(total)
        return total.tolist()  # type: ignore[no-any-return]

    def add(self, totals: StepTotals | None, parameters: Iterable[nn.Parameter]) -> StepTotals | None:
        """Of a step on all nodes, with their gradients added; None: one of them stops."""
        if not self.several:
            return totals
        mine = totals or StepTotals()
        stops, loss, tokens, flops = self.sum(float(totals is None), mine.loss, mine.tokens, mine.flops)
        if stops:
            return None
        self._add_gradients(parameters)
        return StepTotals(loss, int(tokens), flops)

    def _add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """A node without rows has no gradients yet."""
        active = [parameter for parameter in parameters if parameter.requires_grad]
        wanted = self.sum(*(float(parameter.grad is not None) for parameter in active))
        for parameter in (p for p, count in zip(active, wanted, strict=True) if count and p.grad is None):
            parameter.grad = torch.zeros(parameter.shape)
        gradients = [parameter.grad for parameter, count in zip(active, wanted, strict=True) if count]
        for bucket in _buckets([gradient for gradient in gradients if gradient is not None]):
            flat = torch.cat([gradient.view(-1) for gradient in bucket])
            with _connected():
                torch.distributed.all_reduce(flat)
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.view(-1).copy_(part)

    def align(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The first node's numbers: processors of different kinds round differently."""
        if not self.several:
            return
        for name in sorted(tensors):
            data = tensors[name].detach()
            sent = data.reshape(-1).view(torch.uint8)  # gloo knows few types
            with _connected():
                torch.distributed.broadcast(sent, 0)
            data.copy_(sent.view(data.dtype).view(data.shape))

    def check(self, facts: dict[str, Any]) -> None:
        """All nodes must have the same; otherwise all of them say which one has not."""
        every = self._gather(facts)
        for rank, other in enumerate(every):
            for what in facts:
                if other[what] != every[0][what]:
                    hint = "give every node the same model, rows and recipe, and the same --set options"
                    raise ConfigError(f"node {rank} has another {what} than node 0", hint)

    def wait(self) -> None:
        """Until all are here: their trunks may take longer than anything else."""
        if self.several:
            with _connected():
                torch.distributed.monitored_barrier(timeout=TRUNK)

    def take_newest(self, run: Run, report: checkpoint.Report) -> None:
        """Before a resume: nodes that stopped at an earlier step get the newest checkpoint, and the best one."""
        if not self.several:
            return
        found = checkpoint.newest(run.checkpoints, report, checkpoint.skip, run.best)
        steps = self._gather(-1 if found is None else int(found[1]["step"]))
        newest = max(steps)
        if len(set(steps)) == 1:
            return
        source = steps.index(newest)
        named = checkpoint.name(run.checkpoints, newest)
        mine = named if named.is_file() else run.best
        for path, where in ((mine, named), (run.best, run.best)):
            data = self._sent_file(path if path.is_file() else None, source)
            if data is not None and steps[self.rank] != newest:
                where.parent.mkdir(exist_ok=True)
                with atomic_write(where) as file:
                    file.write(data)

    def _sent_file(self, path: Path | None, source: int) -> memoryview | None:
        """The source's file, or None if it has none."""
        mine = self.rank == source
        content = np.fromfile(path, np.uint8) if mine and path is not None else np.empty(0, np.uint8)
        (size,) = self.sum(float(len(content)))
        if not size:
            return None
        data = torch.from_numpy(content) if mine else torch.empty(int(size), dtype=torch.uint8)
        with _connected():
            torch.distributed.broadcast(data, source)
        return data.numpy().data

    def _gather(self, value: Any) -> list[Any]:
        """Every node's, by rank."""
        if not self.several:
            return [value]
        every: list[Any] = [None] * self.count
        with _connected():
            torch.distributed.all_gather_object(every, value)
        return every


@contextmanager
def joined(progress: Progress) -> Iterator[Nodes]:
    """The nodes that the environment names, connected; often this machine alone."""
    place = cluster.place()
    if place.count == 1:
        yield Nodes()
        return
    import torch.distributed

    progress.line(f"node {place.rank} of {place.count}, waiting for the others at {cluster.address()}")
    try:
        torch.distributed.init_process_group("gloo", timeout=WAIT)
    except (RuntimeError, ValueError) as error:
        what = f"the nodes did not find each other at {cluster.address()}: {_reason(error)}"
        raise EdgeftError(what, "start the same command on every node, and let its firewall pass") from None
    try:
        yield Nodes(place)
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def _connected() -> Iterator[None]:
    """torch.distributed reports a lost node as a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        peer = re.search(r"\[([0-9A-Fa-f.:]+)\]:\d+", str(error))
        which = f"the node at {peer[1]}" if peer else "another node"
        hint = "once it is back, start the same command with --resume on every node"
        raise NodeLostError(f"{which} was lost: {_reason(error)}", hint) from None


def _reason(error: Exception) -> str:
    """The first sentence, without the path of torch's source."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip())
    return re.split(r"\. |\n", text)[0][:200] or "no message"


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Consecutive ones of about BUCKET numbers."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(one.numel() for one in bucket) >= BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
