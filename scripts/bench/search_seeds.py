#!/usr/bin/env python3
"""Evolution beside random search of the same number of evaluations, and beside greedy, for several seeds.

    scripts/bench/search_seeds.py SEARCH.json [--seeds 10] [--out FILE.json]

SEARCH.json is what `edgeft search -o NAME.yaml` leaves as NAME.search.json. Its contributions are taken from the cache;
for each seed, evolution runs with greedy's answer to begin with, and alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from edgeft.host.files import atomic_write
from edgeft.pipeline import prepare
from edgeft.run.progress import Progress
from edgeft.search import evolve, files
from edgeft.search.problem import build_problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    args = parser.parse_args()
    recipe = args.search.with_name(args.search.name.removesuffix(".search.json") + ".yaml")
    asked = files.Files(recipe).start(resume=True)
    assert asked is not None
    _, train, heldout, _ = prepare.encode(asked.recipe)
    posed = build_problem(asked.recipe, train, heldout, asked.budget, asked.seed, Progress())
    problem, every = posed.problem, posed.problem.every()
    start = evolve.greedy(problem)
    greedy = float(evolve.score(problem, start)[0][0])
    rows = []
    for seed in range(args.seeds):
        began = time.monotonic()
        best = evolve.evolve(problem, seed, start)
        seconds = time.monotonic() - began
        alone = evolve.evolve(problem, seed)
        chance = evolve.random_search(problem, best.evaluations, seed)
        rows.append(
            {
                "seed": seed,
                "evaluations": best.evaluations,
                "seconds": round(seconds, 2),
                "evolution": best.gain / every,
                "alone": alone.gain / every,
                "random": chance.gain / every,
                "greedy": greedy / every,
            }
        )
    names = ("evolution", "alone", "random", "greedy")
    print(f"| seed | evolution | without greedy's answer | random, {rows[0]['evaluations']} each | greedy | seconds |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {row['seed']} | " + " | ".join(f"{row[name]:.4f}" for name in names) + f" | {row['seconds']} |")
    wins = {name: sum(row[name] > row["random"] for row in rows) for name in names[:2]}
    print(
        f"\nabove random: {wins['evolution']} of {len(rows)}, without greedy's answer {wins['alone']}; "
        f"not below greedy: {sum(row['evolution'] >= row['greedy'] for row in rows)}"
    )
    if args.out:
        with atomic_write(args.out) as file:
            file.write(json.dumps(rows, indent=1).encode())


if __name__ == "__main__":
    main()
