"""File trees that look like another machine's /proc and /sys."""

from __future__ import annotations

from pathlib import Path


def tree(root: Path, files: dict[str, str | int]) -> Path:
    """Writes the files below `root`; a number gets a line of its own."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n" if isinstance(text, int) else text, encoding="utf-8")
    return root
