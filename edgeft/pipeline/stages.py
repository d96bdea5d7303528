"""The train stage, and one stage by its name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgeft.arch.check import check_model
from edgeft.data import tokens as data_tokens
from edgeft.data.tokens import Encoded
from edgeft.errors import RunError
from edgeft.formats.source import is_gguf
from edgeft.formats.source import model_source as model_source
from edgeft.pipeline.check import check_disk, check_scheme
from edgeft.pipeline.export import export
from edgeft.pipeline.planning import make_plan
from edgeft.pipeline.prepare import prepare
from edgeft.run.events import SchemeEvent
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train.build import build

if TYPE_CHECKING:
    from edgeft.engine.choose import Engine
    from edgeft.methods.scheme import Scheme
    from edgeft.plan import Shape


def choose_engine(run: Run, shape: Shape, scheme: Scheme, rows: list[Encoded], progress: Progress) -> Engine:
    from edgeft.engine import choose
    from edgeft.plan.flops import step_flops
    from edgeft.plan.schedule import Schedule

    tokens, targets = sum(len(r.ids) for r in rows), sum(int(r.trained.sum()) for r in rows)
    epochs = Schedule(len(rows), run.recipe.train).steps * run.recipe.train.batch_rows / len(rows)
    flops = epochs * step_flops(shape, scheme, tokens, 0, targets, 0, targets)
    return choose.choose(run, shape.head, shape.gate, flops, progress)


def train(run: Run, progress: Progress, budget_bytes: int = 0) -> None:
    """Up to the best checkpoint."""
    if not run.tokens.is_file():
        prepare(run, progress)
    if run.read_json(run.done) is not None:
        return
    from edgeft import plan
    from edgeft.formats.hub import model_id
    from edgeft.host.disk import check
    from edgeft.methods import scheme as schemes
    from edgeft.plan import disk
    from edgeft.search import settle
    from edgeft.train import trunk
    from edgeft.train.loop import Trainer

    if run.recipe.update.needs_search:
        settle.search_for_run(run, budget_bytes, progress)
    run.recipe.how = replace(run.recipe.how, **settle.searched_execution(run))
    rows, heldout = data_tokens.load(run.tokens, texts=False)
    source = model_source(run.recipe.model.path)
    shape = plan.shape_of(source, run.recipe.model.frozen)
    if max(int(r.ids.max()) for r in rows + heldout) >= shape.vocabulary:
        raise RunError(f"{run.tokens} holds tokens that the model does not have", "delete it: it is made anew")
    planned = schemes.make(run.recipe.update, shape.depth, shape.arch)
    before = (run.read_json(run.plan) or {}) if budget_bytes else {}
    if run.recipe.how.products == "auto":  # bf16 ones may have been planned without
        run.recipe.how.products = (before.get("how") or {}).get("products", "auto")
    if run.recipe.how.compile == "auto" and before.get("compiled_to_fit"):
        run.recipe.how.compile = "on"
    engine = choose_engine(run, shape, planned, rows, progress)
    run.recipe.how.compile = "on" if engine.compiled else "off"  # what `auto` came to: the plan depends on it
    run.recipe.how.products = "bf16" if engine.bf16 else "fp32"
    if budget_bytes:
        make_plan(run, rows, heldout, budget_bytes, progress, engine)
    stack, scheme, parameters = build(run.recipe, engine)
    trained = sum(p.numel() for p in parameters.values())
    progress.line(
        f"scheme: {run.recipe.update.method}, blocks {scheme.blocks[0]} to {scheme.blocks[-1]} of {stack.depth} "
        f"(cut at {scheme.cut}), {trained / 1e6:.2f} M parameters trained"
        + (f", {scheme.cycle_blocks} blocks at a time" if scheme.cycle_blocks else "")
    )
    run.log(SchemeEvent(scheme.cut, list(scheme.blocks), trained))
    trainer = Trainer(run, stack, scheme, parameters, rows, heldout, progress)
    progress.line(f"{trainer.schedule.steps} steps, peak learning rate {trainer.schedule.peak:.2g}")
    weights_id = model_id(source)
    missing = trunk.missing(run, stack, trainer.forest, scheme.cut, weights_id, trainer.backend.name)
    check([*disk.needs(run, shape, scheme), *missing])
    trainer.fit(weights_id)


def do_stage(run: Run, name: str, progress: Progress, budget_bytes: int = 0, fit: bool = False) -> None:
    """One stage of `edgeft finetune`, in the process that stage.py gave it; what comes out stands in the run folder."""
    with run.stage(name):
        _do_stage(run, name, progress, budget_bytes, fit)
    if name == "eval" and run.evaluation.is_file():
        from edgeft.report import write_report

        progress.line(f"report: {write_report(run)}")  # with the time of this stage


def _do_stage(run: Run, name: str, progress: Progress, budget_bytes: int, fit: bool) -> None:
    source = model_source(run.recipe.model.path)
    if name in ("search", "export", "eval"):
        from edgeft.train.governor import Governor

        Governor(run, progress).pause_if_needed()  # the train stage asks between micro-batches; these at their start
    if name == "prepare":
        check_model(source, run.recipe.model.frozen)
        check_scheme(run.recipe, source)
        check_disk(run, source)
        prepare(run, progress, budget_bytes, fit)
    elif name == "search":
        from edgeft.search import settle

        settle.search_for_run(run, budget_bytes, progress)
    elif name == "train":
        train(run, progress, budget_bytes)
    elif name == "export":
        run.write_json(run.exported, export(run, "gguf", run.recipe.export.type, run.model, progress, budget_bytes))
    elif name == "eval":
        _, heldout = data_tokens.load(run.tokens)
        rows = heldout[: run.recipe.eval.rows]
        if rows:
            from edgeft.evaluate.compare import evaluate_files, evaluate_run

            if is_gguf(source):
                evaluate_files(source, str(run.model), rows, run.recipe.eval.max_new_tokens, progress, budget_bytes)
            else:
                evaluate_run(run, rows, progress)
