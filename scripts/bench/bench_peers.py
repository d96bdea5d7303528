#!/usr/bin/env python3
"""The tools that edgeft is measured against, as a careful user would write them. `bench.py` starts this; people do not.

    bench_peers.py train NAME --model FOLDER --tokens tokens.npz --out FOLDER
    bench_peers.py answer NAME …                       # greedy answers of what `train` left in FOLDER

All train on edgeft's own token ids and answer masks, write metrics.jsonl in edgeft's format and done.json at the end.
peft-…: transformers' Trainer, LoRA r=16, alpha 32 on all seven linears of all blocks, 4 rows × 4 accumulated per step,
grouped by length and padded to the longest, AdamW with a cosine. `PEFT` says what they differ in: NF4 weights
(bitsandbytes), bf16 (autocast over float32 weights), gradient checkpointing. Held-out losses are outside of autocast.
mlx-lm: its own trainer, with at most 32 rows, one epoch and 8 held-out rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as edgeft does; before torch is loaded

import common
from bench_meter import hwm_bytes

from edgeft.data import tokens
from edgeft.data.tokens import Encoded
from edgeft.engine import compiled
from edgeft.host import device

RANK, ALPHA = 16, 32
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MICRO_ROWS, ACCUMULATED = 4, 4
EVAL_ROWS = 8  # rows per forward pass without gradients
IGNORED = -100  # the label that cross_entropy leaves out
BF16 = compiled.multiplies_bf16()  # without the instructions, bf16 is slower than float32


class Peer(NamedTuple):
    quantised: bool
    bf16: bool
    checkpointing: bool


PEFT = {
    "peft-lora": Peer(quantised=False, bf16=False, checkpointing=False),
    "peft-lora-bf16": Peer(quantised=False, bf16=True, checkpointing=False),
    "peft-lora-checkpointing": Peer(quantised=False, bf16=BF16, checkpointing=True),
    "peft-qlora": Peer(quantised=True, bf16=BF16, checkpointing=False),
    "peft-qlora-checkpointing": Peer(quantised=True, bf16=BF16, checkpointing=True),
}


def moments(steps: int, validations: int) -> set[int]:
    """Counts of finished steps after which the held-out loss is taken: edgeft's rule for train.validations."""
    return {max(1, round(steps * (i + 1) / validations)) for i in range(validations)}


class Log:
    """metrics.jsonl as edgeft writes it, and one line a validation for people."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self.best = math.inf

    def write(self, **values: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time(), 3), **values}) + "\n")

    def validation(self, step: int, loss: float, began: float) -> bool:
        """True if it is the best so far; untrained does not count."""
        self.write(event="validation", step=step, heldout_loss=loss, seconds=round(time.monotonic() - began, 4))
        print(f"step {step}: held-out loss {loss:.4f}", file=sys.stderr, flush=True)
        better = step > 0 and loss < self.best
        self.best = loss if better else self.best
        return better


# ---------------------------------------------------------------- transformers and PEFT


def load_base(peer: Peer, folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(device.cores())
    if not peer.quantised:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    packed = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if peer.bf16 else torch.float32,
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=packed, device_map={"": "cpu"}
    )


def keep_differentiable(base: Any) -> None:
    """With AVX512-BF16, bitsandbytes (0.50) repacks weights in eval mode for a kernel without a gradient, and does not
    go back: after the first validation most adapters would get no gradient, with no more than a warning."""
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def example(row: Encoded) -> dict[str, list[int]]:
    labels = [int(i) if trained else IGNORED for i, trained in zip(row.ids, row.trained, strict=True)]
    return {"input_ids": row.ids.tolist(), "labels": labels}


def pad(examples: Sequence[dict[str, list[int]]]) -> dict[str, npt.NDArray[np.int64]]:
    """Padded on the right to the longest of them."""
    longest = max(len(e["input_ids"]) for e in examples)
    ids, mask = np.zeros((2, len(examples), longest), np.int64)
    labels = np.full((len(examples), longest), IGNORED, np.int64)
    for i, e in enumerate(examples):
        length = len(e["input_ids"])
        ids[i, :length], labels[i, :length], mask[i, :length] = e["input_ids"], e["labels"], 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def collate(examples: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    import torch

    return {key: torch.from_numpy(values) for key, values in pad(examples).items()}


def heldout_loss(model: Any, examples: Sequence[dict[str, list[int]]]) -> float:
    """Sum of the nats of all targets ÷ their number; the head runs for targets only."""
    import torch
    from torch.nn import functional

    base = model.get_base_model()
    ordered = sorted(examples, key=lambda e: len(e["input_ids"]))
    total, targets = 0.0, 0
    model.eval()
    with torch.no_grad():
        for start in range(0, len(ordered), EVAL_ROWS):
            batch = collate(ordered[start : start + EVAL_ROWS])
            states = base.get_decoder()(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
            labels = batch["labels"][:, 1:]
            chosen = labels != IGNORED
            logits = base.get_output_embeddings()(states[:, :-1][chosen]).float()
            total += float(functional.cross_entropy(logits, labels[chosen], reduction="sum"))
            targets += int(chosen.sum())
    model.train()
    return total / targets


def make_trainer(peer: Peer, model: Any, out: Path, settings: dict[str, Any], **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        bf16=peer.bf16,
        gradient_checkpointing=peer.checkpointing,
        seed=0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
    return Trainer(model, arguments, **more)


def train_peft(peer: Peer, args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import TrainerCallback, set_seed

    train, heldout = ([example(row) for row in rows] for rows in tokens.load(args.tokens))
    set_seed(0)
    base = load_base(peer, args.model)
    base.config.use_cache = False
    if peer.quantised:
        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
        keep_differentiable(base)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LINEARS, task_type="CAUSAL_LM"))
    linear = [
        m.in_features * m.out_features
        for key, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and "lora_" not in key
    ]
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # Plain formula: forward and input gradients of frozen weights, all three products of the adapters. What gradient
    # checkpointing computes a second time does not count.
    flops_per_token = 4 * sum(linear) + 6 * adapters
    log, seen, validations = Log(args.out), [0], args.validations  # seen: padded tokens

    def counting_collate(examples: list[dict[str, list[int]]]) -> dict[str, Any]:
        batch = collate(examples)
        seen[0] += batch["input_ids"].numel()
        return batch

    class Recorder(TrainerCallback):  # type: ignore[misc]
        began, counted = 0.0, 0

        def validate(self, step: int) -> None:
            began = time.monotonic()
            if log.validation(step, heldout_loss(model, heldout), began):
                model.save_pretrained(args.out / "best")

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.after = moments(state.max_steps, validations)
            self.validate(0)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.began = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # accelerate reads one batch ahead: the tokens of a step may be its neighbour's, their sum is right
            count, self.counted = seen[0] - self.counted, seen[0]
            seconds = round(time.monotonic() - self.began, 4)
            log.write(
                event="step", step=state.global_step, tokens=count, seconds=seconds, flops=count * flops_per_token
            )
            if state.global_step in self.after:
                self.validate(state.global_step)

    settings = {
        "learning_rate": args.lr,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,  # a share of the steps
        "num_train_epochs": args.epochs,
        "per_device_train_batch_size": MICRO_ROWS,
        "gradient_accumulation_steps": ACCUMULATED,
        "train_sampling_strategy": "group_by_length",
    }
    more = {"data_collator": counting_collate, "train_dataset": train, "callbacks": [Recorder()]}
    make_trainer(peer, model, args.out / "trainer", settings, **more).train()
    return {
        "settings": {"rank": RANK, "alpha": ALPHA, **peer._asdict(), **settings},
        "products": "bf16" if peer.bf16 else "fp32",
        "trained_parameters": adapters,
    }


def answer(peer: Peer, args: argparse.Namespace) -> dict[str, float | None]:
    """F1 and exact match of greedy answers on the held-out rows, 0 to 100."""
    import torch
    from peft import PeftModel

    from edgeft.evaluate import metrics
    from edgeft.formats.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(args.tokenizer)
    model = PeftModel.from_pretrained(load_base(peer, args.model), str(args.out / "best")).eval()
    asked = [row for row in tokens.load(args.tokens)[1] if row.row.answers and len(tokens.prompt_ids(row))]
    asked.sort(key=lambda row: len(tokens.prompt_ids(row)))
    f1 = exact = 0.0
    for start in range(0, len(asked), EVAL_ROWS):
        rows = asked[start : start + EVAL_ROWS]
        prompts = [tokens.prompt_ids(row).tolist() for row in rows]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])  # padded on the left
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.no_grad():
            made = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=args.max_new,
                eos_token_id=sorted(tokenizer.eog),
                pad_token_id=min(tokenizer.eog),
                use_cache=True,
            )
        for row, output in zip(rows, made[:, longest:].tolist(), strict=True):
            end = next((i for i, token in enumerate(output) if token in tokenizer.eog), len(output))
            text = tokenizer.decode(output[:end]).strip()
            f1 += metrics.f1(text, row.row.answers)
            exact += metrics.exact_match(text, row.row.answers)
    return {"f1": 100 * f1 / len(asked), "exact_match": 100 * exact / len(asked)} if asked else {}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("verb", choices=("train", "answer"))
    parser.add_argument("name", choices=(*PEFT, "mlx-lm"))
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--validations", type=int, default=12)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--tokenizer", help="GGUF file or folder, for answers")
    parser.add_argument("--max-new", type=int, default=32)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.verb == "answer":
        (args.out / "answers.json").write_text(json.dumps(answer(PEFT[args.name], args)))
        return
    if args.name == "mlx-lm":
        import bench_mlx

        done = bench_mlx.train(args)
    else:
        done = train_peft(PEFT[args.name], args)
    (args.out / "done.json").write_text(json.dumps({**done, "peak_bytes": hwm_bytes()}))


if __name__ == "__main__":
    main()
