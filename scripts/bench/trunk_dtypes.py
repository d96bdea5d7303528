#!/usr/bin/env python3
"""What the trunk cache's precision costs: bytes, error of the states, and held-out loss before and after training.

    scripts/bench/trunk_dtypes.py [--model FILE] [--data DIR] [--rows 48] [--steps 6] [--set KEY=VALUE]

Every precision trains from the same weights, on the same rows, in the same order.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import common
import torch

from edgeft import config
from edgeft.data import tokens
from edgeft.engine.stack import batch_of
from edgeft.formats.source import model_id, model_source
from edgeft.pipeline import prepare, stages
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train import build, trunk
from edgeft.train.loop import Trainer


def states(run: Run) -> tuple[torch.Tensor, float]:
    """(what the cut sees of the first rows, bytes per token of the file)."""
    stack, scheme, parameters = build.build(run.recipe)
    rows, heldout = tokens.load(run.tokens, texts=False)
    trainer = Trainer(run, stack, scheme, parameters, (rows, heldout), Progress())
    job = trainer.trunk_job(model_id(model_source(run.recipe.model.path)))
    found = trunk.prepare(run, job, Progress(), lambda: False)
    assert found is not None
    assert found.states is not None
    size = found.states.path.stat().st_size / len(trainer.forest)
    nodes, batch = batch_of(trainer.forest, list(range(min(64, len(rows)))))
    hidden = found.hidden(nodes, batch)
    found.close()
    return hidden, size


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--recipe", default="sparse-rule")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    exact = torch.empty(0)
    with tempfile.TemporaryDirectory() as place:
        for dtype in ("fp32", "fp16", "int8"):
            sets = [
                *([f"model.path={args.model}"] if args.model else []),
                *([f"data.path={args.data}"] if args.data else []),
                f"data.rows={args.rows}",
                f"train.steps={args.steps}",
                f"how.trunk_dtype={dtype}",
            ]
            recipe = config.apply_sets(config.load_recipe(args.recipe), [*sets, "how.trunk_place=run", *args.set])
            run = Run.start(Path(place) / dtype, recipe, False)
            prepare.prepare(run, Progress())
            hidden, size = states(run)
            exact = hidden if dtype == "fp32" else exact
            error = (hidden - exact).norm(dim=1) / exact.norm(dim=1)
            stages.train(run, Progress())
            done = run.read_json(run.done) or {}
            results[dtype] = {"bytes": size, "mean": error.mean(), "worst": error.max(), **done}
    base = results["fp32"]
    titles = ["dtype", "bytes/token", "error, mean", "worst token"]
    titles += ["loss before", "− fp32", "loss after", "− fp32"]
    rows = [
        (
            dtype, f"{row['bytes']:.0f}", f"{row['mean']:.2e}", f"{row['worst']:.2e}",
            f"{row['base_loss']:.4f}", f"{row['base_loss'] - base['base_loss']:+.4f}",
            f"{row['best_loss']:.4f}", f"{row['best_loss'] - base['best_loss']:+.4f}",
        )
        for dtype, row in results.items()
    ]  # fmt: skip
    print(common.table(titles, rows))


if __name__ == "__main__":
    main()
