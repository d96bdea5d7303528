"""The search: contributions, budgets, and the scheme that gains most within them.

Inside a run its result is search.json; the recipe is not changed.
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
from edgeft.methods.base import Update
from edgeft.methods.scheme import Scheme
from edgeft.plan.flops import Schedule, search_pays
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.search import evolve
from edgeft.search.costs import Costs
from edgeft.search.evolve import SHARES, Floats, Ints, Problem, SearchResult
from edgeft.search.files import SEARCHED_OPTIONS, Budget, finite
from edgeft.search.measure import Measurements, first_order_gain, search_entry, search_key

if TYPE_CHECKING:
    from edgeft.search.contribution import FirstOrder


# Share of the depth, from the first block, that stays frozen: everything depends on these blocks, and a trunk that runs
# only once is cheap. Banking77, one epoch: loss 0.241, ARC-Easy 49.8 % if they may be trained; 0.212, 53.5 % if frozen.
FROZEN = 0.1
TRIES = 8  # attempts, each with a tighter budget, when parts cost more together than separately
SLACK = 1.05  # a budget is tightened by this much of the excess; doubled each time
# Exponent of a block's gain in a run's own search, which may cost as much as the rule: a little of many blocks, loss
# 0.212 on Banking77. In 1 GiB 1.0, which favours fewer blocks, was better: 0.235 against 0.294 (SQuAD 0.719, 0.703).
POWER = 0.7
FOUND = "found by the search"  # reason recorded with a run


@dataclass(frozen=True)
class SearchRequest:
    recipe: Recipe
    budget: Budget
    seed: int
    device: Device | None = None  # to train on; None: this machine
    again: bool = False  # ignore cached contributions
    cap_at_recipe: bool = False  # also limit memory to that of the recipe's own scheme


@dataclass(frozen=True)
class SearchProblem:
    """Input of the evolution."""

    seed: int
    budget: Budget
    costs: Costs
    problem: Problem
    numbers: dict[str, Any]  # reported with the result

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
            f"search works with `update.method: sparse`; this recipe has `{recipe.update.method}`",
            "search from `--recipe sparse-search`",
        )
    source = model_source(recipe.model.path)
    shape = plan.shape_of(source, recipe.model.frozen)
    sample = contribution.draw(train, heldout, request.seed)
    with search_entry(search_key(recipe, source, sample), progress) as entry:
        if request.again:
            entry.note_file.unlink(missing_ok=True)
        worker = Measurements(recipe, source, shape, sample, entry, progress)
        costs = worker.costs(train, heldout, request.device)
        update = schemes.with_blocks(recipe.update, shape.depth, shape.weights)
        baseline = costs.of(schemes.make(update, shape.depth, shape.arch), costs.options[0], budget.memory_bytes)
        budget = replace(
            budget,
            memory_bytes=min(budget.memory_bytes, float(baseline[0]) if request.cap_at_recipe else math.inf),
            time_s=budget.time_s if math.isfinite(budget.time_s) else float(baseline[1]),
        )
        _check_budget(costs, budget)
        problem = costs.problem(np.array([budget.memory_bytes, budget.time_s]))
        first = worker.first_order()
        trials = worker.measure(first, budget.measure_s)
        worker.inputs.delete()  # large, and derived from the user's rows
    rates = Schedule(len(train), recipe.train, shape.width)
    gain, bias_gain = _gains(first, rates)
    power, first_block = POWER if request.cap_at_recipe else 1.0, round(FROZEN * shape.depth)
    problem = replace(problem, gain=gain, bias_gain=bias_gain, power=power, first_block=first_block)
    numbers = {
        "model": Path(source).name,
        "sample": sample.sizes(),
        "budget": {name: finite(value) for name, value in asdict(budget).items()},
        "measured": trials,
        "rank_correlation": finite(_rank_correlation(first, trials, rates)),
        "contribution": gain[:, :, -1].tolist(),
        "contribution_biases": bias_gain.tolist(),
    }
    return SearchProblem(request.seed, budget, costs, problem, numbers)


def solve(search: SearchProblem, compare: bool = True) -> dict[str, Any]:
    """The best scheme as JSON; compare: with the results of other search methods."""
    best, compared = _evolve(search, compare)
    request, how = search.costs.options[0], search.costs.options[best.option]
    entries = parts(best.level, best.biased, search.costs.shape.arch)
    scheme, total_gain = search.scheme(entries), search.problem.total_gain()
    cost = search.costs.of(scheme, how, search.budget.memory_bytes)
    return {
        **search.numbers,
        "shares": [[SHARES[place] for place in row] for row in best.level],
        "biased_blocks": best.biased,
        "cut": scheme.cut,
        "trained_parameters": plan.trained_parameters(search.costs.shape, scheme),
        "how": {name: getattr(how, name) for name in SEARCHED_OPTIONS if getattr(how, name) != getattr(request, name)},
        "parts": [asdict(part) for part in entries],
        "gain": best.gain,
        "gain_share": best.gain / total_gain if total_gain else 0.0,
        "all_gain": total_gain,
        "peak_bytes": int(cost[0]),
        "seconds": float(cost[1]),
        "compared": compared,
        "seed": search.seed,
    }


def _smallest_scheme(costs: Costs) -> Scheme:
    """A few channels of the smallest tensor of the last block."""
    return Scheme(methods.SPARSE, {(costs.shape.depth - 1, "k"): Update(SHARES[1])})


def _check_budget(costs: Costs, budget: Budget) -> None:
    """DoesNotFitError if not even the smallest scheme fits."""
    needs = np.array([costs.of(_smallest_scheme(costs), how, budget.memory_bytes) for how in costs.options])
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


def _rank_correlation(first: FirstOrder, trials: list[dict[str, Any]], rates: Schedule) -> float:
    """Of first-order and measured gains of tensors."""
    from edgeft.search.contribution import rank_correlation

    for trial in trials:
        trial["first_order"] = first_order_gain(trial, first, rates)
    tensors = [trial for trial in trials if trial["tensor"] is not None]
    return rank_correlation([trial["first_order"] for trial in tensors], [trial["gain"] for trial in tensors])


def _gains(first: FirstOrder, rates: Schedule) -> tuple[Floats, Floats]:
    """First-order gains (depth, tensors, shares), and of biases and norms (depth,).

    Trials validate them and do not replace them: a tensor tuned alone saturates within a few steps, but not among
    others. With gains corrected by trials, the scheme found for Banking77 reached a loss of 0.276 instead of 0.235.
    """
    weights, bias_gain = rates.peak * first.weights, rates.bias_peak * (first.biases.sum(1) + first.norms)
    return np.concatenate([np.zeros((*weights.shape[:2], 1)), weights], axis=2), bias_gain


def _evolve(search: SearchProblem, compare: bool) -> tuple[SearchResult, dict[str, Any]]:
    """(the best scheme whose plan as a whole is within the budgets, the results of other search methods)."""
    problem, budget, costs = search.problem, search.problem.budget, search.costs
    for number in range(TRIES):
        if (problem.lowest_cuts() == problem.depth).all():
            break
        start = evolve.greedy(problem)
        best = evolve.evolve(problem, search.seed, start)
        scheme = search.scheme(parts(best.level, best.biased, costs.shape.arch))
        over = costs.of(scheme, costs.options[best.option], budget[0]) - budget
        if (over <= 0).all():
            return best, _compared(problem, best, start, search.seed, compare)
        tighter = np.minimum(problem.budget, [best.bytes, best.seconds]) - SLACK * 2**number * over
        problem = replace(problem, budget=np.where(over > 0, tighter, problem.budget))
    raise DoesNotFitError("no scheme was found within the budgets", "allow more memory (--memory) or time (--time)")


def _compared(problem: Problem, best: SearchResult, start: evolve.Schemes, seed: int, compare: bool) -> dict[str, Any]:
    """The results of other search methods; start: greedy's result."""
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
        compared["evolution_alone"] = evolve.evolve(problem, seed).gain  # without greedy's result as a start
        compared["random"] = evolve.random_search(problem, best.evaluations, seed).gain
    return compared


def _last_blocks(problem: Problem) -> tuple[int, float]:
    """(number of last blocks that can be trained in full within the budgets, their gain)."""
    depth, tensors = problem.gain.shape[:2]
    options = np.arange(len(problem.fixed))
    for count in range(depth, 0, -1):
        level = np.zeros((len(options), depth, tensors), np.int64)
        level[:, depth - count :] = evolve.MAX_LEVEL
        no_biases, cut = np.zeros(len(options), np.int64), np.full(len(options), depth - count)
        gains, costs = evolve.score(problem, evolve.Schemes(level, no_biases, cut, options))
        if (costs <= problem.budget).all(1).any():
            return count, float(gains[0])
    return 0, 0.0


def parts(level: Ints, biased: int, arch: Architecture) -> list[PartConfig]:
    """A scheme as `update.parts`: one entry for tensors with the same blocks and share."""
    depth = len(level)
    entries: list[PartConfig] = []
    if biased:  # first, since later entries override earlier ones
        with_bias = list(arch.biases)
        entries.append(PartConfig(ranges(range(depth - biased, depth)), with_bias, 0.0, bool(with_bias), True))
    groups: dict[tuple[int, bool, tuple[int, ...]], list[str]] = {}
    for column, tensor in enumerate(TENSORS):
        for index in range(1, len(SHARES)):
            blocks = np.flatnonzero(level[:, column] == index)
            for bias in (False, True):
                has_bias = (blocks >= depth - biased) & (tensor in arch.biases)
                if numbers := tuple(blocks[has_bias == bias].tolist()):
                    groups.setdefault((index, bias, numbers), []).append(tensor)
    for (index, bias, numbers), tensors in sorted(groups.items(), key=lambda item: (item[0][2], -item[0][0])):
        entries.append(PartConfig(ranges(numbers), tensors, SHARES[index], bias, False))
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
    """Skips the search if it would take longer than training: the default blocks are trained."""
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
    """Searches for what the run trains, by first-order contributions alone, and writes search.json.

    The scheme may cost as much as blocks `10%-67%`, within the limits of the device.
    """
    rows, heldout = data_tokens.load(run.tokens, texts=False)
    request = SearchRequest(recipe, Budget(budget_bytes or math.inf), recipe.train.seed, cap_at_recipe=True)
    result = solve(build_problem(request, rows, heldout, progress), compare=False)
    run.write_json(run.searched, result)
    progress.line(
        f"search: {result['trained_parameters'] / 1e6:.2f} M parameters from block {result['cut']} on, "
        f"{result['gain_share']:.0%} of the gain of full training"
    )


def apply_search(run: Run, recipe: Recipe) -> tuple[Recipe, str]:
    """(the recipe with the result of search.json applied, the reason)."""
    from edgeft.search.contribution import CHOOSE

    result = run.read_json(run.searched) if recipe.update.blocks == "auto" else None
    if result is None:
        return recipe, "as asked"
    entries = [config.build(PartConfig, part) for part in result["parts"]]
    if "skipped" in result:
        return replace(recipe, update=replace(recipe.update, parts=entries)), result["skipped"]
    update = replace(recipe.update, choose=CHOOSE, parts=entries)
    how = replace(recipe.how, **result["how"])
    return replace(recipe, update=update, how=how), FOUND
