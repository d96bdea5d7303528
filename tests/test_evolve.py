"""Evolution: it repeats, it keeps its budgets, and it finds more than random search and at least as much as greedy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgeft.search import evolve
from edgeft.search.evolve import SHARES, Problem, Schemes

SIZES = np.array([36, 12, 12, 36, 96, 96, 96], np.float64)  # of a block's tensors, as in SmolLM2


def problem(seed: int, depth: int = 12, bytes_: float = 900.0, seconds: float = 700.0) -> Problem:
    """Tensors of unlike gain; two execution options, one of which takes less memory and more time."""
    random = np.random.default_rng(seed)
    shares = np.array(SHARES)
    gain = (random.lognormal(0, 0.6, (depth, 7)) * SIZES**0.5)[:, :, None] * shares**0.7
    groups = ((0, 1, 2), (3,), (4, 5), (6,))
    cost = [np.zeros((2, depth, len(SHARES) ** len(group), 2)) for group in groups]
    fixed, small = np.zeros((2, depth, 2)), np.full((2, depth, 2), 0.5)
    above = depth - np.arange(depth)
    for option, (memory, slow) in enumerate([(40.0, 1.0), (15.0, 1.3)]):
        for group, table in zip(groups, cost, strict=True):
            for number in range(table.shape[2]):
                of = [shares[number // len(SHARES) ** n % len(SHARES)] for n in range(len(group))]
                size = sum(SIZES[tensor] * share for tensor, share in zip(group, of, strict=True))
                table[option, :, number] = (
                    size + 6 * min(1.0, sum(of)),
                    size * 0.3 * slow,
                )  # and the input that they share
        fixed[option, :, 0] = 100 + above * memory
        fixed[option, :, 1] = above * 25 * slow
    return Problem(gain, random.random(depth), fixed, groups, tuple(cost), small, np.array([bytes_, seconds]))


def test_a_sum_over_parts() -> None:
    p = problem(0, depth=3)
    level = np.zeros((1, 3, 7), np.int64)
    level[0, 0, 0] = 4  # below the cut: lies still
    level[0, 1, 2], level[0, 2, 6] = 4, 1
    one = Schemes(level, np.array([1]), np.array([1]), np.array([1]))
    gains, costs = evolve.score(p, one)
    assert gains[0] == pytest.approx(p.gain[1, 2, 4] + p.gain[2, 6, 1] + p.bias_gain[2])
    v, down = p.cost[0][1, 1, 4 * 5**2], p.cost[3][1, 2, 1]
    np.testing.assert_allclose(costs[0], p.fixed[1, 1] + v + down + p.bias_cost[1, 2])
    added = p.cost_change(one.option, one.expressed()[0], 1)[0]
    higher = Schemes(level + (np.arange(7) == 1) * (np.arange(3) == 1)[:, None], one.biased, one.cut, one.option)
    np.testing.assert_allclose(evolve.score(p, higher)[1] - costs, added[1, 1][None])  # k beside v


@pytest.mark.parametrize("seed", range(10))
def test_more_than_random_and_not_less_than_greedy(seed: int) -> None:
    p = problem(seed)
    start = evolve.greedy(p)
    best = evolve.evolve(p, seed, start, generations=60)
    alone = evolve.evolve(p, seed, generations=60)  # without greedy's help
    random = evolve.random_search(p, best.evaluations, seed)
    assert best.gain >= evolve.score(p, start)[0][0]
    assert best.gain > random.gain
    assert alone.gain > random.gain
    for result in (best, alone, random):
        assert (result.bytes, result.seconds) <= tuple(p.budget)
        assert result.seconds <= p.budget[1]
    assert best.history == sorted(best.history)


def test_the_same_seed_gives_the_same_scheme() -> None:
    p = problem(3)
    one, two, other = (evolve.evolve(p, seed, generations=20) for seed in (5, 5, 6))
    assert (one.level == two.level).all()
    assert (one.gain, one.biased, one.option) == (two.gain, two.biased, two.option)
    assert (one.level != other.level).any()


@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("bytes_", [200.0, 400.0, 3000.0])
def test_repair_keeps_both_budgets(bytes_: float, guided: bool) -> None:
    p = problem(1, bytes_=bytes_, seconds=150.0)
    random = np.random.default_rng(0)
    schemes = evolve.random_schemes(p, 200, random)
    schemes = Schemes(
        np.full_like(schemes.level, 4), schemes.biased, np.zeros_like(schemes.cut), schemes.option
    )  # all of everything
    assert (evolve.score(p, schemes)[1] > p.budget).any(1).all()
    fixed = evolve.repair(p, schemes, random, guided)
    assert (evolve.score(p, fixed)[1] <= p.budget).all()
    filled = evolve.refill(p, fixed, random)
    assert (evolve.score(p, filled)[1] <= p.budget).all()
    assert (evolve.score(p, filled)[0] >= evolve.score(p, fixed)[0]).all()


def test_a_budget_without_a_limit() -> None:
    p = problem(2, bytes_=np.inf, seconds=np.inf)
    result = evolve.evolve(p, 0, evolve.greedy(p), generations=5)
    assert (result.level == 4).all()
    assert result.biased == 12


@pytest.mark.parametrize("seed", range(3))
def test_the_first_blocks_can_be_left_alone(seed: int) -> None:
    p = replace(problem(seed, bytes_=1e6, seconds=1e6), first_block=3)
    start = evolve.greedy(p)
    for result in (evolve.evolve(p, seed, start, generations=10), evolve.random_search(p, 200, seed)):
        assert not result.level[:3].any()
        assert result.level[3:].any()
        assert result.biased <= 9


def test_together_a_block_brings_less() -> None:
    p = problem(0, depth=3)
    level = np.zeros((1, 3, 7), np.int64)
    level[0, 1, :2] = 4
    one = Schemes(level, np.array([0]), np.array([1]), np.array([0]))
    both = p.gain[1, 0, 4] + p.gain[1, 1, 4]
    assert evolve.score(replace(p, power=0.7), one)[0][0] == pytest.approx(both**0.7)
    assert replace(p, power=0.5).total_gain() == pytest.approx(np.sqrt(p.gain[:, :, -1].sum(1) + p.bias_gain).sum())


def test_where_there_is_room() -> None:
    assert (problem(2, bytes_=115.0).lowest_cuts() == 12).all()  # nowhere
    least = 100 + 15 + (12 + 6) * 0.125
    assert (problem(2, bytes_=least).lowest_cuts() == [12, 11]).all()
