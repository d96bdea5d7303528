"""Hugging Face folders and hub ids: where they lie, and the hash of their weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from edgeft.errors import ModelError
from edgeft.host import offline
from edgeft.host.cache import file_hash


def model_id(path: str) -> str:
    """Names the weights by all of their bytes, wherever they lie."""
    source = Path(path).expanduser()
    if source.is_file():
        files = [source]
    elif not source.is_dir() and (path.count("/") != 1 or path.startswith((".", "/", "~"))):
        return hashlib.sha256(path.encode()).hexdigest()  # there is nothing; whoever opens it will say so
    else:
        folder = source
        if not source.is_dir():
            # a hub id is its folder in the hub's cache

            folder = resolve(path)
        files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("config.json"))
    return hashlib.sha256("|".join(file_hash(file) for file in files).encode()).hexdigest()


MAX_JSON_BYTES = 64 << 20  # the largest honest tokenizer.json has about 35 MiB

INDEX = "model.safetensors.index.json"

# a hub repository may hold the same weights several times over; only these files are fetched
HUB_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors", INDEX),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*"),
)


def resolve(path_or_hub_id: str) -> Path:
    """The local directory of a model; a hub id is downloaded once (HF_HUB_OFFLINE=1: only what is there is used)."""
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{path} is neither a GGUF file nor a folder", "give a .gguf file or a Hugging Face folder")
    if path_or_hub_id.startswith((".", "/", "~")) or path_or_hub_id.count("/") != 1:
        raise ModelError(
            f"there is no model folder {path_or_hub_id}", "check the path; a hub id has the form owner/name"
        )
    from edgeft.host.offline import go_offline_if_cut_off

    go_offline_if_cut_off()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path_or_hub_id, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the hub's client raises what its HTTP library raises, and errors of its own
        if offline.on():
            raise ModelError(
                f"{path_or_hub_id} is neither a file nor in the hub's cache here, and this is offline", offline.HINT
            ) from None
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(
            f"cannot fetch {path_or_hub_id} from the hub: {reason}",
            f"there is no folder of this name either; check the id, the network, and your access at "
            f"https://huggingface.co/{path_or_hub_id}",
        ) from None


def read_json_file(file: Path) -> Any:
    """A file of JSON, of a size that such files have."""
    if file.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
    try:
        return json.loads(file.read_text("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def open_tokenizer_file(folder: Path) -> Any:
    """transformers' tokenizer with tokenizer.json taken as it is.

    From transformers 5 on AutoTokenizer rebuilds it by class: GPT2Tokenizer loses SmolLM's split at digits,
    LlamaTokenizer the space after special tokens, and token ids are then no longer those of llama.cpp.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind: Any = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        for file in folder.glob("*.json"):
            if not file.name.endswith(".index.json") and file.stat().st_size > MAX_JSON_BYTES:
                raise ValueError(f"{file.name} has more than {MAX_JSON_BYTES >> 20} MiB")
        return kind.from_pretrained(str(folder), trust_remote_code=False)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # transformers raises what its parsers raise; a panic in Rust is no Exception
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ModelError(
            f"cannot load the tokenizer of {folder}: {reason}", "the folder needs tokenizer.json"
        ) from None
