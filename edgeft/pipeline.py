"""The stages of a run, in order: prepare, trunk and train, export, evaluate.

A stage hands over through files in the run folder; one that is complete is not done again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from edgeft import device
from edgeft.config import DataConfig, Recipe
from edgeft.data import rows as data_rows
from edgeft.data import tokens as data_tokens
from edgeft.data.tokens import Encoded
from edgeft.errors import DataError, EdgeftError, ExportError, ModelError, RunError
from edgeft.model import DEMO_HUB_ID, demo_model, is_gguf
from edgeft.model.gguf import GGUF
from edgeft.run import Run
from edgeft.train.progress import Progress

if TYPE_CHECKING:
    from edgeft.evaluate.score import Scores
    from edgeft.model.stack import Stack
    from edgeft.model.tokenizer import Tokenizer
    from edgeft.sparse.scheme import Scheme

STAGES = ("prepare", "train", "export", "eval")
VERIFY_ROWS = 12  # held-out rows on which an exported file must agree with the trainer


def model_source(path: str | None) -> str:
    """What `--model` means: a file, a folder, a hub id, or with nothing the embedded model."""
    if path is not None:
        return path
    embedded = demo_model()
    return str(embedded) if embedded else DEMO_HUB_ID


def check_model(source: str, frozen: str = "auto") -> None:
    """Refuses what cannot be trained before any work is done; reads a header only."""
    from edgeft.model.stack import check_architecture, check_frozen

    if is_gguf(source):
        check_architecture(GGUF.open(source))
        check_frozen(source, frozen)
    elif not Path(source).exists() and (source.count("/") != 1 or source.startswith((".", "/", "~"))):
        raise ModelError(
            f"there is no model at {source}", "give a GGUF file, a Hugging Face folder or a hub id (owner/name)"
        )


def check_scheme(recipe: Recipe, source: str) -> None:
    """Refuses blocks and tensors that the model does not have, before any work is done."""
    from edgeft.sparse import scheme

    if is_gguf(source):
        header = GGUF.open(source)
        scheme.make(recipe.update, int(header.need("block_count")), header.arch)


def use_threads(asked: int) -> int:
    """Compute threads: as asked, but never more than there are cores here (a profile may be of a larger machine)."""
    import torch

    cores = device.cores()
    threads = min(asked or cores, cores)
    torch.set_num_threads(threads)
    return threads


# ---------------------------------------------------------------- prepare


def prepare(run: Run, progress: Progress) -> tuple[list[Encoded], list[Encoded]]:
    """Training and held-out rows as tokens."""
    if run.tokens.is_file():
        return data_tokens.load(run.tokens)
    from edgeft.model.tokenizer import open_tokenizer

    config = run.recipe.data
    started = time.monotonic()
    dataset = data_rows.load(config)
    tokenizer = open_tokenizer(model_source(run.recipe.model.path))
    train, dropped = data_tokens.encode_rows(dataset.train, tokenizer, config.max_tokens, config.system)
    heldout, lost = data_tokens.encode_rows(
        dataset.heldout[: config.heldout_rows], tokenizer, config.max_tokens, config.system
    )
    if not train:
        reason = dropped[0][1] if dropped else "there are none"
        raise DataError(f"no row can be trained on: {reason}", "raise data.max_tokens, or look with `edgeft data FILE`")
    data_tokens.save(run.tokens, train, heldout)
    counts = {
        "train_rows": len(train),
        "heldout_rows": len(heldout),
        "train_tokens": int(sum(len(r.ids) for r in train)),
        "dropped": len(dropped) + len(lost),
        "skipped": len(dataset.skipped),
        "cut": sum(1 for r in train + heldout if r.cut_tokens),
    }
    run.log(event="prepare", format=dataset.format, seconds=round(time.monotonic() - started, 2), **counts)
    lost_text = f", {counts['dropped'] + counts['skipped']} left out" if counts["dropped"] + counts["skipped"] else ""
    progress.line(
        f"data: {len(train)} rows to train on, {len(heldout)} held out ({dataset.split}), "
        f"format {dataset.format}{lost_text}"
    )
    return train, heldout


# ---------------------------------------------------------------- train


def build(recipe: Recipe) -> tuple[Stack, Scheme, dict[str, Any]]:
    """The model with the recipe's scheme in it, untrained: (stack, scheme, trained parameters by name)."""
    from edgeft.model.stack import load
    from edgeft.sparse import scheme

    use_threads(recipe.how.threads)
    stack = load(model_source(recipe.model.path), recipe.model.frozen)
    chosen = scheme.make(recipe.update, stack.depth, stack.arch)
    return stack, chosen, scheme.apply(stack, chosen, recipe.train.seed)


def make_plan(run: Run, longest: int, budget_bytes: int, progress: Progress) -> None:
    """Says what the run will need, and chooses how it fits; DoesNotFitError if nothing does."""
    from edgeft import plan
    from edgeft.sparse import scheme

    source = model_source(run.recipe.model.path)
    shape = plan.shape_of(source, run.recipe.model.frozen)
    chosen = scheme.make(run.recipe.update, shape.depth, GGUF.open(source).arch if is_gguf(source) else "llama")
    found = plan.fit(run.recipe, shape, chosen, longest, budget_bytes)
    run.write_json(run.path / "plan.json", found)
    progress.line(plan.describe(found))


def train(run: Run, progress: Progress, budget_bytes: int = 0) -> None:
    """Up to the best checkpoint."""
    rows, heldout = prepare(run, progress)
    if run.done.is_file():
        return
    if budget_bytes:
        make_plan(run, max(len(r.ids) for r in rows + heldout), budget_bytes, progress)
    from edgeft.train.loop import Trainer
    from edgeft.train.trunk import model_id

    stack, scheme, parameters = build(run.recipe)
    trained = sum(p.numel() for p in parameters.values())
    progress.line(
        f"scheme: {run.recipe.update.method}, blocks {scheme.blocks[0]} to {scheme.blocks[-1]} of {stack.depth} "
        f"(cut at {scheme.cut}), {trained / 1e6:.2f} M parameters trained"
    )
    run.log(event="scheme", cut=scheme.cut, blocks=list(scheme.blocks), trained_parameters=trained)
    trainer = Trainer(run, stack, scheme, parameters, rows, heldout, progress)
    progress.line(f"{trainer.schedule.steps} steps, peak learning rate {trainer.schedule.peak:.2g}")
    trainer.fit(model_id(model_source(run.recipe.model.path)))


def trained_stack(run: Run) -> tuple[Stack, Scheme, dict[str, Any]]:
    """The run's model with its best checkpoint loaded."""
    from edgeft.train.loop import load_trained

    if not run.best.is_file():
        raise RunError(
            f"{run.path} has no trained weights yet", f"go on with `edgeft finetune --resume --out {run.path}`"
        )
    stack, scheme, parameters = build(run.recipe)
    load_trained(parameters, run)
    return stack, scheme, parameters


# ---------------------------------------------------------------- export


def export(run: Run, kind: str, type_name: str, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes the tuned model; a GGUF file takes its place only after it agreed with the trainer in llama.cpp."""
    from edgeft.sparse import scheme as schemes

    source = model_source(run.recipe.model.path)
    if kind not in ("gguf", "hf", "peft"):
        raise ExportError(f"unknown format `{kind}`", "known: gguf, hf, peft")
    if kind == "gguf":
        from edgeft.export.gguf import check_type

        check_type(type_name)
    stack, scheme, _ = trained_stack(run)
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

    _, heldout = data_tokens.load(run.tokens)
    tokenizer = open_tokenizer(source)
    with ExitStack() as cleanup:
        base = Path(source)
        if not is_gguf(source):
            from edgeft.export.convert import hf_to_gguf

            base = Path(cleanup.enter_context(TemporaryDirectory(dir=run.path))) / "base.gguf"
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
                path, stack, checked, tokenizer, run.recipe.data.system, type_name, use_threads(run.recipe.how.threads)
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


# ---------------------------------------------------------------- evaluate


def evaluation_rows(data: DataConfig, tokenizer: Tokenizer, limit: int) -> list[Encoded]:
    """Held-out rows of any data, ready for scoring."""
    dataset = data_rows.load(data, for_eval=True)
    encoded, dropped = data_tokens.encode_rows(dataset.heldout[:limit], tokenizer, data.max_tokens, data.system)
    if not encoded:
        reason = dropped[0][1] if dropped else "there are none"
        raise DataError(f"no held-out row can be scored: {reason}", "name a file with --data")
    return encoded


def score_file(path: str, rows: list[Encoded], max_new: int, progress: Progress, name: str) -> Scores:
    """A GGUF file, as llama.cpp runs it."""
    from edgeft.evaluate.llamacpp import LlamaFile
    from edgeft.evaluate.score import score
    from edgeft.model.tokenizer import open_tokenizer

    longest = max(len(r.ids) for r in rows) + max_new
    progress.stage(f"evaluate {name}", 1.0)
    with LlamaFile(path, n_ctx=max(2048, 4 * longest)) as file:
        found = score(file, open_tokenizer(path), rows, max_new)
    progress.end()
    return found


def score_stack(
    stack: Stack, tokenizer: Tokenizer, rows: list[Encoded], max_new: int, progress: Progress, name: str
) -> Scores:
    """The trainer's own model."""
    from edgeft.evaluate.score import score
    from edgeft.evaluate.trainer import StackScorer

    progress.stage(f"evaluate {name}", 1.0)
    found = score(StackScorer(stack, tokenizer.eog), tokenizer, rows, max_new)
    progress.end()
    return found


def evaluate_run(run: Run, rows: list[Encoded], progress: Progress, base: str | None = None) -> dict[str, Any]:
    """Base and tuned model, both in the trainer."""
    from edgeft.evaluate.score import compare
    from edgeft.model.stack import load
    from edgeft.model.tokenizer import open_tokenizer

    source = model_source(run.recipe.model.path)
    tokenizer, max_new = open_tokenizer(source), run.recipe.eval.max_new_tokens
    tuned_stack, _, _ = trained_stack(run)
    tuned = score_stack(tuned_stack, tokenizer, rows, max_new, progress, "tuned model")
    del tuned_stack
    before = score_stack(
        load(base or source, run.recipe.model.frozen), tokenizer, rows, max_new, progress, "base model"
    )
    return compare(before, tuned)


def evaluate_files(base: str, tuned: str, rows: list[Encoded], max_new: int, progress: Progress) -> dict[str, Any]:
    """Two GGUF files, both in llama.cpp."""
    from edgeft.evaluate.score import compare

    return compare(
        score_file(base, rows, max_new, progress, "base model"),
        score_file(tuned, rows, max_new, progress, "tuned model"),
    )


def evaluate(target: str, data: str | None, base: str | None, limit: int | None, progress: Progress) -> dict[str, Any]:
    """`edgeft eval`: a run or a Hugging Face folder in the trainer, a GGUF file in llama.cpp; beside its base."""
    from edgeft.evaluate.score import compare
    from edgeft.model.stack import load
    from edgeft.model.tokenizer import open_tokenizer

    place = Path(target)
    folder = place if (place / "recipe.yaml").is_file() else place.parent
    run = Run.open(folder) if (folder / "recipe.yaml").is_file() else None
    is_run = run is not None and folder == place
    if not is_run:
        check_model(target)
    recipe = run.recipe if run else Recipe()
    limit = limit or recipe.eval.rows
    max_new = recipe.eval.max_new_tokens
    origin = base or (model_source(recipe.model.path) if run else base_of(target))
    if data is None and run is not None and run.tokens.is_file():
        rows = data_tokens.load(run.tokens)[1][:limit]
        if not rows:
            raise DataError(f"{run.path} has no held-out rows", "name a file with --data")
    else:
        config = replace(recipe.data, path=data, heldout=None if data else recipe.data.heldout)
        rows = evaluation_rows(config, open_tokenizer(origin if is_run and origin else target), limit)
    if run is not None and is_run:
        found = evaluate_run(run, rows, progress, base)
        if data is None and base is None:
            run.write_json(run.path / "eval-trainer.json", found)
        return found

    def score_any(path: str, name: str) -> Scores:
        if is_gguf(path):
            return score_file(path, rows, max_new, progress, name)
        return score_stack(load(path, "dense"), open_tokenizer(path), rows, max_new, progress, name)

    tuned = score_any(target, "tuned model")
    if origin is None:
        progress.line("its base model is not known here: name it with --base to compare")
    return compare(score_any(origin, "base model") if origin else None, tuned)


def base_of(target: str) -> str | None:
    """The model that an exported file was tuned from, if it lies beside it or is the embedded one."""
    if not is_gguf(target):
        return None
    name = GGUF.open(target).get_key("edgeft.base")
    if not isinstance(name, str) or not name:
        return None
    embedded = demo_model()
    for candidate in (Path(target).parent / Path(name).name, embedded):
        if candidate is not None and candidate.name == name and candidate.is_file():
            return str(candidate)
    return None


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


def finetune(run: Run, until: str, progress: Progress, budget_bytes: int = 0) -> dict[str, Any]:
    """Every stage up to `until`; what comes out stands in the run folder."""
    source = model_source(run.recipe.model.path)
    result: dict[str, Any] = {"run": str(run.path)}
    try:
        check_model(source, run.recipe.model.frozen)
        check_scheme(run.recipe, source)
        prepare(run, progress)
    except EdgeftError:
        run.discard_if_empty()  # a mistake in the call leaves no folder behind
        raise
    if until == "prepare":
        return result
    train(run, progress, budget_bytes)
    result |= run.read_json(run.done) or {}
    if until == "train":
        return result
    exported = run.path / "export.json"
    if not (run.model.is_file() and exported.is_file()):
        run.write_json(exported, export(run, "gguf", run.recipe.export.type, run.model, progress))
    result["export"] = run.read_json(exported)
    if until == "export":
        return result
    if not run.evaluation.is_file():
        _, heldout = data_tokens.load(run.tokens)
        rows = heldout[: run.recipe.eval.rows]
        if rows:
            found = (
                evaluate_files(source, str(run.model), rows, run.recipe.eval.max_new_tokens, progress)
                if is_gguf(source)
                else evaluate_run(run, rows, progress)
            )
            run.write_json(run.evaluation, found)
    result["eval"] = run.read_json(run.evaluation)
    return result
