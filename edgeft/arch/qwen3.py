"""`qwen3`: a norm over each head of q and k, and no biases."""

from __future__ import annotations

from edgeft.arch.base import Architecture, Norm


class Qwen3(Architecture):
    name = "qwen3"
    title = "Qwen 3"
    model_types = ("qwen3",)
    config_class = "Qwen3Config"
    model_class = "Qwen3ForCausalLM"
    norms = (
        *Architecture.norms,
        Norm("self_attn.q_norm", "attn_q_norm", "q"),
        Norm("self_attn.k_norm", "attn_k_norm", "k"),
    )
