#!/usr/bin/env python3
"""Kills runs with SIGKILL at random moments, resumes them, and compares what comes out with a run left alone.

    tests/harness/crash.py --rounds 30 [--seed 0] [--stage trunk …] [--blocks 4] [--threads 1] [--folder DIR]

A round is one short run, killed up to eight times on its way (the whole process tree, in stages chosen at random, after
a random part of the time that the stage takes) and resumed each time. In the end its tokens, the tensors of its best
and its last checkpoint and its exported GGUF file must be, bit for bit, those of the run that was left alone. The trunk
cache is a new one, the one that other rounds filled, or in the run folder; blocks below the cut run in either order.
--blocks 30 takes the whole embedded model instead of its first four blocks.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from short_run import STAGES, Short, Tree, differing, import_everything, outcome, stoppable

MOST_KILLS = 8  # in a round


class Crash:
    def __init__(self, folder: Path, blocks: int, stages: list[str], seed: int, threads: int) -> None:
        self.stages = sorted(stages, key=STAGES.index)
        self.short = Short(folder, blocks, "eval" if "eval" in stages else "export", threads)
        self.random = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.survived: Counter[str] = Counter()
        self.failed: list[str] = []
        self.rounds = 0  # that came to their end

    def reference(self) -> None:
        """The run left alone: what comes out, and how long its stages take."""
        run, cache = self.short.folder / "reference", self.short.fresh_cache(self.short.folder / "shared")
        tree = self.short.start(run, cache)
        spans: dict[str, list[float]] = {}
        began: dict[str, float] = {}
        while (mark := tree.next_mark()) is not None:
            name, at = mark
            if name.startswith("/"):
                spans.setdefault(name[1:], []).append(at - began[name[1:]])
            else:
                began[name] = at
        if tree.wait():
            raise SystemExit(f"the run left alone failed:\n{tree.text()}")
        self.seconds = {name: max(found) for name, found in spans.items()}
        self.seconds["trunk"] -= self.seconds["train"]
        self.checkpoints = len(spans["checkpoint"])
        self.wanted = outcome(run)
        assert {"model.gguf", "tokens train_ids"} < self.wanted.keys()
        assert {name.split()[0] for name in self.wanted} == {"tokens", "best", "last", "model.gguf"}

    def _kill_in(self, tree: Tree, stage: str) -> bool:
        """Lets it get into a stage and kills it there; False: it had ended before."""
        skip = self.random.randrange(self.checkpoints // 2) if stage == "checkpoint" else 0  # some may be there already
        if stage == "prepare":  # from the very start
            at = tree.began
        else:
            while True:
                mark = tree.next_mark()
                if mark is None:
                    return False
                if mark[0] == stage:
                    at = mark[1]
                    if not skip:
                        break
                    skip -= 1
        extra = 0.2 if stage == "prepare" else 0.0  # what comes before it: the parent, the run folder
        time.sleep(max(0.0, at + self.random.random() * (self.seconds[stage] + extra) - time.monotonic()))
        if not tree.running():
            return False
        tree.kill(self.random.randrange(2))
        return True

    def round(self, number: int) -> None:
        chosen, folder = self.random, self.short.folder
        place = chosen.choice(("new", "shared", "run"))
        cache = folder / "shared" if place == "shared" else self.short.fresh_cache(folder / "own")
        sets = [
            f"how.trunk_place={'run' if place == 'run' else 'shared'}",
            f"how.trunk_order={chosen.choice(('rows', 'blocks'))}",
        ]
        run = folder / f"round-{number}"
        killed: Counter[str] = Counter()
        targets = sorted(chosen.choices(self.stages, k=chosen.randint(1, MOST_KILLS)), key=STAGES.index)
        for stage in targets:
            tree = self.short.start(run, cache, sets)
            if self._kill_in(tree, stage):
                killed[stage] += 1
            elif tree.wait():
                break  # told below
        tree = self.short.start(run, cache, sets)
        code = tree.wait()
        self.kills += killed
        self.rounds += 1
        wrong = differing(outcome(run), self.wanted) if code == 0 else [f"exit code {code}: {tree.text().strip()}"]
        left = [path.name for path in run.rglob("*") if path.name.endswith((".tmp", ".part"))]
        wrong += [f"left behind: {name}" for name in left]
        if wrong:
            self.failed.append(f"round {number} ({place}, {sets[1]}, {' '.join(targets)}): {'; '.join(wrong[:4])}")
            print(self.failed[-1], flush=True)
            return
        self.survived += killed
        shutil.rmtree(run)

    def table(self) -> str:
        lines = [f"{'killed in':<12}{'kills':>7}{'identical':>11}"]
        lines += [f"{stage:<12}{self.kills[stage]:>7}{self.survived[stage]:>11}" for stage in self.stages]
        return "\n".join(lines)


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--rounds", type=int, default=30)
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--stage", action="append", choices=STAGES, help="only in these; all but eval if not given")
    ask.add_argument("--blocks", type=int, default=4, help="of the embedded model's 30")
    ask.add_argument("--threads", type=int, default=1, help="that compute")
    ask.add_argument("--folder", type=Path, help="keep everything here, instead of in a temporary folder")
    args = ask.parse_args()
    import_everything()
    with tempfile.TemporaryDirectory() as temporary:
        stages = args.stage or list(STAGES[:-1])
        crash = Crash(args.folder or Path(temporary), args.blocks, stages, args.seed, args.threads)
        crash.reference()
        print("seconds of the run left alone: " + ", ".join(f"{k} {v:.2f}" for k, v in crash.seconds.items()))
        begin = time.monotonic()
        with stoppable():
            for number in range(args.rounds):
                crash.round(number)
                print(f"round {number + 1} of {args.rounds}, {crash.kills.total()} kills", file=sys.stderr, flush=True)
        print(crash.table())
        kills, survived = crash.kills.total(), crash.survived.total()
        took = time.monotonic() - begin
        print(f"{survived} of {kills} kills survived with identical results ({crash.rounds} rounds, {took:.0f} s)")
    return 1 if crash.failed or survived < kills else 0


if __name__ == "__main__":
    sys.exit(main())
