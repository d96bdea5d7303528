"""mlx-lm's own LoRA trainer on its CPU build, with at most 32 rows, one epoch and 8 held-out rows: about 5 tokens/s.

Ids, masks and log are those of the other peers (bench_peers.py, which calls this).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from bench_peers import ACCUMULATED, ALPHA, IGNORED, LINEARS, MICRO_ROWS, RANK, Log, example, pad
from mlx import optimizers
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.tuner.trainer import TrainingArgs, evaluate
from mlx_lm.tuner.trainer import train as mlx_train
from mlx_lm.tuner.utils import linear_to_lora_layers

from edgeft.data import tokens
from edgeft.data.tokens import Encoded

ROWS, HELDOUT_ROWS, EPOCHS = 32, 8, 1.0


def train(args: argparse.Namespace) -> dict[str, Any]:
    rows, heldout = tokens.load(args.tokens)
    rows, heldout = rows[:ROWS], heldout[:HELDOUT_ROWS]
    size = min(MICRO_ROWS, len(rows))
    epochs = min(args.epochs, EPOCHS)
    log, seen = Log(args.out), [0]

    def batches(dataset: list[Encoded], batch_size: int, *_: Any, loop: bool = False, **__: Any) -> Iterator[Any]:
        """(ids, labels), neighbours in length together; the masks are edgeft's, where mlx-lm's adds a padding token."""
        ordered = [example(row) for row in sorted(dataset, key=lambda row: len(row.ids))]
        groups = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
        while True:
            for i in np.random.permutation(len(groups)):
                batch = pad(groups[i])
                seen[0] += batch["input_ids"].size
                yield mx.array(batch["input_ids"], mx.int32), mx.array(batch["labels"], mx.int32)
            if not loop:
                return

    def loss(model: Any, ids: Any, labels: Any) -> tuple[Any, Any]:
        targets = labels[:, 1:]
        mask = targets != IGNORED
        nats = nn.losses.cross_entropy(model(ids[:, :-1]), mx.maximum(targets, 0)) * mask
        return nats.astype(mx.float32).sum() / mask.sum(), mask.sum()

    mx.disable_compile()  # mlx 0.32.4's CPU build fails in mlx-lm's compiled step: `IndexError: _Map_base::at`
    np.random.seed(0)
    mx.random.seed(0)
    model: Any = load(args.model)[0]
    model.set_dtype(mx.float32)
    model.freeze()
    keys = [f"self_attn.{n}" for n in LINEARS[:4]] + [f"mlp.{n}" for n in LINEARS[4:]]
    linear_to_lora_layers(model, len(model.layers), {"rank": RANK, "scale": ALPHA / RANK, "dropout": 0.0, "keys": keys})
    passes = max(1, math.ceil(epochs * math.ceil(len(rows) / size)))

    def validate(step: int) -> None:
        began = time.monotonic()
        found = evaluate(model, heldout, size, -1, loss=loss, iterate_batches=batches)
        log.validation(step, found, began)

    validate(0)
    seen[0], began = 0, time.monotonic()
    accumulated = min(ACCUMULATED, passes)
    mlx_train(
        model,
        optimizers.AdamW(learning_rate=args.lr),
        rows,
        args=TrainingArgs(
            batch_size=size,
            iters=passes,
            grad_accumulation_steps=accumulated,
            steps_per_save=passes + 1,
            adapter_file=str(args.out / "adapters.safetensors"),
        ),
        loss=loss,
        iterate_batches=batches,
    )
    trained: Any = tree_flatten(model.trainable_parameters())
    adapters = sum(p.size for _, p in trained)
    log.write(event="step", step=passes, tokens=seen[0], seconds=round(time.monotonic() - began, 4))
    validate(passes)
    return {
        "settings": {
            "rows": len(rows), "dev_rows": len(heldout), "epochs": epochs, "rank": RANK, "alpha": ALPHA,
            "learning_rate": args.lr, "micro_rows": size, "accumulated": accumulated, "compiled": False,
        },
        "trained_parameters": adapters,
    }  # fmt: skip
