"""The readers that open files from elsewhere, each as fuzz.py calls it: a path in, nothing or an error out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def read_gguf(path: Path) -> None:
    from edgeft.arch.check import check_file

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
    from edgeft import arch, config
    from edgeft.methods import scheme

    recipe = config.load_recipe(str(path))
    config.apply_sets(recipe, [])
    config.dump(recipe)
    scheme.make(recipe.update, 30, arch.get("llama"))


def read_device(path: Path) -> None:
    from edgeft.host import device

    device.load_device(str(path))


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


def read_record(path: Path) -> None:
    from edgeft import arch, config
    from edgeft.methods import scheme
    from edgeft.run.record import Resolved, search_figures

    resolved = Resolved.read(path)
    json.dumps(dataclasses.asdict(resolved))
    for recipe in (resolved.asked, resolved.recipe):
        config.dump(recipe)
        scheme.make(recipe.update, 30, arch.get("llama"))
    engine = resolved.engine
    "".join([resolved.device, resolved.execution_why, resolved.update_why, engine.why, *resolved.changed])
    config.format_size(resolved.budget_bytes)
    search_figures(resolved.search)
    if not isinstance(engine.kernels, bool) or engine.products not in ("fp32", "bf16", "int8"):
        raise TypeError(f"the engine is {engine}")
