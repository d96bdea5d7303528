"""The architectures that edgeft trains, one file each; a new one is a file and a line in ARCHITECTURES.

Nothing outside this folder compares with the name of one: it asks the `Architecture`.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from edgeft.arch.base import Architecture, Linear, Norm, Sizes
from edgeft.arch.ernie4_5 import Ernie45
from edgeft.arch.exaone import Exaone
from edgeft.arch.exaone4 import Exaone4
from edgeft.arch.gemma2 import Gemma2
from edgeft.arch.gemma3 import Gemma3
from edgeft.arch.granite import Granite
from edgeft.arch.llama import Llama
from edgeft.arch.minicpm import MiniCPM
from edgeft.arch.olmo2 import Olmo2
from edgeft.arch.phi3 import Phi3
from edgeft.arch.qwen2 import Qwen2
from edgeft.arch.qwen3 import Qwen3
from edgeft.arch.smollm3 import SmolLM3
from edgeft.errors import ModelError

if TYPE_CHECKING:
    from edgeft.formats.gguf import GGUF

__all__ = ["ARCHITECTURES", "Architecture", "Linear", "Norm", "Sizes", "get", "of_gguf", "of_model_type"]

ARCHITECTURES: tuple[Architecture, ...] = (
    Llama(),
    Qwen2(),
    Qwen3(),
    Gemma2(),
    Gemma3(),
    Phi3(),
    Granite(),
    MiniCPM(),
    Olmo2(),
    SmolLM3(),
    Exaone(),
    Exaone4(),
    Ernie45(),
)

PAGE = "edgeft/arch/README.md"


def get(name: str) -> Architecture:
    """By the name that GGUF files give it; KeyError for any other."""
    return {architecture.name: architecture for architecture in ARCHITECTURES}[name]


def of_gguf(gguf: GGUF) -> Architecture:
    architecture = next((one for one in ARCHITECTURES if one.name == gguf.arch), None)
    if architecture is None:
        what = f"{gguf.path.name} is of architecture `{gguf.arch or 'unknown'}`"
        raise _unknown(what, gguf.arch, [one.name for one in ARCHITECTURES])
    if gguf.get("expert_count", 0):
        hint = "use a dense model of the same family"
        raise ModelError(f"{gguf.path.name} is a mixture of experts, which is not supported", hint)
    return architecture


def of_model_type(model_type: object, where: object = "the model") -> Architecture:
    """By `model_type` in a Hugging Face configuration; `where` names its folder in the error."""
    for architecture in ARCHITECTURES:
        if model_type in architecture.model_types:
            return architecture
    names = [name for architecture in ARCHITECTURES for name in architecture.model_types]
    raise _unknown(f"{where} is a model of type `{model_type}`", model_type, names)


def _unknown(what: str, name: object, names: list[str]) -> ModelError:
    (nearest,) = difflib.get_close_matches(str(name), names, 1, 0.0)
    return ModelError(
        f"{what}, which is not supported",
        f"the nearest that is known: `{nearest}`; {PAGE} shows how to add one, which is a file, for dense models: "
        "mixtures of experts, gated convolutions (lfm2) and linear attention (qwen3.5) cannot be added that way",
    )
