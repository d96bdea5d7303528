"""Token ids and answer masks: what is trained, what is cut, what is dropped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from edgeft.config import DataConfig
from edgeft.data.inspect import describe
from edgeft.data.rows import Dataset, Row
from edgeft.data.tokens import Encoded, encode_rows, load, prompt_ids, save
from edgeft.errors import DataError, RunError
from edgeft.formats.source import demo_model
from edgeft.formats.tokenizer import PLAIN_TEMPLATE, GgufTokenizer, render

# Shows an empty thought in the last answer only.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Ends the user's turns with a token, and no answer.
ENDLESS = (
    "{% for m in messages %}{{ '[' + m.role + '] ' + m.content }}"
    "{{ eos_token if m.role == 'user' }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.fixture(scope="module")
def demo() -> GgufTokenizer:
    path = demo_model()
    if path is None:
        pytest.skip("the embedded model is not installed")
    return GgufTokenizer(path)


@pytest.fixture
def tokenizer(demo: GgufTokenizer, monkeypatch: pytest.MonkeyPatch) -> GgufTokenizer:
    """A test may give it another template."""
    monkeypatch.setattr(demo, "template", demo.template)
    return demo


def chat(*contents: str, system: str = "", context: str = "", source: str = "rows.jsonl:1") -> Row:
    """User and assistant in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return Row(messages, [contents[-1]], context, source=source)


def asked(context: str, question: str, answer: str) -> Row:
    return chat(f"{context}\n\n{question}", answer, context=context)


def only(tokenizer: GgufTokenizer, row: Row, max_tokens: int = 384, system: str | None = None) -> Encoded:
    encoded, dropped = encode_rows([row], tokenizer, max_tokens, system)
    assert len(encoded) == 1
    assert dropped == []
    return encoded[0]


def spans(tokenizer: GgufTokenizer, encoded: Encoded) -> list[str]:
    """The trained parts as text."""
    result, before = [""], False
    for token, trained in zip(encoded.ids.tolist(), encoded.trained.tolist(), strict=True):
        if trained:
            result[-1] += tokenizer.piece(token)
        elif before:
            result.append("")
        before = trained
    return result


# ---------------------------------------------------------------- what is trained


def test_answer_and_end_token_are_trained(tokenizer: GgufTokenizer) -> None:
    row = chat("Where is Bern?", "In Switzerland.")
    encoded = only(tokenizer, row)
    assert encoded.ids.dtype == np.int32
    assert encoded.trained.dtype == np.bool_
    assert spans(tokenizer, encoded) == ["In Switzerland.<|im_end|>"]
    text = render(tokenizer, row.messages, generate=False)
    assert encoded.ids.tolist() == tokenizer.encode(text)[:-1]  # without the line break after the end token
    prompt = render(tokenizer, row.messages[:1], generate=True)
    assert prompt_ids(encoded).tolist() == tokenizer.encode(prompt)


def test_every_assistant_turn_is_trained(tokenizer: GgufTokenizer) -> None:
    row = chat("a?", "First.", "b?", "Second.", "c?", "Third.", system="Be brief.")
    encoded = only(tokenizer, row)
    assert spans(tokenizer, encoded) == ["First.<|im_end|>", "Second.<|im_end|>", "Third.<|im_end|>"]
    assert prompt_ids(encoded).tolist() == tokenizer.encode(render(tokenizer, row.messages[:-1], generate=True))


def test_system_message(tokenizer: GgufTokenizer) -> None:
    shown = tokenizer.decode(only(tokenizer, chat("a", "b"), system="Talk like a pirate.").ids)
    assert "pirate" in shown
    assert "SmolLM" not in shown
    assert "pirate" not in tokenizer.decode(only(tokenizer, chat("a", "b", system="Own."), system="like a pirate").ids)


def test_end_token_inside_an_answer(tokenizer: GgufTokenizer) -> None:
    encoded = only(tokenizer, chat("Which token ends a turn?", "It is <|im_end|> here."))
    assert spans(tokenizer, encoded) == ["It is <|im_end|> here.<|im_end|>"]


def test_template_that_shows_earlier_answers_otherwise(tokenizer: GgufTokenizer) -> None:
    tokenizer.template = THINKING
    encoded = only(tokenizer, chat("a", "First.", "b", "Second."))
    assert spans(tokenizer, encoded) == ["First.<|im_end|>", "<think>\n\n</think>\n\nSecond.<|im_end|>"]


def test_template_without_end_of_turn(tokenizer: GgufTokenizer) -> None:
    tokenizer.template = ENDLESS
    encoded = only(tokenizer, chat("a", "First.", "b", "Second."))
    assert spans(tokenizer, encoded) == [" First.", " Second.<|im_end|>"]
    assert encoded.ids[-1] == tokenizer.eos


def test_plain_template(tokenizer: GgufTokenizer) -> None:
    tokenizer.template = PLAIN_TEMPLATE
    encoded = only(tokenizer, chat("Where?", "Here."))
    assert spans(tokenizer, encoded) == [" Here.<|im_end|>"]
    assert tokenizer.decode(prompt_ids(encoded)) == "Question: Where?\nAnswer:"


def test_rows_that_the_template_refuses_are_dropped(tokenizer: GgufTokenizer) -> None:
    tokenizer.template = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + tokenizer.template
    encoded, dropped = encode_rows([chat("a", "b"), chat("a", "b", system="s", source="x:2")], tokenizer, 64)
    assert len(encoded) == 1
    assert dropped[0][0] == "x:2"
    assert "no system" in dropped[0][1]
    with pytest.raises(DataError, match="no system"):
        encode_rows([chat("a", "b")], tokenizer, 64, system="s")


# ---------------------------------------------------------------- too long


@pytest.mark.parametrize("max_tokens", [64, 100, 200])
def test_context_is_cut_and_never_the_answer(tokenizer: GgufTokenizer, max_tokens: int) -> None:
    context = " ".join(f"Sentence {i} of a passage, with ümläuts and 世界." for i in range(60))
    row = asked(context, "What is it about?", "A passage with many sentences.")
    encoded = only(tokenizer, row, max_tokens)
    assert max_tokens - 3 <= len(encoded.ids) <= max_tokens
    assert spans(tokenizer, encoded) == ["A passage with many sentences.<|im_end|>"]
    shown = tokenizer.decode(encoded.ids)
    kept = shown.split("user\n")[1].split("\n\n")[0]
    assert kept
    assert context.startswith(kept)
    assert "\n\nWhat is it about?" in shown
    assert encoded.cut_tokens == len(only(tokenizer, row, 10_000).ids) - len(encoded.ids)


def test_row_of_just_the_limit_is_not_cut(tokenizer: GgufTokenizer) -> None:
    row = asked("A short context of some words.", "Why?", "Because.")
    size = len(only(tokenizer, row).ids)
    assert only(tokenizer, row, size).cut_tokens == 0
    smaller = only(tokenizer, row, size - 1)
    assert len(smaller.ids) <= size - 1
    assert smaller.cut_tokens > 0


def test_context_in_the_middle_is_cut(tokenizer: GgufTokenizer) -> None:
    given = "word " * 300 + "end"
    encoded = only(tokenizer, Row(chat(f"Summarise this.\n\n{given}", "Words.").messages, ["Words."], given), 80)
    shown = tokenizer.decode(encoded.ids)
    assert "Summarise this.\n\nword word" in shown
    assert "end" not in shown
    assert len(encoded.ids) <= 80


def test_oldest_turns_are_dropped(tokenizer: GgufTokenizer) -> None:
    turns = [f"{'question' if i % 2 == 0 else 'answer'} number {i}" for i in range(40)]
    encoded = only(tokenizer, chat(*turns, system="Be brief."), 128)
    shown = tokenizer.decode(encoded.ids)
    assert len(encoded.ids) <= 128
    assert encoded.cut_tokens > 0
    assert "Be brief." in shown
    assert "question number 0" not in shown
    assert "answer number 39" in shown
    left = len(spans(tokenizer, encoded))
    one_more = chat(*turns[-2 * (left + 1) :], system="Be brief.")
    assert len(only(tokenizer, one_more, 1000).ids) > 128  # no more was dropped than needed


def test_what_cannot_fit_is_dropped_and_counted(tokenizer: GgufTokenizer) -> None:
    long = "word " * 200
    rows = [
        chat("a", "b"),
        chat(long, "b", source="x:2"),
        chat("a", long, source="x:3"),
        dataclasses.replace(asked("context", "q", long), source="x:4"),
        chat("a", "b", "c", long, source="x:5"),
    ]
    encoded, dropped = encode_rows(rows, tokenizer, 64)
    assert len(encoded) == 1
    assert [source for source, _ in dropped] == ["x:2", "x:3", "x:4", "x:5"]
    assert all("data.max_tokens=64" in reason for _, reason in dropped)
    assert encode_rows([], tokenizer, 64) == ([], [])


def test_all_rows_too_long(tokenizer: GgufTokenizer) -> None:
    rows = [chat("word " * 100, "b"), chat("word " * 50, "b")]
    with pytest.raises(DataError, match=r"all 2 rows are longer than data\.max_tokens=32") as error:
        encode_rows(rows, tokenizer, 32)
    need = int(error.value.hint.split("data.max_tokens=")[1].rstrip("`"))
    assert len(encode_rows(rows, tokenizer, need)[0]) == 1


# ---------------------------------------------------------------- plain text


def test_text_is_split_and_every_token_but_the_first_trained(tokenizer: GgufTokenizer) -> None:
    text = "A sentence that goes on. " * 40
    ids = tokenizer.encode(text)
    encoded, _ = encode_rows([Row([], [], text=text, source="t:1")], tokenizer, 32)
    assert all(2 <= len(e.ids) <= 32 and not e.trained[0] and e.trained[1:].all() for e in encoded)
    assert np.concatenate([e.ids[e.trained] for e in encoded]).tolist() == ids[1:]
    assert encode_rows([Row([], [], text="a"), Row([], [], text="a b")], tokenizer, 32)[1][0][1].startswith("a single")


def test_paragraphs_are_joined_while_they_follow_each_other(tokenizer: GgufTokenizer) -> None:
    rows = [Row([], [], text=f"Paragraph number {i}.", source=f"n:{i}", follows=f"n:{i - 1}") for i in range(10)]
    encoded, _ = encode_rows(rows[:4] + rows[5:], tokenizer, 384)  # the fifth is held out
    assert [tokenizer.decode(e.ids).count("Paragraph") for e in encoded] == [4, 5]
    assert "number 2.\n\nParagraph" in tokenizer.decode(encoded[0].ids)
    small, _ = encode_rows(rows, tokenizer, 16)
    assert len(small) > 2
    assert all(len(e.ids) <= 16 for e in small)


# ---------------------------------------------------------------- keeping and looking


def test_save_and_load(tokenizer: GgufTokenizer, tmp_path: Path) -> None:
    rows = [
        chat("a 世界", "b", "c", "d"),
        dataclasses.replace(asked("some context " * 30, "q", "\ud800x"), answers=["x", "y"]),
    ]
    train, _ = encode_rows([*rows, Row([], [], text="plain text", source="t:1")], tokenizer, 64)
    save(tmp_path / "tokens.npz", train, [])
    again, heldout = load(tmp_path / "tokens.npz")
    assert heldout == []
    assert len(again) == len(train) == 3
    for before, after in zip(train, again, strict=True):
        assert np.array_equal(before.ids, after.ids)
        assert np.array_equal(before.trained, after.trained)
        assert (before.row.messages, before.row.answers, before.cut_tokens) == (
            after.row.messages,
            after.row.answers,
            after.cut_tokens,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.npz"]
    first = (tmp_path / "tokens.npz").read_bytes()
    save(tmp_path / "tokens.npz", train, [])
    assert (tmp_path / "tokens.npz").read_bytes() == first


def test_damaged_token_file(tokenizer: GgufTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokens.npz"
    save(path, encode_rows([chat("a", "b")], tokenizer, 64)[0], [])
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[:-50], b"nothing"):
        path.write_bytes(content)
        with pytest.raises(RunError):
            load(path)
    with pytest.raises(RunError):
        load(tmp_path / "none.npz")
    with pytest.raises(RunError):
        save(path / "folder.npz", [], [])  # a file is in the way


def test_look(tokenizer: GgufTokenizer) -> None:
    context = "A passage that several questions are asked about. " * 8
    train = [asked(context, f"Question {i}?", f"Answer {i}.") for i in range(5)] + [
        chat("word " * 500, "b", source="x:9")
    ]
    dataset = Dataset(
        train,
        [chat("a", "b")],
        "question/answer",
        ["x"],
        "by hand",
        [("x:1", "answer is empty"), ("x:2", "answer is empty")],
    )
    found = describe(dataset, tokenizer, DataConfig(max_tokens=100))
    json.dumps(found)
    assert found["rows"] == {"train": 6, "heldout": 1}
    assert found["usable"] == {"train": 5, "heldout": 1}
    assert found["skipped"] == [{"reason": "answer is empty", "rows": 2, "first": "x:1"}]
    assert found["dropped"][0]["rows"] == 1
    assert found["dropped"][0]["first"] == "x:9"
    assert found["cut"]["rows"] == 5
    assert sum(bin["rows"] for bin in found["tokens"]["histogram"]) == 6
    assert found["shared_prefix"]["times"] > 2
    pieces = found["example"]["pieces"]
    assert "".join(p["text"] for p in pieces if p["trained"]) == "Answer 0.<|im_end|>"
