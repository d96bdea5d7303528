"""`lora`: PEFT's adapters beside frozen weights, y = x Wᵀ + b + (alpha / r) (x Aᵀ) Bᵀ with A and B trained.

The layers are PEFT's own; each also names its parts, so that the engine's products compute it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from edgeft.methods.base import Method, Update, weight_of

if TYPE_CHECKING:
    import torch

    from edgeft.engine.linear import LinearSpec
    from edgeft.engine.stack import Stack
    from edgeft.methods.scheme import Scheme


class Lora(Method):
    name = "lora"
    about = "PEFT adapters on them"
    ranked = True
    uses_peft = True

    def trained_sizes(self, update: Update, rows: int, cols: int) -> list[int]:
        return [update.rank * cols, update.rank * rows]

    def update_flops(self, update: Update, rows: int, cols: int) -> float:
        return 6.0 * update.rank * (rows + cols)  # forward, input gradient and weight gradient of both matrices

    def kept_by_torch(self, update: Update, width: int) -> int:
        return update.rank + width // 2  # each adapter keeps its input, and x Aᵀ

    def build(self, module: Any, scheme: Scheme, update: Update, seed: int, name: str) -> torch.nn.Module:
        return module  # type: ignore[no-any-return]  # PEFT draws all adapters at once, see `inject`

    def inject(self, stack: Stack, scheme: Scheme, seed: int) -> None:
        import torch
        from peft import LoraConfig, inject_adapter_in_model

        names = "|".join(re.escape(f"{block}.{stack.arch.linears[tensor].path}") for block, tensor in scheme.updates)
        alpha: Any = scheme.alpha  # PEFT's type is int
        rank = next(iter(scheme.updates.values())).rank
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=rf"layers\.({names})")
        trained = [p for p in stack.model.parameters() if p.requires_grad]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, stack.model)
        for parameter in trained:  # PEFT freezes everything but its adapters
            parameter.requires_grad_(True)
        for block, tensor in scheme.updates:
            layer = stack.linear(block, tensor)
            layer.__class__ = _described(type(layer))  # type: ignore[arg-type]

    def low_rank(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        down, up = adapter(layer)
        return down.detach(), layer.scaling["default"] * up.detach()


@cache
def _described(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """PEFT's layer class, with what the engine and the export ask of a layer."""
    return type(kind.__name__, (kind,), {"as_layer": _spec, "dense_weight": _merged})


def adapter(layer: Any) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """A (r, I) and B (O, r)."""
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def _spec(layer: Any) -> LinearSpec | None:
    from edgeft.engine.linear import linear_spec

    base, (down, up) = linear_spec(layer.base_layer), adapter(layer)
    return base and replace(base, down=down, up=up, scale=layer.scaling["default"])


def _merged(layer: Any) -> torch.Tensor:
    down, up = adapter(layer)
    merged: torch.Tensor = weight_of(layer.base_layer) + layer.scaling["default"] * (up @ down).detach()
    return merged


LORA = Lora()
