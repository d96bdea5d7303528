"""What a GGUF header says of a model, in the words of a transformers configuration; no torch and no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeft.errors import ModelError
from edgeft.model.gguf import GGUF

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


def _rope(gguf: GGUF, head_dim: int) -> dict[str, Any]:
    """transformers' rope parameters; frequency factors in the file (LLaMA 3) are put in afterwards."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(gguf.get("rope.freq_base", 10000.0))}
    kind = gguf.get("rope.scaling.type", "none")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": float(gguf.get("rope.scaling.factor", 1.0))}
    elif kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": float(gguf.get("rope.scaling.factor", 1.0)),
            "original_max_position_embeddings": int(gguf.need("rope.scaling.original_context_length")),
        }
    elif kind != "none":
        raise ModelError(f"{gguf.path.name} has the rope scaling `{kind}`, which is not supported")
    if int(gguf.get("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(f"{gguf.path.name} rotates only a part of each head, which is not supported")
    return rope


def plain_rotation(values: dict[str, Any]) -> bool:
    """Rotations that edgeft computes itself; others are left to transformers."""
    return values["rope_parameters"]["rope_type"] in ("default", "linear")


def header_values(gguf: GGUF) -> dict[str, Any]:
    """The keywords of a transformers configuration."""
    check_architecture(gguf)
    heads, width = int(gguf.need("attention.head_count")), int(gguf.need("embedding_length"))
    head_dim = int(gguf.get("attention.key_length", width // heads))
    if "token_embd.weight" not in gguf.tensors or "output_norm.weight" not in gguf.tensors:
        raise ModelError(f"{gguf.path.name} lacks its embedding or its last norm", "download or copy it again")
    values: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": int(gguf.need("block_count")),
        "intermediate_size": int(gguf.need("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(gguf.get("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "vocab_size": gguf.tensors["token_embd.weight"].shape[1],
        "rms_norm_eps": float(gguf.need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(gguf.get("context_length", 2048)),
        "rope_parameters": _rope(gguf, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attn_implementation": "sdpa",
    }
    for name in ("bos", "eos"):
        found = gguf.get_key(f"tokenizer.ggml.{name}_token_id")
        if found is not None:
            values[f"{name}_token_id"] = int(found)
    return values
