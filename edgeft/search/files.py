"""The files of `edgeft search`: recipe, numbers and picture."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeft import config
from edgeft.config import Recipe
from edgeft.errors import ConfigError, EdgeftError, RunError
from edgeft.host.files import atomic_write, read_json, write_json
from edgeft.search.budget import Budget, finite
from edgeft.search.recipe import recipe_text

if TYPE_CHECKING:
    pass


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

    def _note(self, recipe: Recipe, budget: Budget, seed: int) -> None:
        limits = {key: finite(value) for key, value in dataclasses.asdict(budget).items()}
        self._asked = {"recipe": dataclasses.asdict(recipe), "budget": limits, "seed": seed}
        write_json(self.numbers, {"asked": self._asked})

    @contextmanager
    def noted(self, recipe: Recipe, budget: Budget, seed: int) -> Iterator[None]:
        """For --resume; a mistake in the call leaves nothing behind."""
        self._note(recipe, budget, seed)
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
