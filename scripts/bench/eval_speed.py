#!/usr/bin/env python3
"""How long scoring takes, beside the loop that most people write: transformers' generate, one row at a time.

    scripts/bench/eval_speed.py DIR [--rows 200] [--model FILE.gguf] [--max-new 32]

DIR holds dev.jsonl with {context, question, answers}. Both answer the same prompts greedily with the same weights, the
loop with the unpacked float32 model; edgeft takes the loss of the reference answers on the way. Exact match and F1 are
computed a second time by a script of its own, which has to find the same.
"""

from __future__ import annotations

import collections
import os
import re
import string
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import common

from edgeft.formats.source import model_source

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does


def independent(output: str, answers: list[str]) -> tuple[float, float]:
    """(exact match, F1), written from SQuAD's description and without edgeft's code."""

    def clean(text: str) -> list[str]:
        text = "".join(ch for ch in text.lower() if ch not in set(string.punctuation))
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    def f1(a: list[str], b: list[str]) -> float:
        if not a or not b:
            return float(a == b)
        common = sum((collections.Counter(a) & collections.Counter(b)).values())
        if common == 0:
            return 0.0
        precision, recall = common / len(a), common / len(b)
        return 2 * precision * recall / (precision + recall)

    words = clean(output)
    return max(float(words == clean(a)) for a in answers), max(f1(words, clean(a)) for a in answers)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("data", type=Path, help="folder with dev.jsonl")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--max-new", type=int, default=32)
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from edgeft.config import DataConfig
    from edgeft.evaluate import compare
    from edgeft.evaluate.suite import load_suite, read_items
    from edgeft.formats.tokenizer import open_tokenizer
    from edgeft.run.progress import Progress

    path = args.model or Path(model_source(None))
    suite = load_suite("qa")
    suite.eval = replace(suite.eval, max_new_tokens=args.max_new)
    tokenizer = open_tokenizer(path)
    data = DataConfig(path=str(args.data / "dev.jsonl"), max_tokens=512)
    items = read_items(suite, data, tokenizer, args.rows)
    print(f"{len(items)} rows, {sum(len(i.request.prompt) for i in items)} prompt tokens, {path.name}", flush=True)

    started, work = time.monotonic(), time.process_time()
    scores = compare.score_subject(compare.Subject("tuned", str(path)), items, suite, Progress())
    ours, our_work = time.monotonic() - started, time.process_time() - work
    figures = f"loss {scores.loss:.4f}, exact match {scores.exact_match:.2f}, F1 {scores.f1:.2f}"
    print(f"edgeft: {ours:.1f} s ({our_work:.1f} s of processor time), {figures}", flush=True)
    again = [independent(r.output or "", r.answers) for r in scores.records]
    exact, f1 = (100 * sum(values) / len(again) for values in zip(*again, strict=True))
    rows_same = all(
        r.exact_match == a and abs((r.f1 or 0.0) - b) < 1e-12 for r, (a, b) in zip(scores.records, again, strict=True)
    )
    print(f"independent script: exact match {exact:.2f}, F1 {f1:.2f}; the same in every row: {rows_same}", flush=True)

    transformers_logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    started, work = time.monotonic(), time.process_time()
    outputs = []
    with torch.no_grad():
        for item in items:
            ids = torch.tensor([item.request.prompt])
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=args.max_new,
                do_sample=False,
                eos_token_id=sorted(tokenizer.eog),
                pad_token_id=max(tokenizer.eos, 0),
            )
            outputs.append(tokenizer.decode(made[0, ids.shape[1] :].tolist()).strip())
    theirs, their_work = time.monotonic() - started, time.process_time() - work
    plain = [independent(output, item.answers) for output, item in zip(outputs, items, strict=True)]
    exact, f1 = (100 * sum(values) / len(plain) for values in zip(*plain, strict=True))
    told = f"exact match {exact:.2f}, F1 {f1:.2f}"
    print(f"transformers generate: {theirs:.1f} s ({their_work:.1f} s of processor time), {told}")
    share = f"{ours / theirs:.2f} of the time, {our_work / their_work:.2f} of the processor time"
    print(f"edgeft takes {share} (at most 0.33)")


if __name__ == "__main__":
    main()
