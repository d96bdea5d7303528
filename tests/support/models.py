"""Small models for tests: random weights in GGUF and Hugging Face files, and transformers to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers


def random_hf(path: Path, family: str, scale: float = 0.2, half: bool = False, **options: Any) -> Path:
    """A folder with a random model of this family (Llama, Qwen2, …), its biases and norms random too."""
    torch.manual_seed(7)
    kind = getattr(transformers, f"{family}ForCausalLM")
    model = kind(kind.config_class(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # large enough that attention is not flat: a wrong rotation or row order must show
            size = 0.3 if parameter.ndim == 1 else 1.0 if "embed" in name else scale
            parameter.copy_(torch.randn_like(parameter) * size + (1.0 if "norm" in name else 0.0))
    (model.half() if half else model).save_pretrained(path, max_shard_size="4MB")
    return path


def reference(folder: Path, **options: Any) -> Any:
    """The same folder in transformers, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), **{"dtype": torch.float32, **options})
    return model.eval()
