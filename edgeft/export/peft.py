"""A low-rank update as a PEFT adapter, for the Hugging Face model it was trained on.

The adapter holds exactly what was trained; what an adapter cannot hold is an error, never left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeft.engine.stack import Stack
from edgeft.errors import ExportError
from edgeft.export.hf import new_folder, save
from edgeft.methods.scheme import Scheme


def export_peft(stack: Stack, scheme: Scheme, base: str, out: Path) -> Path:
    """adapter_config.json and adapter_model.safetensors, for PeftModel.from_pretrained; `base` is the model's name."""
    from peft import LoraConfig

    hint = "use --format gguf or --format hf: there all updates are merged"
    if scheme.biases or scheme.norms:
        raise ExportError("this run trained biases or norms beside its adapters, which PEFT's file cannot hold", hint)
    linears, tensors = stack.arch.linears, {}
    if shared := sorted({linears[tensor].stored for _, tensor in scheme.updates if linears[tensor].shared}):
        raise ExportError(f"PEFT has one adapter for all of {', '.join(shared)}, and this run several", hint)
    for number, tensor in scheme.updates:
        pair = scheme.method.low_rank(stack.linear(number, tensor))
        if pair is None:
            raise ExportError("only low-rank updates are adapters, and this run trained the tensors themselves", hint)
        prefix = f"base_model.model.model.layers.{number}.{linears[tensor].path}"
        for part, weight in zip(("lora_A", "lora_B"), pair, strict=True):
            tensors[f"{prefix}.{part}.weight"] = weight.detach().float().contiguous()
    ranks = {f"layers.{n}.{linears[tensor].path}": update.rank for (n, tensor), update in scheme.updates.items()}
    rank = max(ranks.values())
    others = {name: one for name, one in ranks.items() if one != rank}
    names = {tensor for _, tensor in scheme.updates}
    where: dict[str, Any] = {
        "target_modules": [linear.path.rpartition(".")[2] for name, linear in linears.items() if name in names],
        "layers_to_transform": list(scheme.blocks),
        "layers_pattern": "layers",
    }
    if len(scheme.updates) < len(names) * len(scheme.blocks):  # not the same tensors in every block
        where = {"target_modules": [f"layers.{number}.{linears[tensor].path}" for number, tensor in scheme.updates]}
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,  # B holds the factor
        rank_pattern=others,
        alpha_pattern=others,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
        **where,
    )
    with new_folder(Path(out)) as folder:
        save(tensors, folder / "adapter_model.safetensors")
        config.save_pretrained(str(folder))
    return Path(out)
