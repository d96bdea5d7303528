"""Recipes and devices are read strictly: whatever is wrong is a ConfigError that names the key and the way out."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgeft import config
from edgeft.config import (
    DataConfig,
    Device,
    ExecutionConfig,
    Recipe,
    TrainConfig,
    UpdateConfig,
    apply_sets,
    build,
    load_recipe,
)
from edgeft.config.resolve import use_profile
from edgeft.errors import ConfigError, ConfigWarning
from edgeft.host.device import load_device
from edgeft.run.folder import Run

RECIPES = [
    "bias-norm",
    "cycle",
    "full",
    "lora",
    "qas-int8",
    "qlora",
    "sparse-bp",
    "sparse-rule",
    "sparse-search",
    "tinytl",
]
DEVICES = ["jetson-orin-nano", "laptop-16gb", "laptop-8gb", "mac-m-series", "rpi4", "rpi5", "rpi5-16gb"]
MACHINE = "ram_bytes: 1000\nbudget_bytes: 500\n"


def resolve(recipe: str, device: str, sets: list[str]) -> tuple[Recipe, Device]:
    """As the command line does: recipe file, then the device's `how` and `governor`, then `--set`."""
    profile = load_device(device)
    return config.apply_sets(use_profile(config.load_recipe(recipe), profile), sets), profile


def refused(error: pytest.ExceptionInfo[ConfigError], *words: str) -> None:
    """One line each, and all the words are said."""
    assert error.value.exit_code == 2
    assert "\n" not in error.value.message
    assert "\n" not in error.value.hint
    said = f"{error.value.message} | {error.value.hint}"
    for word in words:
        assert word in said


# ---------------------------------------------------------------- what is wrong in a recipe


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # unknown keys, at each level, with a suggestion
        ("trian: {lr: 1}", ["`trian`", "did you mean `train`?"]),
        ("train: {learning_rate: 1}", ["`train.learning_rate`", "known: epochs, steps"]),
        ("train: {epoch: 1}", ["`train.epoch`", "did you mean `epochs`?"]),
        ("update: {tensor: [q]}", ["`update.tensor`", "did you mean `tensors`?"]),
        ("how: {micro_batch: 8}", ["`how.micro_batch`", "did you mean `micro_batch_tokens`?"]),
        ("1: 2", ["unknown key `1`", "known: name"]),
        ("budget_bytes: 5", ["`budget_bytes`"]),  # belongs to a device
        # wrong types
        ("train: 3", ["`train`", "a table of keys", "3"]),
        ("train:", ["`train`", "a table of keys", "None"]),
        ("train: {lr: fast}", ["`train.lr`", "a number", "'fast'", "peak learning rate"]),
        ("train: {lr: true}", ["`train.lr`", "a number", "True"]),
        ("train: {lr: [1]}", ["`train.lr`", "a number"]),
        ("train: {lr: null}", ["`train.lr`", "a number", "None"]),
        ("train: {batch_rows: 2.5}", ["`train.batch_rows`", "a whole number", "2.5"]),
        ("train: {batch_rows: true}", ["`train.batch_rows`", "a whole number", "True"]),
        ("train: {batch_rows: '8'}", ["`train.batch_rows`", "a whole number", "'8'"]),
        ("train: {steps: soon}", ["`train.steps`", "a whole number or nothing", "'soon'"]),
        ("update: {norms: 1}", ["`update.norms`", "true or false", "1"]),
        ("update: {norms: 'yes'}", ["`update.norms`", "true or false", "'yes'"]),
        ("update: {tensors: {q: 1}}", ["`update.tensors`", "a list"]),
        ("update: {tensors: [[q]]}", ["`update.tensors`", "text", "['q']"]),
        ("model: {path: [a]}", ["`model.path`", "text or nothing"]),
        ("model: {path: 2024-01-01}", ["`model.path`", "text"]),
        # out of range, both ends
        ("train: {lr: -1.0e-4}", ["`train.lr`", "-0.0001", "at least 0"]),
        ("train: {warmup: 1.5}", ["`train.warmup`", "1.5", "from 0 to 1"]),
        ("train: {beta1: 1.0}", ["`train.beta1`", "from 0 to 0.9999"]),
        ("train: {batch_rows: 0}", ["`train.batch_rows`", "at least 1"]),
        ("train: {steps: 0}", ["`train.steps`", "at least 1"]),
        ("data: {max_tokens: 15}", ["`data.max_tokens`", "from 16 to 131072"]),
        ("data: {max_tokens: 131073}", ["`data.max_tokens`", "from 16 to 131072"]),
        ("update: {rank: 1025}", ["`update.rank`", "from 1 to 1024"]),
        # not finite
        ("train: {lr: .nan}", ["`train.lr`", "a number", "nan"]),
        ("train: {lr: .inf}", ["`train.lr`", "a number", "inf"]),
        ("train: {lr: 'inf'}", ["`train.lr`", "a number", "inf"]),
        ("train: {lr: 1e999}", ["`train.lr`", "a number", "1e999"]),
        ("train: {lr: 1" + "0" * 400 + "}", ["`train.lr`", "a number"]),
        ("train: {batch_rows: .inf}", ["`train.batch_rows`", "a whole number"]),
        # not one of the choices
        ("update: {method: lroa}", ["`update.method`", "'lroa'", "did you mean `lora`?"]),
        ("update: {tensors: [q, w]}", ["`update.tensors`", "'w'", "known: q, k, v, o, gate, up, down"]),
        ("update: {tensors: [q, 3]}", ["`update.tensors`", "'3'"]),
        ("update: {channels: 0.3}", ["`update.channels`", "0.3"]),
        ("update: {channels: 0}", ["`update.channels`", "0.0"]),
        ("update: {parts: {blocks: 3}}", ["`update.parts`", "a list"]),
        ("update: {parts: [3]}", ["`update.parts.0`", "a table of keys"]),
        ("update: {parts: [{blocks: 3, tensor: [q]}]}", ["`update.parts.0.tensor`", "did you mean `tensors`?"]),
        ("model: {frozen: fp4}", ["`model.frozen`", "did you mean `nf4`?"]),
        # not a table, not YAML
        ("", ["is not a table of keys"]),
        ("- train", ["is not a table of keys"]),
        ("train: {lr: 1", ["line 1", "not valid YAML"]),
        ("name: a\n\ttrain: 1", ["line 2", "not valid YAML"]),
        ("train: !!python/object/apply:os.getcwd []", ["line 1", "not valid YAML"]),
        ("name: 2024-13-45", ["not valid YAML", "month"]),
        ("name: a\0b", ["not valid YAML"]),
        ("train: {lr: 1}\nname: a\ntrain: {epochs: 2}", ["line 3", "duplicate key `train`"]),
        ("train:\n  lr: 1\n  lr: 2", ["line 3", "duplicate key `lr`"]),
        ("name: " + "[" * 1500, ["not valid YAML"]),
    ],
)
def test_wrong_recipe(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_recipe(str(path))
    refused(error, *words)


def test_recipe_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_bytes("about: für Küchen".encode("latin-1"))
    with pytest.raises(ConfigError) as error:
        load_recipe(str(path))
    refused(error, str(path), "not UTF-8")


@pytest.mark.parametrize(
    ("load", "name", "words"),
    [
        (load_recipe, "sparse_bp", ["unknown recipe `sparse_bp`", "did you mean `sparse-bp`?"]),
        (load_recipe, "xyz", ["unknown recipe `xyz`", "known: bias-norm, cycle, full, lora"]),
        (load_recipe, "", ["unknown recipe ``"]),
        (load_recipe, "rpi5", ["unknown recipe `rpi5`"]),
        (load_recipe, "..", ["unknown recipe `..`"]),
        (load_recipe, "no/such.yaml", ["no recipe file no/such.yaml", "edgeft recipes"]),
        (load_device, "rpi", ["unknown device `rpi`", "did you mean `rpi"]),
        (load_device, "autom", ["unknown device `autom`", "did you mean `auto`?"]),
        (load_device, "lora", ["unknown device `lora`"]),
        (load_device, "no/such.yaml", ["no device file no/such.yaml", "edgeft devices"]),
    ],
)
def test_unknown_names(load: Any, name: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(name)
    refused(error, *words)


def test_folder_is_not_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe(f"{tmp_path}/")
    refused(error, "no recipe file")


# ---------------------------------------------------------------- what is wrong in a device


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MACHINE + "how: {lr: 1}", ["`how.lr`"]),
        (MACHINE + "how: {batch_rows: 1}", ["`how.batch_rows`"]),
        (MACHINE + "how: {threads: many}", ["`how.threads`", "a whole number"]),
        (MACHINE + "how: {micro_batch_tokens: 1}", ["`how.micro_batch_tokens`", "at least 16"]),
        (MACHINE + "how: 4", ["`how`", "a table of keys"]),
        (MACHINE + "how:", ["`how`", "a table of keys"]),
        (MACHINE + "train: {lr: 1}", ["unknown key `train`"]),
        (MACHINE + "update: {blocks: 2}", ["unknown key `update`"]),
        (MACHINE + "core: 4", ["`core`", "did you mean `cores`?"]),
        (MACHINE + "cores: 0", ["`cores`", "at least 1"]),
        ("ram_bytes: 8 GB", ["`ram_bytes`", "a whole number", "'8 GB'"]),
        ("ram_bytes: 1000\nbudget_bytes: 1001", ["`budget_bytes`", "1001", "1000"]),
        ("ram_bytes: 1000", ["`budget_bytes`"]),
        ("budget_bytes: 1000", ["`ram_bytes`"]),
    ],
)
def test_wrong_device(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_device(str(path))
    refused(error, *words)


# ---------------------------------------------------------------- --set


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("train.lr=2e-4", 2e-4),  # YAML 1.1 reads this as text
        ("train.lr=2.0e-4", 2e-4),
        ("train.lr=1", 1.0),
        ("train.steps=10", 10),
        ("train.steps=10.0", 10),
        ("train.steps=null", None),
        ("train.steps=none", None),
        ("data.max_tokens= 512", 512),
        ("update.tensors=q,v", ["q", "v"]),
        ("update.tensors=[q, v]", ["q", "v"]),
        ("update.tensors=q", ["q"]),
        ("update.blocks=6", 6),
        ("update.blocks=11-19", "11-19"),
        ("update.blocks=[3, 7]", [3, 7]),
        ("update.blocks=37%-67%", "37%-67%"),
        ("update.norms=true", True),
        ("update.norms=no", False),
        ("how.threads=2", 2),
        ("model.path=null", None),
        ("model.path=~", None),
        ("model.path=/a b/c=d.gguf", "/a b/c=d.gguf"),
        ("model.path=007", "007"),  # text knobs take text that YAML would read as something else
        ("model.path=1.10", "1.10"),
        ("model.path=no", "no"),
        ("model.path=2024-01-01", "2024-01-01"),
        ("model.path=2024-13-45", "2024-13-45"),
        ("data.system=Answer: briefly", "Answer: briefly"),
        ("data.system=[unclosed", "[unclosed"),
        ("data.system=#5", "#5"),
        ("data.system='quoted'", "quoted"),
        ("data.system=", ""),
    ],
)
def test_set(item: str, value: object) -> None:
    section, _, name = item.partition("=")[0].partition(".")
    made = getattr(getattr(apply_sets(Recipe(), [item]), section), name)
    assert made == value
    assert type(made) is type(value)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("train.lr", ["`--set train.lr`", "key=value", "--set train.epochs=2"]),
        ("=3", ["key=value"]),
        ("train.rl=3", ["`train.rl`", "did you mean `lr`?"]),
        ("lr=3", ["unknown key `lr`"]),
        ("train.lr.x=3", ["`train.lr`", "a number"]),
        ("train..lr=3", ["`train.`"]),
        ("train=3", ["`train`", "a table of keys"]),
        ("train.lr=", ["`train.lr`", "a number", "''"]),
        ("train.lr=nan", ["`train.lr`", "nan"]),
        ("train.lr=-inf", ["`train.lr`", "inf"]),
        ("update.tensors=q,x", ["`update.tensors`", "'x'"]),
        ("update.tensors=3", ["`update.tensors`", "a list"]),
    ],
)
def test_wrong_set(item: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        apply_sets(Recipe(), [item])
    refused(error, *words)


def test_later_set_wins_and_nothing_else_changes() -> None:
    before = load_recipe("lora")
    kept = dataclasses.asdict(before)
    after = apply_sets(before, ["train.lr=1", "train={epochs: 7}", "train.lr=2"])
    assert (after.train.lr, after.train.epochs) == (2.0, 7.0)
    assert dataclasses.asdict(before) == kept  # the recipe given is left alone
    again = dataclasses.replace(after.train, lr=before.train.lr, epochs=before.train.epochs)
    assert dataclasses.replace(after, train=again) == before


# ---------------------------------------------------------------- keys of earlier versions


REMOVED = [
    ("how.prune", True, False),
    ("how.supervised_only", True, False),
    ("train.token_share", 1.0, 0.5),
    ("update.qas", True, False),
    ("update.rounding", "stochastic", "carry"),
]


@pytest.mark.parametrize(("key", "kept"), [(key, kept) for key, kept, _ in REMOVED])
def test_removed_key_is_ignored_with_a_warning(tmp_path: Path, key: str, kept: Any) -> None:
    section, name = key.split(".")
    path = tmp_path / "own.yaml"
    path.write_text(yaml.dump({section: {name: kept}}), encoding="utf-8")
    with pytest.warns(ConfigWarning, match=f"`{key}` is ignored"):
        assert load_recipe(str(path)) == dataclasses.replace(Recipe(), name="own")
    with pytest.warns(ConfigWarning, match=f"`{key}` is ignored"):
        assert apply_sets(Recipe(), [f"{key}={kept}"]) == Recipe()


@pytest.mark.parametrize(("key", "refused_value"), [(key, refused) for key, _, refused in REMOVED])
def test_removed_value_is_refused_but_an_old_run_still_opens(tmp_path: Path, key: str, refused_value: Any) -> None:
    section, name = key.split(".")
    (tmp_path / "recipe.yaml").write_text(yaml.dump({section: {name: refused_value}}), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_recipe(str(tmp_path / "recipe.yaml"))
    refused(error, f"`{key}` can no longer be {refused_value!r}", f"leave out `{key}`")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Run.open(tmp_path).recipe == Recipe()


# ---------------------------------------------------------------- what is shipped


def test_shipped_names() -> None:
    assert config.names("recipe") == RECIPES
    assert config.names("device") == DEVICES


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipe(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.about
    assert "\n" not in recipe.about
    assert recipe.update.weights or recipe.update.biases or recipe.update.norms
    assert 0 < recipe.train.lr < 0.01
    assert recipe.how == ExecutionConfig()  # how is the device's business


@pytest.mark.parametrize("name", DEVICES)
def test_shipped_device(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert device.about
    assert "\n" not in device.about
    assert 0.6 * device.ram_bytes < device.budget_bytes < device.ram_bytes - 2**30
    assert device.gemm_gflops > 0
    assert {"threads", "micro_batch_tokens"} <= set(device.how)
    assert device.how["threads"] in (0, device.cores)


def test_lora_and_qlora_learn_the_same() -> None:
    lora, qlora = load_recipe("lora"), load_recipe("qlora")
    assert (lora.update, lora.train, lora.data) == (qlora.update, qlora.train, qlora.data)
    assert lora.model.frozen == "dense"
    assert qlora.model.frozen == "auto"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", DEVICES)
def test_device_never_changes_what_is_learned(recipe: str, device: str) -> None:
    resolved, profile = resolve(recipe, device, [])
    assert config.learning_identity(resolved) == config.learning_identity(load_recipe(recipe))
    assert resolved.how.micro_batch_tokens == profile.how["micro_batch_tokens"]


def test_order_is_recipe_device_set(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("how: {micro_batch_tokens: 64, checkpoint_s: 5}", encoding="utf-8")
    resolved, _ = resolve(str(own), "rpi4", ["how.threads=1"])
    assert resolved.name == "own"
    assert resolved.how.checkpoint_s == 5.0  # the recipe's
    assert resolved.how.micro_batch_tokens == 256  # the device's
    assert resolved.how.threads == 1  # the flag's


# ---------------------------------------------------------------- saved and read again


@pytest.mark.parametrize("name", RECIPES)
def test_dump_and_load(tmp_path: Path, name: str) -> None:
    recipe, _ = resolve(
        name, "rpi5", ["train.lr=1e-5", "update.blocks=[3, 7]", "data.system=Grüße: 007", "model.path=no"]
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(config.dump(recipe), encoding="utf-8")
    assert load_recipe(str(path)) == recipe


@settings(database=None, deadline=None)
@given(
    system=st.none() | st.text(),
    lr=st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    blocks=st.integers() | st.text() | st.lists(st.integers()),
)
@example(system="\x85", lr=5e-324, blocks="a\x85b\u2028\u2029")
@example(system="\n a\r\n", lr=1e22, blocks="1:30")
def test_dump_and_load_any_value(system: str | None, lr: float, blocks: object) -> None:
    system = None if system == "none" else system  # that is how people write "nothing"
    data, train, update = DataConfig(system=system), TrainConfig(lr=lr), UpdateConfig(blocks=blocks)
    recipe = Recipe(data=data, train=train, update=update)
    assert build(Recipe, yaml.safe_load(config.dump(recipe))) == recipe


def test_every_knob_is_explained_and_its_default_is_allowed() -> None:
    seen = 0
    sections: list[Any] = [value for value in vars(Recipe()).values() if dataclasses.is_dataclass(value)]
    assert len(sections) == 8
    classes: list[type[Any]] = [Device, *(type(section) for section in sections)]
    for cls in classes:
        for field in dataclasses.fields(cls):
            assert field.metadata["about"], f"{cls.__name__}.{field.name}"
            seen += 1
        assert build(cls, dataclasses.asdict(cls())) == cls()
    assert seen > 40


def test_a_recipe_cannot_be_changed_in_place() -> None:
    recipe = load_recipe("sparse-bp")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.train.lr = 1.0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.train = TrainConfig()  # type: ignore[misc]
