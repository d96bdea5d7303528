"""The export stage."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from edgeft.data import tokens as data_tokens
from edgeft.errors import ExportError, RunError
from edgeft.formats.source import is_gguf
from edgeft.formats.source import model_source as model_source
from edgeft.run.events import ExportEvent
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train.build import trained_stack, use_threads

if TYPE_CHECKING:
    pass

VERIFY_ROWS = 12  # held-out rows on which an exported file must agree with the trainer


def export(run: Run, kind: str, type_name: str, out: Path, progress: Progress, budget_bytes: int = 0) -> dict[str, Any]:
    """Writes the tuned model; a GGUF file takes its place only after it agreed with the trainer in llama.cpp."""
    from edgeft.engine import choose
    from edgeft.methods import scheme as schemes

    source = model_source(run.recipe.model.path)
    if kind not in ("gguf", "hf", "peft"):
        raise ExportError(f"unknown format `{kind}`", "known: gguf, hf, peft")
    if kind == "gguf":
        from edgeft.formats.types import check_type

        check_type(type_name)
    # weights are read twice here, once to be copied and once for the check: none of them need stay in memory
    stack, scheme, _ = trained_stack(run, progress, choose.recalled(run), spare_memory=True)
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
    from edgeft.formats.tokenizer import open_tokenizer

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
    run.log(ExportEvent(str(out), "gguf", made.bytes, made.types, found))
    progress.line(
        f"exported {out} ({made.bytes / 2**20:.1f} MiB): llama.cpp agrees with the trainer on "
        f"{found['top1']:.1f} % of {found['tokens']} tokens, mean KL {found['mean_kl']:.4f}"
    )
    return result
