"""A table of a user's mistakes: each gets one line, a hint, its exit code, and leaves nothing half-written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgeft.cli import app
from tests.conftest import Edgeft
from tests.support.rows import small_rows

runner = CliRunner()
ROW = '{"question": "How tall is it?", "answer": "47 metres"}\n'


def rows(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


Case = tuple[str, Callable[[Path, Path], list[str]], int, str]
CASES: list[Case] = [
    ("unknown recipe", lambda t, m: ["--recipe", "sparse-pb"], 2, "did you mean `sparse-bp`"),
    ("unknown device", lambda t, m: ["--device", "rpi6"], 2, "did you mean `rpi5`"),
    ("unknown key", lambda t, m: ["--set", "train.learning_rate=1"], 2, "unknown key `train.learning_rate`"),
    ("near key", lambda t, m: ["--set", "train.epoch=1"], 2, "did you mean `epochs`"),
    ("wrong type", lambda t, m: ["--set", "train.epochs=many"], 2, "`train.epochs` must be a number"),
    ("impossible value", lambda t, m: ["--set", "train.lr=-1"], 2, "`train.lr` is -1"),
    ("impossible blocks", lambda t, m: ["--set", "update.blocks=40-50", "--until", "train"], 2, "blocks 0 to 29"),
    ("value that is gone", lambda t, m: ["--set", "how.prune=false"], 2, "`how.prune` can no longer be False"),
    ("no key=value", lambda t, m: ["--set", "train.lr"], 2, "is not key=value"),
    ("unknown stage", lambda t, m: ["--until", "lunch"], 2, "known: prepare"),
    ("recipe file missing", lambda t, m: ["--recipe", str(t / "my.yaml")], 2, "no recipe file"),
    ("data missing", lambda t, m: ["--data", str(t / "none.jsonl")], 4, "none.jsonl"),
    ("data empty", lambda t, m: ["--data", rows(t / "e.jsonl", "")], 4, "e.jsonl"),
    ("data not UTF-8", lambda t, m: ["--data", rows(t / "l.jsonl", b'{"question": "\xff\xfe"}\n')], 4, "UTF-8"),
    ("broken JSON", lambda t, m: ["--data", rows(t / "b.jsonl", ROW * 2 + '{"question": \n')], 4, "b.jsonl, line 3"),
    ("no usable column", lambda t, m: ["--data", rows(t / "c.jsonl", '{"colour": "red"}\n' * 3)], 4, "colour"),
    (
        "answers empty",
        lambda t, m: ["--data", rows(t / "a.jsonl", '{"question": "Why?", "answer": ""}\n' * 3)],
        4,
        "answer",
    ),
    (
        "all rows too long",
        lambda t, m: [
            "--data",
            rows(t / "w.jsonl", "".join(ROW.replace("tall", f"tall {i}") for i in range(30))),
            "--set",
            "data.max_tokens=16",
        ],
        4,
        "max_tokens",
    ),
    ("folder without data", lambda t, m: ["--data", str(t)], 4, str(os.sep)),
    ("model missing", lambda t, m: ["--model", str(t / "none.gguf")], 5, "none.gguf"),
    ("model cut short", lambda t, m: ["--model", rows(t / "cut.gguf", m.read_bytes()[:3_000_000])], 5, "cut.gguf"),
    ("model is no GGUF", lambda t, m: ["--model", rows(t / "x.gguf", b"PK\x03\x04" + bytes(100))], 5, "not a GGUF"),
    (
        "model of another kind",
        lambda t, m: ["--model", rows(t / "g.gguf", other_architecture(m))],
        5,
        "the nearest that is known: `gemma",
    ),
    ("model folder without weights", lambda t, m: ["--model", str(empty(t / "hf")), "--until", "train"], 5, "hf"),
    ("nf4 for a packed file", lambda t, m: ["--set", "model.frozen=nf4", "--until", "train"], 5, "packed already"),
    ("folder in the way", lambda t, m: ["--out", str(taken(t / "taken"))], 6, "not a run folder"),
    ("nothing to resume", lambda t, m: ["--resume", "--out", str(t / "none")], 6, "no run in"),
]


def other_architecture(model: Path) -> bytes:
    """The same file, saying that it is a `gemma`: five letters like `llama`."""
    data = model.read_bytes()
    at = data.index(b"general.architecture") + 20 + 4 + 8
    assert data[at : at + 5] == b"llama"
    return data[:at] + b"gemma" + data[at + 5 :]


def empty(path: Path) -> Path:
    path.mkdir()
    return path


def taken(path: Path) -> Path:
    path.mkdir()
    (path / "thesis.txt").write_text("mine")
    return path


@pytest.mark.parametrize(("name", "options", "code", "says"), CASES, ids=[c[0] for c in CASES])
def test_one_line_a_hint_and_a_code(
    name: str, options: Callable[[Path, Path], list[str]], code: int, says: str, tmp_path: Path, model: Path
) -> None:
    given = options(tmp_path, model)
    out = [] if "--out" in given else ["--out", str(tmp_path / "run")]
    before = {p for p in tmp_path.rglob("*") if p.is_file()}
    result = runner.invoke(app, ["finetune", *out, *given])
    text = " ".join(result.stderr.split())
    assert result.exit_code == code, result.output
    assert text.startswith("error: ")
    assert says in text
    assert "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) <= 2  # the error and its hint
    left = {p for p in tmp_path.rglob("*") if p.is_file()} - before
    assert not {p.name for p in left} & {"tokens.npz", "best.safetensors", "model.gguf", "done.json"}
    assert not [p for p in left if p.suffix in (".tmp", ".part")]


def test_a_removed_key_is_one_warning_on_stderr(tmp_path: Path) -> None:
    options = ["--set", "how.prune=true", "--set", "how.prune=true", "--data", str(tmp_path / "none.jsonl")]
    result = runner.invoke(app, ["finetune", "--out", str(tmp_path / "run"), *options])
    lines = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert lines == [
        "warning: `how.prune` is ignored, it is no longer a knob: gradients that nothing uses are never computed"
    ]
    assert result.exit_code == 4


def test_a_typo_leaves_no_folder_behind(tmp_path: Path) -> None:
    for options in (
        ["--data", str(tmp_path / "none.jsonl")],
        ["--model", str(tmp_path / "none.gguf")],
        ["--recipe", "x"],
    ):
        runner.invoke(app, ["finetune", "--out", str(tmp_path / "run"), *options])
        assert not (tmp_path / "run").exists(), options


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["eval", "nowhere"], 5, "no model at"),
        (["eval", "nowhere.gguf"], 5, "no model file"),
        (["export", "nowhere"], 6, "not a run folder"),
        (["chat", "nowhere.gguf"], 5, "no model file"),
        (["chat", "."], 6, "not a run folder"),
        (["knobs", "warmups"], 2, "did you mean `warmup`?"),
        (["knobs", "qqqq"], 2, "`edgeft knobs` lists all"),
        (["runs", "rm"], 2, "needs the runs to delete"),
        (["runs", "a", "b"], 2, "takes one folder, not 2"),
        (["data", "nowhere.csv"], 4, "nowhere.csv"),
    ],
)
def test_other_commands(args: list[str], code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, args)
    assert result.exit_code == code, result.output
    assert says in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


def test_a_run_without_training_has_nothing_to_export(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    data = small_rows(tmp_path / "rows")
    assert (
        runner.invoke(app, ["finetune", "--data", str(data), "--out", str(folder), "--until", "prepare"]).exit_code == 0
    )
    for args in (["export", str(folder)], ["chat", str(folder)], ["eval", str(folder)]):
        result = runner.invoke(app, args)
        assert result.exit_code == 6, result.output
    result = runner.invoke(app, ["export", str(folder), "--type", "q9_9"])
    assert result.exit_code == 7
    assert "q8_0" in result.stderr


@pytest.mark.skipif(os.geteuid() != 0 and not os.access("/", os.W_OK), reason="needs a place that nobody may write to")
def test_no_write_permission(tmp_path: Path) -> None:
    result = runner.invoke(app, ["finetune", "--out", "/proc/edgeft-run"])  # not even root may write there
    assert result.exit_code == 6
    assert "cannot write" in result.stderr


@pytest.mark.slow
def test_a_full_disk_is_said_and_can_be_resumed(tmp_path: Path, edgeft: Edgeft) -> None:
    """A file-size limit of the system stands for the disk: the same write fails with an OSError."""
    import resource
    import subprocess
    import sys

    data = small_rows(tmp_path / "rows")
    folder = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "edgeft",
        "finetune",
        "--data",
        str(data),
        "--out",
        str(folder),
        "--until",
        "train",
    ]
    sets = ("update.blocks=28-29", "update.low_rank=0", "train.steps=2")  # checkpoints of 28 MB
    command += [part for s in sets for part in ("--set", s)]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000))

    import signal

    signal_ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that the write fails instead of a kill
    try:
        full = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    finally:
        signal.signal(signal.SIGXFSZ, signal_ignored)
    assert full.returncode == 6, full.stderr
    assert "cannot write" in full.stderr
    assert "Traceback" not in full.stderr
    assert not list(folder.rglob("*.tmp"))
    again = edgeft("finetune", "--resume", "--out", folder, "--until", "train", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["steps"] == 2
