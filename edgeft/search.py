"""`edgeft search`: what to update, found from the user's own rows, for a budget of memory and time.

Contributions do not depend on the budget and are kept in the user's cache folder: a second search is quick, and one
that was killed goes on from what it has measured. The same call gives the same recipe.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgeft import cache, config, plan
from edgeft.config import TENSORS, Device, PartConfig, Recipe, UpdateConfig
from edgeft.costs import Costs
from edgeft.data import tokens as data_tokens
from edgeft.data.tokens import Encoded
from edgeft.data.tree import Forest
from edgeft.errors import ConfigError, DoesNotFitError, EdgeftError, RunError
from edgeft.model.header import BIASES
from edgeft.plan import memory as plan_memory
from edgeft.plan.fit import Machine
from edgeft.report.words import duration, size
from edgeft.run import Run, model_source, read_json, replacing, write_json
from edgeft.sparse import evolve
from edgeft.sparse import scheme as schemes
from edgeft.sparse.evolve import SHARES, Found, Problem
from edgeft.sparse.scheme import Scheme
from edgeft.train.progress import Progress
from edgeft.train.schedule import Schedule
from edgeft.work import WARM_STEPS, search_pays

if TYPE_CHECKING:
    from edgeft.sparse.contribution import FirstOrder, Sample

FORMAT = 3  # of what is kept in the cache
USED_RATE = 0.6  # of the measured rate of products that whole trials reach: norms, attention and unpacking take time
MEASURE_S = 180.0  # for trials, where nothing is said
WAYS = ("micro_batch_tokens", "recompute", "optimizer_state")  # what of `how` is chosen with the scheme
# Of the depth, from below: stays frozen. All that a model can do is built on its first blocks, and what runs only once
# costs little. Banking77, one epoch, where they may be chosen: loss 0.241, ARC-Easy 49.8 %; frozen: 0.212, 53.5 %.
FROZEN = 0.1
SLACK = 1.05  # by so many times what was too much; doubled each time
# Of what a block brings, where a run's own search may cost as much as the rule: a little of many blocks, loss 0.212 on
# Banking77. In 1 GiB the plain sum, which leads to fewer blocks, did better: 0.235 against 0.294 (SQuAD 0.719, 0.703).
POWER = 0.7
TRIES = 8  # times that a budget is tightened because parts cost more together than one by one

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Budget:
    memory_bytes: float
    time_s: float = math.inf  # of trunk and training; infinite: what the recipe's own scheme takes
    measure_s: float = 0.0  # of trials; 0: first order alone

    @staticmethod
    def read(
        memory: str | None, time: str | None, measure: str | None, device_bytes: int, before: Budget | None
    ) -> Budget:
        """As people write it; what is left out is as before, or as the device has it."""
        found = before or Budget(float(device_bytes), measure_s=MEASURE_S)
        if memory is not None:
            found = dataclasses.replace(found, memory_bytes=float(config.parse_size(memory)))
        if time is not None:
            limit = config.parse_time(time, "--time")
            found = dataclasses.replace(found, time_s=limit, measure_s=limit / 10)
        if measure is not None:
            found = dataclasses.replace(found, measure_s=config.parse_time(measure, "--measure", least=0.0))
        return found


@dataclass(frozen=True)
class Asked:
    """What an earlier call asked for."""

    recipe: Recipe
    budget: Budget
    seed: int


class Files:
    """The recipe, and beside it the picture and all numbers."""

    def __init__(self, recipe: Path) -> None:
        self.recipe = recipe
        self.picture, self.numbers = (recipe.with_suffix(f".search.{kind}") for kind in ("png", "json"))

    def start(self, resume: bool) -> Asked | None:
        """What is to go on; RunError where there is nothing, or something that would be overwritten."""
        if self.recipe.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"`-o {self.recipe}` is no name for a recipe", "for example `-o my-recipe.yaml`")
        if not resume:
            if self.recipe.exists():
                raise RunError(f"{self.recipe} is there already", "name another file with -o")
            return None
        asked: Any = (read_json(self.numbers) or {}).get("asked")
        try:
            budget = {key: math.inf if value is None else float(value) for key, value in asked["budget"].items()}
            return Asked(config.build(Recipe, asked["recipe"]), Budget(**budget), int(asked["seed"]))
        except (TypeError, KeyError, ValueError, AttributeError):  # missing, damaged or of another form
            raise RunError(
                f"there is no search to go on with in {self.numbers}", "leave out --resume to start one"
            ) from None

    def _note(self, recipe: Recipe, budget: Budget, seed: int) -> None:
        limits = {key: _finite(value) for key, value in dataclasses.asdict(budget).items()}
        self._asked = {"recipe": dataclasses.asdict(recipe), "budget": limits, "seed": seed}
        write_json(self.numbers, {"asked": self._asked})

    @contextmanager
    def noted(self, recipe: Recipe, budget: Budget, seed: int) -> Iterator[None]:
        """For --resume; a mistake in the call leaves nothing behind."""
        self._note(recipe, budget, seed)
        try:
            yield
        except EdgeftError:
            self.numbers.unlink(missing_ok=True)
            raise

    def finish(self, recipe: Recipe, found: dict[str, Any]) -> None:
        write_json(self.numbers, {"asked": self._asked, **found})
        data = Path(recipe.data.path).name if recipe.data.path else "the embedded handbook"
        with replacing(self.recipe) as file:
            file.write(recipe_text(recipe, found, data).encode())


def command(recipe: Recipe, file: Path) -> str:
    """How to train with what was found."""
    words = ["edgeft finetune --recipe", shlex.quote(str(file))]
    words += ["--model", shlex.quote(recipe.model.path)] if recipe.model.path else []
    words += ["--data", shlex.quote(recipe.data.path)] if recipe.data.path else []
    return " ".join(words)


# ---------------------------------------------------------------- all of it


@dataclass(frozen=True)
class Posed:
    """All that is known before the evolution."""

    recipe: Recipe
    budget: Budget
    arch: str
    costs: Costs
    problem: Problem
    numbers: dict[str, Any]  # of how it came about


def pose(
    recipe: Recipe,
    train: Sequence[Encoded],
    heldout: Sequence[Encoded],
    budget: Budget,
    seed: int,
    progress: Progress,
    profile: Device | None = None,
    again: bool = False,
    within: bool = False,
) -> Posed:
    """Contributions and costs.

    profile: of the machine that will train, if it is another. again: contributions that are kept do not count.
    within: it may not take more memory than the recipe's own scheme, either.
    """
    from edgeft.sparse import contribution

    if recipe.update.method != "sparse":
        raise ConfigError(
            f"a search finds what `update.method: sparse` trains, and this recipe says `{recipe.update.method}`",
            "search from `--recipe sparse-bp`",
        )
    recipe = dataclasses.replace(recipe, how=dataclasses.replace(recipe.how))
    source = model_source(recipe.model.path)
    shape = plan.shape_of(source, recipe.model.frozen)
    arch = shape.arch
    sample = contribution.draw(train, heldout, seed)
    with _entry(_key(recipe, source, sample), progress) as entry:
        if again:
            entry.note_file.unlink(missing_ok=True)
        worker = _Worker(recipe, source, shape, sample, entry, progress)
        costs = worker.costs(train, heldout, profile)
        own = costs.of(schemes.make(recipe.update, shape.depth, arch), costs.ways[0], budget.memory_bytes)
        budget = dataclasses.replace(
            budget,
            memory_bytes=min(budget.memory_bytes, float(own[0]) if within else math.inf),
            time_s=budget.time_s if math.isfinite(budget.time_s) else float(own[1]),
        )
        _refuse(costs, budget)
        problem = costs.problem(np.array([budget.memory_bytes, budget.time_s]))
        first = worker.first_order()
        trials = worker.measure(first, arch, budget.measure_s)
        worker.done()
    rates = Schedule(len(train), recipe.train, shape.width)
    correlation = _judge(first, trials, rates)
    gain, small = _values(first, rates)
    power, lowest = POWER if within else 1.0, round(FROZEN * shape.depth)
    problem = dataclasses.replace(problem, gain=gain, small_gain=small, power=power, lowest=lowest)
    numbers = {
        "model": Path(source).name,
        "sample": {
            "rows": sum(map(len, sample.parts)),
            "tokens": sample.tokens(sample.parts),
            "heldout_rows": sum(map(len, sample.heldout)),
        },
        "budget": {name: _finite(value) for name, value in dataclasses.asdict(budget).items()},
        "measured": trials,
        "rank_correlation": _finite(correlation),
        "contribution": gain[:, :, -1].tolist(),
        "contribution_biases": small.tolist(),
    }
    return Posed(recipe, budget, arch, costs, problem, numbers)


def find(posed: Posed, seed: int, compare: bool = True) -> dict[str, Any]:
    """The best scheme, as numbers and names alone; compare: beside what other ways to search find."""
    found, compared = _evolve(posed, seed, compare)
    how, entries = posed.costs.ways[found.way], parts(found.level, found.biased, posed.arch)
    chosen = schemes.make(UpdateConfig(parts=entries), posed.problem.depth, posed.arch)
    need, every = posed.costs.of(chosen, how, posed.budget.memory_bytes), posed.problem.every()
    asked = posed.costs.ways[0]
    changed = {name: getattr(how, name) for name in WAYS if getattr(how, name) != getattr(asked, name)}
    return {
        **posed.numbers,
        "shares": [[SHARES[place] for place in row] for row in found.level],
        "biased_blocks": found.biased,
        "cut": chosen.cut,
        "trained_parameters": plan.trained_parameters(posed.costs.shape, chosen),
        "how": changed,
        "parts": [dataclasses.asdict(part) for part in entries],
        "gain": found.gain,
        "gain_share": found.gain / every if every else 0.0,
        "all_gain": every,
        "peak_bytes": int(need[0]),
        "seconds": float(need[1]),
        "compared": compared,
        "seed": seed,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _least(costs: Costs) -> Scheme:
    """A few channels of one small tensor of the last block."""
    return Scheme("sparse", {(costs.shape.depth - 1, "k"): SHARES[1]})


def _refuse(costs: Costs, budget: Budget) -> None:
    """DoesNotFitError where not even the least can be trained."""
    needs = np.array([costs.of(_least(costs), how, budget.memory_bytes) for how in costs.ways])
    if (needs <= [budget.memory_bytes, budget.time_s]).all(1).any():
        return
    least_bytes, least_s = needs.min(0)
    if least_bytes > budget.memory_bytes:
        raise DoesNotFitError(
            f"the least that can be trained needs {size(least_bytes)}, and {size(budget.memory_bytes)} are allowed",
            f"--memory {math.ceil(least_bytes / 2**20)}MiB, shorter rows (--set data.max_tokens=…) or a smaller model",
        )
    raise DoesNotFitError(
        f"the least that can be trained takes {duration(least_s)}, and {duration(budget.time_s)} are allowed",
        f"--time {math.ceil(1.1 * least_s)}s, fewer epochs (--set train.epochs=…) or fewer rows (--set data.rows=…)",
    )


# ---------------------------------------------------------------- what is kept


def _key(recipe: Recipe, source: str, sample: Sample) -> str:
    """Changes when anything changes that contributions depend on."""
    t = recipe.train
    rates = (t.optimizer, t.momentum, t.lr, t.bias_lr, t.lr_width, t.beta1, t.beta2, t.weight_decay, t.clip)
    parts = (FORMAT, cache.model_id(source), recipe.model.frozen, rates, sample.digest())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@contextmanager
def _entry(key: str, progress: Progress) -> Iterator[cache.Entry]:
    """A folder of the cache, for this process alone; where there is no cache, one that is gone afterwards."""
    root = cache.searches()
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


# ---------------------------------------------------------------- contributions


class _Worker:
    """Computes contributions, or takes them from the cache; the model is loaded only when something is missing."""

    def __init__(
        self, recipe: Recipe, source: str, shape: plan.Shape, sample: Sample, entry: cache.Entry, progress: Progress
    ) -> None:
        from edgeft import doctor, pipeline
        from edgeft.sparse.contribution import Inputs
        from edgeft.train import engine

        self.recipe, self.source, self.shape, self.sample = recipe, source, shape, sample
        self.entry, self.progress = entry, progress
        self.threads = pipeline.use_threads(recipe.how.threads)
        tokens = sample.tokens(sample.every())
        flops = 8.0 * shape.depth * shape.block_parameters * tokens  # forward, again, and two products back
        self.engine = engine.choose(Run(entry.path, recipe), shape.head, shape.gate, flops, progress)
        rates = doctor.gemm_rates(threads=self.threads)  # kept: the same plan the next time
        self.rate = 1e9 * USED_RATE * rates["bf16" if self.engine.half else "fp32"]
        self.inputs = Inputs(entry.path, sample, shape.depth, shape.width)
        self._stack: Any = None

    def costs(self, train: Sequence[Encoded], heldout: Sequence[Encoded], profile: Device | None) -> Costs:
        """Of training here, or on the machine of a profile."""
        if profile is None:
            machine = Machine.here(self.threads)
            known = plan_memory.Engine(self.engine.kernels is not None, self.engine.half, self.threads)
            return Costs(self.recipe, self.shape, train, heldout, machine, known)
        machine = Machine.of(profile, self.recipe.how.threads)
        if not machine.timed:
            self.progress.line(f"`{profile.name}` says no rate of products (gemm_gflops): times are guesses")
        return Costs(self.recipe, self.shape, train, heldout, machine, None)

    def stack(self) -> Any:
        """The model, with what every block sees of the sample in files."""
        if self._stack is None:
            from edgeft import pipeline
            from edgeft.model.block import padded
            from edgeft.model.pool import pool
            from edgeft.train.trial import warm_up

            self._stack = pipeline.load_stack(self.recipe, self.engine)
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
        from edgeft.sparse.contribution import FirstOrder, first_order

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
            f"in {duration(time.monotonic() - begin)}"
        )
        return found

    def measure(self, first: FirstOrder, arch: str, budget_s: float) -> list[dict[str, Any]]:
        """As many candidates as the budget has time for, by plan: the same call measures the same ones."""
        from edgeft.train.trial import Trials, trial_flops

        wanted, planned_s = [], 0.0
        for candidate in candidates(first):
            planned_s += trial_flops(self.sample, self.shape, candidate.scheme(arch, self.shape.depth)) / self.rate
            if planned_s > budget_s:
                break
            wanted.append(candidate)
        kept: dict[str, float] = self.entry.note.get("measured", {})
        missing = [candidate for candidate in wanted if candidate.name not in kept]
        if missing:
            rates = Schedule(1, self.recipe.train, self.shape.width)
            trials = Trials(self.stack(), self.sample, self.inputs, rates, self.recipe.how)
            base = trials.heldout_loss(self.shape.depth - 1)
            self.progress.stage("measure", len(wanted))
            self.progress.advance(len(wanted) - len(missing))
            for candidate in missing:
                gain = trials.gain(candidate.scheme(arch, self.shape.depth), base)
                kept = {**kept, candidate.name: gain}
                self._remember(measured=kept)
                self.progress.advance(1, f"{candidate.name} {gain:+.4f}")
            self.progress.end()
        return [{**dataclasses.asdict(c), "name": c.name, "gain": kept[c.name]} for c in wanted]

    def done(self) -> None:
        """What is large and made from the user's rows goes; numbers stay."""
        self.inputs.drop()


@dataclass(frozen=True)
class Candidate:
    """What is tuned alone: one tensor of a block, or the biases and norms of the last blocks."""

    block: int | None = None
    tensor: str | None = None
    biased_blocks: int = 0

    @property
    def name(self) -> str:
        return f"{self.block}.{self.tensor}" if self.tensor else f"biases of the last {self.biased_blocks}"

    def scheme(self, arch: str, depth: int) -> Scheme:
        if self.tensor is not None and self.block is not None:
            return Scheme("sparse", {(self.block, self.tensor): 1.0})
        blocks = range(depth - self.biased_blocks, depth)
        return Scheme("sparse", {}, frozenset((b, t) for b in blocks for t in BIASES[arch]), frozenset(blocks))


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


def _first_of(trial: dict[str, Any], first: FirstOrder, rates: Schedule) -> float:
    """What the first order says of a candidate."""
    if trial["tensor"] is None:
        last = slice(-trial["biased_blocks"], None)
        return rates.bias_peak * float(first.biases[last].sum() + first.norms[last].sum())
    return rates.peak * float(first.weights[trial["block"], TENSORS.index(trial["tensor"]), -1])


def _judge(first: FirstOrder, trials: list[dict[str, Any]], rates: Schedule) -> float:
    """The rank correlation of the first order and what was measured, of tensors."""
    from edgeft.sparse.contribution import rank_correlation

    for trial in trials:
        trial["first_order"] = _first_of(trial, first, rates)
    tensors = [trial for trial in trials if trial["tensor"] is not None]
    return rank_correlation([trial["first_order"] for trial in tensors], [trial["gain"] for trial in tensors])


def _values(first: FirstOrder, rates: Schedule) -> tuple[Floats, Floats]:
    """(gain (depth, tensors, shares), gain of biases and norms (depth,)), by the first order.

    Trials judge it and do not replace it: a tensor that is tuned alone runs dry within a few steps, as it does not
    among others. With gains corrected by trials, what was found for Banking77 came to a loss of 0.276 instead of 0.235.
    """
    weights, small = rates.peak * first.weights, rates.bias_peak * (first.biases.sum(1) + first.norms)
    return np.concatenate([np.zeros((*weights.shape[:2], 1)), weights], axis=2), small


# ---------------------------------------------------------------- the scheme


def _evolve(posed: Posed, seed: int, compare: bool) -> tuple[Found, dict[str, Any]]:
    """(the best scheme that keeps the budgets by the plan of the whole, what other ways to search came to)."""
    problem, budget = posed.problem, posed.problem.budget
    for number in range(TRIES):
        if (problem.first_cuts() == problem.depth).all():
            break
        start = evolve.greedy(problem)
        best = evolve.evolve(problem, seed, start)
        update = UpdateConfig(parts=parts(best.level, best.biased, posed.arch))
        chosen = schemes.make(update, problem.depth, posed.arch)
        over = posed.costs.of(chosen, posed.costs.ways[best.way], budget[0]) - budget
        if (over <= 0).all():
            return best, _compared(problem, best, start, seed, compare)
        tighter = np.minimum(problem.budget, [best.bytes, best.seconds]) - SLACK * 2**number * over
        problem = dataclasses.replace(problem, budget=np.where(over > 0, tighter, problem.budget))
    raise DoesNotFitError(
        "nothing worth while was found within the budgets", "allow somewhat more memory (--memory) or time (--time)"
    )


def _compared(problem: Problem, best: Found, start: evolve.Schemes, seed: int, compare: bool) -> dict[str, Any]:
    """What other ways to search come to; start: greedy's answer."""
    last, last_gain = _last_blocks(problem)
    compared = {
        "evaluations": best.evaluations,
        "evolution": best.gain,
        "greedy": float(evolve.score(problem, start)[0][0]),
        "last_blocks": last,
        "last_blocks_gain": last_gain,
        "history": best.history,
    }
    if compare:
        compared["evolution_alone"] = evolve.evolve(problem, seed).gain  # without greedy's answer to begin with
        compared["random"] = evolve.random_search(problem, best.evaluations, seed).gain
    return compared


def _last_blocks(problem: Problem) -> tuple[int, float]:
    """(how many of the last blocks could be trained whole within the budgets, what that would bring)."""
    depth, tensors = problem.gain.shape[:2]
    ways = np.arange(len(problem.fixed))
    for count in range(depth, 0, -1):
        level = np.zeros((len(ways), depth, tensors), np.int64)
        level[:, depth - count :] = evolve.TOP
        nothing, cut = np.zeros(len(ways), np.int64), np.full(len(ways), depth - count)
        gains, costs = evolve.score(problem, evolve.Schemes(level, nothing, cut, ways))
        if (costs <= problem.budget).all(1).any():
            return count, float(gains[0])
    return 0, 0.0


def parts(level: npt.NDArray[np.int64], biased: int, arch: str) -> list[PartConfig]:
    """A scheme as few entries of `update.parts`: tensors with the same blocks and share stand together."""
    depth = len(level)
    found: list[PartConfig] = []
    if biased:  # first, since a later entry counts where two name the same tensor
        able = list(BIASES[arch])
        found.append(PartConfig(ranges(range(depth - biased, depth)), able, 0.0, bool(able), True))
    groups: dict[tuple[int, bool, tuple[int, ...]], list[str]] = {}
    for column, tensor in enumerate(TENSORS):
        for place in range(1, len(SHARES)):
            blocks = np.flatnonzero(level[:, column] == place)
            for bias in (False, True):
                inside = (blocks >= depth - biased) & (tensor in BIASES[arch])
                some = tuple(int(block) for block in blocks[inside == bias])
                if some:
                    groups.setdefault((place, bias, some), []).append(tensor)
    for (place, bias, numbers), tensors in sorted(groups.items(), key=lambda item: (item[0][2], -item[0][0])):
        found.append(PartConfig(ranges(numbers), tensors, SHARES[place], bias, False))
    return found


def ranges(blocks: Sequence[int]) -> list[Any]:
    """[3, 4, 5, 9] → ["3-5", 9]."""
    found: list[Any] = []
    start = previous = None
    for block in [*blocks, None]:
        if start is not None and previous is not None and block != previous + 1:
            found.append(start if start == previous else f"{start}-{previous}")
            start = block
        elif start is None:
            start = block
        previous = block
    return found


# ---------------------------------------------------------------- `update.blocks: auto`


def rule_if_short(run: Run, rows: Sequence[Encoded], heldout: Sequence[Encoded], progress: Progress) -> None:
    """Where a search would take longer than training, the rule says what is trained."""
    update, rates = run.recipe.update, Schedule(len(rows), run.recipe.train)
    train, held = (len(Forest(side, share=run.recipe.how.tree)) for side in (rows, heldout))
    if not update.unknown or search_pays(train, held, rates.passes):
        return
    rule = UpdateConfig().blocks
    update.parts = [PartConfig(rule, update.tensors, update.channels, update.biases, update.norms)]
    run.write_recipe()
    progress.line(f"search: it would take longer than this training; blocks {rule} are trained")


def settle(run: Run, budget_bytes: int, progress: Progress) -> None:
    """Finds what the run trains by the first order alone, and writes it into the run's recipe.

    It may cost as much as blocks `10%-67%` would, and no more than the device has.
    """
    from edgeft.sparse.contribution import CHOOSE

    rows, heldout = data_tokens.load(run.tokens, texts=False)
    update, seed = run.recipe.update, run.recipe.train.seed
    budget = Budget(budget_bytes or math.inf)
    found = find(pose(run.recipe, rows, heldout, budget, seed, progress, within=True), seed, compare=False)
    update.choose = CHOOSE
    update.parts = [config.build(PartConfig, part) for part in found["parts"]]
    run.write_json(run.searched, found)
    planned = run.read_json(run.plan)
    if planned is not None:  # what was planned is no longer what is trained; the engine that it is done with stays
        kept = {"how": {"products": planned["how"]["products"]}, "compiled_to_fit": planned["compiled_to_fit"]}
        run.write_json(run.plan, kept)
    run.write_recipe()
    progress.line(
        f"search: {found['trained_parameters'] / 1e6:.2f} M parameters from block {found['cut']} on, "
        f"{found['gain_share']:.0%} of what training everything would bring"
    )


def settled_how(run: Run) -> dict[str, Any]:
    """How what `settle` found is to be run, so that it costs no more than it may: {} where nothing was found."""
    found = run.read_json(run.searched) if run.recipe.update.blocks == "auto" else None
    return dict((found or {}).get("how", {}))


# ---------------------------------------------------------------- the recipe


def recipe_text(recipe: Recipe, found: dict[str, Any], data: str) -> str:
    """A recipe file: what was found, what to expect, and the settings that it was searched with."""
    budget, compared, sample = found["budget"], found["compared"], found["sample"]
    allowed = size(budget["memory_bytes"])
    allowed += f" and {duration(budget['time_s'])}" if budget["time_s"] is not None else ""
    measured = len(found["measured"])
    agreed = found["rank_correlation"]
    trials = f"{measured} candidates measured" + (f", rank correlation {agreed:.2f}" if agreed is not None else "")
    all_gain = found["all_gain"] or 1.0
    others = {name: compared[key] / all_gain for name, key in (("greedy", "greedy"), ("random", "random"))}
    others[f"the last {compared['last_blocks']} blocks"] = compared["last_blocks_gain"] / all_gain
    lines = [
        f"# Found by `edgeft search` for {found['model']} on {data}, within {allowed}, seed {found['seed']}.",
        f"# Contribution: first order over {sample['rows']} rows ({sample['tokens']} tokens); {trials}.",
        f"# Evolution over {compared['evaluations']} schemes: {found['gain_share']:.1%} of what training everything "
        f"would bring",
        f"# ({', '.join(f'{name} {share:.1%}' for name, share in others.items())}).",
        f"# To expect: {found['trained_parameters'] / 1e6:.2f} M parameters trained, {size(found['peak_bytes'])}, "
        f"{duration(found['seconds'])}.",
        f"about: found by search for {found['model']}, within {allowed}",
        "",
        "update:",
        "  method: sparse",
        "  choose: gradient  # of a share, the channels with the largest gradients",
        "  parts:",
        *(f"    - {_flow(part)}" for part in found["parts"]),
    ]
    kept = dataclasses.replace(recipe, how=dataclasses.replace(recipe.how, **found["how"]))
    for section in ("model", "data", "train", "how"):
        lines += _section(section, kept)
    return "\n".join(lines) + "\n"


def _section(name: str, recipe: Recipe) -> list[str]:
    """What differs from the defaults; not where files lie, nor of `how` what belongs to this machine."""
    values, defaults = (dataclasses.asdict(getattr(r, name)) for r in (recipe, Recipe()))
    names = WAYS if name == "how" else [key for key in values if key not in ("path", "heldout")]
    changed = {key: values[key] for key in names if values[key] != defaults[key]}
    return ["", f"{name}:", *(f"  {key}: {config.scalar(value)}" for key, value in changed.items())] if changed else []


def _flow(part: dict[str, Any]) -> str:
    blocks = ", ".join(map(str, part["blocks"]))
    words = [f"blocks: [{blocks}]"]
    if part["tensors"] != list(TENSORS):
        words.append(f"tensors: [{', '.join(part['tensors'])}]")
    if part["channels"] != 1:
        words.append(f"channels: {part['channels']:g}")
    words += [f"{name}: true" for name in ("biases", "norms") if part[name]]
    return "{" + ", ".join(words) + "}"
