"""Attention along the paths of a prefix forest, piece by piece.

A token sees its ancestors and itself. Only pieces of the (tokens × tokens) table in which anything can be seen are
computed, and none of it is kept: the backward pass computes a piece again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgeft.data.tree import Piece, Tree

NAME = "edgeft"  # as transformers' configurations know it


def _weights(q: torch.Tensor, k: torch.Tensor, piece: Piece, scale: float) -> torch.Tensor:
    """softmax(scale · q kᵀ): q (G, g·Q, d), k (G, K, d) → (G, g·Q, K), for G key heads with g query heads each."""
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    blocked = torch.from_numpy(piece.blocked)
    scores.view(len(k), -1, *blocked.shape).masked_fill_(blocked, -torch.inf)
    return torch.softmax(scores, -1)


class _TreeAttention(torch.autograd.Function):
    """q (H, T, d), k and v (G, T, d) → (H, T, d)."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: Tree, scale: float) -> torch.Tensor:
        heads, length, width = q.shape
        groups = len(k)
        grouped = q.view(groups, -1, length, width)
        out = torch.empty(groups, heads // groups, length, width)
        for piece in tree.pieces:
            part = grouped[:, :, piece.start : piece.stop].reshape(groups, -1, width)
            seen = torch.from_numpy(piece.keys)
            weights = _weights(part, k[:, seen], piece, scale)
            found = torch.bmm(weights, v[:, seen])
            out[:, :, piece.start : piece.stop] = found.view(groups, -1, piece.stop - piece.start, width)
        result = out.view(heads, length, width)
        ctx.save_for_backward(q, k, v, result)
        ctx.tree, ctx.scale = tree, scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out = ctx.saved_tensors
        (dout,) = grads
        heads, length, width = q.shape
        groups = len(k)
        shape = (groups, heads // groups, length, width)
        grouped, dgrouped = q.view(shape), dout.reshape(shape)
        rows = (dout * out).sum(-1).view(groups, -1, length)  # Σ dP·P of each query
        dq, dk, dv = torch.empty(shape), torch.zeros_like(k), torch.zeros_like(v)
        for piece in ctx.tree.pieces:
            span = slice(piece.start, piece.stop)
            part, dpart = (t[:, :, span].reshape(groups, -1, width) for t in (grouped, dgrouped))
            seen = torch.from_numpy(piece.keys)
            keys, values = k[:, seen], v[:, seen]
            weights = _weights(part, keys, piece, ctx.scale)
            dv.index_add_(1, seen, torch.bmm(weights.transpose(1, 2), dpart))
            dscores = torch.bmm(dpart, values.transpose(1, 2)).sub_(rows[:, :, span].reshape(groups, -1, 1))
            dscores.mul_(weights).mul_(ctx.scale)
            dq[:, :, span] = torch.bmm(dscores, keys).view(groups, -1, piece.stop - piece.start, width)
            dk.index_add_(1, seen, torch.bmm(dscores.transpose(1, 2), part))
        return dq.view(heads, length, width), dk, dv, None, None


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: (1, H, T, d) → (1, T, H, d). A plain mask goes to its own function."""
    if not isinstance(attention_mask, Tree):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **more
        )
        return found
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (t[0].contiguous() for t in (query, key, value))
    out: torch.Tensor = _TreeAttention.apply(q, k, v, attention_mask, scale)
    return out.transpose(0, 1).contiguous()[None], None


def register() -> str:
    """Makes the function known to transformers; its name goes into the configuration of a stack."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    return NAME
