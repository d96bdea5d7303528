"""`granite`: as llama, with scales on embeddings, residual branches, scores and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from edgeft.arch.base import Architecture, Scales, real
from edgeft.arch.llama import Llama
from edgeft.errors import ModelError

if TYPE_CHECKING:
    from edgeft.formats.gguf import GGUF


class Granite(Architecture):
    name = "granite"
    title = "Granite 3"
    model_types = ("granite",)
    config_class = "GraniteConfig"
    model_class = "GraniteForCausalLM"
    biases = Llama.biases
    bias_flags: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]] = Llama.bias_flags
    interleaved = Llama.interleaved

    def scales(self, config: Any) -> Scales:
        return Scales(
            embedding=config.embedding_multiplier,
            residual=config.residual_multiplier,
            logits=1.0 / config.logits_scaling,
            scores=config.attention_multiplier,
        )

    def values(self, gguf: GGUF) -> dict[str, Any]:
        if gguf.get("rope.scaling.finetuned", True) is False:
            raise ModelError(f"{gguf.path.name} has no rotation in any block, which is not supported")
        values = super().values(gguf)
        return values | {
            "embedding_multiplier": real(gguf, "embedding_scale", 1.0),
            "residual_multiplier": real(gguf, "residual_scale", 1.0),
            "logits_scaling": real(gguf, "logit_scale"),
            "attention_multiplier": real(gguf, "attention.scale", values["head_dim"] ** -0.5),
        }

    def header(self, config: Any) -> dict[str, str | int | float]:
        keys = {
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
            "attention.scale": config.attention_multiplier,
        }
        return super().header(config) | {f"{self.name}.{key}": float(value) for key, value in keys.items()}
