"""`smollm3`: as llama, without a rotation in every fourth block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgeft.arch.base import Architecture
from edgeft.arch.llama import Llama
from edgeft.errors import ExportError

if TYPE_CHECKING:
    from edgeft.formats.gguf import GGUF

PERIOD = 4  # as llama.cpp has it: the last of so many blocks is not rotated


class SmolLM3(Architecture):
    name = "smollm3"
    title = "SmolLM3"
    model_types = ("smollm3",)
    config_class = "SmolLM3Config"
    model_class = "SmolLM3ForCausalLM"
    interleaved = Llama.interleaved

    def rotation(self, config: Any, block: int) -> str | None:
        return "" if config.no_rope_layers[block] else None

    def values(self, gguf: GGUF) -> dict[str, Any]:
        values = super().values(gguf)
        return values | {"no_rope_layers": _rotated(values["num_hidden_layers"])}

    def header(self, config: Any) -> dict[str, str | int | float]:
        if config.no_rope_layers != _rotated(config.num_hidden_layers) or getattr(config, "use_sliding_window", False):
            raise ExportError("llama.cpp rotates other blocks of a `smollm3` model, or has no windows in it")
        return super().header(config)


def _rotated(depth: int) -> list[int]:
    """1 for each block that has a rotation."""
    return [int((block + 1) % PERIOD != 0) for block in range(depth)]
