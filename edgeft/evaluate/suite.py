"""Suites: prompt, rows, extraction of the answer and metrics; and their rows as items to score.

A suite is a YAML file, like the tasks of lm-evaluation-harness; an unknown key in it is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from edgeft.config import DataConfig, EvalConfig, build, exists, knob, place, read_yaml, shipped
from edgeft.data import files
from edgeft.data.rows import Reader, Row, question_row
from edgeft.data.tokens import Encoded, common_prefix, encode_rows, prompt_ids
from edgeft.errors import ConfigError, DataError
from edgeft.evaluate.request import Request
from edgeft.formats.tokenizer import Tokenizer, render
from edgeft.host import sandbox

METRICS = ("loss", "perplexity", "exact_match", "f1", "contains", "accuracy", "accuracy_norm")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
EMBEDDED = "embedded"  # `data.path` that means the embedded handbook, whatever the run was trained on


@dataclass
class Suite:
    name: str = knob("", "the suite's name")
    about: str = knob("", "one line on what it measures")
    version: int = knob(1, "goes up when scores are no longer comparable", low=1)
    score: str = knob(
        "answer",
        "answer: the generated text; label: the generated text as one of the labels; choice: the likeliest choice; "
        "loss: the loss on the text; mixed: choice for rows with choices, loss for others",
        choices=("answer", "label", "choice", "loss", "mixed"),
    )
    data: DataConfig = field(default_factory=DataConfig)
    prompt: str = knob(
        "chat", "chat: the model's own chat template; else a jinja template with {{question}} and {{context}}"
    )
    take: str = knob(
        "all", "part of the output that is the answer: all, first_line, or the first group of a regular expression"
    )
    tokens: str = knob("answer", "which tokens the loss counts", choices=("answer", "all"))
    labels: list[str] = knob([], "labels of `score: label`; default: all answers in the rows")
    eval: EvalConfig = field(default_factory=EvalConfig)
    metrics: list[str] = knob(["loss", "exact_match", "f1", "contains"], "what is shown", choices=METRICS)


def suites() -> list[str]:
    """Names of the shipped suites."""
    return sorted(path.stem for path in shipped("eval").glob("*.yaml"))


def load_suite(name: str) -> Suite:
    """A shipped suite by name, or a YAML file; paths of data are relative to the file, if they exist there."""
    own = name.endswith((".yaml", ".yml")) or "/" in name
    path = place(name) if own else shipped("eval") / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"no suite `{name}`", f"shipped: {', '.join(suites())}; or name a YAML file")
    values = read_yaml(path)
    values.setdefault("name", path.stem)
    suite = cast(Suite, build(Suite, values))
    if not re.fullmatch(r"[\w.-]+", suite.name):
        raise ConfigError(f"`name` must be one word, not {suite.name!r}", "results are stored under it")
    if suite.take not in ("all", "first_line"):
        try:
            sandbox.check("search", suite.take)
        except (sandbox.Broken, sandbox.Failed) as error:
            what = f"`take` {suite.take[:80]!r} is not a regular expression with a group: {error}"
            raise ConfigError(what, "put the part that is the answer in ( )") from None
    if suite.prompt != "chat":
        try:
            sandbox.check("prompt", suite.prompt)
        except (sandbox.Broken, sandbox.Failed) as error:
            hint = "for example 'Question: {{question}}\\nAnswer:'"
            raise ConfigError(f"`prompt` is not a jinja template: {error}", hint) from None
    rows, heldout = suite.data.path, suite.data.heldout
    beside = [str(path.parent / name) if name and exists(path.parent / name) else name for name in (rows, heldout)]
    suite.data = replace(suite.data, path=beside[0], heldout=beside[1])
    return suite


@dataclass
class Item:
    """One row as it is scored."""

    kind: str  # answer, label, choice or loss
    request: Request
    question: str
    answers: list[str]  # accepted answers, or the right choice
    row: Row  # to find leaks
    texts: list[str] = field(default_factory=list)  # of the choices
    right: int = 0  # number of the right option


def make_items(suite: Suite, rows: Sequence[Encoded]) -> list[Item]:
    """Items of rows that are encoded with the chat template of the model."""
    items = []
    for encoded in rows:
        row = encoded.row
        ids = [int(i) for i in encoded.ids]
        trained = np.flatnonzero(encoded.trained[1:]) + 1
        if suite.tokens == "all":
            trained = np.arange(1, len(ids))
        start = len(prompt_ids(encoded))
        answered = suite.score in ("answer", "label") and bool(row.answers) and start > 0
        if not answered:
            request = Request(ids, [int(i) for i in trained])
            kind, texts = "loss", row.text or ""
        else:  # the last answer is generated; earlier ones count for the loss only
            request = Request(ids[:start], [int(i) for i in trained if i < start], [ids[start:]], generate=True)
            kind, texts = suite.score, ""
        items.append(Item(kind, request, question_of(row) or texts, row.answers, row))
    return items


def question_of(row: Row) -> str:
    """The last question, without the context before it."""
    last = next((m["content"] for m in reversed(row.messages) if m["role"] == "user"), "")
    return last.removeprefix(row.context).strip() or last


def read_items(suite: Suite, data: DataConfig, tokenizer: Tokenizer, limit: int) -> list[Item]:
    """Items of the held-out rows; all rows of a single file."""
    rows: list[Row] = []
    choices: list[Item] = []
    skipped: list[tuple[str, str]] = []
    for source in _sources(data):
        records = list(source.records)
        if suite.score in ("choice", "mixed"):
            with_choices, rest = _split(records)
            if suite.score == "choice":
                skipped += [(where, "a row of choices needs question, choices and answer") for where, _ in rest]
                rest = []
            for where, record in with_choices[: limit - len(choices)]:
                try:
                    choices.append(_choice(suite, record, where, tokenizer))
                except (files.Unusable, RecursionError) as reason:
                    skipped.append((where, str(reason)))
            records = rest
        if records and len(rows) < limit:
            reader = Reader()
            rows += reader.rows(files.Source(source.name, source.file, records))
            skipped += reader.skipped
    rows = rows[:limit]
    if suite.prompt == "chat" or suite.score == "mixed":  # in mixed suites, rows without choices are plain text
        encoded, dropped = encode_rows(rows, tokenizer, data.max_tokens, data.system)
        items = make_items(suite, encoded[:limit])
        skipped += dropped
    else:
        items = [_item_with_prompt(suite, row, tokenizer) for row in rows]
    items = choices + items
    if not items:
        why = f"{skipped[0][0]}: {skipped[0][1]}" if skipped else "there are no rows"
        raise DataError(f"no held-out row can be scored: {why}", "name a file with --data")
    return items


def _sources(data: DataConfig) -> list[files.Source]:
    path = data.path or str(Path(__file__).parent.parent / "demo")
    named = data.heldout
    if named and not exists(named):  # relative to the data
        main_path = place(path)
        named = str((main_path if main_path.is_dir() else main_path.parent) / named)
    main, held = files.find(named or path)
    return held or main


def _split(records: list[files.Record]) -> tuple[list[tuple[str, dict[str, Any]]], list[files.Record]]:
    """(records with choices, others)."""
    with_choices: list[tuple[str, dict[str, Any]]] = []
    rest: list[files.Record] = []
    for where, record in records:
        if isinstance(record, dict):
            plain = {str(key).strip().lower(): value for key, value in record.items()}
            if "choices" in plain and "question" in plain:
                with_choices.append((where, plain))
                continue
        rest.append((where, record))
    return with_choices, rest


def _choice(suite: Suite, record: dict[str, Any], where: str, tokenizer: Tokenizer) -> Item:
    """{question, choices, answer}: choices a list or ARC's {"text", "label"}; answer an index, a letter or a choice."""
    choices, labels = record["choices"], list(LETTERS)
    if isinstance(choices, dict):
        labels = [str(label) for label in choices.get("label") or labels]
        choices = choices.get("text")
    if not isinstance(choices, list) or len(choices) < 2 or not all(str(c).strip() for c in choices):
        raise files.Unusable("needs at least two choices, none of them empty")
    texts = [str(choice).strip() for choice in choices]
    answer = record.get("answer", record.get("answerkey", record.get("label")))
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        right = answer
    elif str(answer).strip() in texts:
        right = texts.index(str(answer).strip())
    elif str(answer).strip() in labels[: len(texts)]:
        right = labels.index(str(answer).strip())
    else:
        raise files.Unusable(f"the answer {answer!r} is not among the choices")
    question, context = str(record["question"]).strip(), str(record.get("context") or "").strip()
    user = f"{context}\n\n{question}" if context else question
    row = question_row(user, [texts[right]], context)
    row.source = where
    prompt, options = _continued(tokenizer, *_prompt(suite, row, tokenizer), texts)
    return Item("choice", Request(prompt, [], options), question, [texts[right]], row, texts, right)


def _item_with_prompt(suite: Suite, row: Row, tokenizer: Tokenizer) -> Item:
    """A row with the suite's own prompt."""
    if row.text is not None or not row.answers:
        ids = tokenizer.encode(row.text or "")
        return Item("loss", Request(ids, list(range(1, len(ids)))), row.text or "", [], row)
    prompt, options = _continued(tokenizer, *_prompt(suite, row, tokenizer), row.answers[:1])
    if suite.score in ("answer", "label"):
        return Item(suite.score, Request(prompt, [], options, generate=True), question_of(row), row.answers, row)
    targets = list(range(1 if suite.tokens == "all" else len(prompt), len(prompt) + len(options[0])))
    return Item("loss", Request(prompt + options[0], targets), question_of(row), row.answers, row)


def _prompt(suite: Suite, row: Row, tokenizer: Tokenizer) -> tuple[str, str]:
    """(prompt, separator before the answer)."""
    if suite.prompt == "chat":
        system = [{"role": "system", "content": suite.data.system}] if suite.data.system else []
        return render(tokenizer, [*system, *row.messages[:-1]], generate=True), ""
    try:
        text = sandbox.prompt(suite.prompt, {"question": question_of(row), "context": row.context}).rstrip("\n")
    except (sandbox.Broken, sandbox.Failed) as error:
        raise ConfigError(f"`prompt` cannot be rendered: {error}", "available: {{question}} and {{context}}") from None
    return text, "" if text[-1:].isspace() else " "


def _continued(
    tokenizer: Tokenizer, prompt: str, between: str, texts: Sequence[str]
) -> tuple[list[int], list[list[int]]]:
    """(ids of the prompt, ids of each continuation). A token across the border belongs to all continuations."""
    alone = tokenizer.encode(prompt)
    whole = [tokenizer.encode(prompt + between + text) for text in texts]
    start = max(1, min(common_prefix(alone, ids) for ids in whole))
    return alone[:start], [ids[start:] for ids in whole]


def from_run(suite: Suite, recipe_data: DataConfig) -> DataConfig:
    """The data of a suite; the run's own where the suite names none."""
    if suite.data.path == EMBEDDED:
        return replace(suite.data, path=None)
    return suite.data if suite.data.path else recipe_data
