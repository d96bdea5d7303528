"""Big models on small machines: random models of any shape, weights that leave memory, and whole runs under a limit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import limits
import make_model
import numpy as np
import pytest
import torch

from edgeft.config import Recipe, UpdateConfig
from edgeft.data.forest import Forest
from edgeft.data.rows import Row
from edgeft.data.tokens import Encoded
from edgeft.engine import choose, compiled, kernels
from edgeft.engine.backend import TORCH
from edgeft.engine.load import load
from edgeft.engine.packed import Packed
from edgeft.engine.stack import Stack, batch_of
from edgeft.errors import DamagedError, EdgeftError
from edgeft.evaluate.llamacpp import LlamaFile, usable_bytes, with_fast_types
from edgeft.export.gguf import export_gguf
from edgeft.export.verify import Reference, compare
from edgeft.formats import ggml
from edgeft.formats.gguf import GGUF, release_pages
from edgeft.formats.tokenizer import GgufTokenizer
from edgeft.host.limit import can_make_group
from edgeft.methods import scheme
from edgeft.plan import shape_of
from edgeft.run.folder import Run
from edgeft.run.record import EngineChoice, Resolved
from edgeft.train import checkpoint

TEXT = "Every linear layer keeps its packed weights in the mapped file, and nothing else."


@pytest.fixture
def sparing() -> Iterator[None]:
    TORCH.memory.set_release(True)
    yield
    TORCH.memory.set_release(False)


needs_compiler = pytest.mark.skipif(not (compiled.is_built() or compiled.compiler()), reason="no C++ compiler")


def row(ids: list[int]) -> Encoded:
    return Encoded(np.array(ids, np.int32), np.arange(len(ids)) > 0, Row([], []))


# ---------------------------------------------------------------- models of any shape


def test_llama_cpp_and_the_trainer_read_the_same_from_a_random_model(tiny: Path) -> None:
    tokenizer = GgufTokenizer(tiny)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.vocab_size == make_model.SHAPES["tiny"].vocabulary
    assert tokenizer.decode(ids) == TEXT
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.encode("<|im_start|>user\n")[0] == 1  # marks are there, so that the chat template works
    stack = load(tiny)
    _, batch = batch_of(Forest([row(ids)]), [0])
    ours = stack.logits(batch).numpy()
    with LlamaFile(tiny, n_ctx=64, threads=1) as file:
        theirs = file.target_logits(ids, range(len(ids) - 1))
    assert np.isfinite(theirs).all()
    assert 0.3 < theirs.std() < 3  # neither silent nor certain
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.99


def test_a_larger_vocabulary_is_filled_up_and_types_have_their_sizes(tmp_path: Path, model: Path) -> None:
    records = make_model.vocabulary(GGUF.open(model), 60_000)
    assert sum(b"<|unused_" in record for record in records) == 1
    shape = make_model.Shape(1, 64, 2, 1, 64, 300, 64)
    with pytest.raises(EdgeftError, match="200 tokens are fewer"):
        make_model.vocabulary(GGUF.open(model), 200)
    for name in make_model.TYPES:
        for tensor in make_model.tensors(shape, name, seed=1):
            data = tensor.data()
            assert data.nbytes == tensor.nbytes
            if tensor.type != ggml.F32:
                values = np.empty((tensor.shape[1], tensor.shape[0]), np.float32)
                ggml.unpack(data, tensor.type, values)
                again = tensor.data()
                assert (again == data).all()  # the same seed, the same file
                if tensor.name == "token_embd.weight":
                    assert values.std() == pytest.approx(1.0, rel=0.05)
                    assert abs(values.mean()) < 0.05


def test_shapes_are_those_of_the_models() -> None:
    sizes = {
        name: sum(int(np.prod(t.shape)) for t in make_model.tensors(shape, "q4_0", 0))
        for name, shape in make_model.SHAPES.items()
    }
    # as their model cards count them
    assert sizes["llama2-7b"] == 6_738_415_616
    assert sizes["llama3-8b"] == 8_030_261_248
    assert sizes["llama3.2-3b"] == 3_212_749_824
    assert sizes["tinyllama"] == 1_100_048_384
    assert sizes["mistral-7b"] == 7_248_023_552
    assert sizes["qwen3-0.6b"] == 596_049_920
    assert sizes["gemma3-270m"] == 268_098_176
    assert sizes["gemma3-1b"] == 999_885_952
    assert sizes["phi3-mini"] == 3_821_079_552
    assert sizes["exaone4-1.2b"] == 1_279_391_488


# ---------------------------------------------------------------- weights that are not in memory


def test_rows_are_put_in_order_when_they_are_used(tiny: Path) -> None:
    gguf = GGUF.open(tiny)
    shape = shape_of(str(tiny), "auto")
    order = shape.arch.row_order("q", shape)
    assert order is not None
    info = gguf.tensors["blk.0.attn_q.weight"]
    stored = Packed(gguf.bytes(info.name), info.type, info.shape[1], info.shape[0])
    ordered = stored.permuted(order)
    wanted = stored.copy()[torch.from_numpy(order)]
    assert ordered.data.base is not None
    assert np.shares_memory(ordered.data, gguf.data)  # no copy
    assert torch.equal(ordered.dense(), wanted)
    assert torch.equal(ordered.part(16, 48).dense(), wanted[16:48])
    assert torch.equal(ordered.gather_rows(np.array([5, 2, 5])), wanted[[5, 2, 5]])
    back = np.argsort(order)
    assert torch.equal(ordered.permuted(back).dense(), stored.copy())


@needs_compiler
def test_the_kernels_put_rows_in_order_too(tiny: Path) -> None:
    gguf = GGUF.open(tiny)
    shape = shape_of(str(tiny), "auto")
    order = shape.arch.row_order("q", shape)
    assert order is not None
    info = gguf.tensors["blk.0.attn_q.weight"]
    stored = Packed(gguf.bytes(info.name), info.type, info.shape[1], info.shape[0])
    wanted = stored.copy()[torch.from_numpy(order)]
    assert torch.equal(stored.permuted(order).part(8, 40).operand(kernels.load()), wanted[8:40])


def mapped_bytes(path: Path) -> int:
    """Of a file, pages that this process holds."""
    inside, total = False, 0
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            if "-" in line.split()[0] and ":" not in line.split()[0]:
                inside = line.rstrip().endswith(path.name)
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


needs_smaps = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")


@needs_smaps
def test_sparing_memory_changes_no_number_and_keeps_no_weights(model: Path, request: pytest.FixtureRequest) -> None:
    _, batch = batch_of(Forest([row(GgufTokenizer(model).encode(TEXT))]), [0])

    def numbers(stack: Stack) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = stack.trunk(batch, 25).requires_grad_()
        loss = stack.head.loss(stack.top(hidden, batch, 25), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        return loss.detach(), hidden.grad

    TORCH.memory.set_release(False)  # a run of an earlier test may have set it
    plain = load(model)
    wanted = numbers(plain)
    before = mapped_bytes(model)
    request.getfixturevalue("sparing")
    stack = load(model)
    release_pages(GGUF.open(model).data)
    started = mapped_bytes(model)
    found = numbers(stack)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert before > 60_000_000  # most of the file
    assert mapped_bytes(model) - started < 12_000_000


@needs_smaps
def test_an_export_leaves_no_page_of_its_base(model: Path, tmp_path: Path) -> None:
    before = mapped_bytes(model)
    out = tmp_path / "out.gguf"
    export_gguf(model, [], out)
    assert mapped_bytes(model) - before < 12_000_000
    base, made = GGUF.open(model), GGUF.open(out)
    assert all((made.bytes(name) == base.bytes(name)).all() for name in base.tensors)


def test_only_pages_of_mapped_arrays_are_released(tmp_path: Path) -> None:
    own = np.arange(1 << 16, dtype=np.uint8)
    release_pages(own)
    assert (own == np.arange(1 << 16, dtype=np.uint8)).all()
    (tmp_path / "file").write_bytes(bytes(range(256)) * 1024)
    mapped = np.memmap(tmp_path / "file", np.uint8, "r")
    release_pages(mapped[100:200_000])
    assert bytes(mapped[:512]) == bytes(range(256)) * 2


# ---------------------------------------------------------------- activations, and what torch loads

LOADED = """
import sys
import numpy as np
from edgeft.config import UpdateConfig
from edgeft.data.rows import Row
from edgeft.data.tokens import Encoded
from edgeft.data.forest import Forest
from edgeft.engine import kernels
from edgeft.engine.stack import batch_of
from edgeft.engine.load import load
from edgeft.methods import scheme

stack = load(sys.argv[1], lean=True)
stack.configure(backend=kernels.load(), recompute="full")
parameters = scheme.apply(stack, scheme.make(UpdateConfig(blocks="1-2"), stack.depth, stack.arch), 0)
ids = np.arange(20, 60, dtype=np.int32)
_, batch = batch_of(Forest([Encoded(ids, ids > 20, Row([], []))]), [0])
stack.head.loss(stack.top(stack.trunk(batch, 1), batch, 1), batch.targets).backward()
assert all(p.grad is not None for p in parameters.values())
print([name for name in ("torch._dynamo", "sympy", "transformers") if name in sys.modules])
"""


@needs_compiler
def test_what_is_computed_again_is_the_same(tiny: Path) -> None:
    stack = load(tiny, lean=True)
    stack.configure(backend=kernels.load())
    update = UpdateConfig(blocks="1-2", tensors=["q", "k", "up", "down"], biases=True, norms=True)
    parameters = scheme.apply(stack, scheme.make(update, stack.depth, stack.arch), 0)
    ids = np.random.default_rng(0).integers(20, 1000, 48).tolist()
    _, batch = batch_of(Forest([row(ids), row([*ids[:20], *ids[5:20]])]), [0, 1])
    found = []
    for recompute in (False, True):
        stack.configure(recompute="full" if recompute else "none")
        stack.model.zero_grad()
        loss = stack.head.loss(stack.top(stack.trunk(batch, 1), batch, 1), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((loss.detach(), {name: p.grad for name, p in parameters.items() if p.grad is not None}))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1].keys() == found[1][1].keys() == parameters.keys()
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in parameters)


@needs_compiler
def test_a_step_does_not_load_torchs_compiler(tiny: Path) -> None:
    """It takes 70 MB, and comes with torch's own gradient checkpointing and AdamW, and with arithmetic on `meta`."""
    result = subprocess.run([sys.executable, "-c", LOADED, str(tiny)], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


# ---------------------------------------------------------------- trained weights and the check


def test_weights_are_read_where_they_are_used(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001.safetensors"
    tensors = {"a": torch.arange(12.0).view(3, 4), "adamw.exp_avg.a": torch.ones(3, 4), "adamw.step.a": torch.tensor(7)}
    checkpoint.write(path, tensors, {"step": 1})
    parameters = {"a": torch.nn.Parameter(torch.zeros(3, 4))}
    place = parameters["a"].data_ptr()
    found, state = checkpoint.read(path, checkpoint.into(parameters))
    assert state["step"] == 1
    assert torch.equal(parameters["a"], tensors["a"])
    assert found["a"].data_ptr() == parameters["a"].data_ptr() == place
    assert torch.equal(found["adamw.exp_avg.a"], tensors["adamw.exp_avg.a"])
    assert int(found["adamw.step.a"]) == 7
    assert checkpoint.read(path, checkpoint.skip)[0] == {}
    with pytest.raises(EdgeftError, match=r"a is \[3, 4\] in the checkpoint, and \[4, 3\] in the model"):
        checkpoint.read(path, checkpoint.into({"a": torch.zeros(4, 3)}))
    path.write_bytes(path.read_bytes()[:-4] + b"\1\2\3\4")
    parameters["a"].detach().zero_()
    with pytest.raises(DamagedError):
        checkpoint.read(path, checkpoint.into(parameters))
    assert not parameters["a"].any()  # a damaged file reaches no weight


@needs_compiler
def test_the_check_of_an_export_runs_through_the_kernels(tiny: Path, tmp_path: Path, sparing: None) -> None:
    stack = load(tiny, lean=True)
    stack.configure(backend=kernels.load())
    chosen = scheme.make(UpdateConfig(blocks=2, tensors=["q", "up"]), stack.depth, stack.arch)
    for parameter in scheme.apply(stack, chosen, 0).values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    tokenizer = GgufTokenizer(tiny)
    rows = [row(tokenizer.encode(text)) for text in (TEXT, TEXT[::-1], TEXT.upper())]
    out = tmp_path / "out.gguf"
    export_gguf(tiny, scheme.updated(stack, chosen), out, "q8_0")
    reference = Reference(stack, rows, tokenizer, threads=1)
    good = compare(out, reference)
    bad = compare(tiny, reference)  # without the update
    assert good.rows == 3
    assert good.same_ids
    assert good.mean_kl < 0.01 < 0.1 < bad.mean_kl


@needs_compiler
def test_an_export_is_checked_with_the_kernels_that_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.start(tmp_path / "run", Recipe(), False)
    assert choose.recalled(run) is None  # nothing is decided yet
    run.write_record(Resolved(Recipe(), Recipe(), "auto", 0, EngineChoice(kernels=True, products="bf16"), "", ""))
    own = kernels.load()
    found = choose.recalled(run)
    assert found is not None
    assert found.backend is own
    assert found.products == "fp32"
    monkeypatch.setattr(compiled, "is_built", lambda: False)  # on another machine
    assert choose.recalled(run) is None


# ---------------------------------------------------------------- scoring in little memory


def test_scoring_stays_within_its_room(model: Path) -> None:
    assert usable_bytes(1000) == 1000
    assert usable_bytes(0) > 1 << 20
    assert usable_bytes(1 << 60) == pytest.approx(usable_bytes(0), rel=0.2)
    with with_fast_types(model, 100_000, room_bytes=600 << 20) as place:
        assert place == model  # the float16 copy is larger than a quarter of that
    ids = GgufTokenizer(model).encode(TEXT)
    found = []
    for size in (100 << 20, 1 << 40):
        with LlamaFile(model, n_ctx=2048, threads=1, room_bytes=size) as file:
            file.reserve(256, 1, preferred=4096)
            found.append((file.cells, file.target_logits(ids, [len(ids) - 1])))
    assert found[0][0] < found[1][0]  # fewer keys and values
    assert found[0][0] >= 256
    assert np.corrcoef(found[0][1][0], found[1][1][0])[0, 1] > 0.999


# ---------------------------------------------------------------- whole runs


def test_rows_for_the_limits_have_the_length_that_is_asked_for(tmp_path: Path, model: Path) -> None:
    from edgeft.config import DataConfig
    from edgeft.data import rows as data_rows
    from edgeft.data import tokens as data_tokens

    limits.passage_rows(tmp_path / "rows", 8, 256)
    found = data_rows.load(DataConfig(path=str(tmp_path / "rows")))
    encoded, dropped = data_tokens.encode_rows(found.train, GgufTokenizer(model), 256)
    assert (len(encoded), dropped) == (8, [])
    assert min(len(r.ids) for r in encoded) > 230


@pytest.mark.slow
@pytest.mark.skipif(not can_make_group(), reason="no control group for memory can be made here")
def test_smollm2_is_tuned_and_exported_in_600_mib(tmp_path: Path, model: Path) -> None:
    job = next(job for job in limits.JOBS if job.name == "smollm2")
    found = limits.run(job, model, tmp_path, job.limit_mib << 20, [])
    assert found.result == "done"
    assert found.by.startswith("cgroup")
    assert found.in_use_bytes is not None
    assert found.in_use_bytes < job.limit_mib << 20
    assert list(found.peaks) == ["prepare", "train", "export", "eval"]
    assert found.loss[1] < found.loss[0]
