"""Files from strangers: refused in bounded time and memory, with an EdgeftError, and never run."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_gguf
import numpy as np
import pytest

import edgeft
from edgeft import config
from edgeft.arch.check import check_file
from edgeft.config import DataConfig
from edgeft.data import files
from edgeft.data import tokens as data_tokens
from edgeft.data.rows import load
from edgeft.errors import ConfigError, DataError, EdgeftError, ModelError, RunError
from edgeft.evaluate.suite import load_suite
from edgeft.formats.gguf import ARRAY, GGUF, STRING, encode_record, encode_string
from edgeft.formats.tokenizer import GgufTokenizer, render
from edgeft.host import device, sandbox

FUZZ = Path(__file__).parent / "harness" / "fuzz.py"
BOUND_S = 20.0  # by the clock, on a busy machine; each takes less than two seconds on an idle one


# ---------------------------------------------------------------- no pickle, no code


PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "imp"}


def _names(node: ast.expr) -> str:
    return f"{_names(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _constant(call: ast.Call, name: str) -> Any:
    return next((k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None)


def _offences(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in PICKLES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = _names(node.func)
            last = name.rpartition(".")[2]
            bad = name in ("torch.load", "eval", "exec", "os.system", "yaml.unsafe_load", "yaml.full_load")
            bad |= name in ("np.load", "numpy.load") and _constant(node, "allow_pickle") is not False
            bad |= name == "yaml.load" and not any(k.arg == "Loader" for k in node.keywords)
            bad |= last == "from_pretrained" and _constant(node, "trust_remote_code") is not False
            bad |= bool(_constant(node, "shell")) or bool(_constant(node, "trust_remote_code"))
            found += [name] if bad else []
    return found


def test_nothing_in_the_package_can_open_a_pickle_or_run_strange_code() -> None:
    package = Path(edgeft.__file__).parent
    sources = sorted(package.rglob("*.py"))
    assert len(sources) > 50
    assert {str(f.relative_to(package)): o for f in sources if (o := _offences(ast.parse(f.read_text("utf-8"))))} == {}
    made = "import pickle\ntorch.load(f)\nnp.load(f)\nyaml.load(t)\nAutoModel.from_pretrained(p)\nrun(c, shell=True)"
    assert len(_offences(ast.parse(made))) == 6  # the search itself finds them


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    from edgeft.engine.load import load_hf

    mark = tmp_path / "mark"
    evil = pickle.dumps(Touch(mark))
    pickle.loads(evil).close()
    assert mark.exists()  # it would do harm
    mark.unlink()
    folder = tmp_path / "model"
    folder.mkdir()
    numbers = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **numbers, "vocab_size": 32}))
    (folder / "pytorch_model.bin").write_bytes(evil)
    with pytest.raises(ModelError, match="only as pickles"):
        load_hf(str(folder), "dense")
    (folder / "model.safetensors").write_bytes(evil)
    with pytest.raises(ModelError, match="damaged"):
        load_hf(str(folder), "dense")
    arrays = {
        f"{s}_{n}": np.array([Touch(mark)]) for s in ("train", "heldout") for n in ("ids", "trained", "cut", "rows")
    }
    np.savez(tmp_path / "tokens.npz", **arrays)
    with pytest.raises(RunError, match=r"damaged.*allow_pickle"):
        data_tokens.load(tmp_path / "tokens.npz")
    assert not mark.exists()


# ---------------------------------------------------------------- GGUF headers


def header(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A small sound model's header with something changed."""
    records, tensors, size = fuzz_gguf.small_header()
    parts: dict[str, Any] = {
        "records": {r[8 : 8 + struct.unpack("<Q", r[:8])[0]].decode(): r for r in records},
        "tensors": {name: [name, list(shape), kind, offset] for name, shape, kind, offset in tensors},
        "counts": [],
        "size": size,
        "version": 3,
    }
    change(parts)
    listed = list(parts["records"].values())
    infos = list(parts["tensors"].values())
    data = b"GGUF" + struct.pack("<IQQ", parts["version"], *(parts["counts"] or (len(infos), len(listed))))
    data += b"".join(listed)
    for name, shape, kind, offset in infos:
        data += encode_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        data += struct.pack("<IQ", kind, offset)
    data += bytes(-len(data) % 32)
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(data)
        file.truncate(len(data) + parts["size"])
    return path


def put(key: str, kind: int, value: Any, item: int | None = None) -> Callable[[dict[str, Any]], None]:
    return lambda p: p["records"].update({key: encode_record(key, kind, value, item)})


def raw(key: str, rest: bytes) -> Callable[[dict[str, Any]], None]:
    return lambda p: p["records"].update({key: encode_string(key) + rest})


def tensor(which: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    def change(p: dict[str, Any]) -> None:
        for key, value in values.items():
            p["tensors"][which][{"name": 0, "shape": 1, "kind": 2, "offset": 3}[key]] = value

    return change


def vocabulary(tokens: list[str]) -> Callable[[dict[str, Any]], None]:
    def change(p: dict[str, Any]) -> None:
        put("tokenizer.ggml.tokens", ARRAY, tokens, STRING)(p)
        put("tokenizer.ggml.scores", ARRAY, [0.0] * len(tokens), 6)(p)
        put("tokenizer.ggml.token_type", ARRAY, [1] * len(tokens), 5)(p)

    return change


TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "a", "b", "c", "d"]
Q = "blk.0.attn_q.weight"
HEADERS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "tensors 2^63": (lambda p: p.update(counts=[2**63, 9]), "claims"),
    "keys 2^40": (lambda p: p.update(counts=[2, 2**40]), "claims"),
    "one key more than there is": (lambda p: p.update(counts=[2, 40]), "damaged"),
    "one tensor more than there is": (lambda p: p.update(counts=[99, len(p["records"])]), "damaged"),
    "version": (lambda p: p.update(version=4), "version 4"),
    "cut": (lambda p: p.update(size=100), "past the end"),
    "text of 2^63 bytes": (raw("x", struct.pack("<IQ", 8, 2**63)), "a text of"),
    "text of 2^64 - 1 bytes": (raw("x", struct.pack("<IQ", 8, 2**64 - 1)), "a text of"),
    "array of 2^62 numbers": (raw("x", struct.pack("<IIQ", 9, 10, 2**62)), "arrays of"),
    "array of 2^62 texts": (raw("x", struct.pack("<IIQ", 9, 8, 2**62)), "arrays of"),
    "array longer than the file": (raw("x", struct.pack("<IIQ", 9, 8, 2**20)), "past the end"),
    "array in an array": (raw("x", struct.pack("<IIQ", 9, 9, 1) * 1000), "array of type 9"),
    "unknown value type": (raw("x", struct.pack("<I", 77)), "type 77"),
    "a key twice": (lambda p: p["records"].update(again=p["records"]["llama.block_count"]), "occurs twice"),
    "a tensor twice": (lambda p: p["tensors"].update(again=p["tensors"][Q]), "occurs twice"),
    "name of 64 bytes": (tensor(Q, name="a" * 64), "a text of 64"),
    "no dimensions": (tensor(Q, shape=[]), "0 dimensions"),
    "five dimensions": (tensor(Q, shape=[1] * 5), "5 dimensions"),
    "dimension zero": (tensor(Q, shape=[0, 64]), "shape"),
    "dimension 2^63": (tensor(Q, shape=[2**63, 64]), "shape"),
    "product that overflows to a small number": (tensor(Q, shape=[2**32, 2**32]), "shape"),
    "unknown tensor type": (tensor(Q, kind=999), "unknown type 999"),
    "offset past the end": (tensor(Q, offset=2**40), "past the end"),
    "offset 2^64 - 32": (tensor(Q, offset=2**64 - 32), "past the end"),
    "offset not aligned": (tensor(Q, offset=1), "past the end"),
    "overlapping": (tensor(Q, offset=0), "overlaps"),
    "alignment 0": (put("general.alignment", 4, 0), "alignment is 0"),
    "alignment 2^31": (put("general.alignment", 4, 2**31), "alignment"),
    "alignment 24": (put("general.alignment", 4, 24), "alignment is 24"),
    "alignment of another type": (put("general.alignment", 10, 32), "alignment"),
    "alignment a list": (put("general.alignment", ARRAY, [32], 4), "alignment"),
    "no heads": (put("llama.attention.head_count", 4, 0), "head_count is 0"),
    "heads a text": (put("llama.attention.head_count", STRING, "two"), "head_count is two"),
    "heads a list": (put("llama.attention.head_count", ARRAY, [2, 2], 4), "head_count is"),
    "heads not shared evenly": (put("llama.attention.head_count_kv", 4, 3), "over 3"),
    "more heads than width": (put("llama.attention.head_count", 4, 2**30), "key_length is 0"),
    "2^31 blocks": (put("llama.block_count", 4, 2**31), "lacks the tensor blk.1"),
    "minus one block": (put("llama.block_count", 5, -1), "block_count is -1"),
    "half a block": (put("llama.block_count", 6, 0.5), "block_count is 0.5"),
    "width 2^31": (put("llama.embedding_length", 4, 2**31), "rotates only a part"),
    "inner width": (put("llama.feed_forward_length", 4, 2**30), "as its header says"),
    "rotation": (put("llama.rope.dimension_count", 4, 2**31), "rotates only a part"),
    "rotary base nan": (put("llama.rope.freq_base", 6, float("nan")), "freq_base is nan"),
    "scaling a list": (put("llama.rope.scaling.type", ARRAY, ["yarn"], STRING), "rope scaling"),
    "epsilon infinite": (put("llama.attention.layer_norm_rms_epsilon", 6, float("inf")), "epsilon is inf"),
    "norm too short": (tensor("blk.0.ffn_norm.weight", shape=[32]), "as its header says"),
    "embedding of one dimension": (tensor("token_embd.weight", shape=[64 * 263]), "as its header says"),
    "architecture a number": (put("general.architecture", 4, 7), "not supported"),
    "tokens are numbers": (put("tokenizer.ggml.tokens", ARRAY, [1, 2], 4), "tokenizer.ggml.tokens"),
    "a text for tokens": (put("tokenizer.ggml.tokens", STRING, "abc"), "tokenizer.ggml.tokens"),
    "fewer scores than tokens": (put("tokenizer.ggml.scores", ARRAY, [1.0], 6), "tokenizer.ggml.scores"),
    "scores of another type": (put("tokenizer.ggml.scores", ARRAY, [1] * 263, 0), "tokenizer.ggml.scores"),
    "fewer types than tokens": (put("tokenizer.ggml.token_type", ARRAY, [1], 5), "tokenizer.ggml.token_type"),
    "a token twice": (put("tokenizer.ggml.tokens", ARRAY, [*TOKENS[:-1], "a"], STRING), "occurs twice"),
    "no byte tokens": (put("tokenizer.ggml.tokens", ARRAY, [f"t{i}" for i in range(263)], STRING), "single bytes"),
    "more tokens than rows": (vocabulary([*TOKENS, "z"]), "264 tokens, and 263 rows"),
    "a part of several": (put("split.count", 2, 2), "one of several parts"),
    "unknown tokenizer": (put("tokenizer.ggml.model", STRING, "t5"), "vocabulary of type 't5'"),
}


def test_the_header_itself_is_sound(tmp_path: Path) -> None:
    path = header(tmp_path, lambda p: None)
    check_file(path)
    tokenizer = GgufTokenizer(path)  # llama.cpp takes it, too
    assert tokenizer.decode(tokenizer.encode("hello")).strip() == "hello"


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_headers(tmp_path: Path, case: str) -> None:
    change, says = HEADERS[case]
    path = header(tmp_path, change)
    began = time.monotonic()
    with pytest.raises(ModelError) as caught:
        check_file(path)
    assert says in caught.value.message
    assert time.monotonic() - began < BOUND_S


def test_an_array_whose_last_texts_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    record = encode_string("x") + struct.pack("<IIQ", 9, 8, 3) + encode_string("a" * 20) + bytes(4)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + record)
    with pytest.raises(ModelError, match="past the end"):
        GGUF.open(path)


def test_a_sparse_file_of_a_terabyte_is_refused_at_once(tmp_path: Path) -> None:
    """Zeros without end are texts of no length without end."""
    path = tmp_path / "big.gguf"
    for rest in (struct.pack("<IIQ", 9, 8, 2**36), struct.pack("<IQ", 8, 2**35), struct.pack("<IIQ", 9, 0, 2**36)):
        with path.open("wb") as file:
            file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + encode_string("x") + rest)
            file.truncate(1 << 40)
        began = time.monotonic()
        with pytest.raises(ModelError):
            GGUF.open(path)
        assert time.monotonic() - began < BOUND_S


def test_llama_cpp_is_not_given_what_did_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeft.evaluate import llamacpp
    from edgeft.formats import tokenizer

    path = header(tmp_path, put("tokenizer.ggml.scores", ARRAY, [1.0], 6))

    def handed(*_: Any) -> Any:
        raise AssertionError("llama.cpp was called")

    monkeypatch.setattr(tokenizer.quiet_llama(), "llama_model_load_from_file", handed)
    for use in (llamacpp.LlamaFile, GgufTokenizer):
        with pytest.raises(ModelError, match="scores"):
            use(path)


def test_pipes_and_devices_are_no_models(tmp_path: Path) -> None:
    from edgeft.formats.source import is_gguf

    os.mkfifo(tmp_path / "pipe.gguf")
    os.mkfifo(tmp_path / "pipe")
    assert not is_gguf(tmp_path / "pipe")
    for path in (tmp_path / "pipe.gguf", Path("/dev/zero")):
        with pytest.raises(ModelError, match="not a regular file"):
            GGUF.open(path)


# ---------------------------------------------------------------- templates and patterns


class Said:
    """A tokenizer that has a template and nothing else."""

    bos_text, eos_text = "<s>", "</s>"

    def __init__(self, template: str) -> None:
        self.template = template


TEMPLATES = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a constant of gigabytes": "{{ 'a' * 10**10 }}",
    "doubling": "{% set n = namespace(x='aaaa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a wide number": "{{ '%10000000000d' % 1 }}",
    "a wide field": "{{ '{:10000000000}'.format(1) }}",
    "a wide line": "{{ 'a' | center(10**10) }}",
    "a long list": "{{ [1] * 10**10 }}",
    "long output": "{{ 'a' * 9999999 }}",
    "a power": "{{ 10 ** (10 ** 9) % 7 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep": "{{ " + "(" * 9999 + ")" * 9999 + " }}",
    "python inside": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "a list changed": "{{ messages.append(1) }}",
    "two megabytes": "{# " + "a" * 2_000_000 + " #}",
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_hostile_templates(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 1.0)
    began = time.monotonic()
    with pytest.raises((ModelError, DataError), match="chat template"):
        render(Said(TEMPLATES[case]), [{"role": "user", "content": "Hi"}], generate=True)  # type: ignore[arg-type]
    assert time.monotonic() - began < BOUND_S
    good = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"  # and the next one is served
    assert render(Said(good), [{"role": "user", "content": "\ud800ä"}], generate=True) == "<s>\ud800ä"  # type: ignore[arg-type]


def test_a_template_opens_no_file_and_starts_no_program() -> None:
    """Even if jinja's own sandbox had a hole."""
    code = (
        "import socket, subprocess; from edgeft.host import sandbox; sandbox._limit(1 << 29); done = []\n"
        "for f in (lambda: open('/etc/passwd'), socket.socket, lambda: subprocess.run(['true'])):\n"
        "    try: f(); done.append('bad')\n"
        "    except OSError as e: done.append('refused')\n"
        "print(done)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=FUZZ.parents[2])
    assert found.stdout.strip() == "['refused', 'refused', 'refused']", found.stderr


def test_llama_cpp_pythons_renderer_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"messages": [{"role": "user", "content": "Hi"}], "bos_token": "", "eos_token": ""}
    assert sandbox.chat_as_llama_cpp("{{ messages[0].content }}", values) == "Hi"
    monkeypatch.setattr(sandbox, "SECONDS", 1.0)
    with pytest.raises(sandbox.Failed, match="longer than 1 s"):
        sandbox.chat_as_llama_cpp(TEMPLATES["loops"], values)


@pytest.mark.parametrize("text", ["take: '(a+)+$b('", "take: 'abc'", "prompt: '{% if %}'", f"take: '{'(' * 5000}'"])
def test_broken_suites(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"`take`|`prompt`"):
        load_suite(str(tmp_path / "s.yaml"))


def test_a_pattern_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeft.evaluate.score import take

    monkeypatch.setattr(sandbox, "SECONDS", 1.0)
    with pytest.raises(ConfigError, match="longer than 1 s"):
        take("a" * 60 + "b", "(a+)+$")
    assert take("it is 47 m", r"(\d+)") == "47"


# ---------------------------------------------------------------- YAML


YAMLS = {
    "billion laughs": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n",
    "a document in itself": "train: &t\n  lr: *t\n",
    "merged without end": "a: &a {x: 1}\nb: &b {<<: [*a, *a]}\n",
    "lists in lists": "[" * 50_000,
    "tables in tables": "{a: " * 50_000,
    "items in items": "- " * 50_000,
    "keys in keys": "? " * 50_000,
    "huge": "a: b\n" * 100_000,
    "a number of 9000 digits": "train: {steps: 0x" + "f" * 9000 + "}",
    "a number by sixties": "train: {epochs: " + "1:" * 50_000 + "1}",
    "blocks of 9000 digits": "update: {blocks: 0x" + "f" * 9000 + "}",
    "a key of 9000 digits": "? 0x" + "f" * 9000 + "\n: 1\n",
    "python": "train: !!python/object/apply:os.system [true]\n",
    "a set of a text": "train: !!set x",
    "a date that is none": "train: !!timestamp x",
    "a truth that is none": "train: !!bool x",
    "a number that is none": "train: !!int ''",
    "validations": "train: {validations: 1000000000}",
    "steps": "train: {steps: 99999999999999999999}",
    "not finite": "train: {lr: .nan}",
}


@pytest.mark.parametrize("case", YAMLS)
def test_hostile_yaml(tmp_path: Path, case: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(YAMLS[case])
    for read in (config.load_recipe, device.load_device, load_suite):
        began = time.monotonic()
        with pytest.raises(ConfigError) as caught:
            read(str(path))
        assert len(caught.value.message) < 500
        assert time.monotonic() - began < BOUND_S


def test_a_pipe_is_no_recipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "r.yaml")
    with pytest.raises(ConfigError, match="no recipe file"):
        config.load_recipe(str(tmp_path / "r.yaml"))


LONG = "n" * 300


@pytest.mark.parametrize("name", [LONG, f"a/{LONG}", f"{LONG}.gguf", "~nobody-at-all/x", f"{LONG}.jsonl"])
def test_names_that_cannot_be(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from edgeft.cli import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(json.dumps({"data": {"path": name, "heldout": name}}))
    load_suite(str(tmp_path / "s.yaml"))
    for args, codes in (
        (["data", name], (4,)),
        (["finetune", "--data", name, "--offline"], (4,)),
        (["finetune", "--model", name, "--offline"], (5,)),
        (["finetune", "--set", f"data.heldout={name}"], (4,)),
        (["eval", name], (2, 5)),
        (["chat", name], (2, 5, 6)),
        (["runs", "rm", name, "--yes"], (2, 6)),
        (["finetune", "--recipe", name], (2,)),
    ):
        result = CliRunner().invoke(app, args)
        assert result.exit_code in codes, (args, result.output, result.exception)
        assert "Traceback" not in result.output


# ---------------------------------------------------------------- data


ROWS = "".join(json.dumps({"question": f"How tall is {i}?", "answer": "47 m"}) + "\n" for i in range(20))


def test_links_that_lead_out_of_a_folder(tmp_path: Path) -> None:
    private, given = tmp_path / "private", tmp_path / "given"
    private.mkdir()
    given.mkdir()
    (private / "diary.jsonl").write_text(ROWS)
    (given / "rows.jsonl").write_text(ROWS)
    assert load(DataConfig(path=str(given))).train
    (given / "more.jsonl").symlink_to(given / "rows.jsonl")  # inside: fine
    assert load(DataConfig(path=str(given))).train
    for name, target in (("train.jsonl", private / "diary.jsonl"), ("folder", private)):
        (given / name).symlink_to(target)
        with pytest.raises(DataError, match="leads out of its folder"):
            load(DataConfig(path=str(given)))
        (given / name).unlink()
    (given / "self").symlink_to(given)  # a circle: fine
    assert load(DataConfig(path=str(given))).train


def test_the_hubs_cache_is_made_of_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1234").write_text(ROWS)
    (snapshot / "rows.jsonl").symlink_to(blobs / "1234")
    assert load(DataConfig(path=str(snapshot))).train


def test_pipes_and_devices_are_no_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "zero.jsonl"):
        with pytest.raises(DataError, match="not a regular file"):
            load(DataConfig(path=str(tmp_path / name)))
    (tmp_path / "zero.jsonl").unlink()
    (tmp_path / "archive.zip").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(DataError, match="holds no data files"):  # neither pipe nor archive is opened
        load(DataConfig(path=str(tmp_path)))


DATA: dict[str, tuple[str, str, str]] = {
    "deep": ("a.jsonl", "[" * 100_000, "cannot be read"),
    "deep objects": ("a.jsonl", '{"a":' * 100_000, "cannot be read"),
    "many digits": ("a.jsonl", '{"question": ' + "9" * 9000 + "}", "cannot be read"),
    "not finite": ("a.jsonl", '{"question": "x", "answer": 1e999999}', "answer is empty"),
    "no number": ("a.jsonl", '{"question": NaN, "answer": "x"}', "is not text"),
    "parquet of nothing": ("a.parquet", "PAR1" + "\0" * 100 + "PAR1", "not a readable Parquet"),
    "zeros": ("a.csv", "question,answer\n\0,\0\n", "a.csv"),
    "paragraphs": ("a.json", '{"data": [{"paragraphs": [1, {"qas": 5}, {"qas": [6]}]}]}', "without a list"),
}


@pytest.mark.parametrize("case", DATA)
def test_hostile_rows(tmp_path: Path, case: str) -> None:
    name, text, says = DATA[case]
    (tmp_path / name).write_text(text)
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        load(DataConfig(path=str(tmp_path / name)))
    assert says in caught.value.message
    assert time.monotonic() - began < BOUND_S


def test_what_is_read_whole_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse files: their size is all that counts, and none of it is read."""
    for name, size, says in (
        ("line.jsonl", files.MAX_LINE_BYTES + 1, "line 1: longer than 16 MiB"),
        ("whole.json", files.MAX_WHOLE_BYTES + 1, "JSON is read whole"),
        ("big.csv", files.MAX_FILE_BYTES + 1, "more than 2 GiB"),
        ("field.csv", files.MAX_LINE_BYTES + 1, "longer than 16 MiB"),
    ):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
        with pytest.raises(DataError) as caught:
            load(DataConfig(path=str(tmp_path / name)))
        assert says in caught.value.message
        (tmp_path / name).unlink()
    monkeypatch.setattr(files, "MAX_ROWS", 10)
    (tmp_path / "many.jsonl").write_text(ROWS)
    with pytest.raises(DataError, match="more than 10 lines"):
        load(DataConfig(path=str(tmp_path / "many.jsonl")))


# ---------------------------------------------------------------- Hugging Face folders


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "a billion blocks": ({"num_hidden_layers": 10**9}, "num_hidden_layers|cannot be read"),
    "no heads": ({"num_attention_heads": 0}, "config.json|num_attention_heads"),
    "width": ({"hidden_size": 2**40}, "hidden_size|config.json"),
    "head": ({"head_dim": 2**40}, "heads of|lacks the tensor"),
    "vocabulary": ({"vocab_size": -1}, "vocab_size|config.json"),
    "texts": ({"hidden_size": "64"}, "hidden_size|config.json"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_hostile_configurations(tmp_path: Path, case: str) -> None:
    from safetensors.numpy import save_file

    from edgeft.engine.load import load_hf

    values, says = CONFIGS[case]
    numbers = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32, **numbers, **values}))
    save_file({"model.embed_tokens.weight": np.zeros((32, 64), np.float32)}, tmp_path / "model.safetensors")
    began = time.monotonic()
    with pytest.raises(ModelError, match=says):
        load_hf(str(tmp_path), "dense")
    assert time.monotonic() - began < 20


def _safetensors(entries: Any, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


WEIGHTS = {
    "length 2^63": struct.pack("<Q", 2**63) + b"{}",
    "deep": _safetensors(b"[" * 100_000),
    "a list": _safetensors([]),
    "product that overflows": _safetensors({"a": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}),
    "negative": _safetensors({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, bytes(4)),
    "past the end": _safetensors({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, bytes(4)),
    "half a byte": _safetensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.5, 4.5]}}, bytes(8)),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_hostile_weights(tmp_path: Path, case: str) -> None:
    from edgeft.formats.safetensors import Weights

    (tmp_path / "model.safetensors").write_bytes(WEIGHTS[case])
    with pytest.raises(ModelError, match="damaged"):
        Weights(tmp_path)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"model": {"type": "BPE"}}', '{"version": "1.0", "model": 5}'])
def test_hostile_tokenizers(tmp_path: Path, text: str) -> None:
    from edgeft.formats.source import open_tokenizer_file

    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        open_tokenizer_file(tmp_path)


# ---------------------------------------------------------------- what is written for others


def test_a_token_puts_no_command_into_a_modelfile(tmp_path: Path) -> None:
    from edgeft.export.modelfile import modelfile

    def change(p: dict[str, Any]) -> None:
        vocabulary([*TOKENS[:2], 'x"\nADAPTER ./evil', *TOKENS[3:]])(p)
        put("tokenizer.ggml.eos_token_id", 4, 2)(p)
        put("tokenizer.chat_template", STRING, EVIL)(p)

    text = modelfile(header(tmp_path, change))
    assert "FROM ./model.gguf" in text
    assert not [line for line in text.splitlines() if line.startswith(("ADAPTER", "LICENSE"))]


EVIL = (
    '{% for m in messages %}{{ m.role + \'"""\nADAPTER ./evil\nLICENSE """\' + m.content + eos_token }}{% endfor %}'
    '{% if add_generation_prompt %}{{ \'assistant"""\nADAPTER ./evil\nLICENSE """\' }}{% endif %}'
)


# ---------------------------------------------------------------- run folders


def test_damaged_files_of_a_run(tmp_path: Path) -> None:
    from edgeft.pipeline import finetune
    from edgeft.report.summary import summary
    from edgeft.run.folder import Run
    from edgeft.train import checkpoint

    run = Run.start(tmp_path / "run", config.Recipe(), resume=False)
    junk = (b"", b"\0" * 100, b"{", b"[" * 100_000, b"[]", b"\xff\xfe", b'{"kernels": "x"}')
    for content in junk:
        for file in (run.done, run.exported, run.evaluation, run.path / "peaks.json", run.metrics):
            file.write_bytes(content)
        run.tokens.write_bytes(content)
        with pytest.raises(RunError, match=r"damaged|cannot read"):
            data_tokens.load(run.tokens)
        summary(run)
        assert finetune.complete(run, "train") == (content == junk[-1])  # a result that cannot be read is none
        run.checkpoints.mkdir(exist_ok=True)
        checkpoint.name(run.checkpoints, 3).write_bytes(content)
        assert checkpoint.newest(run.checkpoints, lambda *_: None) is None
        run.recipe_file.write_bytes(content)
        with pytest.raises(EdgeftError):
            Run.open(run.path)


def test_tokens_that_unpack_to_more_than_they_are(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "tokens.npz", train_ids=np.zeros(10_000_000, np.int32))
    with pytest.raises(RunError, match="larger than the whole"):
        data_tokens.load(tmp_path / "tokens.npz")


# ---------------------------------------------------------------- all of it, mutated


@pytest.mark.slow
def test_mutated_inputs_for_twenty_seconds(tmp_path: Path) -> None:
    """tests/harness/fuzz.py with another seed every day: what it finds is printed with its number."""
    seed = int(time.time() // 86400)
    said = fuzz(FUZZ, "--inputs", 10**6, "--seconds", 20, "--seed", seed, "--save", tmp_path / "found")
    assert said.returncode == 0, f"seed {seed}\n{said.stdout}{said.stderr}"
    counts = [line.split()[:5] for line in said.stdout.splitlines()[1:16]]
    assert all(int(inputs) > 0 and inputs != "0" for _, inputs, *_ in counts)
    assert sum(int(inputs) for _, inputs, *_ in counts) > 200  # a busy machine; an idle one does 20,000


def fuzz(script: Path, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *map(str, args)]
    path = {"PYTHONPATH": str(FUZZ.parents[2])}
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **path})


def test_a_finding_is_found(tmp_path: Path) -> None:
    """The harness sees a traceback and a crash, saves the input, and goes on behind it."""
    for file in FUZZ.parent.glob("fuzz*.py"):
        shutil.copy(file, tmp_path)
    planted = (
        "    import os; from fuzz_kinds import make\n"
        "    size = len(path.read_bytes())\n"
        "    if size % 7 == 3 and size != len(make('csv', 0, 0)): os.abort()\n"
        "    if size % 7 == 4: raise KeyError(8)\n"
    )
    readers = tmp_path / "fuzz_readers.py"
    readers.write_text(readers.read_text("utf-8").replace("    load(DataConfig(path=str(path)))\n", planted), "utf-8")
    said = fuzz(tmp_path / FUZZ.name, "--inputs", 40, "--kinds", "csv", "--save", tmp_path / "found")
    assert "40 inputs" in said.stdout, said.stdout + said.stderr
    assert said.returncode == 1
    assert "KeyError: 8" in said.stdout
    assert "the process ended with -6" in said.stdout
    kept = [len(file.read_bytes()) % 7 for file in (tmp_path / "found").iterdir()]
    assert {3, 4} == set(kept)
