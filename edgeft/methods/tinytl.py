"""`tinytl`: y = x Wᵀ + b + scale (x Aᵀ) Bᵀ. W and A are frozen, B starts at zero: only x Aᵀ, r numbers, is kept.

A holds random signs, scaled so that each row has length 1. It comes from the seed and the layer's name: never saved.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeft.methods.base import Method, Traits, Update, weight_of

if TYPE_CHECKING:
    import torch

    from edgeft.methods.scheme import Scheme


class TinyTL(Method):
    name = "tinytl"
    about = "lite residual branches beside them"
    ranked = True
    traits = Traits(frugal=True, selective=True, float32_inputs=True)

    def trained_sizes(self, update: Update, rows: int, cols: int) -> list[int]:
        return [update.rank * rows]  # B alone

    def update_flops(self, update: Update, rows: int, cols: int) -> float:
        return update.rank * (6.0 * rows + 4.0 * cols)  # A has no gradient

    def kept_width(self, update: Update, cols: int) -> int:
        return update.rank

    def build(self, module: Any, scheme: Scheme, update: Update, seed: int, name: str) -> torch.nn.Module:
        import torch

        from edgeft.methods.layer import TrainedLinear

        layer: Any = TrainedLinear(self, module)
        layer.base, layer.scale = module, scheme.alpha / update.rank
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        signs = random.integers(0, 2, (update.rank, layer.in_features), dtype=np.int8)
        layer.down = torch.from_numpy(signs).float().mul_(2).sub_(1).mul_(layer.in_features**-0.5)  # A (r, I)
        layer.up = torch.nn.Parameter(torch.zeros(layer.out_features, update.rank))  # B (O, r)
        return layer  # type: ignore[no-any-return]

    def dense_weight(self, layer: Any) -> torch.Tensor:
        return weight_of(layer.base).addmm_(layer.up.detach(), layer.down, alpha=layer.scale)

    def low_rank(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        return layer.down, layer.scale * layer.up.detach()


TINYTL = TinyTL()
