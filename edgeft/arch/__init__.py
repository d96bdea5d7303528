"""The architectures that edgeft trains, one file each; a new one is a file and a line in ARCHITECTURES.

Nothing outside this folder compares with the name of one: it asks the `Architecture`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgeft.arch.base import Architecture, Linear, Norm, Sizes
from edgeft.arch.llama import Llama
from edgeft.arch.qwen2 import Qwen2
from edgeft.arch.qwen3 import Qwen3
from edgeft.errors import ModelError

if TYPE_CHECKING:
    from edgeft.formats.gguf import GGUF

__all__ = ["ARCHITECTURES", "Architecture", "Linear", "Norm", "Sizes", "get", "of_gguf", "of_model_type"]

ARCHITECTURES: tuple[Architecture, ...] = (Llama(), Qwen2(), Qwen3())


def get(name: str) -> Architecture:
    """By the name that GGUF files give it; KeyError for any other."""
    return {architecture.name: architecture for architecture in ARCHITECTURES}[name]


def of_gguf(gguf: GGUF) -> Architecture:
    architecture = next((one for one in ARCHITECTURES if one.name == gguf.arch), None)
    if architecture is None:
        hint = f"supported: {', '.join(a.name for a in ARCHITECTURES)} ({_titles()})"
        what = f"is of architecture `{gguf.arch or 'unknown'}`, which is not supported"
        raise ModelError(f"{gguf.path.name} {what}", hint)
    if gguf.get("expert_count", 0):
        hint = "use a dense model of the same family"
        raise ModelError(f"{gguf.path.name} is a mixture of experts, which is not supported", hint)
    return architecture


def of_model_type(model_type: str, where: object = "the model") -> Architecture:
    """By `model_type` in a Hugging Face configuration; `where` names its folder in the error."""
    for architecture in ARCHITECTURES:
        if model_type in architecture.model_types:
            return architecture
    raise ModelError(
        f"{where} is a model of type `{model_type}`, which is not supported",
        f"supported: {', '.join(t for a in ARCHITECTURES for t in a.model_types)} ({_titles()})",
    )


def _titles() -> str:
    return ", ".join(architecture.title for architecture in ARCHITECTURES)
