"""Output files of `edgeft search` (recipe, numbers, heat map), and its budgets."""

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

MEASURE_S = 180.0  # default for trials
SEARCHED_OPTIONS = ("micro_batch_tokens", "recompute", "optimizer_state")  # keys of `how` that the search chooses


@dataclass(frozen=True)
class Budget:
    memory_bytes: float
    time_s: float = math.inf  # of trunk and training; infinite: the time of the recipe's own scheme
    measure_s: float = 0.0  # of trials; 0: first order only

    @staticmethod
    def read(
        memory: str | None, time: str | None, measure: str | None, device_bytes: int, previous: Budget | None
    ) -> Budget:
        """From the command line; defaults are the previous budget, or the device's."""
        options = {} if memory is None else {"memory_bytes": float(config.parse_size(memory))}
        if time is not None:
            limit = config.parse_time(time, "--time")
            options |= {"time_s": limit, "measure_s": limit / 10}
        if measure is not None:
            options["measure_s"] = config.parse_time(measure, "--measure", least=0.0)
        return dataclasses.replace(previous or Budget(float(device_bytes), measure_s=MEASURE_S), **options)


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class SavedRequest:
    """The request of an earlier call."""

    recipe: Recipe
    budget: Budget
    seed: int


class Files:
    """The recipe, with the heat map and all numbers beside it."""

    def __init__(self, recipe: Path) -> None:
        self.recipe = recipe
        self.picture, self.numbers = (recipe.with_suffix(f".search.{kind}") for kind in ("png", "json"))

    def start(self, resume: bool) -> SavedRequest | None:
        """The request to resume, if any; RunError if there is none, or if a file would be overwritten."""
        if self.recipe.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"`-o {self.recipe}` is not a recipe file name", "for example `-o my-recipe.yaml`")
        if not resume:
            if self.recipe.exists():
                raise RunError(f"{self.recipe} already exists", "name another file with -o")
            return None
        old: Any = (read_json(self.numbers) or {}).get("asked")
        try:
            budget = {key: math.inf if value is None else float(value) for key, value in old["budget"].items()}
            return SavedRequest(config.build(Recipe, old["recipe"], recorded=True), Budget(**budget), int(old["seed"]))
        except (TypeError, KeyError, ValueError, AttributeError):  # missing, damaged or in another format
            raise RunError(f"no search to resume in {self.numbers}", "omit --resume to start one") from None

    @contextmanager
    def saved_request(self, recipe: Recipe, budget: Budget, seed: int) -> Iterator[None]:
        """Saves the request for --resume; deletes it if the search fails with an error."""
        limits = {key: finite(value) for key, value in dataclasses.asdict(budget).items()}
        self._request = {"recipe": dataclasses.asdict(recipe), "budget": limits, "seed": seed}
        write_json(self.numbers, {"asked": self._request})
        try:
            yield
        except EdgeftError:
            self.numbers.unlink(missing_ok=True)
            raise

    def finish(self, recipe: Recipe, result: dict[str, Any]) -> None:
        write_json(self.numbers, {"asked": self._request, **result})
        data = Path(recipe.data.path).name if recipe.data.path else "the embedded handbook"
        with atomic_write(self.recipe) as file:
            file.write(recipe_text(recipe, result, data).encode())


def command(recipe: Recipe, file: Path) -> str:
    """The command that trains with the recipe."""
    words = ["edgeft finetune --recipe", shlex.quote(str(file))]
    words += ["--model", shlex.quote(recipe.model.path)] if recipe.model.path else []
    words += ["--data", shlex.quote(recipe.data.path)] if recipe.data.path else []
    return " ".join(words)


def recipe_text(recipe: Recipe, result: dict[str, Any], data: str) -> str:
    """A recipe file: the scheme, its predicted costs, and the settings of the search."""
    budget, compared, sample = result["budget"], result["compared"], result["sample"]
    limits = format_size(budget["memory_bytes"])
    limits += f" and {format_duration(budget['time_s'])}" if budget["time_s"] is not None else ""
    correlation = result["rank_correlation"]
    trials = f"{len(result['measured'])} candidates measured" + (
        f", rank correlation {correlation:.2f}" if correlation is not None else ""
    )
    gains = {name: compared[name] for name in ("greedy", "random")}
    gains[f"the last {compared['last_blocks']} blocks"] = compared["last_blocks_gain"]
    others = ", ".join(f"{name} {gain / (result['all_gain'] or 1.0):.1%}" for name, gain in gains.items())
    lines = [
        f"# Found by `edgeft search` for {result['model']} on {data}, within {limits}, seed {result['seed']}.",
        f"# Contribution: first order over {sample['rows']} rows ({sample['tokens']} tokens); {trials}.",
        f"# Evolution over {compared['evaluations']} schemes: {result['gain_share']:.1%} of the gain of full training",
        f"# ({others}).",
        f"# Expected: {result['trained_parameters'] / 1e6:.2f} M parameters trained, "
        f"{format_size(result['peak_bytes'])}, {format_duration(result['seconds'])}.",
        f"about: found by search for {result['model']}, within {limits}",
        "",
        "update:",
        "  method: sparse",
        "  choose: gradient  # of a share, the channels with the largest gradients",
        "  parts:",
        *(f"    - {_flow(part)}" for part in result["parts"]),
    ]
    kept = dataclasses.replace(recipe, how=dataclasses.replace(recipe.how, **result["how"]))
    for section in ("model", "data", "train", "how"):
        lines += _section(section, kept)
    return "\n".join(lines) + "\n"


def _section(name: str, recipe: Recipe) -> list[str]:
    """Settings that differ from the defaults, without file paths and machine-specific keys of `how`."""
    values, defaults = (dataclasses.asdict(getattr(r, name)) for r in (recipe, Recipe()))
    names = SEARCHED_OPTIONS if name == "how" else [key for key in values if key not in ("path", "heldout")]
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
