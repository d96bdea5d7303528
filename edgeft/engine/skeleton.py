"""The parts of a model as the kernels read them, named as in transformers, which is not imported: it takes 150 MB.

Tests hold it to the same numbers as transformers' own blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight


class Attention(nn.Module):
    def __init__(self, config: Any, arch: str) -> None:
        super().__init__()
        width, head = config.hidden_size, config.head_dim
        query, key = config.num_attention_heads * head, config.num_key_value_heads * head
        self.q_proj = nn.Linear(width, query, bias=False)
        self.k_proj = nn.Linear(width, key, bias=False)
        self.v_proj = nn.Linear(width, key, bias=False)
        self.o_proj = nn.Linear(query, width, bias=False)
        if arch == "qwen3":
            self.q_norm, self.k_norm = Norm(head, config.rms_norm_eps), Norm(head, config.rms_norm_eps)


class FeedForward(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)


class Block(nn.Module):
    """Holds what a block is made of; `model/block.py` runs it."""

    def __init__(self, config: Any, arch: str) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config, arch), FeedForward(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)


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
    def __init__(self, config: Any, arch: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config, arch) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.embed_tokens: nn.Module | None = None
        self.rotary_emb: nn.Module = Rotary(config)
