"""The record of a run: the recipe as asked, what planner, search and engine chose, and why.

It is written once, before training; every later stage reads it. What changes later is an event in metrics.jsonl.
"""

from __future__ import annotations

import typing
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from edgeft import config
from edgeft.config import ExecutionConfig, Recipe
from edgeft.errors import ConfigError, DamagedError
from edgeft.host.files import read_json

BEFORE = "recorded by an earlier version, without reasons"


@dataclass(frozen=True)
class Allowance:
    """Resources that the user allows a run."""

    device: str = "auto"  # name of the device profile
    budget_bytes: int = 0  # 0: no limit, no plan
    fit: bool = False  # the run may train less to fit


OPERANDS = ("fp32", "bf16", "int8")


@dataclass(frozen=True)
class EngineChoice:
    kernels: bool  # False: plain torch
    products: str = field(metadata={"choices": OPERANDS})  # of GEMMs
    why: str = ""


@dataclass(frozen=True)
class Resolved:
    asked: Recipe  # as in recipe.yaml
    recipe: Recipe  # as it runs: `update`, `model` and `how` are filled in
    device: str
    budget_bytes: int
    engine: EngineChoice
    execution_why: str  # reason for `recipe.how`
    update_why: str  # reason for `recipe.update`
    changed: list[str] = field(default_factory=list)  # by --fit
    search: dict[str, Any] = field(default_factory=dict)  # its figures; {}: none was needed, or it was skipped

    @staticmethod
    def read(path: Path) -> Resolved:
        try:
            values = _require(Resolved, read_json(path), "the record")
            _of_half(values["engine"])
            _require(EngineChoice, values["engine"], "`engine`")
            asked, recipe = (config.build(Recipe, values.pop(key), recorded=True) for key in ("asked", "recipe"))
            empty = Resolved(asked, recipe, "", 0, EngineChoice(kernels=False, products="fp32"), "", "")
            return typing.cast(Resolved, config.build(Resolved, values, base=empty))
        except ConfigError as error:
            hint = "start another run: the settings of this one are lost"
            raise DamagedError(f"{path} is damaged: {error}", hint) from None


def _require(cls: type[Any], values: Any, name: str) -> dict[str, Any]:
    """`values`, if it is a table with every field of `cls` that has no default."""
    if not isinstance(values, dict):
        raise ConfigError(f"{name} is not a table of keys")
    for f in fields(cls):
        if f.default is MISSING and f.default_factory is MISSING and f.name not in values:
            raise ConfigError(f"{name} has no `{f.name}`")
    return values


def _of_half(engine: Any) -> None:
    """Earlier versions recorded only whether products were in bf16."""
    if isinstance(engine, dict) and "products" not in engine and isinstance(engine.get("half", False), bool):
        engine["products"] = "bf16" if engine.pop("half", False) else "fp32"


def read_engine(path: Path) -> EngineChoice | None:
    """`engine.json`, as in the cache of the search."""
    values = read_json(path) or {}
    _of_half(values)
    kernels, products = values.get("kernels"), values.get("products")
    if not isinstance(kernels, bool) or products not in OPERANDS:
        return None
    return EngineChoice(kernels, products, BEFORE)


def of_earlier_version(folder: Path, recipe: Recipe) -> Resolved | None:
    """From recipe.yaml with `update.parts` filled in, plan.json, search.json and engine.json; None: not started."""
    engine = read_engine(folder / "engine.json")
    if engine is None and not (folder / "best.safetensors").is_file():
        return None
    engine = engine or EngineChoice(kernels=False, products="fp32", why=BEFORE)
    planned, search = read_json(folder / "plan.json") or {}, read_json(folder / "search.json") or {}
    how = recipe.how
    with suppress(ConfigError):  # a plan of another form
        how = config.build(ExecutionConfig, planned.get("how") or {}, "how", how, recorded=True)
    compiled, products = "on" if engine.kernels else "off", engine.products
    effective = replace(recipe, how=replace(how, compile=compiled, products=products))
    budget = planned.get("budget_bytes")
    known = budget if isinstance(budget, int) else 0
    return Resolved(recipe, effective, "unknown", known, engine, BEFORE, BEFORE, search=search_figures(search))


def search_figures(search: dict[str, Any]) -> dict[str, Any]:
    """The part of search.json that the record keeps."""
    return {key: search[key] for key in ("trained_parameters", "cut", "gain_share", "peak_bytes") if key in search}
