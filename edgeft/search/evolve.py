"""Evolution: which tensors, shares of their input channels and biases bring the most within budgets; plain numpy.

What a scheme brings and costs are sums over its parts, by table. The same problem and seed give the same answer, and
nothing that is given back exceeds a budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)  # of a weight's input channels; a gene is a place in here
PLACES = len(SHARES)
TOP = PLACES - 1
SIZE = 96  # of the population
ROUNDS = 150
KEPT = 4  # the best of a generation live on
TOURNAMENT = 3
JITTER = 0.5  # of the order in which genes go up or down: without it, all children would become one
STRIDE = 8  # genes that greedy raises at a time

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Problem:
    """Costs are (bytes, seconds); `ways` are the ways to run a scheme: micro-batch, recomputation."""

    gain: Floats  # (depth, tensors, shares); nothing for share 0
    small_gain: Floats  # (depth,) biases and norms of a block
    fixed: Floats  # (ways, depth, 2) with the cut at a block, and nothing trained yet
    groups: tuple[tuple[int, ...], ...]  # tensors that share an input: what one adds depends on the others
    cost: tuple[Floats, ...]  # of each group (ways, depth, places of all its genes as one number, 2)
    small_cost: Floats  # (ways, depth, 2)
    budget: Floats  # (2,); may be infinite
    power: float = 1.0  # of what a block brings; below 1, the more of it is trained, the less does each part bring
    lowest: int = 0  # the first block that may be trained

    @property
    def depth(self) -> int:
        return len(self.gain)

    def every(self) -> float:
        """What training everything would bring."""
        return float(((self.gain[:, :, -1].sum(1) + self.small_gain) ** self.power).sum())

    def first_cuts(self) -> Ints:
        """(ways,) the lowest cut from which on something can be trained; `depth` where there is none."""
        rooms = [  # (ways, depth): a tensor of the cut itself
            (self.fixed + table[:, :, PLACES**place] <= self.budget).all(-1)
            for group, table in zip(self.groups, self.cost, strict=True)
            for place in range(len(group))
        ]
        below: Ints = np.cumprod(np.any(rooms, axis=0)[:, ::-1], 1).sum(1)  # blocks from the top down that have room
        return np.maximum(self.depth - below, self.lowest)

    def costs(self, way: Ints, level: Ints) -> Floats:
        """(n, 2) of the tensors alone."""
        block, total = np.arange(self.depth), np.zeros((len(way), 2))
        for group, table in zip(self.groups, self.cost, strict=True):
            total += table[way[:, None], block, _number(level, group)].sum(1)
        return total

    def change(self, way: Ints, level: Ints, by: int) -> Floats:
        """(n, depth, tensors, 2) what costs change by when this gene alone goes up or down; where it can."""
        found, block = np.zeros((*level.shape, 2)), np.arange(self.depth)
        for group, table in zip(self.groups, self.cost, strict=True):
            now = _number(level, group)
            before = table[way[:, None], block, now]
            for place, tensor in enumerate(group):
                able = (level[:, :, tensor] + by >= 0) & (level[:, :, tensor] + by <= TOP)
                then = np.where(able, now + by * PLACES**place, now)
                found[:, :, tensor] = table[way[:, None], block, then] - before
        return found


def _number(level: Ints, group: tuple[int, ...]) -> Ints:
    """(n, depth) the genes of a group as one number."""
    number: Ints = level[:, :, list(group)] @ (PLACES ** np.arange(len(group)))
    return number


@dataclass(frozen=True)
class Schemes:
    """A population: one scheme a row. Genes of blocks below the cut lie still until it comes down to them."""

    level: Ints  # (n, depth, tensors) places in SHARES
    biased: Ints  # (n,) biases and norms of so many blocks, counted from the top
    cut: Ints  # (n,)
    way: Ints  # (n,)

    def __len__(self) -> int:
        return len(self.cut)

    def take(self, rows: npt.NDArray[np.intp]) -> Schemes:
        return Schemes(self.level[rows], self.biased[rows], self.cut[rows], self.way[rows])

    @staticmethod
    def join(parts: list[Schemes]) -> Schemes:
        names = ("level", "biased", "cut", "way")
        return Schemes(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def expressed(self) -> tuple[Ints, Bools]:
        """(levels at and above the cut, (n, depth) which blocks have biases trained)."""
        block = np.arange(self.level.shape[1])
        alive = block >= self.cut[:, None]
        return self.level * alive[:, :, None], alive & (block >= len(block) - self.biased[:, None])


@dataclass(frozen=True)
class Found:
    """One scheme, and what it brings and costs."""

    level: Ints  # (depth, tensors)
    biased: int
    way: int
    gain: float
    bytes: float
    seconds: float
    evaluations: int
    history: list[float] = field(default_factory=list)  # the best of each generation


def score(problem: Problem, schemes: Schemes) -> tuple[Floats, Floats]:
    """(gains (n,), costs (n, 2))."""
    level, biased = schemes.expressed()
    gains: Floats = (_contributions(problem, level, biased) ** problem.power).sum(1)
    way = schemes.way
    costs = problem.fixed[way, _lowest(level, biased)] + problem.costs(way, level)
    costs += (problem.small_cost[way] * biased[:, :, None]).sum(1)
    return gains, costs


def _contributions(problem: Problem, level: Ints, biased: Bools) -> Floats:
    """(n, depth) what is trained in a block, added up."""
    block, tensor = np.arange(level.shape[1])[:, None], np.arange(level.shape[2])
    found: Floats = problem.gain[block, tensor, level].sum(2) + biased * problem.small_gain
    return found


def _lowest(level: Ints, biased: Bools) -> Ints:
    """(n,) the lowest block in which anything is trained."""
    used: Bools = level.any(2) | biased
    lowest: Ints = np.where(used.any(1), used.argmax(1), used.shape[1] - 1)
    return lowest


def found(problem: Problem, schemes: Schemes, row: int, evaluations: int) -> Found:
    one = schemes.take(np.array([row]))
    gains, costs = score(problem, one)
    level, biased = one.expressed()
    bytes_, seconds = map(float, costs[0])
    return Found(level[0], int(biased[0].sum()), int(one.way[0]), float(gains[0]), bytes_, seconds, evaluations)


def random_schemes(problem: Problem, count: int, random: np.random.Generator) -> Schemes:
    """Dense and thin ones, of few and of many blocks, tensors and channels."""
    depth, tensors = problem.gain.shape[:2]
    first = problem.first_cuts()
    way = random.choice(np.flatnonzero(first < depth), count)
    cut = random.integers(first[way], depth)
    level = random.integers(1, 1 + random.integers(1, TOP, (count, 1, 1), endpoint=True), (count, depth, tensors))
    level = level * (random.random((count, depth, tensors)) < random.random((count, 1, 1)))
    level = level * (random.random((count, 1, tensors)) < 0.25 + 0.75 * random.random((count, 1, 1)))
    biased = random.integers(0, depth - cut, endpoint=True) * (random.random(count) < 0.5)
    return Schemes(level, biased, cut, way)


def _worth(problem: Problem, level: Ints, biased: Bools, by: int, cost: Floats) -> Floats:
    """(n, depth, tensors) the logarithm of what going up or down by one place brings or loses, for its cost."""
    block, tensor = np.arange(level.shape[1])[:, None], np.arange(level.shape[2])
    now = _contributions(problem, level, biased)[:, :, None]
    change = problem.gain[block, tensor, np.clip(level + by, 0, TOP)] - problem.gain[block, tensor, level]
    gain = np.maximum(now + change, 0.0) ** problem.power - now**problem.power
    shares = (np.abs(cost) / problem.budget).sum(-1)
    worth: Floats = np.log(np.maximum(np.abs(gain), 1e-300)) - np.log(np.maximum(shares, 1e-12))
    return worth


def repair(problem: Problem, schemes: Schemes, random: np.random.Generator, guided: bool = True) -> Schemes:
    """Lowers genes until the budgets are kept: those that bring little for their cost first, or just any."""
    first = problem.first_cuts()
    able = np.flatnonzero(first < problem.depth)
    way = np.where(first[schemes.way] < problem.depth, schemes.way, random.choice(able, len(schemes)))
    schemes = replace(schemes, way=way, cut=np.maximum(schemes.cut, first[way]))
    level = schemes.level.copy()
    for _ in range(2 * TOP):  # each gene goes down by one place at a time
        now = replace(schemes, level=level)
        over = score(problem, now)[1] - problem.budget
        rows = np.flatnonzero((over > 0).any(1))
        if not len(rows):
            return now
        alive, biased = now.take(rows).expressed()
        saved = -problem.change(way[rows], alive, -1)
        order = random.standard_normal(alive.shape) * JITTER
        order = order + _worth(problem, alive, biased, -1, saved) if guided else order
        chosen = _until(np.where(alive > 0, order, np.inf), saved, over[rows])
        level[rows] = np.where(chosen & (alive > 0), level[rows] - 1, level[rows])
    now = replace(schemes, level=level)
    good: Bools = np.asarray((score(problem, now)[1] <= problem.budget).all(1))
    return replace(now, level=level * good[:, None, None], biased=now.biased * good)


def _until(order: Floats, each: Floats, wanted: Floats) -> Bools:
    """(n, depth, tensors) the first ones in this order that are together at least `wanted` (n, 2)."""
    rows = len(order)
    places = np.argsort(order.reshape(rows, -1), axis=1)
    together = np.cumsum(np.take_along_axis(each.reshape(rows, -1, 2), places[:, :, None], 1), axis=1)
    short: Bools = np.asarray((together < wanted[:, None]).any(-1))  # up to this one it does not suffice
    mask = np.zeros(short.shape, bool)
    np.put_along_axis(mask, places, np.concatenate([np.ones((rows, 1), bool), short[:, :-1]], 1), 1)
    return mask.reshape(order.shape)


def refill(
    problem: Problem, schemes: Schemes, random: np.random.Generator | None = None, most: int | None = None
) -> Schemes:
    """Uses what the budgets leave: genes above the cut go up by one place, those that bring much for their cost first.

    random: the order is shaken; most: so many at a time.
    """
    level, biased = schemes.expressed()
    rows, block = len(level), np.arange(level.shape[1])[:, None]
    left = problem.budget - score(problem, schemes)[1]
    added = problem.change(schemes.way, level, 1)
    lowest = np.where((level.any(2) | biased).any(1), _lowest(level, biased), schemes.cut)
    able = (level < TOP) & (block >= lowest[:, None, None]) & (added <= left[:, None, None]).all(-1)
    order = -_worth(problem, level, biased, 1, added)
    if random is not None:
        order = order + JITTER * random.standard_normal(level.shape)
    places = np.argsort(np.where(able, order, np.inf).reshape(rows, -1), axis=1)
    together = np.cumsum(np.take_along_axis(added.reshape(rows, -1, 2), places[:, :, None], 1), axis=1)
    fits: Bools = np.asarray((together <= left[:, None]).all(-1))
    fits[:, most:] = False
    mask = np.zeros(fits.shape, bool)
    np.put_along_axis(mask, places, fits, 1)
    higher = np.where(mask.reshape(level.shape) & able, level + 1, schemes.level)
    fuller = replace(schemes, level=higher)
    # together they may cost more than one by one
    good: Bools = np.asarray((score(problem, fuller)[1] <= problem.budget).all(1))
    return replace(schemes, level=np.where(good[:, None, None], higher, schemes.level))


def greedy(problem: Problem) -> Schemes:
    """For every way and cut, a few genes at a time, the most gain for their cost first, up to the budget; the best."""
    depth, tensors = problem.gain.shape[:2]
    pairs = [(way, cut) for way, first in enumerate(problem.first_cuts()) for cut in range(first, depth)]
    way, cut = np.array(pairs).T
    some = Schemes(np.zeros((len(pairs), depth, tensors), np.int64), np.zeros(len(pairs), np.int64), cut, way)
    done: list[Schemes] = []
    while len(some):
        fuller = refill(problem, some, most=STRIDE)
        same = (fuller.level == some.level).all((1, 2))
        done.append(fuller.take(np.flatnonzero(same)))
        some = fuller.take(np.flatnonzero(~same))
    best = Schemes.join(done)
    for blocks in range(1, depth + 1):  # biases, from the top down, with what is left
        more = replace(best, biased=np.where(best.cut <= depth - blocks, blocks, best.biased))
        good = (score(problem, more)[1] <= problem.budget).all(1)
        best = replace(best, biased=np.where(good, more.biased, best.biased))
    return best.take(np.array([np.argmax(score(problem, best)[0])]))


def random_search(problem: Problem, evaluations: int, seed: int) -> Found:
    """As many schemes at random, each made to fit by lowering genes at random."""
    random = np.random.default_rng([seed, 1])
    best: Found | None = None
    for start in range(0, evaluations, SIZE):
        some = random_schemes(problem, min(SIZE, evaluations - start), random)
        some = repair(problem, some, random, guided=False)
        row = int(np.argmax(score(problem, some)[0]))
        one = found(problem, some, row, evaluations)
        best = one if best is None or one.gain > best.gain else best
    assert best is not None
    return best


def evolve(problem: Problem, seed: int, start: Schemes | None = None, rounds: int = ROUNDS) -> Found:
    """start: schemes to begin with, beside random ones; the answer is at least as good as the best of them."""
    random = np.random.default_rng([seed, 0])
    people = random_schemes(problem, SIZE if start is None else SIZE - len(start), random)
    people = people if start is None else Schemes.join([start, people])
    people = repair(problem, people, random)
    gains = score(problem, people)[0]
    history = [float(gains.max())]
    for _ in range(rounds):
        one, other = (people.take(_tournament(gains, SIZE - KEPT, random)) for _ in range(2))
        children = _mutated(problem, _crossed(one, other, random), random)
        best = np.argsort(-gains, kind="stable")[:KEPT]
        children = refill(problem, repair(problem, children, random), random)
        people = Schemes.join([people.take(best), children])
        gains = score(problem, people)[0]
        history.append(float(gains.max()))
    evaluations = SIZE + rounds * (SIZE - KEPT)
    return replace(found(problem, people, int(np.argmax(gains)), evaluations), history=history)


def _tournament(gains: Floats, count: int, random: np.random.Generator) -> npt.NDArray[np.intp]:
    some = random.integers(0, len(gains), (count, TOURNAMENT))
    winners: npt.NDArray[np.intp] = some[np.arange(count), gains[some].argmax(1)]
    return winners


def _crossed(one: Schemes, other: Schemes, random: np.random.Generator) -> Schemes:
    """Blocks from either parent: each by lot, or all up to a block from one and the rest from the other."""
    count, depth = one.level.shape[:2]
    mixed = random.random((count, depth)) < 0.5
    split = np.arange(depth) < random.integers(0, depth, (count, 1), endpoint=True)
    from_one = np.where(random.random((count, 1)) < 0.5, mixed, split)
    cut, biased, way = (random.random(count) < 0.5 for _ in range(3))
    return Schemes(
        np.where(from_one[:, :, None], one.level, other.level),
        np.where(biased, one.biased, other.biased),
        np.where(cut, one.cut, other.cut),
        np.where(way, one.way, other.way),
    )


def _mutated(problem: Problem, schemes: Schemes, random: np.random.Generator) -> Schemes:
    """A few genes up or down; now and then a whole block or tensor, the cut, the depth of biases, the way to run."""
    count, depth, tensors = schemes.level.shape
    level = schemes.level.copy()
    few = random.random(level.shape) < random.choice([1, 3, 8], (count, 1, 1)) / (depth * tensors)
    step = random.choice([-1, 1], level.shape)
    anywhere = random.integers(0, TOP, level.shape, endpoint=True)
    level = np.where(few, np.where(random.random(level.shape) < 0.7, level + step, anywhere), level)
    rows = np.arange(count)
    hit = rows[random.random(count) < 0.15]
    level[hit, random.integers(0, depth, len(hit))] = random.integers(0, TOP, (len(hit), 1), endpoint=True)
    hit = rows[random.random(count) < 0.1]
    level[hit, :, random.integers(0, tensors, len(hit))] += random.choice([-1, 1], (len(hit), 1))
    cut = schemes.cut + (random.random(count) < 0.2) * random.integers(-3, 3, count, endpoint=True)
    cut = np.clip(cut, 0, depth - 1)
    biased = schemes.biased + (random.random(count) < 0.2) * random.integers(-4, 4, count, endpoint=True)
    way = np.where(random.random(count) < 0.1, random.integers(0, len(problem.fixed), count), schemes.way)
    return Schemes(np.clip(level, 0, TOP), np.clip(biased, 0, depth), cut, way)
