"""What a GGUF header says of a model, in the words of a transformers configuration; no torch and no weights.

A number is used only after it was found to be possible, and the shapes that it implies to be those of the tensors;
llama.cpp, which aborts on some headers and reads past the end on others, is given only files that passed here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from edgeft.errors import ModelError
from edgeft.formats.gguf import GGUF
from edgeft.formats.vocabulary import check_vocabulary

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# tensor → (its module inside a transformers block, its name inside a GGUF block)
LINEARS = {
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}
NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
# linears for which llama.cpp reads a bias, by architecture (tried: each changes the logits)
BIASES = {"llama": tuple(LINEARS), "qwen2": ("q", "k", "v"), "qwen3": ()}

LARGEST = 1 << 31  # of any number in a header


def check_file(path: str | Path) -> GGUF:
    """A file that may be handed to llama.cpp."""
    gguf = GGUF.open(path)
    check_vocabulary(gguf)
    header_values(gguf)
    return gguf


def check_architecture(gguf: GGUF) -> None:
    if gguf.arch not in ARCHITECTURES:
        raise ModelError(
            f"{gguf.path.name} is of architecture `{gguf.arch or 'unknown'}`, which is not supported",
            f"supported: {', '.join(ARCHITECTURES)} (LLaMA 1 to 3, Mistral, SmolLM, TinyLlama, Qwen 2, 2.5 and 3)",
        )
    if gguf.get("expert_count", 0):
        raise ModelError(
            f"{gguf.path.name} is a mixture of experts, which is not supported", "use a dense model of the same family"
        )


def check_frozen(path: str | Path, frozen: str) -> None:
    if frozen not in ("auto", "dense"):
        raise ModelError(
            f"`model.frozen: {frozen}` is for Hugging Face weights; {Path(path).name} is packed already",
            "use `--set model.frozen=auto` (as packed in the file) or `dense`",
        )


def _whole(gguf: GGUF, key: str, default: int | None = None, low: int = 1, high: int = LARGEST) -> int:
    """A whole number from the header, within limits."""
    found = gguf.need(key) if default is None else gguf.get(key, default)
    if type(found) is not int or not low <= found <= high:
        raise _odd(gguf, key, found)
    return found


def _real(gguf: GGUF, key: str, default: float | None = None) -> float:
    """A number from the header, above 0."""
    found = gguf.need(key) if default is None else gguf.get(key, default)
    if type(found) not in (int, float) or not 0 < found < math.inf:
        raise _odd(gguf, key, found)
    return float(found)


def _odd(gguf: GGUF, key: str, found: object) -> ModelError:
    return ModelError(
        f"{gguf.path.name} says that {gguf.arch}.{key} is {str(found)[:80]}, which is not supported",
        "download or copy it again",
    )


def _rope(gguf: GGUF, head_dim: int) -> dict[str, Any]:
    """transformers' rope parameters; frequency factors in the file (LLaMA 3) are put in afterwards."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _real(gguf, "rope.freq_base", 10000.0)}
    kind = gguf.get("rope.scaling.type", "none")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": _real(gguf, "rope.scaling.factor", 1.0)}
    elif kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": _real(gguf, "rope.scaling.factor", 1.0),
            "original_max_position_embeddings": _whole(gguf, "rope.scaling.original_context_length"),
        }
    elif kind != "none":
        raise ModelError(f"{gguf.path.name} has the rope scaling `{str(kind)[:40]}`, which is not supported")
    if gguf.get("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{gguf.path.name} rotates only a part of each head, which is not supported")
    return rope


def plain_rotation(values: dict[str, Any]) -> bool:
    """Rotations that edgeft computes itself; others are left to transformers."""
    return values["rope_parameters"]["rope_type"] in ("default", "linear")


def header_values(gguf: GGUF) -> dict[str, Any]:
    """The keywords of a transformers configuration."""
    check_architecture(gguf)
    heads, width = _whole(gguf, "attention.head_count"), _whole(gguf, "embedding_length")
    keys = _whole(gguf, "attention.head_count_kv", heads)
    head_dim = _whole(gguf, "attention.key_length", width // heads, low=2)
    if heads % keys or head_dim % 2 or gguf.get("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"{gguf.path.name} has {heads} heads of {head_dim} values over {keys}, which is not supported",
            "download or copy it again",
        )
    if "token_embd.weight" not in gguf.tensors or "output_norm.weight" not in gguf.tensors:
        raise ModelError(f"{gguf.path.name} lacks its embedding or its last norm", "download or copy it again")
    values: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": _whole(gguf, "block_count"),
        "intermediate_size": _whole(gguf, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": head_dim,
        "vocab_size": gguf.tensors["token_embd.weight"].shape[-1],
        "rms_norm_eps": _real(gguf, "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _whole(gguf, "context_length", 2048),
        "rope_parameters": _rope(gguf, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attn_implementation": "sdpa",
    }
    for name in ("bos", "eos"):
        found = gguf.get_key(f"tokenizer.ggml.{name}_token_id")
        if type(found) is int:
            values[f"{name}_token_id"] = found
    _check_tensors(gguf, values)
    return values


def _check_tensors(gguf: GGUF, values: dict[str, Any]) -> None:
    """Tensors have the shapes that the header's numbers give them, and so no number exceeds what the file holds."""
    width, inner, head, rows = (values[k] for k in ("hidden_size", "intermediate_size", "head_dim", "vocab_size"))
    query, key = values["num_attention_heads"] * head, values["num_key_value_heads"] * head
    shapes = {"q": (width, query), "k": (width, key), "v": (width, key), "o": (query, width)}  # (inputs, outputs)
    shapes |= {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}

    def check(name: str, *shape: int, needed: bool = False) -> None:
        info = gguf.tensors.get(name)
        if info is None and needed:
            raise ModelError(f"{gguf.path.name} lacks the tensor {name}", "download or copy it again")
        if info is not None and info.shape != shape:
            raise ModelError(f"{gguf.path.name}: {name} is {info.shape}, not {shape} as its header says")

    tokens = gguf.described("tokenizer.ggml.tokens")[2] if "tokenizer.ggml.tokens" in gguf.records else 0
    if tokens > rows:
        raise ModelError(f"{gguf.path.name} has {tokens} tokens, and {rows} rows in its embedding")
    check("token_embd.weight", width, rows)
    check("output.weight", width, rows)
    check("output_norm.weight", width)
    check("rope_freqs.weight", head // 2)
    for block in range(values["num_hidden_layers"]):  # ends with the first that the file lacks
        for tensor, (_, name) in LINEARS.items():
            check(f"blk.{block}.{name}.weight", *shapes[tensor], needed=True)
            check(f"blk.{block}.{name}.bias", shapes[tensor][1])
        for path, name in NORMS.items():
            check(f"blk.{block}.{name}.weight", head if path.startswith("self_attn") else width)
