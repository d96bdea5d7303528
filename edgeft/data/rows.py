"""Records of any known format to rows of one shape: a conversation, or plain text.

The same content always lands on the same side of the split, and rows on one context are never on both sides.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeft.config import DataConfig, exists, place
from edgeft.data.files import ROW_HINT, Paragraph, Source, Unusable, find
from edgeft.errors import DataError


@dataclass
class Row:
    messages: list[dict[str, str]]  # role and content; the last one is the assistant's
    answers: list[str]  # accepted answers; the first is the trained one
    context: str = ""  # the part of the first user message that may be cut; "" if none
    text: str | None = None  # self-supervised row; no messages then
    source: str = ""  # "train.jsonl:12"
    follows: str = ""  # source of the paragraph before this one in the same text file; they may be joined

    @property
    def key(self) -> str:
        """Decides the side of the split: the context, else the first question, else the text."""
        first = next((m["content"] for m in self.messages if m["role"] == "user"), "")
        return " ".join((self.context or first or self.text or "").split())


@dataclass
class Dataset:
    train: list[Row]
    heldout: list[Row]
    format: str
    files: list[str]
    split: str  # how the held-out rows were chosen, for display
    skipped: list[tuple[str, str]] = field(default_factory=list)  # (source, reason)


def _finite(value: Any) -> bool:
    """JSON as Python reads it knows NaN and 1e999."""
    return not isinstance(value, float) or math.isfinite(value)


def _text(record: dict[str, Any], *names: str, what: str = "", optional: bool = False) -> str:
    """The first of these columns that is there, as text without space around it."""
    name = next((n for n in names if record.get(n) is not None), names[0])
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (str, int, float, type(None))) or not _finite(value):
        raise Unusable(f"`{name}` is not text")
    text = "" if value is None else str(value).strip()
    if not text and not optional:
        raise Unusable(f"{what or name} is empty")
    return text


def _answers(value: Any) -> list[str]:
    """A string, a number, a list of either, or SQuAD's {"text": [...]} or [{"text": ...}]."""
    if isinstance(value, dict):
        value = value.get("text")
    items = value if isinstance(value, list) else [value]
    items = [item.get("text") if isinstance(item, dict) else item for item in items]
    texts = [str(item).strip() for item in items if isinstance(item, (str, int, float)) and _finite(item)]
    kept = list(dict.fromkeys(text for text in texts if text))
    if not kept:
        raise Unusable("answer is empty")
    return kept


def question_row(user: str, answers: list[str], context: str = "") -> Row:
    return Row([{"role": "user", "content": user}, {"role": "assistant", "content": answers[0]}], answers, context)


ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant"}


def _messages(items: Any) -> list[dict[str, str]]:
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise Unusable("the conversation is not a list of messages")
    messages = []
    for item in items:
        role = str(item.get("role", item.get("from", ""))).lower()
        role = ROLES.get(role, role)
        content = item.get("content", item.get("value"))
        if isinstance(content, list):  # [{"type": "text", "text": ...}]
            content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
        if role not in ("system", "user", "assistant"):
            raise Unusable(f"role `{role}` is not known")
        if not isinstance(content, str):
            raise Unusable("a message has no text")
        messages.append({"role": role, "content": content})
    return messages


def _chat(record: dict[str, Any]) -> Row:
    messages = _messages(record.get("messages", record.get("conversations", record.get("conversation"))))
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()  # these have no answer
    if not any(m["role"] == "user" for m in messages):
        raise Unusable("no user message with an answer after it")
    if not messages[-1]["content"].strip():
        raise Unusable("answer is empty")
    if messages[0]["role"] != "system" and isinstance(record.get("system"), str) and record["system"].strip():
        messages.insert(0, {"role": "system", "content": record["system"]})
    return Row(messages, [messages[-1]["content"].strip()])


def _question(record: dict[str, Any]) -> Row:
    question = _text(record, "question")
    context = _text(record, "context", "passage", optional=True)
    answer, choices = record.get("answers", record.get("answer")), record.get("choices")
    if isinstance(choices, list) and type(answer) is int and 0 <= answer < len(choices):  # the answer is an index
        question, answer = "\n".join([question, *(f"- {choice}" for choice in choices)]), choices[answer]
    return question_row(f"{context}\n\n{question}" if context else question, _answers(answer), context)


def _instruction(record: dict[str, Any]) -> Row:
    instruction, given = _text(record, "instruction"), _text(record, "input", optional=True)
    answer = _text(record, "output", "response", what="answer")
    return question_row(f"{instruction}\n\n{given}" if given else instruction, [answer], given)


def _prompt(record: dict[str, Any]) -> Row:
    asked, answer = record.get("prompt"), record.get("completion", record.get("response"))
    if isinstance(asked, list):  # both sides as messages
        said = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
        return _chat({"messages": asked + said})
    user = _text(record, "prompt", "query", "input")
    return question_row(user, [_text(record, "completion", "response", "output", what="answer")])


def _label(record: dict[str, Any]) -> Row:
    text = _text(record, "text", "sentence")
    return question_row(text, [_text(record, "label", "category", "intent", what="answer")])


def _plain(record: dict[str, Any]) -> Row:
    return Row([], [], text=_text(record, "text", "content"))


# name, columns (one of each group has to be there), converter; the first that matches counts
FORMATS: tuple[tuple[str, tuple[str, ...], Callable[[dict[str, Any]], Row]], ...] = (
    ("chat messages", ("messages|conversations|conversation",), _chat),
    ("instruction/input/output", ("instruction", "output|response"), _instruction),
    ("question/answer", ("question", "answer|answers"), _question),
    ("prompt/completion", ("prompt|query|input", "completion|response|output"), _prompt),
    ("text/label", ("text|sentence", "label|category|intent"), _label),
    ("text", ("text|content",), _plain),
)
FORMATS_HINT = "known: messages; prompt + completion; question + answer; instruction + output; text + label; text"


def _matches(record: dict[str, Any], columns: tuple[str, ...]) -> bool:
    return all(any(name in record for name in group.split("|")) for group in columns)


class Reader:
    """Turns records into rows; a file's format is that of its first usable record."""

    def __init__(self) -> None:
        self.formats: list[str] = []
        self.skipped: list[tuple[str, str]] = []

    def rows(self, source: Source) -> list[Row]:
        rows: list[Row] = []
        chosen = ""  # the format, once a record was usable
        columns: dict[str, None] = {}  # seen in records of no known format
        matched, skipped = False, len(self.skipped)
        for where, record in source.records:
            if isinstance(record, Paragraph):
                chosen = "text"
                rows.append(Row([], [], text=record.text, source=where, follows=record.follows))
                continue
            try:
                if isinstance(record, Unusable):
                    raise record
                if not isinstance(record, dict):
                    raise Unusable("not an object with named columns")
                record = {str(key).strip().lower(): value for key, value in record.items()}
                known = [item for item in FORMATS if chosen in ("", item[0]) and _matches(record, item[1])]
                if not known:
                    columns.update(dict.fromkeys(record))
                    raise Unusable(f"does not have the columns of {chosen}" if chosen else "no known columns")
                matched = True
                row = known[0][2](record)
            except (Unusable, RecursionError) as reason:
                self.skipped.append((where, str(reason)))
                continue
            chosen, row.source = known[0][0], where
            rows.append(row)
        if rows:
            self.formats += [chosen] if chosen not in self.formats else []
            return rows
        reasons = self.skipped[skipped:]
        if not reasons:
            raise DataError(f"{source.name} holds no rows", ROW_HINT)
        if columns and not matched:
            raise DataError(f"{source.name} has no usable column; found: {', '.join(columns)[:200]}", FORMATS_HINT)
        raise DataError(f"{reasons[0][0]}: {reasons[0][1]}; none of {len(reasons)} rows can be used", FORMATS_HINT)


def split_by_hash(rows: list[Row], share: float, name: str) -> tuple[list[Row], list[Row], str]:
    """(train, heldout, how). A row's side depends on its own content only, as long as both sides get rows."""
    if share == 0:
        return rows, [], "none (data.heldout_share is 0)"
    keys, how = [row.key for row in rows], "by hash of the question"
    if any(row.context for row in rows):
        how = "by hash of the context"
    elif rows[0].text is not None:
        how = "by hash of the text"
    if len(set(keys)) == 1 and rows[0].context:  # one context for all: fall back to the questions
        keys, how = [json.dumps(row.messages[:-1]) for row in rows], "by hash of the question"
    digests = {key: hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=8).digest() for key in keys}
    place = {key: int.from_bytes(digest, "big") for key, digest in digests.items()}
    if len(place) < 2:
        what = "one row" if len(rows) == 1 else f"{len(rows)} rows that all ask the same"
        hint = "add rows, or name a file with data.heldout"
        raise DataError(f"{name} has only {what}, so nothing can be held out", hint)
    limit = share * 2**64
    out = {key for key in place if place[key] < limit} or {min(place, key=lambda key: (place[key], key))}
    if len(out) == len(place):
        out.discard(max(place, key=lambda key: (place[key], key)))
    train = [row for row, key in zip(rows, keys, strict=True) if key not in out]
    heldout = [row for row, key in zip(rows, keys, strict=True) if key in out]
    return train, heldout, f"{share:.0%} {how}"


def load(config: DataConfig, for_eval: bool = False) -> Dataset:
    """Rows for training and held-out rows; `for_eval`: held-out rows only; all rows of a single file."""
    path = config.path or str(Path(__file__).parent.parent / "demo")
    named = config.heldout
    if named and not exists(named):  # relative to the data folder
        beside = place(path)
        beside = (beside if beside.is_dir() else beside.parent) / named
        named = str(beside) if exists(beside) else named
    main, held = ([], []) if for_eval and named else find(path, without=named)
    if named:
        whole, split = find(named)
        held = split or whole
    elif for_eval:
        main, held = [], held or main
    reader = Reader()
    train = [row for source in main if not for_eval for row in reader.rows(source)]
    if held:
        heldout = [row for source in held for row in reader.rows(source)]
        how = f"all rows of {', '.join(source.name for source in held)}"
    else:
        train, heldout, how = split_by_hash(train, config.heldout_share, Path(path).name)
    files = [source.file for source in ([] if for_eval else main) + held]
    return Dataset(train[: config.rows], heldout, " + ".join(reader.formats), files, how, reader.skipped)
