"""Many rows through llama.cpp at once: prompts as a prefix tree, options as its branches, answers token by token.

A row's tokens are computed in its own order, whatever other rows are in the same call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgeft.evaluate.ask import Ask, Progress, Response
from edgeft.evaluate.branches import Branch, Cell, Step, common, surprise
from edgeft.plan.limits import BATCH, CELLS, OUTPUTS

if TYPE_CHECKING:
    from edgeft.evaluate.llamacpp import LlamaFile

OPTIONS = 16  # of one prompt at a time: each is a sequence of its own


@dataclass(eq=False)
class _Job:
    """A row, or some of its options: first branches that are read, then the answer."""

    row: int
    prompt: list[int]
    targets: list[int]  # places in the prompt
    options: dict[int, list[int]]  # by their number in the row, in the order of their tokens
    room: int  # most tokens that the answer may have; 0: none is wanted
    branches: list[Branch] = field(default_factory=list)
    output: list[int] = field(default_factory=list)  # its last token is chosen and not yet computed

    @property
    def work(self) -> int:
        """Reading counts as much as writing, for the progress bar."""
        return 2 if self.room else 1

    def planned(self) -> list[Branch]:
        """Branches with what is wanted of them; an option's last token need not be read."""
        last = len(self.prompt) - 1
        found = [
            Branch(0, self.prompt + option[:-1], wanted={last + i: token for i, token in enumerate(option)})
            for option in self.options.values()
        ]
        if not found:
            found = [Branch(0, list(self.prompt) if self.room else self.prompt[: max(self.targets)])]
            if self.room:
                found[0].wanted[last] = None
        found[0].wanted |= {t - 1: self.prompt[t] for t in self.targets}
        return found


class BatchScorer:
    """What is asked of each row; jobs wait in the order of their prompts, so that neighbours begin alike."""

    def __init__(self, file: LlamaFile, asks: Sequence[Ask], max_new: int, progress: Progress | None) -> None:
        if not all(ask.prompt for ask in asks):
            raise ValueError("a prompt needs at least one token")
        self.file, self.progress = file, progress
        self.said = [Response(0.0, [0.0] * len(ask.options), [False] * len(ask.options)) for ask in asks]
        self.waiting: deque[_Job] = deque()
        self.running: list[_Job] = []
        at_once = min(OPTIONS, file.parallel)
        for row in sorted(range(len(asks)), key=lambda i: asks[i].prompt):
            ask = asks[row]
            file.fits(len(ask.prompt) + max([len(o) - 1 for o in ask.options], default=0))
            order = sorted(range(len(ask.options)), key=ask.options.__getitem__)
            room = min(max_new, file.n_ctx - len(ask.prompt) + 1) if ask.generate else 0
            for start in range(0, max(len(order), 1), at_once):
                options = {i: ask.options[i] for i in order[start : start + at_once]}
                targets = [] if start else ask.targets
                if targets or options or room:
                    self.waiting.append(_Job(row, ask.prompt, targets, options, 0 if start else max(room, 0)))
        self.all_work = sum(job.work for job in self.waiting)
        self.work = 0  # done so far
        self.told = 0  # rows, as the progress was told last
        self.promised = 0  # cells that answers may still need

    def run(self) -> list[Response]:
        if not self.waiting:
            return self.said
        sizes = [len(j.prompt) + sum(len(o) - 1 for o in j.options.values()) + j.room for j in self.waiting]
        most = max(max(1, len(job.options)) for job in self.waiting)
        branches = sum(max(1, len(job.options)) for job in self.waiting)
        sequences = max(most, min(self.file.parallel, branches))
        self.file.ready(max(sizes), sequences, wished=min(CELLS, sum(sizes)))
        self.free = list(range(sequences, 0, -1))
        try:
            self._run()
        except BaseException:
            self.file.forget()  # branches are left in the cache
            raise
        return self.said

    def _run(self) -> None:
        steps: deque[Step] = deque()
        reading: list[_Job] = []
        while self.waiting or self.running or steps:
            if not steps:
                reading = self._admit(steps)
            batch = [self._next(job) for job in self.running]
            outputs = OUTPUTS - len(batch)  # at least one: there are fewer sequences
            while steps and len(batch) < BATCH and (outputs or not steps[0].asked):
                outputs -= steps[0].asked
                batch.append(steps.popleft())
            self._compute(batch)
            for job in self.running:
                job.output.append(job.branches[0].likeliest[len(job.branches[0].ids) - 1])
            self.running = [job for job in self.running if not self._ended(job)]
            if not steps:
                self._settle(reading)
                reading = []
            self._tell()

    def _admit(self, steps: deque[Step]) -> list[_Job]:
        """As many waiting jobs as there are sequences and cells for; what is to be computed goes to `steps`."""
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
            if self.file.used + self.promised + needed > self.file.cells:
                if admitted or self.running or not self.file.held.cells:
                    break
                self.file.cut(self.file.held, 0)  # what is held takes the place of a long row
                before.first = 0
                continue
            self.waiting.popleft()
            for branch, (cached, shared) in zip(planned, shares, strict=True):
                branch.seq = self.free.pop()
                self.file.copy(before, branch, cached)
                branch.steps = before.steps[: max(0, shared - before.first)]  # none, if it leaves before they begin
                for step in branch.steps:
                    step.branches.append(branch)
                new = [Step(branch.ids[p], p, Cell(), [branch]) for p in range(shared, len(branch.ids))]
                branch.steps += new
                self.file.take(branch, [step.cell for step in branch.steps])
                steps += new
                before = branch
            job.branches = planned
            self.promised += job.room
            admitted.append(job)
        return admitted

    def _next(self, job: _Job) -> Step:
        """The answer's last token, to know the next."""
        branch = job.branches[0]
        step = Step(job.output[-1], len(branch.ids), Cell(), [branch])
        branch.wanted = {step.position: None}
        branch.ids.append(step.token)
        self.file.take(branch, [step.cell])
        return step

    def _compute(self, batch: list[Step]) -> None:
        for step, logits in self.file.decode(batch):
            likeliest = int(logits.argmax())
            for branch in step.branches:
                if step.position in branch.wanted:
                    branch.likeliest[step.position] = likeliest
                    token = branch.wanted[step.position]
                    if token is not None:
                        branch.nll[step.position] = surprise(logits, token)

    def _settle(self, jobs: list[_Job]) -> None:
        """Jobs whose branches are read: their likelihoods are known, their answers begin."""
        if jobs and self.waiting:
            self.file.hold(jobs[-1].branches[0], min(len(jobs[-1].prompt), len(jobs[-1].branches[0].ids)))
        for job in jobs:
            said, last = self.said[job.row], len(job.prompt) - 1
            said.prompt_nll += sum(job.branches[0].nll[t - 1] for t in job.targets)
            for branch, (number, option) in zip(job.branches, job.options.items(), strict=False):
                said.option_nll[number] = sum(branch.nll[last + i] for i in range(len(option)))
                said.option_greedy[number] = all(branch.likeliest[last + i] == t for i, t in enumerate(option))
            for branch in job.branches[1 if job.room else 0 :]:
                self._release(branch)
            self.work += 1
            if not job.room:
                continue
            # As long as the likeliest token is the option's own, the answer needs no further step.
            branch, option = job.branches[0], next(iter(job.options.values()), [])
            job.output = said.output = [branch.likeliest[last]]
            while (
                len(job.output) < min(job.room, len(option))
                and job.output[-1] == option[len(job.output) - 1]
                and not self.file.eog(job.output[-1])
            ):
                job.output.append(branch.likeliest[last + len(job.output)])
            self.file.cut(branch, len(job.prompt) + len(job.output) - 1)
            if not self._ended(job):
                self.running.append(job)

    def _ended(self, job: _Job) -> bool:
        over = self.file.eog(job.output[-1])
        if not over and len(job.output) < job.room:
            return False
        if over:
            job.output.pop()
        self._release(job.branches[0])
        self.promised -= job.room
        self.work += 1
        return True

    def _release(self, branch: Branch) -> None:
        self.file.cut(branch, 0)
        self.free.append(branch.seq)

    def _tell(self) -> None:
        """Progress is in rows, and rows are done together: what is half done counts half."""
        done = self.work + sum(len(job.output) / job.room for job in self.running)
        rows = int(len(self.said) * done / self.all_work)
        if self.progress and rows > self.told:
            self.told = rows
            self.progress(rows, len(self.said))


def _shared(before: Branch, branch: Branch) -> tuple[int, int]:
    """(tokens that the cache has for the branch before, tokens that are computed with it or are in the cache).

    A position whose logits are wanted must be computed: it may be shared, and not taken from the cache.
    """
    same = common(before.ids, branch.ids, len(branch.ids))
    cached = min(same, before.first, min(branch.wanted))
    return cached, same if cached == before.first else cached
