"""The stages of a run, in order: prepare, trunk and train, export, evaluate.

A stage hands over through files in the run folder; stage.py runs each in a process of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from edgeft import device
from edgeft.config import Device, HowConfig, Recipe, exists
from edgeft.data import rows as data_rows
from edgeft.data import tokens as data_tokens
from edgeft.data.tokens import Encoded
from edgeft.errors import DataError, ExportError, ModelError, RunError
from edgeft.model import is_gguf
from edgeft.model.gguf import GGUF
from edgeft.run import Run
from edgeft.run import model_source as model_source
from edgeft.train.progress import Progress

if TYPE_CHECKING:
    from edgeft.model.stack import Stack
    from edgeft.plan import Shape
    from edgeft.sparse.scheme import Scheme
    from edgeft.train.engine import Engine

PLAN_ROWS = 600  # rows that `edgeft plan` looks at: a second's worth; they stand for the others
VERIFY_ROWS = 12  # held-out rows on which an exported file must agree with the trainer


def check_model(source: str, frozen: str = "auto") -> None:
    """Refuses what cannot be trained before any work is done; reads a header only."""
    from edgeft.model.header import check_file, check_frozen

    if is_gguf(source):
        check_file(source)
        check_frozen(source, frozen)
    elif not exists(source) and (source.count("/") != 1 or source.startswith((".", "/", "~"))):
        raise ModelError(
            f"there is no model at {source}", "give a GGUF file, a Hugging Face folder or a hub id (owner/name)"
        )


def check_scheme(recipe: Recipe, source: str) -> None:
    """Refuses blocks and tensors that the model does not have, before any work is done."""
    from edgeft.sparse import scheme

    if is_gguf(source):
        header = GGUF.open(source)
        scheme.make(recipe.update, int(header.need("block_count")), header.arch)


def check_disk(run: Run, source: str) -> None:
    """Refuses a run that the disk has no room for, as far as that can be known without its rows."""
    from edgeft import disk, plan
    from edgeft.sparse import scheme

    if is_gguf(source):
        shape = plan.shape_of(source, run.recipe.model.frozen)
        chosen = scheme.make(run.recipe.update, shape.depth, GGUF.open(source).arch)
        disk.check(disk.needs(run, shape, chosen, source))


def use_threads(asked: int) -> int:
    """Compute threads: as asked, but never more than there are cores here (a profile may be of a larger machine)."""
    import torch

    cores = device.cores()
    threads = min(asked or cores, cores)
    torch.set_num_threads(threads)
    return threads


# ---------------------------------------------------------------- prepare


def encode(recipe: Recipe) -> tuple[data_rows.Dataset, list[Encoded], list[Encoded], data_tokens.Dropped]:
    """(rows as they are in their files, training rows as tokens, held-out rows, what was dropped)."""
    from edgeft.model.tokenizer import open_tokenizer

    config = recipe.data
    dataset = data_rows.load(config)
    tokenizer = open_tokenizer(model_source(recipe.model.path))
    train, dropped = data_tokens.encode_rows(dataset.train, tokenizer, config.max_tokens, config.system)
    heldout, lost = data_tokens.encode_rows(
        dataset.heldout[: config.heldout_rows], tokenizer, config.max_tokens, config.system
    )
    if not train:
        reason = dropped[0][1] if dropped else "there are none"
        raise DataError(f"no row can be trained on: {reason}", "raise data.max_tokens, or look with `edgeft data FILE`")
    return dataset, train, heldout, dropped + lost


def prepare(
    run: Run, progress: Progress, budget_bytes: int = 0, fit: bool = False
) -> tuple[list[Encoded], list[Encoded]]:
    """Training and held-out rows as tokens; nothing is kept of a run that does not fit its budget."""
    if run.tokens.is_file():
        return data_tokens.load(run.tokens)
    started = time.monotonic()
    dataset, train, heldout, dropped = encode(run.recipe)
    if budget_bytes:
        make_plan(run, train, heldout, budget_bytes, progress, fit=fit)
    if run.recipe.update.unknown:
        from edgeft import search

        search.rule_if_short(run, train, heldout, progress)
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
    run.log(event="prepare", format=dataset.format, seconds=seconds, machine=machine, **counts)
    lost_text = f", {counts['dropped'] + counts['skipped']} left out" if counts["dropped"] + counts["skipped"] else ""
    progress.line(
        f"data: {len(train)} rows to train on, {len(heldout)} held out ({dataset.split}), "
        f"format {dataset.format}{lost_text}"
    )
    return train, heldout


# ---------------------------------------------------------------- train


def load_stack(recipe: Recipe, engine: Engine | None = None) -> Stack:
    """The model, all of it frozen."""
    from edgeft.model import spare
    from edgeft.model.stack import load

    spare.use(recipe.how.spare_memory)
    use_threads(recipe.how.threads)
    kernels = engine.kernels if engine else None
    lean = kernels is not None and recipe.update.method != "lora"  # PEFT needs transformers anyway
    stack = load(model_source(recipe.model.path), recipe.model.frozen, lean)
    if engine:
        stack.kernels = stack.head.kernels = kernels
        stack.half = engine.half
    return stack


def build(recipe: Recipe, engine: Engine | None = None) -> tuple[Stack, Scheme, dict[str, Any]]:
    """The model with the recipe's scheme in it, untrained: (stack, scheme, trained parameters by name)."""
    from edgeft.sparse import scheme

    stack = load_stack(recipe, engine)
    chosen = scheme.make(recipe.update, stack.depth, stack.arch)
    return stack, chosen, scheme.apply(stack, chosen, recipe.train.seed)


def make_plan(
    run: Run,
    rows: list[Encoded],
    heldout: list[Encoded],
    budget_bytes: int,
    progress: Progress,
    engine: Engine | None = None,
    fit: bool = False,
) -> dict[str, Any]:
    """Says what the run will need, and chooses how it fits; DoesNotFitError if nothing does.

    engine: what computes, once that is known; before, what will is foretold.
    """
    from edgeft.plan import memory
    from edgeft.plan.fit import Job, Machine, make
    from edgeft.plan.rows import Load
    from edgeft.plan.shape import shape_of

    recipe, place = run.recipe, run.plan
    before = run.read_json(place) or {}
    if engine and before.get("asked") == asdict(recipe.how) and before.get("budget_bytes") == budget_bytes:
        # as it was planned: other micro-batches would round otherwise
        recipe.how = HowConfig(**before["how"])
        return before
    machine = Machine.here(recipe.how.threads)
    known = memory.Engine(engine.kernels is not None, engine.half, machine.threads) if engine else None
    shape = shape_of(model_source(recipe.model.path), recipe.model.frozen)
    job = Job(recipe, shape, Load(rows, heldout, recipe), machine, known)
    chosen, found = make(job, budget_bytes, fit)
    if found["changed"]:
        recipe.update, recipe.model = chosen.recipe.update, chosen.recipe.model
        run.write_recipe()
    recipe.how = chosen.recipe.how
    run.write_json(place, found)
    progress.plan(found)
    return found


def plan_of(recipe: Recipe, profile: Device, budget_bytes: int, fit: bool = False) -> dict[str, Any]:
    """The plan of a run that is not begun: a header and some rows are read."""
    from edgeft.model.tokenizer import open_tokenizer
    from edgeft.plan.fit import Job, Machine, make
    from edgeft.plan.rows import Load
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
    load = Load(rows, heldout, recipe, count, held_count)
    return make(Job(recipe, shape_of(source, recipe.model.frozen), load, machine), budget_bytes, fit)[1]


def choose_engine(run: Run, shape: Shape, scheme: Scheme, rows: list[Encoded], progress: Progress) -> Engine:
    from edgeft.train import engine
    from edgeft.train.schedule import Schedule
    from edgeft.work import step_flops

    tokens, targets = sum(len(r.ids) for r in rows), sum(int(r.trained.sum()) for r in rows)
    epochs = Schedule(len(rows), run.recipe.train).steps * run.recipe.train.batch_rows / len(rows)
    flops = epochs * step_flops(shape, scheme, tokens, 0, targets, 0, targets)
    return engine.choose(run, shape.head, shape.gate, flops, progress)


def train(run: Run, progress: Progress, budget_bytes: int = 0) -> None:
    """Up to the best checkpoint."""
    if not run.tokens.is_file():
        prepare(run, progress)
    if run.read_json(run.done) is not None:
        return
    from edgeft import disk, plan, search
    from edgeft.cache import model_id
    from edgeft.sparse import scheme as schemes
    from edgeft.train import trunk
    from edgeft.train.loop import Trainer

    if run.recipe.update.unknown:
        search.settle(run, budget_bytes, progress)
    run.recipe.how = replace(run.recipe.how, **search.settled_how(run))
    rows, heldout = data_tokens.load(run.tokens, texts=False)
    source = model_source(run.recipe.model.path)
    shape = plan.shape_of(source, run.recipe.model.frozen)
    if max(int(r.ids.max()) for r in rows + heldout) >= shape.vocabulary:
        raise RunError(f"{run.tokens} holds tokens that the model does not have", "delete it: it is made anew")
    planned = schemes.make(run.recipe.update, shape.depth, GGUF.open(source).arch if is_gguf(source) else "llama")
    before = (run.read_json(run.plan) or {}) if budget_bytes else {}
    if run.recipe.how.products == "auto":  # bf16 ones may have been planned without
        run.recipe.how.products = (before.get("how") or {}).get("products", "auto")
    if run.recipe.how.compile == "auto" and before.get("compiled_to_fit"):
        run.recipe.how.compile = "on"
    engine = choose_engine(run, shape, planned, rows, progress)
    run.recipe.how.compile = "on" if engine.kernels else "off"  # what `auto` came to: the plan depends on it
    run.recipe.how.products = "bf16" if engine.half else "fp32"
    if budget_bytes:
        make_plan(run, rows, heldout, budget_bytes, progress, engine)
    stack, scheme, parameters = build(run.recipe, engine)
    trained = sum(p.numel() for p in parameters.values())
    progress.line(
        f"scheme: {run.recipe.update.method}, blocks {scheme.blocks[0]} to {scheme.blocks[-1]} of {stack.depth} "
        f"(cut at {scheme.cut}), {trained / 1e6:.2f} M parameters trained"
        + (f", {scheme.cycle_blocks} blocks at a time" if scheme.cycle_blocks else "")
    )
    run.log(event="scheme", cut=scheme.cut, blocks=list(scheme.blocks), trained_parameters=trained)
    trainer = Trainer(run, stack, scheme, parameters, rows, heldout, progress)
    progress.line(f"{trainer.schedule.steps} steps, peak learning rate {trainer.schedule.peak:.2g}")
    weights_id = model_id(source)
    missing = trunk.missing(run, stack, trainer.forest, scheme.cut, weights_id, trainer.engine)
    disk.check([*disk.needs(run, shape, scheme, source), *missing])
    trainer.fit(weights_id)


def trained_stack(
    run: Run, progress: Progress = Progress(), engine: Engine | None = None, spare_memory: bool = False
) -> tuple[Stack, Scheme, dict[str, Any]]:
    """The run's model with its best checkpoint loaded."""
    from edgeft.sparse import scheme as schemes
    from edgeft.train.loop import load_trained

    if not run.best.is_file():
        raise RunError(
            f"{run.path} has no trained weights yet", f"go on with `edgeft finetune --resume --out {run.path}`"
        )
    how = replace(run.recipe.how, spare_memory=spare_memory)
    stack, scheme, parameters = build(replace(run.recipe, how=how), engine)
    load_trained(schemes.stored(stack, parameters), run, progress)
    return stack, scheme, parameters


# ---------------------------------------------------------------- export


def export(run: Run, kind: str, type_name: str, out: Path, progress: Progress, budget_bytes: int = 0) -> dict[str, Any]:
    """Writes the tuned model; a GGUF file takes its place only after it agreed with the trainer in llama.cpp."""
    from edgeft.sparse import scheme as schemes
    from edgeft.train import engine

    source = model_source(run.recipe.model.path)
    if kind not in ("gguf", "hf", "peft"):
        raise ExportError(f"unknown format `{kind}`", "known: gguf, hf, peft")
    if kind == "gguf":
        from edgeft.export.gguf import check_type

        check_type(type_name)
    # weights are read twice here, once to be copied and once for the check: none of them need stay in memory
    stack, scheme, _ = trained_stack(run, progress, engine.recalled(run), spare_memory=True)
    updates: Iterable[tuple[str, Any]] = schemes.updated(stack, scheme)
    if kind == "hf":
        from edgeft.export.hf import export_hf

        export_hf(source, updates, out)
        return {"path": str(out), "format": "hf"}
    if kind == "peft":
        from edgeft.export.peft import export_peft

        export_peft(stack, scheme, source, out)
        return {"path": str(out), "format": "peft"}

    from edgeft.export.gguf import export_gguf
    from edgeft.export.modelfile import write_modelfile
    from edgeft.export.verify import verify
    from edgeft.model.tokenizer import open_tokenizer

    if not run.tokens.is_file():
        raise RunError(
            f"{run.path} keeps no rows to check an exported file with",
            f"prepare them again: `edgeft finetune --resume --until prepare --out {run.path}`",
        )
    _, heldout = data_tokens.load(run.tokens)
    tokenizer = open_tokenizer(source)
    with ExitStack() as cleanup:
        base = Path(source)
        if not is_gguf(source):
            from edgeft.export.convert import hf_to_gguf

            base = Path(cleanup.enter_context(TemporaryDirectory(".tmp", f".base.{os.getpid()}.", run.path)))
            base /= "base.gguf"
            progress.line("converting the base model to GGUF")
            hf_to_gguf(source, base)
        checked = heldout[:VERIFY_ROWS] or data_tokens.load(run.tokens)[0][:VERIFY_ROWS]
        made = export_gguf(
            base,
            updates,
            out,
            type_name,
            recipe=run.recipe.name,
            base_name=Path(source).name,
            template=None if tokenizer.has_template else tokenizer.template,
            check=lambda path: verify(
                path,
                stack,
                checked,
                tokenizer,
                run.recipe.data.system,
                type_name,
                use_threads(run.recipe.how.threads),
                room_bytes=budget_bytes,
            ),
        )
    write_modelfile(out)
    found = asdict(made.checked)
    result = {"path": str(out), "format": "gguf", "bytes": made.bytes, "types": made.types, "check": found}
    run.log(event="export", **result)
    progress.line(
        f"exported {out} ({made.bytes / 2**20:.1f} MiB): llama.cpp agrees with the trainer on "
        f"{found['top1']:.1f} % of {found['tokens']} tokens, mean KL {found['mean_kl']:.4f}"
    )
    return result


def chat_file(target: Path) -> Path:
    """The GGUF file that `edgeft chat RUN|FILE` means."""
    if not target.is_dir():
        check_model(str(target))
        return target
    run = Run.open(target)
    if not run.model.is_file():
        raise RunError(f"{target} has no exported model yet", f"write it with `edgeft export {target}`")
    return run.model


# ---------------------------------------------------------------- all of it


def do_stage(run: Run, name: str, progress: Progress, budget_bytes: int = 0, fit: bool = False) -> None:
    """One stage of `edgeft finetune`, in the process that stage.py gave it; what comes out stands in the run folder."""
    source = model_source(run.recipe.model.path)
    if name in ("search", "export", "eval"):
        from edgeft.train.governor import Governor

        Governor(run, progress).between()  # the train stage asks between micro-batches; these at their start
    if name == "prepare":
        check_model(source, run.recipe.model.frozen)
        check_scheme(run.recipe, source)
        check_disk(run, source)
        prepare(run, progress, budget_bytes, fit)
    elif name == "search":
        from edgeft import search

        search.settle(run, budget_bytes, progress)
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
