"""Attention along a forest: the same numbers and gradients as a dense mask, in pieces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgeft.data.tree import Tree
from edgeft.engine.attention import attend
from tests.support.rows import forest_parents


@pytest.mark.parametrize("kind", ["chain", "passages", "random"])
def test_forward_and_backward_equal_those_of_a_dense_mask(kind: str) -> None:
    parents = forest_parents(kind)
    tree, length = Tree(parents), len(parents)
    seen = np.zeros((length, length), bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            seen[i] = seen[parent]
        seen[i, i] = True
    np.testing.assert_array_equal(tree.dense(), seen)
    torch.manual_seed(0)
    shapes = [(1, 6, length, 8), (1, 2, length, 8), (1, 2, length, 8)]  # three query heads share a key head
    ours = [torch.randn(s).requires_grad_() for s in shapes]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    out, _ = attend(torch.nn.Module(), *ours, tree)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        theirs[0], *(t.repeat_interleave(3, 1) for t in theirs[1:]), attn_mask=torch.from_numpy(seen)
    ).transpose(1, 2)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    direction = torch.randn_like(out)
    (out * direction).sum().backward()
    (wanted * direction).sum().backward()
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-3, atol=1e-4)


def test_less_is_computed_than_a_dense_table_holds() -> None:
    parents = forest_parents("passages")
    computed = sum(piece.blocked.size for piece in Tree(parents).pieces)
    assert computed < 0.4 * len(parents) ** 2
