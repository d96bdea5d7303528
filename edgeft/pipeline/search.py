"""`edgeft search`: rows, contributions, the search and its files. A mistake in the call leaves no file behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgeft.arch.check import check_model
from edgeft.config import Device, Recipe
from edgeft.formats.source import model_source
from edgeft.pipeline import prepare
from edgeft.report.heat_map import write_heat_map
from edgeft.run.progress import Progress
from edgeft.search import problem
from edgeft.search.budget import Budget
from edgeft.search.files import Files


@dataclass(frozen=True)
class SearchRequest:
    recipe: Recipe
    budget: Budget
    seed: int
    device: Device | None  # None: this machine
    again: bool  # contributions are computed again, even where they are cached


def search(request: SearchRequest, files: Files, progress: Progress) -> dict[str, Any]:
    """Writes recipe, heat map and numbers; returns the numbers, with the files' names."""
    recipe, budget, seed = request.recipe, request.budget, request.seed
    check_model(model_source(recipe.model.path), recipe.model.frozen)
    _, train, heldout, _ = prepare.encode(recipe)
    with files.noted(recipe, budget, seed):
        posed = problem.build_problem(recipe, train, heldout, budget, seed, progress, request.device, request.again)
        result = problem.find(posed, seed)
    files.finish(recipe, result)
    write_heat_map(result, files.picture)
    names = {"recipe": str(files.recipe), "picture": str(files.picture), "numbers": str(files.numbers)}
    return {**result, "files": names}
