#!/usr/bin/env python3
"""Rounds of a federation of a tiny model whose devices and server are killed with SIGKILL at random moments.

    tests/harness/federated_crash.py --rounds 100 [--devices 4] [--device-kills 0.5] [--server-kills 5] [--seed 0]

The server and each round of a device are processes of their own. A device is killed with this probability in a round,
after a random part of the time that a round takes, and so again; the server so many times in all. In the end the model
of the server must be, bit for bit, that of the same federation left alone: nothing was lost, and nothing counted twice.
No network: tests/test_federate_flower.py kills the processes of one over Flower.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import make_model
from short_run import cut_rows

FORK = multiprocessing.get_context("fork")
MOST_KILLS = 3  # of a device in a round
SETS = [
    *("update.blocks=[2]", "update.tensors=v,o", "train.batch_rows=2", "data.max_tokens=256", "how.compile=off"),
    *("how.threads=1", "how.checkpoint_s=0", "how.trunk_place=run"),
]


class Killer:
    """Runs work in forked processes, and kills some of them."""

    def __init__(self, seed: int, device_kills: float, kills: Any) -> None:
        """kills: a number that processes share."""
        self.random, self.share, self.kills = random.Random(seed), device_kills, kills
        self.seconds = 0.05  # of a round, as measured

    def do(self, work: Callable[[], object]) -> None:
        """Until it ends by itself."""
        for attempt in range(MOST_KILLS + 1):
            process = forked(work)
            if attempt < MOST_KILLS and self.random.random() < self.share:
                time.sleep(self.random.random() * self.seconds)
                kill(process)
                self.kills.value += 1
                continue
            began = time.monotonic()
            process.join()
            self.seconds = 0.7 * self.seconds + 0.3 * (time.monotonic() - began)
            if process.exitcode != 0:
                raise SystemExit(f"a device ended with {process.exitcode}")
            return


def forked(work: Callable[[], object]) -> BaseProcess:
    """It ends with this process."""
    from edgeft.host.system import die_with_parent

    parent = os.getpid()

    def target() -> None:
        die_with_parent(parent)
        work()

    process = FORK.Process(target=target)
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()


class Federation:
    def __init__(self, folder: Path, model: Path, rows: Path, rounds: int, count: int) -> None:
        from edgeft import config
        from edgeft.config import Recipe
        from edgeft.federated import session, simulate
        from edgeft.federated.device import Device, open_device
        from edgeft.federated.update import Send
        from edgeft.federated.worker import do_step
        from edgeft.run.progress import Progress

        self.folder, self.quiet, self.do_step = folder, Progress(), do_step
        sets = [f"data.path={rows}", f"model.path={model}", *SETS]
        recipe = session.federated_recipe(config.apply_sets(config.load_recipe("sparse-bp"), sets), 1.0)
        self.run = session.start(folder / "server", recipe, session.Plan(rounds, count, Send(0.05), None, "mean"))
        terms = session.begin(self.run, self.step).terms
        files = simulate.split(str(rows), "random", count, folder / "rows")
        own = [config.apply_sets(Recipe(), [f"data.path={file}", *sets[1:2], *SETS[4:]]) for file in files]
        self.devices = [
            Device(f"device-{number}", open_device(folder / f"device-{number}", terms, one), terms, self.step)
            for number, one in enumerate(own)
        ]

    def step(self, run: Any, name: str) -> None:
        self.do_step(run, name, self.quiet)

    def rounds(self, killer: Killer) -> None:
        """The server's work, from wherever it was."""
        from edgeft.federated.server import Reply, ServerState, run_rounds
        from edgeft.federated.task import Task

        devices = self.devices

        class Fleet:
            def wait_for(self, count: int) -> int:
                return len(devices)

            def ask(self, task_of: Callable[[str], bytes]) -> Iterable[Reply]:
                for device in devices:
                    data = task_of(device.name)
                    killer.do(partial(device.answer, data))
                    yield device.result(Task.unpack(data))

        state = ServerState.load(self.run)
        assert state is not None
        run_rounds(self.run, state, Fleet(), self.quiet)

    def reached(self) -> Any:
        from edgeft.federated.server import ServerState

        state = ServerState.load(self.run)
        assert state is not None
        return state


def crash(folder: Path, rounds: int, count: int, device_kills: float, server_kills: int, seed: int) -> str:
    """What came of it, in a line; SystemExit if anything was lost."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    model = folder / "tiny.gguf"
    make_model.make("tiny", "q4_0", model)
    rows = cut_rows(folder / "rows", 4 * count, 2)
    alone, killed = (Federation(folder / name, model, rows, rounds, count) for name in ("alone", "killed"))
    began = time.monotonic()
    kills = FORK.Value("i", 0)
    alone.rounds(Killer(seed, 0.0, kills))
    each = (time.monotonic() - began) / rounds
    choose = random.Random(seed)
    stops = sorted(choose.sample(range(rounds), min(server_kills, rounds)))
    for number, stop in enumerate([*stops, rounds]):
        server = forked(partial(killed.rounds, Killer(seed + number, device_kills, kills)))
        while stop < rounds and killed.reached().round < stop and server.is_alive():
            time.sleep(0.01)
        if stop < rounds:
            time.sleep(choose.random() * each)
            kill(server)
        else:
            server.join()
    one, other = alone.reached(), killed.reached()
    same = all((one.trained[name] == other.trained[name]).all() for name in one.trained)
    if other.round != rounds or not same or not any(array.any() for array in other.trained.values()):
        raise SystemExit(f"lost: {other.round} of {rounds} rounds, the same model: {same}")
    return (
        f"{rounds} rounds of {count} devices: {kills.value} devices and {len(stops)} servers killed, "
        "the model is that of the federation left alone, bit for bit"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--device-kills", type=float, default=0.5)
    parser.add_argument("--server-kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder), asked.rounds, asked.devices
        print(crash(*place, asked.device_kills, asked.server_kills, asked.seed))


if __name__ == "__main__":
    main()
