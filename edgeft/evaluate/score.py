"""How well a model does on held-out rows, and one model beside another.

Loss is in nats per trained token; the other scores are from 0 to 100, and None where no row has an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from edgeft.config import DataConfig, EvalConfig, build, knob, read_yaml, shipped
from edgeft.data.rows import Row
from edgeft.data.tokens import Encoded, prompt_ids
from edgeft.errors import ConfigError, DataError
from edgeft.evaluate import metrics
from edgeft.model.tokenizer import Tokenizer

METRICS = ("loss", "exact_match", "f1", "contains")


class Scorer(Protocol):
    """A model that can be scored: a GGUF file in llama.cpp, or the trainer's own stack."""

    def loss(self, rows: Sequence[Encoded]) -> tuple[float, int]:
        """Sum of the negative log-likelihoods of all trained tokens, and how many there are."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], max_new: int) -> list[list[int]]:
        """Greedy answers, without the token that ends them."""
        ...


@dataclass
class Record:
    """One question, what was accepted, what came, and how good that is (0 to 1)."""

    question: str
    answers: list[str]
    output: str
    exact_match: float
    f1: float
    contains: float


@dataclass
class Scores:
    loss: float
    exact_match: float | None
    f1: float | None
    contains: float | None
    rows: int
    records: list[Record] = field(default_factory=list)  # in the rows' order; rows without answers have none

    def figures(self) -> dict[str, float | None]:
        return {name: getattr(self, name) for name in METRICS}


def score(scorer: Scorer, tokenizer: Tokenizer, rows: Sequence[Encoded], max_new: int) -> Scores:
    if not rows:
        raise DataError("there are no held-out rows to score", "name a file with --data")
    total, targets = scorer.loss(rows)
    asked = [row for row in rows if row.row.answers and len(prompt_ids(row))]
    outputs = scorer.generate([prompt_ids(row).tolist() for row in asked], max_new) if asked else []
    records = [_record(row.row, tokenizer.decode(ids).strip()) for row, ids in zip(asked, outputs, strict=True)]

    def mean(name: str) -> float | None:
        return 100 * sum(getattr(record, name) for record in records) / len(records) if records else None

    return Scores(
        total / max(targets, 1), mean("exact_match"), mean("f1"), mean("contains"), rows=len(rows), records=records
    )


def _record(row: Row, output: str) -> Record:
    answers = row.answers
    return Record(
        _question(row),
        answers,
        output,
        metrics.exact_match(output, answers),
        metrics.f1(output, answers),
        metrics.contains(output, answers),
    )


def _question(row: Row) -> str:
    """What was asked last, without the context that stood in front of it."""
    last = next((m["content"] for m in reversed(row.messages) if m["role"] == "user"), "")
    return last.removeprefix(row.context).strip() or last


# ---------------------------------------------------------------- base beside tuned


def compare(base: Scores | None, tuned: Scores, examples: int = 4) -> dict[str, Any]:
    """The JSON of `edgeft eval`; both were scored on the same rows."""
    return {
        "base": base.figures() if base else None,
        "tuned": tuned.figures(),
        "rows": tuned.rows,
        "examples": telling(base, tuned, examples),
    }


def telling(base: Scores | None, tuned: Scores, wanted: int) -> list[dict[str, Any]]:
    """A few rows side by side: gains, spread over the set, and the worst row last, so that nobody is misled."""
    pairs = list(zip(base.records if base else tuned.records, tuned.records, strict=True))
    gains = [_worth(after) - _worth(before) for before, after in pairs]
    order = sorted(range(len(pairs)), key=lambda i: (_worth(pairs[i][1]), gains[i]))
    worst = [i for i in order[:1] if not pairs[i][1].contains][: max(wanted - 1, 0)]
    better = [i for i in range(len(pairs)) if (gains[i] > 0 or not base) and i not in worst]
    better = better or [i for i in range(len(pairs)) if i not in worst]
    room = wanted - len(worst)
    chosen = [better[k * len(better) // room] for k in range(room)] if len(better) > room else better
    return [
        {
            "question": pairs[i][1].question,
            "answers": pairs[i][1].answers,
            "base": pairs[i][0].output if base else None,
            "tuned": pairs[i][1].output,
        }
        for i in [*chosen, *worst]
    ]


def _worth(record: Record) -> float:
    return record.f1 + record.contains


# ---------------------------------------------------------------- suites


@dataclass
class Suite:
    """What is asked and how it is scored; the manner of lm-evaluation-harness' tasks."""

    name: str = knob("", "the suite's name")
    about: str = knob("", "one line on what it measures")
    version: int = knob(1, "goes up when scores are no longer comparable", low=1)
    data: DataConfig = field(default_factory=DataConfig)
    prompt: str = knob("chat", "chat: the model's own chat template", choices=("chat",))
    eval: EvalConfig = field(default_factory=EvalConfig)
    metrics: list[str] = knob(list(METRICS), "what is shown", choices=METRICS)


def suites() -> list[str]:
    """Names of the shipped suites."""
    return sorted(path.stem for path in shipped("eval").glob("*.yaml"))


def load_suite(name: str) -> Suite:
    """A shipped suite by name, or a file of one's own."""
    own = name.endswith((".yaml", ".yml")) or "/" in name
    path = Path(name).expanduser() if own else shipped("eval") / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"there is no suite `{name}`", f"shipped: {', '.join(suites())}; or name a YAML file")
    values = read_yaml(path)
    values.setdefault("name", path.stem)
    return cast(Suite, build(Suite, values))
