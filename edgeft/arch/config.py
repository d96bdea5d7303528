"""The configuration of a Hugging Face folder, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeft.arch import Architecture, of_model_type
from edgeft.arch.header import LARGEST
from edgeft.errors import ModelError
from edgeft.formats.hub import read_json_file


def read_config(folder: Path) -> tuple[Architecture, Any]:
    """A model that can be trained and exported: its architecture, and transformers' configuration."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json", "give the folder that transformers' save_pretrained wrote")
    try:
        architecture = of_model_type(read_json_file(folder / "config.json").get("model_type"), folder)
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except ModelError:
        raise
    except Exception as error:  # transformers checks the values with many kinds of exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{folder / 'config.json'} cannot be read: {reason}", "download or copy it again") from None
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"{folder} holds weights that are quantised already",
            "use the original weights with `--set model.frozen=nf4`, or a GGUF file",
        )
    _check_numbers(config, folder)
    rope = config.rope_parameters["rope_type"]
    if rope not in architecture.rope_types:
        raise ModelError(f"{folder} has the rope scaling `{rope}`", f"supported: {', '.join(architecture.rope_types)}")
    return architecture, config


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
