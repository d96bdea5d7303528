"""Every architecture in the registry: complete, read back from the header that it writes, and known to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgeft import arch
from edgeft.arch.base import Linear, Norm, Scales
from edgeft.arch.check import read_config
from edgeft.config import TENSORS, UpdateConfig
from edgeft.data.forest import Forest
from edgeft.data.rows import Row
from edgeft.data.tokens import Encoded
from edgeft.engine import kernels
from edgeft.engine.load import load
from edgeft.engine.stack import batch_of
from edgeft.errors import ExportError, ModelError
from edgeft.export.gguf import export_gguf
from edgeft.formats import ggml
from edgeft.formats.gguf import FLOAT32, GGUF, STRING, UINT32, NewTensor, encode_record, write
from edgeft.methods import scheme as schemes
from edgeft.plan.shape import shape_of

families = pytest.mark.parametrize("family", arch.ARCHITECTURES, ids=lambda family: family.name)


# what the configurations of these have beside the common keys; scales are the same in float32
GEMMA = {"query_pre_attn_scalar": 32, "sliding_window": 64, "layer_types": ["sliding_attention"] * 2}
SCALES = {"embedding_multiplier": 3.0, "residual_multiplier": 0.25, "logits_scaling": 4.0}
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {
        **GEMMA,
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "granite": {**SCALES, "attention_multiplier": 0.125},
    "minicpm": {**SCALES, "attention_multiplier": 32**-0.5},
    "smollm3": {"no_rope_layers": [1, 1]},
    "phi3": {"original_max_position_embeddings": 256, "sliding_window": None},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
}


def family_config(family: arch.Architecture, **more: Any) -> SimpleNamespace:
    """A configuration of its own keys, as a GGUF header gives them back."""
    config = small_config(**OWN.get(family.name, {}) | more)
    if family.partial_rotation:
        config.rope_parameters = config.rope_parameters | {"partial_rotary_factor": 1.0}
    if family.rotation(config, 0):
        local = {"rope_type": "default", "rope_theta": 10000.0}
        config.rope_parameters = {"full_attention": config.rope_parameters, "sliding_attention": local}
    return config


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


def write_model(family: arch.Architecture, config: Any, path: Path, random: bool = False) -> GGUF:
    """A file with the header that the architecture writes, and tensors of ones, or random ones, under its names."""
    sizes = family.sizes(config)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (sizes.width, sizes.vocabulary), "output_norm": (sizes.width,)}
    if not config.tie_word_embeddings:
        shapes["output"] = shapes["token_embd"]
    for block in range(sizes.depth):
        shapes |= {f"blk.{block}.{name}": shape[::-1] for name, shape in family.stored_shapes(sizes).items()}
        shapes |= {f"blk.{block}.{norm.gguf}": (norm.size(sizes),) for norm in family.norms}
    kinds = {str: STRING, int: UINT32, float: FLOAT32}
    keys = {"general.architecture": family.name, **family.header(config)}
    tensors = []
    for name, shape in shapes.items():
        values = np.ones(shape[::-1], np.float32)
        if random:
            values = np.random.default_rng(len(tensors)).normal(1, 0.2, shape[::-1]).astype(np.float32)
            values -= 1 if len(shape) > 1 else 0
        tensors.append(NewTensor(f"{name}.weight", shape, ggml.F32, values.nbytes, values.copy))
    with path.open("wb") as file:
        write(file, [encode_record(key, kinds[type(value)], value) for key, value in keys.items()], tensors)
    return GGUF.open(path)


def read_values(gguf: GGUF) -> dict[str, np.ndarray]:
    return {n: gguf.bytes(n).view(np.float32).reshape(t.shape[::-1]).copy() for n, t in gguf.tensors.items()}


@families
def test_an_architecture_states_everything(family: arch.Architecture) -> None:
    for name in ("name", "title", "config_class", "model_class", "gate"):
        assert getattr(family, name), name
    assert family.model_types
    assert tuple(family.linears) == TENSORS  # what a recipe can name
    assert len({norm.place for norm in family.norms}) == len(family.norms)
    flagged = {tensor for _, tensors in family.bias_flags for tensor in tensors}
    assert {*family.biases, *family.interleaved, *flagged} <= set(family.linears)
    names = [*family.linears.values(), *family.norms]
    assert len({part.path for part in names}) == len(names)
    stored = [*{linear.stored for linear in family.linears.values()}, *(norm.path for norm in family.norms)]
    assert len({part.gguf for part in names}) == len(stored)
    assert arch.get(family.name) is family
    assert all(arch.of_model_type(kind) is family for kind in family.model_types)


@families
@pytest.mark.parametrize("rope", ["default", "linear", "yarn"])
def test_a_header_reads_back(family: arch.Architecture, rope: str, tmp_path: Path) -> None:
    if rope not in family.rope_types:
        pytest.skip("llama.cpp computes this one otherwise")
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 50000.0}
    parameters |= {} if rope == "default" else {"factor": 4.0}
    parameters |= {"original_max_position_embeddings": 64} if rope == "yarn" else {}
    config = family_config(family, rope_parameters=parameters, tie_word_embeddings=rope == "default")
    gguf = write_model(family, config, tmp_path / "model.gguf")
    assert arch.of_gguf(gguf) is family
    assert family.values(gguf) == vars(config) | {"attn_implementation": "eager", "pad_token_id": None}
    shape = shape_of(str(gguf.path), "auto")
    assert (shape.arch, vars(family.sizes(config)).items() <= vars(shape).items()) == (family, True)


@families
def test_its_names_are_those_of_transformers(family: arch.Architecture) -> None:
    import torch
    import transformers

    small = family_config(family)
    config = getattr(transformers, family.config_class)(**vars(small) | {"pad_token_id": None})
    assert arch.of_model_type(config.model_type).config_class == family.config_class
    with torch.device("meta"):
        model = getattr(transformers, family.model_class)(config)
    sizes, block = family.sizes(config), model.model.layers[0]
    assert sizes == family.sizes(small)
    for linear in family.linears.values():
        shape = family.stored_shapes(sizes)[linear.gguf]
        assert tuple(block.get_submodule(linear.stored).weight.shape) == shape
    for norm in family.norms:
        assert tuple(block.get_submodule(norm.path).weight.shape) == (norm.size(sizes),)
    kinds = {linear.stored for linear in family.linears.values()} | {norm.path for norm in family.norms}
    assert {name.rpartition(".")[0] for name, _ in block.named_parameters()} == kinds  # and no others


@families
def test_names_lead_to_the_file(family: arch.Architecture) -> None:
    for tensor, linear in family.linears.items():
        assert family.gguf_name(f"layers.3.{linear.path}.bias") == (f"blk.3.{linear.gguf}.bias", tensor)
    for norm in family.norms:
        assert family.gguf_name(f"layers.3.{norm.path}.weight")[0] == f"blk.3.{norm.gguf}.weight"
    with pytest.raises(ExportError, match="no place"):
        family.gguf_name("layers.3.mlp.experts.weight")


class Toy(arch.Architecture):
    """All that one file can state: shared tensors, norms in every place and with 1 added in files, scales."""

    name, title, model_types = "toy", "a test", ("toy",)
    config_class = model_class = "none"
    linears = {  # noqa: RUF012
        **arch.Architecture.linears,
        "q": Linear("attention.q", "attn_qkv", lambda s: (s.query, s.width), lambda s: 0),
        "k": Linear("attention.k", "attn_qkv", lambda s: (s.key, s.width), lambda s: s.query),
        "v": Linear("attention.v", "attn_qkv", lambda s: (s.key, s.width), lambda s: s.query + s.key),
        "gate": Linear("ffn.gate", "ffn_up", lambda s: (s.ffn, s.width), lambda s: 0),
        "up": Linear("ffn.up", "ffn_up", lambda s: (s.ffn, s.width), lambda s: s.ffn),
    }
    places = ("attention", "attention_out", "ffn", "ffn_out", "q", "k")
    norms = tuple(Norm(f"norms.{place}", f"{place}_norm", place, 1.0) for place in places)
    final_norm = Norm("norm", "output_norm", "final", 1.0)

    def scales(self, config: Any) -> Scales:
        return Scales(embedding=3.0, residual=0.5, logits=0.25, scores=0.1)


def toy_logits(stack: Any, weights: dict[str, Any], tokens: Any) -> Any:
    """The same in a few lines of torch; weights: of each tensor as the file has it."""
    import torch

    def norm(x: Any, weight: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 2.0**-17) * weight

    cos, sin = (t[0] for t in stack.rotary(torch.arange(len(tokens))[None]))
    mask = torch.ones(len(tokens), len(tokens)).tril().bool()

    def rotate(x: Any) -> Any:  # (T, heads, 32)
        turned = torch.cat([-x[..., 16:], x[..., :16]], -1)
        return (x * cos[:, None] + turned * sin[:, None]).transpose(0, 1)

    x = 3.0 * weights["token_embd"][tokens]
    for n in range(2):
        w = {name.split(".", 2)[2]: value for name, value in weights.items() if name.startswith(f"blk.{n}.")}
        q, k, v = (norm(x, w["attention_norm"]) @ w["attn_qkv"].T).split([128, 64, 64], 1)
        q, k = norm(q.view(-1, 4, 32), w["q_norm"]), norm(k.view(-1, 2, 32), w["k_norm"])
        scores = 0.1 * rotate(q) @ rotate(k).repeat_interleave(2, 0).transpose(1, 2)
        values = v.view(-1, 2, 32).transpose(0, 1).repeat_interleave(2, 0)
        mixed = (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values).transpose(0, 1).reshape(len(tokens), -1)
        x = x + 0.5 * norm(mixed @ w["attn_output"].T, w["attention_out_norm"])
        gate, up = (norm(x, w["ffn_norm"]) @ w["ffn_up"].T).chunk(2, 1)
        x = x + 0.5 * norm((torch.nn.functional.silu(gate) * up) @ w["ffn_down"].T, w["ffn_out_norm"])
    return 0.25 * norm(x, weights["output_norm"]) @ weights["token_embd"].T


def test_a_new_architecture_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read, planned, trained and exported, with no change elsewhere."""
    import torch

    family, file = Toy(), tmp_path / "model.gguf"
    gguf = write_model(family, small_config(), file, random=True)
    with pytest.raises(ModelError, match="architecture `toy`"):
        arch.of_gguf(gguf)
    monkeypatch.setattr(arch, "ARCHITECTURES", (*arch.ARCHITECTURES, family))
    shape = shape_of(str(file), "auto")
    assert shape.block_parameters == 64 * (128 + 2 * 64) + 128 * 64 + 3 * 64 * 96
    assert (shape.packed_bytes(1, "q"), shape.packed_bytes(1, "up")) == (4 * 64 * 128, 4 * 64 * 96)
    stack = load(file, lean=True)
    stack.configure(backend=kernels.load())
    row = Encoded(np.arange(2, 30, dtype=np.int32) % 40, np.arange(28) > 20, Row([], []), 0)
    batch = batch_of(Forest([row]), [0])[1]
    weights = {name.removesuffix(".weight"): torch.tensor(value) for name, value in read_values(gguf).items()}
    wanted = toy_logits(stack, weights, batch.tokens)[batch.at]
    assert float((stack.logits(batch) - wanted).norm() / wanted.norm()) < 1e-5
    chosen = schemes.make(UpdateConfig(blocks="1-1", tensors=["k", "up", "down"], norms=True), 2, family)
    trained = schemes.apply(stack, chosen, 0)
    for leaf in weights.values():
        leaf.requires_grad_()
    torch.nn.functional.cross_entropy(toy_logits(stack, weights, batch.tokens)[batch.at], batch.targets).backward()
    for recompute in ("none", "selective", "full"):
        stack.configure(recompute=recompute)
        for parameter in trained.values():
            parameter.grad = None
        loss = stack.head.loss(stack.top(stack.trunk(batch, 1), batch, 1), batch.targets) / len(batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: weights[f"blk.1.{name}"].grad for name in ("attn_qkv", "ffn_up", "k_norm", "ffn_out_norm")}
        pairs = {
            "layers.1.attention.k.weight": gradients["attn_qkv"][128:192],
            "layers.1.ffn.up.weight": gradients["ffn_up"][96:],
            "layers.1.norms.k.weight": gradients["k_norm"],
            "layers.1.norms.ffn_out.weight": gradients["ffn_out_norm"],
        }
        for name, gradient in pairs.items():
            assert float((trained[name].grad - gradient).norm() / gradient.norm()) < 1e-4, (name, recompute)
    with torch.no_grad():
        trained["layers.1.attention.k.weight"].add_(1.0)
        trained["layers.1.norms.k.weight"].add_(1.0)
    export_gguf(file, schemes.updated(stack, chosen), tmp_path / "new.gguf", "keep")
    new, old = read_values(GGUF.open(tmp_path / "new.gguf")), read_values(gguf)
    old["blk.1.attn_qkv.weight"][128:192] += 1.0
    old["blk.1.k_norm.weight"] += 1.0
    assert all(np.allclose(new[name], old[name], atol=1e-6) for name in old)


@pytest.mark.parametrize(
    ("name", "nearest"), [("gemma4", "gemma"), ("qwen3moe", "qwen3"), ("olmo3", "olmo2"), ("lfm2", ""), (7, "")]
)
def test_an_unknown_one_is_refused_with_the_nearest_and_the_page(name: object, nearest: str) -> None:
    with pytest.raises(ModelError, match=f"`{name}`, which is not supported") as refused:
        arch.of_model_type(name)
    hint = refused.value.hint
    assert f"the nearest that is known: `{nearest}" in hint
    assert arch.PAGE in hint
    assert (Path(__file__).parents[1] / arch.PAGE).is_file()
    for unsupported in ("mixtures of experts", "lfm2", "qwen3.5"):
        assert unsupported in hint


@families
def test_no_number_of_a_header_is_trusted(family: arch.Architecture, tmp_path: Path) -> None:
    """Each key in turn replaced: read as a plausible number, or refused."""
    file = write_model(family, family_config(family), tmp_path / "model.gguf")
    tensors = [file.unchanged(name) for name in file.tensors]
    refused = 0
    for key in [key for key in file.records if key.startswith(family.name)]:
        for kind, value in ((UINT32, 0), (UINT32, 2**32 - 1), (FLOAT32, float("nan")), (FLOAT32, -1.0), (STRING, "x")):
            records = [encode_record(one, kind, value) if one == key else file.record(one) for one in file.records]
            with (tmp_path / "broken.gguf").open("wb") as out:
                write(out, records, tensors)
            try:
                family.values(GGUF.open(tmp_path / "broken.gguf"))
            except ModelError:
                refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    "change", [{"layer_types": ["sliding_attention"]}, {"sliding_window": "x"}, {"rope_parameters": 7}]
)
def test_a_configuration_that_leaves_blocks_open_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    values = vars(family_config(arch.get("gemma3"))) | {"model_type": "gemma3_text", **change}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)
