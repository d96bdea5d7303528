"""Free disk space, checked before anything is computed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from edgeft.errors import RunError

if TYPE_CHECKING:
    pass

Need = tuple[Path, str, int]  # the folder, what is written there, bytes


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
