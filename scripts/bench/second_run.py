#!/usr/bin/env python3
"""How soon a second run trains: seconds from the command to its first optimiser step, with the trunk's output cached.

    scripts/bench/second_run.py [--data DIR] [--rows 1000] [--recipe sparse-rule]

The first run computes the trunk; the second has another learning rate, so nothing else can be used again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def first_step_s(folder: Path, args: argparse.Namespace, sets: list[str], cache: Path) -> float:
    """From the start of the process to the end of the first step."""
    command = [sys.executable, "-m", "edgeft", "finetune", "--recipe", args.recipe, "--out", str(folder)]
    command += ["--data", args.data] if args.data else []
    # two steps alone would not pay for compiling the kernels; the run that they stand for does
    every = [f"data.rows={args.rows}", "train.steps=2", "train.validations=1", "how.nice=0", "how.compile=on"]
    for item in (*every, *args.set, *sets):
        command += ["--set", item]
    began = time.time()
    result = subprocess.run(
        [*command, "--until", "train"], capture_output=True, text=True, env={**os.environ, "EDGEFT_CACHE": str(cache)}
    )
    if result.returncode:
        sys.exit(f"finetune failed:\n{result.stderr}")
    events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return float(next(event for event in events if event["event"] == "step")["time"]) - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
