"""Methods, few tokens, answers and whole runs on blocks that differ from a LLaMA block."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edgeft import config
from edgeft.config import UpdateConfig
from edgeft.data.forest import Forest
from edgeft.engine import kernels
from edgeft.engine.backend import TORCH, Backend
from edgeft.engine.load import load
from edgeft.engine.stack import Stack, batch_of
from edgeft.errors import ExportError
from edgeft.export.peft import export_peft
from edgeft.methods import scheme as schemes
from edgeft.pipeline import stages
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train import checkpoint
from tests.support.families import ROWS, Families, in_transformers
from tests.support.models import reference
from tests.support.rows import small_rows
from tests.support.runs import Lines, again

# in these is all that differs: windows, caps, GELU; norms after; scales; shared tensors; neighbours; blocks not rotated
DIFFERENT = ("gemma2", "gemma3", "olmo2", "minicpm", "phi3-long", "ernie4_5", "smollm3")
kinds = pytest.mark.parametrize("kind", DIFFERENT)
METHODS = {
    "channels": UpdateConfig(blocks="1-3", channels=0.25),
    "low rank": UpdateConfig(blocks="1-3", low_rank=4),
    "lora": UpdateConfig(blocks="1-3", method="lora", rank=4),
    "lite branches": UpdateConfig(blocks="1-3", method="tinytl", rank=4, norms=True),
}


@pytest.fixture(scope="module")
def made(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"), tiny)


def near(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def gradients(stack: Stack, update: UpdateConfig, backend: Backend, **options: str) -> dict[str, torch.Tensor]:
    """Two tokens before the answer pass gradients, and what stands above them does not."""
    chosen = schemes.make(update, stack.depth, stack.arch)
    trained = schemes.apply(stack, chosen, 0)
    for number, (name, parameter) in enumerate(trained.items()):
        if "lora_B" in name:  # from zero, half of the gradients would be zero
            torch.manual_seed(number)
            parameter.data.normal_(std=0.05)
    stack.configure(backend=backend, **options)
    forest = Forest(ROWS)
    batch = batch_of(forest, range(3), forest.live(range(3), 2))[1]
    loss = stack.head.loss(stack.top(stack.trunk(batch, chosen.cut), batch, chosen.cut), batch.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in trained.items() if parameter.grad is not None}


@pytest.mark.parametrize("method", METHODS)
@kinds
def test_methods_and_few_tokens_are_those_of_transformers_blocks(kind: str, method: str, made: Families) -> None:
    """Plain torch runs transformers' own blocks; the kernels, edgeft's."""
    _, file = made(kind)
    want = gradients(load(file), METHODS[method], TORCH)
    got = gradients(load(file), METHODS[method], kernels.load())
    half = gradients(load(file), METHODS[method], kernels.load(), products="bf16")
    assert set(got) == set(want) == set(half)
    assert len(got) >= 3 * 7
    for name in want:
        assert near(got[name], want[name]) < 1e-4, name
    if method in ("low rank", "lite branches"):  # no weight is trained
        again = gradients(load(file), METHODS[method], kernels.load(), recompute="selective")
        assert all(near(again[name], want[name]) < 1e-4 for name in want)
    every = [torch.cat([gradients[name].flatten() for name in want]) for gradients in (half, want)]
    assert near(*every) < 0.2  # random weights make attention sharp


@kinds
def test_answers_are_those_of_transformers(kind: str, made: Families) -> None:
    """Prompts of several lengths, padded, and longer than the windows."""
    folder, file = made(kind)
    model, prompts = reference(in_transformers(folder), attn_implementation="eager"), [row.ids[:-2] for row in ROWS]
    got = load(file).generate([list(map(int, prompt)) for prompt in prompts], 8, frozenset())
    for prompt, answer in zip(prompts, got, strict=True):
        ids = torch.tensor(prompt[None].astype(np.int64))
        for token in answer:  # token by token without a cache, so that nothing is shared with what is tested
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits[0, -1]
            assert float(logits[token]) >= float(logits.max()) - 1e-4
            ids = torch.cat([ids, torch.tensor([[token]])], 1)


def test_adapters_of_a_shared_tensor_are_refused(made: Families, tmp_path: Path) -> None:
    stack = load(made("phi3")[1])
    chosen = schemes.make(METHODS["lora"], stack.depth, stack.arch)
    schemes.apply(stack, chosen, 0)
    with pytest.raises(ExportError, match=r"one adapter for all of mlp\.gate_up_proj, self_attn\.qkv_proj"):
        export_peft(stack, chosen, "phi", tmp_path / "adapter")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "phi3"])
def test_a_resumed_run_ends_with_the_same_bits(kind: str, made: Families, tmp_path: Path) -> None:
    """Prepared, trained and exported, by the kernels; the last checkpoints are lost in between."""
    data = small_rows(tmp_path / "rows", train=6, heldout=2)
    sets = [f"model.path={made(kind)[1]}", f"data.path={data}", "update.blocks=1-3", "train.batch_rows=2"]
    sets += ["train.epochs=3", "how.checkpoint_s=0", "how.compile=on", "how.trunk_place=run", "data.max_tokens=128"]
    recipe = config.apply_sets(config.load_recipe("sparse-bp"), sets)
    run = Run.start(tmp_path / "run", recipe, False)
    stages.train(run, Progress())  # and what comes before
    best, *every = run.best.read_bytes(), *checkpoint.all_of(run.checkpoints)
    last = every[-1].read_bytes()
    every[-1].write_bytes(last[:-9])
    run.done.unlink()
    said = Lines()
    run = again(run)
    stages.train(run, said)
    assert any("resumed after step 7" in line for line in said.lines), said.lines
    assert every[-1].read_bytes() == last
    assert run.best.read_bytes() == best
    made_file = stages.export(run, "gguf", "auto", tmp_path / "new.gguf", Progress())  # checked in llama.cpp
    assert made_file["check"]["tokens"] > 0
