#!/usr/bin/env python3
"""Any GGUF files: load, train some steps on the embedded handbook, export, and answer from the exported file.

scripts/bench/try_models.py FILE.gguf … [--steps 10] [--recipe sparse-bp]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

QUESTION = "Where is the serial number printed on an Ostrel?"


def edgeft(*args: str) -> str:
    result = subprocess.run([sys.executable, "-m", "edgeft", *args], stdout=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(f"edgeft {args[0]} failed with exit code {result.returncode}")
    return result.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--recipe", default="sparse-bp")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    for file in args.files:
        with tempfile.TemporaryDirectory() as place:
            sets = [f"train.steps={args.steps}", "train.validations=1", "data.heldout_rows=16", *args.set]
            options = [part for value in sets for part in ("--set", value)]
            started = time.monotonic()
            done = json.loads(
                edgeft(
                    "finetune",
                    "--recipe",
                    args.recipe,
                    "--model",
                    file,
                    "--out",
                    f"{place}/run",
                    *options,
                    "--until",
                    "export",
                    "--json",
                )
            )
            answer = edgeft("chat", f"{place}/run", "--prompt", QUESTION, "--max-tokens", "24").strip()
            check = done["export"]["check"]
            print(
                f"{Path(file).name}: {done['steps']} steps, {done['trained_parameters'] / 1e6:.0f} M trained, "
                f"{time.monotonic() - started:.0f} s, peak {done['peak_bytes'] / 2**30:.2f} GiB, "
                f"loss {done['base_loss']:.3f} → {done['best_loss']:.3f}, "
                f"llama.cpp agrees on {check['top1']:.1f} %, KL {check['mean_kl']:.4f}\n  > {QUESTION}\n  {answer}",
                flush=True,
            )


if __name__ == "__main__":
    main()
