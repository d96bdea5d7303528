"""What is planned against what is used, and what happens when it does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeft import config, plan
from edgeft.errors import DoesNotFitError
from edgeft.sparse import scheme
from tests.conftest import Edgeft, small_rows

RECIPES = ["sparse-bp", "bias-norm", "lora", "qlora", "full"]
GIB = 2**30


def planned(model: Path, name: str, budget: int, longest: int = 256) -> tuple[config.Recipe, dict[str, object]]:
    recipe = config.load_recipe(name)
    shape = plan.shape_of(str(model), recipe.model.frozen)
    return recipe, plan.fit(recipe, shape, scheme.make(recipe.update, shape.depth, "llama"), longest, budget)


@pytest.mark.parametrize("name", RECIPES)
def test_how_is_chosen_to_fit_and_what_is_learned_stays(model: Path, name: str) -> None:
    recipe, free = planned(model, name, 32 * GIB)
    assert recipe.how == config.load_recipe(name).how  # nothing is changed without need
    need = free["peak_bytes"]
    assert isinstance(need, int)
    tight, found = planned(model, name, int(0.9 * need))
    assert found["peak_bytes"] <= 0.9 * need  # type: ignore[operator]
    assert tight.how != recipe.how
    assert config.what(tight) == config.what(recipe)


@pytest.mark.parametrize("name", RECIPES)
def test_too_little_is_refused_with_what_would_fit(model: Path, name: str) -> None:
    with pytest.raises(DoesNotFitError, match="this needs") as caught:
        planned(model, name, 300 << 20)
    assert caught.value.hint
    if name == "full":
        with pytest.raises(DoesNotFitError) as caught:
            planned(model, name, int(1.3 * GIB))
        assert "--set update.blocks=" in caught.value.hint


def test_the_command_refuses_with_exit_code_3(edgeft: Edgeft, tmp_path: Path) -> None:
    device = tmp_path / "tiny.yaml"
    device.write_text("about: tiny\nram_bytes: 400000000\nbudget_bytes: 300000000\n")
    result = edgeft("finetune", "--device", device, "--data", small_rows(tmp_path / "rows"), "--out", tmp_path / "run")
    assert result.returncode == 3
    assert "error: this needs" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "sets"),
    [("sparse-bp", []), ("sparse-bp", ["how.recompute=true"]), ("bias-norm", []), ("lora", []), ("qlora", [])],
)
def test_the_peak_is_near_what_was_planned(recipe: str, sets: list[str], edgeft: Edgeft, tmp_path: Path) -> None:
    data = small_rows(tmp_path / "rows", train=32, heldout=4)
    options = [part for s in [*sets, "train.steps=2", "train.batch_rows=32"] for part in ("--set", s)]
    result = edgeft(
        "finetune",
        "--recipe",
        recipe,
        "--data",
        data,
        "--out",
        tmp_path / "run",
        *options,
        "--until",
        "train",
        "--json",
    )
    assert result.returncode == 0, result.stderr
    wanted = json.loads((tmp_path / "run" / "plan.json").read_text())["peak_bytes"]
    assert json.loads(result.stdout)["peak_bytes"] == pytest.approx(wanted, rel=0.25)
