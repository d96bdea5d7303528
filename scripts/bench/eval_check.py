#!/usr/bin/env python3
"""Two checks of what `edgeft eval` says.

scripts/bench/eval_check.py choices FILE.jsonl [--rows 570]  likelihood choices: the GGUF file in llama.cpp, and the
                                                             unpacked model in transformers, one choice at a time
scripts/bench/eval_check.py interval [--trials 2000]         how often the bootstrap interval holds the true difference
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import common
import numpy as np

from edgeft.formats.source import model_source

os.environ.setdefault("GOMP_SPINCOUNT", "20000")


def choices(args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from edgeft.evaluate import compare
    from edgeft.run.progress import Progress

    path = args.model or Path(model_source(None))
    started = time.monotonic()
    found = compare.evaluate(compare.Evaluation(str(path), str(args.file), None, args.rows, "choice"), Progress())[
        "tuned"
    ]
    print(
        f"llama.cpp: accuracy {found['accuracy']:.2f}, per character {found['accuracy_norm']:.2f} "
        f"({time.monotonic() - started:.0f} s)",
        flush=True,
    )
    started = time.monotonic()
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    rows = [json.loads(line) for line in args.file.read_text().splitlines()][: args.rows]
    raw = normed = 0
    with torch.no_grad():
        for row in rows:
            prompt = f"Question: {row['question']}\nAnswer:"
            start = len(tokenizer(prompt)["input_ids"])
            whole = [tokenizer(f"{prompt} {choice.strip()}")["input_ids"] for choice in row["choices"]]
            width = max(map(len, whole))
            ids = torch.tensor([w + [0] * (width - len(w)) for w in whole])  # causal: what stands behind is not seen
            logs = model(ids).logits.log_softmax(-1)
            sums = [float(sum(logs[r, i - 1, w[i]] for i in range(start, len(w)))) for r, w in enumerate(whole)]
            lengths = [len(choice.strip()) for choice in row["choices"]]
            raw += int(np.argmax(sums)) == row["answer"]
            normed += int(np.argmax([s / n for s, n in zip(sums, lengths, strict=True)])) == row["answer"]
    n = len(rows)
    print(
        f"transformers: accuracy {100 * raw / n:.2f}, per character {100 * normed / n:.2f} "
        f"({time.monotonic() - started:.0f} s)"
    )
    print(
        f"difference: {abs(100 * raw / n - found['accuracy']):.2f} and "
        f"{abs(100 * normed / n - found['accuracy_norm']):.2f} points on {n} rows (at most 1)"
    )


def interval(args: argparse.Namespace) -> None:
    """Rows with a difficulty that both models share; the true difference is known."""
    from edgeft.evaluate.metrics import bootstrap

    random = np.random.default_rng(args.seed)
    for rows in (30, 64, 200):
        held = {"right or wrong": 0, "F1-like": 0, "loss": 0}
        for trial in range(args.trials):
            easy = random.beta(0.7, 0.7, rows)
            before, after = random.random(rows) < 0.6 * easy, random.random(rows) < 0.3 + 0.6 * easy
            low, high = bootstrap((after * 1.0 - before).tolist(), draws=1000, seed=trial)[1:]
            held["right or wrong"] += low <= 0.3 <= high
            gain = random.beta(1.0 + 2 * easy, 1.5) - random.beta(0.5 + easy, 1.5)
            low, high = bootstrap(gain.tolist(), draws=1000, seed=trial)[1:]
            held["F1-like"] += low <= args.f1_truth <= high
            tokens = random.integers(2, 12, rows)
            nll = random.gamma(2.0 * tokens, 0.5) - random.gamma(2.0 * tokens, 1.5)
            low, high = bootstrap(nll.tolist(), tokens.tolist(), draws=1000, seed=trial)[1:]
            held["loss"] += low <= -2.0 <= high
        told = ", ".join(f"{name} {100 * count / args.trials:.1f} %" for name, count in held.items())
        print(f"{rows} rows: the 95 % interval holds the true difference in {told} of {args.trials} trials", flush=True)


def main() -> None:
    parser = common.parser(__doc__)
    commands = parser.add_subparsers(required=True)
    first = commands.add_parser("choices")
    first.add_argument("file", type=Path)
    first.add_argument("--rows", type=int, default=570)
    first.add_argument("--model", type=Path)
    first.set_defaults(run=choices)
    second = commands.add_parser("interval")
    second.add_argument("--trials", type=int, default=2000)
    second.add_argument("--seed", type=int, default=0)
    second.set_defaults(run=interval)
    args = parser.parse_args()
    if args.run is interval:  # the mean of beta(1 + 2e, 1.5) - beta(.5 + e, 1.5) over e has no short form
        random = np.random.default_rng(123)
        easy = random.beta(0.7, 0.7, 20_000_000)
        args.f1_truth = float(np.mean((1 + 2 * easy) / (2.5 + 2 * easy) - (0.5 + easy) / (2 + easy)))
    args.run(args)


if __name__ == "__main__":
    main()
