"""`ernie4_5`: a LLaMA block that rotates neighbours, in GGUF files and in transformers."""

from __future__ import annotations

from edgeft.arch.base import Architecture


class Ernie45(Architecture):
    name = "ernie4_5"
    title = "ERNIE 4.5"
    model_types = ("ernie4_5",)
    config_class = "Ernie4_5Config"
    model_class = "Ernie4_5ForCausalLM"
    neighbours = True
