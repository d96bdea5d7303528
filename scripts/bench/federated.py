#!/usr/bin/env python3
"""Federated against central: F1, held-out loss and the bytes that a device sends, on the same rows.

    scripts/bench/federated.py --data DIR [--rows 1000] [--heldout 200] [--clients 8] [--rounds 5] [--split by:context]
                               [--send dense --send top:1%] [--choose] [--model FILE] [--folder DIR] [--json FILE]
                               [--set …]

DIR has train.jsonl and dev.jsonl. Rows of one context are on one device. Central training makes as many passes over the
rows as all rounds together. Directions and the support of top:1% are chosen by the gradients of some of these rows (the
server has all of them; 9 and 32 are used). --choose holds out training rows instead, to choose settings. Everything is
on this machine, devices in turns; with --folder, what is complete is not done again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import common


def central(folder: Path, rows: Path, args: argparse.Namespace) -> dict[str, Any]:
    out = folder / "central"
    resume = ["--resume"] if (out / "recipe.yaml").exists() else []
    options = ["--recipe", "sparse-bp", "--data", rows, "--out", out, *resume, *model(args)]
    epochs = [f"train.epochs={args.rounds * args.local_epochs}", "eval.time_share=0", f"eval.rows={args.heldout}"]
    result = common.edgeft_json("finetune", *options, sets=[*epochs, *args.set])
    return scores("central", result, None)


def federated(folder: Path, rows: Path, send: str, args: argparse.Namespace) -> dict[str, Any]:
    out = folder / f"federated-{send.replace(':', '-').replace('%', '')}"
    resume = ["--resume"] if (out / "terms.json").exists() else []
    options = [
        *("--data", rows / "train.jsonl", "--heldout", rows / "dev.jsonl", "--out", out, "--clients", args.clients),
        *("--min-clients", args.clients, "--rounds", args.rounds, "--local-epochs", args.local_epochs),
        *("--split", args.split, "--send", send, *resume, *model(args)),
    ]
    sets = ["eval.time_share=0", f"eval.rows={args.heldout}", *args.set]
    result = common.edgeft_json("federate", "simulate", *options, sets=sets)
    found = json.loads(common.edgeft("federate", "status", out, "--json"))
    return scores(f"FedAvg, {send}", result, found)


def model(args: argparse.Namespace) -> list[object]:
    return ["--model", args.model] if args.model else []


def scores(name: str, result: dict[str, Any], found: dict[str, Any] | None) -> dict[str, Any]:
    tuned, base = result["eval"]["tuned"], result["eval"]["base"]
    line = {"name": name, "f1": tuned["f1"], "loss": tuned["loss"], "base_f1": base["f1"]}
    if found is not None:
        sent = [device["bytes"] for record in found["history"] for device in record["devices"]]
        line |= {"bytes": max(sent), "dense_bytes": found["dense_bytes"], "devices": len(found["devices"])}
    return line


def report(lines: list[dict[str, Any]]) -> str:
    first, dense = lines[0], lines[1] if len(lines) > 1 else lines[0]

    def row(line: dict[str, Any]) -> tuple[str, ...]:
        sent = line.get("bytes")
        share = f"{sent:,} (1/{line['dense_bytes'] / sent:.0f})" if sent else "–"
        against = f"{line['f1'] - first['f1']:+.1f}" if line is not first else "–"
        beside = f"{line['f1'] - dense['f1']:+.1f}" if line not in (first, dense) else "–"
        return line["name"], f"{line['f1']:.1f}", against, beside, f"{line['loss']:.4f}", share

    titles = ("", "F1, %", "against central", "against dense", "held-out loss", "bytes of a device each round")
    base = f"base model: F1 {first['base_f1']:.1f}"
    bars = (
        "bars: F1 within 3 points of central (aim 1); top 1 % within 2 of dense (aim 0.5), in 1/50 of the bytes (1/100)"
    )
    return f"{base}\n\n{common.table(titles, map(row, lines))}\n\n{bars}"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--heldout", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--local-epochs", type=float, default=1.0)
    parser.add_argument("--split", default="by:context")
    parser.add_argument("--send", action="append", metavar="dense|top:1%%")
    parser.add_argument("--choose", action="store_true", help="hold out training rows instead, for choosing settings")
    parser.add_argument("--model")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = args.folder or Path(place)
        train, dev = (common.read_rows(args.data / name) for name in ("train.jsonl", "dev.jsonl"))
        rows = common.first_rows(train, dev, folder / "rows", args.rows, args.heldout, args.choose)
        lines = [central(folder, rows, args)]
        lines += [federated(folder, rows, send, args) for send in args.send or ["dense", "top:1%"]]
    common.write_json(args.json, lines)
    print(report(lines))


if __name__ == "__main__":
    main()
