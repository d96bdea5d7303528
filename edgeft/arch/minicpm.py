"""`minicpm`: granite's block under another name, with scales that older files leave to llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeft.arch.base import Architecture, read_hf_values, real
from edgeft.arch.granite import Granite
from edgeft.errors import ExportError

if TYPE_CHECKING:
    from edgeft.formats.gguf import GGUF


class MiniCPM(Granite):
    name = "minicpm"
    title = "MiniCPM 1 and 2"
    model_types = ("minicpm",)  # transformers itself has no class for it: a GGUF file is exported as a granite folder
    biases = ()
    bias_flags = ()

    def hf_config(self, folder: Path) -> Any:
        from transformers import GraniteConfig

        values = read_hf_values(folder)
        scales = values.pop("scale_emb"), values.pop("scale_depth"), values.pop("dim_model_base")
        width, depth, heads = (values[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        return GraniteConfig(
            **values,
            embedding_multiplier=scales[0],
            residual_multiplier=scales[1] / depth**0.5,
            logits_scaling=width / scales[2],
            attention_multiplier=(width // heads) ** -0.5,
        )

    def values(self, gguf: GGUF) -> dict[str, Any]:
        values = Architecture.values(self, gguf)
        depth, width = values["num_hidden_layers"], values["hidden_size"]
        return values | {
            "embedding_multiplier": real(gguf, "embedding_scale", 12.0),
            "residual_multiplier": real(gguf, "residual_scale", 1.4 / depth**0.5),
            "logits_scaling": real(gguf, "logit_scale", 256.0 / width),
            "attention_multiplier": values["head_dim"] ** -0.5,
        }

    def header(self, config: Any) -> dict[str, str | int | float]:
        keys = super().header(config)
        if abs(keys.pop(f"{self.name}.attention.scale") - self.sizes(config).head ** -0.5) > 1e-6:  # type: ignore[operator]
            raise ExportError("llama.cpp reads no scale of the scores in a `minicpm` file")
        return keys
