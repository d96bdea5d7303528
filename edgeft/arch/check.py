"""A model that can be trained, checked by its header before any work is done."""

from __future__ import annotations

from edgeft.arch.header import check_file, check_frozen
from edgeft.config import exists
from edgeft.errors import ModelError
from edgeft.formats.source import is_gguf


def check_model(source: str, frozen: str = "auto") -> None:
    """Refuses what cannot be trained before any work is done; reads a header only."""
    if is_gguf(source):
        check_file(source)
        check_frozen(source, frozen)
    elif not exists(source) and (source.count("/") != 1 or source.startswith((".", "/", "~"))):
        raise ModelError(
            f"there is no model at {source}", "give a GGUF file, a Hugging Face folder or a hub id (owner/name)"
        )
