"""Contributions and trials, computed or read from the cache."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeft import plan
from edgeft.arch import Architecture
from edgeft.config import TENSORS, Device, Recipe, format_duration
from edgeft.data.tokens import Encoded
from edgeft.formats import source as models
from edgeft.host import cache
from edgeft.host.files import write_json
from edgeft.methods import SPARSE
from edgeft.methods.scheme import Scheme
from edgeft.plan.fit import Job, Machine
from edgeft.plan.flops import WARM_STEPS, Schedule
from edgeft.plan.memory import EngineSpec
from edgeft.plan.rows import Workload
from edgeft.run.progress import Progress
from edgeft.run.record import read_engine
from edgeft.search.costs import Costs

if TYPE_CHECKING:
    from edgeft.search.contribution import FirstOrder, Sample


FORMAT = 3  # of what is kept in the cache
USED_RATE = 0.6  # of the measured rate of products that whole trials reach: norms, attention and unpacking take time


def search_key(recipe: Recipe, source: str, sample: Sample) -> str:
    """Changes when anything changes that contributions depend on."""
    t = recipe.train
    rates = (t.optimizer, t.momentum, t.lr, t.bias_lr, t.lr_width, t.beta1, t.beta2, t.weight_decay, t.clip)
    parts = (FORMAT, models.model_id(source), recipe.model.frozen, rates, sample.digest())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@contextmanager
def search_entry(key: str, progress: Progress) -> Iterator[cache.Entry]:
    """A folder of the cache, for this process alone; where there is no cache, one that is gone afterwards."""
    root = cache.folder("search")
    with ExitStack() as undo:
        if root is None:
            root = Path(undo.enter_context(TemporaryDirectory()))
        with cache.changing(root):
            entry = cache.Entry(root / key[:32])
        undo.callback(entry.close)
        entry.acquire(
            lambda: False, lambda: False, lambda: progress.line("another process searches on the same rows; waiting")
        )
        yield entry


class Measurements:
    """Computes contributions, or takes them from the cache; the model is loaded only when something is missing."""

    def __init__(
        self, recipe: Recipe, source: str, shape: plan.Shape, sample: Sample, entry: cache.Entry, progress: Progress
    ) -> None:
        from edgeft.engine import choose
        from edgeft.host import doctor
        from edgeft.search.contribution import Inputs
        from edgeft.train import build

        self.recipe, self.source, self.shape, self.sample = recipe, source, shape, sample
        self.entry, self.progress = entry, progress
        self.threads = build.use_threads(recipe.how.threads)
        tokens = sample.tokens(sample.every())
        flops = 8.0 * shape.depth * shape.block_parameters * tokens  # forward, again, and two products back
        note = entry.path / "engine.json"  # kept contributions were computed with it
        self.engine = choose.choose(recipe, shape.head, shape.gate, flops, progress, read_engine(note))
        write_json(note, {"kernels": self.engine.compiled, "half": self.engine.bf16})
        rates = doctor.gemm_rates(threads=self.threads)  # kept: the same plan the next time
        self.rate = 1e9 * USED_RATE * rates["bf16" if self.engine.bf16 else "fp32"]
        self.inputs = Inputs(entry.path, sample, shape.depth, shape.width)
        self._stack: Any = None

    def costs(self, train: Sequence[Encoded], heldout: Sequence[Encoded], profile: Device | None) -> Costs:
        """Of training here, or on the machine of a profile."""
        load, engine = Workload(train, heldout, self.recipe), None
        if profile is None:
            machine = Machine.here(self.threads)
            engine = EngineSpec(self.engine.compiled, self.engine.bf16, self.threads)
        else:
            machine = Machine.of(profile, self.recipe.how.threads)
            if not machine.timed:
                self.progress.line(f"`{profile.name}` says no rate of products (gemm_gflops): times are guesses")
        return Costs(Job(self.recipe, self.shape, load, machine, engine))

    def stack(self) -> Any:
        """The model, with what every block sees of the sample in files."""
        if self._stack is None:
            from edgeft.engine.limits import padded
            from edgeft.search.contribution import warm_up
            from edgeft.train import build

            self._stack = build.load_stack(self.recipe, self.engine)
            pool = self.engine.backend.memory.pool
            pool.resize(padded(max(len(self.sample.forest.nodes(part)) for part in self.sample.every())))
            self.progress.stage("warm-up", WARM_STEPS)
            warm_up(self._stack, self.sample, self.recipe.train, self.recipe.how, lambda: self.progress.advance(1))
            self.progress.stage("forward", len(self.sample.every()))
            self.inputs.fill(self._stack, self.sample, lambda: self.progress.advance(1))
            self.progress.end()
        return self._stack

    def _remember(self, **values: Any) -> None:
        self.entry.write_note({**self.entry.note, "model": Path(self.source).name, **values})

    def first_order(self) -> FirstOrder:
        from edgeft.search.contribution import FirstOrder, first_order

        kept = self.entry.note.get("first_order")
        if kept is not None:
            self.progress.line("first-order contributions taken from an earlier search on the same rows")
            return FirstOrder.from_json(kept)
        begin, stack = time.monotonic(), self.stack()
        self.progress.stage("first order", stack.depth)
        way = self.recipe.train.optimizer
        found = first_order(stack, self.sample, self.inputs, way, lambda: self.progress.advance(1))
        self.progress.end()
        self._remember(first_order=found.to_json())
        self.progress.line(
            f"first order: {sum(map(len, self.sample.parts))} rows, {self.sample.tokens(self.sample.parts)} tokens, "
            f"in {format_duration(time.monotonic() - begin)}"
        )
        return found

    def measure(self, first: FirstOrder, budget_s: float) -> list[dict[str, Any]]:
        """As many candidates as the budget has time for, by plan: the same call measures the same ones."""
        from edgeft.search.contribution import Trials, trial_flops

        wanted, planned_s, arch, depth = [], 0.0, self.shape.arch, self.shape.depth
        for candidate in candidates(first):
            planned_s += trial_flops(self.sample, self.shape, candidate.scheme(arch, depth)) / self.rate
            if planned_s > budget_s:
                break
            wanted.append(candidate)
        kept: dict[str, float] = self.entry.note.get("measured", {})
        missing = [candidate for candidate in wanted if candidate.name not in kept]
        if missing:
            rates = Schedule(1, self.recipe.train, self.shape.width)
            trials = Trials(self.stack(), self.sample, self.inputs, rates, self.recipe.how)
            base = trials.heldout_loss(depth - 1)
            self.progress.stage("measure", len(wanted))
            self.progress.advance(len(wanted) - len(missing))
            for candidate in missing:
                gain = trials.gain(candidate.scheme(arch, depth), base)
                kept = {**kept, candidate.name: gain}
                self._remember(measured=kept)
                self.progress.advance(1, f"{candidate.name} {gain:+.4f}")
            self.progress.end()
        return [{**dataclasses.asdict(c), "name": c.name, "gain": kept[c.name]} for c in wanted]


@dataclass(frozen=True)
class Candidate:
    """What is tuned alone: one tensor of a block, or the biases and norms of the last blocks."""

    block: int | None = None
    tensor: str | None = None
    biased_blocks: int = 0

    @property
    def name(self) -> str:
        return f"{self.block}.{self.tensor}" if self.tensor else f"biases of the last {self.biased_blocks}"

    def scheme(self, arch: Architecture, depth: int) -> Scheme:
        if self.tensor is not None and self.block is not None:
            return Scheme(SPARSE, {(self.block, self.tensor): 1.0})
        blocks = range(depth - self.biased_blocks, depth)
        return Scheme(SPARSE, {}, frozenset((b, t) for b in blocks for t in arch.biases), frozenset(blocks))


def candidates(first: FirstOrder) -> list[Candidate]:
    """In the order in which they are measured: the best that are left, between them others from all over the ranks."""
    whole = first.weights[:, :, -1]
    ranked = [divmod(int(place), len(TENSORS)) for place in np.argsort(-whole, axis=None, kind="stable")]
    spread = [ranked[round(share * (len(ranked) - 1))] for share in _halving(len(ranked))]
    depth = len(whole)
    found: list[Candidate] = []
    for place, pair in enumerate(pair for both in zip(spread, ranked, strict=True) for pair in both):
        if place in (4, 12):
            found.append(Candidate(biased_blocks=-(-depth // (2 if place == 4 else 1))))
        found.append(Candidate(pair[0], TENSORS[pair[1]]))
    return list(dict.fromkeys(found))


def _halving(count: int) -> list[float]:
    """1, 1/2, 1/4, 3/4, 1/8, … : places that fill the range evenly, however many are used."""
    found, parts = [1.0], 2
    while len(found) < count:
        found += [odd / parts for odd in range(1, parts, 2)]
        parts *= 2
    return found[:count]


def first_of(trial: dict[str, Any], first: FirstOrder, rates: Schedule) -> float:
    """What the first order says of a candidate."""
    if trial["tensor"] is None:
        last = slice(-trial["biased_blocks"], None)
        return rates.bias_peak * float(first.biases[last].sum() + first.norms[last].sum())
    return rates.peak * float(first.weights[trial["block"], TENSORS.index(trial["tensor"]), -1])
