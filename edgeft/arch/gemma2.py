"""`gemma2`: norms before and after both halves of a block, stored with 1 added; a GELU gate; a window in every second
block; embeddings scaled by √width; caps on scores and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from edgeft.arch.base import Architecture, Norm, Scales, real, whole, window_by_type
from edgeft.errors import ExportError

if TYPE_CHECKING:
    from edgeft.formats.gguf import GGUF


class Gemma2(Architecture):
    name = "gemma2"
    title = "Gemma 2"
    model_types: ClassVar[tuple[str, ...]] = ("gemma2",)
    config_class = "Gemma2Config"
    model_class = "Gemma2ForCausalLM"
    norms: ClassVar[tuple[Norm, ...]] = (
        Norm("input_layernorm", "attn_norm", "attention", 1.0),
        Norm("post_attention_layernorm", "post_attention_norm", "attention_out", 1.0),
        Norm("pre_feedforward_layernorm", "ffn_norm", "ffn", 1.0),
        Norm("post_feedforward_layernorm", "post_ffw_norm", "ffn_out", 1.0),
    )
    final_norm = Norm("norm", "output_norm", "final", 1.0)
    gate = "gelu_pytorch_tanh"
    rope_types: ClassVar[tuple[str, ...]] = ("default",)
    period: ClassVar[int] = 2  # the last of so many blocks has no window, where the file does not say otherwise
    largest: ClassVar[int] = 46  # blocks of the 27B model, whose scores llama.cpp scales by √(width / heads)

    def scales(self, config: Any) -> Scales:
        return Scales(
            embedding=config.hidden_size**0.5,
            scores=config.query_pre_attn_scalar**-0.5,
            score_cap=config.attn_logit_softcapping or 0.0,
            logit_cap=config.final_logit_softcapping or 0.0,
        )

    def window(self, config: Any, block: int) -> int:
        return window_by_type(config, block)

    def values(self, gguf: GGUF) -> dict[str, Any]:
        values = super().values(gguf)
        period, depth = gguf.get("attention.sliding_window_pattern", self.period), values["num_hidden_layers"]
        period = period if type(period) is int and period > 0 else self.period  # llama.cpp reads no list here
        return values | {
            "sliding_window": whole(gguf, "attention.sliding_window", 4096),
            "layer_types": _types(depth, period),
            "query_pre_attn_scalar": self._scalar(values, depth),
            **self.caps(gguf),
        }

    def caps(self, gguf: GGUF) -> dict[str, Any]:
        """llama.cpp's own values where the file has none."""
        return {
            "attn_logit_softcapping": real(gguf, "attn_logit_softcapping", 50.0),
            "final_logit_softcapping": real(gguf, "final_logit_softcapping", 30.0),
        }

    def _scalar(self, values: dict[str, Any], depth: int) -> int:
        large: int = values["hidden_size"] // values["num_attention_heads"]
        head: int = values["head_dim"]
        return large if depth == self.largest else head

    def header(self, config: Any) -> dict[str, str | int | float]:
        types, depth = config.layer_types, config.num_hidden_layers
        period = next((n for n in range(1, depth + 1) if types == _types(depth, n)), self.period)
        if types not in (_types(depth, period), _types(depth, self.period)):
            raise ExportError(f"llama.cpp has no windows like this model's: {', '.join(types)}")
        if config.query_pre_attn_scalar != self._scalar(vars(config), depth):
            raise ExportError(f"llama.cpp does not read query_pre_attn_scalar: {config.query_pre_attn_scalar}")
        keys: dict[str, str | int | float] = {"attention.sliding_window": config.sliding_window}
        if types != _types(depth, self.period):
            keys["attention.sliding_window_pattern"] = period
        for key, cap in (("attn", config.attn_logit_softcapping), ("final", config.final_logit_softcapping)):
            if cap:
                keys[f"{key}_logit_softcapping"] = float(cap)
        return super().header(config) | {f"{self.name}.{key}": value for key, value in keys.items()}


def _types(depth: int, period: int) -> list[str]:
    """Of each block, as transformers names them."""
    return ["full_attention" if (block + 1) % period == 0 else "sliding_attention" for block in range(depth)]
