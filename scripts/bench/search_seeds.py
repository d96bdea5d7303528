#!/usr/bin/env python3
"""Evolution beside random search of the same number of evaluations, and beside greedy, for several seeds.

    scripts/bench/search_seeds.py SEARCH.json [--seeds 10] [--out FILE.json]

SEARCH.json is what `edgeft search -o NAME.yaml` leaves as NAME.search.json. Its contributions are taken from the cache;
for each seed, evolution runs with greedy's answer to begin with, and alone.
"""

from __future__ import annotations

import time
from pathlib import Path

import common

from edgeft.pipeline import prepare
from edgeft.run.progress import Progress
from edgeft.search import evolve, files
from edgeft.search.problem import SearchRequest, build_problem


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("search", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    args = parser.parse_args()
    recipe = args.search.with_name(args.search.name.removesuffix(".search.json") + ".yaml")
    saved = files.Files(recipe).start(resume=True)
    assert saved is not None
    _, train, heldout, _ = prepare.encode(saved.recipe)
    request = SearchRequest(saved.recipe, saved.budget, saved.seed)
    search = build_problem(request, train, heldout, Progress())
    problem, total_gain = search.problem, search.problem.total_gain()
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
                "evolution": best.gain / total_gain,
                "alone": alone.gain / total_gain,
                "random": chance.gain / total_gain,
                "greedy": greedy / total_gain,
            }
        )
    names = ("evolution", "alone", "random", "greedy")
    titles = [
        "seed",
        "evolution",
        "without greedy's answer",
        f"random, {rows[0]['evaluations']} each",
        "greedy",
        "seconds",
    ]
    print(common.table(titles, [(r["seed"], *(f"{r[name]:.4f}" for name in names), r["seconds"]) for r in rows]))
    wins = {name: sum(row[name] > row["random"] for row in rows) for name in names[:2]}
    print(
        f"\nabove random: {wins['evolution']} of {len(rows)}, without greedy's answer {wins['alone']}; "
        f"not below greedy: {sum(row['evolution'] >= row['greedy'] for row in rows)}"
    )
    common.write_json(args.out, rows)


if __name__ == "__main__":
    main()
