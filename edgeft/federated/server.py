"""The server's side of a federation: rounds, the model, what each device did, and the noise that was spent.

All of it is one file, written anew after each round: a server that is killed continues at the round where it was. It
knows devices only by a `Fleet`, which takes tasks to them and brings updates back.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edgeft.errors import DataError, EdgeftError
from edgeft.federated import aggregate, blob
from edgeft.federated.aggregate import Received
from edgeft.federated.task import FIXED, SUPPORT, TRAINED, Task, Terms, pack_model
from edgeft.federated.update import Indices, Layout, decode
from edgeft.run.folder import Run
from edgeft.run.progress import Progress

ATTEMPTS = 3  # at a round, before the server gives up
HINT = "continue with `edgeft federate serve --resume` when more devices are there"


@dataclass(frozen=True)
class Reply:
    """What a device sent: an update and its rows, or why there is none."""

    name: str
    update: bytes = b""
    rows: int = 0
    error: str = ""


class Fleet(Protocol):
    def wait_for(self, count: int) -> int:
        """Devices that are there, once there are so many or the time for it is over."""

    def ask(self, task_of: Callable[[str], bytes]) -> Iterable[Reply]:
        """Every device that is there, by name; those that answer in time."""


@dataclass
class ServerState:
    terms: Terms
    rule: str  # of aggregate.RULES
    fixed: blob.Arrays
    trained: blob.Arrays
    support: Indices | None = None  # the numbers of `trained` that are trained and sent; None: all
    round: int = 0  # rounds that are complete
    usual: float = 0.0  # median norm of the last round's updates
    noises: list[float] = field(default_factory=list)  # of each round
    accepted: dict[str, int] = field(default_factory=dict)  # last round of each device
    history: list[dict[str, Any]] = field(default_factory=list)  # a record of each round

    @staticmethod
    def file(run: Run) -> Path:
        return run.path / "federation.bin"

    @staticmethod
    def load(run: Run) -> ServerState | None:
        found = blob.read(ServerState.file(run), "start another federation: the model of this one is lost")
        if found is None:
            return None
        header, arrays = found
        terms, rule = Terms.read(header.pop("terms")), header.pop("rule")
        fixed, trained = blob.part(arrays, FIXED), blob.part(arrays, TRAINED)
        return ServerState(terms, rule, fixed, trained, arrays.get(SUPPORT), **header)

    def save(self, run: Run) -> None:
        keys = ("rule", "round", "usual", "noises", "accepted", "history")
        header = {"terms": asdict(self.terms), **{key: getattr(self, key) for key in keys}}
        blob.write(self.file(run), blob.pack(header, pack_model(self.fixed, self.trained, self.support)))

    @property
    def layout(self) -> Layout:
        return Layout.of(self.trained, self.support)

    def task(self, name: str) -> Task:
        return Task(self.terms, self.round, self.fixed, self.trained, self.support, self.accepted.get(name, -1))

    def final_task(self) -> Task:
        return Task(self.terms, self.round, self.fixed, self.trained, self.support, final=True)

    def summary(self) -> dict[str, Any]:
        """For people: what was asked, each device's sums, and the record of each round."""
        privacy, devices = self.terms.noise, dict[str, dict[str, int]]()
        for record in self.history:
            for one in record["devices"]:
                known = devices.setdefault(one["name"], {"rounds": 0, "bytes": 0, "rows": 0})
                known |= {"rounds": known["rounds"] + 1, "bytes": known["bytes"] + one["bytes"], "rows": one["rows"]}
        return {
            "model": self.terms.model_name,
            "round": self.round,
            "rounds": self.terms.rounds,
            "min_clients": self.terms.min_clients,
            "send": self.terms.send,
            "aggregate": self.rule,
            "dense_bytes": 4 * self.layout.total,
            "epsilon": self.history[-1]["epsilon"] if self.history else None,
            "epsilon_limit": privacy.epsilon if privacy else None,
            "delta": privacy.delta if privacy else None,
            "devices": dict(sorted(devices.items())),
            "history": self.history,
        }

    def epsilon(self, more: int = 0) -> float:
        """Spent so far, or after so many rounds more with the fewest devices."""
        privacy = self.terms.noise
        return privacy.spent([*self.noises, *[privacy.noise] * more]) if privacy else 0.0

    @property
    def used_up(self) -> bool:
        privacy = self.terms.noise
        return privacy is not None and self.epsilon(1) > privacy.epsilon

    def read_reply(self, reply: Reply) -> Received:
        """DataError for anything but a usable update."""
        if reply.error:
            raise DataError(reply.error)
        received = Received(reply.name, decode(reply.update, self.layout, self.terms.sends), reply.rows)
        aggregate.check(received)
        return received

    def finish_round(self, replies: list[Reply], seconds: float = 0.0) -> list[str]:
        """Takes the updates into the model; what was refused, clipped or left out, in words.

        With fewer usable updates than `min_clients` nothing changes.
        """
        good, said = list[Received](), list[str]()
        for reply in {reply.name: reply for reply in reversed(replies)}.values():  # the first of each device
            try:
                good.append(self.read_reply(reply))
            except DataError as error:
                said.append(f"{reply.name}: refused: {error.message}")
        privacy = self.terms.noise
        if good and privacy:
            good, refused = aggregate.refuse_gross(good)
            said += refused
        if len(good) < self.terms.min_clients:
            return said
        if not privacy:
            good, clipped, self.usual = aggregate.clip_large(good, self.usual)
            said += clipped
        combined, left_out = aggregate.combine(good, self.rule, by_rows=privacy is None)
        said += left_out
        self._add(combined)
        self.accepted |= {one.name: self.round for one in good}
        if privacy:
            self.noises.append(privacy.noise_of(len(good), self.terms.min_clients))
        sizes = {reply.name: len(reply.update) for reply in replies}
        self.history.append(
            {
                "round": self.round,
                "seconds": round(seconds, 3),
                "devices": [{"name": one.name, "rows": one.rows, "bytes": sizes[one.name]} for one in good],
                "norm": float(np.linalg.norm(combined)),
                "epsilon": self.epsilon() if privacy else None,
                "remarks": said,
            }
        )
        self.round += 1
        return said

    def _add(self, combined: np.ndarray) -> None:
        for name, part in self.layout.split(combined).items():
            self.trained[name] = (self.trained[name] + part).astype(np.float32)


def new_name() -> str:
    return secrets.token_hex(8)


def run_rounds(run: Run, state: ServerState, fleet: Fleet, progress: Progress) -> None:
    """Up to the last round, or until the noise budget is used up; each round is saved before the next begins."""
    terms, failed = state.terms, 0
    while state.round < terms.rounds:
        if state.used_up:
            progress.line(f"stopped after {state.round} rounds: another one would exceed the epsilon of --dp")
            return
        there = fleet.wait_for(terms.min_clients)
        if there < terms.min_clients:
            raise EdgeftError(f"{there} of at least {terms.min_clients} devices are there", HINT)
        began, before = time.monotonic(), state.round
        replies = list(fleet.ask(lambda name: state.task(name).pack()))
        for line in state.finish_round(replies, time.monotonic() - began):
            progress.line(f"round {before + 1}: {line}")
        if state.round == before:
            failed += 1
            progress.line(f"round {before + 1}: too few updates to use; asked again")
            if failed == ATTEMPTS:
                raise EdgeftError(
                    f"round {before + 1}: fewer than {terms.min_clients} updates could be used, {ATTEMPTS} times", HINT
                )
            continue
        failed = 0
        state.save(run)
        progress.line(describe(state))


def describe(state: ServerState) -> str:
    """The last round in a line."""
    last = state.history[-1]
    sizes = [device["bytes"] for device in last["devices"]]
    rows = sum(device["rows"] for device in last["devices"])
    dense = 4 * state.layout.total
    line = (
        f"round {state.round} of {state.terms.rounds}: {len(sizes)} devices, {rows} rows, "
        f"{max(sizes):,} bytes each (1/{dense / max(sizes):.0f} of dense)"
    )
    privacy = state.terms.noise
    return line + (f", epsilon {last['epsilon']:.2f} of {privacy.epsilon:g} spent" if privacy else "")
