"""First-order contributions and trials, computed or read from the cache."""

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
from edgeft.methods.base import Update
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


FORMAT = 3  # of cache entries
USED_RATE = 0.6  # share of the measured GEMM rate that trials reach: norms, attention and unpacking take time


def search_key(recipe: Recipe, source: str, sample: Sample) -> str:
    """Cache key: a hash of everything that contributions depend on."""
    t = recipe.train
    rates = (t.optimizer, t.momentum, t.lr, t.bias_lr, t.lr_width, t.beta1, t.beta2, t.weight_decay, t.clip)
    parts = (FORMAT, models.model_id(source), recipe.model.frozen, rates, sample.digest())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@contextmanager
def search_entry(key: str, progress: Progress) -> Iterator[cache.Entry]:
    """A cache folder, locked for this process; without a cache, a temporary folder."""
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
    """Computes contributions, or reads them from the cache; the model is loaded only on a cache miss."""

    def __init__(
        self, recipe: Recipe, source: str, shape: plan.Shape, sample: Sample, entry: cache.Entry, progress: Progress
    ) -> None:
        from edgeft.engine import choose, trial
        from edgeft.search.contribution import Inputs
        from edgeft.train import build

        self.recipe, self.source, self.shape, self.sample = recipe, source, shape, sample
        self.entry, self.progress = entry, progress
        self.threads = build.compute_threads(recipe.how.threads)
        tokens = sample.tokens(sample.all_parts())
        flops = 8.0 * shape.weights * tokens  # forward, recomputed, and two GEMMs backward
        note = entry.path / "engine.json"  # that cached contributions were computed with
        self.engine = choose.choose(recipe, shape.head, shape.gate, flops, progress, read_engine(note))
        write_json(note, {"kernels": self.engine.compiled, "products": self.engine.products})
        rates = trial.gflops(self.threads)  # cached: the next plan is the same
        self.rate = 1e9 * USED_RATE * rates["bf16" if self.engine.products == "bf16" else "fp32"]
        self.inputs = Inputs(entry.path, sample, shape.depth, shape.width)
        self._stack: Any = None

    def costs(self, train: Sequence[Encoded], heldout: Sequence[Encoded], profile: Device | None) -> Costs:
        """Of training on this machine, or on that of a profile."""
        load, engine = Workload(train, heldout, self.recipe), None
        if profile is None:
            machine = Machine.here(self.threads)
            engine = EngineSpec(self.engine.compiled, self.engine.products, self.threads)
        else:
            machine = Machine.of(profile, self.recipe.how.threads)
            if not machine.timed:
                self.progress.line(f"`{profile.name}` gives no gemm_gflops: times are guesses")
        return Costs(Job(self.recipe, self.shape, load, machine, engine))

    def stack(self) -> Any:
        """The warmed-up model; the sample's block inputs are written to files."""
        if self._stack is None:
            from edgeft.search.contribution import warm_up
            from edgeft.train import build

            self._stack = build.load_stack(self.recipe, self.engine)
            pool = self.engine.backend.memory.pool
            pool.resize(max(len(self.sample.forest.nodes(part)) for part in self.sample.all_parts()))
            self.progress.stage("warm-up", WARM_STEPS)
            warm_up(self._stack, self.sample, self.recipe.train, self.recipe.how, lambda: self.progress.advance(1))
            self.progress.stage("forward", len(self.sample.all_parts()))
            self.inputs.fill(self._stack, self.sample, lambda: self.progress.advance(1))
            self.progress.end()
        return self._stack

    def _update_note(self, **values: Any) -> None:
        self.entry.write_note({**self.entry.note, "model": Path(self.source).name, **values})

    def first_order(self) -> FirstOrder:
        from edgeft.search.contribution import FirstOrder, first_order

        cached = self.entry.note.get("first_order")
        if cached is not None:
            self.progress.line("first-order contributions cached by an earlier search on the same rows")
            return FirstOrder.from_json(cached)
        start, stack = time.monotonic(), self.stack()
        self.progress.stage("first order", stack.depth)
        optimizer = self.recipe.train.optimizer
        first = first_order(stack, self.sample, self.inputs, optimizer, lambda: self.progress.advance(1))
        self.progress.end()
        self._update_note(first_order=first.to_json())
        self.progress.line(
            f"first order: {sum(map(len, self.sample.parts))} rows, {self.sample.tokens(self.sample.parts)} tokens, "
            f"in {format_duration(time.monotonic() - start)}"
        )
        return first

    def measure(self, first: FirstOrder, budget_s: float) -> list[dict[str, Any]]:
        """Trials of as many candidates as the budget allows by their planned time, so that calls are reproducible."""
        from edgeft.search.contribution import Trials, trial_flops

        chosen, planned_s, arch, depth = [], 0.0, self.shape.arch, self.shape.depth
        for candidate in candidates(first):
            planned_s += trial_flops(self.sample, self.shape, candidate.scheme(arch, depth)) / self.rate
            if planned_s > budget_s:
                break
            chosen.append(candidate)
        gains: dict[str, float] = self.entry.note.get("measured", {})
        missing = [candidate for candidate in chosen if candidate.name not in gains]
        if missing:
            rates = Schedule(1, self.recipe.train, self.shape.width)
            trials = Trials(self.stack(), self.sample, self.inputs, rates, self.recipe.how)
            base = trials.heldout_loss(depth - 1)
            self.progress.stage("measure", len(chosen))
            self.progress.advance(len(chosen) - len(missing))
            for candidate in missing:
                gain = trials.gain(candidate.scheme(arch, depth), base)
                gains = {**gains, candidate.name: gain}
                self._update_note(measured=gains)
                self.progress.advance(1, f"{candidate.name} {gain:+.4f}")
            self.progress.end()
        return [{**dataclasses.asdict(c), "name": c.name, "gain": gains[c.name]} for c in chosen]


@dataclass(frozen=True)
class Candidate:
    """Tuned alone in a trial: one tensor of a block, or the biases and norms of the last blocks."""

    block: int | None = None
    tensor: str | None = None
    biased_blocks: int = 0

    @property
    def name(self) -> str:
        return f"{self.block}.{self.tensor}" if self.tensor else f"biases of the last {self.biased_blocks}"

    def scheme(self, arch: Architecture, depth: int) -> Scheme:
        if self.tensor is not None and self.block is not None:
            return Scheme(SPARSE, {(self.block, self.tensor): Update()})
        blocks = range(depth - self.biased_blocks, depth)
        return Scheme(SPARSE, {}, frozenset((b, t) for b in blocks for t in arch.biases), frozenset(blocks))


def candidates(first: FirstOrder) -> list[Candidate]:
    """In measuring order: the best remaining ones, alternating with others spread over all ranks."""
    weights = first.weights[:, :, -1]
    ranked = [divmod(int(i), len(TENSORS)) for i in np.argsort(-weights, axis=None, kind="stable")]
    spread = [ranked[round(share * (len(ranked) - 1))] for share in _bisections(len(ranked))]
    depth = len(weights)
    result: list[Candidate] = []
    for index, pair in enumerate(pair for both in zip(spread, ranked, strict=True) for pair in both):
        if index in (4, 12):
            result.append(Candidate(biased_blocks=-(-depth // (2 if index == 4 else 1))))
        result.append(Candidate(pair[0], TENSORS[pair[1]]))
    return list(dict.fromkeys(result))


def _bisections(count: int) -> list[float]:
    """1, 1/2, 1/4, 3/4, 1/8, …: any prefix covers the range evenly."""
    values, denominator = [1.0], 2
    while len(values) < count:
        values += [numerator / denominator for numerator in range(1, denominator, 2)]
        denominator *= 2
    return values[:count]


def first_order_gain(trial: dict[str, Any], first: FirstOrder, rates: Schedule) -> float:
    """The first-order estimate for a trial's candidate."""
    if trial["tensor"] is None:
        last = slice(-trial["biased_blocks"], None)
        return rates.bias_peak * float(first.biases[last].sum() + first.norms[last].sum())
    return rates.peak * float(first.weights[trial["block"], TENSORS.index(trial["tensor"]), -1])
