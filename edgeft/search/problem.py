"""The search: contributions, budgets, and the scheme that gains most within them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgeft import methods, plan
from edgeft.arch import Architecture
from edgeft.config import TENSORS, Device, PartConfig, Recipe, UpdateConfig, format_duration, format_size
from edgeft.data.tokens import Encoded
from edgeft.errors import ConfigError, DoesNotFitError
from edgeft.formats.source import model_source
from edgeft.methods import scheme as schemes
from edgeft.methods.scheme import Scheme
from edgeft.plan.schedule import Schedule
from edgeft.run.progress import Progress
from edgeft.search import evolve
from edgeft.search.budget import Budget, finite
from edgeft.search.costs import Costs
from edgeft.search.evolve import SHARES, Found, Problem
from edgeft.search.measure import Measurements, first_of, search_entry, search_key
from edgeft.search.recipe import WAYS

if TYPE_CHECKING:
    from edgeft.search.contribution import FirstOrder


# Of the depth, from below: stays frozen. All that a model can do is built on its first blocks, and what runs only once
# costs little. Banking77, one epoch, where they may be chosen: loss 0.241, ARC-Easy 49.8 %; frozen: 0.212, 53.5 %.
FROZEN = 0.1

TRIES = 8  # times that a budget is tightened because parts cost more together than one by one

SLACK = 1.05  # by so many times what was too much; doubled each time

# Of what a block brings, where a run's own search may cost as much as the rule: a little of many blocks, loss 0.212 on
# Banking77. In 1 GiB the plain sum, which leads to fewer blocks, did better: 0.235 against 0.294 (SQuAD 0.719, 0.703).
POWER = 0.7

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SearchProblem:
    """All that is known before the evolution."""

    recipe: Recipe
    budget: Budget
    arch: Architecture
    costs: Costs
    problem: Problem
    numbers: dict[str, Any]  # of how it came about


def build_problem(
    recipe: Recipe,
    train: Sequence[Encoded],
    heldout: Sequence[Encoded],
    budget: Budget,
    seed: int,
    progress: Progress,
    profile: Device | None = None,
    again: bool = False,
    within: bool = False,
) -> SearchProblem:
    """Contributions and costs.

    profile: of the machine that will train, if it is another. again: contributions that are kept do not count.
    within: it may not take more memory than the recipe's own scheme, either.
    """
    from edgeft.search import contribution

    if not methods.get(recipe.update.method).partial:
        raise ConfigError(
            f"a search finds what `update.method: sparse` trains, and this recipe says `{recipe.update.method}`",
            "search from `--recipe sparse-bp`",
        )
    recipe = dataclasses.replace(recipe, how=dataclasses.replace(recipe.how))
    source = model_source(recipe.model.path)
    shape = plan.shape_of(source, recipe.model.frozen)
    arch = shape.arch
    sample = contribution.draw(train, heldout, seed)
    with search_entry(search_key(recipe, source, sample), progress) as entry:
        if again:
            entry.note_file.unlink(missing_ok=True)
        worker = Measurements(recipe, source, shape, sample, entry, progress)
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
        "budget": {name: finite(value) for name, value in dataclasses.asdict(budget).items()},
        "measured": trials,
        "rank_correlation": finite(correlation),
        "contribution": gain[:, :, -1].tolist(),
        "contribution_biases": small.tolist(),
    }
    return SearchProblem(recipe, budget, arch, costs, problem, numbers)


def find(posed: SearchProblem, seed: int, compare: bool = True) -> dict[str, Any]:
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


def _least(costs: Costs) -> Scheme:
    """A few channels of one small tensor of the last block."""
    return Scheme(methods.SPARSE, {(costs.shape.depth - 1, "k"): SHARES[1]})


def _refuse(costs: Costs, budget: Budget) -> None:
    """DoesNotFitError where not even the least can be trained."""
    needs = np.array([costs.of(_least(costs), how, budget.memory_bytes) for how in costs.ways])
    if (needs <= [budget.memory_bytes, budget.time_s]).all(1).any():
        return
    least_bytes, least_s = needs.min(0)
    if least_bytes > budget.memory_bytes:
        raise DoesNotFitError(
            f"the smallest scheme needs {format_size(least_bytes)}; the limit is {format_size(budget.memory_bytes)}",
            f"--memory {math.ceil(least_bytes / 2**20)}MiB, shorter rows (--set data.max_tokens=…) or a smaller model",
        )
    raise DoesNotFitError(
        f"the smallest scheme takes {format_duration(least_s)}; the limit is {format_duration(budget.time_s)}",
        f"--time {math.ceil(1.1 * least_s)}s, fewer epochs (--set train.epochs=…) or fewer rows (--set data.rows=…)",
    )


def _judge(first: FirstOrder, trials: list[dict[str, Any]], rates: Schedule) -> float:
    """The rank correlation of the first order and what was measured, of tensors."""
    from edgeft.search.contribution import rank_correlation

    for trial in trials:
        trial["first_order"] = first_of(trial, first, rates)
    tensors = [trial for trial in trials if trial["tensor"] is not None]
    return rank_correlation([trial["first_order"] for trial in tensors], [trial["gain"] for trial in tensors])


def _values(first: FirstOrder, rates: Schedule) -> tuple[Floats, Floats]:
    """(gain (depth, tensors, shares), gain of biases and norms (depth,)), by the first order.

    Trials judge it and do not replace it: a tensor that is tuned alone runs dry within a few steps, as it does not
    among others. With gains corrected by trials, what was found for Banking77 came to a loss of 0.276 instead of 0.235.
    """
    weights, small = rates.peak * first.weights, rates.bias_peak * (first.biases.sum(1) + first.norms)
    return np.concatenate([np.zeros((*weights.shape[:2], 1)), weights], axis=2), small


def _evolve(posed: SearchProblem, seed: int, compare: bool) -> tuple[Found, dict[str, Any]]:
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


def parts(level: npt.NDArray[np.int64], biased: int, arch: Architecture) -> list[PartConfig]:
    """A scheme as few entries of `update.parts`: tensors with the same blocks and share stand together."""
    depth = len(level)
    found: list[PartConfig] = []
    if biased:  # first, since a later entry counts where two name the same tensor
        able = list(arch.biases)
        found.append(PartConfig(ranges(range(depth - biased, depth)), able, 0.0, bool(able), True))
    groups: dict[tuple[int, bool, tuple[int, ...]], list[str]] = {}
    for column, tensor in enumerate(TENSORS):
        for place in range(1, len(SHARES)):
            blocks = np.flatnonzero(level[:, column] == place)
            for bias in (False, True):
                inside = (blocks >= depth - biased) & (tensor in arch.biases)
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
