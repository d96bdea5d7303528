"""`edgeft search`: contributions against plain autograd, what is kept, and the recipe that comes out."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeft import arch, config, plan
from edgeft.config import TENSORS, PartConfig, UpdateConfig
from edgeft.data.rows import Row
from edgeft.data.tokens import Encoded
from edgeft.engine import kernels
from edgeft.engine.load import load
from edgeft.engine.stack import batch_of
from edgeft.errors import ConfigError, DataError, DoesNotFitError, RunError
from edgeft.methods import scheme as schemes
from edgeft.pipeline import prepare
from edgeft.plan.fit import Job, Machine
from edgeft.plan.memory import EngineSpec, peak, stages
from edgeft.plan.rows import Workload
from edgeft.plan.seconds import Rates
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.search import contribution, measure, problem
from edgeft.search.costs import Costs
from edgeft.search.evolve import SHARES, Schemes, score
from edgeft.search.files import Budget
from edgeft.search.problem import SearchRequest, parts
from tests.conftest import Edgeft

DEPTH, WIDTH = 4, 128  # of the fixture `tiny`


def rows(count: int, seed: int = 0) -> list[Encoded]:
    random = np.random.default_rng(seed)
    ids = [np.concatenate([[1, 2, 3], random.integers(10, 500, 9)]).astype(np.int32) for _ in range(count)]
    return [Encoded(row, np.arange(len(row)) >= 8, Row([], [])) for row in ids]


# ---------------------------------------------------------------- contributions


@pytest.mark.parametrize("compiled", [False, True])
def test_first_order_is_that_of_plain_autograd(tiny: Path, tmp_path: Path, compiled: bool) -> None:
    """All of the model trained at once, by plain autograd: the same numbers, block by block."""
    torch.set_num_threads(1)
    sample = contribution.draw(rows(8), rows(4, seed=1), seed=0)
    assert len(sample.parts) >= 2
    stack = load(tiny, lean=compiled)
    if compiled:
        stack.configure(backend=kernels.load())
    inputs = contribution.Inputs(tmp_path, sample, DEPTH, WIDTH)
    inputs.fill(stack, sample, lambda: None)
    found = contribution.first_order(stack, sample, inputs, "adamw", lambda: None)
    assert not any(p.requires_grad for p in stack.model.parameters())  # everything is frozen again
    assert all(type(stack.linear(b, t)).__name__ == "PackedLinear" for b in range(DEPTH) for t in TENSORS)

    plain = load(tiny)
    update = UpdateConfig(blocks="all", biases=True, norms=True)
    parameters = schemes.apply(plain, schemes.make(update, DEPTH, arch.get("llama")), seed=0)
    halves = []
    for half in (sample.parts[0::2], sample.parts[1::2]):
        some = [row for part in half for row in part]
        _, batch = batch_of(sample.forest, some)
        loss = plain.head.loss(plain.top(plain.trunk(batch, 0), batch, 0), batch.targets) / sample.forest.trained(some)
        loss.backward()  # type: ignore[no-untyped-call]
        halves.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        for p in parameters.values():
            p.grad = None
    for block in range(DEPTH):
        for place, path in enumerate(linear.path for linear in plain.arch.linears.values()):
            one, other = (half[f"layers.{block}.{path}.weight"] for half in halves)
            want = contribution.expected_decrease(one, other, "adamw")
            whole = found.weights[block, place, -1]
            np.testing.assert_allclose(
                whole, max(0.0, float(want.sum())), rtol=2e-2, atol=0.02 * float(want.abs().sum())
            )
            shares = contribution.gain_by_share(one, other, "adamw")
            np.testing.assert_allclose(found.weights[block, place], shares, atol=0.02 * float(want.abs().sum()))
            bias = contribution.expected_decrease(*(half[f"layers.{block}.{path}.bias"] for half in halves), "adamw")
            assert found.biases[block, place] == pytest.approx(
                max(0.0, float(bias.sum())), rel=2e-2, abs=0.02 * float(bias.abs().sum())
            )
    assert (np.diff(found.weights, axis=2) >= 0).all()  # more channels never bring less
    again = contribution.FirstOrder.from_json(json.loads(json.dumps(found.to_json())))
    assert (again.weights == found.weights).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_warmed_up_it_knows_more_and_is_frozen(tiny: Path, compiled: bool) -> None:
    sample = contribution.draw(rows(8), rows(4, seed=1), seed=0)
    stack = load(tiny, lean=compiled)
    if compiled:
        stack.configure(backend=kernels.load())

    def loss() -> float:
        _, batch = batch_of(sample.forest, sample.parts[0])
        with torch.no_grad():
            return float(stack.head.loss(stack.top(stack.embed(batch.tokens), batch, 0), batch.targets))

    before = loss()
    told: list[int] = []
    contribution.warm_up(
        stack, sample, config.TrainConfig(optimizer="sgd"), config.ExecutionConfig(), lambda: told.append(1)
    )
    assert loss() < before
    assert len(told) == contribution.WARM_STEPS
    assert stack.options.recompute == "none"
    assert not any(p.requires_grad for p in stack.model.parameters())
    for block in range(DEPTH):
        linear = stack.linear(block, "q")
        assert type(linear).__name__ == "PackedLinear"
        assert linear.bias is not None
        assert float(linear.bias.abs().max()) > 0
    warm = loss()
    with contribution.temporarily_trainable(
        stack, schemes.make(UpdateConfig(blocks="all", biases=True), DEPTH, arch.get("llama"))
    ):
        pass
    assert loss() == warm  # it stays so after a look at a scheme


def test_noise_brings_nothing() -> None:
    torch.manual_seed(0)
    signal, noise = 0.2 * torch.randn(200, 200), [torch.randn(200, 200) for _ in range(4)]
    only_noise = float(contribution.expected_decrease(noise[0], noise[1], "adamw").sum())
    both = float(contribution.expected_decrease(signal + noise[2], signal + noise[3], "adamw").sum())
    l1 = float((0.5 * (noise[0] + noise[1])).abs().sum())
    assert abs(only_noise) < 0.02 * l1
    assert both > 0.02 * l1
    sure = torch.randn(50, 50)
    assert float(contribution.expected_decrease(sure, sure, "adamw").sum()) == pytest.approx(float(sure.abs().sum()))
    assert float(contribution.expected_decrease(sure, sure, "sgd").sum()) == pytest.approx(float(sure.square().sum()))


def test_a_share_holds_the_channels_with_the_largest_gradients() -> None:
    torch.manual_seed(0)
    signal = torch.zeros(40, 256)
    signal[:, 5:37] = torch.randn(40, 32)  # an eighth of the channels
    halves = [signal + 0.01 * torch.randn(40, 256) for _ in range(2)]
    eighth, *_, whole = contribution.gain_by_share(halves[0], halves[1], "adamw")
    assert eighth == pytest.approx(float(signal.abs().sum()), rel=0.05)
    assert eighth > 0.95 * whole


def test_a_sample_is_drawn_by_its_seed_and_named_by_its_rows() -> None:
    train, heldout = rows(40), rows(6, seed=1)
    one, two, other = (contribution.draw(train, heldout, seed, tokens=120) for seed in (0, 0, 1))
    assert one.digest() == two.digest() != other.digest()
    assert one.tokens(one.parts) <= 140
    assert sum(map(len, one.heldout)) == 6
    few = contribution.draw(rows(2), [], seed=0)  # nothing held out: a row that is not trained on
    assert [sum(map(len, side)) for side in (few.parts, few.heldout)] == [1, 1]
    with pytest.raises(DataError, match="too few"):
        contribution.draw(rows(1), [], seed=0)


def test_rank_correlation() -> None:
    assert contribution.ranks([3.0, 1.0, 3.0]).tolist() == [2.5, 1.0, 2.5]
    assert contribution.rank_correlation([1, 2, 3, 4], [10, 20, 25, 90]) == pytest.approx(1.0)
    assert contribution.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert math.isnan(contribution.rank_correlation([1, 2], [1, 2]))


def test_candidates_begin_with_the_best_and_the_worst() -> None:
    weights = np.arange(1.0, 29.0).reshape(DEPTH, 7, 1).repeat(4, 2)
    first = contribution.FirstOrder(weights, np.ones((DEPTH, 7)), np.ones(DEPTH))
    found = measure.candidates(first)
    assert [c.name for c in found[:3]] == ["0.q", "3.down", "1.down"]  # the worst, the best, the middle
    assert found[4].name == "biases of the last 2"
    assert len({c.name for c in found}) == len(found) == 4 * 7 + 2
    assert found[4].scheme(arch.get("llama"), DEPTH).blocks == (2, 3)


# ---------------------------------------------------------------- costs


def test_costs_of_parts_add_up_to_the_plan(model: Path) -> None:
    """Of any scheme, to two per cent of memory and six of time."""
    recipe, shape = config.load_recipe("sparse-search"), plan.shape_of(str(model), "auto")
    machine = Machine("this", Rates(1e11, 0.0, 0.0, 1e10, 1.5e8, ""), True, 2, "fp32", True, True)
    load_ = Workload(rows(64), rows(16, seed=1), recipe)
    costs = Costs(Job(recipe, shape, load_, machine, EngineSpec(True, False, 2)))
    problem = costs.problem(np.array([np.inf, np.inf]))
    random = np.random.default_rng(0)
    for number in range(12):
        option, cut = int(random.integers(len(costs.options))), int(random.integers(0, 28))
        level = random.integers(1, 5, (30, 7)) * (random.random((30, 7)) < random.random())
        level = np.where(level, 4, 0) if number < 3 else level
        level[:cut], level[cut, 2] = 0, 4
        biased = int(random.integers(0, 30 - cut))
        one = Schemes(level[None], np.array([biased]), np.array([cut]), np.array([option]))
        chosen = schemes.make(UpdateConfig(parts=parts(level, biased, arch.get("llama"))), 30, arch.get("llama"))
        planned = costs._planned(chosen, costs.options[option])
        got = score(problem, one)[1][0]
        assert got[0] == pytest.approx(peak(stages(planned, 0)["train"]), rel=2e-2)
        assert got[1] == pytest.approx(costs.of(chosen, costs.options[option], math.inf)[1], rel=6e-2)


# ---------------------------------------------------------------- the scheme as a recipe


@pytest.mark.parametrize("family", arch.ARCHITECTURES, ids=lambda family: family.name)
def test_parts_say_exactly_what_was_found(family: arch.Architecture) -> None:
    random = np.random.default_rng(0)
    for biased in (0, 3, 12):
        level = random.integers(0, len(SHARES), (12, 7)) * (random.random((12, 7)) < 0.5)
        found = schemes.make(UpdateConfig(parts=parts(level, biased, family)), 12, family)
        for block in range(12):
            for place, tensor in enumerate(TENSORS):
                assert found.share(block, tensor) == SHARES[level[block, place]]
                inside = block >= 12 - biased and tensor in family.biases
                assert ((block, tensor) in found.biases) == inside
            assert (block in found.norms) == (block >= 12 - biased)


def test_ranges() -> None:
    assert problem.ranges([3, 4, 5, 9, 11, 12]) == ["3-5", 9, "11-12"]
    assert problem.ranges([0]) == [0]
    assert schemes.parse_blocks(problem.ranges([3]), 30) == (3,)


def test_times_and_what_is_none() -> None:
    assert [config.parse_time(t, "--time") for t in ("90s", "30min", "1.5h", "2 m")] == [90, 1800, 5400, 120]
    for text in ("", "soon", "-3min", "1GiB", "0s", "30", "1e9h", "9" * 400 + "s"):
        with pytest.raises(ConfigError, match="--time"):
            config.parse_time(text, "--time")
    assert config.parse_time("0s", "--measure", least=0.0) == 0


# ---------------------------------------------------------------- all of it


# one size of micro-batch: there are few execution options, and all of them are soon planned
# fp32: code for bf16 GEMMs takes more memory than this model, and a share of the channels more of it than whole tensors
SETS = ["train.batch_rows=4", "how.threads=1", "how.nice=0", "how.micro_batch_tokens=64", "how.recompute=true"]
SETS += ["how.products=fp32"]


def recipe_for(tiny: Path, data: Path, *sets: str) -> config.Recipe:
    recipe = config.load_recipe("sparse-search")
    return config.apply_sets(recipe, [f"model.path={tiny}", f"data.path={data}", *SETS, "train.epochs=200", *sets])


def find(recipe: config.Recipe, budget: Budget, **more: Any) -> dict[str, Any]:
    _, train, heldout, _ = prepare.encode(recipe)
    return problem.solve(problem.build_problem(SearchRequest(recipe, budget, 0, **more), train, heldout, Progress()))


@pytest.fixture(scope="module")
def need(tiny: Path, data: Path) -> tuple[float, float]:
    """Seconds of training (almost nothing, everything)."""
    recipe = recipe_for(tiny, data)
    _, train, heldout, _ = prepare.encode(recipe)
    search = problem.build_problem(SearchRequest(recipe, Budget(math.inf, 1e9), 0), train, heldout, Progress())
    found = problem.solve(search)
    assert found["gain_share"] == pytest.approx(1.0)
    least = search.costs.of(problem._smallest_scheme(search.costs), search.costs.options[0], math.inf)[1]
    return float(least), found["seconds"]


@pytest.mark.slow
def test_found_within_both_budgets(tiny: Path, data: Path, need: tuple[float, float]) -> None:
    recipe = recipe_for(tiny, data)
    free = Budget(math.inf, 1e9, 1e6)
    found = find(recipe, free)
    assert found["rank_correlation"] is not None
    assert len(found["measured"]) == 4 * 7 + 2
    tight = Budget(4 << 30, 0.4 * need[0] + 0.6 * need[1], 1e6)
    some = find(recipe, tight)
    assert some["peak_bytes"] <= tight.memory_bytes
    assert some["seconds"] <= tight.time_s
    assert some["measured"] == found["measured"]  # not measured again
    assert 0 < some["gain_share"] < 1
    compared = some["compared"]
    assert compared["evolution"] >= compared["greedy"]
    assert compared["evolution"] > compared["random"]
    assert find(recipe, tight) == some  # the same call, the same answer


def test_too_little_is_refused_with_the_smallest_need(tiny: Path, data: Path) -> None:
    recipe = recipe_for(tiny, data)
    with pytest.raises(DoesNotFitError, match="the smallest scheme needs") as caught:
        find(recipe, Budget(1 << 20, 1e9))
    least = config.parse_size(caught.value.hint.split()[1].rstrip(",")) + (2 << 20)
    assert find(recipe, Budget(least, 1e9))["peak_bytes"] <= least
    with pytest.raises(DoesNotFitError, match="takes") as caught:
        find(recipe, Budget(math.inf, 1e-9))
    assert "--time" in caught.value.hint
    with pytest.raises(ConfigError, match=r"update\.method: sparse"):
        find(recipe_for(tiny, data, "update.method=lora"), Budget(math.inf, 1e9))


COMMAND = ["search", *(part for item in ("train.epochs=1", *SETS) for part in ("--set", item))]


@pytest.mark.slow
def test_the_command_writes_a_recipe_that_can_be_used(tiny: Path, data: Path, tmp_path: Path, edgeft: Edgeft) -> None:
    out = tmp_path / "my.yaml"
    given = [*COMMAND, "--model", tiny, "--data", data, "-o", out]
    result = edgeft(*given, "--memory", "4GiB", "--time", "2h", "--measure", "1s", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (tmp_path / "my.search.png").read_bytes().startswith(b"\x89PNG")
    text = out.read_text()
    assert text.startswith("# Found by `edgeft search` for tiny.gguf")
    assert "Expected: " in text
    made = config.load_recipe(str(out))
    assert made.train.epochs == 1
    chosen = schemes.make(made.update, DEPTH, arch.get("llama"))
    assert [[chosen.share(b, t) for t in TENSORS] for b in range(DEPTH)] == found["shares"]
    there = edgeft(*given)
    assert there.returncode == RunError.exit_code
    assert "already exists" in there.stderr
    shown = edgeft(*COMMAND, "--resume", "-o", out, "--measure", "0s")
    assert shown.returncode == 0, shown.stderr
    assert "evolution" in shown.stdout
    assert "edgeft finetune --recipe" in shown.stdout
    small = edgeft(*COMMAND, "--model", tiny, "--data", data, "-o", tmp_path / "none.yaml", "--memory", "5MiB")
    assert small.returncode == 3, small.stderr
    assert "the smallest scheme needs" in small.stderr
    assert not list(tmp_path.glob("none*"))
    for bad, code in [(["--memory", "much"], 2), (["--resume"], 6)]:
        refused = edgeft(*COMMAND, "--model", tiny, "--data", data, "-o", tmp_path / "none.yaml", *bad)
        assert refused.returncode == code, refused.stderr
        assert "hint:" in refused.stderr


@pytest.mark.slow
def test_killed_and_resumed(tiny: Path, data: Path, tmp_path: Path, edgeft: Edgeft) -> None:
    """What was measured before is not measured again, and the recipe is the one of a search that was left alone."""
    out, whole = tmp_path / "my.yaml", tmp_path / "whole.yaml"
    settings = ["--model", str(tiny), "--data", str(data), "--measure", "1000s", "--set", "train.lr=1e-3"]
    folder = Path(os.environ["EDGEFT_CACHE"]) / "search"

    def measured() -> dict[str, float]:
        notes = [json.loads(note.read_text()) for note in folder.glob("*/note.json")] if folder.is_dir() else []
        return max((note.get("measured", {}) for note in notes if note not in before), key=len, default={})

    before = [json.loads(note.read_text()) for note in folder.glob("*/note.json")] if folder.is_dir() else []
    command = [sys.executable, "-m", "edgeft", *COMMAND, *settings, "-o", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(measured()) < 3 and time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = measured()
    assert not out.exists()
    result = edgeft("search", "--resume", "-o", out, "--json")
    assert result.returncode == 0, result.stderr
    found = {trial["name"]: trial["gain"] for trial in json.loads(result.stdout)["measured"]}
    assert {name: found[name] for name in kept} == kept
    assert len(found) == 4 * 7 + 2
    again = edgeft(*COMMAND, *settings, "-o", whole, "--again")
    assert again.returncode == 0, again.stderr
    assert whole.read_text() == out.read_text()


# ---------------------------------------------------------------- update.blocks: auto


def auto_call(tiny: Path, data: Path, folder: Path, epochs: int) -> list[Any]:
    sets = [part for s in (f"train.epochs={epochs}", *SETS) for part in ("--set", s)]
    return [
        "finetune",
        "--recipe",
        "sparse-search",
        "--model",
        tiny,
        "--data",
        data,
        "--out",
        folder,
        *sets,
        "--until",
        "train",
        "--json",
    ]


@pytest.mark.slow
def test_auto_finds_what_is_trained_and_keeps_it(tiny: Path, data: Path, tmp_path: Path, edgeft: Edgeft) -> None:
    folder = tmp_path / "run"
    call = auto_call(tiny, data, folder, 30)
    result = edgeft(*call)
    assert result.returncode == 0, result.stderr
    run = Run.open(folder)
    assert run.recipe.update.needs_search  # as asked
    assert run.effective.update.parts
    assert not run.effective.update.needs_search
    found = json.loads((folder / "search.json").read_text())
    assert json.loads(result.stdout)["trained_parameters"] == found["trained_parameters"]
    assert found["peak_bytes"] <= found["budget"]["memory_bytes"]
    assert found["seconds"] <= found["budget"]["time_s"]
    planned = json.loads((folder / "plan.json").read_text())
    assert planned["trained_parameters"] == found["trained_parameters"]  # made anew for what was found
    assert {name: planned["how"][name] for name in found["how"]} == found["how"]
    (folder / "done.json").unlink()
    again = edgeft(*call, "--resume")  # `auto` asked for anew is what was found
    assert again.returncode == 0, again.stderr
    assert Run.open(folder).effective == run.effective
    assert json.loads((folder / "plan.json").read_text())["how"] == planned["how"]


@pytest.mark.slow
def test_a_short_run_is_not_searched_for(tiny: Path, data: Path, tmp_path: Path, edgeft: Edgeft) -> None:
    result = edgeft(*auto_call(tiny, data, tmp_path / "run", 1))
    assert result.returncode == 0, result.stderr
    assert "the search would take longer than this training" in result.stderr
    recipe = Run.open(tmp_path / "run").effective
    assert [part.blocks for part in recipe.update.parts] == [UpdateConfig().blocks]
    assert recipe.update.parts[0].tensors == config.load_recipe("sparse-rule").update.tensors
    assert "skipped" in json.loads((tmp_path / "run" / "search.json").read_text())


def test_auto_is_a_part_of_the_recipe() -> None:
    assert UpdateConfig(blocks="auto").needs_search
    assert not UpdateConfig(blocks="auto", parts=[PartConfig([1])]).needs_search
    assert schemes.parse_blocks("auto", 30) == schemes.parse_blocks("10%-67%", 30)


def test_contributions_go_with_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edgeft: Edgeft) -> None:
    monkeypatch.setenv("EDGEFT_CACHE", str(tmp_path))
    entry = tmp_path / "search" / "0123"
    entry.mkdir(parents=True)
    (entry / "note.json").write_text("{}")
    (entry / "inputs.0.bin").write_bytes(bytes(100))
    cleared = edgeft("cache", "--clear", "--json")
    assert cleared.returncode == 0, cleared.stderr
    assert json.loads(cleared.stdout)["freed_bytes"] >= 102
    assert not entry.exists()
