"""lm-evaluation-harness on our models, offline: a task file and its data beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgeft.errors import ConfigError, DataError
from edgeft.evaluate.request import Request, Response, RowProgress
from edgeft.formats.tokenizer import GgufTokenizer
from edgeft.run import progress
from tests.conftest import Edgeft

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

from edgeft.evaluate.harness import run_tasks

ROWS = [
    {"question": "What do bees make?", "choices": ["honey", "wood and stone", "milk"], "answer": 0},
    {"question": "Which is a planet?", "choices": ["a spoon", "Jupiter", "a shoe"], "answer": 1},
]
CHOICE = """
task: edgeft_own_choice
dataset_path: json
dataset_kwargs:
  data_files: {validation: rows.jsonl}
validation_split: validation
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
WRITTEN = """
task: edgeft_own_written
dataset_path: json
dataset_kwargs:
  data_files: {validation: rows.jsonl}
validation_split: validation
output_type: generate_until
doc_to_text: "Q: {{question}} A:"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 6}
metric_list:
  - metric: exact_match
"""
ROLLING = """
task: edgeft_own_rolling
dataset_path: json
dataset_kwargs:
  data_files: {validation: rows.jsonl}
validation_split: validation
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - metric: word_perplexity
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    for name, text in (("choice", CHOICE), ("written", WRITTEN), ("rolling", ROLLING)):
        (tmp_path / "task" / f"{name}.yaml").write_text(text)
    return tmp_path / "task"


class Knower:
    """Finds one choice likelier than the others, and writes one answer to everything."""

    def __init__(self, tokenizer: GgufTokenizer, likes: str, writes: str) -> None:
        self.tokenizer, self.likes, self.writes = tokenizer, likes, writes
        self.requests: list[Request] = []

    def respond(self, requests: Sequence[Request], max_new: int, progress: RowProgress | None = None) -> list[Response]:
        self.requests += requests
        return [
            Response(
                float(len(request.targets)),
                [1.0 if self.likes in self.tokenizer.decode(option) else 50.0 for option in request.options],
                [False] * len(request.options),
                self.tokenizer.encode(self.writes) if request.generate else [],
            )
            for request in requests
        ]


@pytest.mark.slow
def test_tasks_are_asked_and_scored(folder: Path, model: Path) -> None:
    tokenizer = GgufTokenizer(model)
    scorer = Knower(tokenizer, "honey", " Jupiter. And more")
    tasks = [str(folder / f"{name}.yaml") for name in ("choice", "written", "rolling")]
    found = run_tasks(scorer, tokenizer, tasks, None, progress.Progress(), "tuned")
    assert found["edgeft_own_choice"]["acc"] == 0.5  # honey is right; the planet is a guess among equals: the first
    assert 0 <= found["edgeft_own_written"]["exact_match"] <= 0.5
    assert found["edgeft_own_rolling"]["word_perplexity"] > 1
    choices = [request for request in scorer.requests if request.options]
    assert [len(request.options) for request in choices] == [3, 3]  # the choices share their question
    assert tokenizer.decode(choices[0].prompt) == "Question: What do bees make?\nAnswer:"
    assert tokenizer.decode(choices[0].options[0]) == " honey"


@pytest.mark.slow
def test_what_is_not_there_is_told(folder: Path, model: Path) -> None:
    tokenizer = GgufTokenizer(model)
    scorer = Knower(tokenizer, "", "")

    def run(task: str) -> None:
        run_tasks(scorer, tokenizer, [task], None, progress.Progress(), "tuned")

    with pytest.raises(ConfigError, match="no task `no_such_task`"):
        run("no_such_task")
    with pytest.raises(ConfigError, match="no task file"):
        run(str(folder / "none.yaml"))
    (folder / "rows.jsonl").unlink()
    with pytest.raises(DataError, match="cannot run edgeft_own_choice"):
        run(str(folder / "choice.yaml"))


@pytest.mark.slow
def test_command_on_tuned_and_base(folder: Path, model: Path, edgeft: Edgeft) -> None:
    result = edgeft("eval", model, "--base", model, "--lm-eval", folder / "choice.yaml", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["tuned"] == found["base"]
    assert found["tuned"]["edgeft_own_choice"]["acc"] == 1.0
    refused = edgeft("eval", model, "--lm-eval", folder / "choice.yaml", "--suite", "qa")
    assert refused.returncode == 2
