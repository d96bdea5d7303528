"""From names, files and options to one recipe. Recipe file, then device profile, then options: later ones win."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from edgeft.config.reader import build, parse, read_yaml, suggest
from edgeft.config.schema import Device, ExecutionConfig, GovernorConfig, Recipe
from edgeft.errors import ConfigError

DEFAULT_RECIPE = "sparse-bp"


def place(path: str | Path) -> Path:
    """A path with `~` expanded, if that names a user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def exists(path: str | Path) -> bool:
    """Whether the file or folder exists; False for an invalid name, like one of 300 letters."""
    try:
        return place(path).exists()
    except (OSError, ValueError):
        return False


def shipped(folder: str) -> Path:
    """`recipes` or `eval`: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "_shipped" / folder
    return inside if inside.is_dir() else package.parent / folder


def names(kind: str) -> list[str]:
    """Names of the shipped recipes or devices."""
    folder = shipped("recipes") / ("devices" if kind == "device" else "")
    return sorted(p.stem for p in folder.glob("*.yaml"))


def find_file(kind: str, name: str) -> Path:
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = place(name)
        if not path.is_file():
            raise ConfigError(f"no {kind} file {name}", f"`edgeft {kind}s` lists the shipped ones")
        return path
    known = names(kind)
    if name not in known:
        raise ConfigError(f"unknown {kind} `{name}`", suggest(name, known + (["auto"] if kind == "device" else [])))
    return shipped("recipes") / ("devices" if kind == "device" else "") / f"{name}.yaml"


def load_recipe(name: str) -> Recipe:
    path = find_file("recipe", name)
    values = read_yaml(path)
    values.setdefault("name", path.stem)
    return typing.cast(Recipe, build(Recipe, values))


def check_heat(governor: GovernorConfig) -> None:
    """A limit at or below the target would be reached all the time."""
    target, limit = governor.target_celsius, governor.limit_celsius
    if target and limit and limit <= target:
        raise ConfigError(
            f"`governor.limit_celsius` is {limit:g}, `governor.target_celsius` is {target:g}",
            "a run pauses at the limit: set it some degrees above the target",
        )


def apply_sets(recipe: Recipe, sets: Sequence[str]) -> Recipe:
    """`--set train.lr=2e-4`: one knob each, read as YAML."""
    for item in sets:
        key, sign, text = item.partition("=")
        if not sign or not key:
            raise ConfigError(f"`--set {item}` is not key=value", "for example `--set train.epochs=2`")
        nested: Any = _set_value(key, text)
        for part in reversed(key.strip().split(".")):
            nested = {part: nested}
        recipe = typing.cast(Recipe, build(Recipe, nested, base=recipe))
    check_heat(recipe.governor)
    return recipe


def _set_value(key: str, text: str) -> Any:
    try:
        value = parse(text) if text else ""
    except yaml.YAMLError:
        return text
    hint: Any = Recipe
    for part in key.strip().split("."):
        hint = typing.get_type_hints(hint).get(part) if dataclasses.is_dataclass(hint) else None
    wants_text = hint is str or str in typing.get_args(hint)
    if wants_text and typing.get_origin(hint) is not list and not isinstance(value, str):
        # Text that YAML reads as another type: `Answer: yes`, 007, no, 2024-01-01, #5
        return None if text.strip() in ("null", "~") else text
    return value


def use_profile(recipe: Recipe, profile: Device) -> Recipe:
    how = build(ExecutionConfig, profile.how, "how", recipe.how)
    governor = build(GovernorConfig, profile.governor, "governor", recipe.governor)
    return dataclasses.replace(recipe, how=how, governor=governor)


@dataclass(frozen=True)
class Options:
    """The options of a command that choose what runs; None: not given."""

    recipe: str | None = None
    device: str | None = None
    model: str | None = None
    data: str | None = None
    sets: tuple[str, ...] = ()


def recipe_of(options: Options, profile: Device, earlier: Recipe | None = None) -> Recipe:
    """Recipe, then the device's `how`, then the options; a resumed run starts from its earlier recipe instead."""
    if earlier is None:
        recipe = use_profile(load_recipe(options.recipe or DEFAULT_RECIPE), profile)
    else:
        recipe = earlier
        if options.recipe is not None:
            named = load_recipe(options.recipe)
            recipe = dataclasses.replace(recipe, name=named.name, update=named.update, train=named.train)
        if options.device is not None:
            recipe = use_profile(recipe, profile)
    if options.model is not None:
        recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, path=options.model))
    if options.data is not None:
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, path=options.data))
    return _absolute(apply_sets(recipe, options.sets))


def _absolute(recipe: Recipe) -> Recipe:
    """With absolute paths: a run can be resumed from another folder."""

    def full(path: str | None) -> str | None:
        return str(place(path).resolve()) if path and exists(path) else path

    model = dataclasses.replace(recipe.model, path=full(recipe.model.path))
    data = dataclasses.replace(recipe.data, path=full(recipe.data.path), heldout=full(recipe.data.heldout))
    return dataclasses.replace(recipe, model=model, data=data)


def learning_identity(recipe: Recipe) -> dict[str, Any]:
    """The part of a recipe that decides what is learned; two runs that differ here are different runs."""
    values = dataclasses.asdict(recipe)
    return {key: values[key] for key in ("model", "data", "update", "train")}
