#!/usr/bin/env python3
"""The trunk pass beside llama.cpp's prefill: the same file, the same tokens, all blocks of the model.

    scripts/bench/prefill.py --model FILE.gguf [--data DIR] [--rows 16] [--tokens 256] [--rounds 3]
    scripts/bench/prefill.py --model FILE.gguf --products fp32 int8 [--march alderlake]

Rows are cut to the same length and share no prefix, so that both compute every token. The trunk takes 1,024 tokens a
pass, llama.cpp 512 (its default). They alternate; the best round of each counts. llama.cpp computes logits of the last
token alone. It loads the file in its own way, with weights repacked where it can.

--products: each of these operands of edgeft's products, instead of this machine's. --march: edgeft's kernels compiled
for another processor, whose instructions this one must have (alderlake: AVX2, VNNI).
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import numpy as np
import torch

from edgeft.config import DataConfig, Recipe
from edgeft.config.resolve import apply_sets
from edgeft.data import rows as data_rows
from edgeft.data import tokens
from edgeft.data.forest import Forest
from edgeft.data.tokens import Encoded
from edgeft.engine import choose, compiled
from edgeft.engine.stack import batch_of
from edgeft.formats.source import model_source
from edgeft.formats.tokenizer import open_tokenizer, quiet_llama
from edgeft.host import device
from edgeft.plan.shape import shape_of
from edgeft.run.progress import Progress
from edgeft.train.build import load_stack

PASS_TOKENS, LLAMA_TOKENS = 1024, 512


def token_rows(source: str, data: str | None, count: int, length: int) -> list[Encoded]:
    """Each begins with another token, so that no prefix is shared."""
    dataset = data_rows.load(DataConfig(path=data))
    encoded, _ = tokens.encode_rows(dataset.train[: 20 * count], open_tokenizer(source), 4 * length, None)
    ids = np.concatenate([row.ids for row in encoded])
    starts = range(0, len(ids) - length, length)
    distinct = {int(ids[start]): start for start in starts}
    if len(distinct) < count:
        raise SystemExit(f"these rows give {len(distinct)} pieces of {length} tokens: use fewer --rows or --tokens")
    pieces = [ids[start : start + length] for start in list(distinct.values())[:count]]
    return [Encoded(piece, np.arange(length) == length - 1, encoded[0].row) for piece in pieces]


def compile_for(march: str, folder: Path) -> None:
    """A compiler whose last word is -march; its kernels are kept in a cache of their own."""
    wrapped = folder / "c++"
    wrapped.write_text(f'#!/bin/sh\nexec {compiled.compiler()} "$@" -march={march}\n')
    wrapped.chmod(0o755)
    os.environ.update(CXX=str(wrapped), EDGEFT_CACHE=str(folder / "cache"))


def edgeft_pass(source: str, rows: list[Encoded], products: str = "auto") -> Callable[[], None]:
    sets = [f"model.path={source}", "how.compile=on", f"how.products={products}"]
    recipe, shape = apply_sets(Recipe(), sets), shape_of(source, "auto")
    stack = load_stack(recipe, choose.choose(recipe, shape.head, shape.gate, 0.0, Progress()))
    forest = Forest(rows)
    batches = [batch_of(forest, part)[1] for part in forest.micro_batches(list(range(len(rows))), PASS_TOKENS)]

    def run() -> None:
        for batch in batches:
            stack.trunk(batch, stack.depth)

    return run


def llama_pass(source: str, rows: list[Encoded]) -> Callable[[], None]:
    api = quiet_llama()
    model = api.llama_model_load_from_file(source.encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = len(rows[0].ids), len(rows[0].ids), LLAMA_TOKENS
    params.n_threads = params.n_threads_batch = device.cores()
    context = api.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp cannot load {source}")

    def run() -> None:
        for row in rows:
            api.llama_memory_clear(api.llama_get_memory(context), False)
            ids = (ctypes.c_int32 * len(row.ids))(*row.ids.tolist())
            if code := api.llama_decode(context, api.llama_batch_get_one(ids, len(row.ids))):
                raise SystemExit(f"llama_decode: {code}")

    return run


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", help="folder or file with rows; none = the embedded set")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--products", nargs="+", choices=("fp32", "bf16", "int8"), default=[])
    parser.add_argument("--march", help="compile edgeft's kernels for this processor")
    args = parser.parse_args()
    args.folder = tempfile.TemporaryDirectory()
    source = model_source(args.model)
    rows = token_rows(source, args.data, args.rows, args.tokens)
    if args.march:
        compile_for(args.march, Path(args.folder.name))
    names = {f"edgeft {products}": products for products in args.products} or {"edgeft": "auto"}
    passes = {name: edgeft_pass(source, rows, products) for name, products in names.items()}
    passes["llama.cpp"] = llama_pass(source, rows)
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    with torch.no_grad():
        for _ in range(args.rounds):
            for name, run in passes.items():
                began = time.monotonic()
                run()
                seconds[name].append(time.monotonic() - began)
    count = args.rows * args.tokens
    best = {name: min(values) for name, values in seconds.items()}
    first, last = next(iter(best)), best["llama.cpp"]
    table = [(n, f"{s:.2f}", f"{count / s:.1f}", f"{s / best[first]:.2f}", f"{s / last:.2f}") for n, s in best.items()]
    print(common.table(("", "seconds", "tokens/s", f"÷ {first}", "÷ llama.cpp"), table))


if __name__ == "__main__":
    main()
