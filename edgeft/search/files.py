"""The files of `edgeft search`: recipe, numbers and picture; and the budgets that it was given."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeft import config
from edgeft.config import TENSORS, Recipe, format_duration, format_size
from edgeft.errors import ConfigError, EdgeftError, RunError
from edgeft.host.files import atomic_write, read_json, write_json

MEASURE_S = 180.0  # for trials, where nothing is said
WAYS = ("micro_batch_tokens", "recompute", "optimizer_state")  # what of `how` is chosen with the scheme


@dataclass(frozen=True)
class Budget:
    memory_bytes: float
    time_s: float = math.inf  # of trunk and training; infinite: what the recipe's own scheme takes
    measure_s: float = 0.0  # of trials; 0: first order alone

    @staticmethod
    def read(
        memory: str | None, time: str | None, measure: str | None, device_bytes: int, before: Budget | None
    ) -> Budget:
        """From the command's options; what is left out is as before, or as the device has it."""
        options = {} if memory is None else {"memory_bytes": float(config.parse_size(memory))}
        if time is not None:
            limit = config.parse_time(time, "--time")
            options |= {"time_s": limit, "measure_s": limit / 10}
        if measure is not None:
            options["measure_s"] = config.parse_time(measure, "--measure", least=0.0)
        return dataclasses.replace(before or Budget(float(device_bytes), measure_s=MEASURE_S), **options)


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Asked:
    """What an earlier call asked for."""

    recipe: Recipe
    budget: Budget
    seed: int


class Files:
    """The recipe, and beside it the picture and all numbers."""

    def __init__(self, recipe: Path) -> None:
        self.recipe = recipe
        self.picture, self.numbers = (recipe.with_suffix(f".search.{kind}") for kind in ("png", "json"))

    def start(self, resume: bool) -> Asked | None:
        """What is to go on; RunError where there is nothing, or something that would be overwritten."""
        if self.recipe.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"`-o {self.recipe}` is no name for a recipe", "for example `-o my-recipe.yaml`")
        if not resume:
            if self.recipe.exists():
                raise RunError(f"{self.recipe} is there already", "name another file with -o")
            return None
        asked: Any = (read_json(self.numbers) or {}).get("asked")
        try:
            budget = {key: math.inf if value is None else float(value) for key, value in asked["budget"].items()}
            return Asked(config.build(Recipe, asked["recipe"], recorded=True), Budget(**budget), int(asked["seed"]))
        except (TypeError, KeyError, ValueError, AttributeError):  # missing, damaged or of another form
            raise RunError(
                f"there is no search to go on with in {self.numbers}", "leave out --resume to start one"
            ) from None

    @contextmanager
    def noted(self, recipe: Recipe, budget: Budget, seed: int) -> Iterator[None]:
        """For --resume; a mistake in the call leaves nothing behind."""
        limits = {key: finite(value) for key, value in dataclasses.asdict(budget).items()}
        self._asked = {"recipe": dataclasses.asdict(recipe), "budget": limits, "seed": seed}
        write_json(self.numbers, {"asked": self._asked})
        try:
            yield
        except EdgeftError:
            self.numbers.unlink(missing_ok=True)
            raise

    def finish(self, recipe: Recipe, found: dict[str, Any]) -> None:
        write_json(self.numbers, {"asked": self._asked, **found})
        data = Path(recipe.data.path).name if recipe.data.path else "the embedded handbook"
        with atomic_write(self.recipe) as file:
            file.write(recipe_text(recipe, found, data).encode())


def command(recipe: Recipe, file: Path) -> str:
    """How to train with what was found."""
    words = ["edgeft finetune --recipe", shlex.quote(str(file))]
    words += ["--model", shlex.quote(recipe.model.path)] if recipe.model.path else []
    words += ["--data", shlex.quote(recipe.data.path)] if recipe.data.path else []
    return " ".join(words)


def recipe_text(recipe: Recipe, found: dict[str, Any], data: str) -> str:
    """A recipe file: what was found, what to expect, and the settings that it was searched with."""
    budget, compared, sample = found["budget"], found["compared"], found["sample"]
    allowed = format_size(budget["memory_bytes"])
    allowed += f" and {format_duration(budget['time_s'])}" if budget["time_s"] is not None else ""
    agreed = found["rank_correlation"]
    trials = f"{len(found['measured'])} candidates measured" + (
        f", rank correlation {agreed:.2f}" if agreed is not None else ""
    )
    gains = {name: compared[name] for name in ("greedy", "random")}
    gains[f"the last {compared['last_blocks']} blocks"] = compared["last_blocks_gain"]
    others = ", ".join(f"{name} {gain / (found['all_gain'] or 1.0):.1%}" for name, gain in gains.items())
    lines = [
        f"# Found by `edgeft search` for {found['model']} on {data}, within {allowed}, seed {found['seed']}.",
        f"# Contribution: first order over {sample['rows']} rows ({sample['tokens']} tokens); {trials}.",
        f"# Evolution over {compared['evaluations']} schemes: {found['gain_share']:.1%} of what training everything "
        f"would bring",
        f"# ({others}).",
        f"# To expect: {found['trained_parameters'] / 1e6:.2f} M parameters trained, "
        f"{format_size(found['peak_bytes'])}, {format_duration(found['seconds'])}.",
        f"about: found by search for {found['model']}, within {allowed}",
        "",
        "update:",
        "  method: sparse",
        "  choose: gradient  # of a share, the channels with the largest gradients",
        "  parts:",
        *(f"    - {_flow(part)}" for part in found["parts"]),
    ]
    kept = dataclasses.replace(recipe, how=dataclasses.replace(recipe.how, **found["how"]))
    for section in ("model", "data", "train", "how"):
        lines += _section(section, kept)
    return "\n".join(lines) + "\n"


def _section(name: str, recipe: Recipe) -> list[str]:
    """What differs from the defaults; not where files lie, nor of `how` what belongs to this machine."""
    values, defaults = (dataclasses.asdict(getattr(r, name)) for r in (recipe, Recipe()))
    names = WAYS if name == "how" else [key for key in values if key not in ("path", "heldout")]
    changed = {key: values[key] for key in names if values[key] != defaults[key]}
    return ["", f"{name}:", *(f"  {key}: {config.scalar(value)}" for key, value in changed.items())] if changed else []


def _flow(part: dict[str, Any]) -> str:
    words = [f"blocks: [{', '.join(map(str, part['blocks']))}]"]
    if part["tensors"] != list(TENSORS):
        words.append(f"tensors: [{', '.join(part['tensors'])}]")
    if part["channels"] != 1:
        words.append(f"channels: {part['channels']:g}")
    words += [f"{name}: true" for name in ("biases", "norms") if part[name]]
    return "{" + ", ".join(words) + "}"
