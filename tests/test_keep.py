"""`--type keep`: rounding onto the base's own grid, what it loses, and the file that it gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeft import config
from edgeft.config import UpdateConfig
from edgeft.data.forest import Forest
from edgeft.data.rows import load as load_rows
from edgeft.data.tokens import Encoded, encode_rows
from edgeft.engine import kernels
from edgeft.engine.backend import TORCH, Backend
from edgeft.engine.load import load
from edgeft.engine.stack import Stack, batch_of
from edgeft.errors import ExportError
from edgeft.evaluate.llamacpp import LlamaFile
from edgeft.export import rounding
from edgeft.export.gguf import PackedRows, export_gguf
from edgeft.export.keep import Kept, mean_loss
from edgeft.export.rounding import Sensitivity, round_matrix
from edgeft.formats import ggml
from edgeft.formats.gguf import GGUF
from edgeft.formats.grid import FORMATS, grid_of
from edgeft.formats.tokenizer import GgufTokenizer
from edgeft.methods import scheme as schemes
from edgeft.methods.base import weight_of
from edgeft.run.progress import Progress
from tests.support.families import ROWS, Families
from tests.support.rows import small_rows

OUTPUTS, INPUTS = 48, 768


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def unpacked(packed: np.ndarray, name: str) -> torch.Tensor:
    out = np.empty((OUTPUTS, INPUTS), np.float32)
    ggml.unpack(np.ascontiguousarray(packed), ggml.type_id(name), out)
    return torch.from_numpy(out)


def lost(change: torch.Tensor, x: torch.Tensor) -> float:
    """Of the products with these inputs, mean squares."""
    return float((x @ change.T).square().mean())


def problem(name: str) -> tuple[np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed base, base plus an update far below its step, inputs with few large directions, other such inputs)."""
    random = torch.Generator().manual_seed(0)
    packed = ggml.pack(torch.randn(OUTPUTS, INPUTS, generator=random).numpy(), ggml.type_id(name)).reshape(OUTPUTS, -1)
    spread = torch.randn(60, INPUTS, generator=random) / 8

    def inputs(count: int) -> torch.Tensor:
        return torch.randn(count, 60, generator=random) @ spread + 0.1 * torch.randn(count, INPUTS, generator=random)

    update = 0.02 * torch.randn(OUTPUTS, 4, generator=random) @ spread[:4]
    return packed, unpacked(packed, name) + update, inputs(2000), inputs(500)


def rounded(
    name: str, target: torch.Tensor, packed: np.ndarray, x: torch.Tensor, rounds: int = 2, backend: Backend = TORCH
) -> torch.Tensor:
    sensitivity = Sensitivity(INPUTS)
    sensitivity.add(x, None)
    sensitivity.finish()
    grid = grid_of(packed, ggml.type_id(name), INPUTS)
    return unpacked(round_matrix(target, sensitivity, grid, rounds, backend), name)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "q8_0"])
def test_an_update_below_the_grids_step_survives(name: str) -> None:
    """On inputs that the rounding did not see; ggml's own packing loses it. The kernels do the same."""
    packed, target, x, others = problem(name)
    update = lost(target - unpacked(packed, name), others)
    plain = lost(target - unpacked(ggml.pack(target.numpy(), ggml.type_id(name)), name), others)
    once, twice = (lost(target - rounded(name, target, packed, x, rounds), others) for rounds in (0, 2))
    assert plain > 0.9 * update
    assert twice < 0.4 * update
    assert twice < 0.6 * once
    by_kernels = lost(target - rounded(name, target, packed, x, 2, kernels.load()), others)
    assert by_kernels == pytest.approx(twice, rel=0.1)  # codes flip at ties


def test_wide_inputs_are_rounded_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, target, x, others = problem("q4_k")
    monkeypatch.setattr(rounding, "WIDEST", 256)
    sensitivity = Sensitivity(INPUTS)
    assert [total.shape for total in sensitivity.sums] == [(256, 256)] * 3
    update = lost(target - unpacked(packed, "q4_k"), others)
    assert lost(target - rounded("q4_k", target, packed, x), others) < 0.9 * update
    by_kernels = Sensitivity(INPUTS, kernels.load())
    for one in (sensitivity, by_kernels):
        one.add(x, torch.linspace(0, 2, len(x)))
    assert all(near(*pair) < 1e-5 for pair in zip(by_kernels.sums, sensitivity.sums, strict=True))


def test_inputs_that_are_not_finite_are_refused() -> None:
    sensitivity = Sensitivity(8)
    sensitivity.add(torch.full((4, 8), torch.nan), None)
    with pytest.raises(ExportError, match="cannot be used for rounding"):
        sensitivity.finish()


def test_tokens_that_count_more_lose_less() -> None:
    packed, target, x, _ = problem("q4_1")
    halves, errors = (x[:1000] * torch.linspace(0, 2, INPUTS), x[1000:] * torch.linspace(2, 0, INPUTS)), []
    for weight in (0.01, 100.0):
        sensitivity = Sensitivity(INPUTS)
        for half, factor in zip(halves, (1.0, weight), strict=True):
            sensitivity.add(half, torch.full((1000,), factor))
        sensitivity.finish()
        packed_now = round_matrix(target, sensitivity, grid_of(packed, ggml.type_id("q4_1"), INPUTS), 2)
        errors.append([lost(target - unpacked(packed_now, "q4_1"), half) for half in halves])
    assert errors[0][0] < errors[1][0]
    assert errors[0][1] > errors[1][1]


# ---------------------------------------------------------------- a whole model


@pytest.fixture(scope="module")
def rows(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Encoded]:
    folder = small_rows(tmp_path_factory.mktemp("rows") / "rows")
    found = load_rows(config.DataConfig(path=str(folder))).train
    return encode_rows(found, GgufTokenizer(tiny), 256, None)[0]


def logits(stack: Stack, rows: list[Encoded]) -> torch.Tensor:
    return stack.logits(batch_of(Forest(rows), range(len(rows)))[1])


def near(got: Any, want: Any) -> float:
    got, want = torch.as_tensor(got).double(), torch.as_tensor(want).double()
    return float((got - want).norm() / want.norm())


UPDATES = {
    "low rank": UpdateConfig(blocks="1-3", low_rank=8),
    "whole": UpdateConfig(blocks="1-2", tensors=["q", "o", "down"]),
    "channels": UpdateConfig(blocks="1-2", channels=0.25, biases=False),
    "lora": UpdateConfig(method="lora", blocks="2-3", rank=4, alpha=4.0),
}


def kept_of(tiny: Path, update: UpdateConfig, backend: bool = True) -> tuple[Stack, Kept, schemes.Scheme]:
    stack = load(tiny, lean=backend and update.method != "lora")
    if backend:
        stack.configure(backend=kernels.load())
    scheme = schemes.make(update, stack.depth, stack.arch)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in schemes.apply(stack, scheme, 0).values():
            parameter.add_(0.02 * torch.randn_like(parameter))
    recipe = config.apply_sets(config.load_recipe("sparse-bp"), ["train.batch_rows=4"])
    return stack, Kept(stack, scheme, GGUF.open(tiny), recipe, Progress()), scheme


@pytest.mark.parametrize("update", UPDATES)
def test_the_file_is_as_large_as_its_base_and_computes_what_the_trainer_does(
    update: str, tiny: Path, rows: list[Encoded], tmp_path: Path
) -> None:
    stack, kept, scheme = kept_of(tiny, UPDATES[update])
    trained = logits(stack, rows)
    kept.round(rows)
    kept.settle(rows, 2)
    now = logits(stack, rows)
    made = export_gguf(tiny, kept.updates(), tmp_path / "kept.gguf", "keep")
    base, new = GGUF.open(tiny), GGUF.open(made.path)
    assert {n: (t.type, t.shape) for n, t in new.tensors.items()} == {
        n: (t.type, t.shape) for n, t in base.tensors.items()
    }
    assert made.types == {"q4_0": len(scheme.updates), "f32": 2 * (stack.depth - scheme.cut)}
    trained_names = {f"blk.{b}.{stack.arch.linears[t].gguf}.weight" for b, t in scheme.updates}
    changed = {name for name in base.tensors if (new.bytes(name) != base.bytes(name)).any()}
    assert changed == trained_names | {name for name in changed if "norm" in name}
    with LlamaFile(made.path, n_ctx=256, threads=1) as llama:
        every = [llama.target_logits(r.ids.tolist(), np.flatnonzero(r.trained[1:]).tolist()) for r in rows]
    assert near(np.concatenate(every), now) < 0.02  # llama.cpp rounds activations to 8 bits
    kept.restore()
    assert torch.equal(logits(stack, rows), trained)


def test_plain_torch_rounds_as_the_kernels_do(tiny: Path, rows: list[Encoded]) -> None:
    found = []
    for backend in (False, True):
        stack, kept, _ = kept_of(tiny, UPDATES["low rank"], backend)
        trained = logits(stack, rows)
        kept.round(rows)
        found.append(near(logits(stack, rows), trained))
    assert found[0] == pytest.approx(found[1], rel=0.3)  # codes flip at ties


def test_the_last_phase_lowers_the_loss_on_training_rows(tiny: Path, rows: list[Encoded]) -> None:
    stack, kept, scheme = kept_of(tiny, UPDATES["low rank"])
    kept.round(rows)
    before = mean_loss(stack, rows, scheme.cut)
    kept.settle(rows, 8)
    once = mean_loss(stack, rows, scheme.cut)
    assert once < before
    kept.settle(rows, 2, seed=1)
    assert mean_loss(stack, rows, scheme.cut) != once
    kept.undo()
    assert mean_loss(stack, rows, scheme.cut) == once
    assert not any(norm.weight.requires_grad for norm in kept.norms.values())


def test_types_without_a_grid_are_refused(tiny: Path, tmp_path: Path) -> None:
    base = export_gguf(tiny, [("layers.1.mlp.up_proj.weight", torch.randn(384, 128))], tmp_path / "base.gguf", "mxfp4")
    with pytest.raises(ExportError, match=r"mxfp4.*no update can be rounded") as caught:
        kept_of(base.path, UPDATES["low rank"], backend=False)
    assert "q8_0" in caught.value.hint


def test_packed_rows_find_their_place_in_tensors_that_linears_share(
    tiny: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """q and up of Phi-3, in tensors that hold k, v and gate, too; and q of LLaMA, in the file's order of rows."""
    made = Families(tmp_path_factory.mktemp("families"), tiny)
    for kind, tensors in (("phi3", ("q", "up")), ("llama", ("q", "k", "down"))):
        file = made(kind)[1]
        stack, base = load(file), GGUF.open(file)
        updates, packed = [], []
        for tensor in tensors:
            linear = stack.arch.linears[tensor]
            values = weight_of(stack.linear(1, tensor)) + 1
            kind_id = base.tensors[f"blk.1.{linear.gguf}.weight"].type
            updates.append((f"layers.1.{linear.path}.weight", values))
            data = ggml.pack(values.numpy(), kind_id).reshape(len(values), -1)
            packed.append((f"layers.1.{linear.path}.weight", PackedRows(data, kind_id)))
        one = export_gguf(file, updates, tmp_path / "dense.gguf", "keep").path
        two = export_gguf(file, packed, tmp_path / "packed.gguf", "keep").path
        assert one.read_bytes() == two.read_bytes()
        assert len(logits(load(two), ROWS)) > 0
