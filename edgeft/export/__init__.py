"""Exports the tuned model as files that other programs run, verified before they are renamed to their final name.

A format is a function over a `Job` and a line in FORMATS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from edgeft.errors import ExportError, RunError
from edgeft.formats.source import is_gguf
from edgeft.run.events import ExportEvent

if TYPE_CHECKING:
    from edgeft.engine.stack import Stack
    from edgeft.export.gguf import Exported
    from edgeft.export.verify import Reference
    from edgeft.formats.gguf import GGUF
    from edgeft.methods.scheme import Scheme
    from edgeft.run.folder import Run
    from edgeft.run.progress import Progress

MAX_LOSS = 1.05  # held-out loss after rounding onto the base's types, against that before
MAX_LOSS_AUTO = 1.02  # from here on `auto` writes q8_0


@dataclass(frozen=True)
class Job:
    """A trained stack, and where its model is written to."""

    run: Run
    stack: Stack
    scheme: Scheme
    source: str  # the base model: a GGUF file, a Hugging Face folder or a hub id
    out: Path
    type_name: str  # of updated tensors in a GGUF file
    progress: Progress
    budget_bytes: int = 0  # memory that the check may use; 0: what is available


def _gguf(job: Job) -> dict[str, Any]:
    """A GGUF file, renamed to its final name only after llama.cpp agrees with the trainer on held-out rows."""
    from edgeft.export.convert import hf_to_gguf

    reference = _reference(job)
    with ExitStack() as cleanup:
        base = Path(job.source)
        if not is_gguf(job.source):
            folder = cleanup.enter_context(TemporaryDirectory(".tmp", f".base.{os.getpid()}.", job.run.path))
            job.progress.line("converting the base model to GGUF")
            base = hf_to_gguf(job.source, Path(folder) / "base.gguf")
        return _smallest(job, base, reference) if _can_be_kept(job, base) else _merged(job, base, reference)


def _can_be_kept(job: Job, base: Path) -> bool:
    """Whether updates are rounded onto the grid of the base's types; `auto` does so where all of them have one, and the
    model is small."""
    from edgeft.export.keep import EXACT, has_grid
    from edgeft.formats.gguf import GGUF
    from edgeft.plan import shape_of_config
    from edgeft.plan.limits import AUTO_KEEP_WEIGHTS

    types = set(updated_types(job, GGUF.open(base))) - set(EXACT)
    if not types or job.type_name == "keep":
        return bool(types)
    if job.type_name != "auto" or not all(map(has_grid, types)):
        return False
    if shape_of_config(job.stack.arch, job.stack.config).weights < AUTO_KEEP_WEIGHTS:
        return True
    job.progress.line(
        "updated tensors are written as q8_0; `edgeft export RUN --type keep` makes a file as small as the base"
    )
    return False


def updated_types(job: Job, base: GGUF) -> Iterator[int]:
    """Of the matrices that this run trained."""
    for number, tensor in job.scheme.updates:
        name = f"blk.{number}.{job.stack.arch.linears[tensor].gguf}.weight"
        if name in base.tensors:
            yield base.tensors[name].type


def _smallest(job: Job, base: Path, reference: Reference) -> dict[str, Any]:
    """Rounded onto the base's own types; `auto` writes q8_0 where that loses too much."""
    from edgeft.export.keep import Kept, keep
    from edgeft.formats.gguf import GGUF

    kept = Kept(job.stack, job.scheme, GGUF.open(base), job.run.effective, job.progress)
    limit = MAX_LOSS if job.type_name == "keep" else MAX_LOSS_AUTO
    try:
        keep(job, kept)
        why = f"held-out loss {kept.loss:.4f} on the base's own types, {kept.trained_loss:.4f} before rounding"
        if not kept.loss <= limit * kept.trained_loss:
            hint = "use --type q8_0, or more training rows: rounding reads them"
            raise ExportError(f"{why}: more than {limit:g} times as much", hint)
        made = _write(job, base, kept.updates(), reference, "keep")
    except ExportError as error:
        if job.type_name == "keep":
            raise
        kept.restore()
        job.progress.line(f"q8_0 is written: {error.message}")
        return _merged(job, base, reference)
    job.progress.line(f"kept the base's types: {why}")
    return _report(job, "gguf", made) | {"loss": {"trained": kept.trained_loss, "file": kept.loss}, "why": why}


def _merged(job: Job, base: Path, reference: Reference) -> dict[str, Any]:
    from edgeft.methods import scheme as schemes

    made = _write(job, base, schemes.updated(job.stack, job.scheme), reference, job.type_name)
    return _report(job, "gguf", made)


def _write(job: Job, base: Path, updates: Iterable[Any], reference: Reference, type_name: str) -> Exported:
    from edgeft.export.gguf import Labels, export_gguf
    from edgeft.export.modelfile import write_modelfile
    from edgeft.export.verify import verify

    tokenizer = reference.tokenizer
    template = None if tokenizer.has_template else tokenizer.template
    labels = Labels(template, job.run.recipe.name, Path(job.source).name)
    made = export_gguf(base, updates, job.out, type_name, lambda path: verify(path, reference, type_name), labels)
    write_modelfile(job.out)
    return made


def _gguf_lora(job: Job) -> dict[str, Any]:
    """A LoRA adapter; its base file is the user's own, or is converted once and stays beside it."""
    from edgeft.export.convert import hf_to_gguf
    from edgeft.export.gguf import Labels
    from edgeft.export.lora import export_lora
    from edgeft.export.modelfile import write_modelfile
    from edgeft.export.verify import verify
    from edgeft.formats.adapter import BASE

    reference = _reference(job)
    base = Path(job.source)
    if not is_gguf(job.source):
        base = job.out.with_name(BASE)
        if not base.is_file():
            job.progress.line("converting the base model to GGUF")
            hf_to_gguf(job.source, base)
    made = export_lora(
        base,
        job.stack,
        job.scheme,
        job.out,
        lambda path: verify(base, reference, adapter=path),
        Labels(recipe=job.run.recipe.name, base=base.name),
    )
    write_modelfile(base, job.out)
    return _report(job, "gguf-lora", made)


def _report(job: Job, kind: str, made: Exported) -> dict[str, Any]:
    check = asdict(made.checked)
    job.run.log(ExportEvent(str(job.out), kind, made.bytes, made.types, check))
    job.progress.line(
        f"exported {job.out} ({made.bytes / 2**20:.1f} MiB): llama.cpp agrees with the trainer on "
        f"{check['top1']:.1f} % of {check['tokens']} tokens, mean KL {check['mean_kl']:.4f}"
    )
    return {"bytes": made.bytes, "types": made.types, "check": check}


def _reference(job: Job) -> Reference:
    from edgeft.data import tokens
    from edgeft.export.verify import Reference
    from edgeft.formats.tokenizer import open_tokenizer
    from edgeft.plan.limits import VERIFY_ROWS
    from edgeft.train.build import compute_threads

    run = job.run
    if not run.tokens.is_file():
        raise RunError(
            f"{run.path} has no rows to verify an exported file with",
            f"prepare them again: `edgeft finetune --resume --until prepare --out {run.path}`",
        )
    train, heldout = tokens.load(run.tokens)
    rows = heldout or train
    threads, system = compute_threads(run.recipe.how.threads), run.recipe.data.system
    tokenizer = open_tokenizer(job.source)
    return Reference(job.stack, rows[:VERIFY_ROWS], tokenizer, system, threads, job.budget_bytes)


def _hf(job: Job) -> dict[str, Any]:
    from edgeft.export.hf import export_hf
    from edgeft.methods import scheme as schemes

    export_hf(job.source, schemes.updated(job.stack, job.scheme), job.out)
    return {}


def _peft(job: Job) -> dict[str, Any]:
    from edgeft.export.peft import export_peft

    export_peft(job.stack, job.scheme, job.source, job.out)
    return {}


FORMATS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "gguf": _gguf,
    "gguf-lora": _gguf_lora,
    "hf": _hf,
    "peft": _peft,
}
