"""A model to score, and its scores on the first rows; it is loaded only for rows whose responses are not stored."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from edgeft import __version__
from edgeft.evaluate.request import Request, Response, Scorer, row_progress
from edgeft.evaluate.responses import SharedResponses, StoredResponses
from edgeft.evaluate.score import Scores, labels_of, make_record
from edgeft.evaluate.suite import Item, Suite
from edgeft.formats.source import model_id
from edgeft.formats.tokenizer import Tokenizer, open_tokenizer
from edgeft.host import cache
from edgeft.plan.limits import MIN_TOKENS
from edgeft.run.events import EvalEvent
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train.build import trained_stack


@dataclass(frozen=True)
class Subject:
    """A model to score: a GGUF file in llama.cpp, anything else in the trainer."""

    who: str  # base or tuned
    source: str
    run: Run | None = None  # with its trained weights in place of those of `source`
    frozen: str = "dense"  # storage of frozen weights in the trainer
    trainer: bool = False
    adapter: str = ""  # a GGUF LoRA adapter on `source`
    room_bytes: int = 0  # memory limit of scoring; 0: the available memory

    @property
    def identity(self) -> str:
        """Changes with the weights, and with what computes them; a copy elsewhere has the same."""
        learned = str(self.run.best) if self.run else self.adapter
        trained = model_id(learned) if learned else ""
        return f"{model_id(self.source)}|{trained}|{self.frozen if self.trainer else 'llama.cpp'}"

    @contextmanager
    def opened(
        self, longest: int, tokens: int = 0, tokenizer: Tokenizer | None = None
    ) -> Iterator[tuple[Scorer, Tokenizer]]:
        """longest: tokens of the longest row with its answer; tokens: of all rows, 0 if no faster copy may be made."""
        tokenizer = tokenizer or open_tokenizer(self.source)
        if not self.trainer:
            from edgeft.evaluate.llamacpp import LlamaFile, with_fast_types

            n_ctx, room = max(2048, 4 * longest), self.room_bytes
            adapter = Path(self.adapter) if self.adapter else None
            with (
                with_fast_types(self.source, tokens, room) as place,
                LlamaFile(place, n_ctx, room_bytes=room, adapter=adapter) as file,
            ):
                yield file, tokenizer
            return
        from edgeft.engine.load import load
        from edgeft.evaluate.stack_scorer import StackScorer

        stack = trained_stack(self.run)[0] if self.run else load(self.source, self.frozen)
        yield StackScorer(stack, tokenizer.eog), tokenizer


@dataclass(frozen=True)
class Rows:
    """The rows that models are compared on; all of them have this vocabulary."""

    items: list[Item]
    suite: Suite
    tokenizer: Tokenizer

    @cached_property
    def labels(self) -> list[str]:
        return labels_of(self.items, self.suite)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each row with its answer."""
        requests, max_new = [item.request for item in self.items], self.suite.eval.max_new_tokens
        return [len(one.prompt) + max([len(o) for o in one.options], default=0) + max_new for one in requests]

    @property
    def copied_tokens(self) -> int:
        """0: no copy of the model with faster types. It rounds differently: all rows of a model are scored with it."""
        tokens = sum(self.lengths) if self.suite.eval.unpack else 0
        return tokens if tokens >= MIN_TOKENS else 0

    def stored(self, subject: Subject, run: Run | None, again: bool = False) -> StoredResponses:
        """Where the responses of a model are stored: nowhere without a run, and in its folder unless it keeps data."""
        max_new = self.suite.eval.max_new_tokens
        if run is None:
            return StoredResponses(None, max_new)
        parts = (__version__, subject.identity, bool(self.copied_tokens))
        key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
        root = cache.folder("eval") if subject.who == "base" and run.recipe.how.keep_data else None
        if root is None:
            return StoredResponses(run.path / "eval" / f"{subject.who}-{key[:16]}.json", max_new, again)
        return SharedResponses(root, key, max_new, again).used_by(run.path, Path(subject.source).name)


class SubjectScores:
    """Scores of one model on the first rows, extended on request. The model stays loaded until `close`."""

    def __init__(
        self,
        subject: Subject,
        rows: Rows,
        stored: StoredResponses,
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.subject, self.rows, self.stored, self.progress, self.clock = subject, rows, stored, progress, clock
        self.scores = Scores()
        self.loads, self.load_s = 0, 0.0  # times that it was loaded, seconds of the last time
        self.computed, self.compute_s = 0, 0.0  # rows
        self.seconds = 0.0  # in all
        self._scorer: Scorer | None = None
        self._opened = ExitStack()
        self._known = [self._read(item.request) for item in rows.items]
        self.extend(self._known.index(None) if None in self._known else len(rows.items))

    @property
    def count(self) -> int:
        return len(self.scores.records)

    @property
    def row_s(self) -> float | None:
        """Seconds of a row; None: not measured."""
        return self.compute_s / self.computed if self.computed else None

    @property
    def is_open(self) -> bool:
        return self._scorer is not None

    def is_stored(self, row: int) -> bool:
        return self._known[row] is not None

    def _read(self, request: Request) -> Response | None:
        response = self.stored.get(request)
        valid = response and max(response.output, default=0) < self.rows.tokenizer.vocab_size
        return response if valid else None

    def extend(self, count: int) -> None:
        """Up to `count` rows in all."""
        rows = self.rows
        missing = [row for row in range(self.count, count) if not self.is_stored(row)]
        if missing:
            computed = self._respond([rows.items[row].request for row in missing])
            for row, response in zip(missing, computed, strict=True):
                self._known[row] = response
        for item, known in zip(rows.items[self.count : count], self._known[self.count : count], strict=True):
            assert known is not None
            self.scores.records.append(make_record(item, known, rows.tokenizer, rows.suite, rows.labels))

    def _respond(self, requests: list[Request]) -> list[Response]:
        began = self.clock()
        with row_progress(self.progress, f"evaluate {self.subject.who} model", len(requests)) as advance:
            if self._scorer is None:
                opened = self.subject.opened(max(self.rows.lengths), self.rows.copied_tokens, self.rows.tokenizer)
                self._scorer = self._opened.enter_context(opened)[0]
                self.loads, self.load_s = self.loads + 1, self.clock() - began
            loaded = self.clock()
            responses = self._scorer.respond(requests, self.rows.suite.eval.max_new_tokens, advance)
        self.computed, self.compute_s = self.computed + len(requests), self.compute_s + self.clock() - loaded
        self.seconds += self.clock() - began
        self.stored.add(requests, responses)
        return responses

    def close(self) -> None:
        """Frees the model: the memory plan counts one at a time."""
        self._scorer = None
        self._opened.close()

    def log(self, run: Run) -> None:
        if self.computed:
            name, seconds = self.rows.suite.name or "qa", round(self.seconds, 2)
            run.log(EvalEvent(name, self.subject.who, self.count, seconds))
