#!/usr/bin/env python3
"""Makes every call of a short run that changes a file fail, one at a time, and sees whether anything is lost.

    tests/harness/write_failures.py [--sample N] [--seed 0] [--part 1/3] [--error ENOSPC …] [--stage train …]
        [--folder DIR]

Opening for writing, writing (half of the bytes get there), truncating, allocating, fsync, renaming, unlinking, making
folders and setting modes and times, of all libraries alike: a small C library (faults.c, LD_PRELOAD) counts these calls
below the run folder and the trunk cache and fails the n-th with ENOSPC, EIO or EROFS (after EROFS all later ones fail,
too, as on a disk that the kernel made read-only). KILL is no error: the process tree is killed at that very call.
After each failure: an error of one line with exit code 6 and no traceback (or, where what failed is not needed, none at
all); no half-written file under a final name; and `--resume` ends with the tokens, weights and exported file of a run
that nothing happened to, bit for bit.
"""

from __future__ import annotations

import argparse
import errno
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from short_run import Short, Tree, differing, import_everything, outcome, stoppable

ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS, "KILL": -9}
STAGES = ("prepare", "train", "export")
FIELDS, FOLDER_BYTES = "7q", 512  # of struct control in faults.c
EXIT_CODE = 6


class Faults:
    """What the library in all processes looks at."""

    def __init__(self, path: Path) -> None:
        self.trace = path.with_name(path.name + ".trace")
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0)

    def set(self, fail_at: int, number: int, folders: list[Path], trace: bool = False) -> None:
        self.map[:] = bytes(len(self.map))
        for i, folder in enumerate(folders):
            name = str(folder).encode()
            place = struct.calcsize(FIELDS) + i * FOLDER_BYTES
            self.map[place : place + len(name)] = name
        struct.pack_into(FIELDS, self.map, 0, 0, fail_at, number, number == errno.EROFS, 0, trace, 0)

    def arm(self) -> None:
        """Called in the tree's first process."""
        struct.pack_into("q", self.map, 6 * 8, os.getpid())
        struct.pack_into("q", self.map, 4 * 8, 1)

    def disarm(self) -> None:
        struct.pack_into("q", self.map, 4 * 8, 0)

    @property
    def count(self) -> int:
        return int(struct.unpack_from("q", self.map)[0])


class Failures:
    def __init__(self, folder: Path, blocks: int, faults: Faults) -> None:
        self.short, self.faults = Short(folder, blocks), faults
        self.run, self.cache = folder / "run", folder / "own"
        self.calls: dict[str, list[str]] = {}  # by stage: kind and file
        self.wanted: dict[str, dict[str, bytes]] = {}
        self.wrong: list[str] = []
        self.told: Counter[int] = Counter()  # exit codes

    def _start(self, stage: str, before: Callable[[], None] = lambda: None) -> Tree:
        return self.short.start(self.run, self.cache, ["train.steps=2"], stage, before)

    def _saved(self, stage: str) -> Path:
        return self.short.folder / f"before-{stage}"

    def _reset(self, stage: str) -> None:
        """The folders as they were before this stage."""
        for place in (self.run, self.cache):
            shutil.rmtree(place, ignore_errors=True)
            saved = self._saved(stage) / place.name
            if saved.exists():
                shutil.copytree(saved, place, symlinks=True)

    def reference(self) -> None:
        """Nothing fails: what the calls are, and what comes out of each stage."""
        self.short.fresh_cache(self.cache)
        for stage in STAGES:
            for place in (self.run, self.cache):
                if place.exists():
                    shutil.copytree(place, self._saved(stage) / place.name, symlinks=True)
            self.faults.trace.unlink(missing_ok=True)
            self.faults.set(0, 0, [self.run, self.cache], trace=True)
            tree = self._start(stage, self.faults.arm)
            code = tree.wait()
            self.faults.disarm()
            if code:
                raise SystemExit(f"{stage} failed by itself:\n{tree.text()}")
            lines = self.faults.trace.read_text().splitlines()
            self.calls[stage] = [line.replace(str(self.short.folder) + "/", "") for line in lines]
            assert len(lines) == self.faults.count, "the library does not see the calls"
            self.wanted[stage] = outcome(self.run)

    def fail(self, stage: str, number: int, error: str) -> None:
        """The n-th call of this stage fails; then it is resumed."""
        self._reset(stage)
        self.faults.set(number, ERRORS[error], [self.run, self.cache])
        tree = self._start(stage, self.faults.arm)
        code = tree.wait()
        self.faults.disarm()
        said = tree.text()
        problems = []
        self.told[code] += 1
        if "Traceback" in said:
            problems.append("a traceback: " + said.strip().splitlines()[-1])
        if code not in (-9,) if error == "KILL" else code not in (0, EXIT_CODE):
            problems.append(f"exit code {code}")
        if code == EXIT_CODE and (said.count("error: ") != 1 or "hint: " not in said):
            problems.append("no error and hint")
        if code != 0:
            if error != "KILL":
                left = [p.name for p in self.run.rglob("*") if p.name.endswith((".tmp", ".part"))]
                if left and error != "EROFS":  # on a read-only disk nothing can be taken away
                    problems.append(f"left behind: {left[0]}")
            again = self._start(stage)
            if again.wait():
                problems.append(f"cannot be resumed: {' '.join(again.text().split())[-300:]}")
        differs = differing(outcome(self.run), self.wanted[stage])
        if differs and not problems:
            problems.append(f"differs: {', '.join(differs[:3])}")
        if problems:
            what = self.calls[stage][number - 1] if number <= len(self.calls[stage]) else "?"
            self.wrong.append(f"{stage} call {number} ({what}), {error}: {'; '.join(problems)}")
            print(self.wrong[-1], flush=True)


def _load_library() -> Path:
    """This process again, with the library in it; the file that both look at."""
    if "EDGEFT_FAULTS" in os.environ:
        return Path(os.environ["EDGEFT_FAULTS"])
    folder = Path(tempfile.mkdtemp(prefix="edgeft-faults-"))
    library, control = folder / "faults.so", folder / "control"
    source = Path(__file__).with_name("faults.c")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
    control.write_bytes(bytes(struct.calcsize(FIELDS) + 2 * FOLDER_BYTES))
    env = {**os.environ, "EDGEFT_FAULTS": str(control), "LD_PRELOAD": str(library)}
    signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    process = subprocess.Popen([sys.executable, *sys.argv], env=env)
    code = process.wait()
    shutil.rmtree(folder)
    sys.exit(code)


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--sample", type=int, help="so many of them, at random; all if not given")
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--part", default="1/1", help="2/3: every third one, beginning with the second")
    ask.add_argument("--error", action="append", choices=list(ERRORS), help="in turn; the first three if not given")
    ask.add_argument("--stage", action="append", choices=STAGES)
    ask.add_argument("--blocks", type=int, default=3, help="of the embedded model's 30")
    ask.add_argument("--folder", type=Path, help="keep everything here, instead of in a temporary folder")
    args = ask.parse_args()
    faults = Faults(_load_library())
    import_everything()
    errors, stages = args.error or list(ERRORS)[:3], args.stage or list(STAGES)
    with tempfile.TemporaryDirectory() as temporary:
        failures = Failures((args.folder or Path(temporary)).resolve(), args.blocks, faults)
        failures.reference()
        todo = [
            (stage, number, errors[number % len(errors)])
            for stage in stages
            for number in range(1, len(failures.calls[stage]) + 1)
        ]
        part, parts = map(int, args.part.split("/"))
        todo = todo[part - 1 :: parts]
        if args.sample and args.sample < len(todo):
            todo = sorted(random.Random(args.seed).sample(todo, args.sample))
        begin = time.monotonic()
        done: Counter[str] = Counter()
        with stoppable():
            for stage, number, error in todo:
                failures.fail(stage, number, error)
                done[stage] += 1
                print(f"{done.total()} of {len(todo)}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        kinds = {stage: Counter(call.split()[0] for call in failures.calls[stage]) for stage in stages}
        print(f"{'stage':<10}{'calls':>7}{'failed':>8}  of them")
        for stage in stages:
            named = ", ".join(f"{kind} {count}" for kind, count in kinds[stage].most_common())
            print(f"{stage:<10}{len(failures.calls[stage]):>7}{done[stage]:>8}  {named}")
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(failures.told.items()))
        good, took = done.total() - len(failures.wrong), time.monotonic() - begin
        print(f"exit codes: {codes}")
        print(f"{good} of {done.total()} write failures recovered from ({took:.0f} s)")
    return 1 if failures.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
