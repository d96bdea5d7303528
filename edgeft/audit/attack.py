"""The audit: each message that a device would send, attacked by a server that knows the model, beside a guess."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgeft.audit.answers import answer_tokens
from edgeft.audit.match import match
from edgeft.audit.score import Score, score
from edgeft.audit.search import Found, Known, Search
from edgeft.audit.sent import Model, Noise, Tensors, parse_send, restricted
from edgeft.audit.words import setting_name
from edgeft.config import Recipe
from edgeft.data.rows import Row, question_row
from edgeft.data.tokens import Encoded, Encoder, common_prefix
from edgeft.errors import ConfigError, DataError
from edgeft.formats.tokenizer import Tokenizer
from edgeft.run.progress import Progress

CANARY = 8  # random letters and digits
GUESS_TOKENS = 256
FIRST = 0  # the token from which a guess begins, without a template
SHOWN, SHOWN_TOKENS = 3, 32  # rows whose readings are kept in the result, and tokens without order


@dataclass(frozen=True)
class Request:
    """rows: training rows; counts: rows in one gradient; epoch: the update of a local epoch, too."""

    recipe: Recipe
    rows: Sequence[Encoded]
    counts: tuple[int, ...] = (1, 4, 16)
    send: str = "dense"
    noise: Noise | None = None
    epoch: bool = True
    match_steps: int = 0
    seed: int = 0


def parse_counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise ConfigError(f"`--rows {text}` is not a list of numbers from 1 on", "for example `--rows 1,4,16`")
    return counts


def run(request: Request, tokenizer: Tokenizer, progress: Progress) -> dict[str, Any]:
    """The figures of every setting, and what was read."""
    return Audit(request, tokenizer, progress).run()


class Audit:
    """One model, and the messages of one request."""

    def __init__(self, request: Request, tokenizer: Tokenizer, progress: Progress) -> None:
        self.request, self.tokenizer, self.progress = request, tokenizer, progress
        encoder = Encoder(tokenizer, request.recipe.data.max_tokens, request.recipe.data.system)
        self.rows, self.canary = _with_canary(list(request.rows[: max(request.counts)]), encoder, request.seed)
        if len(self.rows) < max(request.counts):
            raise DataError(f"{len(self.rows)} rows can be used, and --rows asks for {max(request.counts)}")
        self.model = Model(request.recipe, self.rows, parse_send(request.send))
        prefix, end = _template(encoder, self.rows)
        stack, cut = self.model.stack, self.model.scheme.cut
        vocabulary = min(tokenizer.vocab_size, stack.head.packed.rows)
        self.known = Known(stack, cut, vocabulary, prefix, end, max(len(row.ids) for row in self.rows))
        # greedily, what the model alone expects a row to be
        self.guessed = stack.generate([list(prefix) or [FIRST]], GUESS_TOKENS, frozenset())[0]

    def run(self) -> dict[str, Any]:
        request, model = self.request, self.model
        kinds = [("gradient", count) for count in request.counts]
        kinds += [("epoch", max(request.counts))] if request.epoch else []
        self.progress.stage("audit", len(kinds))
        settings = []
        for kind, count in kinds:
            settings.append(self._setting(kind, self.rows[:count]))
            self.progress.advance(1, setting_name(settings[-1]))
        self.progress.end()
        return {
            "recipe": request.recipe.name,
            "model": request.recipe.model.path,
            "cut": model.scheme.cut,
            "depth": model.stack.depth,
            "trained_parameters": sum(p.numel() for p in model.parameters.values()),
            "send": request.send,
            "match_steps": request.match_steps,
            "dp": None if request.noise is None else asdict(replace(request.noise, noise=request.noise.multiplier)),
            "settings": settings,
        }

    def _setting(self, kind: str, rows: list[Encoded]) -> dict[str, Any]:
        sent = self.model.gradient(rows) if kind == "gradient" else self.model.epoch(rows)
        sent = restricted(sent, self.model.support)
        if self.request.noise is not None:
            sent = restricted(self.request.noise.apply(sent, self.request.seed), self.model.support)
        found, attack = self._read(sent, rows, kind)
        wanted = [self._private(row) for row in rows]
        reached, best = score(wanted, found.rows, found.bag, self.tokenizer)
        guess: Score = score(wanted, [self.guessed[: len(row)] for row in wanted], [], self.tokenizer)[0]
        shown = list(zip(wanted, best, strict=True))[:SHOWN]
        return {
            "kind": kind,
            **asdict(reached),
            "row_tokens": sum(map(len, wanted)),
            "attack": attack,
            "how": found.how,
            "canary_found": any(self.canary in self.tokenizer.decode(one) for one in found.rows),
            "guess": asdict(guess),
            "answers": self._answers(sent, rows),
            "read": [{"row": self.tokenizer.decode(a), "read": self.tokenizer.decode(b)} for a, b in shown],
            "bag": [self.tokenizer.piece(token) for token in found.bag[:SHOWN_TOKENS]],
        }

    def _private(self, row: Encoded) -> list[int]:
        """Without the template's beginning, and without the last token of a plain text: no gradient comes from it."""
        ids: list[int] = row.ids[len(self.known.prefix) :].tolist()
        return ids if self.known.end is not None else ids[:-1]

    def _read(self, sent: Tensors, rows: list[Encoded], kind: str) -> tuple[Found, str]:
        """By the span of the gradients; where that is not certain, by matching, if it was asked for."""
        search = Search(self.known, sent, len(rows))
        if self.request.match_steps and len(rows) == 1 and kind == "gradient" and not search.certain:
            return match(self.model, self.known, sent, rows[0], self.guessed, self.request.match_steps), "matching"
        found = search.run()
        return found, "span" if found.rows or found.bag else "none"

    def _answers(self, sent: Tensors, rows: list[Encoded]) -> dict[str, Any]:
        """Different tokens of the answers among those that the last block shows, and among as many of the guess."""
        true = {int(token) for row in rows for token in row.ids[row.trained]} - {self.known.end}
        listed = [t for t in answer_tokens(sent, self.known.stack, self.known.vocabulary) if t != self.known.end]
        pieces = [self.tokenizer.piece(token) for token in listed]
        guess = list(dict.fromkeys(self.guessed))[: len(listed)]
        return {"of": len(true), "seen": len(true & set(listed)), "guess": len(true & set(guess)), "listed": pieces}


def _with_canary(rows: list[Encoded], encoder: Encoder, seed: int) -> tuple[list[Encoded], str]:
    """The first row, with a random string that no model can guess: after what the user says, or before a plain text."""
    draw = random.Random(seed)
    canary = "".join(draw.choice(string.ascii_lowercase + string.digits) for _ in range(CANARY))
    row = rows[0].row
    asked = [n for n, message in enumerate(row.messages) if message["role"] == "user"]
    if asked:
        messages = [dict(message) for message in row.messages]
        messages[asked[-1]]["content"] += f" {canary}"
        changed = replace(row, messages=messages)
    else:
        changed = Row([], [], text=f"{canary} {encoder.tokenizer.decode(rows[0].ids)}")
    planted = encoder.encode([changed])
    if not planted or canary not in encoder.tokenizer.decode(planted[0].ids):
        return rows, canary  # too long: nothing can be found, which the figures say
    return [planted[0], *rows[1:]], canary


def _template(encoder: Encoder, rows: Sequence[Encoded]) -> tuple[tuple[int, ...], int | None]:
    """(tokens with which every conversation begins, the one that ends it), as far as the rows have them."""
    one, other = encoder.encode([question_row("x", ["y"]), question_row("7 q", ["z"])])
    shared = min(common_prefix(one.ids, row.ids) for row in (other, *rows))
    end = int(one.ids[-1])
    return tuple(one.ids[:shared].tolist()), end if all(int(row.ids[-1]) == end for row in rows) else None
