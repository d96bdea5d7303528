"""The plan of a run, before it begins and once its engine is known; its figures are kept in plan.json."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from edgeft.arch.check import check_model
from edgeft.config import Device, Recipe
from edgeft.data import rows as data_rows
from edgeft.data import tokens as data_tokens
from edgeft.data.tokens import Encoded
from edgeft.errors import DataError
from edgeft.formats.source import model_source as model_source
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.run.record import Allowance

if TYPE_CHECKING:
    from edgeft.engine.choose import Engine

PLAN_ROWS = 600  # rows that `edgeft plan` looks at: a second's worth; they stand for the others


def make_plan(
    run: Run,
    recipe: Recipe,
    sides: tuple[list[Encoded], list[Encoded]],
    allowed: Allowance,
    progress: Progress,
    engine: Engine | None = None,
) -> Recipe:
    """The recipe as it fits the budget, with its figures in plan.json; DoesNotFitError if nothing does.

    sides: training and held-out rows. engine: what computes; None: predicted.
    """
    from edgeft.plan import memory
    from edgeft.plan.fit import Job, Machine, make
    from edgeft.plan.rows import Workload
    from edgeft.plan.shape import shape_of

    machine = Machine.here(recipe.how.threads)
    known = memory.EngineSpec(engine.compiled, engine.bf16, machine.threads) if engine else None
    shape = shape_of(model_source(recipe.model.path), recipe.model.frozen)
    job, figures = make(Job(recipe, shape, Workload(*sides, recipe), machine, known), allowed.budget_bytes, allowed.fit)
    progress.plan(figures)
    before = run.read_json(run.plan) or {}
    smaller = {"update": asdict(job.recipe.update), "model": asdict(job.recipe.model)} if figures["changed"] else None
    kept = {"changed": figures["changed"] or before.get("changed") or [], "fitted": smaller or before.get("fitted")}
    run.write_json(run.plan, {**figures, **kept})
    return job.recipe


def plan_of(recipe: Recipe, profile: Device, budget_bytes: int, fit: bool = False) -> dict[str, Any]:
    """The plan of a run that is not begun: a header and some rows are read."""
    from edgeft.formats.tokenizer import open_tokenizer
    from edgeft.plan.fit import Job, Machine, make
    from edgeft.plan.rows import Workload
    from edgeft.plan.shape import shape_of

    source, data = model_source(recipe.model.path), recipe.data
    check_model(source, recipe.model.frozen)
    dataset = data_rows.load(data)
    tokenizer = open_tokenizer(source)
    given, held = dataset.train, dataset.heldout[: data.heldout_rows]
    some, few = given[:PLAN_ROWS], held[:PLAN_ROWS]
    rows, _ = data_tokens.encode_rows(some, tokenizer, data.max_tokens, data.system)
    heldout, _ = data_tokens.encode_rows(few, tokenizer, data.max_tokens, data.system)
    if not rows:
        raise DataError("no row can be trained on: there are none", "look with `edgeft data FILE`")
    # of those that are not looked at, as many are left out
    count = round(len(given) * len(rows) / len(some))
    held_count = round(len(held) * len(heldout) / len(few)) if few else 0
    here = profile.name == "auto"
    machine = Machine.here(recipe.how.threads) if here else Machine.of(profile, recipe.how.threads)
    load = Workload(rows, heldout, recipe, count, held_count)
    return make(Job(recipe, shape_of(source, recipe.model.frozen), load, machine), budget_bytes, fit)[1]
