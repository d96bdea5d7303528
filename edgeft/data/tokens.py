"""Rows to token ids and a mask of the tokens that are trained.

Ids are always those of the whole rendered conversation, encoded once; an answer is trained whole or its row is dropped.
"""

from __future__ import annotations

import contextlib
import json
import zipfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeft.data.rows import Row
from edgeft.errors import DataError, RunError
from edgeft.formats.tokenizer import Tokenizer, render
from edgeft.host.files import atomic_write

Messages = list[dict[str, str]]
Dropped = list[tuple[str, str]]  # (source, reason)


@dataclass
class Encoded:
    ids: npt.NDArray[np.int32]  # (T,); nothing stands after the last trained token
    trained: npt.NDArray[np.bool_]  # (T,); True where the token is a target
    row: Row
    cut_tokens: int = 0  # tokens of the context, or of the oldest turns, that were removed


def encode_rows(
    rows: Sequence[Row], tokenizer: Tokenizer, max_tokens: int, system: str | None = None
) -> tuple[list[Encoded], Dropped]:
    """The rows that fit, and (source, reason) of those that do not; an error if none does."""
    encoder = Encoder(tokenizer, max_tokens, system)
    encoded = encoder.encode(rows)
    if rows and not encoded:
        if encoder.shortest is None:
            raise DataError(f"no row can be used; {encoder.dropped[0][0]}: {encoder.dropped[0][1]}")
        hint = f"the shortest needs {encoder.shortest}: `--set data.max_tokens={encoder.shortest}`"
        raise DataError(f"all {len(rows)} rows are longer than data.max_tokens={max_tokens}", hint)
    return encoded, encoder.dropped


def prompt_ids(encoded: Encoded) -> npt.NDArray[np.int32]:
    """The ids before the last trained span: what the model is given to answer."""
    untrained = np.flatnonzero(~encoded.trained)
    return encoded.ids[: untrained[-1] + 1 if len(untrained) else 0]


def common_prefix(a: Any, b: Any) -> int:
    """Length of the common prefix of two lists, texts or arrays."""
    n = min(len(a), len(b))
    if isinstance(a, np.ndarray):
        differs = np.flatnonzero(a[:n] != b[:n])
        return int(differs[0]) if len(differs) else n
    return n if a[:n] == b[:n] else next(i for i in range(n) if a[i] != b[i])


class Encoder:
    """Encodes rows with one tokenizer and limit; collects the dropped rows."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, system: str | None) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.system = system
        self.dropped: Dropped = []
        self.shortest: int | None = None  # tokens of the shortest row that was dropped as too long
        self._end_texts = tuple(filter(None, map(tokenizer.piece, tokenizer.eog)))
        self._tail = 0  # tokens that the template puts after the end of an answer
        sample = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        with contextlib.suppress(DataError):
            self._tail = self._length(sample) - len(self._tokens(sample)[0])

    def encode(self, rows: Sequence[Row]) -> list[Encoded]:
        encoded: list[Encoded] = []
        run: list[Row] = []  # paragraphs that follow each other and still fit together
        size = 0
        for row in rows:
            if row.text is None:
                encoded += self._conversation(row)
                continue
            tokens = len(self.tokenizer.encode(row.text)) + 2  # and the blank line
            if run and (not row.follows or row.follows != run[-1].source or size + tokens > self.max_tokens):
                encoded += self._plain(run)
                run, size = [], 0
            run.append(row)
            size += tokens
        return encoded + self._plain(run)

    def _plain(self, run: list[Row]) -> list[Encoded]:
        """Pieces of max_tokens. Each begins with the last token of the one before, so that every token but the
        text's first is trained once."""
        if not run:
            return []
        text = "\n\n".join(row.text or "" for row in run)
        ids = np.array(self.tokenizer.encode(text), np.int32)
        if len(ids) < 2:
            self.dropped.append((run[0].source, "a single token, nothing to predict"))
        row = run[0] if len(run) == 1 else Row([], [], text=text, source=run[0].source)
        starts = range(0, len(ids) - 1, self.max_tokens - 1)
        pieces = [ids[start : start + self.max_tokens] for start in starts]
        return [Encoded(piece, np.arange(len(piece)) > 0, row) for piece in pieces]

    def _conversation(self, row: Row) -> list[Encoded]:
        messages = row.messages
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        try:
            fitted = self._fit(row, messages)
        except DataError as error:  # the template refuses this conversation
            self.dropped.append((row.source, error.message))
            return []
        if fitted is None:
            part = "context" if row.context else "earlier turns"
            reason = f"longer than data.max_tokens={self.max_tokens}, even without its {part}"
            self.dropped.append((row.source, reason))
            return []
        ids, trained, cut = fitted
        return [Encoded(np.array(ids, np.int32), np.array(trained, np.bool_), row, cut)]

    def _fit(self, row: Row, messages: Messages) -> tuple[list[int], list[bool], int] | None:
        """(ids, trained, tokens cut), or None if it cannot fit."""
        chosen, cut = self._last_turns(messages)
        ids, trained = self._tokens(chosen)
        whole = len(ids) + cut
        if len(ids) > self.max_tokens and row.context:
            ids, trained = self._cut_context(row.context, chosen, ids, trained)
        if len(ids) > self.max_tokens:
            self.shortest = min(whole, self.shortest or whole)
            return None
        return ids, trained, whole - len(ids)

    def _last_turns(self, messages: Messages) -> tuple[Messages, int]:
        """A conversation without the oldest turns that do not fit, its system message kept; and the tokens removed."""
        system = messages[: messages[0]["role"] == "system"]
        starts = [i for i, message in enumerate(messages) if message["role"] == "user"][1:]
        if not starts or (whole := self._length(messages)) <= self.max_tokens:
            return messages, 0
        fits = bisect_left(starts, True, key=lambda start: self._length(system + messages[start:]) <= self.max_tokens)
        chosen = system + messages[starts[min(fits, len(starts) - 1)] :]
        return chosen, whole - self._length(chosen)

    def _length(self, messages: Messages) -> int:
        return len(self.tokenizer.encode(render(self.tokenizer, messages, generate=False))) - self._tail

    def _cut_context(
        self, context: str, messages: Messages, ids: list[int], trained: list[bool]
    ) -> tuple[list[int], list[bool]]:
        """Cuts tokens from the end of the context; the result is too long if that is not enough."""
        encode = self.tokenizer.encode
        asked = next(i for i, message in enumerate(messages) if message["role"] == "user")
        before, _, after = messages[asked]["content"].partition(context)
        keep = len(encode(context))
        while len(ids) > self.max_tokens:
            keep -= len(ids) - self.max_tokens
            end = bisect_right(range(len(context) + 1), keep, key=lambda end: len(encode(context[:end]))) - 1
            if end < 1 or not context[:end].strip():
                break
            content = before + context[:end].rstrip() + after
            messages = [*messages[:asked], {"role": "user", "content": content}, *messages[asked + 1 :]]
            ids, trained = self._tokens(messages)
        return ids, trained

    def _tokens(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Ids of the whole conversation up to the end of its last answer, and which of them are answers."""
        tokenizer, eog = self.tokenizer, self.tokenizer.eog
        text = render(tokenizer, messages, generate=False)
        ids = tokenizer.encode(text)

        def token_at(place: int) -> int:
            return common_prefix(ids, tokenizer.encode(text[:place]))

        trained = [False] * len(ids)
        end = 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            begin = common_prefix(text, render(tokenizer, messages[:i], generate=True)) if i else 0
            first = token_at(begin)
            content = message["content"].strip()
            at = text.find(content, begin)
            stop = at + len(content) if at >= 0 else len(text.rstrip())
            last = i == len(messages) - 1
            # An end token that is part of the answer's own text does not end the answer.
            search = token_at(stop) if any(mark in content for mark in self._end_texts) else first
            limit = len(ids) if last else self._turn_end(text, messages[: i + 1], stop, token_at)
            end = next((j + 1 for j in range(search, limit) if ids[j] in eog), 0)
            if not end:  # the template does not end an answer
                end = token_at(stop)
                if last and tokenizer.eos >= 0:
                    ids = [*ids[:end], tokenizer.eos]
                    end += 1
            trained[first:end] = [True] * (end - first)
        return ids[:end], trained[:end]

    def _turn_end(self, text: str, messages: Messages, stop: int, token_at: Callable[[int], int]) -> int:
        """The token where the turn after `messages` begins. Some templates render an earlier answer unlike the
        last one; then the next end token counts, wherever it is."""
        shown = common_prefix(text, render(self.tokenizer, messages, generate=False))
        return token_at(shown if shown >= stop else len(text))


def save(path: Path, train: list[Encoded], heldout: list[Encoded]) -> None:
    """One .npz without pickles, written atomically."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for side, rows in (("train", train), ("heldout", heldout)):
        records = [asdict(encoded.row) | {"text": None} for encoded in rows]  # a text row's text is its ids
        arrays[f"{side}_ids"] = np.concatenate([np.zeros(0, np.int32), *(encoded.ids for encoded in rows)])
        arrays[f"{side}_trained"] = np.concatenate([np.zeros(0, np.bool_), *(encoded.trained for encoded in rows)])
        arrays[f"{side}_ends"] = np.cumsum([len(encoded.ids) for encoded in rows], dtype=np.int64)
        arrays[f"{side}_cut"] = np.array([encoded.cut_tokens for encoded in rows], np.int32)
        arrays[f"{side}_rows"] = np.frombuffer(json.dumps(records).encode(), np.uint8)
    with atomic_write(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def load(path: Path, texts: bool = True) -> tuple[list[Encoded], list[Encoded]]:
    """(train, heldout) as they were saved; without `texts` ids and masks alone, which is all that training needs."""
    try:
        with zipfile.ZipFile(path) as packed:  # written uncompressed: no part can be larger than the file
            if sum(entry.file_size for entry in packed.infolist()) > path.stat().st_size:
                raise ValueError("its parts are larger than the whole")
        with np.load(path, allow_pickle=False) as arrays:
            return _unpack(arrays, "train", texts), _unpack(arrays, "heldout", texts)
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}", "prepare the rows again") from None
    except Exception as error:  # zipfile and numpy raise a dozen kinds on damaged files
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise RunError(f"{path} is damaged: {reason}", "delete it, and the rows are prepared again") from None


def _unpack(arrays: Any, side: str, texts: bool) -> list[Encoded]:
    ids, trained, cut = (arrays[f"{side}_{name}"] for name in ("ids", "trained", "cut"))
    records = json.loads(arrays[f"{side}_rows"].tobytes()) if texts else [{"messages": [], "answers": []}] * len(cut)
    rows = [_row(record) for record in records]
    ends = [0, *arrays[f"{side}_ends"].tolist()]
    sizes = {len(rows), len(ends) - 1, len(cut)}
    if len(sizes) > 1 or ends != sorted(ends) or not len(ids) == len(trained) == ends[-1]:
        raise ValueError("its parts do not fit together")
    if (ids.dtype, trained.dtype) != (np.int32, np.bool_) or (len(ids) and ids.min() < 0):
        raise ValueError("its token ids are invalid")
    spans = zip(ends, ends[1:], rows, cut.tolist(), strict=False)
    return [Encoded(ids[start:end], trained[start:end], row, removed) for start, end, row, removed in spans]


def _row(record: dict[str, Any]) -> Row:
    row = Row(**record)
    texts = [*row.answers, row.context, row.source, row.follows, *([] if row.text is None else [row.text])]
    for message in row.messages:
        texts += [message["role"], message["content"]]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a row holds a value that is not text")
    return row
