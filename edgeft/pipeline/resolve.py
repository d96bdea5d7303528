"""Resolves a run, once: --fit, search, engine and planner, in this order.

A resumed run keeps its record. Only `--set how.…` or another budget plans it again; update and engine stay.
"""

from __future__ import annotations

import typing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgeft import config, plan
from edgeft.config import ExecutionConfig, Recipe, format_size
from edgeft.data.tokens import Encoded
from edgeft.errors import ConfigError
from edgeft.formats.source import model_source
from edgeft.pipeline.prepare import make_plan
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.run.record import Allowance, EngineChoice, Resolved, search_figures

if TYPE_CHECKING:
    from edgeft.engine.choose import Engine

Sides = tuple[list[Encoded], list[Encoded]]  # training rows, held-out rows


def resolve(run: Run, sides: Sides, allowed: Allowance, progress: Progress) -> tuple[Resolved, Engine]:
    """(the record, written if it is new; the engine)."""
    before = run.recorded()
    if before is not None and run.record.is_file() and _is_for(before, run.recipe, allowed):
        return before, choose_engine(before.recipe, sides[0], progress, before.engine)
    resolved, engine = _decide(run, sides, allowed, progress, before)
    run.write_record(resolved)
    return resolved, engine


def _is_for(record: Resolved, asked: Recipe, allowed: Allowance) -> bool:
    return record.asked.how == asked.how and allowed.budget_bytes in (0, record.budget_bytes)


def _decide(
    run: Run, sides: Sides, allowed: Allowance, progress: Progress, before: Resolved | None
) -> tuple[Resolved, Engine]:
    from edgeft.methods import scheme as schemes
    from edgeft.search.problem import FOUND, apply_search

    recipe, update_why = apply_search(run, run.fitted)
    shape = plan.shape_of(model_source(recipe.model.path), recipe.model.frozen)
    by_size = schemes.with_blocks(recipe.update, shape.depth, shape.weights)
    if by_size != recipe.update:
        recipe, update_why = replace(recipe, update=by_size), "blocks and tokens by the model's size"
    if before is not None:
        kept = before.recipe.how.weights
        if recipe.how.weights not in ("fp32", kept):
            raise ConfigError(
                f"this run keeps its weights in {kept}", f"--set how.weights={kept}, or start another run (--out)"
            )
        how = replace(recipe.how, weights=kept)
        recipe = replace(recipe, update=before.recipe.update, model=before.recipe.model, how=how)
        update_why = before.update_why
    planned = (run.read_json(run.plan) or {}) if allowed.budget_bytes else {}
    how = recipe.how
    if how.compile == "auto" and planned.get("compiled_to_fit"):
        how = replace(how, compile="on")
    engine = choose_engine(replace(recipe, how=how), sides[0], progress, before.engine if before else None)
    compiled, products = "on" if engine.compiled else "off", engine.products
    recipe = replace(recipe, how=replace(how, compile=compiled, products=products))  # the plan depends on it
    execution_why = "as asked: no memory limit"
    if allowed.budget_bytes:
        asked, limit = recipe.how, format_size(allowed.budget_bytes)
        as_planned = _how(planned.get("asked")) == asked and planned["budget_bytes"] == allowed.budget_bytes
        if as_planned and update_why != FOUND:  # other micro-batches would round differently
            recipe = replace(recipe, how=_how(planned["how"]))
        else:
            recipe = make_plan(run, recipe, sides, replace(allowed, fit=False), progress, engine)
        execution_why = f"as asked: it fits in {limit}" if recipe.how == asked else f"the fastest that fits in {limit}"
    return Resolved(
        asked=run.recipe,
        recipe=recipe,
        device=allowed.device,
        budget_bytes=allowed.budget_bytes,
        engine=EngineChoice(engine.compiled, engine.products, engine.reason),
        execution_why=execution_why,
        update_why=update_why,
        changed=(run.read_json(run.plan) or {}).get("changed") or [],
        search=search_figures(run.read_json(run.searched) or {}),
    ), engine


def _how(values: Any) -> ExecutionConfig:
    return typing.cast(ExecutionConfig, config.build(ExecutionConfig, values or {}, "how", recorded=True))


def choose_engine(recipe: Recipe, rows: list[Encoded], progress: Progress, before: EngineChoice | None) -> Engine:
    from edgeft.engine import choose
    from edgeft.methods import scheme as schemes
    from edgeft.plan.flops import Pass, Schedule, step_flops

    shape = plan.shape_of(model_source(recipe.model.path), recipe.model.frozen)
    scheme = schemes.make(recipe.update, shape.depth, shape.arch)
    tokens, targets = sum(len(r.ids) for r in rows), sum(int(r.trained.sum()) for r in rows)
    epochs = Schedule(len(rows), recipe.train).steps * recipe.train.batch_rows / len(rows)
    flops = epochs * step_flops(shape, scheme, Pass.whole(tokens, 0, targets, 0, targets))
    return choose.choose(recipe, shape.head, shape.gate, flops, progress, before)
