"""What a run will still write, and whether the disk has room for it: asked before anything is computed.

What is there already does not count, so that a run that goes on is never refused for what it has written itself.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from edgeft import plan
from edgeft.errors import RunError
from edgeft.model import is_gguf
from edgeft.model.gguf import GGUF
from edgeft.run import Run

if TYPE_CHECKING:
    from edgeft.plan import Shape
    from edgeft.sparse.scheme import Scheme

Need = tuple[Path, str, int]  # the folder, what is written there, bytes


def needs(run: Run, shape: Shape, scheme: Scheme, source: str) -> list[Need]:
    """All but the trunk cache, which is known only when the rows are."""
    how, trained = run.recipe.how, plan.trained_parameters(shape, scheme)
    found: list[Need] = []
    if not run.tokens.is_file():
        rows = Path(run.recipe.data.path) if run.recipe.data.path else None
        if rows is not None and os.path.isfile(rows):  # of a folder, nobody knows yet which files are rows
            found.append((run.path, "tokens", 2 * _size(rows)))  # ids, and the rows' own text
    if not run.done.is_file():
        each = int(trained * (4 + plan.STATE_BYTES[how.optimizer_state]))  # weights and AdamW's two moments
        # one more than is kept: the oldest goes when the newest is there
        found.append((run.path, "checkpoints", max(0, (how.keep_checkpoints + 1) * each - _size(run.checkpoints))))
        found.append((run.path, "best weights", max(0, 2 * 4 * trained - _size(run.best))))
    if not (run.exported.is_file() and run.model.is_file()):
        found.append((run.path, "exported model", exported_bytes(source, shape, scheme, run.recipe.export.type)))
    return found


def exported_bytes(source: str, shape: Shape, scheme: Scheme, type_name: str) -> int:
    if not is_gguf(source):  # fp16, and the base converted first
        return 2 * 2 * (shape.depth * shape.block_parameters + 2 * shape.vocabulary * shape.width)
    from edgeft.export.gguf import check_type, chosen_type
    from edgeft.model import ggml
    from edgeft.model.header import LINEARS

    check_type(type_name)
    base = GGUF.open(source)
    total = base.path.stat().st_size
    for block, tensor in scheme.shares:
        info = base.tensors[f"blk.{block}.{LINEARS[tensor][1]}.weight"]
        cols, rows = info.shape
        total += rows * ggml.row_bytes(chosen_type(info, type_name), cols) - info.nbytes
    return total


def check(found: list[Need]) -> None:
    """RunError if one of the disks has no room for all that goes there."""
    disks: dict[int, list[Need]] = {}
    for need in found:
        disks.setdefault(os.stat(_existing(need[0])).st_dev, []).append(need)
    for wanted in disks.values():
        free, total = shutil.disk_usage(_existing(wanted[0][0])).free, sum(size for _, _, size in wanted)
        if total > free:
            terms = ", ".join(f"{what} {_text(size)}" for _, what, size in sorted(wanted, key=lambda n: -n[2]) if size)
            raise RunError(
                f"this run will write {_text(total)} below {wanted[0][0]}, and {_text(free)} are free there ({terms})",
                "free some space, name another place (--out, EDGEFT_CACHE), or keep less: --set how.keep_checkpoints=1",
            )


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return path.stat().st_size if path.is_file() else 0


def _text(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
