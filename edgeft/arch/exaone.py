"""`exaone`: a LLaMA block under other names; its GGUF files hold rows of q and k in the order of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeft.arch.base import Architecture, read_hf_values


class Exaone(Architecture):
    name = "exaone"
    title = "EXAONE 3"
    model_types = ("exaone",)
    config_class = "LlamaConfig"  # transformers itself has no class for it: a GGUF file is exported as a llama folder
    model_class = "LlamaForCausalLM"
    renamed = (
        ("transformer.h.", "layers."),
        ("transformer.wte.", "embed_tokens."),
        ("transformer.ln_f.", "norm."),
        (".ln_1.", ".input_layernorm."),
        (".ln_2.", ".post_attention_layernorm."),
        (".attn.attention.out_proj.", ".self_attn.o_proj."),
        (".attn.attention.", ".self_attn."),
        (".mlp.c_fc_0.", ".mlp.gate_proj."),
        (".mlp.c_fc_1.", ".mlp.up_proj."),
        (".mlp.c_proj.", ".mlp.down_proj."),
    )

    def hf_config(self, folder: Path) -> Any:
        from transformers import LlamaConfig

        names = {
            "num_layers": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation_function": "hidden_act",
        }
        return LlamaConfig(**{names.get(key, key): value for key, value in read_hf_values(folder).items()})
