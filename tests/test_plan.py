"""What is planned: counted terms are what is really held, how is chosen to fit, and what cannot fit is refused."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeft import arch, config
from edgeft.config import Recipe, UpdateConfig
from edgeft.data.forest import Forest
from edgeft.engine import kernels
from edgeft.engine.backend import TORCH
from edgeft.engine.load import load
from edgeft.engine.stack import batch_of
from edgeft.errors import ConfigError, DoesNotFitError
from edgeft.host import device
from edgeft.host.device import load_device
from edgeft.methods import scheme as schemes
from edgeft.plan import buffers, fit, memory, seconds
from edgeft.plan.fit import Job, Machine
from edgeft.plan.rows import Workload
from edgeft.plan.seconds import Rates
from edgeft.plan.shape import shape_of
from edgeft.train.totals import Remaining
from edgeft.ui.plan import lines as plan_lines
from tests.conftest import Edgeft
from tests.support.rows import random_row, small_rows

RECIPES = config.names("recipe")
GIB, MIB = 2**30, 2**20
MACHINE = Machine("a laptop", Rates(2e11, 4e11, 6e11, 2e10, 3e8, "made up"), True, 2, "bf16", True, True)


def job(model: Path, name: str, *sets: str, tokens: int = 256, rows: int = 32) -> Job:
    recipe = config.apply_sets(config.load_recipe(name), ["how.products=bf16", *sets])
    encoded = [random_row(tokens, 8, seed) for seed in range(rows + 4)]
    return Job(recipe, shape_of(str(model), recipe.model.frozen), Workload(encoded[4:], encoded[:4], recipe), MACHINE)


def test_a_large_model_is_planned_with_its_upper_half(model: Path) -> None:
    small = job(model, "sparse-bp")
    large = Job(
        config.load_recipe("sparse-bp"), dataclasses.replace(small.shape, ffn=40_000), small.load, small.machine
    )
    assert (small.scheme.cut, small.recipe.update.blocks) == (3, "3-29")
    assert (large.scheme.cut, large.recipe.update.blocks) == (11, "11-29")


# ---------------------------------------------------------------- what is counted is what is held


@pytest.fixture
def fresh_pool() -> Iterator[None]:
    yield
    TORCH.memory.pool.resize(0)


MIDDLE: dict[str, Any] = {"blocks": "24-27", "tensors": ["q", "k", "v", "o", "up", "down"]}


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("update", "recompute"),
    [
        (UpdateConfig(**MIDDLE), False),
        (UpdateConfig(**MIDDLE), True),
        (UpdateConfig(**MIDDLE, channels=0.25), False),
        (UpdateConfig(**MIDDLE, low_rank=16), False),
        (UpdateConfig(**MIDDLE, low_rank=16), True),
        (UpdateConfig(blocks="24-29", weights=False, biases=True, norms=True), False),
        (UpdateConfig(blocks="25-28", method="tinytl", biases=True, norms=True), False),
        (UpdateConfig(blocks="25-28", method="lora"), False),
    ],
    ids=["sparse", "recomputed", "channels", "low-rank", "low-rank recomputed", "biases", "tinytl", "lora"],
)
@pytest.mark.usefixtures("fresh_pool")
def test_buffers_are_those_that_the_pool_gives_out(
    model: Path, update: UpdateConfig, recompute: bool, half: bool
) -> None:
    stack = load(model, lean=update.method != "lora")
    scheme = schemes.make(update, stack.depth, arch.get("llama"))
    schemes.apply(stack, scheme, 0)
    stack.configure(backend=kernels.load())
    stack.configure(products="bf16" if half else "fp32", recompute=scheme.recompute(recompute))
    _, batch = batch_of(Forest([random_row(40, 6), random_row(24, 5)]), [0, 1])
    hidden = stack.trunk(batch, scheme.cut)
    pool = stack.options.backend.memory.pool
    pool.resize(128)
    for _ in range(2):  # the second pass finds all that it needs
        stack.head.loss(stack.top(hidden, batch, scheme.cut), batch.targets).backward()  # type: ignore[no-untyped-call]
    held = pool.held_bytes() / pool.rows
    top = buffers.TopPass(shape_of(str(model), "auto"), scheme, half, recompute)
    top.run(len(batch.tokens), len(torch.unique(batch.at)))
    foreseen = sum(size * len(some) for size, some in top.pool.buffers.items())
    assert foreseen == pytest.approx(held, rel=0.03)


def test_passes_are_those_that_training_makes(model: Path) -> None:
    recipe = config.apply_sets(config.load_recipe("sparse-search"), ["train.batch_rows=4"])
    shared = random_row(50, 0).ids
    rows = [
        dataclasses.replace(random_row(80, 5, n), ids=np.concatenate([shared, random_row(30, 5, n).ids]))
        for n in range(8)
    ]
    load = Workload(rows[:6], rows[6:], recipe)
    assert (load.longest, load.row_tokens, load.tree_tokens) == (80, 480, 50 + 8 * 30)
    steps = load.passes(1024)
    assert [len(step) for step in steps] == [1, 1]
    assert steps[0][0].tokens == 50 + 4 * 30
    assert steps[0][0].targets == 20
    assert steps[0][0].pairs == 50 * 51 // 2 + 4 * sum(range(51, 81))
    assert [one.tokens for one in load.passes(128)[0]] == [110, 110]  # 50 and two rows' own 30
    assert load.widest(128).tokens == 110
    assert load.truncated(40).longest == 40
    many = Workload(rows[:6], rows[6:], recipe, (600, 20))
    assert many.sampled
    assert not load.sampled
    assert many.row_tokens == 100 * load.row_tokens
    assert many.steps == 100 * 4 * recipe.train.epochs * 6 / 4 / 4


# ---------------------------------------------------------------- how


@pytest.mark.parametrize("name", RECIPES)
def test_how_is_chosen_to_fit_and_what_is_learned_stays(model: Path, name: str) -> None:
    free, plan = fit.make(job(model, name), 64 * GIB)
    asked = job(model, name).recipe
    assert free.recipe.how == asked.how  # nothing is changed without need
    assert plan["peak_bytes"] == max(stage["bytes"] for stage in plan["stages"].values())
    assert sum(plan["terms"].values()) == plan["stages"][plan["peak_stage"]]["resident_bytes"]
    budget = int(0.92 * plan["peak_bytes"])
    tight, found = fit.make(job(model, name), budget)
    assert found["peak_bytes"] <= budget
    assert tight.recipe.how != asked.how
    assert config.learning_identity(tight.recipe) == config.learning_identity(asked)


def test_the_fastest_option_that_fits_is_taken(model: Path) -> None:
    asked = job(model, "sparse-search")
    peak = asked.peak(64 * GIB)
    chosen = fit.choose(asked, int(0.9 * peak))
    assert chosen is not None
    fitting = [
        tried.seconds()
        for option in fit.execution_options(asked)
        if (tried := asked.with_how(option)).peak(int(0.9 * peak)) <= (1 - fit.SLACK) * 0.9 * peak
    ]
    assert len(fitting) > 3
    assert chosen.seconds() == min(fitting)
    assert not chosen.recipe.how.recompute  # the dearest of all


def test_each_option_needs_less(model: Path) -> None:
    base = job(model, "sparse-search", "how.micro_batch_tokens=512")
    how = base.recipe.how
    stages = memory.stages(base, GIB)

    def train(**change: Any) -> dict[str, int]:
        return memory.stages(base.with_how(dataclasses.replace(how, **change)), GIB)["train"]

    assert train(recompute=True)["saved activations"] < 0.5 * stages["train"]["saved activations"]
    assert train(micro_batch_tokens=256)["saved activations"] < 0.7 * stages["train"]["saved activations"]
    assert train(spare_memory=True)["packed frozen weights"] < 0.2 * stages["train"]["packed frozen weights"]
    states = [train(optimizer_state=state)["optimiser state"] for state in ("fp32", "bf16", "8bit")]
    assert states[0] == 8 * fit.trained_parameters(base.shape, base.scheme)
    assert states[0] == 2 * states[1]
    assert 0.25 <= states[2] / states[0] < 0.26
    assert 2 * train(weights="bf16")["trained weights"] == stages["train"]["trained weights"]
    by_blocks = memory.stages(base.with_how(dataclasses.replace(how, trunk_order="blocks")), GIB)["trunk"]
    assert by_blocks["packed frozen weights"] < stages["trunk"]["packed frozen weights"]
    assert stages["train"]["saved activations"] < train(products="fp32")["saved activations"]


def test_bytes_of_dense_weights_are_saved_before_anything_is_recomputed(model: Path) -> None:
    """At its least, a trained number takes 2 bytes for the weight and 2 for its moments."""
    full = job(model, "sparse-rule", "how.micro_batch_tokens=512", "train.batch_rows=2")
    peak, trained = full.peak(64 << 30), fit.trained_parameters(full.shape, full.scheme)
    chosen = fit.choose(full, int((peak - 11.5 * trained) / (1 - fit.SLACK)))
    assert chosen is not None
    how = chosen.recipe.how
    assert (how.weights, how.optimizer_state, how.step_in_place) == ("bf16", "8bit", True)
    assert (how.recompute, how.micro_batch_tokens) == (False, 512)
    terms = memory.stages(chosen, 64 << 30)["train"]
    assert terms["trained weights"] + terms["optimiser state"] < 4.1 * trained
    assert terms["gradients"] < 0.1 * trained
    low_rank = list(fit.execution_options(job(model, "sparse-bp")))
    assert {option.weights for option in low_rank} == {"fp32"}


def test_kernels_are_compiled_to_fit_where_time_alone_is_no_reason(model: Path) -> None:
    recipe = config.apply_sets(config.load_recipe("sparse-search"), ["train.steps=1"])
    shape, load_ = shape_of(str(model), "auto"), Workload([random_row(64, 8)], [random_row(64, 8, 1)], recipe)
    bare = dataclasses.replace(MACHINE, built=False)
    short = Job(recipe, shape, load_, bare)
    assert not short.engine.kernels
    chosen, found = fit.make(short, 64 << 30)
    assert not chosen.engine.kernels
    assert not found["compiled_to_fit"]
    chosen, found = fit.make(short, 900 << 20)  # in plain torch it needs more than 1 GiB
    assert chosen.engine.kernels
    assert found["compiled_to_fit"]
    assert found["how"]["compile"] == "on"
    with pytest.raises(DoesNotFitError):
        fit.make(Job(recipe, shape, load_, dataclasses.replace(bare, compiler=False)), 900 << 20)


# ---------------------------------------------------------------- what


@pytest.mark.parametrize("name", RECIPES)
def test_too_little_is_refused(model: Path, name: str) -> None:
    with pytest.raises(DoesNotFitError, match=r"this needs at least .*; the limit is 300 MiB") as caught:
        fit.make(job(model, name), 300 * MIB)
    assert caught.value.exit_code == 3
    assert caught.value.hint


@pytest.mark.parametrize("name", ["sparse-search", "full", "lora", "qas-int8"])
def test_what_is_proposed_was_tried(model: Path, name: str) -> None:
    asked = job(model, name, tokens=512)
    budget = int(0.85 * fit.least_memory(asked).peak(GIB))
    with pytest.raises(DoesNotFitError) as caught:
        fit.make(asked, budget)
    proposed = [part.split("`")[1] for part in caught.value.hint.split(" fits in ")[:-1]]
    assert 1 <= len(proposed) <= 3
    for options in proposed:
        sets = [part for part in options.split() if part != "--set"]
        tokens = next((int(part.split("=")[1]) for part in sets if part.startswith("data.max_tokens")), 512)
        fit.make(job(model, name, *sets, tokens=tokens), budget)  # raises nothing


def test_fit_shrinks_what_is_learned_and_says_so(model: Path) -> None:
    asked = job(model, "full")
    budget = int(0.7 * fit.least_memory(asked).peak(GIB))
    with pytest.raises(DoesNotFitError, match="this needs"):
        fit.make(asked, budget)
    chosen, plan = fit.make(asked, budget, fit=True)
    assert plan["peak_bytes"] <= budget
    assert plan["changed"]
    assert 0 < plan["trained_parameters"] < fit.trained_parameters(asked.shape, asked.scheme)
    assert all("→" in change for change in plan["changed"])
    assert chosen.recipe.train == asked.recipe.train
    # of all that fit, it learns most
    others = [c for c in fit.reductions(asked) if fit.peak_if_fits(c.job, budget) is not None]
    assert plan["trained_parameters"] == max(fit.trained_parameters(c.job.shape, c.job.scheme) for c in others)


def test_parts_are_thinned_out(model: Path) -> None:
    asked = job(model, "sparse-search")
    parts = [config.PartConfig("3-9", ["q", "v"], 1.0), config.PartConfig("10-19", ["down"], 0.25, biases=True)]
    asked = Job(
        dataclasses.replace(asked.recipe, update=dataclasses.replace(asked.recipe.update, parts=parts)),
        asked.shape,
        asked.load,
        MACHINE,
    )
    thinner = list(fit.reductions(asked))
    assert [change.job.scheme.share(5, "q") for change in thinner] == [0.5, 0.25, 0.125]
    text = thinner[0].options().removeprefix("--set ")
    assert config.apply_sets(Recipe(), [text]).update.parts == thinner[0].job.recipe.update.parts


# ---------------------------------------------------------------- time


def test_time_follows_work_and_rates(model: Path) -> None:
    one = job(model, "sparse-rule")
    faster = dataclasses.replace(MACHINE, rates=dataclasses.replace(MACHINE.rates, fp32=4e11, bf16=8e11, copy=4e10))
    twice = Job(one.recipe, one.shape, one.load, faster)
    took = [sum(j.clock().stages()[stage] for stage in ("trunk", "train")) for j in (one, twice)]
    assert 0.45 < took[1] / took[0] < 0.75  # starting and writing take as long as before
    longer = job(model, "sparse-rule", rows=64)
    assert longer.load.steps == 2 * one.load.steps
    assert 1.5 < longer.clock().stages()["train"] / one.clock().stages()["train"] < 2.1
    again = one.with_how(dataclasses.replace(one.recipe.how, recompute=True))
    assert 1.1 < again.seconds() / one.seconds() < 1.5


def test_a_search_takes_its_time_where_it_pays(model: Path) -> None:
    """A short run is not searched for, and a recipe that knows what it trains neither."""
    searched, rule = job(model, "sparse-search", "train.epochs=60"), job(model, "sparse-rule", "train.epochs=60")
    assert searched.peak(GIB) == rule.peak(GIB)
    took = searched.clock().stages()
    assert took["search"] > 1.0
    assert searched.seconds() - rule.seconds() == pytest.approx(took["search"])
    _, plan = fit.make(searched, 64 * GIB)
    assert plan["search_seconds"] == pytest.approx(took["search"], abs=0.1)
    assert any("search: runs before training" in line for line in plan_lines(plan))
    short = fit.make(job(model, "sparse-search", "train.steps=1"), 64 * GIB)[1]
    assert short["search_seconds"] == 0
    assert not any("found first" in line for line in plan_lines(short))
    assert "search" not in rule.clock().stages()


def test_evaluation_is_planned_within_its_share_of_the_time(model: Path) -> None:
    def planned(*sets: str) -> tuple[dict[str, float], int]:
        encoded = [random_row(256, 8, seed) for seed in range(232)]
        recipe = config.apply_sets(config.load_recipe("sparse-rule"), sets)
        clock = Job(
            recipe, shape_of(str(model), "auto"), Workload(encoded[200:], encoded[:200], recipe), MACHINE
        ).clock()
        return clock.stages(), clock.eval_rows

    whole, rows = planned("eval.time_share=0")
    assert rows == 200
    share, some = planned("train.epochs=8")
    trained = share["trunk"] + share["train"]
    assert 24 < some < 200
    assert 0.9 * 0.25 * trained < share["eval"] <= 0.25 * trained
    assert share["eval"] - 1.0 == pytest.approx((whole["eval"] - 1.0) * some / 200)
    short, least = planned("train.steps=1")
    assert least == 24  # however short the training is
    assert short["eval"] > 0.25 * (short["trunk"] + short["train"])
    assert planned("eval.time_share=100")[1] == 200
    assert planned("eval.rows=7")[1] == 7
    _, plan = fit.make(job(model, "sparse-rule"), 64 * GIB)
    assert plan["rows"]["scored"] == 4
    assert any("(4 held out, up to 4 scored at the end;" in line for line in plan_lines(plan))


def test_rates_are_measured_ones_or_a_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cores = device.cpu_name(), device.cores()
    known = {device.gemm_key(cpu, cores): {"fp32": 100.0, "bf16": 300.0}, device.bytes_key(cpu, cores): {"copy": 12.0}}
    monkeypatch.setattr(device, "read_gemm_cache", lambda: known)
    found = seconds.of_this_machine(cores)
    assert (found.fp32, found.bf16, found.copy) == (1e11, 3e11, 1.2e10)
    assert found.source == "measured by doctor"
    monkeypatch.setattr(device, "read_gemm_cache", dict)
    assert seconds.of_this_machine(cores).fp32 > 1e8  # 0.5e9 under emulation
    profile = seconds.of_profile(load_device("rpi5"))
    assert profile is not None
    assert profile.fp32 == 70e9
    assert seconds.of_profile(dataclasses.replace(load_device("rpi5"), gemm_gflops=0.0)) is None


def test_what_is_left_is_corrected_by_what_was_measured() -> None:
    plan = {"stages": {"train": {"seconds": 100.0}, "export": {"seconds": 10.0}, "eval": {"seconds": 20.0}}}
    left = Remaining(plan, 50)
    assert left.left(0) == pytest.approx((100.0, 130.0))
    for _ in range(30):
        left.step(4.0)  # twice as long as planned
    assert left.left(30) == pytest.approx((2 * 40, 2 * (40 + 30)), rel=0.05)
    assert Remaining({}, 50).left(0) is None


# ---------------------------------------------------------------- the command


def test_the_command_plans_without_torch(edgeft: Edgeft, tmp_path: Path) -> None:
    found = edgeft("plan", "--device", "rpi5", "--data", small_rows(tmp_path / "rows"), "--json")
    assert found.returncode == 0, found.stderr
    plan = json.loads(found.stdout)
    assert plan["budget_bytes"] == load_device("rpi5").budget_bytes
    assert set(plan["stages"]) == {"prepare", "trunk", "train", "export", "eval"}
    assert plan["machine"]["name"] == "rpi5"
    assert plan["engine"]["products"] != "bf16"  # this machine may multiply bf16, a Raspberry Pi 5 does not
    assert plan["seconds"] > 10
    drawn = edgeft("plan", "--memory", "1500MiB", "--data", tmp_path / "rows")
    assert drawn.returncode == 0
    assert "memory by stage" in drawn.stdout
    assert "of 1.46 GiB allowed" in drawn.stdout
    assert "time: about" in drawn.stdout
    assert "libraries" in drawn.stdout


def test_planning_imports_no_torch(model: Path, tmp_path: Path) -> None:
    import subprocess

    script = (
        "import sys; from edgeft.config import apply_sets, load_recipe; from edgeft.host.device import load_device; "
        "from edgeft.pipeline.prepare import plan_of; profile = load_device('auto'); "
        "recipe = apply_sets(load_recipe('sparse-search'), ['data.path=' + sys.argv[1]]); "
        "plan = plan_of(recipe, profile, 8 << 30); "
        "print('torch' in sys.modules, 'transformers' in sys.modules, plan['peak_bytes'])"
    )
    rows = small_rows(tmp_path / "rows")
    found = subprocess.run([sys.executable, "-c", script, str(rows)], capture_output=True, text=True)
    assert found.stdout.startswith("False False "), found.stderr


def test_the_command_refuses_with_exit_code_3(edgeft: Edgeft, tmp_path: Path) -> None:
    rows = small_rows(tmp_path / "rows")
    for command in (["plan"], ["finetune", "--out", tmp_path / "run"]):
        result = edgeft(*command, "--memory", "300MiB", "--data", rows)
        assert result.returncode == 3
        assert "error: this needs" in result.stderr
        assert "hint:" in result.stderr
    assert not (tmp_path / "run").exists()  # nothing was begun


@pytest.mark.parametrize("text", ["", "lots", "1.5", "0", "-3GiB", "12 apples", "1e3MiB", "9" * 30 + "GiB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError):
        config.parse_size(text)


def test_sizes() -> None:
    assert config.parse_size("1500MiB") == 1500 * MIB
    assert config.parse_size("1.5 GiB") == 3 * GIB // 2
    assert config.parse_size("6GB") == 6 * 10**9
    assert config.parse_size("2g") == 2 * GIB
    assert config.parse_size("1048576") == MIB


# ---------------------------------------------------------------- for real


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "sets"),
    [
        ("sparse-bp", []),
        ("sparse-search", []),
        ("sparse-search", ["how.recompute=true"]),
        ("sparse-search", ["how.spare_memory=true", "how.optimizer_state=8bit"]),
        ("bias-norm", []),
        ("lora", []),
        ("qlora", []),
    ],
)
def test_the_peak_is_near_what_was_planned(recipe: str, sets: list[str], edgeft: Edgeft, tmp_path: Path) -> None:
    data = small_rows(tmp_path / "rows", train=32, heldout=4)
    options = [part for s in [*sets, "train.steps=2", "train.batch_rows=32"] for part in ("--set", s)]
    run = tmp_path / "run"
    result = edgeft("finetune", "--recipe", recipe, "--data", data, "--out", run, *options, "--json")
    assert result.returncode == 0, result.stderr
    stages = json.loads((run / "plan.json").read_text())["stages"]
    peaks = json.loads(result.stdout)["peaks"]
    wanted = max(stages[name]["bytes"] for name in ("trunk", "train") if name in stages)
    assert peaks["train"] == pytest.approx(wanted, rel=0.15)
    for name in ("prepare", "export", "eval"):
        assert peaks[name] == pytest.approx(stages[name]["resident_bytes"], rel=0.35)
    steps = [e for e in map(json.loads, (run / "metrics.jsonl").open()) if e["event"] == "step"]
    assert all(e["planned_bytes"] == stages["train"]["bytes"] and e["left_s"] > 0 for e in steps)
