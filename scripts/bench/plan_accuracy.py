#!/usr/bin/env python3
"""What was planned against what was measured: peak memory and time of short runs over models, recipes and row lengths.

    scripts/bench/plan_accuracy.py [--models DIR] [--only PART …] [--out FILE] [--again] [--steps 1]

Every cell is `edgeft finetune --until train` in processes of its own, with rows of exactly so many tokens that share no
prefix, made of the embedded handbook. Its plan is the one that it prints before it begins; the peak is the highest
resident memory of the train stage (trunk included), the time that of the whole command. --only smollm2 or lora/512
takes the cells whose name (model/recipe/tokens) holds all of these parts. Results go to --out as they come, and what
stands there is not run again. TinyLlama, Qwen2.5 and Gemma 3 are looked for in --models by name; others are made, of
random weights. `edgeft doctor` is run first, so that the rates are known.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

MODELS = {
    "smollm2": "",
    "tinyllama": "tinyllama*.gguf",
    "qwen": "qwen2.5*.gguf",
    "random-3b": "llama3.2-3b*.gguf",
    "gemma3": "gemma*3*270m*.gguf",
    "random-phi3": "phi3-mini*.gguf",
}
SHAPES = {
    "random-3b": "llama3.2-3b",
    "gemma3": "gemma3-270m",
    "random-phi3": "phi3-mini",
}  # made where no file is there
RECIPES = ("sparse-bp", "sparse-rule", "bias-norm", "lora")
WITHOUT_BIASES = ("gemma3", "random-phi3")  # llama.cpp reads none for these
TOKENS = (128, 512, 1024)
STEP_TOKENS = 1024  # one full micro-batch; two for the longest rows
BARS = {"memory": (0.15, 0.07), "time": (0.30, 0.30)}  # worst cell, median


def measure(model: Path, recipe: str, tokens: int, steps: int, sets: list[str]) -> dict[str, Any]:
    """One cell."""
    batch = max(2, STEP_TOKENS // tokens)
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        rows, place = Path(folder) / "rows", Path(folder) / "run"
        common.passage_rows(rows, batch * steps, tokens)
        every = [
            f"data.max_tokens={tokens}",
            f"train.steps={steps}",
            f"train.batch_rows={batch}",
            "train.validations=1",
        ]
        every += ["how.trunk_place=run", "data.heldout_rows=1", "how.compile=on", *sets]
        options = ["--recipe", recipe, "--model", model, "--data", rows, "--out", place, "--until", "train"]
        began = time.monotonic()
        found = common.edgeft_json("finetune", *options, sets=every)
        seconds = time.monotonic() - began
        plan = json.loads((place / "plan.json").read_text())
        steps_s = [event["seconds"] for event in common.read_events(place, "step")]
    stages = plan["stages"]
    return {
        "planned_bytes": max(stages[name]["bytes"] for name in ("trunk", "train") if name in stages),
        "peak_bytes": found["peaks"]["train"],
        "planned_s": sum(stages[name]["seconds"] for name in ("prepare", "trunk", "train") if name in stages),
        "seconds": seconds,
        "step_s": steps_s,
        "checkpoint_s": found["checkpoint_s"],
        "terms": stages["train"]["terms"],
        "stage_s": {name: stage["seconds"] for name, stage in stages.items()},
        "how": plan["how"],
    }


def off(planned: float, measured: float) -> float:
    return planned / measured - 1


def table(cells: dict[str, dict[str, Any]]) -> str:
    rows = [
        (
            name, f"{c['planned_bytes'] >> 20:,}", f"{c['peak_bytes'] >> 20:,}",
            f"{off(c['planned_bytes'], c['peak_bytes']):+.1%}", f"{c['planned_s']:.1f}", f"{c['seconds']:.1f}",
            f"{off(c['planned_s'], c['seconds']):+.1%}",
        )
        for name, c in cells.items()
    ]  # fmt: skip
    lines = common.table(["cell", "planned MiB", "peak MiB", "off", "planned s", "took s", "off"], rows).splitlines()
    pairs = {"memory": ("planned_bytes", "peak_bytes"), "time": ("planned_s", "seconds")}
    for what, (planned, measured) in pairs.items():
        errors = [abs(off(cell[planned], cell[measured])) for cell in cells.values()]
        if errors:
            worst, median = max(errors), statistics.median(errors)
            most, usual = BARS[what]
            kept = "kept" if worst <= most and median <= usual else "missed"
            lines.append(
                f"{what}: median {median:.1%}, worst {worst:.1%} of {len(errors)} cells; "
                f"the bars are {usual:.0%} and {most:.0%}: {kept}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--only", action="append", default=[], metavar="PART")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", action="store_true", help="run also what --out has already")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    cells: dict[str, dict[str, Any]] = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {}
    common.edgeft("doctor", "--json")
    for name in MODELS:
        wanted = {f"{name}/{recipe}/{tokens}": (recipe, tokens) for recipe in RECIPES for tokens in TOKENS}
        wanted = {cell: of for cell, of in wanted.items() if all(part in cell for part in args.only)}
        wanted = {cell: of for cell, of in wanted.items() if args.again or cell not in cells}
        model = common.find_model(args.models, MODELS[name], SHAPES.get(name, "")) if wanted else None
        if wanted and model is None:
            print(f"{name}: no {MODELS[name]} in {args.models}", file=sys.stderr)
            continue
        for cell, (recipe, tokens) in wanted.items():
            assert model is not None
            norms = ["update.biases=false"] if recipe == "bias-norm" and name in WITHOUT_BIASES else []
            cells[cell] = measure(model, recipe, tokens, args.steps, [*norms, *args.set])
            print(table({cell: cells[cell]}).splitlines()[2], flush=True)
            common.write_json(args.out, cells)
    print(table(cells))


if __name__ == "__main__":
    main()
