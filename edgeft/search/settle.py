"""The search inside a run (`update.blocks: auto`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgeft import config
from edgeft.config import PartConfig, UpdateConfig
from edgeft.data import tokens as data_tokens
from edgeft.data.forest import Forest
from edgeft.data.tokens import Encoded
from edgeft.plan.flops import search_pays
from edgeft.plan.schedule import Schedule
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.search.problem import Budget, build_problem, find

if TYPE_CHECKING:
    pass


def use_rule_if_cheaper(run: Run, rows: Sequence[Encoded], heldout: Sequence[Encoded], progress: Progress) -> None:
    """Where a search would take longer than training, the rule says what is trained."""
    update, rates = run.recipe.update, Schedule(len(rows), run.recipe.train)
    train, held = (len(Forest(side, share=run.recipe.how.tree)) for side in (rows, heldout))
    if not update.needs_search or search_pays(train, held, rates.passes):
        return
    rule = UpdateConfig().blocks
    update.parts = [PartConfig(rule, update.tensors, update.channels, update.biases, update.norms)]
    run.write_recipe()
    progress.line(f"search: it would take longer than this training; blocks {rule} are trained")


def search_for_run(run: Run, budget_bytes: int, progress: Progress) -> None:
    """Finds what the run trains by the first order alone, and writes it into the run's recipe.

    It may cost as much as blocks `10%-67%` would, and no more than the device has.
    """
    from edgeft.search.contribution import CHOOSE

    rows, heldout = data_tokens.load(run.tokens, texts=False)
    update, seed = run.recipe.update, run.recipe.train.seed
    budget = Budget(budget_bytes or math.inf)
    found = find(build_problem(run.recipe, rows, heldout, budget, seed, progress, within=True), seed, compare=False)
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


def searched_execution(run: Run) -> dict[str, Any]:
    """How what `settle` found is to be run, so that it costs no more than it may: {} where nothing was found."""
    found = run.read_json(run.searched) if run.recipe.update.blocks == "auto" else None
    return dict((found or {}).get("how", {}))
