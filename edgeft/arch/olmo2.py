"""`olmo2`: norms only after attention and feed-forward, and over all heads of q and of k together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgeft.arch.base import Architecture, Norm
from edgeft.errors import ModelError

if TYPE_CHECKING:
    from edgeft.formats.gguf import GGUF


class Olmo2(Architecture):
    name = "olmo2"
    title = "OLMo 2"
    model_types = ("olmo2",)
    config_class = "Olmo2Config"
    model_class = "Olmo2ForCausalLM"
    norms = (
        Norm("post_attention_layernorm", "post_attention_norm", "attention_out"),
        Norm("post_feedforward_layernorm", "post_ffw_norm", "ffn_out"),
        Norm("self_attn.q_norm", "attn_q_norm", "q", whole=True),
        Norm("self_attn.k_norm", "attn_k_norm", "k", whole=True),
    )

    def values(self, gguf: GGUF) -> dict[str, Any]:
        if gguf.get("attention.sliding_window", 0):
            raise ModelError(f"{gguf.path.name} has windows (OLMo 3), which are not supported", "use an OLMo 2 model")
        return super().values(gguf)
