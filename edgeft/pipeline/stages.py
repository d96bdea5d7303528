"""The train and export stages, the checks before any work, and one stage by its name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeft import __version__
from edgeft.arch.check import check_model
from edgeft.config import Recipe, learning_identity
from edgeft.data import tokens as data_tokens
from edgeft.data.tokens import Encoded
from edgeft.errors import ConfigError, ExportError, RunError
from edgeft.export import FORMATS, Job
from edgeft.formats.ggml import check_type
from edgeft.formats.source import is_gguf, model_source
from edgeft.host.files import check_space
from edgeft.pipeline.prepare import prepare
from edgeft.pipeline.resolve import resolve
from edgeft.run.events import SchemeEvent
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.run.record import Allowance
from edgeft.train.build import build, trained_stack

if TYPE_CHECKING:
    from edgeft.train.loop import Trainer


def train(
    run: Run, progress: Progress, allowed: Allowance = Allowance(), make_trainer: Callable[..., Trainer] | None = None
) -> None:
    """Up to the best checkpoint. make_trainer: in place of Trainer, with the same arguments."""
    if not run.tokens.is_file():
        prepare(run, progress)
    if run.read_json(run.done) is not None:
        return
    from edgeft import plan
    from edgeft.formats.source import model_id
    from edgeft.plan.disk import disk_needs
    from edgeft.search.problem import search_for_run
    from edgeft.train import trunk
    from edgeft.train.loop import Trainer
    from edgeft.train.nodes import joined

    if run.needs_search:
        search_for_run(run, run.fitted, allowed.budget_bytes, progress)
    rows, heldout = data_tokens.load(run.tokens, texts=False)
    source = model_source(run.recipe.model.path)
    shape = plan.shape_of(source, run.recipe.model.frozen)
    if max(int(r.ids.max()) for r in rows + heldout) >= shape.vocabulary:
        raise RunError(f"{run.tokens} contains tokens that the model does not have", "delete it: it is computed again")
    resolved, engine = resolve(run, (rows, heldout), allowed, progress)
    stack, scheme, parameters = build(resolved.recipe, engine)
    trained = sum(p.numel() for p in parameters.values())
    progress.line(
        f"scheme: {resolved.recipe.update.method}, blocks {scheme.blocks[0]} to {scheme.blocks[-1]} of {stack.depth} "
        f"(cut at {scheme.cut}), {trained / 1e6:.2f} M parameters trained"
        + (f", {scheme.cycle_blocks} blocks at a time" if scheme.cycle_blocks else "")
        + (f", gradients from {scheme.tokens} tokens before what is trained on" if scheme.tokens else "")
    )
    run.log(SchemeEvent(scheme.cut, list(scheme.blocks), trained))
    with joined(progress) as nodes:
        if nodes.several:
            nodes.check(_facts(resolved.recipe, rows + heldout, model_id(source)))
        trainer = (make_trainer or Trainer)(run, stack, scheme, parameters, (rows, heldout), progress, nodes)
        job = trainer.trunk_job(model_id(source))
        shape = plan.shape_of(source, resolved.recipe.model.frozen)
        check_space([*disk_needs(run, shape, scheme), *trunk.missing(run, job)])
        trainer.fit(job)


def _facts(recipe: Recipe, rows: list[Encoded], model: str) -> dict[str, Any]:
    """What all nodes of a run must have in common."""
    if recipe.how.step_in_place:
        what = "`how.step_in_place` updates tensors before the gradients of all nodes are added"
        raise ConfigError(what, "--set how.step_in_place=false")
    digest = hashlib.sha256(b"".join(row.ids.tobytes() for row in rows)).hexdigest()
    learned = learning_identity(recipe)
    how = {name: getattr(recipe.how, name) for name in ("weights", "optimizer_state", "tree")}
    recipe_of_all = {"update": learned["update"], "train": learned["train"], **how}
    return {"version": __version__, "model": model, "rows": digest, "recipe": recipe_of_all}


def export(run: Run, kind: str, type_name: str, out: Path, progress: Progress, budget_bytes: int = 0) -> dict[str, Any]:
    """Writes the tuned model; returns its path, its format, and what the format reports."""
    from edgeft.engine import choose

    if kind not in FORMATS:
        raise ExportError(f"unknown format `{kind}`", f"known: {', '.join(FORMATS)}")
    if kind == "gguf":
        check_type(type_name)
    # weights are read twice, for the copy and for the check: they need not stay in memory
    stack, scheme, _ = trained_stack(run, progress, choose.recalled(run), spare_memory=True)
    source = model_source(run.recipe.model.path)
    job = Job(run, stack, scheme, source, out, type_name, progress, budget_bytes)
    return {"path": str(out), "format": kind, **FORMATS[kind](job)}


def compare_exports(run: Run, names: list[str], progress: Progress) -> dict[str, Any]:
    """Several exports of one run, scored on the same rows."""
    from edgeft.export.compare import compare

    return compare(run, names, lambda kind, type_name, out: export(run, kind, type_name, out, progress), progress)


def _check_scheme_and_disk(run: Run, source: str) -> None:
    """Rejects blocks and tensors that the model does not have, and a run that does not fit the disk, as far as is known
    without its rows."""
    from edgeft import plan
    from edgeft.methods import scheme
    from edgeft.plan.disk import disk_needs

    shape = plan.shape_of(source, run.recipe.model.frozen)
    update = scheme.with_blocks(run.recipe.update, shape.depth, shape.weights)
    check_space(disk_needs(run, shape, scheme.make(update, shape.depth, shape.arch)))


def do_stage(run: Run, name: str, progress: Progress, allowed: Allowance = Allowance()) -> None:
    """One stage of `edgeft finetune`, in its own process; the result is in the run folder."""
    with run.stage(name):
        _do_stage(run, name, progress, allowed)
    if name == "eval" and run.evaluation.is_file():
        from edgeft.report.render import write_report

        progress.line(f"report: {write_report(run)}")  # with the time of this stage


def _do_stage(run: Run, name: str, progress: Progress, allowed: Allowance) -> None:
    source = model_source(run.recipe.model.path)
    if name in ("search", "export", "eval"):
        from edgeft.train.governor import Governor

        Governor(run, progress).pause_if_needed()  # train does so between micro-batches, these at their start
    if name == "prepare":
        check_model(source, run.recipe.model.frozen)
        if is_gguf(source):
            _check_scheme_and_disk(run, source)
        prepare(run, progress, allowed)
    elif name == "search":
        from edgeft.search.problem import search_for_run

        search_for_run(run, run.fitted, allowed.budget_bytes, progress)
    elif name == "train":
        train(run, progress, allowed)
    elif name == "export":
        made = export(run, "gguf", run.recipe.export.type, run.model, progress, allowed.budget_bytes)
        run.write_json(run.exported, made)
    elif name == "eval":
        _, heldout = data_tokens.load(run.tokens)
        if rows := heldout[: run.recipe.eval.rows]:
            from edgeft.evaluate.compare import evaluate_run

            evaluate_run(run, rows, progress, allowed.budget_bytes)
