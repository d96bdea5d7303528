"""Rows from files of every kind, the split, and what is said about files that cannot be used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from edgeft.config import DataConfig
from edgeft.data.files import hub_records
from edgeft.data.rows import Dataset, Row, load
from edgeft.errors import DataError

QA = [{"question": f"What is {i}?", "answer": f"number {i}"} for i in range(40)]


def jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def whole(path: Path) -> Dataset:
    return load(DataConfig(path=str(path)), for_eval=True)


def one(path: Path, record: dict[str, Any]) -> tuple[Row, str]:
    dataset = whole(jsonl(path / "rows.jsonl", [record]))
    return dataset.heldout[0], dataset.format


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("record", "format", "user", "answers"),
    [
        ({"prompt": "a", "completion": " b "}, "prompt/completion", "a", ["b"]),
        ({"Prompt": "a", "Response": "b"}, "prompt/completion", "a", ["b"]),
        ({"input": "a", "output": 3}, "prompt/completion", "a", ["3"]),
        ({"question": "a", "answer": "b"}, "question/answer", "a", ["b"]),
        ({"question": "a", "answers": ["b", "", "c", "b"]}, "question/answer", "a", ["b", "c"]),
        (
            {"question": "a", "context": "c", "answers": {"text": ["b"], "answer_start": [0]}},
            "question/answer",
            "c\n\na",
            ["b"],
        ),
        ({"question": "a", "choices": ["x", "y"], "answer": 1}, "question/answer", "a\n- x\n- y", ["y"]),
        ({"instruction": "do", "input": "", "output": "b"}, "instruction/input/output", "do", ["b"]),
        ({"instruction": "do", "input": "this", "output": "b"}, "instruction/input/output", "do\n\nthis", ["b"]),
        ({"text": "where is my card", "label": "card"}, "text/label", "where is my card", ["card"]),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "chat messages",
            "a",
            ["b"],
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "chat messages",
            "a",
            ["b"],
        ),
    ],
)
def test_formats(tmp_path: Path, record: dict[str, Any], format: str, user: str, answers: list[str]) -> None:
    row, found = one(tmp_path, record)
    assert found == format
    assert row.messages == [{"role": "user", "content": user}, {"role": "assistant", "content": answers[0]}]
    assert row.answers == answers
    assert row.text is None
    assert row.source == "rows.jsonl:1"
    assert row.context == {"c\n\na": "c", "do\n\nthis": "this"}.get(user, "")


def test_many_turns(tmp_path: Path) -> None:
    turns = [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
        ("user", "nobody answers"),
    ]
    row, _ = one(tmp_path, {"messages": [{"role": role, "content": content} for role, content in turns]})
    assert [m["content"] for m in row.messages] == ["s", "a", "b", "c", "d"]
    assert row.answers == ["d"]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row, _ = one(
        tmp_path,
        {"prompt": [{"role": "user", "content": parts}], "completion": [{"role": "assistant", "content": "x"}]},
    )
    assert row.messages[0]["content"] == "ab"
    assert row.answers == ["x"]


def test_text_rows(tmp_path: Path) -> None:
    row, format = one(tmp_path, {"text": "once upon a time"})
    assert (row.text, row.messages, row.answers, format) == ("once upon a time", [], [], "text")


# ---------------------------------------------------------------- files


def test_json_forms(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for value in (QA, {"version": "1", "data": QA}, {"rows": QA}, {"train": QA}):
        path.write_text(json.dumps(value, indent=1))
        assert len(whole(path).heldout) == 40
    jsonl(path, QA)  # JSON Lines under the wrong ending
    assert len(whole(path).heldout) == 40
    qas = [{"question": "q1", "answers": [{"text": "a1"}, {"text": "a2"}]}, {"question": "q2", "answers": []}]
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": [{"context": "c", "qas": qas}]}]}))  # SQuAD's own
    dataset = whole(path)
    assert dataset.heldout[0].answers == ["a1", "a2"]
    assert dataset.heldout[0].context == "c"
    assert dataset.skipped == [("rows.json:row 2", "answer is empty")]


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbftext,category\r\n"a, ""b""\nnext",x\r\nc\xc3\xa9,y\r\none,too,many\r\nonly\r\n')
    dataset = whole(path)
    assert dataset.format == "text/label"
    assert [(row.messages[0]["content"], row.answers) for row in dataset.heldout] == [
        ('a, "b"\nnext', ["x"]),
        ("cé", ["y"]),
    ]
    assert dataset.skipped == [("rows.csv:5", "more fields than the header"), ("rows.csv:6", "answer is empty")]
    for name, delimiter in (("rows.tsv", "\t"), ("semi.csv", ";")):
        (tmp_path / name).write_text(f"question{delimiter}answer\na, b{delimiter}c\n")
        assert whole(tmp_path / name).heldout[0].messages[0]["content"] == "a, b"


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    records = [{"question": f"q{i}", "answers": {"text": [f"a{i}"]}} for i in range(2000)]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "rows.parquet")
    dataset = whole(tmp_path / "rows.parquet")
    assert [row.answers[0] for row in dataset.heldout] == [f"a{i}" for i in range(2000)]
    assert dataset.heldout[1999].source == "rows.parquet:row 2000"


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_bytes(b"\xef\xbb\xbf# Title\r\n\r\n\r\nFirst line\r\nsecond line\r\n\r\n  indented\n")
    dataset = whole(tmp_path / "notes.md")
    assert [row.text for row in dataset.heldout] == ["# Title", "First line\nsecond line", "  indented"]
    assert [(row.source, row.follows) for row in dataset.heldout] == [
        ("notes.md:1", ""),
        ("notes.md:4", "notes.md:1"),
        ("notes.md:7", "notes.md:4"),
    ]
    assert dataset.format == "text"


def test_mixed_rows_in_one_file(tmp_path: Path) -> None:
    records = [
        {"question": "", "answer": "x"},
        QA[0],
        {"prompt": "a", "completion": "b"},
        7,
        {"question": "a", "answer": "  "},
        QA[1],
    ]
    dataset = whole(jsonl(tmp_path / "rows.jsonl", records))
    assert [row.source for row in dataset.heldout] == ["rows.jsonl:2", "rows.jsonl:6"]
    assert dataset.skipped == [
        ("rows.jsonl:1", "question is empty"),
        ("rows.jsonl:3", "does not have the columns of question/answer"),
        ("rows.jsonl:4", "not an object with named columns"),
        ("rows.jsonl:5", "answer is empty"),
    ]


# ---------------------------------------------------------------- folders and splits


@pytest.mark.parametrize("name", ["heldout", "dev", "valid", "validation", "test", "eval", "test-00000-of-00001"])
def test_folder_with_both_sides(tmp_path: Path, name: str) -> None:
    jsonl(tmp_path / "train.jsonl", QA[:30])
    jsonl(tmp_path / f"{name}.jsonl", QA[30:])
    (tmp_path / "README.md").write_text("About this data.\n\nNot a row.\n")
    dataset = load(DataConfig(path=str(tmp_path)))
    assert [len(dataset.train), len(dataset.heldout)] == [30, 10]
    assert [Path(file).name for file in dataset.files] == ["train.jsonl", f"{name}.jsonl"]
    assert len(load(DataConfig(path=str(tmp_path)), for_eval=True).heldout) == 10


def test_folder_of_files_is_split_by_hash(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    jsonl(tmp_path / "a.jsonl", QA[:20])
    (tmp_path / "deeper" / "b.json").write_text(json.dumps(QA[20:]))
    dataset = load(DataConfig(path=str(tmp_path), heldout_share=0.3))
    assert len(dataset.train) + len(dataset.heldout) == 40
    assert 5 <= len(dataset.heldout) <= 20
    assert "deeper/b.json:row 1" in {row.source for row in dataset.train + dataset.heldout}


def test_sibling_counts_only_when_named(tmp_path: Path) -> None:
    train, dev = jsonl(tmp_path / "train.jsonl", QA[:30]), jsonl(tmp_path / "dev.jsonl", QA[30:])
    alone = load(DataConfig(path=str(train)))
    assert len(alone.train) + len(alone.heldout) == 30
    assert "hash" in alone.split
    for name in ("dev.jsonl", str(dev)):
        dataset = load(DataConfig(path=str(train), heldout=name))
        assert [len(dataset.train), len(dataset.heldout)] == [30, 10]
    with pytest.raises(DataError, match="both the training and the held-out file"):
        load(DataConfig(path=str(train), heldout=str(train)))


def test_named_heldout_file_is_not_trained_on(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", QA[:30])
    jsonl(tmp_path / "b.jsonl", QA[30:])
    dataset = load(DataConfig(path=str(tmp_path), heldout=str(tmp_path / "b.jsonl")))
    assert {row.source.split(":")[0] for row in dataset.train} == {"a.jsonl"}


def _sides(path: Path, **options: Any) -> dict[str, str]:
    dataset = load(DataConfig(path=str(path), **options))
    sides = {row.messages[0]["content"]: "train" for row in dataset.train}
    return sides | {row.messages[0]["content"]: "heldout" for row in dataset.heldout}


def test_split_depends_on_content_only(tmp_path: Path) -> None:
    sides = _sides(jsonl(tmp_path / "a.jsonl", QA), heldout_share=0.3)
    assert 4 <= list(sides.values()).count("heldout") <= 20
    assert _sides(jsonl(tmp_path / "b.jsonl", QA[::-1]), heldout_share=0.3) == sides
    fewer = _sides(jsonl(tmp_path / "c.jsonl", QA[5:] + QA[5:8]), heldout_share=0.3)
    assert fewer == {question: side for question, side in sides.items() if question in fewer}


def test_nothing_leaks(tmp_path: Path) -> None:
    same = [{"question": f"q{i % 7}", "answer": f"a{i}"} for i in range(100)]
    dataset = load(DataConfig(path=str(jsonl(tmp_path / "same.jsonl", same)), heldout_share=0.5))
    asked = [{row.messages[0]["content"] for row in side} for side in (dataset.train, dataset.heldout)]
    assert not asked[0] & asked[1]
    assert len(asked[0]) + len(asked[1]) == 7
    passages = [{"context": f"passage {i % 9}", "question": f"q{i}", "answer": "a"} for i in range(100)]
    dataset = load(DataConfig(path=str(jsonl(tmp_path / "ctx.jsonl", passages)), heldout_share=0.5))
    contexts = [{row.context for row in side} for side in (dataset.train, dataset.heldout)]
    assert not contexts[0] & contexts[1]
    assert len(contexts[0]) + len(contexts[1]) == 9
    shared = [{"context": "the one", "question": f"q{i}", "answer": "a"} for i in range(50)]
    dataset = load(DataConfig(path=str(jsonl(tmp_path / "one.jsonl", shared)), heldout_share=0.3))
    assert dataset.train
    assert dataset.heldout


def test_both_sides_get_a_row(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "two.jsonl", QA[:2])
    for share in (0.001, 0.9):
        dataset = load(DataConfig(path=str(path), heldout_share=share))
        assert len(dataset.train) == len(dataset.heldout) == 1
    none = load(DataConfig(path=str(path), heldout_share=0.0))
    assert len(none.train) == 2
    assert none.heldout == []


def test_rows_limits_training_rows_in_file_order(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", QA)
    every = load(DataConfig(path=str(path)))
    few = load(DataConfig(path=str(path), rows=5))
    assert few.train == every.train[:5]
    assert few.heldout == every.heldout


def test_embedded_handbook() -> None:
    dataset = load(DataConfig())
    assert dataset.format == "question/answer"
    assert len(dataset.train) >= 240
    assert len(dataset.heldout) >= 60
    assert load(DataConfig(), for_eval=True).heldout == dataset.heldout


# ---------------------------------------------------------------- what cannot be used

GOOD = b'{"question": "a", "answer": "b"}\n'
BAD_FILES = [
    ("empty.jsonl", b"", "empty.jsonl is empty"),
    ("blank.jsonl", b"\n \n", "holds no rows"),
    ("header.csv", b"question,answer\n", "holds no rows"),
    ("latin.jsonl", GOOD + '{"question": "é"}'.encode("latin1"), "latin.jsonl, line 2: not UTF-8"),
    ("latin.csv", "question,answer\na,b\né,c\n".encode("latin1"), "latin.csv, line 3: not UTF-8"),
    ("utf16.txt", "text".encode("utf-16"), "line 1: not UTF-8"),
    ("broken.jsonl", GOOD + GOOD + b'{"question": "a" "answer": 1}\n', "broken.jsonl, line 3: broken JSON"),
    ("broken.json", b'[\n{"question": "a",\n "answer": }\n]', "broken.json, line 3: broken JSON"),
    ("deep.json", b"[" * 100_000, "deep.json, line 1: "),
    ("number.json", b"7", "holds no list of rows"),
    ("object.json", b'{"title": "x", "size": 2}', "no usable column; found: title, size"),
    ("columns.csv", b"id,body\n1,hello\n", "columns.csv has no usable column; found: id, body"),
    ("noanswer.jsonl", b'{"question": "a", "answer": ""}\n' * 3, "noanswer.jsonl:1: answer is empty; none of 3 rows"),
    ("list.jsonl", b'["a", "b"]\n', "not an object with named columns"),
    ("role.jsonl", b'{"messages": [{"role": "robot", "content": "x"}]}\n', "role `robot` is not known"),
    ("nul.csv", b'question,answer\n\x00a,b\x00,"\n', ""),
    ("rows.parquet", b"PAR1 not really", "not a readable Parquet file"),
    ("rows.xlsx", b"PK", "unknown file ending `.xlsx`"),
    ("rows", b"a", "unknown file ending"),
    ("one.jsonl", GOOD, "only one row"),
    ("same.jsonl", GOOD * 3, "3 rows that all ask the same"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES, ids=[case[0] for case in BAD_FILES])
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        load(DataConfig(path=str(tmp_path / name)))
    assert message in error.value.message
    assert "\n" not in error.value.message
    assert name in error.value.message
    assert error.value.exit_code == 4
    assert error.value.hint or name == "deep.json"


def test_missing_files_and_odd_folders(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "picture.png").write_bytes(b"")
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    for path, message in [
        (tmp_path / "none.jsonl", "no file or folder"),
        ("owner/none.jsonl", "no file or folder"),
        (tmp_path / "empty", "holds no data files"),
        (tmp_path / "a.jsonl", "leads back to itself"),
        (tmp_path / "x" / ("n" * 300), "cannot read|no file"),
    ]:
        with pytest.raises(DataError, match=message) as error:
            load(DataConfig(path=str(path)))
        assert error.value.exit_code == 4
    with pytest.raises(DataError, match="no file or folder"):
        load(DataConfig(heldout=str(tmp_path / "none.jsonl")))


def test_folders_that_link_in_a_circle(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", QA)
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "nowhere")
    assert len(whole(tmp_path).heldout) == 40


def test_no_permission(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", QA)
    path.chmod(0)
    me = os.geteuid()
    if me == 0:  # root may read everything
        os.seteuid(65534)
    try:
        with pytest.raises(DataError, match=r"no permission to read .*a\.jsonl"):
            load(DataConfig(path=str(path)))
    finally:
        os.seteuid(me)


def test_hub_id_without_a_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no file or folder nobody/nothing") as error:
        load(DataConfig(path="nobody/nothing"))
    assert "network" in error.value.hint


def test_hub_tables_name_their_labels() -> None:
    from datasets import ClassLabel, Features, Value
    from datasets import Dataset as Table

    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    table = Table.from_dict({"text": ["a", "b"], "label": [1, -1]}, features=features)
    assert list(hub_records("o/n/train", table)) == [
        ("o/n/train:row 1", {"text": "a", "label": "yes"}),
        ("o/n/train:row 2", {"text": "b", "label": None}),  # unknown
    ]
