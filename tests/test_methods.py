"""The ways to train: some channels, biases and norms, lite branches, int8 weights, blocks in turns.

Gradients are held to plain autograd through transformers' own models, in both engines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeft import arch, config, methods
from edgeft.config import ExecutionConfig, Recipe, TrainConfig, UpdateConfig
from edgeft.data import tokens
from edgeft.data.forest import Forest, epoch_order
from edgeft.data.rows import Row
from edgeft.data.tokens import Encoded
from edgeft.engine import kernels, optimizer
from edgeft.engine.backend import TORCH
from edgeft.engine.load import load, load_hf
from edgeft.engine.stack import Batch, Stack, batch_of
from edgeft.errors import ConfigError
from edgeft.export.hf import export_hf
from edgeft.export.verify import MAX_KL
from edgeft.formats.source import model_source
from edgeft.methods import METHODS, QAS
from edgeft.methods import scheme as schemes
from edgeft.methods.base import weight_of
from edgeft.methods.int8 import Int8Optimizer
from edgeft.methods.layer import checkpoint_tensors, trained_linears
from edgeft.methods.sparse import largest
from edgeft.pipeline import stages
from edgeft.plan.flops import choosing_rows
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train import build, checkpoint
from tests.support.models import random_hf, reference
from tests.support.rows import FOREST_ROWS as ROWS

IDS = [1, 93, 198, 156, 28, 38, 159, 46, 47, 2, 198, 104, 52, 20, 253, 245, 100, 190, 17, 33]
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def near(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random model of a family, in float32."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp("small") / family
            made[family] = random_hf(folder, family, scale=0.15, **SHAPE)
        return made[family]

    return make


def batch() -> Batch:
    from edgeft.data.tree import Tree

    n = len(IDS)
    ids = torch.tensor(IDS)
    return Batch(ids, torch.arange(n), Tree.chain(n), torch.arange(n - 1), ids[1:])


def loss_of(stack: Stack) -> torch.Tensor:
    data = batch()
    with torch.no_grad():
        hidden = stack.embed(data.tokens)
    return stack.head.loss(stack.top(hidden, data, 0), data.targets)


def gradients(stack: Stack, parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    loss_of(stack).backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}  # the buffer is used again
    for p in parameters.values():
        p.grad = None
    return found


def as_trained(model: Any, stack: Stack) -> Any:
    """transformers' model with the weights that the stack has: packed ones are not what was packed."""
    for number, block in enumerate(model.model.layers):
        for path in (linear.path for linear in stack.arch.linears.values()):
            ours: Any = stack.layers[number].get_submodule(path)
            theirs = block.get_submodule(path)
            theirs.weight = torch.nn.Parameter(weight_of(ours))
            if ours.bias is not None:
                theirs.bias = torch.nn.Parameter(ours.bias.detach().clone())
    return model


ENGINES = ["torch", "kernels"]


def built(path: Path, update: UpdateConfig, engine: str, frozen: str = "dense") -> tuple[Stack, schemes.Scheme, Any]:
    stack = load_hf(str(path), frozen)
    stack.configure(backend=kernels.load() if engine == "kernels" else TORCH)
    scheme = schemes.make(update, stack.depth, stack.arch)
    return stack, scheme, schemes.apply(stack, scheme, 3)


# ---------------------------------------------------------------- some channels

SLICED = {
    "parts": [
        {"blocks": [0], "tensors": ["q", "k", "v", "gate", "up"], "channels": 0.25},  # parts of the input are kept
        {"blocks": [1], "tensors": ["q", "v", "o", "down", "up"], "channels": 0.5, "biases": True, "norms": True},
        {"blocks": [1], "tensors": ["k", "gate"], "channels": 1.0},  # the whole input is
        {"blocks": [2], "tensors": ["q", "o", "down"], "channels": 0.125},
    ]
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("frozen", ["dense", "int8"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_sliced_gradients_are_columns_of_plain_autograds(
    small: Callable[[str], Path], family: str, frozen: str, engine: str
) -> None:
    path = small(family)
    update = config.build(UpdateConfig, {**SLICED, "choose": "weight"}, "update")
    stack, _, parameters = built(path, update, engine, frozen)
    with torch.no_grad():
        for name, parameter in parameters.items():  # away from where they began: columns must be read from the parts
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    model = as_trained(reference(path), stack)
    for name, parameter in parameters.items():
        if "norm" in name:
            model.get_submodule(f"model.{name.removesuffix('.weight')}").weight = torch.nn.Parameter(parameter.detach())
    whole = [name.replace(".part", ".weight") for name in parameters]
    want = plain_small(model, whole)
    for recompute in (False, True):
        stack.configure(recompute="full" if recompute else "none")
        got = gradients(stack, parameters)
        assert got.keys() == parameters.keys()
        for name in got:
            full = want[name.replace(".part", ".weight")]
            if name.endswith(".part"):
                columns = stack.model.get_buffer(name.replace(".part", ".columns"))
                assert len(columns) < full.shape[1]
                assert got[name].shape == (full.shape[0], len(columns))
                full = full[:, columns]
            assert near(got[name], full) < 1e-4, name


def plain_small(model: Any, names: list[str]) -> dict[str, torch.Tensor]:
    """Plain autograd through all of transformers' model."""
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    for name in names:
        parameters[f"model.{name}"].requires_grad_(True)
    logits = model(torch.tensor([IDS])).logits[0, :-1]
    torch.nn.functional.cross_entropy(logits, torch.tensor(IDS[1:]), reduction="sum").backward()
    return {name: parameters[f"model.{name}"].grad for name in names}


def test_channels_are_those_asked_for(small: Callable[[str], Path]) -> None:
    for choose in ("weight", "first", "gradient"):
        update = UpdateConfig(blocks=[1], tensors=["up"], channels=0.25, choose=choose)
        stack, _, parameters = built(small("Llama"), update, "torch")
        layer: Any = stack.linear(1, "up")
        base = weight_of(layer.base)
        columns = layer.columns.tolist()
        assert columns == sorted(set(columns))
        assert len(columns) == 32
        if choose == "weight":
            sizes = base.norm(dim=0)
            assert sizes[columns].min() >= sizes[[c for c in range(128) if c not in columns]].max()
        else:  # by gradients: until they are known
            assert columns == list(range(32))
        assert torch.equal(parameters["layers.1.mlp.up_proj.part"], base[:, columns])
        assert torch.equal(weight_of(layer), base)


# ---------------------------------------------------------------- low rank


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_low_rank_gradients_are_projections_of_plain_autograds(
    small: Callable[[str], Path], family: str, engine: str
) -> None:
    """dB = G Aᵀ with G the gradient of the merged weight; beside tensors that are trained whole and in part."""
    parts = [
        {"blocks": [0, 2], "low_rank": 4},
        {"blocks": [1], "tensors": ["q", "o", "up"], "low_rank": 8},
        {"blocks": [1], "tensors": ["v"]},
        {"blocks": [1], "tensors": ["down"], "channels": 0.25},
    ]
    path = small(family)
    stack, scheme, parameters = built(path, config.build(UpdateConfig, {"parts": parts}, "update"), engine)
    assert not scheme.frugal
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    paths = [name.removesuffix(".up") for name in parameters if name.endswith(".up")]
    assert len(paths) == 17
    want = plain_small(as_trained(reference(path), stack), [f"{path}.weight" for path in paths])
    for mode in ("none", "full"):
        stack.configure(recompute=mode)
        got = gradients(stack, parameters)
        for name in paths:
            layer: Any = stack.model.get_submodule(name)
            assert near(got[f"{name}.up"], want[f"{name}.weight"] @ layer.down.T) < 1e-4, name


def test_directions_are_those_of_the_largest_gradients(small: Callable[[str], Path]) -> None:
    """Of a gradient whose rank is that of the update, the directions found hold all."""
    stack, scheme, _ = built(small("Llama"), UpdateConfig(blocks=[1], low_rank=20), "torch")
    before = {name: stack.linear(1, name).down.clone() for name in ("q", "up")}  # type: ignore[operator]
    assert scheme.method.choose_channels(stack, scheme, lambda: loss_of(stack).backward())  # type: ignore[no-untyped-call]
    whole, _, parameters = built(small("Llama"), UpdateConfig(blocks=[1]), "torch")
    full = gradients(whole, parameters)
    for name in ("q", "up"):
        layer: Any = stack.linear(1, name)
        gradient = full[f"layers.1.{stack.arch.linears[name].path}.weight"]  # of rank 20, the row's tokens
        rows = layer.down / layer.down.norm(dim=1)[:, None]
        assert near(rows[:16] @ rows[:16].T, torch.eye(16)) < 1e-4  # the last ones hold next to nothing
        assert near(gradient @ rows.T @ rows, gradient) < 1e-2
        assert near(gradient @ before[name].T @ before[name], gradient) > 0.5


# ---------------------------------------------------------------- what is kept for the backward pass


@pytest.fixture
def buffers() -> Any:
    TORCH.memory.pool.resize(64)
    yield TORCH.memory.pool
    TORCH.memory.pool.resize(0)


def kept(stack: Stack, cut: int, buffers: Any) -> int:
    """Bytes of activations that are in use between the forward and the backward pass."""
    _, rows = batch_of(Forest(ROWS), list(range(len(ROWS))))
    hidden = stack.trunk(rows, cut)
    buffers.resize(64)
    loss = stack.head.loss(stack.top(hidden, rows, cut), rows.targets)
    used: int = buffers.used_bytes()
    loss.backward()  # type: ignore[no-untyped-call]
    return used


def prepared(model: Path, update: UpdateConfig) -> tuple[Stack, schemes.Scheme]:
    stack = load(model, lean=True)
    stack.configure(backend=kernels.load())
    scheme = schemes.make(update, stack.depth, stack.arch)
    schemes.apply(stack, scheme, 0)
    return stack, scheme


def test_biases_and_lite_branches_keep_an_eighth_of_full_training(model: Path, buffers: Any) -> None:
    found = {}
    for name in ("full", "bias-norm", "tinytl"):
        stack, scheme = prepared(model, replace(config.load_recipe(name).update, blocks="all"))
        stack.configure(recompute="none" if name == "full" else "selective")
        found[name] = kept(stack, scheme.cut, buffers)
    assert found["bias-norm"] <= found["full"] / 8
    assert found["tinytl"] <= 1.2 * found["bias-norm"]


def test_a_share_of_the_channels_keeps_that_share_of_the_inputs(model: Path, buffers: Any) -> None:
    found = {}
    for channels in (1.0, 0.25):
        update = UpdateConfig(blocks="24-28", tensors=["q", "k", "v", "gate", "up"], channels=channels)
        stack, scheme = prepared(model, update)
        found[channels] = kept(stack, scheme.cut, buffers)
    none = UpdateConfig(blocks="24-28", tensors=["q", "k", "v", "gate", "up"], biases=True, weights=False)
    stack, scheme = prepared(model, none)
    least = kept(stack, scheme.cut, buffers)  # what attention, norms and gates need
    whole, part = found[1.0] - least, found[0.25] - least
    assert whole == 5 * 2 * 64 * 4 * 576  # the input of q, k and v, and that of gate and up
    assert part == 5 * (3 + 2) * 64 * 4 * 160  # each layer has its own channels


def test_selective_recomputation_computes_the_same(model: Path) -> None:
    update = UpdateConfig(method="tinytl", blocks="25-29", biases=True, norms=True, rank=4)
    stack, scheme = prepared(model, update)
    parameters = {name: p for name, p in stack.model.named_parameters() if p.requires_grad}
    for name, parameter in parameters.items():
        if "norm" not in name:
            parameter.data.normal_(std=0.02)
    _, rows = batch_of(Forest(ROWS), list(range(len(ROWS))))
    found = []
    for frugal in (False, True):
        stack.configure(recompute="selective" if frugal else "none")
        loss = stack.head.loss(stack.top(stack.trunk(rows, scheme.cut), rows, scheme.cut), rows.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        found[-1]["loss"] = loss.detach()
        for p in parameters.values():
            p.grad = None
    assert len(found[0]) == len(parameters) + 1
    for name in found[0]:
        assert near(found[1][name], found[0][name]) < 1e-4, name


# ---------------------------------------------------------------- lite branches


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_lite_gradients_are_plain_autograds(small: Callable[[str], Path], family: str, engine: str) -> None:
    update = UpdateConfig(method="tinytl", blocks="all", biases=True, norms=True, rank=8, alpha=16.0)
    stack, scheme, parameters = built(small(family), update, engine)
    layers: dict[str, Any] = dict(trained_linears(stack))
    assert len(layers) == 3 * 7
    assert len([name for name in parameters if name.endswith("bias")]) == 3 * (7 if family == "Llama" else 3)
    for name, value in schemes.updated(stack, scheme):  # it begins where the base is
        if name.endswith("proj.weight"):
            assert torch.equal(value, weight_of(layers[name.removesuffix(".weight")].base))
    torch.manual_seed(1)
    for layer in layers.values():
        layer.up.data.normal_(std=0.05)
    model = as_trained(reference(small(family)), stack)
    whole = {name: re.sub(r"\.up$", ".weight", name) for name in parameters}
    want = plain_small(model, list(whole.values()))
    got = gradients(stack, parameters)
    assert got.keys() == parameters.keys()
    for name in got:
        wanted = want[whole[name]]
        if name.endswith(".up"):
            wanted = 2.0 * wanted @ layers[name.removesuffix(".up")].down.T
        assert near(got[name], wanted) < 1e-4, name


def test_a_projection_comes_from_the_seed_and_the_name(small: Callable[[str], Path]) -> None:
    update = UpdateConfig(method="tinytl", blocks=[0, 1], tensors=["q", "v"], rank=4)

    def downs(seed: int) -> dict[str, torch.Tensor]:
        stack = load_hf(str(small("Llama")), "dense")
        parameters = schemes.apply(stack, schemes.make(update, 3, arch.get("llama")), seed)
        assert checkpoint_tensors(stack, parameters).keys() == parameters.keys()  # A is not stored
        assert all(name.endswith(".up") for name in parameters)
        return {name: layer.down for name, layer in trained_linears(stack).items()}  # type: ignore[misc]

    first, again, other = downs(1), downs(1), downs(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    different = [*first.values(), *other.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(different) for b in different[:i])
    for down in first.values():
        torch.testing.assert_close(down.norm(dim=1), torch.ones(4))


# ---------------------------------------------------------------- int8 weights


def optimizer_of(stack: Stack, parameters: Any, update: UpdateConfig, train: TrainConfig, how: ExecutionConfig) -> Any:
    return methods.get(update.method).optimizer(stack, parameters, Recipe(update=update, train=train, how=how))


def learned(
    path: Path, update: UpdateConfig, train: TrainConfig, how: ExecutionConfig | None = None, steps: int = 12
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights after some steps on one row, and the losses on the way."""
    how = how or ExecutionConfig()
    stack, scheme, parameters = built(path, update, "torch")
    moves = optimizer_of(stack, parameters, update, train, how)
    losses = []
    for _ in range(steps):
        moves.set_rate(train.lr)
        loss = loss_of(stack)
        losses.append(float(loss.detach()))
        with moves.last_pass(losses[-1]):
            loss.backward()  # type: ignore[no-untyped-call]
        moves.step()
    return dict(schemes.updated(stack, scheme)), losses


INT8 = UpdateConfig(method="qas", blocks=[0, 2], tensors=["q", "v", "down"], biases=True, norms=True)
SGD = TrainConfig(optimizer="sgd", lr=2e-3, clip=1.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_int8_gradients_are_plain_autograds(small: Callable[[str], Path], engine: str) -> None:
    stack, _, parameters = built(small("Llama"), INT8, engine)
    layers: dict[str, Any] = dict(trained_linears(stack))
    assert len(layers) == 6
    for layer in layers.values():
        assert layer.codes.dtype == torch.int8
        assert layer.weight.untyped_storage().nbytes() == 4  # no float32 copy
    assert not any(isinstance(m, torch.nn.Linear) for layer in layers.values() for m in layer.modules())
    want = plain_small(as_trained(reference(small("Llama")), stack), list(parameters))
    got = gradients(stack, parameters)
    for name in want:
        assert near(got[name], want[name]) < 1e-4, name


def test_int8_weights_learn_by_sgd(small: Callable[[str], Path]) -> None:
    _, losses = learned(small("Llama"), replace(INT8, biases=False, norms=False), SGD)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("method", ["sgd", "adamw"])
def test_moments_of_8_bits_learn_as_well(small: Callable[[str], Path], method: str) -> None:
    path = small("Llama")
    train = SGD if method == "sgd" else TrainConfig(lr=2e-3)
    _, wanted = learned(path, INT8, train)
    _, small_ones = learned(path, INT8, train, ExecutionConfig(optimizer_state="8bit"))
    assert wanted[-1] < 0.9 * wanted[0]
    assert small_ones[0] - small_ones[-1] == pytest.approx(wanted[0] - wanted[-1], rel=0.05)


def test_in_place_is_the_same_step(small: Callable[[str], Path]) -> None:
    path, train = small("Llama"), replace(SGD, clip=0.0, lr=1e-4)
    together, _ = learned(path, INT8, train, steps=3)
    each, _ = learned(path, INT8, train, ExecutionConfig(step_in_place=True), steps=3)
    assert all(torch.equal(together[name], each[name]) for name in together)


def int8_layer() -> Any:
    """A weight (64, 64) of values in ±1."""
    torch.manual_seed(2)
    base = torch.nn.Linear(64, 64, bias=False)
    base.weight.data.uniform_(-1, 1)
    return QAS.build(base, schemes.make(INT8, 3, arch.get("llama")), 1.0, 0, "a")


def moved(gradients: list[torch.Tensor]) -> torch.Tensor:
    """By how many units int8_layer's weights move in SGD on these gradients."""
    layer = int8_layer()
    start = layer.codes.float()
    recipe = Recipe(train=replace(SGD, momentum=0.0, clip=0.0))
    optimizer = Int8Optimizer({"a.weight": layer.weight}, {"a.weight": layer}, recipe, TORCH)
    optimizer.set_rate(1.0)
    for gradient in gradients:
        layer.weight.grad = gradient.clone()
        with optimizer.last_pass(1.0):
            pass
        optimizer.step()
    return layer.codes.float() - start  # type: ignore[no-any-return]


@pytest.mark.parametrize("train", [replace(SGD, lr=0.02), TrainConfig(lr=0.03)], ids=["sgd", "adamw"])
def test_int8_weights_move_as_float32_ones_would(train: TrainConfig) -> None:
    """Whatever the scale of a row, up to one unit of rounding in each step."""
    layer, train = int8_layer(), replace(train, clip=0.0, weight_decay=0.1)
    layer.scales *= torch.logspace(0, 1, 64)
    start, scales = layer.codes.float(), layer.scales[:, None]
    weight = torch.nn.Parameter(layer.dense_weight())
    int8 = Int8Optimizer({"a.weight": layer.weight}, {"a.weight": layer}, Recipe(train=train), TORCH)
    float32 = optimizer.make({"a.weight": weight}, train, ExecutionConfig(), TORCH)
    for _ in range(3):
        gradient = torch.randn(64, 64)
        for step, parameter in ((int8, layer.weight), (float32, weight)):
            step.set_rate(train.lr)
            parameter.grad = gradient.clone()
            with step.last_pass(1.0):
                pass
            step.step()
    want, free = weight.detach() / scales, start.abs() < 60  # from the others the end of the range is near
    assert float((layer.codes - want)[free].abs().max()) < 3.2
    assert float((want - start)[free].abs().max()) > 8


def exact(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The same without rounding: W moves by −g, so W̄ by −g / s."""
    return -torch.stack(gradients).sum(0) / int8_layer().scales[:, None]  # type: ignore[no-any-return]


def inside() -> torch.Tensor:
    """A weight at the end of its range cannot go on."""
    return int8_layer().codes.float().abs() < 110  # type: ignore[no-any-return]


def test_stochastic_rounding_is_unbiased() -> None:
    small_steps = [torch.full((64, 64), 1e-4)] * 20  # of about 1/80 of a unit
    mean = float(exact(small_steps)[inside()].mean())
    assert float(moved(small_steps)[inside()].mean()) == pytest.approx(mean, rel=0.1)


# ---------------------------------------------------------------- blocks in turns


def test_turns_come_round_and_depend_on_seed_and_step_alone() -> None:
    scheme = schemes.make(UpdateConfig(blocks="2-11", cycle_blocks=4, cycle_steps=3), 20, arch.get("llama"))
    turns = [schemes.active_blocks(scheme, step, seed=1) for step in range(27)]
    assert turns == [schemes.active_blocks(scheme, step, seed=1) for step in range(27)]
    assert turns != [schemes.active_blocks(scheme, step, seed=2) for step in range(27)]
    for step in range(0, 27, 3):
        assert turns[step] == turns[step + 1] == turns[step + 2]
    for first in (0, 9, 18):  # a round: every block once
        assert sorted(b for step in range(first, first + 9, 3) for b in turns[step]) == list(range(2, 12))
    assert {turns[step] for step in range(27)} == {(2, 3, 4, 5), (6, 7, 8, 9), (10, 11)}
    one = schemes.restricted(scheme, (6, 7))
    assert (one.cut, one.blocks, one.share(6, "up"), one.share(5, "up")) == (6, (6, 7), 1.0, 0.0)
    with pytest.raises(ConfigError, match="cycle_blocks"):
        schemes.make(UpdateConfig(blocks="2-4", cycle_blocks=4), 20, arch.get("llama"))


# ---------------------------------------------------------------- runs


QUICK = [
    *("update.blocks=1-2", "update.tensors=v,up", "train.batch_rows=2", "train.lr=1e-3", "train.steps=4"),
    *("how.threads=1", "how.trunk_place=run", "how.checkpoint_s=0", "how.keep_checkpoints=9", "how.products=fp32"),
]


def start(folder: Path, three_blocks: Path, recipe_name: str, *sets: str) -> Run:
    recipe = config.load_recipe(recipe_name)
    files = [f"data.path={three_blocks}", f"model.path={three_blocks.with_name('model.gguf')}"]
    return Run.start(folder, config.apply_sets(recipe, [*files, *QUICK, *sets]), False)


def saved(run: Run, step: int) -> dict[str, torch.Tensor]:
    return checkpoint.read(checkpoint.name(run.checkpoints, step))[0]


RUNS = {
    "sliced": ("sparse-search", "update.channels=0.25", "how.compile=on"),
    "by gradient": ("sparse-search", "update.channels=0.125", "update.choose=gradient", "how.compile=off"),
    "bf16 weights": ("sparse-rule", "how.weights=bf16", "how.optimizer_state=8bit", "how.compile=on"),
    "bf16 weights, in place": ("sparse-rule", "how.weights=bf16", "how.step_in_place=true", "how.compile=on"),
    "low rank": ("sparse-rule", "update.low_rank=4", "train.low_rank_lr=0.01", "how.compile=on"),
    "low rank, averaged": ("sparse-rule", "update.low_rank=4", "train.average=0.7", "how.compile=on"),
    "low rank, recomputed": ("sparse-rule", "update.low_rank=4", "how.compile=on", "how.recompute=true"),
    "few tokens": ("sparse-rule", "update.low_rank=4", "update.tokens=6", "how.compile=on"),
    "biases": ("bias-norm", "how.compile=on"),
    "tinytl": ("tinytl", "how.compile=on"),
    "qas": ("qas-int8", "update.norms=true", "how.compile=on"),
    "qas, sgd": ("qas-int8", "train.optimizer=sgd", "train.lr=0.1", "how.optimizer_state=8bit", "how.compile=off"),
    "cycle": ("cycle", "update.cycle_blocks=1", "update.cycle_steps=1", "how.compile=on"),
    "cycle, int8": ("qas-int8", "update.cycle_blocks=1", "update.cycle_steps=2", "how.compile=off"),
}


@pytest.mark.parametrize("way", RUNS)
def test_resumed_is_the_same_bit_for_bit(three_blocks: Path, tmp_path: Path, way: str) -> None:
    recipe, *sets = RUNS[way]
    run = start(tmp_path / "run", three_blocks, recipe, *sets)
    stages.train(run, Progress())
    done = run.read_json(run.done)
    assert done is not None
    assert done["best_loss"] < done["base_loss"]
    wanted, best = saved(run, 4), checkpoint.read(run.best)[0]
    assert any(not torch.equal(saved(run, 0)[name], wanted[name]) for name in saved(run, 0))
    for step in (3, 4):
        checkpoint.name(run.checkpoints, step).unlink()
    run.done.unlink()
    run.best.unlink()
    assert run._lock is not None
    run._lock.close()
    stages.train(Run.start(run.path, Run.open(run.path).recipe, True), Progress())
    again = saved(run, 4)
    assert again.keys() == wanted.keys()
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)
    assert all(torch.equal(best[name], value) for name, value in checkpoint.read(run.best)[0].items())
    stack, scheme, _ = build.trained_stack(run)  # in plain torch, as exports see it
    assert all(torch.isfinite(value).all() for _, value in schemes.updated(stack, scheme))


def test_bf16_weights_that_the_plan_chose_are_exported_and_kept(three_blocks: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", three_blocks, "sparse-rule", "how.weights=bf16", "how.compile=on")
    stages.train(run, Progress())
    found = json.loads(run.record.read_text())
    found["asked"]["how"]["weights"] = "fp32"  # as if it had been the plan
    run.record.write_text(json.dumps(found))
    recipe = replace(run.recipe, how=replace(run.recipe.how, weights="fp32"))
    (run.path / "recipe.yaml").write_text(config.dump(recipe))
    stack, scheme, _ = build.trained_stack(Run.open(run.path))
    weights = dict(schemes.updated(stack, scheme))
    assert weights["layers.1.self_attn.v_proj.weight"].dtype == torch.float32
    stored = checkpoint.read(run.best)[0]["layers.1.self_attn.v_proj.stored"]
    assert torch.equal(weights["layers.1.self_attn.v_proj.weight"], stored.float())


def test_the_average_is_validated_and_exported(three_blocks: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", three_blocks, *RUNS["low rank, averaged"])
    stages.train(run, Progress())
    steps = [saved(run, step) for step in range(1, 5)]
    name = "layers.1.self_attn.v_proj.up"
    shares = [0.7 ** (4 - step) for step in range(1, 5)]
    mean = sum(share * step[name] for share, step in zip(shares, steps, strict=True)) / sum(shares)
    assert torch.allclose(steps[3]["average." + name], mean, atol=1e-7)
    best = checkpoint.read(run.best)[0]
    stack, scheme, parameters = build.trained_stack(run)
    assert all(torch.equal(value, best["average." + key]) for key, value in parameters.items())
    assert not torch.equal(best["average." + name], best[name])
    rows, heldout = tokens.load(run.tokens)
    forest = Forest(rows + heldout)
    held = list(range(len(rows), len(forest.paths)))
    with torch.no_grad():
        _, batch = batch_of(forest, held)
        top = stack.top(stack.trunk(batch, scheme.cut), batch, scheme.cut)
        loss = float(stack.head.loss(top, batch.targets)) / forest.trained(held)
    done = run.read_json(run.done)
    assert done is not None
    assert loss == pytest.approx(done["best_loss"], rel=1e-3)


@pytest.mark.parametrize("way", ["bf16 weights", "qas"])
def test_only_float32_weights_are_averaged(three_blocks: Path, tmp_path: Path, way: str) -> None:
    run = start(tmp_path / "run", three_blocks, *RUNS[way], "train.average=0.9")
    with pytest.raises(ConfigError, match="float32"):
        stages.train(run, Progress())


def test_channels_are_chosen_by_gradients_once(three_blocks: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", three_blocks, *RUNS["by gradient"])
    stages.train(run, Progress())
    from edgeft.data import tokens

    rows, _ = tokens.load(run.tokens)
    stack = load(three_blocks.with_name("model.gguf"))
    whole = schemes.make(replace(run.recipe.update, channels=1.0), stack.depth, stack.arch)
    parameters = schemes.apply(stack, whole, 0)
    forest = Forest(rows)
    sizes = {name: torch.zeros(p.shape[1]) for name, p in parameters.items()}
    order = epoch_order(forest, range(len(rows)), 0, 0, grouped=False)
    assert choosing_rows([len(rows[row].ids) for row in order]) == len(order)  # there are few
    for part in forest.micro_batches(order, run.effective.how.micro_batch_tokens // 2):
        _, one = batch_of(forest, part)
        stack.head.loss(stack.top(stack.trunk(one, 1), one, 1), one.targets).backward()  # type: ignore[no-untyped-call]
        for name, p in parameters.items():
            assert p.grad is not None
            sizes[name] += p.grad.square().sum(0)
            p.grad = None
    for name, size in sizes.items():
        columns = saved(run, 4)[name.replace(".weight", ".columns")]
        common = set(columns.tolist()) & set(largest(size, len(columns)).tolist())
        assert len(common) >= 0.95 * len(columns), name  # rounding decides about equals
        assert len(common) > len(set(columns.tolist()) & set(range(len(columns))))


def test_only_the_blocks_whose_turn_it_is_move(three_blocks: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", three_blocks, *RUNS["cycle"], "update.blocks=all", "train.steps=3")
    stages.train(run, Progress())
    scheme = schemes.make(run.recipe.update, 3, arch.get("llama"))
    for step in range(3):
        before, after = saved(run, step), saved(run, step + 1)
        moved = {
            int(name.split(".")[1]) for name in before if name in after and not torch.equal(before[name], after[name])
        }
        assert tuple(moved) == schemes.active_blocks(scheme, step, 0)
        remembered = {int(name.split("layers.")[1].split(".")[0]) for name in after if name.startswith("adamw.")}
        assert remembered == moved


def test_a_turn_keeps_no_activations_below_it(model: Path, buffers: Any) -> None:
    stack, scheme = prepared(model, UpdateConfig(blocks="20-29", tensors=["q", "down"], cycle_blocks=2))
    whole = kept(stack, scheme.cut, buffers)
    for name, parameter in stack.model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = None
            parameter.requires_grad_(int(name.split(".")[1]) >= 28)
    assert kept(stack, scheme.cut, buffers) < whole / 4


@pytest.mark.parametrize("channels", [1.0, 0.25])
@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_holds_every_tensor_that_a_step_changes(
    small: Callable[[str], Path], method: str, channels: float
) -> None:
    if channels < 1 and not methods.get(method).partial:
        pytest.skip("it trains all channels")
    update = UpdateConfig(method=method, blocks=[0, 2], tensors=["q", "down"], biases=True, norms=True)
    update = replace(update, channels=channels, rank=4)
    stack, scheme, parameters = built(small("Llama"), update, "torch")

    def state() -> dict[str, torch.Tensor]:
        return {name: t.detach().clone() for name, t in (*stack.model.named_parameters(), *stack.model.named_buffers())}

    before = state()
    scheme.method.choose_channels(stack, scheme, lambda: loss_of(stack).backward())  # type: ignore[no-untyped-call]
    train = TrainConfig(lr=1e-2)
    step = scheme.method.optimizer(stack, parameters, Recipe(update=update, train=train))
    for _ in range(2):  # LoRA's A moves from the second step on
        loss = loss_of(stack)
        with step.last_pass(float(loss.detach())):
            loss.backward()  # type: ignore[no-untyped-call]
        step.step()
    changed = {name for name, value in state().items() if not torch.equal(value, before[name])}
    changed = {name for name in changed if ".base." not in name}  # a dense base is the buffer of the merged weight
    held = checkpoint_tensors(stack, parameters)
    assert len(changed) >= 4
    assert changed <= held.keys()
    assert {int(name.split(".")[1]) for name in held} == {0, 2}


def test_the_registry_is_what_a_recipe_can_name() -> None:
    knob = UpdateConfig.__dataclass_fields__["method"].metadata
    assert tuple(METHODS) == knob["choices"]
    for name, method in METHODS.items():
        assert f"{name}: {method.about}" in knob["about"]


def test_what_does_not_go_together_is_refused() -> None:
    for method in ("lora", "tinytl", "qas"):
        with pytest.raises(ConfigError, match="channels"):
            schemes.make(UpdateConfig(method=method, channels=0.5), 4, arch.get("llama"))
        with pytest.raises(ConfigError, match=method):
            schemes.make(UpdateConfig(method=method, weights=False, norms=True), 4, arch.get("llama"))
    with pytest.raises(ConfigError, match="sgd"):
        optimizer.make({"a": torch.nn.Parameter(torch.zeros(3))}, SGD, ExecutionConfig(optimizer_state="8bit"), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "sets"),
    [
        ("sparse-search", ["update.channels=0.25", "update.blocks=14-16"]),
        ("bias-norm", ["update.blocks=20-29"]),
        ("tinytl", ["update.blocks=20-29"]),
        ("qas-int8", ["update.blocks=14-16"]),
        ("cycle", ["update.blocks=14-17", "update.cycle_blocks=2", "update.cycle_steps=2"]),
    ],
)
def test_every_method_exports_and_llamacpp_agrees(recipe: str, sets: list[str], data: Path, tmp_path: Path) -> None:
    """The embedded model itself: a file that does not say what the trainer says is refused."""
    chosen = config.load_recipe(recipe)
    settings = [f"data.path={data}", *sets, "train.steps=6", "train.batch_rows=4", "train.validations=1"]
    run = Run.start(tmp_path / "run", config.apply_sets(chosen, settings), False)
    stages.train(run, Progress())
    done = run.read_json(run.done)
    assert done is not None
    assert done["best_loss"] < done["base_loss"]
    found = stages.export(run, "gguf", "auto", run.model, Progress())
    assert found["check"]["mean_kl"] <= MAX_KL
    stack, scheme, _ = build.trained_stack(run)
    folder = export_hf(model_source(None), schemes.updated(stack, scheme), tmp_path / "hf")
    _, rows = batch_of(Forest(ROWS), [0, 1])
    assert near(load_hf(str(folder), "dense").logits(rows), stack.logits(rows)) < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "frozen"), [("Llama", "nf4"), ("Llama", "int8"), ("Qwen2", "dense"), ("Qwen3", "nf4")]
)
def test_the_search_of_a_run_takes_any_model(
    small: Callable[[str], Path], family: str, frozen: str, tmp_path: Path
) -> None:
    """Whatever layers it has, and whether there is a place for biases or not."""
    recipe = config.load_recipe("sparse-search")
    sets = [
        f"model.path={small(family)}",
        f"model.frozen={frozen}",
        "train.epochs=60",
        "train.batch_rows=4",
        "how.threads=1",
        "how.trunk_place=run",
    ]
    run = Run.start(tmp_path / "run", config.apply_sets(recipe, sets), False)
    some = [Encoded(np.array([*IDS[n:], *IDS[:n]], np.int32), np.arange(len(IDS)) >= 8, Row([], [])) for n in range(16)]
    tokens.save(run.tokens, some[:12], some[12:])
    stages.train(run, Progress())
    biased = {tensor for part in run.effective.update.parts if part.biases for tensor in part.tensors}
    assert biased == set(arch.get(family.lower()).biases)
    assert run.searched.is_file()
    done = run.read_json(run.done)
    assert done is not None
    assert done["best_loss"] < done["base_loss"]
