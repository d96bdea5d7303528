"""A model that can be trained, checked by its header before any work is done.

llama.cpp aborts on some headers and reads past the end on others: it is given only files that passed here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from edgeft.arch import Architecture, of_gguf, of_model_type
from edgeft.arch.base import LARGEST
from edgeft.config import exists
from edgeft.errors import ModelError
from edgeft.formats.gguf import GGUF
from edgeft.formats.source import is_gguf, is_hub_id, read_json_file
from edgeft.formats.vocabulary import check_vocabulary


def check_model(source: str, frozen: str = "auto") -> None:
    """Reads the header only. A hub id is not checked: it may have to be downloaded first."""
    if is_gguf(source):
        check_file(source)
        check_frozen(source, frozen)
    elif not exists(source) and not is_hub_id(source):
        hint = "give a GGUF file, a Hugging Face folder or a hub id (owner/name)"
        raise ModelError(f"there is no model at {source}", hint)


def check_file(path: str | Path) -> GGUF:
    """A file that may be handed to llama.cpp."""
    gguf = GGUF.open(path)
    check_vocabulary(gguf)
    of_gguf(gguf).values(gguf)
    return gguf


def check_frozen(path: str | Path, frozen: str) -> None:
    if frozen not in ("auto", "dense"):
        what = f"`model.frozen: {frozen}` is for Hugging Face weights; {Path(path).name} is packed already"
        raise ModelError(what, "use `--set model.frozen=auto` (as packed in the file) or `dense`")


MOST_BLOCKS = 10_000  # something of each is looked at before its weights are


def read_config(folder: Path) -> tuple[Architecture, Any]:
    """A model that can be trained and exported: its architecture, and transformers' configuration."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json", "give the folder that transformers' save_pretrained wrote")
    try:
        architecture = of_model_type(read_json_file(folder / "config.json").get("model_type"), folder)
        config = architecture.hf_config(folder)
    except ModelError:
        raise
    except Exception as error:  # transformers checks the values with many kinds of exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{folder / 'config.json'} cannot be read: {reason}", "download or copy it again") from None
    if getattr(config, "quantization_config", None):
        hint = "use the original weights with `--set model.frozen=nf4`, or a GGUF file"
        raise ModelError(f"{folder} holds weights that are quantised already", hint)
    _check_numbers(config, folder)
    _check_blocks(architecture, config, folder)
    gate = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", architecture.gate)
    if gate != architecture.gate:
        raise ModelError(f"{folder} has the activation `{gate}`; llama.cpp computes `{architecture.gate}` in its place")
    rope = architecture.rope(config)["rope_type"]
    if rope not in architecture.rope_types:
        raise ModelError(f"{folder} has the rope scaling `{rope}`", f"supported: {', '.join(architecture.rope_types)}")
    return architecture, config


def _check_blocks(architecture: Architecture, config: Any, folder: Path) -> None:
    """What the architecture reads of every block is there."""
    try:
        parameters, scales = config.rope_parameters, architecture.scales(config)
        for block in range(config.num_hidden_layers):
            kind = architecture.rotation(config, block)
            whole = type(architecture.window(config, block)) is int and "rope_type" in architecture.rope(config)
            if not whole or (kind and "rope_theta" not in parameters[kind]):
                raise ValueError
        if not all(scale is None or 0 <= scale < math.inf for scale in vars(scales).values()):
            raise ValueError
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError):
        hint = "download or copy it again"
        raise ModelError(f"{folder / 'config.json'} does not say how every block is computed", hint) from None


def _check_numbers(config: Any, folder: Path) -> None:
    """Plausible sizes, before anything is allocated; the weights are checked against them later."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    sizes = {name: getattr(config, name, None) for name in (*names, "max_position_embeddings")}
    sizes["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or sizes["num_attention_heads"]
    for name, value in sizes.items():
        if type(value) is not int or not 0 < value <= (MOST_BLOCKS if name == "num_hidden_layers" else LARGEST):
            raise ModelError(f"{folder} has the {name} {str(value)[:40]}", "download or copy it again")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if type(head) is not int or head < 2 or head % 2 or config.num_attention_heads % sizes["num_key_value_heads"]:
        raise ModelError(f"{folder} has heads of {str(head)[:40]} values", "download or copy it again")
