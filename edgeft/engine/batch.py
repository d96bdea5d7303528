"""The tensors of a micro-batch, from a prefix forest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edgeft.data.forest import Forest
from edgeft.data.tree import Tree


@dataclass
class Batch:
    """Rows as one forest of T tokens."""

    tokens: torch.Tensor  # (T,)
    positions: torch.Tensor  # (T,) in their rows
    tree: Tree  # which token sees which
    at: torch.Tensor  # (n,) where a trained target is predicted
    targets: torch.Tensor  # (n,)
    kept: np.ndarray | None = None  # tokens that gradients pass through, ascending; None: all


def batch_of(forest: Forest, rows: Sequence[int]) -> tuple[np.ndarray, Batch]:
    """(node numbers, tensors) of the smallest forest that holds these rows."""
    nodes = forest.nodes(rows)
    parents = np.searchsorted(nodes, forest.parents[nodes])  # a path is whole: every parent is in `nodes`
    parents[forest.parents[nodes] < 0] = -1
    at = np.searchsorted(nodes, np.concatenate([forest.at[i] for i in rows]))
    targets = np.concatenate([forest.targets[i] for i in rows])
    return nodes, Batch(
        tokens=torch.from_numpy(forest.tokens[nodes].astype(np.int64)),
        positions=torch.from_numpy(forest.positions[nodes].astype(np.int64)),
        tree=Tree(parents),
        at=torch.from_numpy(at.astype(np.int64)),
        targets=torch.from_numpy(targets.astype(np.int64)),
    )
