#!/usr/bin/env python3
"""What an honest but curious server could read from what a device would send, by recipe and by what is done to it.

    scripts/bench/audit.py DATA [--model FILE] [--rows 1,4,16] [--only NAME …] [--threads N] [--set KEY=VALUE …]
        [--out FILE.json]

DATA: rows of any format, such as squad/train.jsonl. Every setting is an `edgeft audit` of its own on the same rows.
`dense, cut 0` sends the gradients of all linears (recipe `full`); `dense, cut 3` those above a frozen trunk
(`sparse-rule`); `as shipped` is `sparse-bp`; `top 1 %` and `noise` are of these. The baseline is the untuned
model's own greedy text. With --out, settings that are there already are kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import common

from edgeft.audit.words import conclusion, setting_name

SETTINGS: dict[str, list[str]] = {
    "dense, cut 0": ["--recipe", "full"],
    "as shipped": ["--recipe", "sparse-bp"],
    "top 1 %, cut 0": ["--recipe", "full", "--send", "top:1%"],
    "top 1 %, as shipped": ["--recipe", "sparse-bp", "--send", "top:1%"],
    "noise, cut 0": ["--recipe", "full", "--dp", "epsilon=8,delta=1e-5"],
    "noise, as shipped": ["--recipe", "sparse-bp", "--dp", "epsilon=8,delta=1e-5"],
    "dense, cut 3": ["--recipe", "sparse-rule"],
}
COLUMNS = ("what is sent", "message", "rows read", "tokens", "ROUGE-1", "ROUGE-2", "canary", "answers' tokens", "guess")


def lines(name: str, result: dict[str, Any]) -> list[str]:
    every = []
    for one in result["settings"]:
        answers = one["answers"]
        seen = f"{answers['seen']} of {answers['of']}, {len(answers['listed'])} listed"
        shares = [f"{one[key]:.0%}" for key in ("tokens", "rouge1", "rouge2")]
        canary = "read" if one["canary_found"] else "–"
        whole = f"{one['exact']} of {one['rows']}"
        every.append(
            " | ".join([name, setting_name(one), whole, *shares, canary, seen, f"{one['guess']['tokens']:.0%}"])
        )
    return every


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kept = json.loads(args.out.read_text(encoding="utf-8")) if args.out and args.out.exists() else {}
    model = ["--model", args.model] if args.model else []
    print(" | ".join(COLUMNS))
    for name in args.only:
        if name not in kept:
            sets = [f"how.threads={args.threads}", *args.set]
            kept[name] = common.edgeft_json(
                "audit", "--data", args.data, "--rows", args.rows, *model, *SETTINGS[name], sets=sets
            )
            common.write_json(args.out, kept)
        print("\n".join(lines(name, kept[name])), flush=True)
    print()
    for name in args.only:
        for one in kept[name]["settings"]:
            print(f"{name}, {setting_name(one)}: {conclusion(one)}")


if __name__ == "__main__":
    main()
