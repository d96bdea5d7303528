#!/usr/bin/env python3
"""What a pass keeps for its way back, by method, on the same blocks: bytes of activations between forward and backward.

    scripts/bench/kept.py [--tokens 512] [--blocks 30]

Rows of the embedded handbook in one pass of at most so many tokens through the embedded model's last blocks, with the
kernels; looked at in the pool that all activations come from.
"""

from __future__ import annotations

from dataclasses import replace

import common

from edgeft import config
from edgeft.data.forest import Forest
from edgeft.engine import kernels
from edgeft.engine.load import load
from edgeft.engine.stack import batch_of
from edgeft.formats.source import demo_model
from edgeft.methods import scheme as schemes
from edgeft.pipeline import prepare

METHODS = ("full", "bias-norm", "tinytl")


def kept(recipe: config.Recipe, blocks: int, forest: Forest, rows: list[int]) -> int:
    stack = load(str(demo_model()), lean=True)
    stack.configure(backend=kernels.load())
    scheme = schemes.make(replace(recipe.update, blocks=blocks), stack.depth, stack.arch)
    schemes.apply(stack, scheme, 0)
    stack.configure(recompute=scheme.recompute(False))
    _, batch = batch_of(forest, rows)
    hidden = stack.trunk(batch, scheme.cut)
    pool = stack.options.backend.memory.pool
    pool.resize(len(hidden))
    loss = stack.head.loss(stack.top(hidden, batch, scheme.cut), batch.targets)
    used = pool.used_bytes()
    loss.backward()  # type: ignore[no-untyped-call]
    return used


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=30)
    args = parser.parse_args()
    _, train, _, _ = prepare.encode(config.load_recipe("sparse-rule"))
    forest = Forest(train)
    rows: list[int] = []
    for row in range(len(train)):
        if len(batch_of(forest, [*rows, row])[0]) > args.tokens:
            break
        rows.append(row)
    found = {name: kept(config.load_recipe(name), args.blocks, forest, rows) for name in METHODS}
    tokens = len(batch_of(forest, rows)[0])
    print(f"{len(rows)} rows, {tokens} tokens, the last {args.blocks} blocks\n")
    rows_of = [(name, f"{size / common.MIB:.1f} MiB", f"{size / found['full']:.3f}") for name, size in found.items()]
    print(common.table(["method", "kept", "against full"], rows_of))


if __name__ == "__main__":
    main()
