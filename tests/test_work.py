"""Work that is counted on paper is the work that is done; buffers are used again, and never twice at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from edgeft import arch
from edgeft.config import UpdateConfig
from edgeft.data.forest import Forest
from edgeft.engine import compiled, kernels
from edgeft.engine.backend import PLAIN, Matrix, Product
from edgeft.engine.load import load
from edgeft.engine.memory import Memory, Pool
from edgeft.engine.stack import batch_of
from edgeft.methods import scheme as schemes
from edgeft.plan import shape_of_config
from edgeft.plan.flops import Pass, step_flops
from edgeft.train.trunk import Trunk
from tests.support.rows import FOREST_ROWS as ROWS


class Counting(kernels.KernelBackend):
    """Counts what its products compute."""

    flops = 0

    def mm(self, x: Tensor, y: Matrix, out: Tensor | None = None, options: Product = PLAIN) -> Tensor:
        self.flops += 2 * len(x) * x.shape[1] * y.shape[1]
        return super().mm(x, y, out, options)


@pytest.mark.parametrize(
    "update",
    [
        UpdateConfig(blocks=[22, 25], tensors=["q", "k", "v", "o", "up", "down"]),
        UpdateConfig(blocks=[27, 29], tensors=["q", "v"]),
        UpdateConfig(blocks=[22, 25], tensors=["q", "k", "v", "o", "up", "down"], channels=0.25),
        UpdateConfig(blocks=[22, 29], low_rank=8),
    ],
)
def test_products_are_those_counted(model: Path, update: UpdateConfig) -> None:
    stack = load(model, lean=True)
    scheme = schemes.make(update, stack.depth, arch.get("llama"))
    schemes.apply(stack, scheme, 0)
    backend = Counting(compiled.build(), Memory())
    stack.configure(backend=backend)
    _, batch = batch_of(Forest(ROWS), list(range(len(ROWS))))
    hidden = stack.trunk(batch, scheme.cut)
    backend.flops = 0
    stack.head.loss(stack.top(hidden, batch, scheme.cut), batch.targets).backward()  # type: ignore[no-untyped-call]
    outputs = len(torch.unique(batch.at))
    # without pairs: attention is one kernel of its own
    sizes = Pass.whole(len(batch.tokens), 0, outputs, 0, len(batch.targets))
    want = step_flops(shape_of_config(stack.arch, stack.config), scheme, sizes)
    assert backend.flops == pytest.approx(want, rel=1e-3 if update.low_rank else 1e-9)


def test_a_buffer_is_free_when_nobody_uses_it() -> None:
    pool = Pool()
    pool.resize(8)
    first, second = pool.take(8, 3), pool.take(5, 3)
    assert first.data_ptr() != second.data_ptr()
    place = first.data_ptr()
    view = first[2:]
    del first
    assert pool.take(4, 3).data_ptr() != place  # a view still uses it
    del view
    again = pool.take(2, 3)
    assert again.data_ptr() == place
    assert again.shape == (2, 3)
    assert again.is_contiguous()
    large, wide = pool.take(9, 3), pool.take(8, 4)
    assert large.shape == (9, 3)  # more than a buffer holds: from torch itself
    assert len({large.data_ptr(), wide.data_ptr(), again.data_ptr(), second.data_ptr()}) == 4


def test_what_autograd_keeps_is_in_use() -> None:
    pool = Pool()
    pool.resize(4)
    leaf = torch.randn(4, 3, requires_grad=True)
    kept = pool.take(4, 3)
    kept.fill_(2.0)
    product = leaf * kept  # the backward pass needs `kept`
    del kept
    pool.take(4, 3).fill_(-1.0)
    product.sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert leaf.grad.eq(2.0).all()


def test_without_a_cache_values_are_computed_again(model: Path) -> None:
    calls: list[int] = []

    def compute() -> float:
        calls.append(1)
        return 1.5

    trunk = Trunk(load(model, lean=True), 0, None)
    assert [trunk.cached_value("base_loss", "3 rows", compute) for _ in range(2)] == [1.5, 1.5]
    assert len(calls) == 2
