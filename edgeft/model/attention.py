"""Attention along the paths of a prefix forest, piece by piece.

A token sees its ancestors and itself. Only pieces of the (tokens × tokens) table in which anything can be seen are
computed, and none of it is kept: the backward pass computes a piece again.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

NAME = "edgeft"  # as transformers' configurations know it
PIECE = 128  # queries computed at a time; a few rows' answers, or a part of a passage


class Piece:
    """Queries [start, stop) and the tokens that any of them sees: those above, seen by all, and themselves."""

    def __init__(self, tree: Tree, start: int, stop: int, above: np.ndarray) -> None:
        self.tree, self.start, self.stop, self.above = tree, start, stop, above

    @cached_property
    def keys(self) -> torch.Tensor:
        """(K,) token numbers."""
        return torch.from_numpy(np.concatenate([self.above, np.arange(self.start, self.stop)]))

    @cached_property
    def blocked(self) -> torch.Tensor:
        """(stop - start, K) true where a query does not see a key."""
        return torch.from_numpy(~self.tree.sees(np.arange(self.start, self.stop), self.keys.numpy()))


class Tree:
    """Who sees whom, for tokens in depth-first order: a token's subtree is [i, i + size[i])."""

    def __init__(self, parents: np.ndarray) -> None:
        self.size = np.ones(len(parents), np.int64)
        for i in range(len(parents) - 1, 0, -1):
            if parents[i] >= 0:
                self.size[parents[i]] += self.size[i]
        self.pieces: list[Piece] = []
        self._split(0, len(parents), [])

    @staticmethod
    def chain(length: int) -> Tree:
        """One row: every token sees all before it."""
        return Tree(np.arange(-1, length - 1))

    def _split(self, start: int, stop: int, above: list[int]) -> None:
        """Sibling subtrees [start, stop) below the tokens `above`: small ones together, large ones cut up."""
        begin = i = start
        while i < stop:
            size = int(self.size[i])
            if i - begin + size <= PIECE:
                i += size
            elif i > begin:
                self._add(begin, i, above)
                begin = i
            else:
                fork = i + 1  # the subtree is a chain [i, fork) first: a system prompt, a passage
                while fork < i + size and self.size[fork] == self.size[fork - 1] - 1:
                    fork += 1
                for part in range(i, fork, PIECE):
                    self._add(part, min(part + PIECE, fork), [*above, *range(i, part)])
                self._split(fork, i + size, [*above, *range(i, fork)])
                begin = i = i + size
        if begin < stop:
            self._add(begin, stop, above)

    def _add(self, start: int, stop: int, above: list[int]) -> None:
        self.pieces.append(Piece(self, start, stop, np.array(above, np.int64)))

    def sees(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """(Q, K): a key is seen by its own subtree."""
        below: np.ndarray = (keys <= queries[:, None]) & (queries[:, None] < keys + self.size[keys])
        return below

    def dense(self) -> np.ndarray:
        """The whole (T, T) table, true where a token sees another; for checks."""
        every = np.arange(len(self.size))
        return self.sees(every, every)


def _weights(q: torch.Tensor, k: torch.Tensor, piece: Piece, scale: float) -> torch.Tensor:
    """softmax(scale · q kᵀ): q (G, g·Q, d), k (G, K, d) → (G, g·Q, K), for G key heads with g query heads each."""
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    scores.view(len(k), -1, *piece.blocked.shape).masked_fill_(piece.blocked, -torch.inf)
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
            weights = _weights(part, k[:, piece.keys], piece, scale)
            found = torch.bmm(weights, v[:, piece.keys])
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
            keys, values = k[:, piece.keys], v[:, piece.keys]
            weights = _weights(part, keys, piece, ctx.scale)
            dv.index_add_(1, piece.keys, torch.bmm(weights.transpose(1, 2), dpart))
            dscores = torch.bmm(dpart, values.transpose(1, 2)).sub_(rows[:, :, span].reshape(groups, -1, 1))
            dscores.mul_(weights).mul_(ctx.scale)
            dq[:, :, span] = torch.bmm(dscores, keys).view(groups, -1, piece.stop - piece.start, width)
            dk.index_add_(1, piece.keys, torch.bmm(dscores.transpose(1, 2), part))
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
