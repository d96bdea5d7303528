#!/usr/bin/env python3
"""How soon a second run trains: seconds from the command to its first optimiser step, with the trunk's output cached.

    scripts/bench/second_run.py [--data DIR] [--rows 1000] [--recipe sparse-rule]

The first run computes the trunk; the second has another learning rate, so nothing else can be used again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import common


def first_step_s(folder: Path, args: argparse.Namespace, sets: list[str], cache: Path) -> float:
    """From the start of the process to the end of the first step."""
    options: list[object] = ["--recipe", args.recipe, "--out", folder, "--until", "train"]
    options += ["--data", args.data] if args.data else []
    # two steps alone would not pay for compiling the kernels; the run that they stand for does
    every = [f"data.rows={args.rows}", "train.steps=2", "train.validations=1", "how.nice=0", "how.compile=on"]
    began = time.time()
    common.edgeft("finetune", *options, sets=[*every, *args.set, *sets], env={"EDGEFT_CACHE": str(cache)})
    return float(common.read_events(folder, "step")[0]["time"]) - began


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", help="folder with train.jsonl and dev.jsonl; none = the embedded set")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--recipe", default="sparse-rule")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        first = first_step_s(folder / "first", args, [], folder / "cache")
        again = [first_step_s(folder / f"again-{n}", args, [f"train.lr=1e-{n}"], folder / "cache") for n in (4, 5)]
    print(f"first run: {first:.1f} s to its first step, with the trunk pass and the kernels' compilation")
    print(f"further runs: {', '.join(f'{s:.1f} s' for s in again)} (at most 15)")


if __name__ == "__main__":
    main()
