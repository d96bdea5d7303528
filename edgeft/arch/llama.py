"""`llama`: LLaMA 1 to 3 and all that is built like it; its GGUF files hold rows of q and k as neighbouring pairs."""

from __future__ import annotations

from edgeft.arch.base import Architecture


class Llama(Architecture):
    name = "llama"
    title = "LLaMA 1 to 3, Mistral, SmolLM, TinyLlama"
    model_types = ("llama", "mistral")
    config_class = "LlamaConfig"
    model_class = "LlamaForCausalLM"
    biases = tuple(Architecture.linears)
    bias_flags = (("attention_bias", ("q", "k", "v", "o")), ("mlp_bias", ("gate", "up", "down")))
    interleaved = ("q", "k")
