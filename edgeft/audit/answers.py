"""Tokens of the answers, from the last block's `down`: the other side of the same product.

G = dYᵀ X has its columns in the span of dY, the loss's gradients where a token is predicted: each is the embedding of
that token against those that the model expected in its place, Wᵀ (p - onehot), through the last norm. So matching
pursuit over the vocabulary finds both. A low-rank update projects X alone: this side is as open as in a dense one.
"""

from __future__ import annotations

from typing import Any

import torch

from edgeft.audit.pursuit import pursuit
from edgeft.audit.sent import Tensors
from edgeft.engine.stack import Stack

Tensor = torch.Tensor
KINDS = ("weight", "part", "up")  # of a sent tensor: all input channels, some, a low-rank update
DIRECTIONS = 64  # of the gradient, the largest
MOST = 64  # tokens that are listed
# Added to a token's length, as a share of the median: what little is left of rare tokens, when the mean of all is taken
# off, points anywhere
DAMPING = 0.3


def answer_tokens(tensors: Tensors, stack: Stack, vocabulary: int) -> list[int]:
    """The surest first; empty if the last block's `down` is not sent, or no token stands out of its noise."""
    path = f"layers.{stack.depth - 1}.{stack.arch.linears['down'].path}"
    gradient = next((tensors[name] for name in (f"{path}.{kind}" for kind in KINDS) if name in tensors), None)
    if gradient is None or not gradient.any():
        return []
    columns, values, _ = torch.linalg.svd(gradient.double(), full_matrices=False)
    whole = (columns * (values / values.norm()))[:, :DIRECTIONS].float()  # (d, k)
    norm: Any = stack.model.norm
    head = stack.head.packed.copy()[:vocabulary]
    head = (head - head.mean(0)) * (norm.weight + stack.arch.final_norm.offset).detach()
    sizes = head.norm(dim=1, keepdim=True)
    head /= sizes + DAMPING * sizes.median()
    return pursuit(head, whole, MOST)
