"""Every architecture in the registry: complete, read back from the header that it writes, and known to transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgeft import arch
from edgeft.arch.base import Linear, Norm, Scales
from edgeft.config import TENSORS
from edgeft.engine.load import load
from edgeft.errors import ExportError, ModelError
from edgeft.formats import ggml
from edgeft.formats.gguf import FLOAT32, GGUF, STRING, UINT32, NewTensor, encode_record, write
from edgeft.plan.shape import shape_of

families = pytest.mark.parametrize("family", arch.ARCHITECTURES, ids=lambda family: family.name)


def small_config(**more: Any) -> SimpleNamespace:
    values = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 40,
        "rms_norm_eps": 2.0**-17,  # the same in float32
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "tie_word_embeddings": True,
    }
    return SimpleNamespace(**values | more)


def write_model(family: arch.Architecture, config: Any, path: Path) -> GGUF:
    """A file with the header that the architecture writes, and tensors of ones under its names."""
    sizes = family.sizes(config)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (sizes.width, sizes.vocabulary), "output_norm": (sizes.width,)}
    if not config.tie_word_embeddings:
        shapes["output"] = shapes["token_embd"]
    for block in range(sizes.depth):
        shapes |= {f"blk.{block}.{linear.gguf}": linear.shape(sizes)[::-1] for linear in family.linears.values()}
        shapes |= {f"blk.{block}.{norm.gguf}": (norm.size(sizes),) for norm in family.norms}
    kinds = {str: STRING, int: UINT32, float: FLOAT32}
    keys = {"general.architecture": family.name, **family.header(config)}
    tensors = []
    for name, shape in shapes.items():
        values = np.ones(shape[::-1], np.float32)
        tensors.append(NewTensor(f"{name}.weight", shape, ggml.F32, values.nbytes, values.copy))
    with path.open("wb") as file:
        write(file, [encode_record(key, kinds[type(value)], value) for key, value in keys.items()], tensors)
    return GGUF.open(path)


@families
def test_an_architecture_states_everything(family: arch.Architecture) -> None:
    for name in ("name", "title", "config_class", "model_class", "gate"):
        assert getattr(family, name), name
    assert family.model_types
    assert tuple(family.linears) == TENSORS  # what a recipe can name
    flagged = {tensor for _, tensors in family.bias_flags for tensor in tensors}
    assert {*family.biases, *family.interleaved, *flagged} <= set(family.linears)
    names = [*family.linears.values(), *family.norms]
    assert len({part.path for part in names}) == len({part.gguf for part in names}) == len(names)
    assert arch.get(family.name) is family
    assert all(arch.of_model_type(kind) is family for kind in family.model_types)


@families
def test_the_engine_computes_what_is_declared(family: arch.Architecture) -> None:
    assert family.scales == Scales()
    assert family.gate == "silu"


@families
@pytest.mark.parametrize("rope", ["default", "linear", "yarn"])
def test_a_header_reads_back(family: arch.Architecture, rope: str, tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 50000.0}
    parameters |= {} if rope == "default" else {"factor": 4.0}
    parameters |= {"original_max_position_embeddings": 64} if rope == "yarn" else {}
    config = small_config(rope_parameters=parameters, tie_word_embeddings=rope == "default")
    gguf = write_model(family, config, tmp_path / "model.gguf")
    assert arch.of_gguf(gguf) is family
    assert family.values(gguf) == vars(config) | {"attn_implementation": "sdpa"}
    shape = shape_of(str(gguf.path), "auto")
    assert (shape.arch, vars(family.sizes(config)).items() <= vars(shape).items()) == (family, True)


@families
def test_its_names_are_those_of_transformers(family: arch.Architecture) -> None:
    import torch
    import transformers

    small = small_config()
    config = getattr(transformers, family.config_class)(**vars(small))
    assert config.model_type == family.model_types[0]
    with torch.device("meta"):
        model = getattr(transformers, family.model_class)(config)
    sizes, block = family.sizes(config), model.model.layers[0]
    assert sizes == family.sizes(small)
    for linear in family.linears.values():
        assert tuple(block.get_submodule(linear.path).weight.shape) == linear.shape(sizes)
    for norm in family.norms:
        assert tuple(block.get_submodule(norm.path).weight.shape) == (norm.size(sizes),)
    kinds = {linear.path for linear in family.linears.values()} | {norm.path for norm in family.norms}
    assert {name.rpartition(".")[0] for name, _ in block.named_parameters()} == kinds  # and no others


@families
def test_names_lead_to_the_file(family: arch.Architecture) -> None:
    for tensor, linear in family.linears.items():
        assert family.gguf_name(f"layers.3.{linear.path}.bias") == (f"blk.3.{linear.gguf}.bias", tensor)
    for norm in family.norms:
        assert family.gguf_name(f"layers.3.{norm.path}.weight")[0] == f"blk.3.{norm.gguf}.weight"
    with pytest.raises(ExportError, match="no place"):
        family.gguf_name("layers.3.mlp.experts.weight")


class Fused(arch.Architecture):
    """As a file would state it: two fused tensors, and norms that files hold with 1 added."""

    name, title, model_types = "fused", "a test", ("fused",)
    config_class = model_class = "none"
    linears = {  # noqa: RUF012
        "qkv": Linear("self_attn.qkv_proj", "attn_qkv", lambda s: (s.query + 2 * s.key, s.width)),
        "o": arch.Architecture.linears["o"],
        "gate_up": Linear("mlp.gate_up_proj", "ffn_up", lambda s: (2 * s.ffn, s.width)),
        "down": arch.Architecture.linears["down"],
    }
    norms = tuple(Norm(norm.path, norm.gguf, offset=1.0) for norm in arch.Architecture.norms)


def test_a_new_architecture_is_read_and_planned_without_another_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Fused()
    config = small_config()
    with pytest.raises(ModelError, match="architecture `fused`"):
        arch.of_gguf(write_model(family, config, tmp_path / "model.gguf"))
    monkeypatch.setattr(arch, "ARCHITECTURES", (*arch.ARCHITECTURES, family))
    shape = shape_of(str(tmp_path / "model.gguf"), "auto")
    assert shape.block_parameters == 64 * (128 + 2 * 64) + 128 * 64 + 3 * 64 * 96
    assert shape.packed_bytes(1, "qkv") == 4 * 64 * 256
    stack = load(tmp_path / "model.gguf", lean=True)
    assert tuple(stack.linear(1, "gate_up").dense_weight().shape) == (192, 64)  # type: ignore[operator]
    assert not stack.layers[0].get_submodule("input_layernorm").weight.any()  # type: ignore[operator,union-attr]
