"""The kinds of files that fuzz.py makes; an input depends on seed, kind and number alone."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_readers as readers
from fuzz_gguf import gguf_input
from fuzz_mutate import CSV_WORDS, JINJA_WORDS, JSON_WORDS, YAML_WORDS, mutate

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


ODD: tuple[Any, ...] = (
    *(None, True, -1, 2**70, 1.5, float("nan"), float("inf"), "", "x" * 300, "\ud800", [], {}, [[]], {"text": None}),
)


def _edited(value: Any, r: random.Random) -> Any:
    """JSON with some of its values replaced."""
    if r.random() < 0.08:
        return r.choice(ODD)
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
    "plan.json": b'{"budget_bytes": 2000000000, "how": {"micro_batch_tokens": 256}, "stages": {"train": {"bytes": 5}}}',
    "search.json": b'{"trained_parameters": 3000000, "cut": 9, "gain_share": 0.9, "peak_bytes": 1000000}',
    "metrics.jsonl": b'{"time": 1.0, "event": "prepare", "train_rows": 3}\n{"event": "step", "step": 1, "loss": 2.0}\n',
}


def run_input(r: random.Random) -> bytes:
    """Files of a run folder, one of them damaged, as JSON."""
    files = {**RUN_FILES, "recipe.yaml": _recipes()[-1]}
    name = r.choice(sorted(files))
    files[name] = mutate(files[name], r, YAML_WORDS if name == "recipe.yaml" else JSON_WORDS)
    return json.dumps({k: v.decode("latin-1") for k, v in files.items()}).encode()


@functools.cache
def _record_file() -> bytes:
    from edgeft.config import Recipe
    from edgeft.run.record import EngineChoice, Resolved

    engine = EngineChoice(kernels=True, products="fp32", why="compiled before")
    reasons = ("the fastest that fits in 2 GiB", "found by the search")
    changed, search = ["update.rank 16 → 8"], {"trained_parameters": 3_000_000, "cut": 9, "gain_share": 0.9}
    record = Resolved(Recipe(), Recipe(), "rpi5", 2 << 30, engine, *reasons, changed, search)
    return json.dumps(dataclasses.asdict(record), indent=1).encode()


def record_input(r: random.Random) -> bytes:
    """resolved.json, with one value replaced or removed, or mutated as text."""
    if r.random() < 0.4:
        return mutate(_record_file(), r, JSON_WORDS)
    record = json.loads(_record_file())
    recipe = record[r.choice(("asked", "recipe"))]
    part = r.choice(
        (record, record, record["engine"], recipe, recipe[r.choice(sorted(set(recipe) - {"name", "about"}))])
    )
    key = r.choice(sorted(part))
    part[key] = r.choice(ODD)
    if r.random() < 0.2:
        del part[key]
    return json.dumps(record).encode()


Made = bytes | tuple[bytes, int]  # content, or its head and the size of the file
# kind → (share of the inputs, file name, maker, reader)
KINDS: dict[str, tuple[int, str, Callable[[random.Random], Made], Callable[[Path], None]]] = {
    "gguf": (30, "model.gguf", gguf_input, readers.read_gguf),
    "vocabulary": (3, "model.gguf", functools.partial(gguf_input, small=0.8, gentle=True), readers.read_vocabulary),
    "jsonl": (18, "rows.jsonl", jsonl_input, readers.read_rows),
    "json": (8, "rows.json", json_input, readers.read_rows),
    "csv": (8, "rows.csv", csv_input, readers.read_rows),
    "parquet": (3, "rows.parquet", lambda r: mutate(_parquet_file(), r), readers.read_rows),
    "recipe": (6, "recipe.yaml", lambda r: mutate(r.choice(_recipes()), r, YAML_WORDS), readers.read_recipe),
    "device": (
        4,
        "device.yaml",
        lambda r: mutate(r.choice(_devices()), r, YAML_WORDS),
        readers.read_device,
    ),
    "suite": (3, "suite.yaml", lambda r: mutate(r.choice(_suites()), r, YAML_WORDS), readers.read_suite),
    "template": (2, "template.jinja", lambda r: mutate(TEMPLATE, r, JINJA_WORDS), readers.read_template),
    "tokens": (4, "tokens.npz", lambda r: mutate(_tokens_file(), r, JSON_WORDS), readers.read_tokens),
    "checkpoint": (
        4,
        "step-00000003.safetensors",
        lambda r: mutate(_checkpoint_file(), r, JSON_WORDS),
        readers.read_checkpoint,
    ),
    "weights": (3, "model.safetensors", lambda r: mutate(_checkpoint_file(), r, JSON_WORDS), readers.read_weights),
    "run": (2, "files.json", run_input, readers.read_run),
    "record": (3, "resolved.json", record_input, readers.read_record),
}


def make(kind: str, seed: int, number: int) -> Made:
    return KINDS[kind][2](random.Random(f"{seed} {kind} {number}"))


def put(path: Path, made: Made) -> None:
    head, size = made if isinstance(made, tuple) else (made, None)
    with path.open("wb") as file:
        file.write(head)
        if size is not None:
            file.truncate(size)  # what lies behind the head is a hole
