"""Which blocks a recipe means, what is trained then, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from edgeft import arch, config
from edgeft.config import TENSORS, PartConfig, UpdateConfig, build
from edgeft.engine.load import load
from edgeft.errors import ConfigError
from edgeft.methods import scheme
from edgeft.methods.base import channel_count, weight_of
from edgeft.pipeline import stages
from edgeft.run.folder import Run
from edgeft.run.progress import Progress


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        (2, (8, 9)),
        ("last 3", (7, 8, 9)),
        ("all", tuple(range(10))),
        ("3-5", (3, 4, 5)),
        ("37%-67%", (4, 5, 6)),
        ("0%-100%", tuple(range(10))),
        ("50%-51%", (5,)),
        ([1, 4], (1, 4)),
        (["1-2", 9], (1, 2, 9)),
        (["last 2", 0], (0, 8, 9)),
    ],
)
def test_blocks(spec: Any, wanted: tuple[int, ...]) -> None:
    assert scheme.parse_blocks(spec, 10) == wanted


@pytest.mark.parametrize(
    "spec",
    [0, 11, "5-3", "3-10", "70%-30%", "50%-130%", [], [10], "middle", None, True, {"a": 1}, float("nan"), "-3", 2.5],
)
def test_blocks_that_cannot_be(spec: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        scheme.parse_blocks(spec, 10)
    assert caught.value.hint == scheme.BLOCKS_HINT


def test_blocks_by_size() -> None:
    parts = [PartConfig(blocks="by size"), PartConfig(blocks=[1])]
    update = UpdateConfig(blocks="by size", parts=parts)
    small, large = (scheme.with_blocks(update, 20, weights) for weights in (scheme.LARGE - 1, scheme.LARGE))
    assert (small.blocks, large.blocks) == ("2-19", "7-19")
    assert [part.blocks for part in large.parts] == ["7-19", [1]]
    explicit = UpdateConfig(blocks="3-4")
    assert scheme.with_blocks(explicit, 20, scheme.LARGE) == explicit


def test_a_run_records_the_blocks_that_it_trains_by_size(three_blocks: Path, tmp_path: Path) -> None:
    sets = ["train.steps=1", "train.batch_rows=2", "how.compile=off", "how.trunk_place=run", "how.threads=1"]
    files = [f"data.path={three_blocks}", f"model.path={three_blocks.with_name('model.gguf')}"]
    run = Run.start(tmp_path / "run", config.apply_sets(config.load_recipe("sparse-bp"), [*files, *sets]), False)
    stages.train(run, Progress())
    assert run.recipe.update.blocks == "by size"
    assert run.effective.update.blocks == "0-2"  # of three blocks
    assert "size" in json.loads(run.record.read_text())["update_why"]


def test_bf16_weights_are_for_tensors_that_are_trained_whole() -> None:
    llama = arch.get("llama")
    assert scheme.with_weights(scheme.make(UpdateConfig(), 4, llama), "bf16", 0).bf16_weights
    for update in (UpdateConfig(low_rank=4), UpdateConfig(channels=0.5), UpdateConfig(method="qas")):
        with pytest.raises(ConfigError, match="trained whole"):
            scheme.with_weights(scheme.make(update, 4, llama), "bf16", 0)


def test_biases_only_where_llama_cpp_reads_them() -> None:
    both = UpdateConfig(biases=True)
    assert [t for t in TENSORS if (2, t) in scheme.make(both, 4, arch.get("llama")).biases] == list(TENSORS)
    assert [t for t in TENSORS if (2, t) in scheme.make(both, 4, arch.get("qwen2")).biases] == ["q", "k", "v"]
    with pytest.raises(ConfigError, match="no biases"):
        scheme.make(both, 4, arch.get("qwen3"))


def test_a_recipe_that_updates_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="updates nothing"):
        scheme.make(UpdateConfig(weights=False), 4, arch.get("llama"))
    with pytest.raises(ConfigError, match="updates nothing"):
        scheme.make(UpdateConfig(tensors=[]), 4, arch.get("llama"))


def test_parts_stand_in_place_of_the_single_ones_and_later_ones_count() -> None:
    update = build(
        UpdateConfig,
        {
            "blocks": "all",
            "channels": 0.5,
            "parts": [
                {"blocks": "2-4", "tensors": ["q", "down"], "channels": 0.25, "norms": True},
                {"blocks": [4], "tensors": ["down"], "channels": 1, "biases": True},
                {"blocks": [7], "tensors": ["o"], "channels": 0, "biases": True},
            ],
        },
        "update",
    )
    chosen = scheme.make(update, 10, arch.get("llama"))
    assert chosen.blocks == (2, 3, 4, 7)
    assert chosen.cut == 2
    assert [chosen.share(b, "down") for b in range(2, 6)] == [0.25, 0.25, 1.0, 0.0]
    assert [chosen.share(b, "q") for b in (1, 2, 4, 7)] == [0.0, 0.25, 0.25, 0.0]
    assert [key in chosen.biases for key in ((4, "down"), (3, "down"), (7, "o"))] == [True, False, True]
    assert [b for b in range(10) if b in chosen.norms] == [2, 3, 4]
    with pytest.raises(ConfigError, match=r"update\.parts\.0\.chanels"):
        build(UpdateConfig, {"parts": [{"blocks": 1, "chanels": 1}]}, "update")
    with pytest.raises(ConfigError, match=r"update\.parts\.0\.channels"):
        build(UpdateConfig, {"parts": [{"blocks": 1, "channels": 0.3}]}, "update")
    with pytest.raises(ConfigError, match="blocks"):
        scheme.make(build(UpdateConfig, {"parts": [{"tensors": ["q"]}]}, "update"), 10, arch.get("llama"))


@pytest.mark.parametrize(
    ("share", "inputs", "count"),
    [
        (1, 576, 576),
        (0.5, 576, 288),
        (0.25, 576, 160),
        (0.125, 576, 64),
        (0.25, 1536, 384),
        (0.5, 64, 32),
        (0.125, 64, 8),
    ],
)
def test_channels_come_in_groups_of_32(share: float, inputs: int, count: int) -> None:
    assert channel_count(share, inputs) == count


@pytest.mark.parametrize(
    ("update", "names", "numbers"),
    [
        (UpdateConfig(blocks="3-3", tensors=["q"]), {"layers.3.self_attn.q_proj.weight"}, 576 * 576),
        (
            UpdateConfig(blocks="3-3", tensors=["k", "down"], weights=False, biases=True, norms=True),
            {
                "layers.3.self_attn.k_proj.bias",
                "layers.3.mlp.down_proj.bias",
                "layers.3.input_layernorm.weight",
                "layers.3.post_attention_layernorm.weight",
            },
            192 + 576 + 2 * 576,
        ),
        (
            UpdateConfig(method="lora", blocks=[29], tensors=["v"], rank=4),
            {f"layers.29.self_attn.v_proj.lora_{m}.default.weight" for m in "AB"},
            4 * (576 + 192),
        ),
    ],
)
def test_only_the_scheme_is_trained(model: Path, update: UpdateConfig, names: set[str], numbers: int) -> None:
    stack = load(model)
    parameters = scheme.apply(stack, scheme.make(update, stack.depth, stack.arch), seed=0)
    assert set(parameters) == names
    assert sum(p.numel() for p in parameters.values()) == numbers
    assert all(p.dtype == torch.float32 for p in parameters.values())


def test_lora_starts_where_the_base_is_and_merges(model: Path) -> None:
    stack = load(model)
    chosen = scheme.make(
        UpdateConfig(method="lora", blocks="5-5", tensors=["up"], rank=4, alpha=8.0), stack.depth, stack.arch
    )
    base = weight_of(stack.linear(5, "up"))
    parameters = scheme.apply(stack, chosen, seed=0)
    ((name, start),) = scheme.updated(stack, chosen)
    assert name == "layers.5.mlp.up_proj.weight"
    assert torch.equal(start, base)
    down, up = (
        parameters["layers.5.mlp.up_proj.lora_A.default.weight"],
        parameters["layers.5.mlp.up_proj.lora_B.default.weight"],
    )
    with torch.no_grad():
        up.normal_()
    ((_, merged),) = scheme.updated(stack, chosen)
    torch.testing.assert_close(merged, base + 2.0 * up.detach() @ down.detach())
