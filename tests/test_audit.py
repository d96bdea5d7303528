"""What could be read from what a device would send: found where it can be found, and nothing claimed where not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from edgeft import config
from edgeft.audit import attack, match
from edgeft.audit.pursuit import pursuit
from edgeft.audit.score import rouge, score
from edgeft.audit.sent import Model, Noise, largest, parse_send, restricted
from edgeft.audit.span import read_input, spans_of
from edgeft.audit.words import conclusion
from edgeft.cli import app
from edgeft.data.tokens import Encoded
from edgeft.formats.tokenizer import open_tokenizer
from edgeft.pipeline.audit import Message, audit
from edgeft.pipeline.prepare import encode, prepare
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.ui.audit import print_audit
from tests.support.rows import small_rows

runner = CliRunner()
TEXTS = (
    *("The red door opens at nine.", "My brother keeps his keys under a stone.", "bread and milk", "the door is open"),
    *("Call the doctor on Monday about the leg.", "No bread today, only milk and two eggs."),
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short plain texts: the tiny model's width is 128, and a span of so many tokens excludes nothing."""
    path = tmp_path_factory.mktemp("texts") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), "utf-8")
    return path


def recipe_of(name: str, tiny: Path, texts: Path, *sets: str) -> config.Recipe:
    knobs = [f"model.path={tiny}", f"data.path={texts}", "data.heldout_share=0", "how.threads=1", *sets]
    return config.apply_sets(config.load_recipe(name), knobs)


def audited(name: str, tiny: Path, texts: Path, message: Message, *sets: str) -> list[dict[str, Any]]:
    settings: list[dict[str, Any]] = audit(None, recipe_of(name, tiny, texts, *sets), message, Progress())["settings"]
    return settings


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize("blocks", ["all", "2-3"])
def test_rows_are_read_word_for_word_from_a_dense_gradient(tiny: Path, texts: Path, blocks: str) -> None:
    """Also above a frozen trunk: the server runs every candidate to the cut."""
    settings = audited("full", tiny, texts, Message("1,4", epoch=False), f"update.blocks={blocks}")
    for one in settings:
        assert (one["exact"], one["tokens"]) == (one["rows"], 1.0)
        assert one["canary_found"]
        assert one["guess"]["exact"] == 0
        assert one["guess"]["tokens"] < 0.2
        assert "word for word" in conclusion(one)
    assert settings[0]["read"][0]["read"] == settings[0]["read"][0]["row"]


@pytest.mark.parametrize("channels", ["0.5", "1"])
def test_some_input_channels_are_enough(tiny: Path, texts: Path, channels: str) -> None:
    (one,) = audited(
        "sparse-rule", tiny, texts, Message("1", epoch=False), "update.blocks=all", f"update.channels={channels}"
    )
    assert (one["exact"], one["attack"]) == (1, "span")


def test_a_low_rank_update_hides_the_row_from_the_span_and_not_the_answers(tiny: Path, texts: Path) -> None:
    (one, epoch) = audited("sparse-bp", tiny, texts, Message("1"), "update.blocks=all")
    assert one["exact"] == 0
    assert one["tokens"] < 0.5
    for setting in (one, epoch):
        assert setting["answers"]["seen"] >= 0.7 * setting["answers"]["of"]
    assert f"could list {one['answers']['seen']}" in conclusion(one)


def test_noise_leaves_nothing_and_that_is_what_is_said(tiny: Path, texts: Path) -> None:
    for one in audited("full", tiny, texts, Message("1,4", dp="epsilon=8,delta=1e-5")):
        assert (one["exact"], one["canary_found"], one["attack"]) == (0, False, "none")
        assert one["answers"]["listed"] == []
        assert "could not be read" in conclusion(one)
        assert "no proof" in conclusion(one)


def test_pruning_leaves_tokens_that_stand_out(tiny: Path, texts: Path) -> None:
    (one, _) = audited("full", tiny, texts, Message("1", "top:10%"))
    assert one["exact"] == 0
    assert one["tokens"] > one["guess"]["tokens"] + 0.3
    assert "of the tokens" in conclusion(one)


def test_biases_and_norms_span_nothing(tiny: Path, texts: Path) -> None:
    for one in audited("bias-norm", tiny, texts, Message("1")):
        assert (one["attack"], one["tokens"], one["bag"]) == ("none", 0.0, [])


def model_and_row(name: str, tiny: Path, texts: Path, *sets: str) -> tuple[attack.Audit, list[Encoded]]:
    recipe = recipe_of(name, tiny, texts, "update.blocks=all", *sets)
    rows = encode(recipe)[1]
    return attack.Audit(attack.Request(recipe, rows, (len(rows),)), open_tokenizer(tiny), Progress()), rows


@pytest.mark.slow
def test_matching_reads_a_short_row_from_a_low_rank_update(tiny: Path, texts: Path) -> None:
    made, rows = model_and_row("sparse-bp", tiny, texts)
    row = next(row for row in rows if made.tokenizer.decode(row.ids) == "the door is open")
    gradient = made.model.gradient([row])
    found = match.match(made.model, made.known, gradient, row, made.guessed, 40)
    assert found.rows == [row.ids.tolist()]


def test_matching_knows_which_token_is_wrong(tiny: Path, texts: Path) -> None:
    """The slope by differences is that of the loss: along the way from a token to another, both change alike."""
    made, rows = model_and_row("sparse-bp", tiny, texts)
    row = rows[3]
    search = match.Matching(made.model, made.known, made.model.gradient([row]), row)
    ids = torch.from_numpy(row.ids).long()
    assert search.loss(ids)[0] == pytest.approx(0, abs=1e-5)
    wrong = ids.clone()
    wrong[2] = 7
    loss, mine = search.loss(wrong)
    slope = search._slope(wrong, search._direction(mine))
    step = 0.02 * torch.nn.functional.normalize(torch.randn(slope.shape, generator=torch.Generator().manual_seed(0)))
    embed, losses = made.model.stack.embed, []
    for sign in (1, -1):
        made.model.stack.embed = lambda tokens, sign=sign: embed(tokens) + sign * step
        losses.append(search.loss(wrong)[0])
    made.model.stack.embed = embed
    assert losses[0] - losses[1] == pytest.approx(2 * float((slope * step).sum()), rel=0.1, abs=1e-5)
    assert loss > 0.05


def test_a_moved_piece_leaves_all_else_in_order() -> None:
    ids = torch.arange(8)
    assert match.moved(2, 3, 5, ids).tolist() == [0, 1, 4, 5, 6, 2, 3, 7]
    assert match.moved(4, 5, 1, ids).tolist() == [0, 4, 5, 1, 2, 3, 6, 7]
    assert match.replaced(1, 9, ids).tolist() == [0, 9, 2, 3, 4, 5, 6, 7]


# ---------------------------------------------------------------- what is sent


def test_every_input_lies_in_the_span_and_others_do_not(tiny: Path, texts: Path) -> None:
    made, rows = model_and_row("full", tiny, texts)
    stack, ids = made.model.stack, torch.from_numpy(rows[0].ids[:-1]).long()
    (span,) = spans_of(made.model.gradient(rows[:1]), stack, 0)
    assert span.exact
    assert span.rank == len(set(ids.tolist()))
    every = span.distances(read_input(stack, 0, stack.embed(torch.arange(made.known.vocabulary))).detach())
    inside = torch.unique(ids)
    assert float(every[inside].max()) < 1e-5
    every[inside] = 1.0
    assert float(every.min()) > 0.3


def test_an_epoch_is_the_optimisers_change_and_leaves_the_model_as_it_was(tiny: Path, texts: Path) -> None:
    sets = ("train.optimizer=sgd", "train.momentum=0", "train.clip=0", "train.lr=0.5", "train.lr_width=0")
    made, rows = model_and_row("full", tiny, texts, *sets)
    before = {name: p.detach().clone() for name, p in made.model.parameters.items()}
    gradient, change = made.model.gradient(rows), made.model.epoch(rows)
    for name, tensor in made.model.parameters.items():
        assert torch.equal(tensor, before[name])
        torch.testing.assert_close(change[name], -0.5 * gradient[name], rtol=1e-3, atol=1e-6)


def test_an_epoch_of_int8_weights_is_sent_too(tiny: Path, texts: Path) -> None:
    made, rows = model_and_row("qas-int8", tiny, texts)
    stored = {name: b.clone() for name, b in made.model.stack.model.named_buffers()}
    change = made.model.epoch(rows)
    assert all(bool(tensor.any()) for tensor in change.values())
    assert all(torch.equal(b, stored[name]) for name, b in made.model.stack.model.named_buffers())


def test_an_epoch_trains_the_support_alone(tiny: Path, texts: Path) -> None:
    """As a device does: its rows do not choose what they change."""
    recipe = recipe_of("sparse-bp", tiny, texts, "update.blocks=all")
    rows = encode(recipe)[1]
    model = Model(recipe, rows, 0.02)
    change = model.epoch(rows[:1])
    count = sum(tensor.numel() for tensor in change.values())
    assert sum(int(mask.sum()) for mask in model.support.values()) == round(0.02 * count)
    for name, tensor in change.items():
        assert not tensor[~model.support[name]].any()
    assert sum(int(tensor.count_nonzero()) for tensor in change.values()) > 0.005 * count


def test_the_largest_numbers_are_sent() -> None:
    tensors = {"a": torch.tensor([[1.0, -9.0], [3.0, 0.5]]), "b": torch.tensor([4.0, -2.0, 0.1, 8.0])}
    kept = restricted(tensors, largest(tensors, parse_send("top:25%")))
    assert kept["a"].tolist() == [[0, -9], [0, 0]]
    assert kept["b"].tolist() == [0, 0, 0, 8]
    assert restricted(tensors, largest(tensors, parse_send("dense"))) is tensors


def test_noise_is_as_much_as_epsilon_asks_for() -> None:
    """σ of the Gaussian mechanism at ε = 1, δ = 1e-5, from Balle and Wang 2018; the clipped norm is exact."""
    assert Noise(epsilon=1, delta=1e-5).multiplier == pytest.approx(3.7306, abs=1e-3)
    noise = Noise(noise=0.5, clip=2.0)
    tensors = {"a": torch.full((100, 100), 0.03)}  # of norm 3
    noisy = noise.apply(tensors, 0)["a"]
    assert float(noisy.mean()) == pytest.approx(0.02, abs=0.03)
    assert float(noisy.std()) == pytest.approx(1.0, rel=0.03)
    assert not torch.equal(noisy, noise.apply(tensors, 1)["a"])


# ---------------------------------------------------------------- figures


def test_rouge_counts_words_and_pairs() -> None:
    assert rouge("The cat sat", "the CAT sat.", 2) == 1.0
    assert rouge("a b c d", "a b x", 1) == pytest.approx(4 / 7)
    assert rouge("a b c d", "a b x", 2) == pytest.approx(2 / 5)
    assert rouge("", "a", 1) == 0.0


def test_a_reading_that_lists_everything_reads_nothing(model: Path) -> None:
    tokenizer = open_tokenizer(model)
    rows = [tokenizer.encode("The key is under the stone."), tokenizer.encode("Call me at nine.")]
    whole, best = score(rows, [rows[1], rows[0]], [], tokenizer)
    assert (whole.exact, whole.tokens, whole.rouge2) == (2, 1.0, 1.0)
    assert best == rows
    everything, _ = score(rows, [], list(range(tokenizer.vocab_size)), tokenizer)
    assert everything.exact == 0
    assert everything.tokens < 0.2


def test_pursuit_finds_what_a_matrix_is_made_of() -> None:
    random = np.random.default_rng(0)
    words = torch.nn.functional.normalize(torch.from_numpy(random.standard_normal((500, 64))).float())
    mixed = torch.from_numpy(random.standard_normal((6, 20))).float()
    chosen = [3, 77, 140, 201, 320, 499]
    assert set(pursuit(words, words[chosen].T @ mixed, 20)) == set(chosen)
    assert set(pursuit(words, words[chosen].T @ mixed, 20, given=chosen[:2])) == set(chosen[2:])


# ---------------------------------------------------------------- the command


def test_the_command_prints_a_table_and_plain_words(tiny: Path, texts: Path) -> None:
    options = ["--recipe", "full", "--model", str(tiny), "--data", str(texts), "--set", "data.heldout_share=0"]
    options += ["--set", "how.threads=1", "--rows", "1"]
    shown = runner.invoke(app, ["audit", *options], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "honest but curious server could read it, word for word" in shown.output
    assert "--match" not in shown.output
    told = runner.invoke(app, ["audit", *options, "--json"])
    result = json.loads(told.stdout)
    assert (result["cut"], result["send"], result["dp"]) == (0, "dense", None)
    assert [one["kind"] for one in result["settings"]] == ["gradient", "epoch"]


def test_an_attack_that_was_not_tried_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    guess = {"tokens": 0.1, "rouge1": 0.0}
    answers = {"of": 5, "seen": 3, "guess": 1, "listed": ["a"] * 9}
    one = {"kind": "gradient", "rows": 1, "exact": 0, "tokens": 0.0, "rouge1": 0.0, "rouge2": 0.0, "attack": "none"}
    one |= {"canary_found": False, "guess": guess, "answers": answers, "read": [{"row": "a [b]", "read": ""}]}
    print_audit(Console(width=200), {"send": "top:1%", "dp": None, "match_steps": 0, "settings": [one]})
    shown = capsys.readouterr().out
    assert "only the top 1% of the numbers" in shown
    assert "was not tried: --match" in shown
    assert "could list 3, among 9; a guess has 1" in shown
    assert "a [b]" in shown


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--rows", "0"], 2, "--rows 0"),
        (["--rows", "a,2"], 2, "--rows a,2"),
        (["--send", "top:0%"], 2, "--send top:0%"),
        (["--send", "some"], 2, "--send some"),
        (["--dp", "epsilon=8,noise=1"], 2, "needs epsilon or noise"),
        (["--dp", "epsilon=x"], 2, "not a number"),
        (["--dp", "epsilon=-1"], 2, "not a valid noise"),
        (["--dp", "budget=3"], 2, "not a valid noise"),
        (["--recipe", "sparse-search"], 2, "before its search"),
        (["--rows", "99"], 4, "--rows asks for 99"),
        (["no-such-run"], 6, "is not a run folder"),
    ],
)
def test_what_cannot_be_audited_is_refused(options: list[str], code: int, words: str, tiny: Path, texts: Path) -> None:
    given = ["--model", str(tiny), "--data", str(texts), "--set", "data.heldout_share=0", *options]
    result = runner.invoke(app, ["audit", *given], env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    assert words in result.output


def test_a_runs_own_rows_and_scheme_are_audited(tiny: Path, texts: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_bytes(texts.read_bytes())
    run = Run.start(tmp_path / "run", recipe_of("full", tiny, data, "update.blocks=1-3"), resume=False)
    prepare(run, Progress())
    data.unlink()
    result = audit(run, run.effective, Message("2", epoch=False), Progress())
    assert (result["cut"], result["settings"][0]["exact"]) == (1, 2)
    refused = runner.invoke(app, ["audit", str(run.path), "--recipe", "full"], env={"COLUMNS": "300"})
    assert refused.exit_code == 2
    assert "a run has its own recipe" in refused.output


@pytest.mark.slow
def test_the_audit_succeeds_on_the_embedded_model(model: Path, tmp_path: Path) -> None:
    """A dense gradient of one row at cut 0: at least 90 % of its tokens, or it is no audit."""
    data = small_rows(tmp_path / "rows", train=4, heldout=1)
    recipe = config.apply_sets(config.load_recipe("full"), [f"model.path={model}", f"data.path={data}"])
    one = audit(None, recipe, Message("1", epoch=False), Progress())["settings"][0]
    assert one["tokens"] >= 0.9
    assert one["exact"] == 1
    assert one["canary_found"]
    assert one["guess"]["tokens"] < 0.5
