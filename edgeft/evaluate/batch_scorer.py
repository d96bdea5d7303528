"""Many rows through llama.cpp in one batch: prompts as a prefix tree, options as its branches, answers token by token.

The result of a row does not depend on the other rows of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgeft.data.tokens import common_prefix
from edgeft.evaluate.request import Request, Response, RowProgress
from edgeft.plan.limits import BATCH, CELLS, OUTPUTS

if TYPE_CHECKING:
    from edgeft.evaluate.llamacpp import LlamaFile


Floats = npt.NDArray[np.float32]


@dataclass(eq=False)
class Cell:
    """One token in the KV cache; free when no branch contains it."""

    branches: int = 0


@dataclass(eq=False)
class Branch:
    """One sequence: its tokens from the start of the row, each with a cell of the KV cache."""

    seq: int
    ids: list[int] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    wanted: dict[int, int | None] = field(default_factory=dict)  # position → token to score; None: only the likeliest
    nll: dict[int, float] = field(default_factory=dict)  # position → nats of that token
    likeliest: dict[int, int] = field(default_factory=dict)  # position → the likeliest next token
    first: int = 0  # position of its first step; earlier tokens are in the cache
    steps: list[Step] = field(default_factory=list)  # including those shared with other branches


@dataclass(eq=False)
class Step:
    """One token to compute, for all branches that contain it."""

    token: int
    position: int
    cell: Cell
    branches: list[Branch]

    @property
    def needs_logits(self) -> bool:
        return any(self.position in branch.wanted for branch in self.branches)


def token_nll(logits: Floats, token: int) -> float:
    """-log p(token), in nats."""
    top = logits.max()
    return float(np.log(np.exp(logits - top).sum(dtype=np.float64)) + float(top) - float(logits[token]))


OPTIONS = 16  # of one prompt at a time: each is one sequence


@dataclass(eq=False)
class _Job:
    """A row, or some of its options: branches are read first, then the answer is generated."""

    row: int
    prompt: list[int]
    targets: list[int]  # positions in the prompt
    options: dict[int, list[int]]  # by number in the row, sorted by tokens
    room: int  # maximum tokens of the answer; 0: no answer
    branches: list[Branch] = field(default_factory=list)
    output: list[int] = field(default_factory=list)  # its last token is sampled and not computed yet

    @property
    def work(self) -> int:
        """For the progress bar: reading and generating count the same."""
        return 2 if self.room else 1

    def planned(self) -> list[Branch]:
        """Branches with their wanted positions; the last token of an option is not read."""
        last = len(self.prompt) - 1
        branches = [
            Branch(0, self.prompt + option[:-1], wanted={last + i: token for i, token in enumerate(option)})
            for option in self.options.values()
        ]
        if not branches:
            branches = [Branch(0, list(self.prompt) if self.room else self.prompt[: max(self.targets)])]
            if self.room:
                branches[0].wanted[last] = None
        branches[0].wanted |= {t - 1: self.prompt[t] for t in self.targets}
        return branches


class BatchScorer:
    """Runs the requests of one call; jobs wait sorted by prompt, so that neighbours share long prefixes."""

    def __init__(
        self, file: LlamaFile, requests: Sequence[Request], max_new: int, progress: RowProgress | None
    ) -> None:
        if not all(request.prompt for request in requests):
            raise ValueError("a prompt needs at least one token")
        self.file, self.progress = file, progress
        self.responses = [Response.empty(request) for request in requests]
        self.waiting: deque[_Job] = deque()
        self.running: list[_Job] = []
        at_once = min(OPTIONS, file.parallel)
        for row in sorted(range(len(requests)), key=lambda i: requests[i].prompt):
            request = requests[row]
            file.check_length(len(request.prompt) + max([len(o) - 1 for o in request.options], default=0))
            order = sorted(range(len(request.options)), key=request.options.__getitem__)
            room = min(max_new, file.n_ctx - len(request.prompt) + 1) if request.generate else 0
            for start in range(0, max(len(order), 1), at_once):
                options = {i: request.options[i] for i in order[start : start + at_once]}
                targets = [] if start else request.targets
                if targets or options or room:
                    self.waiting.append(_Job(row, request.prompt, targets, options, 0 if start else max(room, 0)))
        self.all_work = sum(job.work for job in self.waiting)
        self.work = 0  # done so far
        self.reported = 0  # rows, as last reported
        self.reserved = 0  # cells reserved for answers

    def run(self) -> list[Response]:
        if not self.waiting:
            return self.responses
        sizes = [len(j.prompt) + sum(len(o) - 1 for o in j.options.values()) + j.room for j in self.waiting]
        branches = [max(1, len(job.options)) for job in self.waiting]
        sequences = max(*branches, min(self.file.parallel, sum(branches)))
        self.file.reserve(max(sizes), sequences, preferred=min(CELLS, sum(sizes)))
        self.free = list(range(sequences, 0, -1))
        try:
            self._run()
        except BaseException:
            self.file.clear()  # it still holds branches
            raise
        return self.responses

    def _run(self) -> None:
        steps: deque[Step] = deque()
        reading: list[_Job] = []
        while self.waiting or self.running or steps:
            if not steps:
                reading = self._admit(steps)
            batch = [self._next(job) for job in self.running]
            outputs = OUTPUTS - len(batch)  # at least one: there are fewer sequences
            while steps and len(batch) < BATCH and (outputs or not steps[0].needs_logits):
                outputs -= steps[0].needs_logits
                batch.append(steps.popleft())
            self._compute(batch)
            for job in self.running:
                job.output.append(job.branches[0].likeliest[len(job.branches[0].ids) - 1])
            self.running = [job for job in self.running if not self._ended(job)]
            if not steps:
                self._finish_reading(reading)
                reading = []
            self._report_progress()

    def _admit(self, steps: deque[Step]) -> list[_Job]:
        """Start as many waiting jobs as there are free sequences and cells; their tokens go to `steps`."""
        admitted: list[_Job] = []
        before = self.file.held
        before.first, before.steps = len(before.ids), []
        while self.waiting:
            job = self.waiting[0]
            planned = job.planned()
            if len(planned) > len(self.free):
                break
            shares, left = [], before
            for branch in planned:
                shares.append(_shared(left, branch))
                branch.first, left = shares[-1][0], branch
            needed = sum(len(b.ids) - shared for b, (_, shared) in zip(planned, shares, strict=True)) + job.room
            if self.file.used + self.reserved + needed > self.file.cells:
                if admitted or self.running or not self.file.held.cells:
                    break
                self.file.truncate(self.file.held, 0)  # the held prefix leaves no space for a long row
                before.first = 0
                continue
            self.waiting.popleft()
            for branch, (cached, shared) in zip(planned, shares, strict=True):
                branch.seq = self.free.pop()
                self.file.copy(before, branch, cached)
                branch.steps = before.steps[: max(0, shared - before.first)]  # none, if it branches off before them
                for step in branch.steps:
                    step.branches.append(branch)
                new = [Step(branch.ids[p], p, Cell(), [branch]) for p in range(shared, len(branch.ids))]
                branch.steps += new
                self.file.append_cells(branch, [step.cell for step in branch.steps])
                steps += new
                before = branch
            job.branches = planned
            self.reserved += job.room
            admitted.append(job)
        return admitted

    def _next(self, job: _Job) -> Step:
        """The step of the last token of the answer."""
        branch = job.branches[0]
        step = Step(job.output[-1], len(branch.ids), Cell(), [branch])
        branch.wanted = {step.position: None}
        branch.ids.append(step.token)
        self.file.append_cells(branch, [step.cell])
        return step

    def _compute(self, batch: list[Step]) -> None:
        for step, logits in self.file.decode(batch):
            likeliest = int(logits.argmax())
            for branch in step.branches:
                if step.position in branch.wanted:
                    branch.likeliest[step.position] = likeliest
                    token = branch.wanted[step.position]
                    if token is not None:
                        branch.nll[step.position] = token_nll(logits, token)

    def _finish_reading(self, jobs: list[_Job]) -> None:
        """For jobs whose branches are read: write their likelihoods, start their answers."""
        if jobs and self.waiting:
            self.file.hold(jobs[-1].branches[0], min(len(jobs[-1].prompt), len(jobs[-1].branches[0].ids)))
        for job in jobs:
            response, last = self.responses[job.row], len(job.prompt) - 1
            response.prompt_nll += sum(job.branches[0].nll[t - 1] for t in job.targets)
            for branch, (number, option) in zip(job.branches, job.options.items(), strict=False):
                response.option_nll[number] = sum(branch.nll[last + i] for i in range(len(option)))
                response.option_greedy[number] = all(branch.likeliest[last + i] == t for i, t in enumerate(option))
            for branch in job.branches[1 if job.room else 0 :]:
                self._release(branch)
            self.work += 1
            if not job.room:
                continue
            # While the likeliest token is that of the option, the answer is known without a further step.
            branch, option = job.branches[0], next(iter(job.options.values()), [])
            job.output = response.output = [branch.likeliest[last]]
            while (
                len(job.output) < min(job.room, len(option))
                and job.output[-1] == option[len(job.output) - 1]
                and not self.file.ends_generation(job.output[-1])
            ):
                job.output.append(branch.likeliest[last + len(job.output)])
            self.file.truncate(branch, len(job.prompt) + len(job.output) - 1)
            if not self._ended(job):
                self.running.append(job)

    def _ended(self, job: _Job) -> bool:
        if self.file.ends_generation(job.output[-1]):
            job.output.pop()
        elif len(job.output) < job.room:
            return False
        self._release(job.branches[0])
        self.reserved -= job.room
        self.work += 1
        return True

    def _release(self, branch: Branch) -> None:
        self.file.truncate(branch, 0)
        self.free.append(branch.seq)

    def _report_progress(self) -> None:
        """RowProgress is in rows, and rows run together: a half finished row counts half."""
        done = self.work + sum(len(job.output) / job.room for job in self.running)
        rows = int(len(self.responses) * done / self.all_work)
        if self.progress and rows > self.reported:
            self.reported = rows
            self.progress(rows, len(self.responses))


def _shared(before: Branch, branch: Branch) -> tuple[int, int]:
    """(tokens in the cache from the branch before, tokens in the cache or computed together with that branch).

    A position whose logits are wanted must be computed: it may be shared, but not come from the cache.
    """
    same = common_prefix(before.ids, branch.ids)
    cached = min(same, before.first, min(branch.wanted))
    return cached, same if cached == before.first else cached
