"""The GGUF reader and ggml's packing, on the embedded model's real file and on damaged copies of it."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from edgeft.errors import ExportError, ModelError
from edgeft.formats import ggml
from edgeft.formats.gguf import ARRAY, GGUF, STRING, NewTensor, encode_record, write


def test_reads_what_the_reference_reader_reads(model: Path) -> None:
    ours, theirs = GGUF.open(model), reference.GGUFReader(model)
    assert ours.arch == "llama"
    assert {t.name: (tuple(t.shape.tolist()), int(t.tensor_type), t.data_offset) for t in theirs.tensors} == {
        t.name: (t.shape, t.type, t.offset) for t in ours.tensors.values()
    }
    for key in ("llama.block_count", "llama.rope.freq_base", "tokenizer.ggml.add_bos_token", "tokenizer.chat_template"):
        assert ours.get_key(key) == theirs.fields[key].contents()
    assert ours.get_key("tokenizer.ggml.tokens") == theirs.fields["tokenizer.ggml.tokens"].contents()


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "token_embd.weight", "blk.3.ffn_norm.weight"])
def test_unpacks_like_the_reference(model: Path, name: str) -> None:
    file = GGUF.open(model)
    info = file.tensors[name]
    rows = 1 if len(info.shape) == 1 else info.shape[1]
    out = np.empty((rows, info.shape[0]), np.float32)
    ggml.unpack(file.bytes(name), info.type, out, threads=2)
    wanted = reference.quants.dequantize(file.bytes(name).reshape(rows, -1), reference.GGMLQuantizationType(info.type))
    np.testing.assert_array_equal(out, wanted.reshape(out.shape))


def test_packing_what_was_unpacked_gives_the_same_values(model: Path) -> None:
    file = GGUF.open(model)
    info = file.tensors["token_embd.weight"]  # q8_0: its scale is found again
    part = file.bytes(info.name)[: ggml.row_bytes(info.type, 576) * 64]
    values, again = np.empty((64, 576), np.float32), np.empty((64, 576), np.float32)
    ggml.unpack(part, info.type, values)
    ggml.unpack(ggml.pack(values, info.type), info.type, again)
    np.testing.assert_allclose(again, values, atol=np.abs(values).max() * 1e-3)


def test_packing_errors_say_what_to_do() -> None:
    with pytest.raises(ExportError, match="whole blocks"):
        ggml.pack(np.zeros((2, 40), np.float32), ggml.Q8_0)
    with pytest.raises(ExportError, match="importance"):
        ggml.pack(np.zeros((1, 256), np.float32), ggml.type_id("iq2_xxs"))
    with pytest.raises(ExportError, match="unknown tensor type"):
        ggml.type_id("q9_9")


def _file(tmp_path: Path, records: list[bytes], tensors: list[NewTensor]) -> Path:
    path = tmp_path / "made.gguf"
    with path.open("wb") as file:
        write(file, records, tensors)
    return path


def test_writes_what_the_reference_reader_reads(tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    records = [
        encode_record("general.architecture", STRING, "llama"),
        encode_record("a.list", ARRAY, ["x", "äö"], STRING),
        encode_record("a.number", 4, 7),
    ]
    tensors = [
        NewTensor("t", (32, 2), ggml.F32, values.nbytes, lambda: values),
        NewTensor("u", (3,), 0, 12, lambda: values[0, :3]),
    ]
    path = _file(tmp_path, records, tensors)
    read = reference.GGUFReader(path)
    assert read.fields["a.list"].contents() == ["x", "äö"]
    np.testing.assert_array_equal(read.tensors[0].data, values)
    np.testing.assert_array_equal(read.tensors[1].data, values[0, :3])
    assert GGUF.open(path).get_key("a.number") == 7


def _damaged(model: Path, kind: str) -> bytes:
    head = model.open("rb").read(2_000_000)
    return {
        "magic": b"GGML" + head[4:],
        "version": head[:4] + struct.pack("<I", 99) + head[8:],
        "tensors": head[:8] + struct.pack("<Q", 2**63) + head[16:],
        "keys": head[:16] + struct.pack("<Q", 2**40) + head[24:],
        "string": head[:24] + struct.pack("<Q", 2**63 - 1) + head[32:],
        "cut": head,
        "empty": b"",
        "short": head[:100],
    }[kind]


@pytest.mark.parametrize("kind", ["magic", "version", "tensors", "keys", "string", "cut", "empty", "short"])
def test_a_damaged_file_is_refused(model: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(_damaged(model, kind))
    with pytest.raises(ModelError) as caught:
        GGUF.open(path)
    assert str(path) in caught.value.message


def test_missing_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model file"):
        GGUF.open(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="folder"):
        GGUF.open(tmp_path)
