"""`qwen2`: biases on q, k and v, always."""

from __future__ import annotations

from edgeft.arch.base import Architecture


class Qwen2(Architecture):
    name = "qwen2"
    title = "Qwen 2 and 2.5"
    model_types = ("qwen2",)
    config_class = "Qwen2Config"
    model_class = "Qwen2ForCausalLM"
    biases = ("q", "k", "v")
