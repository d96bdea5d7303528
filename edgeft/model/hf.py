"""Hugging Face weights: a directory or hub id in safetensors becomes a stack of transformers' own blocks.

Tensors are read one at a time and packed at once (nf4 or int8, by bitsandbytes), so that the dense model never exists;
no pickle is ever opened, and no code from a model's repository is ever run.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edgeft import offline
from edgeft.errors import ModelError
from edgeft.model import ggml
from edgeft.model.header import LINEARS, NORMS
from edgeft.model.packed import Packed, PackedEmbedding, PackedHead, PackedLinear, _scratch
from edgeft.model.stack import Stack, _set

# transformers' model type → the architecture that llama.cpp runs it as
MODEL_TYPES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # what llama.cpp computes in the same way
DTYPES = {"F32": (torch.float32, ggml.F32), "F16": (torch.float16, ggml.F16), "BF16": (torch.bfloat16, ggml.BF16)}
MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format
MAX_TENSORS = 1 << 18
MAX_JSON_BYTES = 64 << 20  # the largest honest tokenizer.json has about 35 MiB
LARGEST = 1 << 31  # of any number in config.json
INDEX = "model.safetensors.index.json"
# a hub repository may hold the same weights several times over; only these files are fetched
HUB_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors", INDEX),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*"),
)


# ---------------------------------------------------------------- files


@dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    file: Path
    dtype: str  # as safetensors names it: F32, F16, BF16 …
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int


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
    from edgeft.model.tokenizer import go_offline_if_cut_off

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


def read_config(folder: Path) -> Any:
    """transformers' configuration, of a model that this program can train and export."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json", "give the folder that transformers' save_pretrained wrote")
    try:
        kind = _json(folder / "config.json").get("model_type")
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


def _json(file: Path) -> Any:
    """A file of JSON, of a size that such files have."""
    if file.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
    try:
        return json.loads(file.read_text("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


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


def _header(file: Path) -> Iterator[tuple[str, Place]]:
    """The tensors of one safetensors file; every offset is checked against the file's size."""
    bad = ModelError(f"{file} is damaged or cut short", "download or copy it again")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise bad
            entries = json.loads(stream.read(length))
            if not isinstance(entries, dict) or len(entries) > MAX_TENSORS:
                raise bad
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}", "download or copy the model again") from None
    except (ValueError, RecursionError):
        raise bad from None
    try:
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if any(type(n) is not int or n < 0 for n in (start, end, *shape)):
                raise bad
            if not start <= end <= size - 8 - length:
                raise bad
            if entry["dtype"] in DTYPES and end - start != DTYPES[entry["dtype"]][0].itemsize * math.prod(shape):
                raise bad
            yield name, Place(file, entry["dtype"], shape, 8 + length + start, end - start)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise bad from None


class Weights:
    """The tensors of a directory, by transformers' names without the leading `model.`, mapped and not read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = self._files()
        self.stored = {name: place for file in self.files for name, place in _header(file)}  # by the files' own names
        self.prefix = "model." if any(name.startswith("model.") for name in self.stored) else ""
        self.places = {name.removeprefix("model."): place for name, place in self.stored.items()}

    def _files(self) -> list[Path]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                names = sorted({str(name) for name in _json(index)["weight_map"].values()})
            except (ValueError, KeyError, AttributeError, TypeError):
                raise ModelError(f"{index} cannot be read", "download or copy the model again") from None
            if any(Path(name).name != name for name in names):  # a shard lies in the folder itself, never elsewhere
                raise ModelError(f"{index} points outside its folder")
            return [self.folder / name for name in names]
        if (self.folder / "model.safetensors").is_file():
            return [self.folder / "model.safetensors"]
        if list(self.folder.glob("*.bin")) or list(self.folder.glob("*.pth")):
            raise ModelError(
                f"{self.folder} has its weights only as pickles, which can run code when they are opened",
                "convert them with save_pretrained(…, safe_serialization=True), or take a safetensors version",
            )
        raise ModelError(
            f"{self.folder} has no model.safetensors", "give the folder that transformers' save_pretrained wrote"
        )

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def place(self, name: str, shape: tuple[int, ...]) -> Place:
        place = self.places.get(name)
        if place is None:
            raise ModelError(f"{self.folder} lacks the tensor {name}", "download or copy the model again")
        if place.shape != shape:
            raise ModelError(f"{self.folder}: {name} is {place.shape}, not {shape} as config.json says")
        if place.dtype not in DTYPES:
            raise ModelError(f"{self.folder}: {name} is of type {place.dtype}", f"supported: {', '.join(DTYPES)}")
        return place

    def packed(self, name: str, shape: tuple[int, int]) -> Packed:
        """A matrix as it lies in the file: its pages are read when its rows are."""
        place = self.place(name, shape)
        data = np.memmap(place.file, np.uint8, "r", place.offset, (place.nbytes,))
        return Packed(data, DTYPES[place.dtype][1], *shape)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A copy in the file's own type."""
        place = self.place(name, shape)
        with place.file.open("rb") as stream:
            stream.seek(place.offset)
            data = bytearray(stream.read(place.nbytes))
        return torch.frombuffer(data, dtype=DTYPES[place.dtype][0]).view(shape)


# ---------------------------------------------------------------- packing by bitsandbytes


class _Held(Packed):
    """In memory, in a packing that ggml does not know."""

    def copy(self) -> torch.Tensor:
        return self.dense().clone()


class Nf4(_Held):
    """4-bit normal floats in blocks of 64 with a float32 scale each, as QLoRA's."""

    def __init__(self, weight: torch.Tensor) -> None:
        from bitsandbytes import functional

        self.quantised, self.state = functional.quantize_4bit(weight.float(), quant_type="nf4")
        rows, cols = weight.shape
        super().__init__(self.quantised.numpy(), -1, rows, cols)

    def dense(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        from bitsandbytes import functional

        # bitsandbytes has no way to unpack into a given buffer on a CPU
        return functional.dequantize_4bit(self.quantised, self.state)[start:stop]


class Int8(_Held):
    """8-bit rows with a float32 scale each, as LLM.int8's; inputs stay float32, and so their gradient is exact."""

    def __init__(self, weight: torch.Tensor) -> None:
        from bitsandbytes import functional

        values, scale, _ = functional.int8_vectorwise_quant(weight.half())
        self.values, self.scale = values, scale.float()[:, None] / 127
        super().__init__(values.numpy(), -1, *weight.shape)

    def dense(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        part = self.values[start:stop]
        out = _scratch.take(*part.shape)
        return out.copy_(part).mul_(self.scale[start:stop])


# ---------------------------------------------------------------- the stack


def load_hf(path_or_hub_id: str, frozen: str = "auto") -> Stack:
    """A stack over a Hugging Face directory or hub id; frozen: auto (= nf4), nf4, int8 or dense (float32)."""
    from transformers import AutoModel

    folder = resolve(path_or_hub_id)
    config = read_config(folder)
    weights = Weights(folder)
    _check_shapes(config, weights)
    with torch.device("meta"):
        model = AutoModel.from_config(config, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    for number, block in enumerate(model.layers):
        prefix = f"layers.{number}."
        for path, _ in LINEARS.values():
            module = block.get_submodule(path)
            _set(block, path, _linear(weights, prefix + path, module, frozen, folder))
        for path in NORMS:
            if prefix + path + ".weight" in weights:
                module = block.get_submodule(path)
                module.weight = _frozen(weights.tensor(prefix + path + ".weight", tuple(module.weight.shape)))
    model.norm.weight = _frozen(weights.tensor("norm.weight", (config.hidden_size,)))
    model.rotary_emb = type(model.rotary_emb)(config=config)  # its frequencies are computed, not stored
    model.embed_tokens = None  # the mapped embedding stands in its place
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if meta:
        raise ModelError(f"{folder} lacks {len(meta)} tensors, for example {meta[0]}", "download or copy it again")
    shape = (int(config.vocab_size), int(config.hidden_size))
    embed = weights.packed("embed_tokens.weight", shape)
    head = embed if config.tie_word_embeddings else weights.packed("lm_head.weight", shape)
    return Stack(
        MODEL_TYPES[config.model_type], config, model, PackedEmbedding(embed), PackedHead(head), path_or_hub_id
    )


def _check_shapes(config: Any, weights: Weights) -> None:
    """No number in config.json is larger than the weights bear out; ends with the first block that they lack."""
    width, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    query, key = config.num_attention_heads * head, (config.num_key_value_heads or config.num_attention_heads) * head
    shapes = {"q": (query, width), "k": (key, width), "v": (key, width), "o": (width, query)}
    shapes |= {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    weights.place("embed_tokens.weight", (config.vocab_size, width))
    for number in range(config.num_hidden_layers):
        for tensor, (path, _) in LINEARS.items():
            weights.place(f"layers.{number}.{path}.weight", shapes[tensor])


def _frozen(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values.float(), requires_grad=False)


def _linear(weights: Weights, name: str, wanted: Any, frozen: str, folder: Path) -> nn.Module:
    shape = (wanted.out_features, wanted.in_features)
    weight = weights.tensor(f"{name}.weight", shape)
    if (f"{name}.bias" in weights) != (wanted.bias is not None):
        state = "has" if wanted.bias is None else "lacks"
        raise ModelError(f"{folder} {state} {name}.bias, against its config.json", "download or copy it again")
    bias = None if wanted.bias is None else weights.tensor(f"{name}.bias", shape[:1]).float()
    if frozen == "dense":
        linear = nn.Linear(shape[1], shape[0], bias=False, device="meta")
        linear.weight = _frozen(weight)
        if bias is not None:
            linear.bias = _frozen(bias)
        return linear
    if shape[1] % 2:
        raise ModelError(
            f"{name} has rows of {shape[1]} values, which cannot be packed", "use `--set model.frozen=dense`"
        )
    return PackedLinear(Int8(weight) if frozen == "int8" else Nf4(weight), bias)
