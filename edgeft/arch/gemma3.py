"""`gemma3`: as gemma2, with norms over each head of q and k in place of the caps, and a window in all but every sixth
block; blocks with a window have a rotation of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeft.arch.base import Norm, real
from edgeft.arch.gemma2 import Gemma2

if TYPE_CHECKING:
    from edgeft.formats.gguf import GGUF


class Gemma3(Gemma2):
    name = "gemma3"
    title = "Gemma 3"
    model_types = ("gemma3_text", "gemma3")  # the second: beside a model of images, which is left as it is
    renamed = (("language_model.model.", ""), ("language_model.", ""))
    config_class = "Gemma3TextConfig"
    model_class = "Gemma3ForCausalLM"
    norms = (
        *Gemma2.norms,
        Norm("self_attn.q_norm", "attn_q_norm", "q", 1.0),
        Norm("self_attn.k_norm", "attn_k_norm", "k", 1.0),
    )
    rope_types = ("default", "linear")
    period = 6
    largest = 62

    def hf_config(self, folder: Path) -> Any:
        config = super().hf_config(folder)
        return getattr(config, "text_config", config)

    def rotation(self, config: Any, block: int) -> str | None:
        kind: str = config.layer_types[block]
        return kind

    def values(self, gguf: GGUF) -> dict[str, Any]:
        values = super().values(gguf)
        if not gguf.get("attention.sliding_window", 0):
            values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
        local = {"rope_type": "default", "rope_theta": real(gguf, "rope.freq_base_swa", 10000.0)}
        values["rope_parameters"] = {"full_attention": values["rope_parameters"], "sliding_attention": local}
        return values

    def caps(self, gguf: GGUF) -> dict[str, Any]:
        cap = real(gguf, "final_logit_softcapping") if gguf.get("final_logit_softcapping", 0) else None
        return {"attn_logit_softcapping": None, "final_logit_softcapping": cap}

    def header(self, config: Any) -> dict[str, str | int | float]:
        local = config.rope_parameters["sliding_attention"]["rope_theta"]
        return super().header(config) | {f"{self.name}.rope.freq_base_swa": float(local)}
