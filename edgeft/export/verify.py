"""Compares the exported file in llama.cpp with the trainer: same text, same token ids, nearly the same logits.

The trainer's weights are not quantised, so that a type too coarse for the update is detected, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from edgeft.data.forest import Forest
from edgeft.data.tokens import Encoded, prompt_ids
from edgeft.engine.stack import Stack, batch_of
from edgeft.errors import ExportError, ModelError
from edgeft.evaluate.llamacpp import LlamaFile
from edgeft.formats.tokenizer import GgufTokenizer, Tokenizer, render
from edgeft.host import sandbox
from edgeft.plan.limits import BATCH_TOKENS, TARGETS

# llama.cpp quantises activations to 8 bits and keeps an fp16 KV cache, so its logits differ from the trainer's.
# That noise alone, on unchanged files: KL 0.005 to 0.007 and top-1 90 to 98 % (SmolLM2-135M Q4_1, nine times 8 rows),
# 0.007 and 94 % (TinyLlama-1.1B IQ2_XXS, 17 tokens), 0.001 and 88 % (Qwen2.5-1.5B Q4_K_M, 17 tokens). On one SmolLM2
# trained in nine blocks: f16 0.004 and 100 %, q8_0 0.008 and 92 %. So the limit is three times the largest noise.
# Above it (same trained model): one of the nine blocks missing 0.12, rows of q and k not reordered 0.88, the wrong
# blocks 1.8, `keep` on its 4-bit grid, which rounds the update away, 4.9. Rows of q and k not reordered as the only
# error: 0.03 to 0.04 in two blocks, 0.02 to 0.03 in one, so that an error in a single block may pass.
MAX_KL = 0.025

# Types below 8 bits round what was learned, as asked: 0.025 (q4_1) and 0.034 (q4_0) for two blocks changed at random.
MAX_KL_COARSE = 0.05
# Their rounding is below the noise; with `keep` the trainer's own weights are the rounded ones.
FINE = ("", "auto", "keep", "f32", "f16", "bf16", "q8_0")

# Near-ties flip, and with few short rows two tokens must not decide: this only detects gross errors (rows of
# q and k not reordered in nine blocks 64 %, the wrong blocks 44 %, `keep` 18 %).
MIN_TOP1 = 75.0


@dataclass(frozen=True)
class Verification:
    rows: int
    tokens: int  # positions whose logits were compared
    top1: float  # 0..100: positions where both have the same likeliest token
    mean_kl: float  # nats, KL(trainer || llama.cpp)
    same_ids: bool
    same_template: bool


@dataclass(frozen=True)
class Reference:
    """What an exported file is compared with: the trainer's stack, on these rows."""

    stack: Stack
    rows: Sequence[Encoded]
    tokenizer: Tokenizer
    system: str | None = None
    threads: int = 0
    room_bytes: int = 0  # memory that this process may use; 0: what is available


def verify(path: Path, reference: Reference, type_name: str = "", adapter: Path | None = None) -> Verification:
    """Compare, and raise ExportError if the file, with its adapter, does not answer like the trainer."""
    result = compare(path, reference, adapter)
    max_kl = MAX_KL if type_name in FINE else MAX_KL_COARSE
    bug = "this is a bug: please report it"
    if not result.same_template:
        raise ExportError("the exported file renders its chat template unlike the trainer", bug)
    if not result.same_ids:
        raise ExportError("llama.cpp reads other token ids from the exported file than were trained", bug)
    if not (result.top1 >= MIN_TOP1 and result.mean_kl <= max_kl):  # NaN does not pass
        hint = f"`--type {type_name}` is too coarse for what was learned: use --type q8_0 or --type f16"
        if type_name in FINE:
            hint = "try --type f16" if type_name in ("", "auto", "q8_0") else bug
        raise ExportError(
            f"the exported file does not answer like the trained model: top-1 agreement {result.top1:.1f} % "
            f"(at least {MIN_TOP1:.0f} %), mean KL {result.mean_kl:.3f} nats (at most {max_kl})",
            hint,
        )
    return result


def compare(path: Path, reference: Reference, adapter: Path | None = None) -> Verification:
    """The figures, without the thresholds."""
    stack = reference.stack
    rows = [row for row in reference.rows if row.trained[1:].any()]
    if not rows:
        raise ExportError("there is no held-out row to check the exported file with", "give some with data.heldout")
    thin = [_thin(row) for row in rows]
    states = _states(stack, Forest(thin))  # before llama.cpp takes its memory
    stack.options.backend.memory.trim(always=True)
    agree, total, tokens = 0, 0.0, 0
    try:
        longest = max(len(row.ids) for row in rows)
        room = reference.room_bytes
        with LlamaFile(path, longest + 1, reference.threads, 1, room, adapter) as file:
            same_template, same_ids = _same_text(path, file, rows, reference)
            for i, row in enumerate(rows):
                at = np.flatnonzero(thin[i].trained[1:])  # a token is predicted at the position before it
                ours = stack.head.logits(states[i])
                theirs = torch.from_numpy(file.target_logits(row.ids.tolist(), at.tolist()))
                agree += int((ours.argmax(1) == theirs.argmax(1)).sum())
                total += _kl(ours, theirs)
                tokens += len(at)
    except ModelError as error:
        raise ExportError(f"llama.cpp cannot use the exported file: {error.message}", error.hint) from None
    return Verification(len(rows), tokens, 100 * agree / tokens, total / tokens, same_ids, same_template)


def _thin(row: Encoded) -> Encoded:
    """The row with at most TARGETS of its targets."""
    targets = 1 + np.flatnonzero(row.trained[1:])
    if len(targets) > TARGETS:
        targets = targets[np.linspace(0, len(targets) - 1, TARGETS).astype(int)]
    return replace(row, trained=np.isin(np.arange(len(row.ids)), targets))


def _states(stack: Stack, forest: Forest) -> dict[int, torch.Tensor]:
    """By row, the trainer's normed states (n, d) where its targets are predicted."""
    by_row: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for part in forest.micro_batches(range(len(forest.paths)), BATCH_TOKENS):
            _, batch = batch_of(forest, part)
            states = stack.top(stack.trunk(batch, 0), batch, 0)
            for row in part:
                count = len(forest.targets[row])
                by_row[row], states = states[:count].clone(), states[count:]
    return by_row


def _kl(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Sum over positions of KL(ours || theirs), in nats; (n, vocabulary) each. A few at a time: doubles take memory."""
    total = 0.0
    for one, other in zip(ours.split(4), theirs.split(4), strict=True):
        p, q = one.double().log_softmax(1), other.double().log_softmax(1)
        total += float((p.exp() * (p - q)).sum())
    return total


def _same_text(path: Path, file: LlamaFile, rows: Sequence[Encoded], reference: Reference) -> tuple[bool, bool]:
    """(same template, same ids): prompts as llama-cpp-python renders and llama.cpp reads them, and as we do."""
    tokenizer, system = reference.tokenizer, reference.system
    inside = GgufTokenizer(path)
    special = {"eos_token": inside.eos_text, "bos_token": inside.bos_text}
    dated = "strftime_now" in tokenizer.template  # such a prompt changes with the date
    same_template, same_ids = True, True
    for row in rows:
        messages = row.row.messages[:-1]
        if not messages:  # plain text: no template, and the row may be a piece of its text
            text = tokenizer.decode(row.ids.tolist())
            same_ids = same_ids and file.tokenize(text) == tokenizer.encode(text)
            continue
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        try:
            text = sandbox.chat_as_llama_cpp(inside.template, {**special, "messages": messages})
        except (sandbox.Broken, sandbox.Failed) as error:
            raise ExportError(f"llama-cpp-python cannot render the file's chat template: {error}") from None
        ids = file.tokenize(text)
        same_template = same_template and text == render(tokenizer, messages, generate=True)
        same_ids = same_ids and ids == tokenizer.encode(text)
        if not row.cut_tokens and not dated:
            trained = prompt_ids(row)[:-1].tolist()  # the last one may have merged with the answer's first
            same_ids = same_ids and ids[: len(trained)] == trained
    return same_template, same_ids
