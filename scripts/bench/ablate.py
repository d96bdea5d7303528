#!/usr/bin/env python3
"""What each saving of the engine is worth: the same steps with one of them switched off (or on) at a time.

    scripts/bench/ablate.py [--data DIR] [--rows 128] [--steps 8] [--rounds 2] [--only NAME …] [--out FILE.json]

Every way runs in a process of its own, in turn, `--rounds` times; the best time counts. The held-out loss after the
same steps shows what a saving costs. Without --data: the embedded handbook, whose rows share little.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

WAYS: dict[str, tuple[str, list[str]]] = {
    "as shipped": ("", []),
    "tree off": ("1. each token once", ["how.tree=false"]),
    "trunk rerun": ("2. the trunk once", ["how.trunk=rerun"]),
    "step in place": ("3. update in place, off as shipped", ["how.step_in_place=true"]),
    "8-bit state": ("3. 8-bit optimiser state, off as shipped", ["how.optimizer_state=8bit"]),
    "fp32 products": ("4. bf16 products, where the processor has them", ["how.products=fp32"]),
    "plain torch": ("4. compiled kernels", ["how.compile=off"]),
    **{
        f"1/{part} of the channels": (
            "a share of each tensor's input channels, all as shipped",
            [f"update.channels={1 / part}"],
        )
        for part in (2, 4, 8)
    },
    "recompute": ("activations computed again, off as shipped", ["how.recompute=true"]),
}


def one(sets: list[str], folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One way, once."""
    every = [
        f"train.steps={args.steps}",
        "train.validations=1",
        f"data.rows={args.rows}",
        f"data.heldout_rows={args.dev_rows}",
        f"data.max_tokens={args.max_tokens}",
        "how.compile=on",
        "how.trunk_place=run",
        "how.nice=0",
    ]
    options: list[object] = ["--recipe", args.recipe, "--out", folder, "--until", "train"]
    options += ["--data", args.data] if args.data else []
    env = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "20000")}
    done = common.edgeft_json("finetune", *options, sets=[*every, *args.set, *sets], env=env)
    steps = common.read_events(folder, "step")[1:]  # the first one also warms up
    return {
        "step_seconds": sum(event["seconds"] for event in steps) / len(steps),
        "tokens": sum(event["tokens"] for event in steps) / len(steps),
        "seconds": done["seconds"],
        "peak_bytes": done["peak_bytes"],
        "heldout_loss": done["best_loss"],
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", help="folder with train.jsonl and dev.jsonl")
    parser.add_argument("--recipe", default="sparse-rule")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--dev-rows", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=list(WAYS), help="beside `as shipped`")
    parser.add_argument("--set", action="append", default=[], help="further knobs, for all ways")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    args = parser.parse_args()
    names = ["as shipped", *(name for name in args.only or WAYS if name != "as shipped")]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as place:
        for number in range(args.rounds):
            for name in names:
                print(f"{number + 1} of {args.rounds}: {name} …", file=sys.stderr, flush=True)
                got = one(WAYS[name][1], Path(place) / f"{number}-{name.replace(' ', '-')}", args)
                best = found.setdefault(name, got)
                for key in ("step_seconds", "seconds", "peak_bytes"):
                    best[key] = min(best[key], got[key])
    common.write_json(args.out, found)
    base = found["as shipped"]
    titles = [
        "way",
        "saving",
        "tokens a step",
        "seconds a step",
        "×",
        "trunk and steps, s",
        "peak, MiB",
        "held-out loss",
    ]
    rows = [
        (
            name, WAYS[name][0], f"{row['tokens']:.0f}", f"{row['step_seconds']:.2f}",
            f"{row['step_seconds'] / base['step_seconds']:.2f}", f"{row['seconds']:.1f}",
            f"{row['peak_bytes'] / common.MIB:.0f}", f"{row['heldout_loss']:.4f}",
        )
        for name, row in found.items()
    ]  # fmt: skip
    print(common.table(titles, rows))


if __name__ == "__main__":
    main()
