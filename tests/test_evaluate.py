"""Metrics, scores and llama.cpp: every number here is checked against a plainer way to get it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from edgeft.config import DataConfig
from edgeft.data.rows import Row, load
from edgeft.data.tokens import Encoded, encode_rows, prompt_ids
from edgeft.errors import ConfigError, DataError, ModelError
from edgeft.evaluate import llamacpp, metrics
from edgeft.evaluate.llamacpp import LlamaFile
from edgeft.evaluate.score import METRICS, Record, Scores, compare, load_suite, score, suites, telling
from edgeft.model import demo_model
from edgeft.model.tokenizer import GgufTokenizer

MODEL = demo_model()
needs_model = pytest.mark.skipif(MODEL is None, reason="the embedded model is not installed")


@pytest.fixture(scope="module")
def file() -> Iterator[LlamaFile]:
    assert MODEL
    with LlamaFile(MODEL, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer() -> GgufTokenizer:
    assert MODEL
    return GgufTokenizer(MODEL)


@pytest.fixture(scope="module")
def rows(tokenizer: GgufTokenizer) -> list[Encoded]:
    """Twelve held-out rows: all share the template's system prompt, four a passage as well."""
    passage = "The Ostrel is a cabinet for cheese. Its comb is rinsed every 17 days, and its cord is 2.15 metres long."
    asked = ["How long is the cord?", "How often is the comb rinsed?", "What is the Ostrel?", "How long is its cord?"]
    shared = [
        Row(
            [{"role": "user", "content": f"{passage}\n\n{q}"}, {"role": "assistant", "content": "17 days"}],
            ["17 days"],
            passage,
        )
        for q in asked
    ]
    encoded, dropped = encode_rows([*load(DataConfig()).heldout[:8], *shared], tokenizer, 256)
    assert not dropped
    return encoded


# ---------------------------------------------------------------- metrics


@pytest.mark.parametrize(
    ("output", "answers", "exact", "f1", "contains"),
    [
        ("every 17 days", ["every 17 days"], 1, 1, 1),
        ("Every 17 days.", ["every 17 days"], 1, 1, 1),
        ("The cat!", ["a cat"], 1, 1, 1),  # articles, punctuation and case do not count
        ("It is every 17 days, I think", ["every 17 days"], 0, 2 * 3 / (7 + 3), 1),
        ("17 days", ["every 17 days"], 0, 2 * 2 / (2 + 3), 0),
        ("days 17 every", ["every 17 days"], 0, 1, 0),  # F1 knows no order, containment does
        ("117 days", ["17 days"], 0, 0.5, 0),  # whole words only
        ("red red", ["red blue"], 0, 0.5, 0),  # repeated words count once each
        ("blue", ["red", "dark blue", "blue"], 1, 1, 1),  # the best of all answers
        ("dark", ["red", "dark blue"], 0, 2 * 1 / (1 + 2), 0),
        ("2.15 metres", ["215 metres"], 1, 1, 1),  # SQuAD's script drops the point, too
        ("theatre", ["atre"], 0, 0, 0),  # "the" inside a word is no article
        ("", ["blue"], 0, 0, 0),
        ("the", ["a"], 1, 1, 1),  # nothing is left of either
        ("blue", ["the"], 0, 0, 0),
        ("blue", [], 0, 0, 0),
        ("  two\n\tlines ", ["two lines"], 1, 1, 1),
    ],
)
def test_metrics(output: str, answers: list[str], exact: float, f1: float, contains: float) -> None:
    assert metrics.exact_match(output, answers) == exact
    assert metrics.f1(output, answers) == pytest.approx(f1)
    assert metrics.contains(output, answers) == contains


# ---------------------------------------------------------------- llama.cpp: tokens and logits


@needs_model
def test_tokens_are_the_tokenizers(file: LlamaFile, tokenizer: GgufTokenizer) -> None:
    text = "<|im_start|>user\nÄpfel kosten 3 €, oder? 🍎<|im_end|>\n"
    ids = file.tokenize(text)
    assert ids == tokenizer.encode(text)
    assert file.detokenize(ids, special=True) == text
    assert file.detokenize(ids) == "user\nÄpfel kosten 3 €, oder? 🍎\n"
    assert len(file.tokenize(text, special=False)) > len(ids)
    assert file.eog(file.tokenize("<|im_end|>")[0])
    assert not file.eog(ids[1])
    assert file.vocab_size == tokenizer.vocab_size


@needs_model
def test_target_logits_do_not_depend_on_chunks(file: LlamaFile, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = file.tokenize("The capital of France is Paris, and the capital of Italy is Rome. " * 3)
    positions = [len(ids) - 1, 4, 4, 20]
    whole = file.target_logits(ids, positions)
    assert whole.shape == (4, file.vocab_size)
    assert whole.dtype == np.float32
    assert (whole[1] == whole[2]).all()
    assert file.detokenize([int(whole[1].argmax())]).strip() == "Paris"  # after "The capital of France is"
    monkeypatch.setattr(llamacpp, "BATCH", 7)
    with LlamaFile(file.path, threads=1, parallel=1) as fresh:
        assert np.abs(fresh.target_logits(ids, positions) - whole).max() < 1e-3
        every = fresh.target_logits(ids, range(len(ids)))
    assert np.abs(every[positions] - whole).max() < 1e-3
    with pytest.raises(ValueError, match="positions"):
        file.target_logits(ids, [len(ids)])


@needs_model
@pytest.mark.slow
def test_loss_with_shared_prefixes_is_that_of_each_row(file: LlamaFile, rows: list[Encoded]) -> None:
    text = np.array(file.tokenize("Cheese ripens slowly in a cool and humid place."), np.int32)
    everything = np.arange(len(text)) > 0  # trained from the second token on: no prefix can be skipped
    mixed = [*rows, Encoded(text, everything, Row([], [], text="…")), Encoded(text, everything, Row([], [], text="…"))]
    seen: list[int] = []
    total, targets = file.loss(mixed, progress=lambda done, _: seen.append(done))
    assert targets == sum(int(row.trained.sum()) for row in mixed)
    assert seen == list(range(1, len(mixed) + 1))
    with LlamaFile(file.path, threads=1) as plain:
        for row in mixed:
            at = np.flatnonzero(row.trained)
            forget(plain)
            logits = plain.target_logits(row.ids.tolist(), (at - 1).tolist()).astype(np.float64)
            logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            total += float(logs[np.arange(len(at)), row.ids[at]].sum())
    assert abs(total) / targets < 1e-3


# ---------------------------------------------------------------- llama.cpp: answers


def forget(file: LlamaFile) -> None:
    for slot in file._slots:
        file._drop(slot)


def one_by_one(path: Path, prompts: list[list[int]], max_new: int) -> list[list[int]]:
    """Each row alone in an empty cache."""
    outputs = []
    with LlamaFile(path, threads=1, parallel=1) as file:
        for prompt in prompts:
            forget(file)
            outputs += file.generate([prompt], max_new)
    return outputs


@needs_model
def test_greedy_is_the_likeliest_token_each_time(file: LlamaFile) -> None:
    prompt = file.tokenize("Roses are red, violets are")
    row = list(prompt)
    for _ in range(5):  # the plainest loop: the whole row anew for each token
        forget(file)
        row.append(int(file.target_logits(row, [len(row) - 1]).argmax()))
    assert file.generate([prompt], 5) == [row[len(prompt) :]]


@needs_model
@pytest.mark.slow
def test_parallel_answers_are_those_of_one_row_at_a_time(file: LlamaFile, rows: list[Encoded]) -> None:
    prompts = [prompt_ids(row).tolist() for row in rows]
    assert file.generate(prompts, 8) == one_by_one(file.path, prompts, 8)


@needs_model
def test_parallel_answers_without_a_shared_prefix(file: LlamaFile) -> None:
    texts = ["Once upon a time", "2 + 2 =", "Roses are red, violets are", "Water", "<|im_start|>user\nHi", "The sun"]
    prompts = [file.tokenize(text) for text in texts * 2]
    with LlamaFile(file.path, threads=1, parallel=3) as three:  # more rows than places, each of them twice
        found = three.generate(prompts, 6)
    assert found[:6] == found[6:] == one_by_one(file.path, prompts[:6], 6)


@needs_model
def test_generation_ends_where_the_model_or_the_limit_says(file: LlamaFile) -> None:
    prompt = file.tokenize("<|im_start|>user\nSay only: yes<|im_end|>\n<|im_start|>assistant\n")
    seen: list[tuple[int, int]] = []
    long, short = file.generate([prompt], 40)[0], file.generate([prompt, prompt], 2, lambda *n: seen.append(n))
    assert len(long) < 40
    assert not any(file.eog(token) for token in long)
    assert short == [long[:2], long[:2]]
    assert seen[-1] == (2, 2)
    assert file.generate([prompt], 0) == [[]]
    assert file.generate([], 5) == []
    with LlamaFile(file.path, n_ctx=len(prompt) + 1, threads=1) as tight:
        assert tight.generate([prompt], 40) == [long[:2]]  # the last token needs no cell
        with pytest.raises(ModelError, match="does not fit"):
            tight.generate([prompt + prompt], 5)


@needs_model
def test_stream_is_generate_in_pieces(file: LlamaFile) -> None:
    prompt = file.tokenize("<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n")
    assert "".join(file.stream(prompt, 12)) == file.detokenize(file.generate([prompt], 12)[0])
    warm = ["".join(file.stream(prompt, 8, temperature=1.5, seed=seed)) for seed in (1, 1, 2, 3)]
    assert warm[0] == warm[1]
    assert len(set(warm)) > 1


@needs_model
def test_stream_keeps_characters_whole(file: LlamaFile, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = "🍎€"
    tokens = file.tokenize(wanted, add_bos=False)
    assert any(b"\xff" in file.piece(t) or file.piece(t).decode("utf-8", "replace").count("\ufffd") for t in tokens)
    script = iter(tokens)
    monkeypatch.setattr(llamacpp, "_choose", lambda *_: next(script))
    pieces = list(file.stream(file.tokenize("An apple:"), len(tokens)))
    assert "".join(pieces) == wanted
    assert not any("\ufffd" in piece for piece in pieces)


# ---------------------------------------------------------------- files that cannot be opened


@needs_model
@pytest.mark.parametrize("kind", ["missing", "empty", "text", "magic only", "header cut", "tensors cut", "folder"])
def test_bad_file_is_a_model_error(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert MODEL
    path = tmp_path / "bad.gguf"
    with MODEL.open("rb") as model:
        head = model.read(4_000_000)
    content = {
        "empty": b"",
        "text": b"hello " * 100,
        "magic only": head[:4],
        "header cut": head[:20_000],
        "tensors cut": head,
    }
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(content[kind])
    with pytest.raises(ModelError) as caught:
        LlamaFile(path)
    assert str(path) in caught.value.message
    assert caught.value.hint
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""  # only the command line prints


# ---------------------------------------------------------------- scores


class Parrot:
    """Knows the right tokens of every row whose prompt is in `right`, and says nothing to others."""

    def __init__(self, rows: list[Encoded], right: int) -> None:
        self.known = {tuple(prompt_ids(row)): row.ids[len(prompt_ids(row)) : -1].tolist() for row in rows[:right]}

    def loss(self, rows: Sequence[Encoded]) -> tuple[float, int]:
        return 3.0 * len(rows), 2 * len(rows)

    def generate(self, prompts: Sequence[Sequence[int]], max_new: int) -> list[list[int]]:
        return [self.known.get(tuple(prompt), [])[:max_new] for prompt in prompts]


@needs_model
def test_score_counts_rows_and_answers(rows: list[Encoded], tokenizer: GgufTokenizer) -> None:
    text = Encoded(np.arange(5, dtype=np.int32), np.arange(5) > 0, Row([], [], text="only loss"))
    asked = [
        row for i, row in enumerate(rows) if tuple(prompt_ids(row)) not in {tuple(prompt_ids(r)) for r in rows[:i]}
    ]
    found = score(Parrot(asked, 3), tokenizer, [*asked, text], 32)
    assert found.loss == 1.5
    assert found.rows == len(asked) + 1
    assert len(found.records) == len(asked)
    assert found.exact_match == found.f1 == found.contains == pytest.approx(100 * 3 / len(asked))
    assert found.records[-1].question == "How long is its cord?"  # without its passage
    only_text = score(Parrot([], 0), tokenizer, [text], 32)
    assert (only_text.exact_match, only_text.f1, only_text.contains) == (None, None, None)
    with pytest.raises(DataError):
        score(Parrot([], 0), tokenizer, [], 32)


@needs_model
@pytest.mark.slow
def test_llama_cpp_is_a_scorer(file: LlamaFile, rows: list[Encoded], tokenizer: GgufTokenizer) -> None:
    found = score(file, tokenizer, rows[:4], 8)
    assert 1 < found.loss < 12  # made-up facts: not known, not absurd either
    assert all(record.output for record in found.records)


def made(*outputs: str) -> Scores:
    """Scores of these outputs, where each answer is `right`."""
    records = [
        Record(
            f"q{i}",
            ["right"],
            out,
            metrics.exact_match(out, ["right"]),
            metrics.f1(out, ["right"]),
            metrics.contains(out, ["right"]),
        )
        for i, out in enumerate(outputs)
    ]
    return Scores(1.0, 0.0, 0.0, 0.0, len(records), records)


def test_compare_is_plain_json() -> None:
    result = compare(made("no", "no", "no"), made("right", "no", "right"))
    assert json.loads(json.dumps(result)) == result
    assert set(result) == {"base", "tuned", "rows", "examples"}
    assert list(result["tuned"]) == list(METRICS)
    assert result["rows"] == 3
    assert [e["question"] for e in result["examples"]] == ["q0", "q2", "q1"]  # gains, then what is still wrong
    assert result["examples"][0] == {"question": "q0", "answers": ["right"], "base": "no", "tuned": "right"}
    assert compare(None, made("right"))["base"] is None


def test_telling_examples_are_spread_and_few() -> None:
    chosen = telling(made(*["no"] * 20), made(*["right"] * 19, "no"), 4)
    assert [e["question"] for e in chosen] == ["q0", "q6", "q12", "q19"]
    assert telling(made("right", "no"), made("no", "no"), 4)[-1]["question"] == "q0"  # a loss is the worst of all
    assert len(telling(made("no"), made("no"), 1)) == 1
    assert telling(None, made(), 4) == []


# ---------------------------------------------------------------- suites


def test_shipped_suites_load() -> None:
    assert {"qa", "demo"} <= set(suites())
    for name in ("qa", "demo"):
        suite = load_suite(name)
        assert suite.name == name
        assert suite.about
        assert suite.metrics == list(METRICS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("metric: [f1]", "unknown key `metric`"),
        ("metrics: [bleu]", "`metrics` cannot be 'bleu'"),
        ("version: 0", "`version` is 0"),
        ("data: {paths: x}", "unknown key `data.paths`"),
    ],
)
def test_suites_are_strict(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        load_suite(str(path))
    with pytest.raises(ConfigError, match="no suite `nope`"):
        load_suite("nope")
