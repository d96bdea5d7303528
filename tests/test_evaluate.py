"""Metrics, scores and llama.cpp: every number here is checked against a plainer way to get it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from edgeft.config import DataConfig, EvalConfig
from edgeft.data.rows import Row, load
from edgeft.data.tokens import Encoded, encode_rows, prompt_ids
from edgeft.errors import ConfigError, DataError, ModelError
from edgeft.evaluate import batch_scorer, leak, llamacpp, metrics
from edgeft.evaluate.llamacpp import LlamaFile, Sampling
from edgeft.evaluate.metrics import bootstrap
from edgeft.evaluate.request import Request, Response, RowProgress, Scorer
from edgeft.evaluate.score import (
    METRICS,
    Record,
    Scores,
    compare,
    is_clear,
    load_suite,
    nearest_label,
    pick_examples,
    score_items,
    suites,
    take,
    verdict,
)
from edgeft.evaluate.suite import Suite, make_items, read_items
from edgeft.formats import ggml
from edgeft.formats.gguf import GGUF
from edgeft.formats.source import demo_model
from edgeft.formats.tokenizer import GgufTokenizer

MODEL = demo_model()
needs_model = pytest.mark.skipif(MODEL is None, reason="the embedded model is not installed")


@pytest.fixture(scope="module")
def file() -> Iterator[LlamaFile]:
    assert MODEL
    with LlamaFile(MODEL, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def exact() -> Iterator[LlamaFile]:
    """The same weights in float32. Packed ones are multiplied with tokens that are rounded to 8 bits, which makes a
    difference in the last bit one of half a per cent: whether the right tokens were read is seen only without."""
    assert MODEL
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # the copy is made on entering
            patch.setattr(llamacpp, "WIDE", ggml.F32)
            patch.setattr(llamacpp, "SLOW", ("q4_1", "q8_0"))
            place = stack.enter_context(llamacpp.with_fast_types(MODEL, 5000))
        assert {info.type for info in GGUF.open(place).tensors.values()} == {ggml.F32}
        yield stack.enter_context(LlamaFile(place, threads=1))


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
    assert tokenizer.decode(ids) == "user\nÄpfel kosten 3 €, oder? 🍎\n"
    assert len(file.tokenize(text, special=False)) > len(ids)
    assert file.ends_generation(file.tokenize("<|im_end|>")[0])
    assert not file.ends_generation(ids[1])
    assert file.vocab_size == tokenizer.vocab_size


@needs_model
def test_target_logits_do_not_depend_on_chunks(file: LlamaFile, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = file.tokenize("The capital of France is Paris, and the capital of Italy is Rome. " * 3)
    positions = [len(ids) - 1, 4, 4, 20]
    whole = file.target_logits(ids, positions)
    assert whole.shape == (4, file.vocab_size)
    assert whole.dtype == np.float32
    assert (whole[1] == whole[2]).all()
    assert (
        GgufTokenizer(file.path).decode([int(whole[1].argmax())]).strip() == "Paris"
    )  # after "The capital of France is"
    monkeypatch.setattr(llamacpp, "CHUNK", 7)
    with LlamaFile(file.path, threads=1, parallel=1) as fresh:
        assert np.abs(fresh.target_logits(ids, positions) - whole).max() < 1e-3
        every = fresh.target_logits(ids, range(len(ids)))
    assert np.abs(every[positions] - whole).max() < 1e-3
    with pytest.raises(ValueError, match="positions"):
        file.target_logits(ids, [len(ids)])


@needs_model
@pytest.mark.slow
def test_loss_with_shared_prefixes_is_that_of_each_row(exact: LlamaFile, rows: list[Encoded]) -> None:
    text = np.array(exact.tokenize("Cheese ripens slowly in a cool and humid place."), np.int32)
    everything = np.arange(len(text)) > 0  # trained from the second token on: no prefix can be skipped
    mixed = [*rows, Encoded(text, everything, Row([], [], text="…")), Encoded(text, everything, Row([], [], text="…"))]
    seen: list[int] = []
    requests = [Request(row.ids.tolist(), (1 + np.flatnonzero(row.trained[1:])).tolist()) for row in mixed]
    total = sum(one.prompt_nll for one in exact.respond(requests, 0, lambda done, _: seen.append(done)))
    targets = sum(len(request.targets) for request in requests)
    assert targets == sum(int(row.trained.sum()) for row in mixed)
    assert seen == sorted(set(seen))
    assert seen[-1] == len(mixed)
    with LlamaFile(exact.path, threads=1) as plain:
        for row in mixed:
            at = np.flatnonzero(row.trained)
            forget(plain)
            logits = plain.target_logits(row.ids.tolist(), (at - 1).tolist()).astype(np.float64)
            logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            total += float(logs[np.arange(len(at)), row.ids[at]].sum())
    assert abs(total) / targets < 1e-3


# ---------------------------------------------------------------- llama.cpp: answers


def forget(file: LlamaFile) -> None:
    file.clear()


def generate(
    file: LlamaFile, prompts: list[list[int]], max_new: int, progress: RowProgress | None = None
) -> list[list[int]]:
    """Greedy answers, in the order of the prompts."""
    requests = [Request(prompt, generate=True) for prompt in prompts]
    return [one.output for one in file.respond(requests, max_new, progress)]


def one_by_one(path: Path, prompts: list[list[int]], max_new: int) -> list[list[int]]:
    """Each row alone in an empty cache."""
    outputs = []
    with LlamaFile(path, threads=1, parallel=1) as file:
        for prompt in prompts:
            forget(file)
            outputs += generate(file, [prompt], max_new)
    return outputs


@needs_model
def test_greedy_is_the_likeliest_token_each_time(file: LlamaFile) -> None:
    prompt = file.tokenize("Roses are red, violets are")
    row = list(prompt)
    for _ in range(5):  # the plainest loop: the whole row anew for each token
        forget(file)
        row.append(int(file.target_logits(row, [len(row) - 1]).argmax()))
    assert generate(file, [prompt], 5) == [row[len(prompt) :]]


@needs_model
@pytest.mark.slow
def test_parallel_answers_are_those_of_one_row_at_a_time(exact: LlamaFile, rows: list[Encoded]) -> None:
    prompts = [prompt_ids(row).tolist() for row in rows]
    assert generate(exact, prompts, 8) == one_by_one(exact.path, prompts, 8)


@needs_model
def test_parallel_answers_without_a_shared_prefix(exact: LlamaFile) -> None:
    texts = ["Once upon a time", "2 + 2 =", "Roses are red, violets are", "Water", "<|im_start|>user\nHi", "The sun"]
    prompts = [exact.tokenize(text) for text in texts * 2]
    with LlamaFile(exact.path, threads=1, parallel=3) as three:  # more rows than places, each of them twice
        found = generate(three, prompts, 6)
    assert found[:6] == found[6:] == one_by_one(exact.path, prompts[:6], 6)


@needs_model
def test_generation_ends_where_the_model_or_the_limit_says(file: LlamaFile) -> None:
    prompt = file.tokenize("<|im_start|>user\nSay only: yes<|im_end|>\n<|im_start|>assistant\n")
    seen: list[tuple[int, int]] = []
    long, short = generate(file, [prompt], 40)[0], generate(file, [prompt, prompt], 2, lambda *n: seen.append(n))
    assert len(long) < 40
    assert not any(file.ends_generation(token) for token in long)
    assert short == [long[:2], long[:2]]
    assert seen[-1] == (2, 2)
    assert generate(file, [prompt], 0) == [[]]
    assert generate(file, [], 5) == []
    with LlamaFile(file.path, n_ctx=len(prompt) + 1, threads=1) as tight:
        assert generate(tight, [prompt], 40) == [long[:2]]  # the last token needs no cell
        with pytest.raises(ModelError, match="does not fit"):
            generate(tight, [prompt + prompt], 5)


@needs_model
def test_stream_is_generate_in_pieces(file: LlamaFile) -> None:
    prompt = file.tokenize("<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n")
    assert "".join(file.stream(prompt, Sampling(12))) == GgufTokenizer(file.path).decode(
        generate(file, [prompt], 12)[0]
    )
    warm = ["".join(file.stream(prompt, Sampling(8, 1.5, 1.0, seed))) for seed in (1, 1, 2, 3)]
    assert warm[0] == warm[1]
    assert len(set(warm)) > 1


@needs_model
def test_stream_keeps_characters_whole(file: LlamaFile, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = "🍎€"
    tokens = file.tokenize(wanted, add_bos=False)
    assert any(b"\xff" in file.piece(t) or file.piece(t).decode("utf-8", "replace").count("\ufffd") for t in tokens)
    script = iter(tokens)
    monkeypatch.setattr(llamacpp, "_sample", lambda *_: next(script))
    pieces = list(file.stream(file.tokenize("An apple:"), Sampling(len(tokens))))
    assert "".join(pieces) == wanted
    assert not any("\ufffd" in piece for piece in pieces)


# ---------------------------------------------------------------- a copy that is quicker


@needs_model
@pytest.mark.slow
def test_a_copy_in_float16_says_what_the_file_says(
    file: LlamaFile, rows: list[Encoded], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        Request((p := prompt_ids(row).tolist()), [], [row.ids[len(p) :].tolist()], generate=True) for row in rows
    ]
    with llamacpp.with_fast_types(file.path, 5000) as place:
        assert place != file.path
        types = Counter(ggml.type_name(info.type) for info in GGUF.open(place).tensors.values())
        assert types == {"f16": 210, "f32": 61, "q8_0": 1}
        with LlamaFile(place, threads=1) as copy:
            found = copy.respond(requests, 8)
    assert not place.exists()
    wanted = file.respond(requests, 8)
    tokens = sum(len(request.options[0]) for request in requests)
    losses = [sum(said.option_nll[0] for said in both) / tokens for both in (wanted, found)]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert sum(a.output[:1] == b.output[:1] for a, b in zip(wanted, found, strict=True)) >= len(requests) - 2
    with llamacpp.with_fast_types(file.path, 10) as place:  # too few tokens
        assert place == file.path
    monkeypatch.setattr(llamacpp, "MEMORY_SHARE", 0.001)  # too little memory
    with llamacpp.with_fast_types(file.path, 5000) as place:
        assert place == file.path


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
    """Knows the right tokens of every row whose prompt is in `right`, and nothing for others; 1.5 nats per token."""

    def __init__(self, rows: list[Encoded], right: int) -> None:
        self.known = {tuple(prompt_ids(row)): row.ids[len(prompt_ids(row)) : -1].tolist() for row in rows[:right]}

    def respond(self, requests: Sequence[Request], max_new: int, progress: RowProgress | None = None) -> list[Response]:
        return [
            Response(
                1.5 * len(request.targets),
                [1.5 * len(option) for option in request.options],
                [False] * len(request.options),
                self.known.get(tuple(request.prompt), [])[:max_new],
            )
            for request in requests
        ]


def score_rows(scorer: Scorer, tokenizer: GgufTokenizer, rows: list[Encoded], max_new: int = 32) -> Scores:
    suite = Suite(eval=EvalConfig(max_new_tokens=max_new))
    return score_items(scorer, tokenizer, make_items(suite, rows), suite)


@needs_model
def test_score_counts_rows_and_answers(rows: list[Encoded], tokenizer: GgufTokenizer) -> None:
    text = Encoded(np.arange(5, dtype=np.int32), np.arange(5) > 0, Row([], [], text="only loss"))
    asked = [
        row for i, row in enumerate(rows) if tuple(prompt_ids(row)) not in {tuple(prompt_ids(r)) for r in rows[:i]}
    ]
    found = score_rows(Parrot(asked, 3), tokenizer, [*asked, text])
    assert found.loss == 1.5
    assert found.perplexity == pytest.approx(np.exp(1.5))
    assert len(found.records) == len(asked) + 1
    assert sum(record.tokens for record in found.records) == sum(int(row.trained.sum()) for row in [*asked, text])
    assert found.exact_match == found.f1 == found.contains == pytest.approx(100 * 3 / len(asked))
    assert found.accuracy is None
    assert found.records[-2].question == "How long is its cord?"  # without its passage
    only_text = score_rows(Parrot([], 0), tokenizer, [text])
    assert (only_text.exact_match, only_text.f1, only_text.contains) == (None, None, None)
    with pytest.raises(DataError):
        score_rows(Parrot([], 0), tokenizer, [])


@needs_model
@pytest.mark.slow
def test_llama_cpp_is_a_scorer(file: LlamaFile, rows: list[Encoded], tokenizer: GgufTokenizer) -> None:
    found = score_rows(file, tokenizer, rows[:4], 8)
    assert 1 < (found.loss or 0) < 12  # made-up facts: not known, not absurd either
    assert all(record.output for record in found.records)


@needs_model
@pytest.mark.slow
def test_one_pass_gives_what_single_ones_give(file: LlamaFile) -> None:
    """Options, their greedy flags, targets in the prompt and the answer: as one by one, from an empty cache."""
    france, italy = file.tokenize("The capital of France is"), file.tokenize("The capital of Italy is")
    options = [file.tokenize(text, add_bos=False) for text in (" Paris, a", " Paris. It", " Rome", " a city")]
    requests = [
        Request(france, [2, 4], options, generate=True),
        Request(italy, [], [generate(file, [italy], 6)[0]], generate=True),  # the option is what greedy decoding gives
        Request(france, [], options[2:]),
    ]
    said = file.respond(requests, 8)
    for request, one in zip(requests, said, strict=True):
        row = request.prompt
        logs = log_softmax(file, row, [t - 1 for t in request.targets])
        assert one.prompt_nll == pytest.approx(-sum(logs[i][row[t]] for i, t in enumerate(request.targets)), abs=1e-2)
        for option, nll, greedy in zip(request.options, one.option_nll, one.option_greedy, strict=True):
            whole = row + option
            logs = log_softmax(file, whole, range(len(row) - 1, len(whole) - 1))
            assert nll == pytest.approx(-sum(logs[i][token] for i, token in enumerate(option)), abs=1e-2)
            assert greedy == all(int(logs[i].argmax()) == token for i, token in enumerate(option))
        forget(file)
        assert one.output == (generate(file, [row], 8)[0] if request.generate else [])
    assert said[1].option_greedy == [True]
    assert said[0].option_nll[2:] == pytest.approx(said[2].option_nll, abs=1e-2)


@needs_model
@pytest.mark.slow
def test_a_row_does_not_depend_on_its_company(
    exact: LlamaFile, rows: list[Encoded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows at once, and few in a cache that they fill."""
    text = exact.tokenize("Cheese ripens slowly in a cool and humid place.")
    options = [exact.tokenize(word, add_bos=False) for word in (" milk", " a lot of milk", " a lot", " wood", " honey")]
    requests = [
        *(Request((p := prompt_ids(row).tolist()), [], [row.ids[len(p) :].tolist()], generate=True) for row in rows),
        Request(text, list(range(1, len(text)))),
        Request(exact.tokenize("Question: What do bees make?\nAnswer:"), [2, 5], options),
        Request(text, [3], options[:1], generate=True),
        Request(text),  # nothing is wanted of it
    ]
    forget(exact)
    wide = exact.respond(requests, 8)
    assert exact.used == len(exact.held.cells)  # all others were given back
    forget(exact)
    assert exact.respond(requests, 8) == wide  # to the last bit
    monkeypatch.setattr(batch_scorer, "CELLS", 256)
    monkeypatch.setattr(batch_scorer, "OPTIONS", 2)
    monkeypatch.setattr(batch_scorer, "BATCH", 40)
    with LlamaFile(exact.path, threads=1, parallel=3) as narrow:
        few = narrow.respond(requests[::-1], 8)[::-1]
        assert narrow.cells == 256
    for one, other in zip(wide, few, strict=True):
        assert other.prompt_nll == pytest.approx(one.prompt_nll, rel=1e-3, abs=1e-3)
        assert other.option_nll == pytest.approx(one.option_nll, rel=1e-3, abs=1e-3)
        assert other.output == one.output
    assert wide[-1] == Response()


CUTS = [(10, " a"), (10, " the"), (9, " of"), (6, " was"), (4, "-"), (8, " has"), (2, " new"), (7, " and")]


@needs_model
def test_rows_that_leave_the_held_prefix_at_different_places(exact: LlamaFile) -> None:
    """Two rows at a time: the third goes on from what the second left, and the fourth leaves that earlier."""
    begin = exact.tokenize("The old mill by the river still grinds corn on")
    prompts = [begin[:cut] + exact.tokenize(text, add_bos=False) for cut, text in CUTS]
    prompts.sort()
    alone = []
    for prompt in prompts:
        forget(exact)
        alone += generate(exact, [prompt], 4)
    with LlamaFile(exact.path, threads=1, parallel=2) as narrow:
        assert generate(narrow, prompts, 4) == alone


@needs_model
def test_a_batch_that_is_stopped_leaves_an_empty_cache(file: LlamaFile) -> None:
    prompts = [file.tokenize(text) for text in ("Once upon a time", "2 + 2 =", "Roses are red, violets are")]
    wanted = generate(file, prompts, 4)

    def stop(done: int, rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(file, prompts, 4, stop)
    assert file.used == 0
    assert generate(file, prompts, 4) == wanted


def log_softmax(file: LlamaFile, ids: list[int], at: Sequence[int]) -> np.ndarray:
    forget(file)
    logits = file.target_logits(ids, list(at)).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)) if len(logits) else logits


@needs_model
@pytest.mark.slow
def test_trainer_and_llama_cpp_say_the_same(file: LlamaFile, tokenizer: GgufTokenizer) -> None:
    from edgeft.engine.load import load as load_stack
    from edgeft.evaluate.stack_scorer import StackScorer

    assert MODEL
    prompt = file.tokenize("Question: What do bees make?\nAnswer:")
    options = [file.tokenize(text, add_bos=False) for text in (" honey", " wood and stone", " milk")]
    text = file.tokenize("Cheese ripens slowly in a cool and humid place.")
    requests = [Request(prompt, [], options, generate=True), Request(text, list(range(1, len(text))))]
    seen: list[tuple[int, int]] = []
    ours = StackScorer(load_stack(MODEL), tokenizer.eog).respond(requests, 4, lambda *n: seen.append(n))
    theirs = file.respond(requests, 4)
    assert ours[0].option_nll == pytest.approx(theirs[0].option_nll, rel=0.05, abs=0.1)
    assert ours[1].prompt_nll == pytest.approx(theirs[1].prompt_nll, rel=0.03)
    assert ours[0].output[:1] == theirs[0].output[:1]
    assert seen[-1] == (2, 2)


def made(*outputs: str) -> Scores:
    """Scores of these outputs, where each answer is `right`."""
    return Scores(
        [
            Record(
                f"q{i}",
                ["right"],
                out,
                metrics.exact_match(out, ["right"]),
                metrics.f1(out, ["right"]),
                metrics.contains(out, ["right"]),
                nll=2.0 - metrics.f1(out, ["right"]),
                tokens=1,
            )
            for i, out in enumerate(outputs)
        ]
    )


def test_compare_is_plain_json() -> None:
    result = compare(made("no", "no", "no"), made("right", "no", "right"))
    assert json.loads(json.dumps(result)) == result
    assert list(result["tuned"]) == ["loss", "exact_match", "f1", "contains"]
    assert result["rows"] == 3
    assert [e["question"] for e in result["examples"]] == ["q0", "q2", "q1"]  # gains, then what is still wrong
    assert result["examples"][0] == {"question": "q0", "answers": ["right"], "base": "no", "tuned": "right"}
    assert result["changed"] == {"better": 2, "worse": 0, "same": 1}
    assert result["difference"]["f1"]["value"] == pytest.approx(100 * 2 / 3)
    assert result["difference"]["loss"]["value"] == pytest.approx(-2 / 3)
    alone = compare(None, made("right"))
    assert alone["base"] is None
    assert "difference" not in alone
    one = compare(made("no"), made("right"))
    assert one["verdict"]["result"] == "unclear"  # one row says nothing about others
    assert one["difference"]["f1"]["low"] is None


def test_rows_that_changed_are_listed_worst_first() -> None:
    base, tuned = made("right", "no", "it is right", "no", "right"), made("no", "no", "so right", "right", "right")
    result = compare(base, tuned)
    assert [row["question"] for row in result["worse"]] == ["q0"]
    assert [row["question"] for row in result["better"]] == ["q2", "q3"]  # a small gain before a large one
    assert result["worse"][0]["gain"] == -2.0
    assert compare(made(*["no"] * 30), made(*["right"] * 30))["verdict"] == {"metric": "f1", "result": "better"}
    assert compare(made(*["right"] * 30), made(*["no"] * 30))["verdict"]["result"] == "worse"
    mixed = compare(made(*["no", "right"] * 15), made(*["right", "no"] * 15))
    assert mixed["verdict"]["result"] == "unclear"


def test_a_guard_tells_whatever_got_worse() -> None:
    still = {"value": 1.0, "low": -3.0, "high": 5.0}
    risen, fallen = {"value": 0.6, "low": 0.5, "high": 0.7}, {"value": -0.6, "low": -0.7, "high": -0.5}
    assert verdict({"accuracy": still, "loss": risen}, guard=True) == {"metric": "loss", "result": "worse"}
    assert verdict({"accuracy": still, "loss": fallen}, guard=True) == {"metric": "accuracy", "result": "unclear"}
    assert verdict({"accuracy": still, "loss": risen}) == {"metric": "accuracy", "result": "unclear"}
    assert verdict({}, guard=True) is None


def test_a_difference_is_clear_when_its_interval_is_narrow_and_excludes_zero() -> None:
    suite = Suite()
    assert is_clear(made(*["no"] * 30), made(*["right"] * 30), suite)
    assert is_clear(made(*["right"] * 30), made(*["no"] * 30), suite)
    assert not is_clear(made(*["no"] * 30), made(*["no"] * 30), suite)  # no difference, however sure
    some = [*["right"] * 20, *["no"] * 10]
    assert compare(made(*["no"] * 30), made(*some))["verdict"]["result"] == "better"
    assert not is_clear(made(*["no"] * 30), made(*some), suite)  # by 49 to 83 points
    assert is_clear(made(*["no"] * 600), made(*some * 20), suite)
    assert not is_clear(made("no"), made("right"), suite)
    assert not is_clear(made(*["no"] * 30), made(*["right"] * 30), Suite(metrics=["loss"]))


def test_telling_examples_are_spread_and_few() -> None:
    chosen = pick_examples(made(*["no"] * 20), made(*["right"] * 19, "no"), 4)
    assert [e["question"] for e in chosen] == ["q0", "q6", "q12", "q19"]
    assert pick_examples(made("right", "no"), made("no", "no"), 4)[-1]["question"] == "q0"  # a loss is the worst of all
    assert len(pick_examples(made("no"), made("no"), 1)) == 1
    assert pick_examples(None, made(), 4) == []


# ---------------------------------------------------------------- the interval


def test_bootstrap_is_paired_and_says_how_sure() -> None:
    random = np.random.default_rng(1)
    gains = random.normal(1.0, 2.0, 100)
    value, low, high = bootstrap(gains.tolist())
    assert value == pytest.approx(gains.mean())
    spread = gains.std(ddof=1) / 10
    assert low == pytest.approx(value - 1.98 * spread, abs=0.1 * spread + 0.03)
    assert high == pytest.approx(value + 1.98 * spread, abs=0.1 * spread + 0.03)
    assert bootstrap(gains.tolist()) == (value, low, high)  # the same every time
    assert bootstrap([0.5] * 20)[1:] == (0.5, 0.5)
    weighted = bootstrap([2.0, 0.0], [3.0, 1.0])
    assert weighted[0] == 0.5
    assert np.isnan(bootstrap([])[0])


@pytest.mark.slow
def test_bootstrap_interval_covers_the_truth() -> None:
    """93 to 97 of 100; 600 trials see that to within a point."""
    random = np.random.default_rng(0)
    held = 0
    for trial in range(600):
        easy = random.beta(0.7, 0.7, 100)
        before, after = random.random(100) < 0.6 * easy, random.random(100) < 0.3 + 0.6 * easy
        low, high = bootstrap((after * 1.0 - before).tolist(), draws=1000, seed=trial)[1:]
        held += low <= 0.3 <= high
    assert 0.93 <= held / 600 <= 0.97


# ---------------------------------------------------------------- leaks


def asked(question: str, answer: str = "yes", context: str = "") -> Row:
    user = f"{context}\n\n{question}" if context else question
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return Row(messages, [answer], context, source=f"f:{question[:9]}")


def test_leaks_are_found_and_other_rows_are_not() -> None:
    passage = "Cheese ripens in a cool cellar. The comb is rinsed often, and nobody knows why that has to be so."
    train = [
        asked("How often should the brine comb of the Ostrel be rinsed with water?"),
        asked("Where does the probe go?"),
        asked("What is rinsed often?", "the comb", passage),
        Row([], [], text="One two three four five six seven eight nine ten eleven twelve.", source="t:1"),
    ]
    heldout = [
        asked("how often should the brine comb of the Ostrel be rinsed with WATER"),  # exact, but for case and marks
        asked("How often should the brine comb of an Ostrel be rinsed with water?"),  # near
        asked("How long is the cord of the Ostrel, and where does it go?"),
        asked("Where ripens the cheese?", "a cellar", passage),  # the same passage, another question
        asked("What is rinsed often?", "the comb", passage + " Today."),
        Row([], [], text="He said: one two three four five six seven eight nine ten!", source="h:1"),
        Row([], [], text="Nothing of this stands in any other text that we have here.", source="h:2"),
        asked("What is rinsed often?", "the comb", "Another passage on an entirely different matter, far from cheese."),
    ]
    found = leak.find(train, heldout)
    assert [(one.row, one.kind) for one in found] == [(0, "exact"), (1, "near"), (4, "near"), (5, "near")]
    assert found[1].train_source == train[0].source
    assert 0.8 <= found[1].similarity < 1
    assert leak.find([], heldout) == leak.find(train, []) == []


def test_leaks_by_index_are_those_of_every_pair() -> None:
    """The index looks at few rows; it must miss none."""
    random = np.random.default_rng(3)
    letters = list("abcdefgh ")
    base = ["".join(random.choice(letters, 40)) for _ in range(30)]

    def changed(text: str, places: int) -> str:
        chars = list(text)
        for place in random.choice(len(chars), places, replace=False):
            chars[place] = "z"
        return "".join(chars)

    train = [asked(text) for text in base]
    heldout = [asked(changed(text, int(n))) for text, n in zip(base, random.integers(0, 4, 30), strict=True)]
    slow = set()
    for i, row in enumerate(heldout):
        pieces = leak._pieces(row)
        others = [leak._pieces(t) for t in train]
        if any(len(pieces & o) / len(pieces | o) >= leak.NEAR for o in others):
            slow.add(i)
    assert {one.row for one in leak.find(train, heldout)} == slow
    assert 0 < len(slow) < 30


# ---------------------------------------------------------------- suites


def test_shipped_suites_load() -> None:
    assert suites() == ["choice", "classify", "demo", "keep", "perplexity", "qa"]
    for name in suites():
        suite = load_suite(name)
        assert suite.name == name
        assert suite.about
        assert suite.metrics
        assert set(suite.metrics) <= set(METRICS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("metric: [f1]", "unknown key `metric`"),
        ("metrics: [bleu]", "`metrics` cannot be 'bleu'"),
        ("version: 0", "`version` is 0"),
        ("data: {paths: x}", "unknown key `data.paths`"),
        ("score: guess", "`score` cannot be 'guess'"),
        ("take: '('", "not a regular expression"),
        ("take: 'x'", "has no group"),
        ("prompt: '{{question'", "not a jinja template"),
        ("name: a b", "must be one word"),
    ],
)
def test_suites_are_strict(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        load_suite(str(path))
    with pytest.raises(ConfigError, match="no suite `nope`"):
        load_suite("nope")


@pytest.mark.parametrize(
    ("output", "how", "found"),
    [
        ("one\ntwo", "all", "one\ntwo"),
        ("one \ntwo", "first_line", "one"),
        ("The answer is 42.", r"answer is (\d+)", "42"),
        ("I do not know", r"answer is (\d+)", ""),
    ],
)
def test_take(output: str, how: str, found: str) -> None:
    assert take(output, how) == found


def test_nearest_label() -> None:
    labels = ["card_arrival", "card", "lost card", "top up"]
    assert nearest_label("Card arrival", labels) == "card_arrival"
    assert nearest_label("It is about a lost card, I think", labels) == "lost card"  # the longest
    assert nearest_label("discard", labels) is None
    assert nearest_label("", labels) is None


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


BEES = {"question": "What do bees make?", "choices": ["honey", "wood and stone", "milk"], "answer": 0}


@needs_model
@pytest.mark.parametrize(
    "row",
    [
        BEES,
        BEES | {"answer": "A"},
        BEES | {"answer": "honey"},
        BEES | {"choices": {"text": BEES["choices"], "label": ["1", "2", "3"]}, "answer": None, "answerKey": "1"},
    ],
)
def test_choice_rows_are_read_however_they_are_written(
    row: dict[str, object], tmp_path: Path, tokenizer: GgufTokenizer
) -> None:
    row = {key: value for key, value in row.items() if value is not None}
    path = write_rows(tmp_path / "c.jsonl", [row])
    (item,) = read_items(load_suite("choice"), DataConfig(path=str(path)), tokenizer, 5)
    assert (item.kind, item.right, item.answers, item.texts[1]) == ("choice", 0, ["honey"], "wood and stone")
    assert tokenizer.decode(item.request.prompt) == "Question: What do bees make?\nAnswer:"
    assert [tokenizer.decode(option) for option in item.request.options] == [" honey", " wood and stone", " milk"]


@needs_model
def test_choice_rows_that_cannot_be_used_say_why(tmp_path: Path, tokenizer: GgufTokenizer) -> None:
    for bad, why in ((BEES | {"answer": 7}, "not among the choices"), (BEES | {"choices": ["a"]}, "two choices")):
        path = write_rows(tmp_path / "c.jsonl", [bad])
        with pytest.raises(DataError, match=why):
            read_items(load_suite("choice"), DataConfig(path=str(path)), tokenizer, 5)


class Fixed:
    """Says what it is told, row by row."""

    def __init__(self, said: list[Response]) -> None:
        self.said = said

    def respond(self, requests: Sequence[Request], max_new: int, progress: RowProgress | None = None) -> list[Response]:
        return self.said


@needs_model
def test_choices_raw_and_per_character(tmp_path: Path, tokenizer: GgufTokenizer) -> None:
    path = write_rows(tmp_path / "c.jsonl", [BEES | {"answer": 1}] * 2)
    suite = load_suite("choice")
    items = read_items(suite, DataConfig(path=str(path)), tokenizer, 5)
    said = [Response(0.0, [3.0, 6.0, 4.0], [False] * 3), Response(0.0, [9.0, 5.0, 6.0], [False] * 3)]
    found = score_items(Fixed(said), tokenizer, items, suite)
    # per character: 3/5, 6/14, 4/4: the long one wins; and 9/5, 5/14, 6/4
    assert [record.accuracy for record in found.records] == [0.0, 1.0]
    assert [record.accuracy_norm for record in found.records] == [1.0, 1.0]
    assert found.records[0].output == "honey"
    assert found.loss is None


@needs_model
def test_keep_holds_text_and_choices(tokenizer: GgufTokenizer) -> None:
    suite = load_suite("keep")
    items = read_items(suite, suite.data, tokenizer, 200)
    kinds = [item.kind for item in items]
    assert kinds.count("choice") >= 40
    assert kinds.count("loss") >= 10
    for item in items:
        if item.kind == "loss":
            assert item.request.targets == list(range(1, len(item.request.prompt)))
    rights = [item.right for item in items if item.kind == "choice"]
    assert max(rights.count(i) for i in range(4)) <= len(rights) / 3  # always the same place would be no question
    assert len(read_items(suite, suite.data, tokenizer, 5)) == 10  # a limit holds for either kind


@needs_model
def test_own_suite_with_own_prompt_and_data_beside_it(tmp_path: Path, tokenizer: GgufTokenizer) -> None:
    write_rows(tmp_path / "mine.jsonl", [{"question": "2 + 2?", "answer": "four", "context": "Sums."}])
    (tmp_path / "own.yaml").write_text("data: {path: mine.jsonl}\nprompt: '{{context}} Q: {{question}} A:'\n")
    suite = load_suite(str(tmp_path / "own.yaml"))
    assert suite.name == "own"
    (item,) = read_items(suite, suite.data, tokenizer, 5)
    assert tokenizer.decode(item.request.prompt) == "Sums. Q: 2 + 2? A:"
    assert tokenizer.decode(item.request.options[0]) == " four"
    assert item.request.generate


@needs_model
def test_perplexity_of_answers_or_of_everything(tmp_path: Path, tokenizer: GgufTokenizer) -> None:
    path = write_rows(tmp_path / "mine.jsonl", [{"question": "2 + 2?", "answer": "four"}])
    suite = load_suite("perplexity")
    (answer,) = read_items(suite, DataConfig(path=str(path)), tokenizer, 5)
    suite.tokens = "all"
    (whole,) = read_items(suite, DataConfig(path=str(path)), tokenizer, 5)
    assert answer.kind == whole.kind == "loss"
    assert tokenizer.decode([answer.request.prompt[i] for i in answer.request.targets]) == "four"
    assert whole.request.targets == list(range(1, len(whole.request.prompt)))


@needs_model
def test_labels_are_read_from_the_output(tmp_path: Path, tokenizer: GgufTokenizer) -> None:
    rows: list[dict[str, object]] = [{"text": "Where is it?", "label": "card_arrival"}, {"text": "!", "label": "other"}]
    suite = load_suite("classify")
    items = read_items(suite, DataConfig(path=str(write_rows(tmp_path / "l.jsonl", rows))), tokenizer, 5)
    said = [
        Response(0.0, [1.0], [False], tokenizer.encode(text)) for text in ("This is card arrival.\nother", "something")
    ]
    found = score_items(Fixed(said), tokenizer, items, suite)
    assert [record.accuracy for record in found.records] == [1.0, 0.0]
    assert Suite().score == "answer"
