"""`update.tokens`: gradients pass through a row's last tokens; those before them are read, as in inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeft import arch, config
from edgeft.config import UpdateConfig
from edgeft.data.forest import Forest
from edgeft.data.tree import Tree
from edgeft.engine import kernels
from edgeft.engine.backend import TORCH
from edgeft.engine.load import load
from edgeft.engine.stack import Batch, Stack, batch_of
from edgeft.errors import ConfigError
from edgeft.methods import scheme as schemes
from edgeft.pipeline import stages
from edgeft.plan import buffers
from edgeft.plan.flops import Pass, step_flops
from edgeft.plan.rows import Workload
from edgeft.plan.shape import shape_of, shape_of_config
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from tests.support.rows import encoded, forest_parents, random_row

TOKENS = 2
# two questions on one passage, and another row
PASSAGE = list(range(200, 212))
ROWS = [encoded([*PASSAGE, 5, 6, 7, 100, 101], 15), encoded([*PASSAGE, 8, 9, 102], 14), random_row(15, 4)]
WAYS = {
    "sparse": UpdateConfig(blocks=[24, 27, 29], tensors=["q", "v", "o", "up", "down"], norms=True),
    "biases": UpdateConfig(blocks=[24, 29], biases=True, norms=True, weights=False),
    "low rank": UpdateConfig(blocks="25-29", low_rank=4),
    "lora": UpdateConfig(method="lora", blocks=[25, 29], rank=4),
}


def test_the_context_is_what_stands_above_the_last_tokens() -> None:
    forest = Forest(ROWS)
    live = forest.live(range(3), TOKENS)
    for row, path, first in zip(ROWS, forest.paths, (15, 14, 11), strict=True):
        start = first - 1 - TOKENS
        alone = Forest([row]).live([0], TOKENS)
        assert np.flatnonzero(alone).tolist() == list(range(start, len(row.ids)))
        assert live[path[start:]].all()
    assert not live[forest.paths[0][:11]].any()
    assert live[forest.paths[0][11]]  # the second row's question begins sooner: what hangs below passes gradients, too
    assert forest.live([], TOKENS).sum() == 0
    assert forest.live(range(3), 1000).all()


@pytest.mark.parametrize("kind", ["passages", "random"])
def test_the_context_alone_sees_what_it_saw(kind: str) -> None:
    parents = forest_parents(kind)
    live = np.random.default_rng(0).random(len(parents)) < 0.2
    for node, parent in enumerate(parents):
        live[node] |= parent >= 0 and live[parent]
    tree = Tree(parents, live)
    assert np.array_equal(tree.context_tree().dense(), tree.dense()[np.ix_(tree.context, tree.context)])
    assert Tree(parents, np.ones(len(parents), bool)).live is None


def built(model: Path, update: UpdateConfig) -> tuple[Stack, schemes.Scheme, dict[str, torch.nn.Parameter]]:
    torch.manual_seed(0)
    stack = load(model)
    scheme = schemes.make(update, stack.depth, arch.get("llama"))
    parameters = schemes.apply(stack, scheme, 0)
    for name, parameter in parameters.items():
        if "lora_B" in name or name.endswith(("bias", ".up")):
            parameter.data.normal_(std=0.02)  # from zero, half of the gradients would be zero
    return stack, scheme, parameters


def batch(rows: list[Any]) -> Batch:
    forest = Forest(rows)
    every = list(range(len(rows)))
    return batch_of(forest, every, forest.live(every, TOKENS))[1]


def gradients(loss: torch.Tensor, parameters: dict[str, torch.nn.Parameter]) -> tuple[float, dict[str, torch.Tensor]]:
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    for p in parameters.values():
        p.grad = None
    return float(loss.detach()), found


def by_stack(stack: Stack, cut: int, rows: list[Any], parameters: Any) -> tuple[float, dict[str, torch.Tensor]]:
    one = batch(rows)
    with torch.no_grad():
        hidden = stack.run(stack.embed(one.tokens), one, range(cut))
    return gradients(stack.head.loss(stack.top(hidden, one, cut), one.targets), parameters)


def compare(got: tuple[float, dict[str, torch.Tensor]], want: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    assert set(got[1]) == set(want[1])
    for name, gradient in want[1].items():
        assert float((got[1][name] - gradient).norm() / gradient.norm()) < 1e-4, name


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_over_a_kv_cache_in_transformers(model: Path, way: str) -> None:
    """The oracle: transformers runs the context without autograd into its own KV cache, then the rest with it."""
    from transformers import DynamicCache

    stack, scheme, parameters = built(model, WAYS[way])
    row = ROWS[2]
    one, above, length = batch([row]), range(scheme.cut, stack.depth), len(row.ids)
    context = length - 4 - 1 - TOKENS
    assert one.tree.context.tolist() == list(range(context))
    cache, causal = DynamicCache(), torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    positions = torch.arange(length)[None]
    with torch.no_grad():
        hidden = stack.run(stack.embed(one.tokens), one, range(scheme.cut))[None]
        stack._run_modules(hidden[:, :context], positions[:, :context], causal[..., :context, :context], above, cache)
    out = stack._run_modules(hidden[:, context:], positions[:, context:], causal[..., context:, :], above, cache)
    want = gradients(stack.head.loss(stack.final(out[0, one.at - context]), one.targets), parameters)
    assert set(want[1]) == set(parameters)
    compare(by_stack(stack, scheme.cut, [row], parameters), want)
    stack.configure(backend=kernels.load())
    compare(by_stack(stack, scheme.cut, [row], parameters), want)


@pytest.mark.parametrize("way", WAYS)
def test_kernels_compute_a_forest_as_plain_torch(model: Path, way: str) -> None:
    stack, scheme, parameters = built(model, WAYS[way])
    want = by_stack(stack, scheme.cut, ROWS, parameters)
    stack.configure(backend=kernels.load())
    for recompute in {"none", "full", scheme.recompute(True)}:
        stack.configure(recompute=recompute)
        compare(by_stack(stack, scheme.cut, ROWS, parameters), want)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("update", "recompute"),
    [
        (UpdateConfig(blocks="24-27", low_rank=16), False),
        (UpdateConfig(blocks="24-27", low_rank=16), True),
        (UpdateConfig(blocks="24-27", tensors=["q", "k", "v", "o", "up", "down"]), False),
        (UpdateConfig(blocks="24-27", tensors=["q", "k", "v", "o", "up", "down"]), True),
    ],
    ids=["low rank", "low rank, recomputed", "sparse", "sparse, recomputed"],
)
def test_planned_buffers_are_those_of_the_pool(model: Path, update: UpdateConfig, recompute: bool, half: bool) -> None:
    stack = load(model, lean=True)
    scheme = schemes.make(update, stack.depth, arch.get("llama"))
    schemes.apply(stack, scheme, 0)
    stack.configure(backend=kernels.load())
    one = batch([random_row(40, 6), random_row(24, 5)])
    hidden = stack.trunk(one, scheme.cut)
    stack.configure(products="bf16" if half else "fp32", recompute=scheme.recompute(recompute))
    pool = stack.options.backend.memory.pool
    pool.resize(128)
    try:
        for _ in range(2):
            stack.head.loss(stack.top(hidden, one, scheme.cut), one.targets).backward()  # type: ignore[no-untyped-call]
        held = pool.held_bytes() / pool.rows
    finally:
        TORCH.memory.pool.resize(0)
    top = buffers.TopPass(shape_of(str(model), "auto"), scheme, half, recompute)
    top.run(len(one.tree.live), len(torch.unique(one.at)), len(one.tree.context))  # type: ignore[arg-type]
    planned = sum(size * len(some) for size, some in top.pool.buffers.items())
    assert planned == pytest.approx(held, rel=0.03)


def test_products_are_those_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = load(model, lean=True)
    scheme = schemes.make(UpdateConfig(blocks="26-28", tensors=["q", "v", "down"]), stack.depth, arch.get("llama"))
    schemes.apply(stack, scheme, 0)
    stack.configure(backend=kernels.load())
    one = batch(ROWS)
    hidden = stack.trunk(one, scheme.cut)
    flops = []
    backend, multiply = stack.options.backend, kernels.KernelBackend.mm

    def counted(self: Any, x: torch.Tensor, y: Any, *more: Any, **options: Any) -> torch.Tensor:
        flops.append(2 * len(x) * y.shape[0] * y.shape[1])
        return multiply(self, x, y, *more, **options)

    with monkeypatch.context() as patched:
        patched.setattr(type(backend), "mm", counted)
        stack.head.loss(stack.top(hidden, one, scheme.cut), one.targets).backward()  # type: ignore[no-untyped-call]
    sizes = Pass(len(one.tokens), 0, len(torch.unique(one.at)), 0, len(one.targets), len(one.tree.live), 0)  # type: ignore[arg-type]
    want = step_flops(shape_of_config(stack.arch, stack.config), scheme, sizes)
    assert sum(flops) == pytest.approx(want, rel=1e-9)


def test_the_plan_counts_fewer_gradients(model: Path) -> None:
    recipe = config.load_recipe("sparse-bp")
    load_ = Workload([random_row(200, 8, n) for n in range(16)], [random_row(200, 8, 99)], recipe)
    assert load_.with_gradients(0) is load_
    few = load_.with_gradients(32)
    one, other = load_.widest(1024), few.widest(1024)
    assert (one.live, one.tokens) == (other.tokens, other.tokens)
    assert other.live == other.tokens // 200 * (32 + 1 + 8)
    shape = shape_of(str(model), "auto")
    scheme = schemes.make(schemes.with_blocks(recipe.update, shape.depth, shape.weights), shape.depth, shape.arch)
    assert step_flops(shape, scheme, other) < 0.65 * step_flops(shape, scheme, one)
    top = [buffers.TopPass(shape, scheme, True, False).peak_bytes(sizes) for sizes in (one, other)]
    assert top[1] < 0.5 * top[0]


def test_a_large_model_has_few_by_size() -> None:
    update = UpdateConfig(tokens="by size")
    found = [schemes.with_blocks(update, 20, weights).tokens for weights in (schemes.LARGE - 1, schemes.LARGE)]
    assert found == [0, schemes.LARGE_TOKENS]
    for wrong in (-1, 2.5, "many", True):
        with pytest.raises(ConfigError, match="tokens"):
            config.apply_sets(config.load_recipe("sparse-bp"), [f"update.tokens={wrong}"])


def test_a_run_learns_and_directions_are_chosen(three_blocks: Path, tmp_path: Path) -> None:
    files = [f"data.path={three_blocks}", f"model.path={three_blocks.with_name('model.gguf')}"]
    sets = ["update.tokens=4", "train.steps=6", "train.batch_rows=4", "how.trunk_place=run", "how.compile=on"]
    run = Run.start(tmp_path / "run", config.apply_sets(config.load_recipe("sparse-bp"), [*files, *sets]), False)
    stages.train(run, Progress())
    done = run.read_json(run.done)
    assert done is not None
    assert done["best_loss"] < done["base_loss"]
