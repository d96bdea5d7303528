"""The parts of a model as the kernels read them, named as in transformers, which is not imported: it takes 150 MB.

Tests hold it to the same numbers as transformers' own blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgeft.arch import Architecture


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight


class Block(nn.Module):
    """The linears and norms of a block, under transformers' names; `engine/block.py` runs it."""

    def __init__(self, config: Any, arch: Architecture) -> None:
        super().__init__()
        sizes = arch.sizes(config)
        for linear in arch.linears.values():
            outputs, inputs = linear.shape(sizes)
            self._add(linear.path, nn.Linear(inputs, outputs, bias=False))
        for norm in arch.norms:
            self._add(norm.path, Norm(norm.size(sizes), config.rms_norm_eps))

    def _add(self, path: str, module: nn.Module) -> None:
        parent: nn.Module = self
        *parents, name = path.split(".")
        for part in parents:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(name, module)


class Rotary(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        rope = config.rope_parameters
        with torch.device("cpu"):  # computed on `meta`, it would make torch load its compiler, which takes 70 MB
            steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
            self.inv_freq = 1.0 / rope["rope_theta"] ** steps / rope.get("factor", 1.0)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions (B, T) → cosines and sines (B, T, head width), in two equal halves."""
        angles = positions[..., None].float() * self.inv_freq
        both = torch.cat([angles, angles], -1)
        return both.cos(), both.sin()


class Model(nn.Module):
    def __init__(self, config: Any, arch: Architecture) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config, arch) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.embed_tokens: nn.Module | None = None
        self.rotary_emb: nn.Module = Rotary(config)
