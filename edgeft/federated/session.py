"""A federation from its options to its result: what `serve` and `simulate` share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgeft import config
from edgeft.config import Recipe
from edgeft.errors import ConfigError, RunError
from edgeft.federated import server
from edgeft.federated.aggregate import RULES
from edgeft.federated.device import Step
from edgeft.federated.privacy import Privacy
from edgeft.federated.server import ServerState
from edgeft.federated.task import Terms, shared_part
from edgeft.federated.update import Send
from edgeft.formats.source import model_id, model_source
from edgeft.host.files import read_json, write_json
from edgeft.pipeline import finetune
from edgeft.run.folder import Run
from edgeft.run.record import Allowance


@dataclass(frozen=True)
class Plan:
    """What a user asks of a federation, beside the recipe."""

    rounds: int
    min_clients: int
    send: Send
    privacy: Privacy | None
    rule: str

    @staticmethod
    def read(rounds: int, min_clients: int, send: str, dp: str | None, rule: str) -> Plan:
        if rule not in RULES:
            raise ConfigError(f"`--aggregate {rule}` is unknown", f"known: {', '.join(RULES)}")
        sends, privacy = Send.parse(send), Privacy.parse(dp) if dp else None
        if privacy and rule != "mean":
            raise ConfigError(f"`--dp` does not go with `--aggregate {rule}`", "the noise is that of a plain mean")
        return Plan(rounds, min_clients, sends, privacy.calibrated(rounds) if privacy else None, rule)


def federated_recipe(recipe: Recipe, local_epochs: float) -> Recipe:
    """What devices train: their weights at the end of a round, which are averaged over devices and not over steps."""
    if recipe.update.needs_search:
        raise ConfigError(
            f"recipe `{recipe.name}` searches what to update, and the server has not the devices' rows",
            "use `sparse-bp`, or a recipe that `edgeft search` wrote",
        )
    if recipe.how.weights != "fp32":
        raise ConfigError(f"`how.weights: {recipe.how.weights}` cannot be federated", "--set how.weights=fp32")
    return replace(recipe, train=replace(recipe.train, epochs=local_epochs, steps=None, average=0.0, validations=1))


def start(folder: Path, recipe: Recipe, plan: Plan) -> Run:
    """A new server's run folder with the terms in it. recipe: from federated_recipe."""
    if recipe.train.weight_decay and not plan.send.dense:
        what = f"`train.weight_decay` changes all numbers, and `--send {plan.send}` trains and sends some"
        raise ConfigError(what, "--set train.weight_decay=0, or --send dense")
    source = model_source(recipe.model.path)
    identity = model_id(source)
    run = Run.start(folder, recipe, resume=False)
    terms = Terms(
        federation=server.new_name(),
        model=identity,
        model_name=Path(source).name,
        rounds=plan.rounds,
        min_clients=plan.min_clients,
        recipe=shared_part(recipe),
        send=str(plan.send),
        privacy=asdict(plan.privacy) if plan.privacy else None,
    )
    write_json(terms_file(run.path), {**asdict(terms), "rule": plan.rule})
    return run


def resume(folder: Path) -> Run:
    if read_json(terms_file(folder)) is None:
        raise RunError(f"there is no federation in {folder} to resume", "leave out --resume to start one")
    return Run.start(folder, config.load_recipe(str(folder / "recipe.yaml")), resume=True)


def terms_file(folder: Path) -> Path:
    return folder / "terms.json"


def begin(run: Run, step: Step) -> ServerState:
    """The state of the federation, as it was or of round 0."""
    if not run.tokens.is_file():
        step(run, "prepare")
    state = ServerState.load(run)
    if state is None:
        step(run, "begin")
        state = ServerState.load(run)
    if state is None:
        raise RunError(f"{run.path} has no state of a federation", "start another one")
    return state


def finish(run: Run, step: Step, allowed: Allowance, evaluated: bool, to_stderr: bool = False) -> dict[str, Any]:
    """The result as that of any run: exported, and scored if the server has rows of the devices' kind."""
    if not finetune.complete(run, "train"):
        step(run, "finish")
    return finetune.finetune(run, "eval" if evaluated else "export", allowed, to_stderr)


def status(folder: Path) -> dict[str, Any]:
    """Of a server's folder, without a change to it."""
    run = Run.open(folder)
    state = ServerState.load(run)
    if state is None:
        if read_json(terms_file(folder)) is None:
            raise RunError(f"{folder} is not the folder of a federation", "give the --out of `edgeft federate serve`")
        return {"run": str(folder), "round": 0, "history": [], "devices": {}}
    return {"run": str(folder), "complete": (run.path / "done.json").is_file(), **state.summary()}
