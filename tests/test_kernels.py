"""The compiled kernels: the same numbers and gradients as plain torch, and as transformers' own blocks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from edgeft import arch
from edgeft.config import ExecutionConfig, Recipe, TrainConfig, UpdateConfig
from edgeft.data.tree import Tree
from edgeft.engine import choose, compiled, kernels, optimizer
from edgeft.engine.attention import Heads
from edgeft.engine.backend import TORCH, Angles, Backend
from edgeft.engine.block import add_norm, feed_forward
from edgeft.engine.limits import KERNEL_GATES
from edgeft.engine.linear import ComputeOptions
from edgeft.engine.load import load
from edgeft.engine.memory import Memory
from edgeft.engine.stack import Batch, Stack, batch_of
from edgeft.errors import ConfigError, EdgeftError, RunError
from edgeft.formats import ggml
from edgeft.methods import scheme as schemes
from edgeft.run.progress import Progress
from edgeft.run.record import EngineChoice
from tests.support.rows import FOREST_ROWS as ROWS
from tests.support.rows import forest_parents


def near(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def seen_in_rows(tree: Tree, queries: np.ndarray) -> np.ndarray:
    """(Q, T): walks up from each query, window tokens at most."""
    seen = np.zeros((len(queries), len(tree.size)), bool)
    for row, i in zip(seen, queries, strict=True):
        above = [j for j in range(i + 1) if i < j + tree.size[j]]
        row[above[-tree.window :] if tree.window else above] = True
    return seen


@pytest.fixture(params=["torch", "kernels"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Both compute every operation; the oracle is float64, or the same operation in one line."""
    return TORCH if request.param == "torch" else kernels.load()


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (50, 0.0), (200, 2.0), (0, 2.0)])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("kind", ["chain", "passages", "random"])
def test_attention_is_that_of_a_dense_mask(backend: Backend, kind: str, some: bool, window: int, cap: float) -> None:
    """some: only a few tokens are queries, as in the last block; window: along a token's row, wherever that forks."""
    check_attention(backend, Tree(forest_parents(kind)).within(window), some, cap, 2)


@pytest.mark.parametrize("threads", [1, 3])
def test_attention_does_not_depend_on_threads(backend: Backend, threads: int) -> None:
    check_attention(backend, Tree(forest_parents("passages")), False, 0.0, threads)


def check_attention(backend: Backend, tree: Tree, some: bool, cap: float, threads: int) -> None:
    length, head, groups, width = len(tree.size), 6, 2, 16
    torch.manual_seed(1)
    queries = np.arange(length)[::7].copy() if some else np.arange(length)
    q, k, v = (
        torch.randn(len(queries), head * width),
        torch.randn(length, groups * width),
        torch.randn(length, groups * width),
    )
    dout, before = torch.randn_like(q), backend.threads
    backend.use_threads(threads)
    try:
        plan = backend.attention_plan(
            tree, Heads(head, groups, width, 0.25, cap), torch.from_numpy(queries) if some else None
        )
        saved = (q, k, v, *backend.attend(plan, q, k, v))
        back, again = (backend.attend_back(plan, saved, dout) for _ in range(2))
    finally:
        backend.use_threads(before)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    a, b, c = (t.view(len(t), -1, width).transpose(0, 1) for t in leaves)
    scores = 0.25 * a @ b.repeat_interleave(3, 0).transpose(1, 2)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    hidden = torch.from_numpy(~seen_in_rows(tree, queries))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    want = (weights @ c.repeat_interleave(3, 0)).transpose(0, 1).reshape(len(queries), -1)
    (want * dout).sum().backward()
    assert near(saved[3], want.detach()) < 1e-6
    for got, leaf in zip(back, leaves, strict=True):
        assert leaf.grad is not None
        assert near(got, leaf.grad) < 2e-6
    assert all(torch.equal(x, y) for x, y in zip(back, again, strict=True))  # to the bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_are_gathered_and_scattered(backend: Backend, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, part, columns = torch.randn(37, 96).to(dtype), torch.randn(37, 32), torch.randperm(96)[:32].sort().values
    wide = x.clone()
    assert torch.equal(backend.gather_columns(x, columns), x[:, columns])
    backend.scatter_columns(part, columns, wide)
    assert torch.equal(wide, x.index_copy(1, columns, part.to(dtype)))


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("part", [32, 24])
def test_rotation_turns_the_first_values_of_heads(backend: Backend, part: int, neighbours: bool) -> None:
    torch.manual_seed(7)
    x, angles = torch.randn(9, 4 * 32), torch.randn(9, part // 2).repeat(1, 2)
    heads = x.view(9, 4, 32)
    shape = (9, 4, part // 2, 2) if neighbours else (9, 4, 2, part // 2)
    a, b = heads[..., :part].reshape(shape).unbind(-1 if neighbours else 2)
    cos, sin = (t[:, None, : part // 2] for t in (angles.cos(), angles.sin()))
    moved = torch.stack([a * cos - b * sin, b * cos + a * sin], -1 if neighbours else 2).reshape(9, 4, part)
    want = torch.cat([moved, heads[..., part:]], -1).view(9, -1)
    turned, turns = x.clone(), Angles(angles.cos(), angles.sin(), neighbours)
    backend.rotate(turned, turns, 32, 1.0)
    assert near(turned, want) < 1e-6
    backend.rotate(turned, turns, 32, -1.0)
    assert near(turned, x) < 1e-6


SIZES = [(5, 64), (33, 576), (7, 50)]


@pytest.mark.parametrize("size", SIZES)
def test_norm_is_autograds(backend: Backend, size: tuple[int, int]) -> None:
    torch.manual_seed(2)
    x, more, dy, other = (torch.randn(size) * 3 for _ in range(4))
    weight = torch.rand(size[1]) + 0.5
    total, y, scale = backend.norm(x, more, weight, 1e-5)
    leaf = (x + more).double().requires_grad_()
    want = leaf * (leaf.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight
    ((want * dy).sum() + (leaf * other).sum()).backward()
    assert near(y, want.detach()) < 1e-6
    assert leaf.grad is not None
    assert near(backend.norm_back(total, scale, weight, dy, other), leaf.grad) < 1e-6


@pytest.mark.parametrize("kind", KERNEL_GATES)
@pytest.mark.parametrize("size", SIZES)
def test_gates_are_autograds(backend: Backend, size: tuple[int, int], kind: str) -> None:
    torch.manual_seed(2)
    dy, gate, up = (torch.randn(size) * 3 for _ in range(3))
    act = torch.empty(size)
    backend.gated(kind, gate, up, act)
    g, u = gate.double().requires_grad_(), up.double().requires_grad_()
    wanted = transformers.activations.ACT2FN[kind](g) * u
    (wanted * dy).sum().backward()
    assert near(act, wanted.detach()) < 1e-6
    again = torch.empty(size)
    backend.gated_back(kind, gate, up, dy, again)
    assert g.grad is not None
    assert u.grad is not None
    assert near(again, wanted.detach()) < 1e-6
    assert near(gate, g.grad) < 1e-6
    assert near(up, u.grad) < 1e-6


@pytest.mark.parametrize("size", [(1, 16), (37, 40), (130, 1536), (67, 5)])
def test_sums_of_bf16_and_float32(backend: Backend, size: tuple[int, int]) -> None:
    torch.manual_seed(3)
    x, total, more = torch.randn(size).bfloat16(), torch.randn(size), torch.randn(size)
    assert torch.equal(backend.add(total, more), total + more)
    assert torch.equal(backend.operand(total, bf16=True), total.bfloat16())
    assert near(backend.sum_rows(x), x.double().sum(0)) < 1e-6
    assert backend.square_sum(total) == pytest.approx(float(total.double().square().sum()), rel=1e-5)


@pytest.mark.parametrize("cap", [0.0, 8.0])
@pytest.mark.parametrize("size", [(1, 16), (9, 1000), (3, 49152), (2, 37)])
def test_cross_entropy_is_torchs(backend: Backend, size: tuple[int, int], cap: float) -> None:
    torch.manual_seed(3)
    logits, targets = torch.randn(size) * 10, torch.randint(size[1], size[:1])
    leaf = logits.double().requires_grad_()
    capped = cap * torch.tanh(leaf / cap) if cap else leaf
    want = torch.nn.functional.cross_entropy(capped, targets, reduction="sum")
    want.backward()  # type: ignore[no-untyped-call]
    if cap:
        copy = logits.clone()
        backend.cap_(copy, cap)
        assert near(copy, capped.detach()) < 1e-6
    assert float(backend.cross_entropy(logits, targets, cap)) == pytest.approx(float(want.detach()), rel=1e-6)
    assert leaf.grad is not None
    assert near(logits, leaf.grad) < (3e-6 if cap else 1e-6)  # 1 - tanh² loses digits where tanh is near 1


@pytest.mark.parametrize("kind", KERNEL_GATES)
def test_exponentials_far_out_are_finite(kind: str) -> None:
    library = kernels.load()
    gate = torch.tensor([[-200.0, -90.0, -1e-8, 0.0, 90.0, 200.0] * 8])
    up, act = torch.ones_like(gate), torch.empty_like(gate)
    library.gated(kind, gate, up, act)
    torch.testing.assert_close(act, transformers.activations.ACT2FN[kind](gate), rtol=1e-5, atol=1e-30)
    library.gated_back(kind, gate, up, act.clone(), None)
    assert gate.isfinite().all()
    assert up.isfinite().all()


def test_tanh_is_near_everywhere() -> None:
    logits = torch.linspace(-30, 30, 4001)[None].clone()
    want = 2.0 * torch.tanh(logits.double() / 2)
    kernels.load().cap_(logits, 2.0)
    assert float(((logits - want).abs() / want.abs().clamp(min=1e-30))[want != 0].max()) < 1e-6


# ---------------------------------------------------------------- whole stacks

WAYS = {
    "sparse": UpdateConfig(blocks=[20, 26, 29], tensors=["q", "v", "o", "up", "down"], norms=True),
    "biases": UpdateConfig(blocks=[21, 29], biases=True, norms=True, weights=False),
    "lora": UpdateConfig(method="lora", blocks=[22, 25], rank=4),
}


def gradients(
    stack: Stack, cut: int, parameters: dict[str, torch.nn.Parameter]
) -> tuple[float, dict[str, torch.Tensor]]:
    """From the same trunk, in float32."""
    from edgeft.data.forest import Forest

    rows, products = Forest(ROWS), stack.options.products
    _, batch = batch_of(rows, list(range(len(ROWS))))
    stack.configure(products="fp32")
    hidden = stack.trunk(batch, cut)
    stack.configure(products=products)
    loss = stack.head.loss(stack.top(hidden, batch, cut), batch.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    for p in parameters.values():
        p.grad = None
    return float(loss.detach()), found


def trained(model: Path, way: str) -> tuple[Stack, int, dict[str, torch.nn.Parameter]]:
    """A stack with a scheme, its cut and what it trains."""
    torch.manual_seed(0)
    stack = load(model)
    scheme = schemes.make(WAYS[way], stack.depth, arch.get("llama"))
    parameters = schemes.apply(stack, scheme, 0)
    for name, parameter in parameters.items():
        if "lora_B" in name or name.endswith("bias"):
            parameter.data.normal_(std=0.02)  # from zero, half of the gradients would be zero
    return stack, scheme.cut, parameters


@pytest.mark.parametrize("way", WAYS)
def test_blocks_are_transformers(model: Path, way: str) -> None:
    stack, cut, parameters = trained(model, way)
    loss, want = gradients(stack, cut, parameters)
    stack.configure(backend=kernels.load())
    for recompute in (False, True):
        stack.configure(recompute="full" if recompute else "none")
        found, got = gradients(stack, cut, parameters)
        assert found == pytest.approx(loss, rel=1e-5)
        assert set(got) == set(want) == set(parameters)
        for name in want:
            assert near(got[name], want[name]) < 1e-4, name


def test_micro_batches_add_up(model: Path) -> None:
    """A second backward pass adds to the gradient of the first."""
    stack = load(model)
    scheme = schemes.make(WAYS["sparse"], stack.depth, arch.get("llama"))
    parameters = schemes.apply(stack, scheme, 0)
    stack.configure(backend=kernels.load())
    _, once = gradients(stack, scheme.cut, parameters)
    for name, parameter in parameters.items():
        parameter.grad = once[name].clone()
    _, twice = gradients(stack, scheme.cut, parameters)
    for name in once:
        torch.testing.assert_close(twice[name], 2 * once[name], rtol=1e-4, atol=1e-6)


def test_nothing_below_the_cut_gets_a_gradient(model: Path) -> None:
    stack = load(model)
    scheme = schemes.make(UpdateConfig(blocks=[28]), stack.depth, arch.get("llama"))
    schemes.apply(stack, scheme, 0)
    library = kernels.load()
    stack.configure(backend=library)
    hidden = torch.randn(9, stack.width)
    normed = add_norm((hidden, None), stack.layers[28].input_layernorm, library)[1]
    assert not normed.requires_grad
    for block in (28, 29):
        modules = tuple(stack.linear(block, tensor) for tensor in ("gate", "up", "down"))
        assert feed_forward(normed, modules, ComputeOptions(library)).requires_grad == (block == 28)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("products", ["bf16", "int8"])
def test_products_of_fewer_bits_are_near(model: Path, way: str, products: str) -> None:
    """Operands of 8 bits: every tensor's gradient within 5 or 15 %."""
    stack, cut, parameters = trained(model, way)
    stack.configure(backend=kernels.load())
    loss, want = gradients(stack, cut, parameters)
    stack.configure(products=products)
    found, got = gradients(stack, cut, parameters)
    assert found == pytest.approx(loss, rel=2e-2)
    assert found != loss
    for name in want:
        assert near(got[name], want[name]) < (0.05 if products == "bf16" else 0.15), name


TYPES = [
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"),
    *("f16", "bf16"),  # by ggml
]


@pytest.mark.parametrize("name", TYPES)
def test_unpacking_is_ggmls(name: str) -> None:
    """Bit for bit, in float32; rounded once in bf16."""
    kind = ggml.type_id(name)
    values = np.random.default_rng(0).standard_normal((37, 768)).astype(np.float32) * 0.1
    values[3, :32] *= 1e-6  # scales below half precision's smallest normal number
    data = ggml.pack(values, kind).reshape(37, -1)
    want = np.empty_like(values)
    ggml.unpack(data, kind, want)
    library = kernels.load()
    assert library.unpacks(kind)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(37, 768, dtype=dtype)
        library.unpack(data, kind, out)
        assert torch.equal(out, torch.from_numpy(want).to(dtype))


# ---------------------------------------------------------------- building and choosing


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGEFT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-no-such-flag"))
    with pytest.raises(EdgeftError, match="could not compile"):
        compiled.build()
    assert not list((tmp_path / "kernels").iterdir())
    monkeypatch.setattr(compiled, "compiler", lambda: None)
    with pytest.raises(EdgeftError, match="no C\\+\\+ compiler"):
        compiled.build()


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGEFT_CACHE", str(tmp_path))
    assert not compiled.is_built()
    made = compiled.build()
    assert compiled.is_built()
    assert kernels.KernelBackend(made, Memory()).lanes in (4, 8, 16)
    monkeypatch.setattr(compiled, "compiler", lambda: None)
    assert compiled.build() == made


class Lines(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def line(self, text: str) -> None:
        self.said.append(text)


def test_auto_compiles_only_what_pays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines, library = Lines(), kernels.load()
    monkeypatch.setattr(kernels, "load", lambda: library)
    monkeypatch.setenv("EDGEFT_CACHE", str(tmp_path))  # nothing is built there

    def chosen(flops: float, how: str = "auto", head: int = 64, before: bool | None = None) -> Backend:
        kept = None if before is None else EngineChoice(before, products="fp32")
        return choose.choose(Recipe(how=ExecutionConfig(compile=how)), head, "silu", flops, lines, kept).backend

    assert chosen(1e9) is TORCH  # a hundredth of a second of work
    assert chosen(1e15) is library
    assert chosen(1e15, "off") is TORCH
    (said,) = lines.said  # once, for the long one
    assert said.startswith("compiled edgeft's kernels")
    monkeypatch.setattr(compiled, "compiler", lambda: None)
    assert chosen(1e15) is TORCH
    assert "no C++ compiler" in lines.said[1]
    assert chosen(1e9, before=True) is library  # as it began
    assert chosen(1e15, "on", before=False) is TORCH
    assert chosen(1e15, "on", head=64) is library
    with pytest.raises(EdgeftError, match="heads"):
        chosen(1e15, "on", head=42)


def test_a_run_keeps_its_products(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = kernels.load()
    monkeypatch.setenv("EDGEFT_CACHE", str(tmp_path))  # without doctor's rates, which would decide

    def chosen(products: str = "auto", how: str = "on", before: EngineChoice | None = None) -> str:
        recipe = Recipe(how=ExecutionConfig(compile=how, products=products))
        return choose.choose(recipe, 64, "silu", 1e15, Lines(), before).products

    told = ["x86_64flags\t\t: fpu avx512_bf16 avx512_vnni"]
    monkeypatch.setattr(compiled, "_processor", lambda: told[0])
    monkeypatch.setattr(kernels, "load", lambda: library)
    assert chosen() == "bf16"
    assert chosen(how="off") == "fp32"
    assert chosen("fp32") == "fp32"
    told[0] = "x86_64flags\t\t: fpu avx512f avx512_vnni"
    assert chosen() == "int8"
    assert chosen(before=EngineChoice(kernels=True, products="bf16")) == "bf16"  # as it began
    assert chosen("bf16") == "bf16"
    told[0] = "aarch64Features\t: fp asimd asimddp"
    assert chosen() == "int8"
    told[0] = "x86_64flags\t\t: fpu avx2"
    assert chosen() == "fp32"
    with pytest.raises(ConfigError, match="dot products"):
        chosen("int8")
    with pytest.raises(ConfigError, match="kernels"):
        chosen("bf16", "off")


def test_lean_is_the_same_model(model: Path) -> None:
    """Without transformers: the same logits. Other architectures: tests/test_hf.py."""
    full, lean = load(model), load(model, lean=True)
    lean.configure(backend=kernels.load())
    ids = list(range(40, 90))
    batch = Batch(
        torch.tensor(ids), torch.arange(len(ids)), Tree.chain(len(ids)), torch.arange(5, 49), torch.tensor(ids[6:])
    )
    assert near(lean.logits(batch), full.logits(batch)) < 1e-5


# ---------------------------------------------------------------- the optimiser

KINDS = [("plain", "fp32"), ("plain", "8bit"), ("kernels", "fp32"), ("kernels", "bf16"), ("kernels", "8bit")]


def stepped(
    by: str,
    how: ExecutionConfig,
    steps: int,
    reload_after: int = -1,
    train: TrainConfig | None = None,
    rates: tuple[float, float | None] = (1e-2, None),
) -> list[torch.Tensor]:
    torch.manual_seed(3)
    parameters = {"a.weight": torch.nn.Parameter(torch.randn(80, 67)), "b.bias": torch.nn.Parameter(torch.randn(67))}
    train = train or TrainConfig(clip=0.0, lr=1e-2)
    library = kernels.load() if by == "kernels" else TORCH
    found = optimizer.make(parameters, train, how, library)
    for step in range(steps):
        found.set_rate(*(rate and rate / (step + 1) for rate in rates))
        with found.last_pass(1.0):
            x = torch.full((3, 80), float(step + 1))
            ((x @ parameters["a.weight"]).tanh() * parameters["b.bias"]).sum().backward()  # type: ignore[no-untyped-call]
        assert found.step() > 0
        assert all(p.grad is None for p in parameters.values())
        if step == reload_after:
            tensors, numbers = found.state()
            found = optimizer.make(parameters, train, how, library)
            found.restore({k: v.clone() for k, v in tensors.items()}, numbers)
    return [p.detach().clone() for p in parameters.values()]


@pytest.mark.parametrize("by", ["plain", "kernels"])
def test_in_place_is_the_same_step(by: str) -> None:
    together, each = stepped(by, ExecutionConfig(), 4), stepped(by, ExecutionConfig(step_in_place=True), 4)
    assert all(torch.equal(a, b) for a, b in zip(together, each, strict=True))


@pytest.mark.parametrize(("by", "kind"), KINDS)
@pytest.mark.parametrize("in_place", [False, True])
def test_its_state_comes_back(by: str, kind: str, in_place: bool) -> None:
    how = ExecutionConfig(optimizer_state=kind, step_in_place=in_place)
    whole, broken = stepped(by, how, 4), stepped(by, how, 4, reload_after=1)
    assert all(torch.equal(a, b) for a, b in zip(whole, broken, strict=True))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("by", "optimizer"), [("plain", "adamw"), ("kernels", "adamw"), ("plain", "sgd")])
def test_biases_and_norms_have_a_rate_of_their_own(by: str, optimizer: str, in_place: bool) -> None:
    how, train = ExecutionConfig(step_in_place=in_place), TrainConfig(clip=0.0, optimizer=optimizer)
    slow, fast, both = (stepped(by, how, 1, train=train, rates=r) for r in ((1e-3, None), (1e-2, None), (1e-3, 1e-2)))
    assert torch.equal(both[0], slow[0])
    assert torch.equal(both[1], fast[1])
    assert not torch.equal(slow[1], fast[1])


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_adamw_is_torchs(clip: float) -> None:
    train = TrainConfig(clip=clip, weight_decay=0.1)
    ours, theirs = (stepped(by, ExecutionConfig(), 5, train=train) for by in ("kernels", "plain"))
    assert all(near(a, b) < 1e-6 for a, b in zip(ours, theirs, strict=True))


def test_adamw_is_the_same_whatever_the_threads() -> None:
    found, before = [], kernels.load().threads
    try:
        for threads in (1, 2):
            kernels.load().use_threads(threads)
            found.append(stepped("kernels", ExecutionConfig(optimizer_state="8bit"), 3, train=TrainConfig(clip=0.05)))
    finally:
        kernels.load().use_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("in_place", [False, True], ids=["together", "in place"])
@pytest.mark.parametrize(
    ("by", "kind", "rule"),
    [("kernels", "fp32", "adamw"), ("kernels", "8bit", "adamw"), ("torch", "fp32", "adamw"), ("torch", "fp32", "sgd")],
)
def test_numbers_outside_a_mask_stay_as_they_are(by: str, kind: str, rule: str, in_place: bool) -> None:
    """To the bit; the others move."""
    torch.manual_seed(3)
    weight, start = torch.nn.Parameter(torch.randn(80, 67)), torch.randn(67)
    bias, mask = torch.nn.Parameter(start.clone()), torch.rand(80, 67) < 0.1
    before = weight.detach().clone()
    how = ExecutionConfig(optimizer_state=kind, step_in_place=in_place)
    train = TrainConfig(lr=1e-2, clip=1.0, optimizer=rule)
    found = optimizer.make({"w": weight, "b": bias}, train, how, kernels.load() if by == "kernels" else TORCH)
    found.masks = {"w": mask, "b": torch.zeros(67, dtype=torch.bool)}
    for _ in range(4):
        with found.last_pass(1.0):
            ((torch.ones(3, 80) @ weight / 80).tanh() * bias).sum().backward()  # type: ignore[no-untyped-call]
        found.step()
    assert torch.equal(weight.detach()[~mask], before[~mask])
    assert torch.equal(bias.detach(), start)
    assert bool((weight.detach()[mask] != before[mask]).all())


@pytest.mark.parametrize(("kind", "close"), [("bf16", 0.01), ("8bit", 0.15)])
def test_small_moments_are_right_on_average(kind: str, close: float) -> None:
    """Gradients of very different sizes, noisy: the same way is gone as with float32 moments."""

    def walked(kind: str) -> torch.Tensor:
        torch.manual_seed(5)
        size = torch.logspace(-3, 0, 1000)
        parameter = torch.nn.Parameter(torch.zeros(1000))
        train, how = TrainConfig(clip=0.0), ExecutionConfig(optimizer_state=kind)
        found = optimizer.make({"w": parameter}, train, how, kernels.load())
        found.set_rate(1e-3)
        for _ in range(300):
            parameter.grad = size * (1 + 2 * torch.randn(1000))
            found.step()
        return parameter.detach()

    exact, rounded = walked("fp32"), walked(kind)
    assert near(rounded, exact) < close
    for part in range(4):  # none of the sizes goes another way: no bias
        of = slice(250 * part, 250 * (part + 1))
        assert abs(float(rounded[of].mean() / exact[of].mean()) - 1) < 0.02, part


def test_bf16_weights_are_right_on_average() -> None:
    """Steps far below the distance to the next bf16 number: rounded to the nearest, none would move."""

    def walked(weights: str, threads: int) -> torch.Tensor:
        torch.manual_seed(5)
        start = torch.randn(4000).bfloat16()
        parameter = torch.nn.Parameter(start.float() if weights == "fp32" else torch.zeros(1).expand(4000))
        found = optimizer.make(
            {"w": parameter}, TrainConfig(clip=0.0), ExecutionConfig(weights=weights), kernels.load()
        )
        stored = parameter.detach() if weights == "fp32" else start.clone()
        found.bf16_weights = {} if weights == "fp32" else {"w": stored}
        found.set_rate(1e-4)
        kernels.load().use_threads(threads)
        for _ in range(100):
            parameter.grad = 1 + torch.randn(4000)
            found.step()
        return stored.float() - start.float()

    before = kernels.load().threads
    try:
        exact, rounded, again = walked("fp32", 2), walked("bf16", 1), walked("bf16", 2)
    finally:
        kernels.load().use_threads(before)
    assert torch.equal(rounded, again)
    assert float(exact.mean()) < -5e-3
    assert abs(float(rounded.mean() / exact.mean()) - 1) < 0.05


def test_bf16_weights_need_the_kernels() -> None:
    for train, backend in ((TrainConfig(), TORCH), (TrainConfig(optimizer="sgd"), kernels.load())):
        with pytest.raises(ConfigError, match="bf16"):
            optimizer.make({"w": torch.nn.Parameter(torch.zeros(3))}, train, ExecutionConfig(weights="bf16"), backend)


def test_a_still_moment_decays() -> None:
    """Second moments fall by 1 % a step: rounded to the nearest byte they would never fall."""
    parameter = torch.nn.Parameter(torch.zeros(4096))
    how = ExecutionConfig(optimizer_state="8bit")
    found = optimizer.make({"w": parameter}, TrainConfig(clip=0.0), how, kernels.load())
    for step in range(201):
        parameter.grad = torch.full((4096,), 1.0 if step == 0 else 0.0)
        parameter.grad[::256] = 1.0  # the largest of each group stays
        found.step()
    codes, scales = found.kept["w"]["second"], found.kept["w"]["scales"][:, 1]
    shares = 2.0 ** ((codes.float() - 255) / 8)  # within 9 % of what a byte stands for
    truth = 0.01 * 0.99**200
    held = (shares.view(16, 256) * scales[:, None])[:, 1:]
    assert 0.85 < float(held.mean()) / truth < 1.15


@pytest.mark.parametrize("compiled", [False, True])
def test_in_place_it_clips_by_the_step_before(compiled: bool) -> None:
    """Gradients ten times as large in the second step: the first's norm decides, and the next one knows."""
    torch.manual_seed(0)
    gradients = [{name: scale * torch.randn(64, 64) for name in "ab"} for scale in (1.0, 10.0, 1.0)]
    norms = [math.sqrt(sum(float(g.square().sum()) for g in step.values())) for step in gradients]
    start = {name: torch.randn(64, 64) for name in "ab"}

    def learned(how: ExecutionConfig, train: TrainConfig, scales: list[float], resumed: bool = False) -> dict[str, Any]:
        parameters = {name: nn.Parameter(value.clone()) for name, value in start.items()}
        engine = kernels.load() if compiled else TORCH
        made = optimizer.make(parameters, train, how, engine)
        for step, scale in zip(gradients, scales, strict=True):
            if resumed:
                before, made = made, optimizer.make(parameters, train, how, engine)
                tensors, numbers = before.state()
                made.restore({key: value.clone() for key, value in tensors.items()}, numbers)
            with made.last_pass(1.0):
                sum((parameters[name] * step[name] * scale).sum() for name in "ab").backward()  # type: ignore[union-attr]
            made.step()
        return {name: value.detach() for name, value in parameters.items()}

    clipped, free = TrainConfig(clip=1.0, lr=1e-2), TrainConfig(clip=0.0, lr=1e-2)
    found = learned(ExecutionConfig(step_in_place=True), clipped, [1.0] * 3)
    again = learned(ExecutionConfig(step_in_place=True), clipped, [1.0] * 3, resumed=True)
    assert all(torch.equal(found[name], again[name]) for name in "ab")
    # the first step's norm is foreseen from the tensors that are there: about right
    wanted = learned(ExecutionConfig(), free, [1 / norms[0], 1 / norms[0], 1 / norms[1]])
    assert all(torch.allclose(found[name], wanted[name], atol=2e-4) for name in "ab")
    late = learned(ExecutionConfig(), clipped, [1.0] * 3)  # each step by its own norm
    assert not any(torch.allclose(found[name], late[name], atol=2e-4) for name in "ab")


@pytest.mark.parametrize(
    ("name", "small"),
    [
        ("layers.3.self_attn.q_proj.bias", True),
        ("layers.3.input_layernorm.weight", True),
        ("layers.3.self_attn.q_norm.weight", True),
        ("layers.3.mlp.up_proj.weight", False),
        ("layers.3.mlp.up_proj.lora_A.default.weight", False),
        ("layers.3.mlp.up_proj.part", False),
    ],
)
def test_the_rate_goes_by_the_name(name: str, small: bool) -> None:
    assert optimizer.is_bias_or_norm(name) == small


def test_gradient_buffers_last_from_step_to_step_and_no_longer_than_their_parameter() -> None:
    gradients, parameter = Memory().gradients, nn.Parameter(torch.zeros(3, 4))
    first = gradients.allocate(parameter)
    assert parameter.grad is first
    parameter.grad = None
    assert gradients.allocate(parameter) is first
    gradients.release(parameter)
    assert parameter.grad is None
    assert gradients.allocate(parameter) is not first
    del parameter, first
    assert not gradients._buffers


def test_bf16_moments_need_the_kernels() -> None:
    with pytest.raises(ConfigError, match="kernels"):
        optimizer.make({}, TrainConfig(), ExecutionConfig(optimizer_state="bf16"), TORCH)


def test_moments_of_an_earlier_version_are_refused() -> None:
    parameters = {"w": torch.nn.Parameter(torch.zeros(4))}
    found = optimizer.make(parameters, TrainConfig(), ExecutionConfig(), kernels.load())
    with pytest.raises(RunError, match="earlier edgeft"):
        found.restore({"adamw.exp_avg.w": torch.zeros(4), "adamw.exp_avg_sq.w": torch.zeros(4)}, {"adamw.step.w": 1.0})
