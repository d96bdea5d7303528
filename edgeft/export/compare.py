"""`edgeft export RUN --compare keep,q8_0,gguf-lora`: the same update as several files, each scored in llama.cpp.

All files see the same held-out rows. A file that was written and scored stays, so that a run that was killed goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgeft.data import tokens
from edgeft.errors import DataError, ExportError
from edgeft.evaluate.compare import base_of_adapter, score_subject
from edgeft.evaluate.subject import Subject
from edgeft.evaluate.suite import load_suite, make_items
from edgeft.formats.ggml import check_type
from edgeft.formats.source import is_gguf, model_source
from edgeft.run.folder import Run
from edgeft.run.progress import Progress

ADAPTER = "gguf-lora"
Export = Callable[[str, str, Path], dict[str, Any]]  # (format, type, file) → what the export reports


def parse_names(text: str) -> list[str]:
    """Types of GGUF files, and `gguf-lora`."""
    names = list(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
    for name in names:
        if name != ADAPTER:
            check_type(name)
    if not names:
        raise ExportError("`--compare` names no type", "for example --compare keep,q8_0,gguf-lora")
    return names


def compare(run: Run, names: list[str], export: Export, progress: Progress) -> dict[str, Any]:
    """{base_bytes, trained_loss, train_seconds, files: [{name, bytes, seconds, loss, f1, contains, error}]}, also in
    compare.json."""
    heldout = tokens.load(run.tokens)[1][: run.recipe.eval.rows] if run.tokens.is_file() else []
    if not heldout:
        raise DataError(f"{run.path} has no held-out rows to compare files on", "give some with data.heldout")
    folder, source = run.path / "compare", model_source(run.recipe.model.path)
    folder.mkdir(exist_ok=True, mode=0o700)
    before = run.read_json(run.compared) or {}
    known = {one["name"]: one for one in before.get("files", []) if (folder / f"{one['name']}.gguf").is_file()}
    done = run.read_json(run.done) or {}
    result: dict[str, Any] = {
        "base_bytes": Path(source).stat().st_size if is_gguf(source) else None,
        "trained_loss": done.get("best_loss"),
        "train_seconds": done.get("train_seconds"),
        "rows": len(heldout),
        "files": [],
    }
    for name in names:
        result["files"].append(known.get(name) or _one(run, name, folder / f"{name}.gguf", export, heldout, progress))
        run.write_json(run.compared, result)
    return result


def _one(
    run: Run, name: str, file: Path, export: Export, heldout: list[tokens.Encoded], progress: Progress
) -> dict[str, Any]:
    began = time.monotonic()
    try:
        kind, type_name = (ADAPTER, "auto") if name == ADAPTER else ("gguf", name)
        made = export(kind, type_name, file)
    except ExportError as error:  # the others are still of interest
        progress.line(f"{name}: {error.message}")
        return {"name": name, "error": error.message}
    seconds = time.monotonic() - began
    suite = load_suite("qa")
    suite.eval = run.recipe.eval
    subject = Subject("tuned", str(file))
    if name == ADAPTER:
        subject = Subject("tuned", str(base_of_adapter(file, run)), adapter=str(file))
    scores = score_subject(subject, make_items(suite, heldout), suite, progress)
    figures = scores.figures(("loss", "exact_match", "f1", "contains"))
    return {"name": name, "bytes": made["bytes"], "seconds": round(seconds, 2), "check": made["check"], **figures}
