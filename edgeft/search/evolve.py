"""Evolutionary search for the tensors, shares of input channels and biases that gain most within budgets; plain numpy.

Gains and costs of a scheme are sums over its parts, by table lookup. The same problem and seed give the same result,
and no result exceeds a budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)  # of a weight's input channels; a gene is an index into it (its level)
LEVELS = len(SHARES)
MAX_LEVEL = LEVELS - 1
POPULATION = 96
GENERATIONS = 150
ELITE = 4  # the best of a generation survive
TOURNAMENT = 3
JITTER = 0.5  # noise on the order in which genes change: without it, all children would converge
STRIDE = 8  # genes that greedy raises per iteration

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Problem:
    """Costs are (bytes, seconds); `options` are execution options: micro-batch, recomputation, AdamW's precision."""

    gain: Floats  # (depth, tensors, shares); 0 for share 0
    bias_gain: Floats  # (depth,) of a block's biases and norms
    fixed: Floats  # (options, depth, 2) of a cut at a block, with nothing trained yet
    groups: tuple[tuple[int, ...], ...]  # tensors with the same input: the cost of one depends on the others
    cost: tuple[Floats, ...]  # of each group (options, depth, levels of its genes as one number, 2)
    bias_cost: Floats  # (options, depth, 2)
    budget: Floats  # (2,); may be infinite
    power: float = 1.0  # of a block's summed gain; below 1: diminishing returns
    first_block: int = 0  # that may be trained

    @property
    def depth(self) -> int:
        return len(self.gain)

    def total_gain(self) -> float:
        """Of training everything."""
        return float(((self.gain[:, :, -1].sum(1) + self.bias_gain) ** self.power).sum())

    def lowest_cuts(self) -> Ints:
        """(options,) the lowest cut from which on something fits; `depth` if nothing does."""
        fitting = [  # (options, depth): a tensor of the cut itself
            (self.fixed + table[:, :, LEVELS**position] <= self.budget).all(-1)
            for group, table in zip(self.groups, self.cost, strict=True)
            for position in range(len(group))
        ]
        below: Ints = np.cumprod(np.any(fitting, axis=0)[:, ::-1], 1).sum(1)  # consecutive blocks from the top that fit
        return np.maximum(self.depth - below, self.first_block)

    def costs(self, option: Ints, level: Ints) -> Floats:
        """(n, 2), of the tensors alone."""
        block, total = np.arange(self.depth), np.zeros((len(option), 2))
        for group, table in zip(self.groups, self.cost, strict=True):
            total += table[option[:, None], block, _group_index(level, group)].sum(1)
        return total

    def cost_change(self, option: Ints, level: Ints, by: int) -> Floats:
        """(n, depth, tensors, 2) when one gene alone changes by a level; 0 where it cannot."""
        changes, block = np.zeros((*level.shape, 2)), np.arange(self.depth)
        for group, table in zip(self.groups, self.cost, strict=True):
            now = _group_index(level, group)
            before = table[option[:, None], block, now]
            for position, tensor in enumerate(group):
                valid = (level[:, :, tensor] + by >= 0) & (level[:, :, tensor] + by <= MAX_LEVEL)
                after = np.where(valid, now + by * LEVELS**position, now)
                changes[:, :, tensor] = table[option[:, None], block, after] - before
        return changes


def _group_index(level: Ints, group: tuple[int, ...]) -> Ints:
    """(n, depth) the genes of a group as one number."""
    index: Ints = level[:, :, list(group)] @ (LEVELS ** np.arange(len(group)))
    return index


@dataclass(frozen=True)
class Schemes:
    """A population, one scheme per row. Genes below the cut are not expressed until the cut moves below them."""

    level: Ints  # (n, depth, tensors) indices into SHARES
    biased: Ints  # (n,) number of blocks, from the top, with trained biases and norms
    cut: Ints  # (n,)
    option: Ints  # (n,) execution option

    def __len__(self) -> int:
        return len(self.cut)

    def take(self, rows: npt.NDArray[np.intp]) -> Schemes:
        return Schemes(self.level[rows], self.biased[rows], self.cut[rows], self.option[rows])

    @staticmethod
    def join(parts: list[Schemes]) -> Schemes:
        names = ("level", "biased", "cut", "option")
        return Schemes(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def expressed(self) -> tuple[Ints, Bools]:
        """(levels with 0 below the cut, (n, depth) blocks with trained biases)."""
        block = np.arange(self.level.shape[1])
        alive = block >= self.cut[:, None]
        return self.level * alive[:, :, None], alive & (block >= len(block) - self.biased[:, None])


@dataclass(frozen=True)
class SearchResult:
    """One scheme with its gain and costs."""

    level: Ints  # (depth, tensors)
    biased: int
    option: int
    gain: float
    bytes: float
    seconds: float
    evaluations: int
    history: list[float] = field(default_factory=list)  # best gain of each generation


def score(problem: Problem, schemes: Schemes) -> tuple[Floats, Floats]:
    """(gains (n,), costs (n, 2))."""
    level, biased = schemes.expressed()
    gains: Floats = (_contributions(problem, level, biased) ** problem.power).sum(1)
    option = schemes.option
    costs = problem.fixed[option, _lowest(level, biased)] + problem.costs(option, level)
    costs += (problem.bias_cost[option] * biased[:, :, None]).sum(1)
    return gains, costs


def _contributions(problem: Problem, level: Ints, biased: Bools) -> Floats:
    """(n, depth) summed gain of a block's trained parts."""
    block, tensor = np.arange(level.shape[1])[:, None], np.arange(level.shape[2])
    gains: Floats = problem.gain[block, tensor, level].sum(2) + biased * problem.bias_gain
    return gains


def _lowest(level: Ints, biased: Bools) -> Ints:
    """(n,) the lowest block in which anything is trained."""
    used: Bools = level.any(2) | biased
    lowest: Ints = np.where(used.any(1), used.argmax(1), used.shape[1] - 1)
    return lowest


def result_at(problem: Problem, schemes: Schemes, row: int, evaluations: int) -> SearchResult:
    best = schemes.take(np.array([row]))
    gains, costs = score(problem, best)
    level, biased = best.expressed()
    size, time_s = map(float, costs[0])
    return SearchResult(level[0], int(biased[0].sum()), int(best.option[0]), float(gains[0]), size, time_s, evaluations)


def random_schemes(problem: Problem, count: int, rng: np.random.Generator) -> Schemes:
    """Dense and sparse ones, of few and of many blocks, tensors and channels."""
    depth, tensors = problem.gain.shape[:2]
    first = problem.lowest_cuts()
    option = rng.choice(np.flatnonzero(first < depth), count)
    cut = rng.integers(first[option], depth)
    level = rng.integers(1, 1 + rng.integers(1, MAX_LEVEL, (count, 1, 1), endpoint=True), (count, depth, tensors))
    level = level * (rng.random((count, depth, tensors)) < rng.random((count, 1, 1)))
    level = level * (rng.random((count, 1, tensors)) < 0.25 + 0.75 * rng.random((count, 1, 1)))
    biased = rng.integers(0, depth - cut, endpoint=True) * (rng.random(count) < 0.5)
    return Schemes(level, biased, cut, option)


def _log_gain_per_cost(problem: Problem, level: Ints, biased: Bools, by: int, cost: Floats) -> Floats:
    """(n, depth, tensors) log of the gain or loss of one level up or down, relative to its cost."""
    block, tensor = np.arange(level.shape[1])[:, None], np.arange(level.shape[2])
    now = _contributions(problem, level, biased)[:, :, None]
    change = problem.gain[block, tensor, np.clip(level + by, 0, MAX_LEVEL)] - problem.gain[block, tensor, level]
    gain = np.maximum(now + change, 0.0) ** problem.power - now**problem.power
    shares = (np.abs(cost) / problem.budget).sum(-1)
    ratio: Floats = np.log(np.maximum(np.abs(gain), 1e-300)) - np.log(np.maximum(shares, 1e-12))
    return ratio


def repair(problem: Problem, schemes: Schemes, rng: np.random.Generator, guided: bool = True) -> Schemes:
    """Lowers genes until the budgets hold: guided, those with the least gain per cost first, else at random."""
    first = problem.lowest_cuts()
    feasible = np.flatnonzero(first < problem.depth)
    option = np.where(first[schemes.option] < problem.depth, schemes.option, rng.choice(feasible, len(schemes)))
    schemes = replace(schemes, option=option, cut=np.maximum(schemes.cut, first[option]))
    level = schemes.level.copy()
    for _ in range(2 * MAX_LEVEL):  # each gene goes down one level at a time
        current = replace(schemes, level=level)
        over = score(problem, current)[1] - problem.budget
        rows = np.flatnonzero((over > 0).any(1))
        if not len(rows):
            return current
        alive, biased = current.take(rows).expressed()
        saved = -problem.cost_change(option[rows], alive, -1)
        order = rng.standard_normal(alive.shape) * JITTER
        order = order + _log_gain_per_cost(problem, alive, biased, -1, saved) if guided else order
        chosen = _first_reaching(np.where(alive > 0, order, np.inf), saved, over[rows])
        level[rows] = np.where(chosen & (alive > 0), level[rows] - 1, level[rows])
    current = replace(schemes, level=level)
    within: Bools = np.asarray((score(problem, current)[1] <= problem.budget).all(1))
    return replace(current, level=level * within[:, None, None], biased=current.biased * within)


def _first_reaching(order: Floats, saved: Floats, wanted: Floats) -> Bools:
    """(n, depth, tensors) the first genes in this order that together save at least `wanted` (n, 2)."""
    rows = len(order)
    positions = np.argsort(order.reshape(rows, -1), axis=1)
    cumulative = np.cumsum(np.take_along_axis(saved.reshape(rows, -1, 2), positions[:, :, None], 1), axis=1)
    short: Bools = np.asarray((cumulative < wanted[:, None]).any(-1))  # not enough up to here
    mask = np.zeros(short.shape, bool)
    np.put_along_axis(mask, positions, np.concatenate([np.ones((rows, 1), bool), short[:, :-1]], 1), 1)
    return mask.reshape(order.shape)


def refill(
    problem: Problem, schemes: Schemes, rng: np.random.Generator | None = None, max_genes: int | None = None
) -> Schemes:
    """Spends what the budgets leave: genes above the cut go up one level, those with most gain per cost first.

    rng: adds noise to the order; max_genes: raised at a time.
    """
    level, biased = schemes.expressed()
    rows, block = len(level), np.arange(level.shape[1])[:, None]
    remaining = problem.budget - score(problem, schemes)[1]
    added = problem.cost_change(schemes.option, level, 1)
    lowest = np.where((level.any(2) | biased).any(1), _lowest(level, biased), schemes.cut)
    allowed = (level < MAX_LEVEL) & (block >= lowest[:, None, None]) & (added <= remaining[:, None, None]).all(-1)
    order = -_log_gain_per_cost(problem, level, biased, 1, added)
    if rng is not None:
        order = order + JITTER * rng.standard_normal(level.shape)
    positions = np.argsort(np.where(allowed, order, np.inf).reshape(rows, -1), axis=1)
    cumulative = np.cumsum(np.take_along_axis(added.reshape(rows, -1, 2), positions[:, :, None], 1), axis=1)
    fits: Bools = np.asarray((cumulative <= remaining[:, None]).all(-1))
    fits[:, max_genes:] = False
    mask = np.zeros(fits.shape, bool)
    np.put_along_axis(mask, positions, fits, 1)
    higher = np.where(mask.reshape(level.shape) & allowed, level + 1, schemes.level)
    fuller = replace(schemes, level=higher)
    # together they may cost more than separately
    within: Bools = np.asarray((score(problem, fuller)[1] <= problem.budget).all(1))
    return replace(schemes, level=np.where(within[:, None, None], higher, schemes.level))


def greedy(problem: Problem) -> Schemes:
    """The best of all execution options and cuts, each filled up to the budget by gain per cost."""
    depth, tensors = problem.gain.shape[:2]
    pairs = [(option, cut) for option, first in enumerate(problem.lowest_cuts()) for cut in range(first, depth)]
    option, cut = np.array(pairs).T
    growing = Schemes(np.zeros((len(pairs), depth, tensors), np.int64), np.zeros(len(pairs), np.int64), cut, option)
    done: list[Schemes] = []
    while len(growing):
        fuller = refill(problem, growing, max_genes=STRIDE)
        full = (fuller.level == growing.level).all((1, 2))
        done.append(fuller.take(np.flatnonzero(full)))
        growing = fuller.take(np.flatnonzero(~full))
    best = Schemes.join(done)
    for blocks in range(1, depth + 1):  # biases, from the top down, with the remaining budget
        more = replace(best, biased=np.where(best.cut <= depth - blocks, blocks, best.biased))
        within = (score(problem, more)[1] <= problem.budget).all(1)
        best = replace(best, biased=np.where(within, more.biased, best.biased))
    return best.take(np.array([np.argmax(score(problem, best)[0])]))


def random_search(problem: Problem, evaluations: int, seed: int) -> SearchResult:
    """Random schemes, each repaired by lowering genes at random."""
    rng = np.random.default_rng([seed, 1])
    best: SearchResult | None = None
    for start in range(0, evaluations, POPULATION):
        schemes = random_schemes(problem, min(POPULATION, evaluations - start), rng)
        schemes = repair(problem, schemes, rng, guided=False)
        row = int(np.argmax(score(problem, schemes)[0]))
        result = result_at(problem, schemes, row, evaluations)
        best = result if best is None or result.gain > best.gain else best
    assert best is not None
    return best


def evolve(problem: Problem, seed: int, start: Schemes | None = None, generations: int = GENERATIONS) -> SearchResult:
    """start: initial schemes beside random ones; the result is at least as good as the best of them."""
    rng = np.random.default_rng([seed, 0])
    population = random_schemes(problem, POPULATION if start is None else POPULATION - len(start), rng)
    population = population if start is None else Schemes.join([start, population])
    population = repair(problem, population, rng)
    gains = score(problem, population)[0]
    history = [float(gains.max())]
    for _ in range(generations):
        a, b = (population.take(_tournament(gains, POPULATION - ELITE, rng)) for _ in range(2))
        children = _mutate(problem, _crossover(a, b, rng), rng)
        elite = np.argsort(-gains, kind="stable")[:ELITE]
        children = refill(problem, repair(problem, children, rng), rng)
        population = Schemes.join([population.take(elite), children])
        gains = score(problem, population)[0]
        history.append(float(gains.max()))
    evaluations = POPULATION + generations * (POPULATION - ELITE)
    return replace(result_at(problem, population, int(np.argmax(gains)), evaluations), history=history)


def _tournament(gains: Floats, count: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    entrants = rng.integers(0, len(gains), (count, TOURNAMENT))
    winners: npt.NDArray[np.intp] = entrants[np.arange(count), gains[entrants].argmax(1)]
    return winners


def _crossover(a: Schemes, b: Schemes, rng: np.random.Generator) -> Schemes:
    """Uniform or one-point crossover over blocks."""
    count, depth = a.level.shape[:2]
    mixed = rng.random((count, depth)) < 0.5
    split = np.arange(depth) < rng.integers(0, depth, (count, 1), endpoint=True)
    from_a = np.where(rng.random((count, 1)) < 0.5, mixed, split)
    cut, biased, option = (rng.random(count) < 0.5 for _ in range(3))
    return Schemes(
        np.where(from_a[:, :, None], a.level, b.level),
        np.where(biased, a.biased, b.biased),
        np.where(cut, a.cut, b.cut),
        np.where(option, a.option, b.option),
    )


def _mutate(problem: Problem, schemes: Schemes, rng: np.random.Generator) -> Schemes:
    """A few genes up or down; sometimes a whole block or tensor, the cut, biased blocks, the execution option."""
    count, depth, tensors = schemes.level.shape
    level = schemes.level.copy()
    few = rng.random(level.shape) < rng.choice([1, 3, 8], (count, 1, 1)) / (depth * tensors)
    step = rng.choice([-1, 1], level.shape)
    anywhere = rng.integers(0, MAX_LEVEL, level.shape, endpoint=True)
    level = np.where(few, np.where(rng.random(level.shape) < 0.7, level + step, anywhere), level)
    rows = np.arange(count)
    hit = rows[rng.random(count) < 0.15]
    level[hit, rng.integers(0, depth, len(hit))] = rng.integers(0, MAX_LEVEL, (len(hit), 1), endpoint=True)
    hit = rows[rng.random(count) < 0.1]
    level[hit, :, rng.integers(0, tensors, len(hit))] += rng.choice([-1, 1], (len(hit), 1))
    cut = schemes.cut + (rng.random(count) < 0.2) * rng.integers(-3, 3, count, endpoint=True)
    cut = np.clip(cut, 0, depth - 1)
    biased = schemes.biased + (rng.random(count) < 0.2) * rng.integers(-4, 4, count, endpoint=True)
    option = np.where(rng.random(count) < 0.1, rng.integers(0, len(problem.fixed), count), schemes.option)
    return Schemes(np.clip(level, 0, MAX_LEVEL), np.clip(biased, 0, depth), cut, option)
