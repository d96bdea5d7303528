"""Feeds mutated files to the readers that open what comes from elsewhere, and counts what they do with them.

    python tests/harness/fuzz.py --inputs 100000 [--seconds 20] [--seed 1] [--kinds gguf,recipe] [--save DIR]

Every input must be read or refused with an EdgeftError, within LIMIT_S and MEMORY; anything else is a finding, saved
with its bytes. An input depends on seed, kind and number alone. Each kind runs in a process of its own, so that a
crash (llama.cpp's included) is found too, and another process goes on behind it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from fuzz_kinds import KINDS, make, put

LIMIT_S = 10.0  # of the processor, for one input; six times as long by the clock
MEMORY = 2 << 30  # address space beyond what the process has after its imports


class Hang(BaseException):
    """An input took longer than LIMIT_S."""


def warm(kinds: list[str], seed: int) -> None:
    """Imports what the readers import, once for all the processes that are forked from this one."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            path = Path(folder, kind, KINDS[kind][1])
            path.parent.mkdir()
            put(path, make(kind, seed, 0))
            with contextlib.suppress(Exception):
                KINDS[kind][3](path)


def work(kind: str, seed: int, first: int, last: int, until: float, folder: Path) -> None:
    """Inputs first … last - 1; the number reached, and what was found, stand in files."""
    from edgeft.errors import EdgeftError

    name, read = KINDS[kind][1], KINDS[kind][3]
    path = folder / name
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def hang(number: int, frame: Any) -> None:
        raise Hang

    signal.signal(signal.SIGPROF, hang)
    reached = os.open(folder / "reached", os.O_RDWR | os.O_CREAT, 0o600)
    accepted = refused = 0
    for number in range(first, last):
        os.pwrite(reached, struct.pack("<QQQ", number, accepted, refused), 0)
        if time.time() > until and number > first:
            return
        put(path, make(kind, seed, number))
        try:
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
            read(path)
            accepted += 1
        except EdgeftError:
            refused += 1
        except BaseException:
            with (folder / "found").open("a", encoding="utf-8") as file:
                said = traceback.format_exc().encode("utf-8", "replace").decode()
                file.write(json.dumps({"number": number, "said": said[-3000:]}) + "\n")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    os.pwrite(reached, struct.pack("<QQQ", last, accepted, refused), 0)


def _fork(given: tuple[str, int, int, int, float, Path]) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        silent = os.open(os.devnull, os.O_RDWR)
        for handle in (0, 1, 2):
            os.dup2(silent, handle)
        work(*given)
        os._exit(0)
    finally:
        os._exit(1)


def supervise(kind: str, seed: int, first: int, count: int, until: float, folder: Path) -> dict[str, Any]:
    """Runs a kind; a process that dies or stands still is a finding, and another one goes on behind that input."""
    folder.mkdir(parents=True)
    began, at, last = time.time(), first, first + count
    accepted = refused = 0
    findings: list[dict[str, Any]] = []
    while at < last and (time.time() < until or at == first):
        for name in ("reached", "found"):
            (folder / name).unlink(missing_ok=True)
        child = _fork((kind, seed, at, last, until, folder))
        seen, since, stuck = -1, time.time(), False
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            time.sleep(0.02)
            now = _reached(folder)[0]
            if now != seen:
                seen, since = now, time.time()
            if time.time() - since > 6 * LIMIT_S and not stuck:
                os.kill(child, signal.SIGKILL)
                stuck = True
        number, good, bad = _reached(folder)
        accepted, refused = accepted + good, refused + bad
        if (folder / "found").is_file():
            findings += [json.loads(line) for line in (folder / "found").read_text("utf-8").splitlines()]
        if ended[1] == 0:
            at = number
            break
        number = max(number, at)
        code = os.waitstatus_to_exitcode(ended[1])
        findings.append({"number": number, "said": "it stood still" if stuck else f"the process ended with {code}"})
        at = number + 1
    counts = {"inputs": at - first, "read": accepted, "refused": refused}
    return {"kind": kind, **counts, "s": time.time() - began, "findings": findings}


def _reached(folder: Path) -> tuple[int, int, int]:
    try:
        found = struct.unpack("<QQQ", (folder / "reached").read_bytes())
    except (OSError, struct.error):
        return -1, 0, 0
    return found[0], found[1], found[2]


def fuzz(
    inputs: int,
    seconds: float = 1e9,
    seed: int = 0,
    kinds: list[str] | None = None,
    save: Path | None = None,
    first: int = 0,
) -> dict[str, Any]:
    """All kinds, one after the other; time and inputs are shared out among them."""
    chosen = kinds or list(KINDS)
    total = sum(KINDS[kind][0] for kind in chosen)
    results = []
    warm(chosen, seed)
    # in memory where that is possible: writing an input must not cost more than reading it
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="edgeft-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    began = time.time()
    try:
        for done, kind in enumerate(chosen):
            share = KINDS[kind][0] / total
            left = began + seconds - time.time()
            until = time.time() + left * KINDS[kind][0] / sum(KINDS[k][0] for k in chosen[done:])
            found = supervise(kind, seed, first, max(1, round(inputs * share)), until, root / kind)
            for finding in found["findings"]:
                if save is not None:
                    made = make(kind, seed, finding["number"])
                    save.mkdir(parents=True, exist_ok=True)
                    put(save / f"{kind}-{seed}-{finding['number']}-{KINDS[kind][1]}", made)
            results.append(found)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {"inputs": sum(r["inputs"] for r in results), "seconds": time.time() - began, "kinds": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input, to go on where a run ended")
    parser.add_argument("--kinds", help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--save", type=Path, default=Path("fuzz-findings"))
    given = parser.parse_args()
    kinds = given.kinds.split(",") if given.kinds else None
    result = fuzz(given.inputs, given.seconds, given.seed, kinds, given.save, given.first)
    print(f"{'kind':<12}{'inputs':>10}{'read':>10}{'refused':>10}{'findings':>10}{'inputs/s':>10}")
    for r in result["kinds"]:
        rate = r["inputs"] / max(r["s"], 1e-9)
        print(f"{r['kind']:<12}{r['inputs']:>10}{r['read']:>10}{r['refused']:>10}{len(r['findings']):>10}{rate:>10.0f}")
    found = sum(len(r["findings"]) for r in result["kinds"])
    print(f"{result['inputs']} inputs in {result['seconds']:.0f} s (seed {given.seed}): {found} findings")
    for r in result["kinds"]:
        for finding in r["findings"][:5]:
            print(f"\n{r['kind']} {finding['number']}: {finding['said']}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
