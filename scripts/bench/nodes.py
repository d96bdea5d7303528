#!/usr/bin/env python3
"""Seconds of a step on several nodes beside one: network namespaces of their own, joined by links of a limited rate.

    scripts/bench/nodes.py [--nodes 2] [--rates 1gbit 100mbit] [--model FILE.gguf] [--data DIR] [--steps 12]

As root (ip, tc), on Linux. Each node computes with one thread on a core of its own, so there can be no more nodes than
cores. The same global batch everywhere; nodes of several runs take turns with the one alone.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import common

BRIDGE, NETWORK = "edgeft-bench", "10.77.0"


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise common.Failed(f"{' '.join(words)}: {done.stderr.strip()}")


def ip(*words: str) -> None:
    run("ip", *words)


@contextlib.contextmanager
def network(count: int, rate: str) -> Iterator[list[str]]:
    """Namespaces with an address each, on one switch; both ends of every cable send at this rate."""
    names = [f"{BRIDGE}{number}" for number in range(count)]
    with contextlib.ExitStack() as undo:
        ip("link", "add", BRIDGE, "type", "bridge")
        undo.callback(ip, "link", "del", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for number, name in enumerate(names):
            outside, inside = f"eft{number}a", f"eft{number}b"
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
            ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
            ip("link", "set", outside, "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", inside)
            ip("-n", name, "link", "set", inside, "up")
            ip("-n", name, "link", "set", "lo", "up")
            for where, device in (((), outside), (("-n", name), inside)):
                limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
                run("tc", *where, "qdisc", "add", "dev", device, "root", *limit)
        yield names


def step_s(command: list[str], names: list[str], folder: Path) -> float:
    """The median step, the first two left out; names: the namespaces, or none."""
    hosts = ",".join(f"{NETWORK}.{number + 1}" for number in range(len(names)))
    nodes = []
    for number, name in enumerate(names or [""]):
        place = [*(["ip", "netns", "exec", name] if name else []), "taskset", "-c", str(number)]
        more = ["--out", str(folder / f"node{number}"), *(["--nodes", hosts] if name else [])]
        nodes.append(subprocess.Popen([*place, *command, *more], stdout=subprocess.DEVNULL))
    codes = [node.wait() for node in nodes]
    if any(codes):
        raise common.Failed(f"nodes ended with {codes}")
    return statistics.median(float(step["seconds"]) for step in common.read_events(folder / "node0", "step")[2:])


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--model", help="GGUF file; none = the embedded one")
    parser.add_argument("--data", help="folder or file with rows; none = the embedded ones")
    parser.add_argument("--recipe", default="sparse-bp")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--set", action="append", default=[], help="further knobs")
    args = parser.parse_args()
    if max(args.nodes) > (os.cpu_count() or 1):
        sys.exit(f"error: {max(args.nodes)} nodes on {os.cpu_count()} cores\nhint: each node needs a core of its own")
    given = [part for name in ("model", "data") if (value := getattr(args, name)) for part in (f"--{name}", value)]
    knobs = (
        f"train.steps={args.steps}",
        "train.validations=1",
        "data.heldout_rows=4",
        "how.checkpoint_s=3600",
        *args.set,
    )
    command = common.command(
        "finetune", "--recipe", args.recipe, *given, "--threads", 1, "--until", "train", sets=knobs
    )
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for count in args.nodes:
            for rate in args.rates:
                alone = step_s(command, [], Path(place) / f"alone-{count}-{rate}")
                with network(count, rate) as names:
                    several = step_s(command, names, Path(place) / f"{count}-{rate}")
                rows.append((count, rate, f"{alone:.3f}", f"{several:.3f}", f"{alone / several:.2f}"))
    print(common.table(("nodes", "link", "s a step on one", "on all", "times as fast"), rows))


if __name__ == "__main__":
    main()
