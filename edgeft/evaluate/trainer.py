"""The trainer's own model as something that can be scored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from edgeft.data.forest import Forest
from edgeft.data.rows import Row
from edgeft.data.tokens import Encoded
from edgeft.engine.batch import batch_of
from edgeft.engine.stack import Stack
from edgeft.evaluate.ask import Ask, Progress, Response

TOKENS_AT_A_TIME = 2048
LOGITS_AT_A_TIME = 256  # × a vocabulary of 50,000 in float32: 50 MB
ANSWERS_AT_A_TIME = 16


class StackScorer:
    """Likelihoods on shared prefixes once; greedy answers in batches."""

    def __init__(self, stack: Stack, stop: frozenset[int]) -> None:
        self.stack, self.stop = stack, stop

    def ask(self, asks: Sequence[Ask], max_new: int, progress: Progress | None = None) -> list[Response]:
        said = [Response(0.0, [0.0] * len(ask.options), [False] * len(ask.options)) for ask in asks]
        asked = [i for i, ask in enumerate(asks) if ask.generate and max_new > 0]
        scored = [(i, k) for i, ask in enumerate(asks) for k in ([-1] if ask.targets else []) + list(_places(ask))]
        total, done = len(scored) + len(asked), 0

        def advance(count: int) -> None:  # progress is in rows: what each row needs counts alike
            nonlocal done
            done += count
            if progress:
                progress(done * len(asks) // total, len(asks))

        forest = Forest([_row(asks[i], k) for i, k in scored])
        with torch.no_grad():
            for part in forest.micro_batches(list(range(len(scored))), TOKENS_AT_A_TIME):
                _, batch = batch_of(forest, part)
                nll, top = self._surprises(self.stack.top(self.stack.trunk(batch, 0), batch, 0), batch.targets)
                ends = np.cumsum([len(forest.targets[row]) for row in part])[:-1]
                for row, piece, likeliest in zip(part, np.split(nll, ends), np.split(top, ends), strict=True):
                    i, k = scored[row]
                    if k < 0:
                        said[i].prompt_nll = float(piece.sum())
                    else:
                        said[i].option_nll[k] = float(piece.sum())
                        said[i].option_greedy[k] = bool(likeliest.all())
                advance(len(part))
        asked.sort(key=lambda i: len(asks[i].prompt))  # like lengths together: little padding
        for begin in range(0, len(asked), ANSWERS_AT_A_TIME):
            rows = asked[begin : begin + ANSWERS_AT_A_TIME]
            outputs = self.stack.generate([asks[i].prompt for i in rows], max_new, self.stop)
            for i, output in zip(rows, outputs, strict=True):
                said[i].output = output
            advance(len(rows))
        return said

    def _surprises(self, states: torch.Tensor, targets: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """-log p of each target in nats, and whether it is the likeliest token; states (n, d), targets (n,)."""
        nll, top = [], []
        for s, t in zip(states.split(LOGITS_AT_A_TIME), targets.split(LOGITS_AT_A_TIME), strict=True):
            logits = self.stack.head.logits(s).float()
            nll.append(torch.nn.functional.cross_entropy(logits, t, reduction="none").double().numpy())
            top.append((logits.argmax(1) == t).numpy())
        return np.concatenate([np.zeros(0), *nll]), np.concatenate([np.zeros(0, np.bool_), *top])


def _places(ask: Ask) -> range:
    return range(len(ask.options))


def _row(ask: Ask, option: int) -> Encoded:
    """The prompt with its targets (-1), or with one option behind it."""
    ids = np.array(ask.prompt + (ask.options[option] if option >= 0 else []), np.int32)
    trained = np.zeros(len(ids), np.bool_)
    trained[ask.targets if option < 0 else slice(len(ask.prompt), None)] = True
    return Encoded(ids, trained, Row([], []))
