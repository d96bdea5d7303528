"""A small random model of every architecture, as a Hugging Face folder and as a GGUF file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from edgeft import arch
from edgeft.export import hf
from edgeft.export.convert import hf_to_gguf
from edgeft.formats.gguf import GGUF
from tests.support.models import random_hf
from tests.support.rows import encoded

COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TURNS = ["sliding_attention", "full_attention"] * 2
PHI = {"pad_token_id": 0, "head_dim": 16}
PARTIAL = {"rope_theta": 10000.0, "partial_rotary_factor": 0.75}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5]}
LONG = PARTIAL | FACTORS | {"rope_type": "longrope", "original_max_position_embeddings": 16}
SHORT = LONG | {"original_max_position_embeddings": 512}  # llama.cpp's contexts have 256 tokens at least
# architecture (and a variant of it) → transformers' family and what its configuration adds
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 16}),
    "qwen3": ("Qwen3", {}),
    "gemma2": (
        "Gemma2",
        {
            "layer_types": TURNS,
            "sliding_window": 7,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma3": ("Gemma3", {"layer_types": TURNS, "sliding_window": 7, "query_pre_attn_scalar": 32}),
    "gemma3-images": ("Gemma3", {"layer_types": TURNS, "sliding_window": 7, "query_pre_attn_scalar": 32}),
    "gemma3-linear": (
        "Gemma3",
        {
            "layer_types": TURNS,
            "sliding_window": 7,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        },
    ),
    "phi3": ("Phi3", PHI | {"rope_parameters": PARTIAL | {"rope_type": "default"}}),
    "phi3-long": ("Phi3", PHI | {"original_max_position_embeddings": 16, "rope_parameters": LONG}),
    "phi3-short": (
        "Phi3",
        PHI | {"original_max_position_embeddings": 512, "max_position_embeddings": 1024, "rope_parameters": SHORT},
    ),
    "granite": (
        "Granite",
        {
            "head_dim": 16,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
        },
    ),
    "granite-biases": (
        "Granite",
        {"head_dim": 16, "attention_multiplier": 0.1, "attention_bias": True, "mlp_bias": True},
    ),
    "olmo2": ("Olmo2", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {"head_dim": 16, "pad_token_id": 0}),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4, "head_dim": 16}),
    "ernie4_5": ("Ernie4_5", {}),
    "exaone": ("Llama", {"head_dim": 16}),
    "minicpm": (
        "Granite",
        {
            "head_dim": 16,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "logits_scaling": 4.0,
        },
    ),
}


def as_exaone(folder: Path) -> Path:
    """A LLaMA folder as EXAONE 3 has it."""
    values = json.loads((folder / "config.json").read_text())
    own = {"model_type": "exaone", "num_layers": values.pop("num_hidden_layers"), "activation_function": "silu"}
    own |= {"layer_norm_epsilon": values.pop("rms_norm_eps"), "rope_theta": values.pop("rope_parameters")["rope_theta"]}
    del values["hidden_act"]
    (folder / "config.json").write_text(json.dumps(values | own))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("model.")
        for theirs, ours in arch.get("exaone").renamed:
            name = name.replace(ours, theirs)
        tensors[name] = tensor
    assert "transformer.h.3.mlp.c_fc_1.weight" in tensors
    save_file(tensors, folder / "model.safetensors")
    return folder


def as_minicpm(folder: Path) -> Path:
    """A Granite folder as MiniCPM has it."""
    values = json.loads((folder / "config.json").read_text())
    own = {"model_type": "minicpm", "scale_emb": values.pop("embedding_multiplier"), "dim_model_base": 16}
    own |= {
        "scale_depth": values.pop("residual_multiplier") * 2,
        "rope_theta": values.pop("rope_parameters")["rope_theta"],
    }
    del values["attention_multiplier"], values["logits_scaling"]
    (folder / "config.json").write_text(json.dumps(values | own))
    return folder


def beside_images(folder: Path) -> Path:
    """A text model of Gemma 3 as it is in folders of the models that see images, too."""
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


OWN_FOLDERS: dict[str, Callable[[Path], Path]] = {
    "exaone": as_exaone,
    "minicpm": as_minicpm,
    "gemma3-images": beside_images,
}
# as many blocks as llama.cpp knows this one by
DEEP: dict[str, tuple[str, dict[str, Any]]] = {
    "exaone4-windows": (
        "Exaone4",
        {
            "head_dim": 16,
            "num_hidden_layers": 64,
            "sliding_window": 7,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
        },
    )
}
SYSTEM, PASSAGE = [1, *range(5, 16)], list(range(100, 120))
# longer than the windows, and forked inside them
ROWS = [
    encoded([*SYSTEM, *PASSAGE, 40, 41, 42, 43, 44], 33),
    encoded([*SYSTEM, *PASSAGE, 40, 50, 51], 33),
    encoded([*SYSTEM, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70], 18),
]


class Families:
    """Made when they are asked for; tiny: a GGUF file whose tokenizer they get."""

    def __init__(self, parent: Path, tiny: Path) -> None:
        self.parent, self.tokenizer = parent, parent / "tokenizer"
        self.tokenizer.mkdir()
        file = GGUF.open(tiny)
        hf._tokenizer_files(file, arch.of_gguf(file).config(file), self.tokenizer)
        self.done: dict[str, tuple[Path, Path]] = {}

    def __call__(self, kind: str) -> tuple[Path, Path]:
        """(Hugging Face folder, GGUF file)."""
        if kind not in self.done:
            family, options = {**KINDS, **DEEP}[kind]
            name = kind.replace("phi3", "phi")  # llama.cpp wants certain tokens of a model that is named phi3
            folder = random_hf(self.parent / name, family, half=True, **COMMON | options)
            if kind in OWN_FOLDERS:
                shutil.copytree(folder, self.parent / f"{name}-own")
                folder = OWN_FOLDERS[kind](self.parent / f"{name}-own")
            shutil.copytree(self.tokenizer, folder, dirs_exist_ok=True)
            self.done[kind] = folder, hf_to_gguf(str(folder), self.parent / f"{name}.gguf")
        return self.done[kind]


def in_transformers(folder: Path) -> Path:
    """The same model in a folder that transformers reads without code from elsewhere."""
    return folder.with_name(folder.name.removesuffix("-own"))
