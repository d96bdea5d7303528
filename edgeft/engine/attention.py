"""Attention along the paths of a prefix forest, piece by piece, in plain torch.

A token sees its ancestors and itself. Only pieces of the (tokens × tokens) table in which anything is visible are
computed, and none of it is kept: the backward pass computes a piece again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edgeft.data.tree import Tree

NAME = "edgeft"  # as transformers' configurations know it
Tensor = torch.Tensor


@dataclass(frozen=True)
class Heads:
    query: int
    key: int
    width: int
    scale: float  # of the scores
    cap: float = 0.0  # they become cap · tanh(scores / cap); 0: they stay


class AttentionPlan:
    """Which tokens of a tree are queries; all of them are keys. queries: (A,) ascending; None: all."""

    def __init__(self, tree: Tree, heads: Heads, queries: Tensor | None = None) -> None:
        self.tree, self.heads = tree, heads
        self.queries = None if queries is None else queries.numpy()

    def pieces(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(rows of q, key tokens (K,), which scores (Q, K) are masked) of each piece that has queries."""
        for piece in self.tree.pieces:
            span, tokens = piece.queries(self.queries)
            if len(tokens):
                blocked = piece.blocked if self.queries is None else ~self.tree.sees(tokens, piece.keys)
                yield span, torch.from_numpy(piece.keys), torch.from_numpy(blocked)


def _weights(q: Tensor, k: Tensor, blocked: Tensor, heads: Heads) -> tuple[Tensor, Tensor | None]:
    """softmax(scale · q kᵀ): q (G, g·Q, d), k (G, K, d) → (G, g·Q, K), for G key heads with g query heads each; and,
    where scores are capped, the derivative of that."""
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(heads.scale)
    slope = None
    if heads.cap:
        share = scores.div_(heads.cap).tanh_()
        slope = 1 - share.square()
        scores = share.mul_(heads.cap)
    scores.view(len(k), -1, *blocked.shape).masked_fill_(blocked, -torch.inf)
    return torch.softmax(scores, -1), slope


def tree_attention(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (H, A, d), k and v (G, T, d) → (H, A, d)."""
    heads, length, width = q.shape
    groups = len(k)
    grouped = q.view(groups, -1, length, width)
    out = torch.empty(groups, heads // groups, length, width)
    for span, keys, blocked in plan.pieces():
        part = grouped[:, :, span].reshape(groups, -1, width)
        weights, _ = _weights(part, k[:, keys], blocked, plan.heads)
        out[:, :, span] = torch.bmm(weights, v[:, keys]).view(groups, -1, len(blocked), width)
    return out.view(heads, length, width)


def tree_attention_back(plan: AttentionPlan, saved: tuple[Tensor, ...], dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """saved: q, k, v and what `tree_attention` made of them; dq, dk and dv, of their shapes."""
    q, k, v, out = saved
    heads, length, width = q.shape
    groups = len(k)
    shape = (groups, heads // groups, length, width)
    grouped, dgrouped = q.view(shape), dout.reshape(shape)
    rows = (dout * out).sum(-1).view(groups, -1, length)  # Σ dP·P of each query
    dq, dk, dv = torch.empty(shape), torch.zeros_like(k), torch.zeros_like(v)
    for span, seen, blocked in plan.pieces():
        part, dpart = (t[:, :, span].reshape(groups, -1, width) for t in (grouped, dgrouped))
        keys, values = k[:, seen], v[:, seen]
        weights, slope = _weights(part, keys, blocked, plan.heads)
        dv.index_add_(1, seen, torch.bmm(weights.transpose(1, 2), dpart))
        dscores = torch.bmm(dpart, values.transpose(1, 2)).sub_(rows[:, :, span].reshape(groups, -1, 1))
        dscores.mul_(weights).mul_(plan.heads.scale)
        if slope is not None:
            dscores.mul_(slope)
        dq[:, :, span] = torch.bmm(dscores, keys).view(groups, -1, len(blocked), width)
        dk.index_add_(1, seen, torch.bmm(dscores.transpose(1, 2), part))
    dk[:, plan.tree.context], dv[:, plan.tree.context] = 0, 0  # no gradient passes there
    return dq.view(heads, length, width), dk, dv


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        out = tree_attention(plan, q, k, v)
        ctx.save_for_backward(q, k, v, out)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *tree_attention_back(ctx.plan, ctx.saved_tensors, grads[0]), None


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: (1, H, T, d) → (1, T, H, d). A plain mask goes to its own function.

    `sliding_window` is not read: windows are in the tree or in the mask, and are those of llama.cpp.
    """
    scale, cap = more.get("scaling") or query.shape[-1] ** -0.5, more.get("softcap") or 0.0
    if not isinstance(attention_mask, Tree):
        if cap:
            return _capped(query, key, value, attention_mask, scale, cap), None
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **more)
        return plain
    q, k, v = (t[0].contiguous() for t in (query, key, value))
    plan = AttentionPlan(attention_mask, Heads(len(q), len(k), q.shape[-1], scale, cap))
    out: Tensor = _TreeAttention.apply(q, k, v, plan)
    return out.transpose(0, 1).contiguous()[None], None


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """q (B, H, T, d), k and v (B, G, S, d), mask (B, 1, T, S) → (B, T, H, d)."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = cap * torch.tanh(scale / cap * q @ k.transpose(2, 3))
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).contiguous()


def register() -> str:
    """Makes the function known to transformers; its name goes into the configuration of a stack."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    return NAME
