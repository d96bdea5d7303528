#!/usr/bin/env python3
"""Training on a machine that does other things: seconds of a step beside busy processes, as a multiple of those alone.

    scripts/bench/busy.py [--data DIR] [--model FILE.gguf] [--only edgeft peft-lora-bf16] [--busy 1] [--rounds 2]

Busy processes count in a loop, one on a core. They are started from the same terminal, at nice 19 and at nice 0; with
--sessions also from another one, which Linux may weigh against this one as a whole (autogroup). Beside each stands what
is fair: how much longer a program takes that runs a counting loop on every core at the contender's own niceness, in the
same session. Loads alternate; the best round of each counts, and of a run its median step, without the first.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bench
import common

from edgeft.config import ExecutionConfig
from edgeft.host import device

COUNT = "n = 0\nwhile True: n += 1"
COUNT_S = 3.0
# a process that counts, after a second in which the scheduler settles, and prints its count
COUNTED = f"""
import time
begin, n = time.time() + 1, 0
while time.time() < begin: pass
while time.time() < begin + {COUNT_S}: n += 1
print(n)
"""
Load = tuple[int, bool]  # niceness, in a session of its own


@contextmanager
def busy(count: int, load: Load | None) -> Iterator[None]:
    nice, apart = load or (0, False)
    command = ["nice", "-n", str(nice), sys.executable, "-c", COUNT]
    running = [subprocess.Popen(command, start_new_session=apart) for _ in range(count if load else 0)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def counted(nice: int) -> int:
    """What a loop on every core counts."""
    command = ["nice", "-n", str(nice), sys.executable, "-c", COUNTED]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(device.cores())]
    return sum(int(process.communicate()[0]) for process in running)


def step_s(folder: Path) -> float:
    return statistics.median(float(e["seconds"]) for e in common.read_events(folder, "step")[1:])


def train(name: str, args: argparse.Namespace, work: Path, number: int) -> float:
    """Seconds of a step."""
    place = work / f"{name}-{number}"
    contenders = bench.Bench(args, place)
    if name == "edgeft":
        contenders.edgeft()
    else:
        dense = work / "dense"
        if dense.exists():
            (place / "dense").symlink_to(dense)
        else:
            Path(contenders.dense_model()).rename(dense)
            (place / "dense").symlink_to(dense)
        contenders.peer(name)
    return step_s(place / name)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", help="folder with rows; none = the embedded set")
    parser.add_argument("--model", help="GGUF file; none = the embedded one")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--only", nargs="+", choices=bench.NAMES, default=["edgeft", bench.DEFAULT[0]], metavar="NAME")
    parser.add_argument("--busy", type=int, default=1, help="busy processes")
    parser.add_argument("--sessions", action="store_true", help="also started from another session")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--recipe", default="sparse-bp")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a knob of edgeft's recipe")
    args = parser.parse_args()
    more = {"dev_rows": 4, "distinct": False, "choose": False, "epochs": 1.0, "validations": 1, "peer_lr": 5e-4}
    for key, value in {**more, "memory": None, "answers": False, "out": Path("unused")}.items():
        setattr(args, key, value)
    args.set[:0] = [f"how.nice={ExecutionConfig().nice}", "how.compile=on"]  # as shipped, and in a run of some length
    loads: list[Load | None] = [None, (19, False), (0, False)]
    loads += [(19, True), (0, True)] if args.sessions else []
    found: dict[tuple[str, Load | None], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, bench.exit_on_error():
        for number in range(args.rounds * len(loads)):
            load = loads[number % len(loads)]
            for name in args.only:
                with busy(args.busy, load):
                    found.setdefault((name, load), []).append(train(name, args, Path(folder), number))
                    print(f"{name}, {load}: {found[name, load][-1]:.3f} s a step", file=sys.stderr, flush=True)
    rows = []
    for name in args.only:
        nice = ExecutionConfig().nice if name == "edgeft" else 0
        alone, counts = min(found[name, None]), counted(nice)
        for load in loads[1:]:
            with busy(args.busy, load):
                fair = counts / counted(nice)
            times = min(found[name, load]) / alone
            where = "another session" if load and load[1] else "the same session"
            cells = f"{alone:.3f}", f"{times:.2f}", f"{fair:.2f}", f"{times / fair:.2f}"
            rows.append((name, f"{args.busy} at nice {load[0] if load else 0}, {where}", *cells))
    print(common.table(("", "beside it", "s a step alone", "× beside it", "× fair", "ratio of both"), rows))


if __name__ == "__main__":
    main()
