"""The train stage, and one stage by its name."""

from __future__ import annotations

from edgeft.arch.check import check_model
from edgeft.data import tokens as data_tokens
from edgeft.errors import RunError
from edgeft.formats.source import is_gguf, model_source
from edgeft.pipeline.check import check_disk, check_scheme
from edgeft.pipeline.export import export
from edgeft.pipeline.prepare import prepare
from edgeft.pipeline.resolve import resolve
from edgeft.run.events import SchemeEvent
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.run.record import Allowance
from edgeft.train.build import build


def train(run: Run, progress: Progress, allowed: Allowance = Allowance()) -> None:
    """Up to the best checkpoint."""
    if not run.tokens.is_file():
        prepare(run, progress)
    if run.read_json(run.done) is not None:
        return
    from edgeft import plan
    from edgeft.formats.hub import model_id
    from edgeft.host.disk import check
    from edgeft.plan import disk
    from edgeft.search.stage import search_for_run
    from edgeft.train import trunk
    from edgeft.train.loop import Trainer

    if run.needs_search:
        search_for_run(run, run.fitted, allowed.budget_bytes, progress)
    rows, heldout = data_tokens.load(run.tokens, texts=False)
    source = model_source(run.recipe.model.path)
    shape = plan.shape_of(source, run.recipe.model.frozen)
    if max(int(r.ids.max()) for r in rows + heldout) >= shape.vocabulary:
        raise RunError(f"{run.tokens} holds tokens that the model does not have", "delete it: it is made again")
    resolved, engine = resolve(run, (rows, heldout), allowed, progress)
    stack, scheme, parameters = build(resolved.recipe, engine)
    trained = sum(p.numel() for p in parameters.values())
    progress.line(
        f"scheme: {resolved.recipe.update.method}, blocks {scheme.blocks[0]} to {scheme.blocks[-1]} of {stack.depth} "
        f"(cut at {scheme.cut}), {trained / 1e6:.2f} M parameters trained"
        + (f", {scheme.cycle_blocks} blocks at a time" if scheme.cycle_blocks else "")
    )
    run.log(SchemeEvent(scheme.cut, list(scheme.blocks), trained))
    trainer = Trainer(run, stack, scheme, parameters, (rows, heldout), progress)
    progress.line(f"{trainer.schedule.steps} steps, peak learning rate {trainer.schedule.peak:.2g}")
    job = trainer.trunk_job(model_id(source))
    shape = plan.shape_of(source, resolved.recipe.model.frozen)
    check([*disk.needs(run, shape, scheme), *trunk.missing(run, job)])
    trainer.fit(job)


def do_stage(run: Run, name: str, progress: Progress, allowed: Allowance = Allowance()) -> None:
    """One stage of `edgeft finetune`, in its own process; the outcome is in the run folder."""
    with run.stage(name):
        _do_stage(run, name, progress, allowed)
    if name == "eval" and run.evaluation.is_file():
        from edgeft.report import write_report

        progress.line(f"report: {write_report(run)}")  # with the time of this stage


def _do_stage(run: Run, name: str, progress: Progress, allowed: Allowance) -> None:
    source = model_source(run.recipe.model.path)
    if name in ("search", "export", "eval"):
        from edgeft.train.governor import Governor

        Governor(run, progress).pause_if_needed()  # the train stage asks between micro-batches; these at their start
    if name == "prepare":
        check_model(source, run.recipe.model.frozen)
        check_scheme(run.recipe, source)
        check_disk(run, source)
        prepare(run, progress, allowed)
    elif name == "search":
        from edgeft.search.stage import search_for_run

        search_for_run(run, run.fitted, allowed.budget_bytes, progress)
    elif name == "train":
        train(run, progress, allowed)
    elif name == "export":
        made = export(run, "gguf", run.recipe.export.type, run.model, progress, allowed.budget_bytes)
        run.write_json(run.exported, made)
    elif name == "eval":
        _, heldout = data_tokens.load(run.tokens)
        rows = heldout[: run.recipe.eval.rows]
        if rows:
            from edgeft.evaluate.compare import evaluate_files, evaluate_run

            if is_gguf(source):
                evaluate_files(
                    source, str(run.model), rows, run.recipe.eval.max_new_tokens, progress, allowed.budget_bytes
                )
            else:
                evaluate_run(run, rows, progress)
