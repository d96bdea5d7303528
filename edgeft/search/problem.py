"""The search: contributions, budgets, and the scheme that gains most within them.

Inside a run its outcome is search.json, and the recipe stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeft import config, methods, plan
from edgeft.arch import Architecture
from edgeft.config import TENSORS, Device, PartConfig, Recipe, UpdateConfig, format_duration, format_size
from edgeft.data import tokens as data_tokens
from edgeft.data.forest import Forest
from edgeft.data.tokens import Encoded
from edgeft.errors import ConfigError, DoesNotFitError
from edgeft.formats.source import model_source
from edgeft.methods import scheme as schemes
from edgeft.methods.scheme import Scheme
from edgeft.plan.flops import Schedule, search_pays
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.search import evolve
from edgeft.search.costs import Costs
from edgeft.search.evolve import SHARES, Floats, Found, Ints, Problem
from edgeft.search.files import WAYS, Budget, finite
from edgeft.search.measure import Measurements, first_of, search_entry, search_key

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
FOUND = "found by the search"  # why a run trains what it trains


@dataclass(frozen=True)
class SearchRequest:
    recipe: Recipe
    budget: Budget
    seed: int
    device: Device | None = None  # that will train; None: this machine
    again: bool = False  # contributions are computed again, even where they are cached
    within: bool = False  # it may not take more memory than the recipe's own scheme, either


@dataclass(frozen=True)
class SearchProblem:
    """All that is known before the evolution."""

    seed: int
    budget: Budget
    costs: Costs
    problem: Problem
    numbers: dict[str, Any]  # of how it came about

    def scheme(self, entries: list[PartConfig]) -> Scheme:
        return schemes.make(UpdateConfig(parts=entries), self.costs.shape.depth, self.costs.shape.arch)


def build_problem(
    request: SearchRequest, train: Sequence[Encoded], heldout: Sequence[Encoded], progress: Progress
) -> SearchProblem:
    """Contributions and costs."""
    from edgeft.search import contribution

    recipe, budget = request.recipe, request.budget
    if not methods.get(recipe.update.method).partial:
        raise ConfigError(
            f"a search finds what `update.method: sparse` trains, and this recipe says `{recipe.update.method}`",
            "search from `--recipe sparse-bp`",
        )
    source = model_source(recipe.model.path)
    shape = plan.shape_of(source, recipe.model.frozen)
    sample = contribution.draw(train, heldout, request.seed)
    with search_entry(search_key(recipe, source, sample), progress) as entry:
        if request.again:
            entry.note_file.unlink(missing_ok=True)
        worker = Measurements(recipe, source, shape, sample, entry, progress)
        costs = worker.costs(train, heldout, request.device)
        own = costs.of(schemes.make(recipe.update, shape.depth, shape.arch), costs.ways[0], budget.memory_bytes)
        budget = replace(
            budget,
            memory_bytes=min(budget.memory_bytes, float(own[0]) if request.within else math.inf),
            time_s=budget.time_s if math.isfinite(budget.time_s) else float(own[1]),
        )
        _refuse(costs, budget)
        problem = costs.problem(np.array([budget.memory_bytes, budget.time_s]))
        first = worker.first_order()
        trials = worker.measure(first, budget.measure_s)
        worker.inputs.drop()  # large, and made from the user's rows; numbers stay
    rates = Schedule(len(train), recipe.train, shape.width)
    gain, small = _values(first, rates)
    power, lowest = POWER if request.within else 1.0, round(FROZEN * shape.depth)
    problem = replace(problem, gain=gain, small_gain=small, power=power, lowest=lowest)
    numbers = {
        "model": Path(source).name,
        "sample": sample.sizes(),
        "budget": {name: finite(value) for name, value in asdict(budget).items()},
        "measured": trials,
        "rank_correlation": finite(_judge(first, trials, rates)),
        "contribution": gain[:, :, -1].tolist(),
        "contribution_biases": small.tolist(),
    }
    return SearchProblem(request.seed, budget, costs, problem, numbers)


def find(search: SearchProblem, compare: bool = True) -> dict[str, Any]:
    """The best scheme, as numbers and names alone; compare: beside the results of other search methods."""
    best, compared = _evolve(search, compare)
    asked, how = search.costs.ways[0], search.costs.ways[best.way]
    entries = parts(best.level, best.biased, search.costs.shape.arch)
    scheme, every = search.scheme(entries), search.problem.every()
    need = search.costs.of(scheme, how, search.budget.memory_bytes)
    return {
        **search.numbers,
        "shares": [[SHARES[place] for place in row] for row in best.level],
        "biased_blocks": best.biased,
        "cut": scheme.cut,
        "trained_parameters": plan.trained_parameters(search.costs.shape, scheme),
        "how": {name: getattr(how, name) for name in WAYS if getattr(how, name) != getattr(asked, name)},
        "parts": [asdict(part) for part in entries],
        "gain": best.gain,
        "gain_share": best.gain / every if every else 0.0,
        "all_gain": every,
        "peak_bytes": int(need[0]),
        "seconds": float(need[1]),
        "compared": compared,
        "seed": search.seed,
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


def _evolve(search: SearchProblem, compare: bool) -> tuple[Found, dict[str, Any]]:
    """(the best scheme that keeps the budgets by the plan of the whole, the results of other search methods)."""
    problem, budget, costs = search.problem, search.problem.budget, search.costs
    for number in range(TRIES):
        if (problem.first_cuts() == problem.depth).all():
            break
        start = evolve.greedy(problem)
        best = evolve.evolve(problem, search.seed, start)
        scheme = search.scheme(parts(best.level, best.biased, costs.shape.arch))
        over = costs.of(scheme, costs.ways[best.way], budget[0]) - budget
        if (over <= 0).all():
            return best, _compared(problem, best, start, search.seed, compare)
        tighter = np.minimum(problem.budget, [best.bytes, best.seconds]) - SLACK * 2**number * over
        problem = replace(problem, budget=np.where(over > 0, tighter, problem.budget))
    raise DoesNotFitError(
        "nothing worth while was found within the budgets", "allow somewhat more memory (--memory) or time (--time)"
    )


def _compared(problem: Problem, best: Found, start: evolve.Schemes, seed: int, compare: bool) -> dict[str, Any]:
    """The results of other search methods; start: greedy's answer."""
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


def parts(level: Ints, biased: int, arch: Architecture) -> list[PartConfig]:
    """A scheme as few entries of `update.parts`: tensors with the same blocks and share stand together."""
    depth = len(level)
    entries: list[PartConfig] = []
    if biased:  # first, since a later entry counts where two name the same tensor
        able = list(arch.biases)
        entries.append(PartConfig(ranges(range(depth - biased, depth)), able, 0.0, bool(able), True))
    groups: dict[tuple[int, bool, tuple[int, ...]], list[str]] = {}
    for column, tensor in enumerate(TENSORS):
        for place in range(1, len(SHARES)):
            blocks = np.flatnonzero(level[:, column] == place)
            for bias in (False, True):
                inside = (blocks >= depth - biased) & (tensor in arch.biases)
                if numbers := tuple(blocks[inside == bias].tolist()):
                    groups.setdefault((place, bias, numbers), []).append(tensor)
    for (place, bias, numbers), tensors in sorted(groups.items(), key=lambda item: (item[0][2], -item[0][0])):
        entries.append(PartConfig(ranges(numbers), tensors, SHARES[place], bias, False))
    return entries


def ranges(blocks: Sequence[int]) -> list[Any]:
    """[3, 4, 5, 9] → ["3-5", 9]."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else run[0] for run in runs]


def use_rule_if_cheaper(
    run: Run, recipe: Recipe, rows: Sequence[Encoded], heldout: Sequence[Encoded], progress: Progress
) -> None:
    """Skips the search where it would take longer than training; the default blocks are trained."""
    update, passes = recipe.update, Schedule(len(rows), recipe.train).passes
    train, held = (len(Forest(side, share=recipe.how.tree)) for side in (rows, heldout))
    if not update.needs_search or search_pays(train, held, passes):
        return
    rule = UpdateConfig().blocks
    part = PartConfig(rule, update.tensors, update.channels, update.biases, update.norms)
    why = f"the search would take longer than this training; blocks {rule} are trained"
    run.write_json(run.searched, {"skipped": why, "parts": [asdict(part)]})
    progress.line(f"search: {why}")


def search_for_run(run: Run, recipe: Recipe, budget_bytes: int, progress: Progress) -> None:
    """Finds what the run trains, by first-order contributions alone, and writes search.json.

    It may cost as much as blocks `10%-67%` would, and no more than the device has.
    """
    rows, heldout = data_tokens.load(run.tokens, texts=False)
    request = SearchRequest(recipe, Budget(budget_bytes or math.inf), recipe.train.seed, within=True)
    outcome = find(build_problem(request, rows, heldout, progress), compare=False)
    run.write_json(run.searched, outcome)
    progress.line(
        f"search: {outcome['trained_parameters'] / 1e6:.2f} M parameters from block {outcome['cut']} on, "
        f"{outcome['gain_share']:.0%} of what training everything would bring"
    )


def apply_search(run: Run, recipe: Recipe) -> tuple[Recipe, str]:
    """(the recipe with what search.json says filled in, why)."""
    from edgeft.search.contribution import CHOOSE

    outcome = run.read_json(run.searched) if recipe.update.blocks == "auto" else None
    if outcome is None:
        return recipe, "as asked"
    entries = [config.build(PartConfig, part) for part in outcome["parts"]]
    if "skipped" in outcome:
        return replace(recipe, update=replace(recipe.update, parts=entries)), outcome["skipped"]
    update = replace(recipe.update, choose=CHOOSE, parts=entries)
    how = replace(recipe.how, **outcome["how"])
    return replace(recipe, update=update, how=how), FOUND
