"""The configuration of a Hugging Face folder, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeft.errors import ModelError
from edgeft.formats.hub import read_json_file

# transformers' model type → the architecture that llama.cpp runs it as
MODEL_TYPES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # what llama.cpp computes in the same way

LARGEST = 1 << 31  # of any number in config.json


def read_config(folder: Path) -> Any:
    """transformers' configuration, of a model that this program can train and export."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json", "give the folder that transformers' save_pretrained wrote")
    try:
        kind = read_json_file(folder / "config.json").get("model_type")
        if kind in MODEL_TYPES:
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # transformers checks the values with many kinds of exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{folder / 'config.json'} cannot be read: {reason}", "download or copy it again") from None
    if kind not in MODEL_TYPES:
        raise ModelError(
            f"{folder} is a model of type `{kind}`, which is not supported",
            f"supported: {', '.join(MODEL_TYPES)} (LLaMA 1 to 3, Mistral, SmolLM, TinyLlama, Qwen 2, 2.5 and 3)",
        )
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"{folder} holds weights that are quantised already",
            "use the original weights with `--set model.frozen=nf4`, or a GGUF file",
        )
    _check_numbers(config, folder)
    rope = config.rope_parameters["rope_type"]
    if rope not in ROPE_TYPES:
        raise ModelError(f"{folder} has the rope scaling `{rope}`", f"supported: {', '.join(ROPE_TYPES)}")
    return config


def _check_numbers(config: Any, folder: Path) -> None:
    """Sizes that can be, before anything of that size is made; the weights then say whether they are true."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    sizes = {name: getattr(config, name, None) for name in names}
    sizes["max_position_embeddings"] = getattr(config, "max_position_embeddings", None)
    sizes["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or sizes["num_attention_heads"]
    for name, value in sizes.items():
        if type(value) is not int or not 0 < value <= LARGEST:
            raise ModelError(f"{folder} has the {name} {str(value)[:40]}", "download or copy it again")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if type(head) is not int or head < 2 or head % 2 or config.num_attention_heads % sizes["num_key_value_heads"]:
        raise ModelError(f"{folder} has heads of {str(head)[:40]} values", "download or copy it again")
