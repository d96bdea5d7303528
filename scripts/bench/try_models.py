#!/usr/bin/env python3
"""Any GGUF files: load, train some steps on the embedded handbook, export, and answer from the exported file.

scripts/bench/try_models.py FILE.gguf … [--steps 10] [--recipe sparse-bp]
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import common

QUESTION = "Where is the serial number printed on an Ostrel?"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--recipe", default="sparse-bp")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    for file in args.files:
        with tempfile.TemporaryDirectory() as place:
            sets = [f"train.steps={args.steps}", "train.validations=1", "data.heldout_rows=16", *args.set]
            started = time.monotonic()
            options = ["--recipe", args.recipe, "--model", file, "--out", f"{place}/run", "--until", "export"]
            done = common.edgeft_json("finetune", *options, sets=sets)
            answer = common.edgeft("chat", f"{place}/run", "--prompt", QUESTION, "--max-tokens", 24).strip()
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
