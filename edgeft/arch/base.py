"""`Architecture`: everything that one model family differs by from another; no torch, and transformers only when asked.

Its defaults are those of a LLaMA block; a file in this folder states the differences, and `edgeft/arch/__init__.py`
lists it. A number from a header is used only after it was checked against the shapes of the tensors.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from edgeft.errors import ExportError, ModelError
from edgeft.formats.source import read_json_file

if TYPE_CHECKING:
    from edgeft.formats.gguf import GGUF


LARGEST = 1 << 31  # of any number in a header
AGAIN = "download or copy it again"


def whole(gguf: GGUF, key: str, default: int | None = None, low: int = 1, high: int = LARGEST) -> int:
    """An integer of `<architecture>.<key>`."""
    value = gguf.need(key) if default is None else gguf.get(key, default)
    if type(value) is not int or not low <= value <= high:
        raise _odd(gguf, key, value)
    return value


def real(gguf: GGUF, key: str, default: float | None = None) -> float:
    """A number above 0."""
    value = gguf.need(key) if default is None else gguf.get(key, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise _odd(gguf, key, value)
    return float(value)


def _odd(gguf: GGUF, key: str, value: object) -> ModelError:
    return ModelError(f"{gguf.path.name}: {gguf.arch}.{key} is {str(value)[:80]}, which is not supported", AGAIN)


def read_rope(gguf: GGUF, head: int, partial: bool = False) -> dict[str, Any]:
    """transformers' rope parameters; frequency factors in the file (LLaMA 3) are applied when it is loaded.

    partial: only the first values of each head may be rotated.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": real(gguf, "rope.freq_base", 10000.0)}
    kind = gguf.get("rope.scaling.type", "none")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": real(gguf, "rope.scaling.factor", 1.0)}
    elif kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": real(gguf, "rope.scaling.factor", 1.0),
            "original_max_position_embeddings": whole(gguf, "rope.scaling.original_context_length"),
        }
    elif kind != "none":
        raise ModelError(f"{gguf.path.name} has the rope scaling `{str(kind)[:40]}`, which is not supported")
    turned = whole(gguf, "rope.dimension_count", head, low=2)  # values of a head
    if turned > head or turned % 2 or (turned != head and not partial):
        what = f"rotates only a part of each head ({turned} of {head} values), which is not supported"
        raise ModelError(f"{gguf.path.name} {what}")
    return rope if turned == head else rope | {"partial_rotary_factor": turned / head}


def plain_rotation(values: dict[str, Any]) -> bool:
    """A rotation that edgeft computes itself; others are left to transformers."""
    rope = values["rope_parameters"]
    every = [rope] if "rope_type" in rope else rope.values()
    return all(one["rope_type"] in ("default", "linear", "longrope") for one in every)


def read_hf_values(folder: Path) -> dict[str, Any]:
    """Of a configuration for which transformers has no class: what a class of it may be given."""
    values = read_json_file(folder / "config.json")
    unread = ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype")
    return {key: value for key, value in values.items() if key not in unread}


def window_by_type(config: Any, block: int) -> int:
    """`Architecture.window` where transformers' configuration names the type of each block."""
    return int(config.sliding_window) if config.layer_types[block] == "sliding_attention" else 0


_NAME = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class Sizes:
    depth: int  # blocks
    width: int  # of the residual stream
    query: int  # values of all query heads of a token
    key: int  # of all key heads
    ffn: int
    vocabulary: int
    head: int  # values of one head


@dataclass(frozen=True)
class Linear:
    """One of the seven linears that engine, recipes and planner know, and where files hold it."""

    path: str  # module inside a block; of a shared tensor: below the module that transformers has in their place
    gguf: str  # name inside a GGUF block
    shape: Callable[[Sizes], tuple[int, int]]  # (outputs, inputs)
    first_row: Callable[[Sizes], int] | None = None  # in a tensor that several linears share; None: has its own

    @property
    def stored(self) -> str:
        """The module as Hugging Face folders name it."""
        return self.path if self.first_row is None else self.path.rpartition(".")[0]

    @property
    def shared(self) -> bool:
        return self.first_row is not None

    def rows(self, sizes: Sizes) -> slice:
        """Of the stored tensor."""
        first = 0 if self.first_row is None else self.first_row(sizes)
        return slice(first, first + self.shape(sizes)[0])


@dataclass(frozen=True)
class Norm:
    """An RMS norm. In a GGUF file, and in the product, its weight is the one of transformers plus `offset`."""

    path: str
    gguf: str
    # attention, ffn: before these; attention_out, ffn_out: of their result, before it is added to the residual stream;
    # q, k: over each head; final: before the head
    place: str
    offset: float = 0.0
    whole: bool = False  # q, k: over all heads together

    def size(self, sizes: Sizes) -> int:
        if self.whole:
            return sizes.query if self.place == "q" else sizes.key
        return sizes.head if self.place in ("q", "k") else sizes.width


@dataclass(frozen=True)
class Scales:
    """Constant factors; and caps c, by which x becomes c · tanh(x / c), 0 for none."""

    embedding: float = 1.0
    residual: float = 1.0  # of what attention and feed-forward add to the residual stream
    logits: float = 1.0
    scores: float | None = None  # of attention; None: 1 / √head width
    score_cap: float = 0.0
    logit_cap: float = 0.0


class Architecture:
    name: ClassVar[str]  # general.architecture of its GGUF files, and the prefix of their keys
    title: ClassVar[str]  # the models that people know it by
    model_types: ClassVar[tuple[str, ...]]  # of transformers; the first is the one that `config_class` writes
    config_class: ClassVar[str]  # of transformers
    model_class: ClassVar[str]

    linears: ClassVar[Mapping[str, Linear]] = {
        "q": Linear("self_attn.q_proj", "attn_q", lambda s: (s.query, s.width)),
        "k": Linear("self_attn.k_proj", "attn_k", lambda s: (s.key, s.width)),
        "v": Linear("self_attn.v_proj", "attn_v", lambda s: (s.key, s.width)),
        "o": Linear("self_attn.o_proj", "attn_output", lambda s: (s.width, s.query)),
        "gate": Linear("mlp.gate_proj", "ffn_gate", lambda s: (s.ffn, s.width)),
        "up": Linear("mlp.up_proj", "ffn_up", lambda s: (s.ffn, s.width)),
        "down": Linear("mlp.down_proj", "ffn_down", lambda s: (s.width, s.ffn)),
    }
    norms: ClassVar[tuple[Norm, ...]] = (
        Norm("input_layernorm", "attn_norm", "attention"),
        Norm("post_attention_layernorm", "ffn_norm", "ffn"),
    )
    final_norm: ClassVar[Norm] = Norm("norm", "output_norm", "final")  # of the model, not of a block
    biases: ClassVar[tuple[str, ...]] = ()  # linears for which llama.cpp reads a bias (tried: each changes the logits)
    bias_flags: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]] = ()  # (key of config.json, linears that it is for)
    interleaved: ClassVar[tuple[str, ...]] = ()  # linears whose rows GGUF files hold in the order of `row_order`
    rope_types: ClassVar[tuple[str, ...]] = ("default", "linear", "llama3", "yarn")  # which llama.cpp computes alike
    gate: ClassVar[str] = "silu"  # the activation between gate and up, as transformers names it
    partial_rotation: ClassVar[bool] = False  # files may rotate only the first values of each head
    neighbours: ClassVar[bool] = False  # transformers, too, rotates neighbours and not halves of a head

    # (how a Hugging Face folder names a tensor, how transformers would), replaced in this order, where they differ
    renamed: ClassVar[tuple[tuple[str, str], ...]] = ()

    def hf_config(self, folder: Path) -> Any:
        """transformers' configuration of a Hugging Face folder."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(str(folder), trust_remote_code=False)

    def scales(self, config: Any) -> Scales:
        return Scales()

    def window(self, config: Any, block: int) -> int:
        """Tokens that one sees, itself the last of them; 0: all before it."""
        return 0

    def rotation(self, config: Any, block: int) -> str | None:
        """The key in `rope_parameters` of this block's rotation; "": all blocks have the same; None: it has none."""
        return ""

    def rope(self, config: Any) -> dict[str, Any]:
        """The rope parameters, or those of blocks without a window where these have their own."""
        parameters: dict[str, Any] = config.rope_parameters
        return parameters if "rope_type" in parameters else parameters["full_attention"]

    def norm_at(self, place: str) -> Norm | None:
        return next((norm for norm in self.norms if norm.place == place), None)

    def sizes(self, config: Any) -> Sizes:
        """From a transformers configuration."""
        heads = config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        return Sizes(
            depth=config.num_hidden_layers,
            width=config.hidden_size,
            query=heads * head,
            key=(getattr(config, "num_key_value_heads", None) or heads) * head,
            ffn=config.intermediate_size,
            vocabulary=config.vocab_size,
            head=head,
        )

    def stored_shapes(self, sizes: Sizes) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of a block's GGUF tensors; linears that share one are rows of it, in Hugging Face folders
        as in GGUF files."""
        shapes: dict[str, tuple[int, int]] = {}
        for linear in self.linears.values():
            outputs, inputs = linear.shape(sizes)
            shapes[linear.gguf] = (shapes.get(linear.gguf, (0, 0))[0] + outputs, inputs)
        return shapes

    def factors(self, config: Any) -> dict[str, list[float]]:
        """Tensors of a GGUF file that a configuration holds as numbers."""
        return {}

    def row_order(self, tensor: str, sizes: Sizes) -> np.ndarray | None:
        """Rows in a GGUF file → their order in transformers, which rotates halves of a head and not neighbours."""
        if tensor not in self.interleaved:
            return None
        rows = self.linears[tensor].shape(sizes)[0]
        return np.arange(rows).reshape(-1, sizes.head // 2, 2).swapaxes(1, 2).reshape(-1)

    def gguf_name(self, name: str) -> tuple[str, str]:
        """layers.3.mlp.up_proj.weight → (blk.3.ffn_up.weight, up); for a norm, its GGUF name instead of a tensor."""
        match = _NAME.fullmatch(name)
        if match:
            number, module, kind = match.groups()
            for tensor, linear in self.linears.items():
                if linear.path == module:
                    return f"blk.{number}.{linear.gguf}.{kind}", tensor
            for norm in self.norms:
                if norm.path == module and kind == "weight":
                    return f"blk.{number}.{norm.gguf}.weight", norm.gguf
        hint = "export with the base model the run was trained on"
        raise ExportError(f"there is no place for {name} in a `{self.name}` file", hint)

    def norm_offset(self, gguf_name: str) -> float:
        return next((norm.offset for norm in self.norms if norm.gguf == gguf_name), 0.0)

    def values(self, gguf: GGUF) -> dict[str, Any]:
        """The keywords of a transformers configuration, checked against the shapes of the tensors."""
        heads, width = whole(gguf, "attention.head_count"), whole(gguf, "embedding_length")
        keys = whole(gguf, "attention.head_count_kv", heads)
        head = whole(gguf, "attention.key_length", width // heads, low=2)
        if heads % keys or head % 2 or gguf.get("attention.value_length", head) != head:
            what = f"{heads} heads of {head} values over {keys}"
            raise ModelError(f"{gguf.path.name} has {what}, which is not supported", AGAIN)
        if "token_embd.weight" not in gguf.tensors or "output_norm.weight" not in gguf.tensors:
            raise ModelError(f"{gguf.path.name} lacks its embedding or its last norm", AGAIN)
        values: dict[str, Any] = {
            "hidden_size": width,
            "num_hidden_layers": whole(gguf, "block_count"),
            "intermediate_size": whole(gguf, "feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": keys,
            "head_dim": head,
            "vocab_size": gguf.tensors["token_embd.weight"].shape[-1],
            "rms_norm_eps": real(gguf, "attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": whole(gguf, "context_length", 2048),
            "rope_parameters": read_rope(gguf, head, self.partial_rotation),
            "tie_word_embeddings": "output.weight" not in gguf.tensors,
            "pad_token_id": None,  # some configurations name one beyond a small vocabulary
            "attn_implementation": "eager",
        }
        for name in ("bos", "eos"):
            token = gguf.get_key(f"tokenizer.ggml.{name}_token_id")
            if type(token) is int:
                values[f"{name}_token_id"] = token
        self._check_tensors(gguf, self.sizes(SimpleNamespace(**values)))
        return values

    def config(self, gguf: GGUF) -> Any:
        """transformers' configuration of a GGUF file."""
        return getattr(importlib.import_module("transformers"), self.config_class)(**self.values(gguf))

    def header(self, config: Any) -> dict[str, str | int | float]:
        """The keys of a GGUF header for a transformers configuration; an int is a UINT32, a float a FLOAT32."""
        sizes, rope = self.sizes(config), self.rope(config)
        keys: dict[str, str | int | float] = {
            "block_count": sizes.depth,
            "context_length": config.max_position_embeddings,
            "embedding_length": sizes.width,
            "feed_forward_length": sizes.ffn,
            "attention.head_count": sizes.query // sizes.head,
            "attention.head_count_kv": sizes.key // sizes.head,
            "attention.key_length": sizes.head,
            "attention.value_length": sizes.head,
            "rope.dimension_count": int(sizes.head * rope.get("partial_rotary_factor", 1.0)),
            "vocab_size": sizes.vocabulary,
            "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            "rope.freq_base": float(rope["rope_theta"]),
        }
        if rope["rope_type"] in ("linear", "yarn"):
            keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
        if rope["rope_type"] == "yarn":
            usual = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "mscale": None, "mscale_all_dim": None}
            odd = [key for key, value in usual.items() if rope.get(key) not in (None, value)]
            if odd or rope.get("attention_factor") is not None:
                names = ", ".join(odd or ["attention_factor"])
                raise ExportError(f"llama.cpp does not read this model's yarn scaling: {names}")
            original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            keys["rope.scaling.original_context_length"] = int(original)
        return {f"{self.name}.{key}": value for key, value in keys.items()}

    def _check_tensors(self, gguf: GGUF, sizes: Sizes) -> None:
        """Tensors have the shapes that the header's numbers give them, so no number exceeds what the file holds."""

        def check(name: str, *shape: int, needed: bool = False) -> None:
            info = gguf.tensors.get(name)
            if info is None and needed:
                raise ModelError(f"{gguf.path.name} lacks the tensor {name}", AGAIN)
            if info is not None and info.shape != shape:
                raise ModelError(f"{gguf.path.name}: {name} is {info.shape}, not {shape} as its header says")

        tokens = gguf.described("tokenizer.ggml.tokens")[2] if "tokenizer.ggml.tokens" in gguf.records else 0
        if tokens > sizes.vocabulary:
            raise ModelError(f"{gguf.path.name} has {tokens} tokens, and {sizes.vocabulary} rows in its embedding")
        check("token_embd.weight", sizes.width, sizes.vocabulary)
        check("output.weight", sizes.width, sizes.vocabulary)
        check("output_norm.weight", sizes.width)
        check("rope_freqs.weight", sizes.head // 2)
        for block in range(sizes.depth):  # ends with the first that the file lacks
            for name, (outputs, inputs) in self.stored_shapes(sizes).items():
                check(f"blk.{block}.{name}.weight", inputs, outputs, needed=True)
                check(f"blk.{block}.{name}.bias", outputs)
            for norm in self.norms:
                check(f"blk.{block}.{norm.gguf}.weight", norm.size(sizes))

    def missing_biases(self, present: set[str], depth: int) -> tuple[dict[str, bool], list[str]]:
        """transformers has a bias on all linears of a flag or on none: (flags to set, biases to add as zeros)."""
        flags: dict[str, bool] = {}
        missing: list[str] = []
        for flag, tensors in self.bias_flags:
            names = [f"layers.{number}.{self.linears[t].path}.bias" for number in range(depth) for t in tensors]
            if present.intersection(names):
                flags[flag] = True
                missing += [name for name in names if name not in present]
        return flags, missing
