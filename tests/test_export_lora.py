"""Export as a GGUF LoRA adapter: an untouched base, an update that is exact at low rank, and what has no place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from edgeft.config import UpdateConfig
from edgeft.data.forest import Forest
from edgeft.engine.load import load
from edgeft.engine.stack import Stack, batch_of
from edgeft.errors import ExportError, ModelError
from edgeft.evaluate.llamacpp import LlamaFile
from edgeft.export.gguf import Exported, Labels
from edgeft.export.lora import export_lora
from edgeft.export.modelfile import write_modelfile
from edgeft.formats import ggml
from edgeft.formats.adapter import check_adapter, is_adapter, named_base
from edgeft.formats.gguf import GGUF
from edgeft.methods import scheme as schemes
from edgeft.methods.base import weight_of
from tests.support.families import ROWS, Families

METHODS = {
    "low rank": UpdateConfig(blocks="1-3", low_rank=8),
    "lora": UpdateConfig(method="lora", blocks="1-3", rank=8, alpha=16.0),
    "lite branches": UpdateConfig(method="tinytl", blocks="1-3", rank=8, alpha=16.0, biases=False, norms=False),
}


@pytest.fixture(scope="module")
def made(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"), tiny)


def trained(file: Path, update: UpdateConfig, size: float = 0.05) -> tuple[Stack, schemes.Scheme]:
    """With random changes of what is trained."""
    stack = load(file)
    scheme = schemes.make(update, stack.depth, stack.arch)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in schemes.apply(stack, scheme, 0).values():
            parameter.add_(size * torch.randn_like(parameter))
    return stack, scheme


def export(file: Path, out: Path, stack: Stack, scheme: schemes.Scheme, check: Any = lambda path: None) -> Exported:
    return export_lora(file, stack, scheme, out, check, Labels(recipe="mine"))


def dense(gguf: GGUF, name: str) -> np.ndarray:
    info = gguf.tensors[name]
    out = np.empty(info.shape[::-1], np.float32)
    ggml.unpack(gguf.bytes(name), info.type, out)
    return out


def near(got: Any, want: Any) -> float:
    got, want = torch.as_tensor(np.asarray(got)).double(), torch.as_tensor(np.asarray(want)).double()
    return float((got - want).norm() / want.norm())


def answers(file: Path, adapter: Path | None = None) -> np.ndarray:
    """Logits of llama.cpp at the trained positions."""
    with LlamaFile(file, n_ctx=64, threads=2, adapter=adapter) as llama:
        return np.concatenate(
            [llama.target_logits(r.ids.tolist(), np.flatnonzero(r.trained[1:]).tolist()) for r in ROWS]
        )


def of_trainer(stack: Stack) -> np.ndarray:
    logits: np.ndarray = stack.logits(batch_of(Forest(ROWS), range(len(ROWS)))[1]).numpy()
    return logits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "phi3"])
def test_llama_cpp_answers_with_the_adapter_as_the_trainer(
    kind: str, method: str, made: Families, tmp_path: Path
) -> None:
    """Rows of q and k in the file's order, tensors that q, k and v share, and no byte of the base changed."""
    if kind == "phi3" and method == "lora":
        pytest.skip("PEFT's layers of shared tensors are covered by the others")
    file = made(kind)[1]
    before = file.read_bytes()
    stack, scheme = trained(file, METHODS[method])
    out = export(file, tmp_path / "adapter.gguf", stack, scheme).path
    want, plain = of_trainer(stack), answers(file)
    assert near(plain, want) > 0.05  # the update counts
    assert near(answers(file, out), want) < 0.015
    assert file.read_bytes() == before
    assert is_adapter(out)
    assert not is_adapter(file)


def test_its_product_is_the_update(tiny: Path, tmp_path: Path) -> None:
    """In the base file's row order, with llama.cpp's factor of alpha over the rank; ranks may differ."""
    stack, scheme = trained(tiny, METHODS["low rank"])
    layer: Any = stack.linear(2, "q")
    layer.down, layer.up = layer.down[:4], torch.nn.Parameter(layer.up[:, :4].detach().clone())
    made = export(tiny, tmp_path / "adapter.gguf", stack, scheme)
    adapter, base = GGUF.open(made.path), GGUF.open(tiny)
    assert (made.updated, made.types) == (21, {"q8_0": 21, "f16": 21})
    assert adapter.get_key("adapter.lora.alpha") == 8.0
    sizes = stack.arch.sizes(SimpleNamespace(**stack.arch.values(base)))
    for block, tensor in scheme.updates:
        name = f"blk.{block}.{stack.arch.linears[tensor].gguf}.weight"
        down, up = (dense(adapter, name + part) for part in (".lora_a", ".lora_b"))
        change = up @ down * 8.0 / len(down)
        order = stack.arch.row_order(tensor, sizes)
        whole = dense(base, name) + change
        assert near(whole if order is None else whole[order], weight_of(stack.linear(block, tensor))) < 5e-3


def test_a_dense_update_is_cut_to_the_smallest_rank_that_passes(tiny: Path, tmp_path: Path) -> None:
    stack, scheme = trained(tiny, UpdateConfig(blocks="2-3"), size=0.0)
    torch.manual_seed(0)
    with torch.no_grad():
        for block, tensor in scheme.updates:
            weight: Any = stack.linear(block, tensor).weight
            weight.add_(0.01 * torch.randn(len(weight), 12) @ torch.randn(12, weight.shape[1]))
    ranks = []

    def check(path: Path) -> str:
        ranks.append(GGUF.open(path).tensors["blk.2.ffn_up.weight.lora_a"].shape[1])
        if near(answers(tiny, path), of_trainer(stack)) > 0.02:
            raise ExportError("another answer")
        return "passed"

    made = export(tiny, tmp_path / "adapter.gguf", stack, scheme, check)
    assert (made.checked, ranks) == ("passed", [8, 16])

    def never(path: Path) -> None:
        raise ExportError("another answer")

    with pytest.raises(ExportError, match=r"not of low rank.*rank 128.*another answer") as caught:
        export(tiny, tmp_path / "other.gguf", stack, scheme, never)
    assert "--format gguf" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["adapter.gguf"]


@pytest.mark.parametrize(
    ("more", "says"),
    [({"biases": True}, "biases"), ({"norms": True}, "norms"), ({"biases": True, "norms": True}, " and ")],
)
def test_biases_and_norms_have_no_place(tiny: Path, tmp_path: Path, more: dict[str, bool], says: str) -> None:
    stack, scheme = trained(tiny, replace(METHODS["low rank"], **more))
    with pytest.raises(ExportError, match=rf"{says}.*no place") as caught:
        export(tiny, tmp_path / "adapter.gguf", stack, scheme)
    assert caught.value.exit_code == 7
    assert not list(tmp_path.iterdir())


def test_an_adapter_of_another_model_is_refused(tiny: Path, made: Families, tmp_path: Path) -> None:
    stack, scheme = trained(tiny, METHODS["low rank"])
    out = export(tiny, tmp_path / "adapter.gguf", stack, scheme).path
    check_adapter(out, tiny)
    with pytest.raises(ModelError, match="`qwen3`"):
        check_adapter(out, made("qwen3")[1])
    with pytest.raises(ModelError, match="does not fit"):
        check_adapter(out, made("llama")[1])
    with pytest.raises(ModelError, match="not a LoRA adapter"):
        check_adapter(tiny, tiny)


def test_a_modelfile_names_base_and_adapter(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(tiny.read_bytes())
    stack, scheme = trained(tiny, METHODS["low rank"])
    out = export(tmp_path / "tiny.gguf", tmp_path / "adapter.gguf", stack, scheme).path
    assert named_base(out) == tmp_path / "tiny.gguf"
    text = write_modelfile(tmp_path / "tiny.gguf", out).read_text()
    assert "FROM ./tiny.gguf\nADAPTER ./adapter.gguf\n" in text
    assert f"FROM {tiny}\nADAPTER" in write_modelfile(tiny, out).read_text()
