"""`phi3`: q, k and v are one tensor, and so are gate and up; a rotation of a part of each head, whose frequencies long
contexts divide by other factors than short ones. Windows, which some of its files name, llama.cpp does not have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from edgeft.arch.base import Architecture, Linear, real, whole
from edgeft.errors import ModelError
from edgeft.formats import ggml

if TYPE_CHECKING:
    from edgeft.formats.gguf import GGUF

LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


class Phi3(Architecture):
    name = "phi3"
    title = "Phi 3 to 4 mini"
    model_types = ("phi3",)
    config_class = "Phi3Config"
    model_class = "Phi3ForCausalLM"
    linears = {  # noqa: RUF012
        **Architecture.linears,
        "q": Linear("self_attn.qkv_proj.q", "attn_qkv", lambda s: (s.query, s.width), lambda s: 0),
        "k": Linear("self_attn.qkv_proj.k", "attn_qkv", lambda s: (s.key, s.width), lambda s: s.query),
        "v": Linear("self_attn.qkv_proj.v", "attn_qkv", lambda s: (s.key, s.width), lambda s: s.query + s.key),
        "gate": Linear("mlp.gate_up_proj.gate", "ffn_up", lambda s: (s.ffn, s.width), lambda s: 0),
        "up": Linear("mlp.gate_up_proj.up", "ffn_up", lambda s: (s.ffn, s.width), lambda s: s.ffn),
    }
    partial_rotation = True
    rope_types = ("default", "longrope")

    def values(self, gguf: GGUF) -> dict[str, Any]:
        values = super().values(gguf)
        original = whole(gguf, "rope.scaling.original_context_length", values["max_position_embeddings"])
        rope = values["rope_parameters"]
        rope.setdefault("partial_rotary_factor", 1.0)
        if LONG in gguf.tensors or SHORT in gguf.tensors:
            half = int(values["head_dim"] * rope["partial_rotary_factor"]) // 2
            rope |= {
                "rope_type": "longrope",
                "long_factor": _factors(gguf, LONG, half),
                "short_factor": _factors(gguf, SHORT, half),
                "attention_factor": real(gguf, "rope.scaling.attn_factor", 1.0),
                "original_max_position_embeddings": original,
            }
        window = whole(gguf, "attention.sliding_window", 0, low=0)
        return values | {"original_max_position_embeddings": original, "sliding_window": window or None}

    def header(self, config: Any) -> dict[str, str | int | float]:
        rope, original = config.rope_parameters, config.original_max_position_embeddings
        keys: dict[str, str | int | float] = {
            "rope.scaling.original_context_length": original,
            "attention.sliding_window": config.sliding_window or 0,
        }
        if rope["rope_type"] == "longrope":
            scale, factor = config.max_position_embeddings / original, rope.get("attention_factor")
            usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            keys["rope.scaling.attn_factor"] = float(usual if factor is None else factor)
        return super().header(config) | {f"{self.name}.{key}": value for key, value in keys.items()}

    def factors(self, config: Any) -> dict[str, list[float]]:
        rope = config.rope_parameters
        return {LONG: rope["long_factor"], SHORT: rope["short_factor"]} if rope["rope_type"] == "longrope" else {}


def _factors(gguf: GGUF, name: str, count: int) -> list[float]:
    info = gguf.tensors.get(name)
    if info is None or info.shape != (count,) or info.type != ggml.F32:
        raise ModelError(f"{gguf.path.name} lacks the {count} numbers of {name}", "download or copy it again")
    numbers: list[float] = gguf.bytes(name).view("<f4").tolist()
    if not all(0 < number < math.inf for number in numbers):
        raise ModelError(f"{gguf.path.name}: {name} holds numbers that are no factors", "download or copy it again")
    return numbers
