"""Data parallel training: the rows of a step are split over several nodes, and their gradients summed.

After every step all nodes have the same weights: each adds the same sums to them. torch.distributed over gloo; one node
alone does nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edgeft.engine.memory import Gradients
from edgeft.errors import ConfigError, EdgeftError
from edgeft.host import cluster
from edgeft.host.files import atomic_write
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train import checkpoint
from edgeft.train.totals import StepTotals

WAIT = timedelta(minutes=30)  # for a node that has not come, or that pauses
TRUNK = timedelta(days=2)  # for one whose trunk takes longer
BUCKET = 1 << 18  # gradients that are sent together


class NodeLostError(EdgeftError):
    """The connection to another node ended."""


class Nodes:
    def __init__(self, place: cluster.Place = cluster.Place()) -> None:
        self.rank, self.count = place.rank, place.count
        self.sums: GradientSums | None = None  # of the step that is being completed

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

    def agree(self, stops: bool = False) -> bool:
        """Whether all complete this step: once a step, before a node's last backward pass, or where it stops."""
        return not self.sum(float(stops))[0]

    @contextmanager
    def adding(self, parameters: Iterable[nn.Parameter], written: Gradients) -> Iterator[None]:
        """Around the backward pass that completes this node's gradients; written: those that layers add themselves."""
        if not self.several:
            yield
            return
        self.sums = GradientSums(parameters)
        handles = [parameter.register_post_accumulate_grad_hook(self.sums.ready) for parameter in self.sums.parameters]
        written.on_ready = self.sums.ready
        try:
            yield
        finally:
            written.on_ready = None
            for handle in handles:
                handle.remove()

    def add(self, totals: StepTotals, parameters: Iterable[nn.Parameter]) -> StepTotals:
        """Of a step on all nodes, with their gradients added."""
        if not self.several:
            return totals
        sums, self.sums = self.sums or GradientSums(parameters), None  # a node without rows has only zeros to add
        sums.finish()
        loss, tokens, flops = self.sum(totals.loss, totals.tokens, totals.flops)
        return StepTotals(loss, int(tokens), flops)

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


class GradientSums:
    """Gradients of all nodes, added while the backward pass computes those of lower blocks.

    All nodes send in the same order, that in which a backward pass is expected to complete them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in reversed([*parameters]) if parameter.requires_grad]
        self.buckets = list(_buckets(self.parameters))
        self.place = {parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket}
        self.missing = [len(bucket) for bucket in self.buckets]
        self.sent: list[tuple[torch.Tensor, torch.distributed.Work]] = []

    def ready(self, parameter: torch.Tensor) -> None:
        """Its gradient is complete on this node."""
        self.missing[self.place[parameter]] -= 1  # type: ignore[index]
        while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[len(self.sent)]
        flat = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in bucket])
        with _connected():
            self.sent.append((flat, torch.distributed.all_reduce(flat, async_op=True)))

    def finish(self) -> None:
        """Gradients become their sums; one that no node has stays None."""
        while len(self.sent) < len(self.buckets):
            self._send()
        for bucket, (flat, work) in zip(self.buckets, self.sent, strict=True):
            with _connected():
                work.wait()
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                if not part.any():
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = part.view(parameter.shape)
                else:
                    parameter.grad.view(-1).copy_(part)


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


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Consecutive ones of about BUCKET numbers."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        bucket.append(parameter)
        if sum(one.numel() for one in bucket) >= BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
