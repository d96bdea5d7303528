"""Free disk space, checked before anything is computed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from edgeft.config import format_size
from edgeft.errors import RunError

Need = tuple[Path, str, int]  # the folder, what is written there, bytes


def check(needs: list[Need]) -> None:
    """RunError if one of the disks has less free space than is written to it."""
    disks: dict[int, list[Need]] = {}
    for need in needs:
        disks.setdefault(os.stat(_existing(need[0])).st_dev, []).append(need)
    for group in disks.values():
        free, total = shutil.disk_usage(_existing(group[0][0])).free, sum(size for _, _, size in group)
        if total > free:
            largest_first = sorted(group, key=lambda need: -need[2])
            terms = ", ".join(f"{what} {format_size(size)}" for _, what, size in largest_first if size)
            raise RunError(
                f"this run will write {format_size(total)} below {group[0][0]}; {format_size(free)} are free ({terms})",
                "free some space, name another folder (--out, EDGEFT_CACHE), or keep less: "
                "--set how.keep_checkpoints=1",
            )


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def path_size(path: Path) -> int:
    """Bytes of a file, or of the files in a folder; 0 if there is neither."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return path.stat().st_size if path.is_file() else 0
