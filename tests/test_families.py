"""Every architecture on a small random model: the numbers of transformers and of llama.cpp, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from edgeft import arch
from edgeft.config import UpdateConfig
from edgeft.data.forest import Forest
from edgeft.data.tokens import Encoded
from edgeft.engine import kernels
from edgeft.engine.load import load
from edgeft.engine.stack import Stack, batch_of
from edgeft.evaluate.llamacpp import LlamaFile
from edgeft.export.gguf import export_gguf
from edgeft.export.hf import export_hf
from edgeft.formats.gguf import GGUF
from edgeft.methods import scheme as schemes
from edgeft.plan.buffers import TopPass
from edgeft.plan.shape import shape_of
from tests.support.families import DEEP, KINDS, ROWS, Families, in_transformers
from tests.support.models import reference

kinds = pytest.mark.parametrize("kind", KINDS)
EVERYTHING = UpdateConfig(blocks="0-3", norms=True)
NORMS = UpdateConfig(blocks="0-3", norms=True, weights=False)


@pytest.fixture(scope="module")
def made(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"), tiny)


def near(got: Any, want: Any) -> float:
    got, want = torch.as_tensor(got).double(), torch.as_tensor(want).double()
    return float((got - want).norm() / want.norm())


def by_kernels(file: Path) -> Stack:
    stack = load(file, lean=True)
    stack.configure(backend=kernels.load())
    return stack


def logits_of(stack: Stack, rows: list[Encoded]) -> torch.Tensor:
    return stack.logits(batch_of(Forest(rows), range(len(rows)))[1])


def want_logits(folder: Path, rows: list[Encoded]) -> torch.Tensor:
    model = reference(folder, attn_implementation="eager")
    with torch.no_grad():
        every = [model(torch.tensor(row.ids[None].astype(np.int64))).logits[0, :-1] for row in rows]
    return torch.cat([logits[row.trained[1:]] for logits, row in zip(every, rows, strict=True)])


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in DEEP)])
def test_logits_are_those_of_transformers_and_llama_cpp(kind: str, made: Families) -> None:
    folder, file = made(kind)
    want = want_logits(in_transformers(folder), ROWS)
    for stack in (load(folder, "dense"), load(file, lean=True), load(file)):
        if stack.source == str(folder):
            assert near(logits_of(stack, ROWS), want) < 1e-5  # transformers' own blocks along the tree
        stack.configure(backend=kernels.load())
        assert near(logits_of(stack, ROWS), want) < 1e-5
    assert stack.arch is arch.get(kind.split("-")[0])
    with LlamaFile(file, n_ctx=64, threads=2) as llama:
        every = [llama.target_logits(row.ids.tolist(), np.flatnonzero(row.trained[1:]).tolist()) for row in ROWS]
    assert near(np.concatenate(every), want) < 5e-3


def gradients(stack: Stack, update: UpdateConfig, groups: list[list[int]]) -> dict[str, torch.Tensor]:
    """Of the summed loss over ROWS, by name; a pass for each group of rows."""
    chosen = schemes.make(update, stack.depth, stack.arch)
    torch.manual_seed(0)
    trained = schemes.apply(stack, chosen, 0)
    for group in groups:
        batch = batch_of(Forest(ROWS), group)[1]
        loss = stack.head.loss(stack.top(stack.trunk(batch, 0), batch, 0), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in trained.items() if parameter.grad is not None}


def want_gradients(folder: Path) -> dict[str, torch.Tensor]:
    model = reference(folder, attn_implementation="eager")
    for row in ROWS:
        ids = torch.tensor(row.ids.astype(np.int64))
        logits = model(ids[None]).logits[0, :-1][row.trained[1:]]
        torch.nn.functional.cross_entropy(logits, ids[1:][row.trained[1:]], reduction="sum").backward()
    return {name.removeprefix("model."): p.grad for name, p in model.named_parameters()}


@kinds
def test_gradients_are_those_of_autograd(kind: str, made: Families) -> None:
    """Rows of one tree, in all ways of recomputing; and each row by itself."""
    folder, file = made(kind)
    want = want_gradients(in_transformers(folder))
    apart, tree = [[0], [1], [2]], [[0, 1, 2]]
    cases = (
        ("none", EVERYTHING, tree),
        ("full", EVERYTHING, tree),
        ("none", EVERYTHING, apart),
        ("selective", NORMS, tree),
    )
    for recompute, update, groups in cases:
        stack = by_kernels(file)
        stack.configure(recompute=recompute)
        got = gradients(stack, update, groups)
        assert len(got) == 4 * (len(stack.arch.norms) + 7 * update.weights)
        for name, gradient in got.items():
            assert near(gradient, its_rows(stack, name, want)) < 1e-4, (name, recompute, groups)


def its_rows(stack: Stack, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What transformers has of a tensor, maybe as rows of one that it shares with others."""
    if name in tensors:
        return tensors[name]
    (linear,) = (one for one in stack.arch.linears.values() if f".{one.path}." in name)
    return tensors[name.replace(linear.path, linear.stored)][linear.rows(stack.arch.sizes(stack.config))]


@kinds
def test_exported_files_hold_what_was_trained(kind: str, made: Families, tmp_path: Path) -> None:
    _, file = made(kind)
    stack = by_kernels(file)
    chosen = schemes.make(UpdateConfig(blocks=[1, 2], tensors=["q", "k", "up"], norms=True), 4, stack.arch)
    with torch.no_grad():
        for number, parameter in enumerate(schemes.apply(stack, chosen, 0).values()):
            torch.manual_seed(number)
            parameter.add_(torch.randn_like(parameter) * 0.05)
    want = logits_of(stack, ROWS)
    assert near(want, logits_of(by_kernels(file), ROWS)) > 1e-2
    made_file = tmp_path / "new.gguf"
    exported = export_gguf(file, schemes.updated(stack, chosen), made_file, "f16")
    old, new = GGUF.open(file), GGUF.open(made_file)
    same = {name for name in old.tensors if np.array_equal(old.bytes(name), new.bytes(name))}
    trained = {stack.arch.linears[tensor].gguf for tensor in ("q", "k", "up")}
    assert len(old.tensors) - len(same) == exported.updated == 2 * (len(trained) + len(stack.arch.norms))
    folder = export_hf(str(file), schemes.updated(stack, chosen), tmp_path / "folder")
    for got in (logits_of(by_kernels(made_file), ROWS), want_logits(folder, ROWS)):
        assert near(got, want) < 2e-3  # f16


@kinds
def test_a_folder_is_tuned_and_written_again(kind: str, made: Families, tmp_path: Path) -> None:
    """Names and joined tensors stay those of the folder; what was not trained keeps its bytes."""
    folder, _ = made(kind)
    stack = load(folder, "dense")
    chosen = schemes.make(UpdateConfig(blocks=[1], tensors=["k", "o", "gate"]), 4, stack.arch)
    with torch.no_grad():
        for number, parameter in enumerate(schemes.apply(stack, chosen, 0).values()):
            torch.manual_seed(number)
            parameter.add_(torch.randn_like(parameter) * 0.05)
    want, before = logits_of(stack, ROWS), load_file(folder / "model.safetensors")
    out = export_hf(str(folder), schemes.updated(stack, chosen), tmp_path / "folder")
    assert near(logits_of(load(out, "dense"), ROWS), want) < 2e-3  # f16
    after = load_file(out / "model.safetensors")
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert set(after) == set(before)
    assert len(changed) == len({stack.arch.linears[tensor].gguf for tensor in ("k", "o", "gate")})


LOW_RANK = UpdateConfig(blocks="1-3", low_rank=4)


@pytest.mark.parametrize("update", [UpdateConfig(blocks="1-3"), LOW_RANK, NORMS], ids=["sparse", "low rank", "norms"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@kinds
def test_planned_buffers_are_those_of_the_pool(
    kind: str, made: Families, update: UpdateConfig, recompute: bool
) -> None:
    _, file = made(kind)
    stack = by_kernels(file)
    scheme = schemes.make(update, stack.depth, stack.arch)
    schemes.apply(stack, scheme, 0)
    stack.configure(recompute=scheme.recompute(recompute))
    batch = batch_of(Forest(ROWS), range(3))[1]
    hidden, pool = stack.trunk(batch, scheme.cut), stack.options.backend.memory.pool
    pool.resize(128)
    try:
        for _ in range(2):  # the second pass finds all that it needs
            loss = stack.head.loss(stack.top(hidden, batch, scheme.cut), batch.targets)
            loss.backward()  # type: ignore[no-untyped-call]
        held = pool.held_bytes() / pool.rows
    finally:
        pool.resize(0)
    top = TopPass(shape_of(str(file), "auto"), scheme, False, recompute)
    top.run(len(batch.tokens), len(torch.unique(batch.at)))
    assert sum(size * len(some) for size, some in top.pool.buffers.items()) == pytest.approx(held, rel=0.05)
