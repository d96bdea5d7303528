"""`exaone4`: norms only after attention and feed-forward, and over each head of q and k.

The model of 64 blocks has windows, and no rotation in the blocks without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgeft.arch.base import Architecture, Norm, whole, window_by_type
from edgeft.errors import ExportError

if TYPE_CHECKING:
    from edgeft.formats.gguf import GGUF

WINDOWED, PERIOD = 64, 4  # llama.cpp: a model of so many blocks has a window in all but the last of every four


class Exaone4(Architecture):
    name = "exaone4"
    title = "EXAONE 4"
    model_types = ("exaone4",)
    config_class = "Exaone4Config"
    model_class = "Exaone4ForCausalLM"
    norms = (
        Norm("post_attention_layernorm", "post_attention_norm", "attention_out"),
        Norm("post_feedforward_layernorm", "post_ffw_norm", "ffn_out"),
        Norm("self_attn.q_norm", "attn_q_norm", "q"),
        Norm("self_attn.k_norm", "attn_k_norm", "k"),
    )

    def window(self, config: Any, block: int) -> int:
        return window_by_type(config, block) if config.sliding_window else 0

    def rotation(self, config: Any, block: int) -> str | None:
        return None if config.sliding_window and not self.window(config, block) else ""

    def values(self, gguf: GGUF) -> dict[str, Any]:
        values = super().values(gguf)
        depth = values["num_hidden_layers"]
        window = whole(gguf, "attention.sliding_window", 4096) if depth == WINDOWED else None
        return values | {"sliding_window": window, "layer_types": _types(depth, window)}

    def header(self, config: Any) -> dict[str, str | int | float]:
        depth, window = config.num_hidden_layers, config.sliding_window
        if config.layer_types != _types(depth, window) or bool(window) != (depth == WINDOWED):
            raise ExportError(f"llama.cpp has no windows like this model's {depth} blocks")
        keys = super().header(config)
        return keys | {f"{self.name}.attention.sliding_window": window} if window else keys


def _types(depth: int, window: int | None) -> list[str]:
    """Of each block, as transformers names them."""
    return ["sliding_attention" if window and (block + 1) % PERIOD else "full_attention" for block in range(depth)]
