"""Evolution: which tensors, shares of their input channels and biases bring the most within budgets; plain numpy.

What a scheme brings and costs are sums over its parts, by table. The same problem and seed give the same answer, and
nothing that is given back exceeds a budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)  # of a weight's input channels; a gene is a place in here
TOP = len(SHARES) - 1
SIZE = 96  # of the population
ROUNDS = 200
KEPT = 4  # the best of a generation live on
TOURNAMENT = 3
JITTER = 0.5  # of the order in which too costly genes are lowered: without it, all children would become one

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """Costs are (bytes, seconds); `ways` are the ways to run a scheme: micro-batch, recomputation."""

    gain: Floats  # (depth, tensors, shares); nothing for share 0
    small_gain: Floats  # (depth,) biases and norms of a block
    fixed: Floats  # (ways, depth, 2) with the cut at a block, and nothing trained yet
    cost: Floats  # (ways, depth, tensors, shares, 2) that a tensor adds
    small_cost: Floats  # (ways, depth, 2)
    budget: Floats  # (2,); may be infinite

    @property
    def depth(self) -> int:
        return len(self.gain)

    def first_cuts(self) -> Ints:
        """(ways,) the lowest cut from which on something can be trained; `depth` where there is none."""
        least = self.fixed[:, :, None] + self.cost[:, :, :, 1]  # (ways, depth, tensors, 2)
        room = (least <= self.budget).all(-1).any(2)  # for a tensor of the cut's own block
        below = np.cumprod(room[:, ::-1], 1).sum(1)  # blocks from the top down that have room
        return self.depth - below


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

    def expressed(self) -> tuple[Ints, npt.NDArray[np.bool_]]:
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

    @property
    def cut(self) -> int:
        """The lowest block in which anything is trained."""
        used = self.level.any(1)
        used[len(used) - self.biased :] = True
        return int(np.argmax(used)) if used.any() else len(used) - 1


def score(problem: Problem, schemes: Schemes) -> tuple[Floats, Floats]:
    """(gains (n,), costs (n, 2))."""
    level, biased = schemes.expressed()
    block, tensor = np.arange(level.shape[1])[:, None], np.arange(level.shape[2])
    gains = problem.gain[block, tensor, level].sum((1, 2)) + biased @ problem.small_gain
    used = level.any(2) | biased
    lowest = np.where(used.any(1), used.argmax(1), problem.depth - 1)
    way = schemes.way
    costs = problem.fixed[way, lowest] + problem.cost[way[:, None, None], block, tensor, level].sum((1, 2))
    costs += (problem.small_cost[way] * biased[:, :, None]).sum(1)
    return gains, costs


def found(problem: Problem, schemes: Schemes, row: int, evaluations: int) -> Found:
    one = schemes.take(np.array([row]))
    gains, costs = score(problem, one)
    level, biased = one.expressed()
    bytes_, seconds = map(float, costs[0])
    return Found(level[0], int(biased[0].sum()), int(one.way[0]), float(gains[0]), bytes_, seconds, evaluations)


# ---------------------------------------------------------------- schemes at random, and within the budget


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


def repair(problem: Problem, schemes: Schemes, random: np.random.Generator, guided: bool = True) -> Schemes:
    """Lowers genes until the budgets are kept: those that bring little for their cost first, or just any."""
    first = problem.first_cuts()
    able = np.flatnonzero(first < problem.depth)
    way = np.where(first[schemes.way] < problem.depth, schemes.way, random.choice(able, len(schemes)))
    schemes = replace(schemes, way=way, cut=np.maximum(schemes.cut, first[way]))
    level, biased = schemes.level.copy(), schemes.biased.copy()
    block, tensor = np.arange(level.shape[1])[:, None], np.arange(level.shape[2])
    for _ in range(TOP):  # each gene goes down by one place at a time
        now = replace(schemes, level=level)
        over = score(problem, now)[1] - problem.budget
        rows = np.flatnonzero((over > 0).any(1))
        if not len(rows):
            return now
        alive = now.take(rows).expressed()[0]
        lower = np.maximum(alive - 1, 0)
        ways = way[rows][:, None, None]
        saved = problem.cost[ways, block, tensor, alive] - problem.cost[ways, block, tensor, lower]
        lost = problem.gain[block, tensor, alive] - problem.gain[block, tensor, lower]
        worth = lost / np.maximum((saved / problem.budget).sum(-1), 1e-12)
        order = random.standard_normal(alive.shape) * JITTER
        order = order + np.log(np.maximum(worth, 1e-300)) if guided else order
        order = np.where(alive > 0, order, np.inf).reshape(len(rows), -1)
        places = np.argsort(order, axis=1)
        together = np.cumsum(np.take_along_axis(saved.reshape(len(rows), -1, 2), places[:, :, None], 1), axis=1)
        short = (together < over[rows][:, None]).any(-1)  # what was lowered so far does not suffice
        chosen = np.concatenate([np.ones((len(rows), 1), bool), short[:, :-1]], 1)
        mask = np.zeros_like(chosen)
        np.put_along_axis(mask, places, chosen, 1)
        level[rows] = np.where(mask.reshape(alive.shape) & (alive > 0), level[rows] - 1, level[rows])
    now = replace(schemes, level=level)
    biased[(score(problem, now)[1] > problem.budget).any(1)] = 0
    return replace(now, biased=biased)


def refill(problem: Problem, schemes: Schemes, random: np.random.Generator) -> Schemes:
    """Uses what the budgets leave: genes above the cut go up by one place, those that bring much for it first."""
    level, biased = schemes.expressed()
    used = level.any(2) | biased
    lowest = np.where(used.any(1), used.argmax(1), problem.depth - 1)
    block, tensor = np.arange(level.shape[1])[:, None], np.arange(level.shape[2])
    way, higher = schemes.way[:, None, None], np.minimum(level + 1, TOP)
    added = problem.cost[way, block, tensor, higher] - problem.cost[way, block, tensor, level]
    more = problem.gain[block, tensor, higher] - problem.gain[block, tensor, level]
    worth = more / np.maximum((added / problem.budget).sum(-1), 1e-12)
    able = (level < TOP) & (more > 0) & (block >= lowest[:, None, None])
    order = np.log(np.maximum(worth, 1e-300)) + JITTER * random.standard_normal(level.shape)
    places = np.argsort(np.where(able, -order, np.inf).reshape(len(level), -1), axis=1)
    together = np.cumsum(np.take_along_axis(added.reshape(len(level), -1, 2), places[:, :, None], 1), axis=1)
    left = problem.budget - score(problem, schemes)[1]
    mask = np.zeros(places.shape, bool)
    np.put_along_axis(mask, places, (together <= left[:, None]).all(-1), 1)
    return replace(schemes, level=np.where(mask.reshape(level.shape) & able, higher, schemes.level))


# ---------------------------------------------------------------- three ways to search


def greedy(problem: Problem) -> Schemes:
    """For every way and cut: one place of one gene after the other, the most gain for its cost first; the best."""
    best: tuple[float, Schemes] | None = None
    for way, first in enumerate(problem.first_cuts()):
        for cut in range(first, problem.depth):
            left = problem.budget - problem.fixed[way, cut]
            level, biased = _fill(problem, way, cut, left)
            one = Schemes(level[None], np.array([biased]), np.array([cut]), np.array([way]))
            gain = float(score(problem, one)[0][0])
            if best is None or gain > best[0]:
                best = gain, one
    assert best is not None  # the caller has looked whether anything fits
    return best[1]


def _fill(problem: Problem, way: int, cut: int, left: Floats) -> tuple[Ints, int]:
    depth, tensors = problem.gain.shape[:2]
    gain, cost = np.diff(problem.gain[cut:], axis=2), np.diff(problem.cost[way, cut:], axis=2)
    # biases are one more gene, whose places are the blocks from the top down
    small_gain, small_cost = problem.small_gain[cut:][::-1], problem.small_cost[way, cut:][::-1]
    gains = np.concatenate([gain.reshape(-1), small_gain])
    costs = np.concatenate([cost.reshape(-1, 2), small_cost])
    share = (costs / np.maximum(left, 1e-300)).sum(1)
    order = np.argsort(-gains / np.maximum(share, 1e-12), kind="stable")
    level, biased = np.zeros((depth, tensors), np.int64), 0
    added = True
    while added:  # a place can only be taken after the one below it
        added = False
        for item in order[(costs[order] <= left).all(1)]:
            if (costs[item] > left).any() or gains[item] <= 0:
                continue
            if item >= gain.size:
                if item - gain.size != biased:
                    continue
                biased += 1
            else:
                where, place = divmod(int(item), TOP)
                at = cut + where // tensors, where % tensors
                if level[at] != place:
                    continue
                level[at] += 1
            left = left - costs[item]
            added = True
    return level, biased


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
        parents = [people.take(_tournament(gains, SIZE - KEPT, random)) for _ in range(2)]
        children = _mutated(problem, _crossed(*parents, random), random)
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
