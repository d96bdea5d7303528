#!/usr/bin/env python3
"""Recipes side by side on question answering: the README's table.

    scripts/squad.py DIR [--rows 1000] [--epochs 2] [--recipes sparse-bp lora full] [--out FILE.json]

DIR holds train.jsonl and dev.jsonl with {context, question, answers}. Every recipe trains in a process of its own on
the same rows; base and tuned files are scored by llama.cpp on the same dev rows. With --out, what an earlier call with
the same settings found for other recipes is kept: one recipe can be run again alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from edgeft.data import tokens
from edgeft.evaluate import compare
from edgeft.run import Run, model_source
from edgeft.train.progress import Progress


def finetune(recipe: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    sets = {
        "data.rows": args.rows,
        "data.heldout_rows": args.dev_rows,
        "data.max_tokens": args.max_tokens,
        "train.epochs": args.epochs,
        "eval.rows": args.dev_rows,
        "how.nice": 0,
    }
    command = [
        sys.executable,
        "-m",
        "edgeft",
        "finetune",
        "--recipe",
        recipe,
        "--data",
        args.data,
        "--out",
        str(folder),
    ]
    command += [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    command += [part for value in args.set for part in ("--set", value)]
    if args.model:
        command += ["--model", args.model]
    started = time.monotonic()
    result = subprocess.run([*command, "--until", "export", "--json"], stdout=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(f"{recipe} failed with exit code {result.returncode}")
    return {"whole_seconds": round(time.monotonic() - started, 1), **json.loads(result.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder with train.jsonl and dev.jsonl")
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--dev-rows", type=int, default=200)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--recipes", nargs="+", default=["sparse-bp", "lora", "full"])
    parser.add_argument("--set", action="append", default=[], help="further knobs, for all recipes")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    args = parser.parse_args()
    settings = {k: str(v) for k, v in vars(args).items() if k not in ("recipes", "out")}
    before: dict[str, Any] = {"settings": settings, "rows": []}
    if args.out and args.out.is_file():
        before = json.loads(args.out.read_text())
    if before["settings"] != settings:
        sys.exit(f"{args.out} was made with other settings: name another file")
    base: dict[str, Any] | None = before["rows"][0]["base"] if before["rows"] else None
    results = [row for row in before["rows"] if row["recipe"] not in args.recipes]
    with tempfile.TemporaryDirectory() as place:
        for recipe in args.recipes:
            print(f"{recipe} …", file=sys.stderr, flush=True)
            folder = Path(place) / Path(recipe).stem
            done = finetune(recipe, folder, args)
            run = Run.open(folder)
            rows = tokens.load(run.tokens)[1][: args.dev_rows]
            limit, quiet = run.recipe.eval.max_new_tokens, Progress()
            if base is None:
                source = model_source(args.model)
                base = compare.score_file(source, rows, limit, quiet, "base").figures()
            tuned = compare.score_file(str(run.model), rows, limit, quiet, recipe).figures()
            results.append({"recipe": recipe, "rows": len(rows), "base": base, "tuned": tuned, **done})
            if args.out:
                args.out.write_text(json.dumps({"settings": settings, "rows": results}, indent=1))
    print(f"\n{args.rows} rows, {args.epochs:g} epochs, {results[0]['rows']} dev rows\n")
    print("| recipe | trained | seconds | peak | loss | exact match | F1 |")
    print("|---|---|---|---|---|---|---|")
    assert base is not None
    print(f"| untuned | | | | {base['loss']:.3f} | {base['exact_match']:.1f} | {base['f1']:.1f} |")
    for row in results:
        tuned = row["tuned"]
        print(
            f"| {row['recipe']} | {row['trained_parameters'] / 1e6:.1f} M | {row['seconds']:.0f} | "
            f"{row['peak_bytes'] / 2**30:.2f} GiB | "
            f"{tuned['loss']:.3f} | {tuned['exact_match']:.1f} | {tuned['f1']:.1f} |"
        )


if __name__ == "__main__":
    main()
