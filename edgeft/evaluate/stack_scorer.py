"""The trainer's own model as a scorer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from edgeft.data.forest import Forest
from edgeft.data.rows import Row
from edgeft.data.tokens import Encoded
from edgeft.engine.stack import Stack, batch_of
from edgeft.evaluate.request import Request, Response, RowProgress

TOKENS_PER_BATCH = 2048
LOGITS_PER_BATCH = 256  # × a vocabulary of 50,000 in float32: 50 MB
ANSWERS_PER_BATCH = 16


class StackScorer:
    """Shared prefixes are computed once for likelihoods; greedy answers run in batches."""

    def __init__(self, stack: Stack, stop: frozenset[int]) -> None:
        self.stack, self.stop = stack, stop

    def respond(self, requests: Sequence[Request], max_new: int, progress: RowProgress | None = None) -> list[Response]:
        responses = [Response.empty(request) for request in requests]
        asked = [i for i, request in enumerate(requests) if request.generate and max_new > 0]
        scored = [
            (i, k)
            for i, request in enumerate(requests)
            for k in [*([-1] if request.targets else []), *range(len(request.options))]
        ]
        total, done = len(scored) + len(asked), 0

        def advance(count: int) -> None:  # progress is in rows: every part of a row counts the same
            nonlocal done
            done += count
            if progress:
                progress(done * len(requests) // total, len(requests))

        forest = Forest([_row(requests[i], k) for i, k in scored])
        with torch.no_grad():
            for part in forest.micro_batches(list(range(len(scored))), TOKENS_PER_BATCH):
                _, batch = batch_of(forest, part)
                nll, top = self._token_nll(self.stack.top(self.stack.trunk(batch, 0), batch, 0), batch.targets)
                ends = np.cumsum([len(forest.targets[row]) for row in part])[:-1]
                for row, piece, likeliest in zip(part, np.split(nll, ends), np.split(top, ends), strict=True):
                    i, k = scored[row]
                    if k < 0:
                        responses[i].prompt_nll = float(piece.sum())
                    else:
                        responses[i].option_nll[k] = float(piece.sum())
                        responses[i].option_greedy[k] = bool(likeliest.all())
                advance(len(part))
        asked.sort(key=lambda i: len(requests[i].prompt))  # similar lengths together: little padding
        for begin in range(0, len(asked), ANSWERS_PER_BATCH):
            rows = asked[begin : begin + ANSWERS_PER_BATCH]
            outputs = self.stack.generate([requests[i].prompt for i in rows], max_new, self.stop)
            for i, output in zip(rows, outputs, strict=True):
                responses[i].output = output
            advance(len(rows))
        return responses

    def _token_nll(self, states: torch.Tensor, targets: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """(-log p of each target in nats, True where it is the likeliest token); states (n, d), targets (n,)."""
        nll, top = [], []
        for s, t in zip(states.split(LOGITS_PER_BATCH), targets.split(LOGITS_PER_BATCH), strict=True):
            logits = self.stack.head.logits(s).float()
            nll.append(torch.nn.functional.cross_entropy(logits, t, reduction="none").double().numpy())
            top.append((logits.argmax(1) == t).numpy())
        return np.concatenate([np.zeros(0), *nll]), np.concatenate([np.zeros(0, np.bool_), *top])


def _row(request: Request, option: int) -> Encoded:
    """The prompt with its targets (option -1), or the prompt and one option."""
    ids = np.array(request.prompt + (request.options[option] if option >= 0 else []), np.int32)
    trained = np.zeros(len(ids), np.bool_)
    trained[request.targets if option < 0 else slice(len(request.prompt), None)] = True
    return Encoded(ids, trained, Row([], []))
