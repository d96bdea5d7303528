"""A model that can be trained, checked by its header before any work is done.

llama.cpp aborts on some headers and reads past the end on others: it is given only files that passed here.
"""

from __future__ import annotations

from pathlib import Path

from edgeft.arch import of_gguf
from edgeft.config import exists
from edgeft.errors import ModelError
from edgeft.formats.gguf import GGUF
from edgeft.formats.source import is_gguf
from edgeft.formats.vocabulary import check_vocabulary


def check_model(source: str, frozen: str = "auto") -> None:
    """Reads the header only. A hub id is not checked: it may have to be downloaded first."""
    if is_gguf(source):
        check_file(source)
        check_frozen(source, frozen)
    elif not exists(source) and (source.count("/") != 1 or source.startswith((".", "/", "~"))):
        raise ModelError(
            f"there is no model at {source}", "give a GGUF file, a Hugging Face folder or a hub id (owner/name)"
        )


def check_file(path: str | Path) -> GGUF:
    """A file that may be handed to llama.cpp."""
    gguf = GGUF.open(path)
    check_vocabulary(gguf)
    of_gguf(gguf).values(gguf)
    return gguf


def check_frozen(path: str | Path, frozen: str) -> None:
    if frozen not in ("auto", "dense"):
        raise ModelError(
            f"`model.frozen: {frozen}` is for Hugging Face weights; {Path(path).name} is packed already",
            "use `--set model.frozen=auto` (as packed in the file) or `dense`",
        )
