#!/usr/bin/env python3
"""What to update: held-out loss, time and memory of schemes from few to many trained parameters, on the same rows.

    scripts/bench/schemes.py DATA --out FILE.json [--model FILE.gguf] [--rows 256] [--epochs 1] [--only NAME …]

DATA holds train.jsonl and dev.jsonl, or Banking77's CSV files. By default the held-out rows are the last training
rows (`bench.py --choose` takes the same), so that what is chosen here can be reported on the others; `--report` takes
dev.jsonl or test.csv. `--distinct` keeps one question a passage. Schemes whose results are in --out are not run again.
`--seeds N` runs each N times and prints the mean of the last loss ÷ that of the first scheme, with its standard error.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

# name → (recipe, settings); a rate of low-rank updates is that of sparse-bp unless it is named
SCHEMES: dict[str, tuple[str, list[str]]] = {
    "sparse-bp": ("sparse-bp", []),
    "blocks from 37 %": ("sparse-bp", ["update.blocks=37%-100%"]),
    "blocks from 50 %": ("sparse-bp", ["update.blocks=50%-100%"]),
    "blocks from 67 %": ("sparse-bp", ["update.blocks=67%-100%"]),
    "middle third": ("sparse-bp", ["update.blocks=37%-67%"]),
    "10 to 67 %": ("sparse-bp", ["update.blocks=10%-67%"]),
    "rank 4": ("sparse-bp", ["update.low_rank=4"]),
    "rank 64": ("sparse-bp", ["update.low_rank=64"]),
    "all tokens": ("sparse-bp", ["update.tokens=0"]),
    "1 token": ("sparse-bp", ["update.tokens=1"]),
    "8 tokens": ("sparse-bp", ["update.tokens=8"]),
    "32 tokens": ("sparse-bp", ["update.tokens=32"]),
    "no average": ("sparse-bp", ["train.average=0"]),
    "8 rows a step": ("sparse-bp", ["train.batch_rows=8"]),
    "rate 7.5e-4": ("sparse-bp", ["train.low_rank_lr=7.5e-4", "train.lr_loss=0"]),
    "rate 1e-3": ("sparse-bp", ["train.low_rank_lr=1e-3", "train.lr_loss=0"]),
    "rate 1.5e-3": ("sparse-bp", ["train.low_rank_lr=1.5e-3", "train.lr_loss=0"]),
    "rate 3e-3": ("sparse-bp", ["train.low_rank_lr=3e-3", "train.lr_loss=0"]),
    "rate 1e-2": ("sparse-bp", ["train.low_rank_lr=1e-2", "train.lr_loss=0"]),
    **{f"{products} products": ("sparse-bp", [f"how.products={products}"]) for products in ("fp32", "bf16", "int8")},
    "sparse-rule": ("sparse-rule", []),
    "sparse-search": ("sparse-search", []),
    "qlora": ("qlora", []),
}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", help="GGUF file; none = the embedded one")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--dev-rows", type=int, default=100)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--distinct", action="store_true")
    parser.add_argument("--report", action="store_true", help="held-out rows of dev.jsonl or test.csv")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--set", action="append", default=[], help="further knobs, for all schemes")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("only", "out", "seeds")}
    kept: dict[str, Any] = {"settings": settings, "schemes": {}}
    if args.out.is_file():
        kept = json.loads(args.out.read_text())
        if kept["settings"] != settings:
            sys.exit(f"{args.out} was made with other settings: name another file")
    with tempfile.TemporaryDirectory() as place:
        data = rows_of(args, Path(place) / "rows")
        for seed, name in ((seed, name) for seed in range(args.seeds) for name in args.only):
            title = titled(name, seed)
            if title in kept["schemes"]:
                continue
            print(f"{title} …", file=sys.stderr, flush=True)
            kept["schemes"][title] = run(name, seed, args, data, Path(place) / "run" / title)
            common.write_json(args.out, kept)
    titles = ("scheme", "trained", "peak MiB", "seconds of all steps", "held-out losses")
    print(common.table(titles, (row(name, result) for name, result in kept["schemes"].items())))
    if args.seeds > 1:
        print(common.table(("scheme", f"last loss ÷ that of {args.only[0]}"), ratios(args, kept["schemes"])))


def titled(name: str, seed: int) -> str:
    return f"{name}, seed {seed}" if seed else name


def ratios(args: Any, results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Of the losses with the same seed."""
    last = {title: list(result["losses"].values())[-1] for title, result in results.items()}
    for name in args.only[1:]:
        of_seeds = [last[titled(name, seed)] / last[titled(args.only[0], seed)] for seed in range(args.seeds)]
        error = statistics.stdev(of_seeds) / len(of_seeds) ** 0.5
        yield name, f"{statistics.mean(of_seeds):.4f} ± {error:.4f}"


def rows_of(args: Any, out: Path) -> Path:
    """The folder with the rows."""
    sizes, choose = (out, args.rows, args.dev_rows), not args.report
    if (args.data / "train.csv").is_file():
        return common.banking_rows(args.data, *sizes, ("question", "answer"), choose)
    if args.distinct:
        return common.distinct_passages(args.data, *sizes, choose)
    return common.last_rows(args.data, *sizes) if choose else args.data


def run(name: str, seed: int, args: Any, data: Path, folder: Path) -> dict[str, Any]:
    recipe, sets = SCHEMES[name]
    knobs = {
        "data.rows": args.rows, "data.heldout_rows": args.dev_rows, "train.epochs": args.epochs,
        "train.seed": seed, "train.validations": 4, "train.validation_share": 0, "how.nice": 0,
        "how.trunk_place": "run",
    }  # fmt: skip
    model = ["--model", args.model] if args.model else []
    words = ["finetune", "--recipe", recipe, *model, "--data", data, "--out", folder, "--until", "train"]
    result = common.edgeft_json(*words, sets=[*(f"{k}={v}" for k, v in knobs.items()), *sets, *args.set])
    kept = {key: result[key] for key in ("trained_parameters", "peak_bytes", "seconds", "base_loss", "best_loss")}
    steps, validations = common.read_events(folder, "step"), common.read_events(folder, "validation")
    losses = {one["step"]: one["heldout_loss"] for one in validations}
    return {**kept, "steps_s": sum(step["seconds"] for step in steps), "losses": losses}


def row(name: str, result: dict[str, Any]) -> list[str]:
    trained, peak = result["trained_parameters"] / 1e6, result["peak_bytes"] / common.MIB
    losses = ", ".join(f"{loss:.3f}" for loss in result["losses"].values())
    return [name, f"{trained:.2f} M", f"{peak:.0f}", f"{result['steps_s']:.0f}", losses]


if __name__ == "__main__":
    main()
