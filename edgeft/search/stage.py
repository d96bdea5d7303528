"""The search inside a run (`update.blocks: auto`); its outcome is search.json, and the recipe stays as it is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from edgeft import config
from edgeft.config import PartConfig, Recipe, UpdateConfig
from edgeft.data import tokens as data_tokens
from edgeft.data.forest import Forest
from edgeft.data.tokens import Encoded
from edgeft.plan.flops import search_pays
from edgeft.plan.schedule import Schedule
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.search.problem import Budget, build_problem, find

FOUND = "found by the search"


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
    run.write_json(run.searched, {"skipped": why, "parts": [dataclasses.asdict(part)]})
    progress.line(f"search: {why}")


def search_for_run(run: Run, recipe: Recipe, budget_bytes: int, progress: Progress) -> None:
    """Finds what the run trains, by first-order contributions alone, and writes search.json.

    It may cost as much as blocks `10%-67%` would, and no more than the device has.
    """
    rows, heldout = data_tokens.load(run.tokens, texts=False)
    seed, budget = recipe.train.seed, Budget(budget_bytes or math.inf)
    found = find(build_problem(recipe, rows, heldout, budget, seed, progress, within=True), seed, compare=False)
    run.write_json(run.searched, found)
    progress.line(
        f"search: {found['trained_parameters'] / 1e6:.2f} M parameters from block {found['cut']} on, "
        f"{found['gain_share']:.0%} of what training everything would bring"
    )


def apply_search(run: Run, recipe: Recipe) -> tuple[Recipe, str]:
    """(the recipe with what search.json says filled in, why)."""
    from edgeft.search.contribution import CHOOSE

    outcome = run.read_json(run.searched) if recipe.update.blocks == "auto" else None
    if outcome is None:
        return recipe, "as asked"
    parts = [config.build(PartConfig, part) for part in outcome["parts"]]
    if "skipped" in outcome:
        return dataclasses.replace(recipe, update=dataclasses.replace(recipe.update, parts=parts)), outcome["skipped"]
    update = dataclasses.replace(recipe.update, choose=CHOOSE, parts=parts)
    how = dataclasses.replace(recipe.how, **outcome["how"])
    return dataclasses.replace(recipe, update=update, how=how), FOUND
