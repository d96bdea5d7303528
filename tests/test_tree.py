"""Rows packed as a prefix tree: loss and gradients are those of the rows computed one by one."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from edgeft.config import UpdateConfig
from edgeft.data.forest import Forest, epoch_order
from edgeft.engine.load import load
from edgeft.engine.stack import batch_of
from edgeft.methods import scheme
from tests.support.rows import FOREST_ROWS as ROWS
from tests.support.rows import encoded


def test_every_shared_token_stands_once() -> None:
    forest = Forest(ROWS)
    assert len(forest) == len({tuple(r.ids[: i + 1]) for r in ROWS for i in range(len(r.ids))})
    for r, path in zip(ROWS, forest.paths, strict=True):
        assert forest.tokens[path].tolist() == r.ids.tolist()
        assert forest.positions[path].tolist() == list(range(len(path)))
        assert forest.parents[path].tolist() == [-1, *path[:-1].tolist()]
    assert len(Forest(ROWS, share=False)) == sum(len(r.ids) for r in ROWS)


def test_a_token_sees_its_path_and_nothing_else() -> None:
    forest = Forest(ROWS)
    nodes, batch = batch_of(forest, [0, 1, 3])
    place = {int(n): i for i, n in enumerate(nodes)}
    for i in (0, 1, 3):
        path = [place[int(n)] for n in forest.paths[i]]
        for depth, node in enumerate(path):
            assert set(np.flatnonzero(batch.tree.dense()[node])) == set(path[: depth + 1])


@pytest.mark.parametrize("tokens", [1, 6, 9, 1000])
def test_micro_batches_hold_every_row_once_within_the_limit(tokens: int) -> None:
    forest = Forest(ROWS)
    parts = list(forest.micro_batches(list(range(len(ROWS))), tokens))
    assert sorted(i for part in parts for i in part) == list(range(len(ROWS)))
    assert all(len(part) == 1 or len(forest.nodes(part)) <= tokens for part in parts)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_nodes_get_parts_of_the_tree_that_are_about_equal(count: int) -> None:
    """None is larger than in the best of all ways to split the rows in their order."""
    rows = [encoded([*range(20), *([100 + i // 3] * 15), *([200 + i] * (1 + i % 4))], 36) for i in range(7)]
    forest = Forest(rows)
    chosen = [5, 0, 3, 4, 6, 1]
    parts = forest.split(chosen, count)
    assert len(parts) == count
    assert sorted(row for part in parts for row in part) == sorted(chosen)
    order = sorted(chosen, key=forest.rank.__getitem__)
    cuts = combinations_with_replacement(range(len(order) + 1), count - 1)
    ways = ([order[a:b] for a, b in pairwise([0, *cut, len(order)])] for cut in cuts)
    best = min(max(len(forest.nodes(part)) for part in way if part) for way in ways)
    assert max(len(forest.nodes(part)) for part in parts if part) <= best


def test_order_is_a_permutation_and_repeats_only_for_the_same_seed_and_epoch() -> None:
    rows = list(range(len(ROWS)))
    forest = Forest(ROWS)
    for grouped in (True, False):
        first = epoch_order(forest, rows, 1, 0, grouped)
        assert sorted(first) == rows
        assert first == epoch_order(forest, rows, 1, 0, grouped)
        assert any(first != epoch_order(forest, rows, 1, e, grouped) for e in range(1, 4))


def test_rows_on_one_passage_stay_together() -> None:
    passages = [list(range(100 * p, 100 * p + 40)) for p in range(1, 6)]
    rows = [encoded([*passage, 7, q], 41) for q in range(3) for passage in passages]
    groups = Forest(rows).groups(list(range(len(rows))))
    assert sorted(map(sorted, groups)) == [[p, p + 5, p + 10] for p in range(5)]


@pytest.mark.parametrize("recompute", [False, True])
def test_loss_and_gradients_equal_those_of_single_rows(model: Path, recompute: bool) -> None:
    torch.manual_seed(0)
    stack = load(model)
    stack.configure(recompute="full" if recompute else "none")
    chosen = scheme.make(
        UpdateConfig(blocks=[20, 26], tensors=["q", "v", "down"], biases=True, norms=True), stack.depth, stack.arch
    )
    parameters = scheme.apply(stack, chosen, seed=0)

    def run(forest: Forest, parts: list[list[int]]) -> tuple[float, dict[str, torch.Tensor]]:
        total = 0.0
        for part in parts:
            _, batch = batch_of(forest, part)
            loss = stack.head.loss(stack.top(stack.trunk(batch, chosen.cut), batch, chosen.cut), batch.targets)
            loss.backward()
            total += float(loss.detach())
        grads = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        for p in parameters.values():
            p.grad = None
        return total, grads

    tree_loss, tree = run(Forest(ROWS), [list(range(len(ROWS)))])
    single_loss, single = run(Forest(ROWS, share=False), [[i] for i in range(len(ROWS))])
    assert tree_loss == pytest.approx(single_loss, rel=1e-5)
    assert set(tree) == set(parameters)
    for name in single:
        worst = (tree[name] - single[name]).abs().max() / single[name].abs().max()
        assert worst < 1e-3, name


def test_a_template_that_all_rows_begin_with_makes_no_group() -> None:
    template = list(range(1000, 1030))
    rows = [encoded([*template, 5, q, 7, q + 1], 32) for q in range(10, 40)]  # 31 of 34 tokens are the same in all
    assert len(Forest(rows).groups(list(range(len(rows))))) == len(rows)
