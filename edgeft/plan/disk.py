"""What a run will still write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from edgeft import plan
from edgeft.host.disk import Need, path_size
from edgeft.plan.shape import exported_bytes
from edgeft.run.folder import Run

if TYPE_CHECKING:
    from edgeft.methods.scheme import Scheme
    from edgeft.plan import Shape


def needs(run: Run, shape: Shape, scheme: Scheme) -> list[Need]:
    """All but the trunk cache, which is known only when the rows are."""
    how, trained = run.effective.how, plan.trained_parameters(shape, scheme)
    found: list[Need] = []
    if not run.tokens.is_file():
        rows = Path(run.recipe.data.path) if run.recipe.data.path else None
        if rows is not None and os.path.isfile(rows):  # of a folder, nobody knows yet which files are rows
            found.append((run.path, "tokens", 2 * path_size(rows)))  # ids, and the rows' own text
    if not run.done.is_file():
        each = int(trained * (4 + plan.STATE_BYTES[how.optimizer_state]))  # weights and AdamW's two moments
        # one more than is kept: the oldest goes when the newest is there
        found.append((run.path, "checkpoints", max(0, (how.keep_checkpoints + 1) * each - path_size(run.checkpoints))))
        found.append((run.path, "best weights", max(0, 2 * 4 * trained - path_size(run.best))))
    if not (run.exported.is_file() and run.model.is_file()):
        found.append((run.path, "exported model", exported_bytes(shape, scheme, run.recipe.export.type)))
    return found
