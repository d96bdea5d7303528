"""The prepare stage, rows to tokens; the plan of a run, kept in plan.json; and `edgeft search`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from edgeft.arch.check import check_model
from edgeft.config import Device, Recipe
from edgeft.data import rows as data_rows
from edgeft.data import tokens as data_tokens
from edgeft.data.tokens import Encoded
from edgeft.errors import DataError
from edgeft.formats.source import model_source
from edgeft.host import device
from edgeft.run.events import PrepareEvent
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.run.record import Allowance

if TYPE_CHECKING:
    from edgeft.engine.choose import Engine
    from edgeft.search.files import Files
    from edgeft.search.problem import SearchRequest

PLAN_ROWS = 600  # rows that `edgeft plan` samples, in about a second


def encode(recipe: Recipe) -> tuple[data_rows.Dataset, list[Encoded], list[Encoded], data_tokens.Dropped]:
    """(rows of the files, tokenized training rows, tokenized held-out rows, dropped rows)."""
    from edgeft.formats.tokenizer import open_tokenizer

    config = recipe.data
    dataset = data_rows.load(config)
    tokenizer = open_tokenizer(model_source(recipe.model.path))
    train, dropped = data_tokens.encode_rows(dataset.train, tokenizer, config.max_tokens, config.system)
    heldout, also_dropped = data_tokens.encode_rows(
        dataset.heldout[: config.heldout_rows], tokenizer, config.max_tokens, config.system
    )
    if not train:
        reason = dropped[0][1] if dropped else "there are none"
        raise DataError(f"no row can be trained on: {reason}", "raise data.max_tokens, or look with `edgeft data FILE`")
    return dataset, train, heldout, dropped + also_dropped


def prepare(run: Run, progress: Progress, allowed: Allowance = Allowance()) -> tuple[list[Encoded], list[Encoded]]:
    """Tokenized training and held-out rows; a run that does not fit its budget writes nothing."""
    if run.tokens.is_file():
        return data_tokens.load(run.tokens)
    started = time.monotonic()
    dataset, train, heldout, dropped = encode(run.recipe)
    recipe = run.fitted
    if allowed.budget_bytes:
        recipe = make_plan(run, recipe, (train, heldout), allowed, progress)
    if recipe.update.needs_search:
        from edgeft.search.problem import use_rule_if_cheaper

        use_rule_if_cheaper(run, recipe, train, heldout, progress)
    data_tokens.save(run.tokens, train, heldout)
    counts = {
        "train_rows": len(train),
        "heldout_rows": len(heldout),
        "train_tokens": int(sum(len(r.ids) for r in train)),
        "dropped": len(dropped),
        "skipped": len(dataset.skipped),
        "cut": sum(1 for r in train + heldout if r.cut_tokens),
    }
    seconds, machine = round(time.monotonic() - started, 2), device.this_machine().about.removeprefix("this machine: ")
    run.log(PrepareEvent(dataset.format, seconds, machine, **counts))
    left_out = counts["dropped"] + counts["skipped"]
    progress.line(
        f"data: {len(train)} rows to train on, {len(heldout)} held out ({dataset.split}), "
        f"format {dataset.format}" + (f", {left_out} left out" if left_out else "")
    )
    return train, heldout


def make_plan(
    run: Run,
    recipe: Recipe,
    sides: tuple[list[Encoded], list[Encoded]],
    allowed: Allowance,
    progress: Progress,
    engine: Engine | None = None,
) -> Recipe:
    """The recipe that fits the budget, with its figures in plan.json; DoesNotFitError if none does.

    sides: training and held-out rows. engine: None: predicted.
    """
    from edgeft.plan import memory
    from edgeft.plan.fit import Job, Machine, make
    from edgeft.plan.rows import Workload
    from edgeft.plan.shape import shape_of

    machine = Machine.here(recipe.how.threads, run.path)
    known = memory.EngineSpec(engine.compiled, engine.products, machine.threads) if engine else None
    shape = shape_of(model_source(recipe.model.path), recipe.model.frozen)
    asked = Job(recipe, shape, Workload(*sides, recipe), machine, known)
    asked.resumed = run.recorded() is not None
    job, figures = make(asked, allowed.budget_bytes, allowed.fit)
    progress.plan(figures)
    before = run.read_json(run.plan) or {}
    smaller = {"update": asdict(job.recipe.update), "model": asdict(job.recipe.model)} if figures["changed"] else None
    kept = {"changed": figures["changed"] or before.get("changed") or [], "fitted": smaller or before.get("fitted")}
    run.write_json(run.plan, {**figures, **kept})
    return job.recipe


def plan_of(recipe: Recipe, profile: Device, budget_bytes: int, fit: bool = False) -> dict[str, Any]:
    """The plan of a run that is not started: reads the header and PLAN_ROWS rows."""
    from edgeft.formats.tokenizer import open_tokenizer
    from edgeft.plan.fit import Job, Machine, make
    from edgeft.plan.rows import Workload
    from edgeft.plan.shape import shape_of

    source, data = model_source(recipe.model.path), recipe.data
    check_model(source, recipe.model.frozen)
    dataset = data_rows.load(data)
    tokenizer = open_tokenizer(source)
    all_train, all_heldout = dataset.train, dataset.heldout[: data.heldout_rows]
    sample, heldout_sample = all_train[:PLAN_ROWS], all_heldout[:PLAN_ROWS]
    rows, _ = data_tokens.encode_rows(sample, tokenizer, data.max_tokens, data.system)
    heldout, _ = data_tokens.encode_rows(heldout_sample, tokenizer, data.max_tokens, data.system)
    if not rows:
        raise DataError("no row can be trained on: there are none", "look with `edgeft data FILE`")
    # the same share of the other rows is dropped
    count = round(len(all_train) * len(rows) / len(sample))
    held_count = round(len(all_heldout) * len(heldout) / len(heldout_sample)) if heldout_sample else 0
    here = profile.name == "auto"
    machine = Machine.here(recipe.how.threads) if here else Machine.of(profile, recipe.how.threads)
    load = Workload(rows, heldout, recipe, (count, held_count))
    return make(Job(recipe, shape_of(source, recipe.model.frozen), load, machine), budget_bytes, fit)[1]


def search(request: SearchRequest, files: Files, progress: Progress) -> dict[str, Any]:
    """Writes recipe, heat map and numbers; returns the numbers and the file names."""
    from edgeft.report.plots import write_heat_map
    from edgeft.search.problem import build_problem, solve

    recipe = request.recipe
    check_model(model_source(recipe.model.path), recipe.model.frozen)
    _, train, heldout, _ = encode(recipe)
    with files.saved_request(recipe, request.budget, request.seed):
        result = solve(build_problem(request, train, heldout, progress))
    files.finish(recipe, result)
    write_heat_map(result, files.picture)
    names = {"recipe": str(files.recipe), "picture": str(files.picture), "numbers": str(files.numbers)}
    return {**result, "files": names}
