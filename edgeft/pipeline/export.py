"""The export stage: the tuned model of a run in one of the formats of `edgeft/export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeft.errors import ExportError
from edgeft.export import FORMATS, Job
from edgeft.formats.source import model_source
from edgeft.formats.types import check_type
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train.build import trained_stack


def export(run: Run, kind: str, type_name: str, out: Path, progress: Progress, budget_bytes: int = 0) -> dict[str, Any]:
    """Writes the tuned model; returns its path, its format, and what the format reports."""
    from edgeft.engine import choose

    if kind not in FORMATS:
        raise ExportError(f"unknown format `{kind}`", f"known: {', '.join(FORMATS)}")
    if kind == "gguf":
        check_type(type_name)
    # weights are read twice here, once to be copied and once for the check: none of them need stay in memory
    stack, scheme, _ = trained_stack(run, progress, choose.recalled(run), spare_memory=True)
    source = model_source(run.recipe.model.path)
    job = Job(run, stack, scheme, source, out, type_name, progress, budget_bytes)
    return {"path": str(out), "format": kind, **FORMATS[kind](job)}
