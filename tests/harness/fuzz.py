"""Feeds mutated files to the readers that open what comes from elsewhere, and counts what they do with them.

    python tests/harness/fuzz.py --inputs 100000 [--seconds 20] [--seed 1] [--kinds gguf,recipe] [--save DIR]

Every input must be read or refused with an EdgeftError, within LIMIT_S and MEMORY; anything else is a finding, saved
with its bytes. An input depends on seed, kind and number alone. Each kind runs in a process of its own, so that a
crash (llama.cpp's included) is found too, and another process goes on behind it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 10.0  # of the processor, for one input; six times as long by the clock
MEMORY = 2 << 30  # address space beyond what the process has after its imports
EXTREME = (0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


class Hang(BaseException):
    """An input took longer than LIMIT_S."""


# ---------------------------------------------------------------- mutation


def mutate(data: bytes, r: random.Random, words: tuple[bytes, ...] = ()) -> bytes:
    """A few edits: bits, bytes, lengths set to extreme values, pieces cut, doubled, moved, words put in."""
    out = bytearray(data)
    for _ in range(r.choice((1, 1, 1, 2, 3, 8))):
        at = r.randrange(len(out) + 1)
        end = min(len(out), at + r.choice((1, 2, 4, 8, 32, 256)))
        what = r.randrange(9 if words else 7)
        if what == 0 and at < len(out):
            out[at] ^= 1 << r.randrange(8)
        elif what == 1:
            out[at:end] = r.randbytes(end - at)
        elif what == 2:
            size = r.choice((1, 2, 4, 8))
            out[at : at + size] = (r.choice(EXTREME) % 2 ** (8 * size)).to_bytes(size, "little")
        elif what == 3:
            del out[at : end if r.random() < 0.7 else None]
        elif what == 4:
            out[at:at] = out[at:end] * r.choice((1, 2, 50, 1000))
        elif what == 5:
            out[at:end] = out[(other := r.randrange(len(out) + 1)) : other + end - at]
        elif what == 6:
            out[at:at] = bytes([r.randrange(256)]) * r.choice((1, 3, 100, 5000))
        elif what >= 7:
            out[at : at if r.random() < 0.5 else end] = r.choice(words) * r.choice((1, 1, 1, 3, 500))
    return bytes(out)


YAML_WORDS: tuple[bytes, ...] = (
    b"&a ",
    b"*a",
    b"<<: ",
    b"!!python/object:os.system ",
    b"!!binary ",
    b"!!set ",
    b"- ",
    b"[",
    b"{",
    b"? ",
)
YAML_WORDS += (
    b": ",
    b"\n",
    b"  ",
    b"|\n",
    b">\n",
    b"0x",
    b"1:",
    b"1e999",
    b".nan",
    b".inf",
    b"~",
    b"---\n",
    b"'",
    b'"',
)
YAML_WORDS += (b"2024-13-45", b"train: ", b"how: ", b"update: {blocks: ", b"999999999999999999999", b"\x00", b"\xff")
JSON_WORDS: tuple[bytes, ...] = (
    b"[",
    b"{",
    b'"',
    b"\\u0000",
    b"\\ud800",
    b"NaN",
    b"1e999999",
    b"-Infinity",
    b"9" * 5000,
    b"null",
    b"\n",
)
JSON_WORDS += (b"true", b"[]", b"{}", b'"":', b'{"a":', b"\xff", b"\xef\xbb\xbf", b",", b":", b'"text"', b'"messages"')
CSV_WORDS: tuple[bytes, ...] = (
    b'"',
    b'""',
    b",",
    b";",
    b"\t",
    b"|",
    b"\n",
    b"\r",
    b"\r\n",
    b"\x00",
    b"\xff",
    b"\xef\xbb\xbf",
    b"question",
)
JINJA_WORDS: tuple[bytes, ...] = (
    b"{{",
    b"}}",
    b"{%",
    b"%}",
    b"{% for a in range(999) %}",
    b"{% endfor %}",
    b"**",
    b"9",
    b"*",
    b"~",
    b"|list",
)
JINJA_WORDS += (
    b"|tojson",
    b"messages",
    b".__class__",
    b"namespace(",
    b"{% set x = ",
    b"|center(99999999)",
    b"[",
    b"(",
    b"'",
)


# ---------------------------------------------------------------- GGUF, with its structure known


def _real_header() -> tuple[list[bytes], list[tuple[str, tuple[int, ...], int, int]], int]:
    """The embedded model's: (records, tensors as name, shape, type and offset, bytes of data), its vocabulary thinned
    to what makes an input quick; the data itself is a hole in the file."""
    from edgeft.formats.gguf import ARRAY, GGUF, STRING, encode_record
    from edgeft.formats.source import demo_model

    path = demo_model()
    if path is None:
        return _small_header()
    gguf = GGUF.open(path)
    records = []
    for key in gguf.records:
        kind, item, count = gguf.described(key)
        if kind == ARRAY and count > 400:
            texts = [t.decode("utf-8", "replace") for t in gguf.texts(key)] if item == STRING else gguf.get_key(key)
            records.append(encode_record(key, ARRAY, texts[:400], item))
        else:
            records.append(gguf.record(key))
    start = min(t.offset for t in gguf.tensors.values())
    tensors = [(t.name, t.shape, t.type, t.offset - start) for t in gguf.tensors.values()]
    return records, tensors, gguf.data.size - start


def _small_header() -> tuple[list[bytes], list[tuple[str, tuple[int, ...], int, int]], int]:
    from edgeft.formats.gguf import ARRAY, STRING, encode_record

    records = [encode_record("general.architecture", STRING, "llama")]
    numbers = {"block_count": 1, "embedding_length": 64, "attention.head_count": 2, "attention.head_count_kv": 1}
    numbers |= {"feed_forward_length": 128, "context_length": 64, "rope.dimension_count": 32}
    records += [encode_record(f"llama.{key}", 4, value) for key, value in numbers.items()]
    records.append(encode_record("llama.attention.layer_norm_rms_epsilon", 6, 1e-5))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁h", "el", "lo", "▁hello"]
    records.append(encode_record("tokenizer.ggml.model", STRING, "llama"))
    records.append(encode_record("tokenizer.ggml.tokens", ARRAY, tokens, STRING))
    records.append(encode_record("tokenizer.ggml.scores", ARRAY, [-float(i) for i in range(len(tokens))], 6))
    kinds = [2, 3, 3, *[6] * 256, *[1] * 4]
    records.append(encode_record("tokenizer.ggml.token_type", ARRAY, kinds, 5))
    records.append(encode_record("tokenizer.ggml.bos_token_id", 4, 1))
    records.append(encode_record("tokenizer.chat_template", STRING, "{{ messages[0]['content'] }}"))
    records.append(encode_record("general.alignment", 4, 32))
    shapes = {"token_embd": (64, len(tokens)), "output_norm": (64,)}
    block = {"attn_q": (64, 64), "attn_k": (64, 32), "attn_v": (64, 32), "attn_output": (64, 64), "attn_norm": (64,)}
    block |= {"ffn_gate": (64, 128), "ffn_up": (64, 128), "ffn_down": (128, 64), "ffn_norm": (64,)}
    shapes |= {f"blk.0.{name}": shape for name, shape in block.items()}
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensors.append((f"{name}.weight", shape, 0, offset))
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        offset += -(-size // 32) * 32
    return records, tensors, offset


@functools.cache
def _headers() -> list[tuple[list[bytes], list[tuple[str, tuple[int, ...], int, int]], int]]:
    return [_small_header(), _real_header()]


def gguf_input(r: random.Random, small: float = 0.85, gentle: bool = False) -> tuple[bytes, int]:
    """(the head of a file, its size); the rest is zeros."""
    from edgeft.formats.gguf import SCALARS, encode_string

    records, tensors, size = _headers()[r.random() > small]
    records = list(records)
    infos: list[Any] = [[name, list(shape), kind, offset] for name, shape, kind, offset in tensors]
    counts = [len(infos), len(records)]
    for _ in range(0 if r.random() < 0.3 else r.choice((1, 1, 2, 4))):
        what, place = r.randrange(12), r.randrange(len(records))
        key = int.from_bytes(records[place][:8], "little")
        info = r.choice(infos)
        if what == 0:  # a value of another kind
            kind = r.choice((*SCALARS, 8, 9, 13, 2**32 - 1))
            records[place] = records[place][: 8 + key] + struct.pack("<I", kind) + records[place][12 + key :]
        elif what == 1:  # a value that cannot be
            raw = r.choice(EXTREME).to_bytes(8, "little")
            records[place] = (
                records[place][: 12 + key] + raw[: len(records[place]) - 12 - key] + records[place][20 + key :]
            )
        elif what == 2:  # an array's kind, or its length
            at = 12 + key + r.choice((0, 4))
            records[place] = records[place][:at] + r.choice(EXTREME).to_bytes(8, "little") + records[place][at + 8 :]
        elif what == 3:
            records.insert(r.randrange(len(records)), records[place])
            counts[1] += r.randrange(2)
        elif what == 4:
            del records[place]
            counts[1] -= r.randrange(2)
        elif what == 5:
            infos.append(list(info))
            counts[0] += r.randrange(2)
        elif what == 6:
            infos.remove(info)
            counts[0] -= r.randrange(2)
        elif what == 7 and info[1]:
            info[1][r.randrange(len(info[1]))] = r.choice((*EXTREME, 64, 576))
        elif what == 8:
            info[1] = r.choice(([], [1] * 5, [0], info[1][::-1], [2**32, 2**32], [2**33] * 4))
        elif what == 9:
            info[2] = r.choice((*range(40), 2**31, 2**32 - 1))
        elif what == 10:
            info[3] = r.choice((*EXTREME, info[3] + 32, info[3] - 32)) % 2**64
        elif what == 11:
            records[place] = mutate(records[place], r)
        if not records or not infos:
            break
    if r.random() < 0.1:
        counts[r.randrange(2)] = r.choice(EXTREME)
    head = bytearray(b"GGUF" + struct.pack("<IQQ", r.choice((2, 3, 3, 3, 3, 3)), *(count % 2**64 for count in counts)))
    for record in records:
        head += record
    for name, shape, kind, offset in infos:
        head += encode_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *(n % 2**64 for n in shape))
        head += struct.pack("<IQ", kind, offset % 2**64)
    head += bytes(-len(head) % 32)
    data = bytes(head)
    if not gentle and r.random() < 0.3:
        data = mutate(data, r)
    whole = len(data) + size
    return data, whole if r.random() < 0.9 else r.choice((0, len(data), whole - 1, whole + 1, whole // 2))


# ---------------------------------------------------------------- the kinds


ROWS: list[Any] = [
    {"question": "How tall?", "answer": "47 m", "context": "It is 47 m tall."},
    {"question": "Which?", "choices": ["a", "b"], "answer": 1, "answers": {"text": ["b"], "answer_start": [0]}},
    {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "Ho"}]},
        ]
    },
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}], "system": "Be brief."},
    {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Ho"}]},
    {"instruction": "Add.", "input": "1 2", "output": 3},
    {"text": "It rains.", "label": 1.5},
    {"text": "Only text."},
    {
        "data": [
            {"title": "t", "paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": [{"text": "a"}]}]}]}
        ]
    },
]


def _edited(value: Any, r: random.Random) -> Any:
    """JSON with some of its values replaced."""
    odd: tuple[Any, ...] = (
        None,
        True,
        -1,
        2**70,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "x" * 300,
        "\ud800",
        [],
        {},
        [[]],
        {"text": None},
    )
    if r.random() < 0.08:
        return r.choice(odd)
    if isinstance(value, dict):
        return {k if r.random() < 0.97 else "a": _edited(v, r) for k, v in value.items() if r.random() < 0.97}
    return [_edited(v, r) for v in value] if isinstance(value, list) else value


def jsonl_input(r: random.Random) -> bytes:
    same = r.choice(ROWS)
    lines = [json.dumps(_edited(same if r.random() < 0.8 else r.choice(ROWS), r)) for _ in range(r.randrange(1, 6))]
    data = "\n".join(lines).encode()
    return mutate(data, r, JSON_WORDS) if r.random() < 0.6 else data


def json_input(r: random.Random) -> bytes:
    data = json.dumps(_edited(r.choice((ROWS[-1], ROWS[:3], {"rows": ROWS[:2]})), r)).encode()
    return mutate(data, r, JSON_WORDS) if r.random() < 0.6 else data


def csv_input(r: random.Random) -> bytes:
    data = b'question,answer\nHow tall?,47 m\n"a, b","c ""d"""\nWhy?,"two\nlines"\n'
    return mutate(data, r, CSV_WORDS)


def _yaml_texts(folder: str) -> list[bytes]:
    from edgeft.config import shipped

    return [path.read_bytes() for path in sorted(shipped(folder).rglob("*.yaml"))]


@functools.cache
def _recipes() -> list[bytes]:
    from edgeft import config

    return [*_yaml_texts("recipes"), config.dump(config.Recipe()).encode()]


@functools.cache
def _devices() -> list[bytes]:
    return _yaml_texts("recipes/devices")


@functools.cache
def _suites() -> list[bytes]:
    return [*_yaml_texts("eval"), b"prompt: 'Q: {{question}}'\ntake: '(\\w+)'\nscore: answer\n"]


@functools.cache
def _tokens_file() -> bytes:
    import numpy as np

    from edgeft.data.rows import Row
    from edgeft.data.tokens import Encoded, save

    ask = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    one = Encoded(np.arange(5, dtype=np.int32), np.arange(5) > 2, Row(ask, ["Ho"], source="a:1"))
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder, "tokens.npz"), [one] * 3, [one])
        return Path(folder, "tokens.npz").read_bytes()


@functools.cache
def _checkpoint_file() -> bytes:
    import torch

    from edgeft.train import checkpoint

    with tempfile.TemporaryDirectory() as folder:
        state = {
            "optimizer": {"step": 3},
            "step": 3,
            "best_loss": 1.0,
            "best_step": 2,
            "base_loss": 2.0,
            "trained_s": 1.0,
        }
        checkpoint.write(Path(folder, "step-00000003.safetensors"), {"a": torch.ones(4, 4), "b": torch.ones(3)}, state)
        return Path(folder, "step-00000003.safetensors").read_bytes()


@functools.cache
def _parquet_file() -> bytes:
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"question": ["a", "b"] * 50, "answer": ["c", "d"] * 50}), file)
    return file.getvalue()


TEMPLATE = (
    b"{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim }}"
    b"{% if loop.last and add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{% endfor %}"
)
RUN_FILES = {
    "recipe.yaml": b"",
    "done.json": b'{"steps": 3, "base_loss": 2.0, "best_loss": 1.0, "seconds": 3.2, "peak_bytes": 1000000}',
    "engine.json": b'{"kernels": true}',
    "eval.json": b'{"suite": "qa", "rows": 4, "base": {"loss": 2.0, "f1": 1.0}, "tuned": {"loss": 1.0, "f1": 90.0}}',
    "peaks.json": b'{"train": 100}',
    "metrics.jsonl": b'{"time": 1.0, "event": "prepare", "train_rows": 3}\n{"event": "step", "step": 1, "loss": 2.0}\n',
}


def run_input(r: random.Random) -> bytes:
    """Files of a run folder, one of them damaged, as JSON."""
    files = {**RUN_FILES, "recipe.yaml": _recipes()[-1]}
    name = r.choice(sorted(files))
    files[name] = mutate(files[name], r, YAML_WORDS if name == "recipe.yaml" else JSON_WORDS)
    return json.dumps({k: v.decode("latin-1") for k, v in files.items()}).encode()


# ---------------------------------------------------------------- the readers


def read_gguf(path: Path) -> None:
    from edgeft.arch.header import check_file

    gguf = check_file(path)
    for key in gguf.records:
        gguf.get_key(key)
        gguf.record(key)


def read_vocabulary(path: Path) -> None:
    from edgeft.formats.tokenizer import GgufTokenizer

    tokenizer = GgufTokenizer(path)
    tokenizer.decode(tokenizer.encode("Hello, wörld! 😀 <s>\x00 " + "a" * 100))


def read_rows(path: Path) -> None:
    from edgeft.config import DataConfig
    from edgeft.data.rows import load

    load(DataConfig(path=str(path)))


def read_recipe(path: Path) -> None:
    from edgeft import config
    from edgeft.methods import scheme

    recipe = config.load_recipe(str(path))
    config.apply_sets(recipe, [])
    config.dump(recipe)
    scheme.make(recipe.update, 30, "llama")


def read_device(path: Path) -> None:
    from edgeft.host import profile

    profile.load_device(str(path))


def read_suite(path: Path) -> None:
    from edgeft.evaluate.suite import load_suite

    load_suite(str(path))


def read_tokens(path: Path) -> None:
    from edgeft.data.tokens import load

    load(path)
    load(path, texts=False)


def read_checkpoint(path: Path) -> None:
    from edgeft.train import checkpoint

    checkpoint.newest(path.parent, lambda path, what: None)


def read_weights(path: Path) -> None:
    from edgeft.formats.safetensors import Weights

    Weights(path.parent)


def read_template(path: Path) -> None:
    from types import SimpleNamespace

    from edgeft.formats.tokenizer import render
    from edgeft.host import sandbox

    sandbox.SECONDS = 2.0
    template = path.read_bytes().decode("utf-8", "replace")
    tokenizer: Any = SimpleNamespace(template=template, bos_text="<s>", eos_text="</s>")
    render(tokenizer, [{"role": "user", "content": "Hello"}], generate=True)


def read_run(path: Path) -> None:
    from edgeft.pipeline import finetune
    from edgeft.report.summary import summary
    from edgeft.run.folder import Run

    folder = path.parent / "run"
    folder.mkdir(exist_ok=True)
    for name, text in json.loads(path.read_bytes()).items():
        (folder / name).write_bytes(text.encode("latin-1"))
    run = Run.open(folder)
    for name in finetune.STAGES:
        finetune.complete(run, name)
    summary(run)


Made = bytes | tuple[bytes, int]  # content, or its head and the size of the file
# kind → (share of the inputs, file name, maker, reader)
KINDS: dict[str, tuple[int, str, Callable[[random.Random], Made], Callable[[Path], None]]] = {
    "gguf": (30, "model.gguf", gguf_input, read_gguf),
    "vocabulary": (3, "model.gguf", functools.partial(gguf_input, small=0.8, gentle=True), read_vocabulary),
    "jsonl": (18, "rows.jsonl", jsonl_input, read_rows),
    "json": (8, "rows.json", json_input, read_rows),
    "csv": (8, "rows.csv", csv_input, read_rows),
    "parquet": (3, "rows.parquet", lambda r: mutate(_parquet_file(), r), read_rows),
    "recipe": (6, "recipe.yaml", lambda r: mutate(r.choice(_recipes()), r, YAML_WORDS), read_recipe),
    "device": (
        4,
        "device.yaml",
        lambda r: mutate(r.choice(_devices()), r, YAML_WORDS),
        read_device,
    ),
    "suite": (3, "suite.yaml", lambda r: mutate(r.choice(_suites()), r, YAML_WORDS), read_suite),
    "template": (2, "template.jinja", lambda r: mutate(TEMPLATE, r, JINJA_WORDS), read_template),
    "tokens": (4, "tokens.npz", lambda r: mutate(_tokens_file(), r, JSON_WORDS), read_tokens),
    "checkpoint": (
        4,
        "step-00000003.safetensors",
        lambda r: mutate(_checkpoint_file(), r, JSON_WORDS),
        read_checkpoint,
    ),
    "weights": (3, "model.safetensors", lambda r: mutate(_checkpoint_file(), r, JSON_WORDS), read_weights),
    "run": (2, "files.json", run_input, read_run),
}


def make(kind: str, seed: int, number: int) -> Made:
    return KINDS[kind][2](random.Random(f"{seed} {kind} {number}"))


def put(path: Path, made: Made) -> None:
    head, size = made if isinstance(made, tuple) else (made, None)
    with path.open("wb") as file:
        file.write(head)
        if size is not None:
            file.truncate(size)  # what lies behind the head is a hole


# ---------------------------------------------------------------- one process for a kind


def warm(kinds: list[str], seed: int) -> None:
    """Imports what the readers import, once for all the processes that are forked from this one."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            path = Path(folder, kind, KINDS[kind][1])
            path.parent.mkdir()
            put(path, make(kind, seed, 0))
            with contextlib.suppress(Exception):
                KINDS[kind][3](path)


def work(kind: str, seed: int, first: int, last: int, until: float, folder: Path) -> None:
    """Inputs first … last - 1; the number reached, and what was found, stand in files."""
    from edgeft.errors import EdgeftError

    name, read = KINDS[kind][1], KINDS[kind][3]
    path = folder / name
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def hang(number: int, frame: Any) -> None:
        raise Hang

    signal.signal(signal.SIGPROF, hang)
    reached = os.open(folder / "reached", os.O_RDWR | os.O_CREAT, 0o600)
    accepted = refused = 0
    for number in range(first, last):
        os.pwrite(reached, struct.pack("<QQQ", number, accepted, refused), 0)
        if time.time() > until and number > first:
            return
        put(path, make(kind, seed, number))
        try:
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
            read(path)
            accepted += 1
        except EdgeftError:
            refused += 1
        except BaseException:
            with (folder / "found").open("a", encoding="utf-8") as file:
                said = traceback.format_exc().encode("utf-8", "replace").decode()
                file.write(json.dumps({"number": number, "said": said[-3000:]}) + "\n")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    os.pwrite(reached, struct.pack("<QQQ", last, accepted, refused), 0)


def _fork(given: tuple[str, int, int, int, float, Path]) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        silent = os.open(os.devnull, os.O_RDWR)
        for handle in (0, 1, 2):
            os.dup2(silent, handle)
        work(*given)
        os._exit(0)
    finally:
        os._exit(1)


def supervise(kind: str, seed: int, first: int, count: int, until: float, folder: Path) -> dict[str, Any]:
    """Runs a kind; a process that dies or stands still is a finding, and another one goes on behind that input."""
    folder.mkdir(parents=True)
    began, at, last = time.time(), first, first + count
    accepted = refused = 0
    findings: list[dict[str, Any]] = []
    while at < last and (time.time() < until or at == first):
        for name in ("reached", "found"):
            (folder / name).unlink(missing_ok=True)
        child = _fork((kind, seed, at, last, until, folder))
        seen, since, stuck = -1, time.time(), False
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            time.sleep(0.02)
            now = _reached(folder)[0]
            if now != seen:
                seen, since = now, time.time()
            if time.time() - since > 6 * LIMIT_S and not stuck:
                os.kill(child, signal.SIGKILL)
                stuck = True
        number, good, bad = _reached(folder)
        accepted, refused = accepted + good, refused + bad
        if (folder / "found").is_file():
            findings += [json.loads(line) for line in (folder / "found").read_text("utf-8").splitlines()]
        if ended[1] == 0:
            at = number
            break
        number = max(number, at)
        code = os.waitstatus_to_exitcode(ended[1])
        findings.append({"number": number, "said": "it stood still" if stuck else f"the process ended with {code}"})
        at = number + 1
    counts = {"inputs": at - first, "read": accepted, "refused": refused}
    return {"kind": kind, **counts, "s": time.time() - began, "findings": findings}


def _reached(folder: Path) -> tuple[int, int, int]:
    try:
        found = struct.unpack("<QQQ", (folder / "reached").read_bytes())
    except (OSError, struct.error):
        return -1, 0, 0
    return found[0], found[1], found[2]


def fuzz(
    inputs: int,
    seconds: float = 1e9,
    seed: int = 0,
    kinds: list[str] | None = None,
    save: Path | None = None,
    first: int = 0,
) -> dict[str, Any]:
    """All kinds, one after the other; time and inputs are shared out among them."""
    chosen = kinds or list(KINDS)
    total = sum(KINDS[kind][0] for kind in chosen)
    results = []
    warm(chosen, seed)
    # in memory where that is possible: writing an input must not cost more than reading it
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="edgeft-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    began = time.time()
    try:
        for done, kind in enumerate(chosen):
            share = KINDS[kind][0] / total
            left = began + seconds - time.time()
            until = time.time() + left * KINDS[kind][0] / sum(KINDS[k][0] for k in chosen[done:])
            found = supervise(kind, seed, first, max(1, round(inputs * share)), until, root / kind)
            for finding in found["findings"]:
                if save is not None:
                    made = make(kind, seed, finding["number"])
                    save.mkdir(parents=True, exist_ok=True)
                    put(save / f"{kind}-{seed}-{finding['number']}-{KINDS[kind][1]}", made)
            results.append(found)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {"inputs": sum(r["inputs"] for r in results), "seconds": time.time() - began, "kinds": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input, to go on where a run ended")
    parser.add_argument("--kinds", help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--save", type=Path, default=Path("fuzz-findings"))
    given = parser.parse_args()
    kinds = given.kinds.split(",") if given.kinds else None
    result = fuzz(given.inputs, given.seconds, given.seed, kinds, given.save, given.first)
    print(f"{'kind':<12}{'inputs':>10}{'read':>10}{'refused':>10}{'findings':>10}{'inputs/s':>10}")
    for r in result["kinds"]:
        rate = r["inputs"] / max(r["s"], 1e-9)
        print(f"{r['kind']:<12}{r['inputs']:>10}{r['read']:>10}{r['refused']:>10}{len(r['findings']):>10}{rate:>10.0f}")
    found = sum(len(r["findings"]) for r in result["kinds"])
    print(f"{result['inputs']} inputs in {result['seconds']:.0f} s (seed {given.seed}): {found} findings")
    for r in result["kinds"]:
        for finding in r["findings"][:5]:
            print(f"\n{r['kind']} {finding['number']}: {finding['said']}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
