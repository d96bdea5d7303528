#!/usr/bin/env python3
"""What each saving of the engine is worth: the same steps with one of them switched off (or on) at a time.

    scripts/bench/ablate.py [--data DIR] [--rows 128] [--steps 8] [--rounds 2] [--only NAME …] [--out FILE.json]

Every way runs in a process of its own, in turn, `--rounds` times; the best time counts. The held-out loss after the
same steps shows what a saving costs. Without --data: the embedded handbook, whose rows share little.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WAYS: dict[str, tuple[str, list[str]]] = {
    "as shipped": ("", []),
    "tree off": ("1. each token once", ["how.tree=false"]),
    "trunk rerun": ("2. the trunk once", ["how.trunk=rerun"]),
    "half of the tokens": ("5. token share 0.5, off as shipped", ["train.token_share=0.5"]),
    "step in place": ("6. update in place, off as shipped", ["how.step_in_place=true"]),
    "8-bit state": ("6. 8-bit optimiser state, off as shipped", ["how.optimizer_state=8bit"]),
    "fp32 products": ("7. bf16 products, where the processor has them", ["how.products=fp32"]),
    "plain torch": ("7. compiled kernels", ["how.compile=off"]),
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
    command = [sys.executable, "-m", "edgeft", "finetune", "--recipe", args.recipe, "--out", str(folder)]
    command += [part for item in [*every, *args.set, *sets] for part in ("--set", item)]
    command += ["--data", args.data] if args.data else []
    result = subprocess.run(
        [*command, "--until", "train", "--json"],
        capture_output=True,
        text=True,
        env={"GOMP_SPINCOUNT": "20000", **os.environ},
    )
    if result.returncode:
        sys.exit(f"{' '.join(sets)} failed:\n{result.stderr}")
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"][1:]  # the first one also warms up
    done = json.loads(result.stdout)
    return {
        "step_seconds": sum(event["seconds"] for event in steps) / len(steps),
        "tokens": sum(event["tokens"] for event in steps) / len(steps),
        "seconds": done["seconds"],
        "peak_bytes": done["peak_bytes"],
        "heldout_loss": done["best_loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))
    base = found["as shipped"]
    print("| way | saving | tokens a step | seconds a step | × | trunk and steps, s | peak, MiB | held-out loss |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in found.items():
        print(
            f"| {name} | {WAYS[name][0]} | {row['tokens']:.0f} | {row['step_seconds']:.2f} "
            f"| {row['step_seconds'] / base['step_seconds']:.2f} | {row['seconds']:.1f} "
            f"| {row['peak_bytes'] / 2**20:.0f} | {row['heldout_loss']:.4f} |"
        )


if __name__ == "__main__":
    main()
