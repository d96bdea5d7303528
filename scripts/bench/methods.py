#!/usr/bin/env python3
"""All methods side by side on question answering and on classification: what is trained, memory, time, and scores.

    scripts/bench/methods.py DATA [--only NAME …] [--sets squad banking77 arc] [--memory 1GiB] [--out FILE.json]
        [--work DIR]

DATA holds squad/{train,dev}.jsonl, banking77/{train,test}.csv and arc_easy/validation.jsonl. Every method trains in a
process of its own on the same rows; untuned and tuned files are scored by llama.cpp on the same held-out rows, and on
ARC-Easy, as a guard against forgetting; the set `arc` is trained on these very questions, and guards nothing. With
--out, what an earlier call with the same settings found is kept: methods can be run one by one. `searched` is found by
`edgeft search` for --memory; `last-k` are as many of the last blocks as fit the same memory; `equal-time` is the
searched scheme for as many epochs as LoRA's time allows; `sgd` and `qas-sgd` are SGD with momentum on the tensors of
sparse-rule, in float32 and in int8.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import common

from edgeft import config
from edgeft.data import tokens
from edgeft.evaluate.compare import Subject, score_subject
from edgeft.evaluate.suite import Item, Suite, load_suite, make_items, read_items
from edgeft.formats.source import model_source
from edgeft.formats.tokenizer import open_tokenizer
from edgeft.run.folder import Run
from edgeft.run.progress import Progress


@dataclass(frozen=True)
class Method:
    recipe: str = "sparse-bp"
    sets: list[str] = field(default_factory=list)


# Clipped gradients have a norm of at most 1: with momentum, steps of this rate are as long as those of AdamW at 3e-4
SGD = ["train.optimizer=sgd", "train.lr=0.1"]
METHODS: dict[str, Method] = {
    "last-k": Method("sparse-rule"),
    "sparse-bp": Method(),
    "sparse-search": Method("sparse-search"),
    "sparse-rule": Method("sparse-rule"),
    "searched": Method("sparse-search"),
    "lora": Method("lora"),
    "equal-time": Method("sparse-search"),
    "bias-norm": Method("bias-norm"),
    "tinytl": Method("tinytl"),
    "qas-int8": Method("qas-int8"),
    "sgd": Method("sparse-rule", SGD),
    "qas-sgd": Method("qas-int8", SGD),
    "cycle": Method("cycle"),
    "full": Method("full"),
}
SUITES = {"squad": "qa", "banking77": "classify", "arc": "qa"}
ROWS = {"squad": 1000, "banking77": 2000, "arc": 370}
SCORE = {"squad": "f1", "banking77": "accuracy", "arc": "f1"}


def write_rows(data: Path, name: str, out: Path, rows: int, dev_rows: int) -> Path:
    """train.jsonl and dev.jsonl; rows of the CSV files, which go label by label, by a seeded shuffle."""
    if name == "squad":
        return data / name
    if name == "arc":
        lines = (data / "arc_easy" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
        asked = [json.loads(line) for line in lines]
        pairs = [{"question": row["question"], "answer": row["choices"][row["answer"]]} for row in asked]
        for target, some in (("train.jsonl", pairs[:-dev_rows]), ("dev.jsonl", pairs[-dev_rows:])):
            common.write_rows(out / target, some)
        return out
    return common.banking_rows(data / name, out, rows, dev_rows, ("text", "label"))


class Bench:
    """One data set: its rows, the questions that are asked about it, and the untuned model's scores."""

    def __init__(self, name: str, args: argparse.Namespace, work: Path, before: dict[str, Any]) -> None:
        self.name, self.args, self.work = name, args, work / name
        self.rows = args.rows or ROWS[name]
        self.data = write_rows(args.data, name, self.work / "rows", self.rows, args.dev_rows)
        self.base: dict[str, Any] | None = before.get("base")
        self.found: dict[str, dict[str, Any]] = before.get("methods", {})
        suite = load_suite("choice")
        suite.eval = replace(suite.eval, max_new_tokens=1)
        arc = config.DataConfig(path=str(args.data / "arc_easy" / "validation.jsonl"), heldout_share=0.0)
        self.guard = suite, read_items(suite, arc, open_tokenizer(model_source(args.model)), args.arc_rows)

    def settings(self, epochs: float) -> list[str]:
        values = {
            "data.rows": self.rows,
            "data.heldout_rows": self.args.dev_rows,
            "data.max_tokens": self.args.max_tokens,
            "train.epochs": epochs,
            "how.nice": 0,
            "how.trunk_place": "run",  # no method finds the trunk of another
        }
        return [f"{key}={value}" for key, value in values.items()]

    def command(self, epochs: float, more: list[str]) -> list[object]:
        every = [*self.settings(epochs), *self.args.set, *more]
        words: list[object] = ["--data", self.data, *(part for item in every for part in ("--set", item))]
        return [*words, "--model", self.args.model] if self.args.model else words

    # ------------------------------------------------ one method

    def run(self, name: str) -> dict[str, Any]:
        recipe, more, epochs = METHODS[name].recipe, METHODS[name].sets, self.args.epochs
        notes: dict[str, Any] = {}
        if name in ("searched", "equal-time", "last-k"):
            notes = self.search()
            if name == "last-k":
                more = [f"update.blocks={notes['compared']['last_blocks']}", "update.tensors=q,k,v,o,gate,up,down"]
            else:
                recipe = notes["files"]["recipe"]
        if name == "equal-time":
            epochs = self.equal_epochs()
        folder = self.work / name
        if not (folder / "export.json").is_file():
            resume = ["--resume"] if (folder / "recipe.yaml").is_file() else []
            command = ["finetune", "--recipe", recipe, "--out", folder, *self.command(epochs, more)]
            began = time.monotonic()
            common.edgeft(*command, "--until", "export", *resume)
            (folder / "whole.json").write_text(json.dumps(round(time.monotonic() - began, 1)))
        run = Run.open(folder)
        done = run.read_json(run.done) or {}
        suite = load_suite(SUITES[self.name])
        items = make_items(suite, tokens.load(run.tokens)[1][: self.args.dev_rows])
        if self.base is None:
            self.base = self.scores(model_source(self.args.model), suite, items)
        return {
            "epochs": epochs,
            "trained_parameters": done["trained_parameters"],
            "peak_bytes": done["peak_bytes"],
            "seconds": done["seconds"],
            "whole_seconds": json.loads((folder / "whole.json").read_text()),
            "heldout_loss": done["best_loss"],
            "base_loss": done["base_loss"],
            **{key: notes[key] for key in ("parts", "rank_correlation", "gain_share", "compared") if key in notes},
            **self.scores(str(run.model), suite, items),
        }

    def scores(self, file: str, suite: Suite, items: list[Item]) -> dict[str, Any]:
        own = score_subject(Subject("tuned", file), items, suite, Progress()).figures()
        arc = score_subject(Subject("tuned", file), self.guard[1], self.guard[0], Progress()).figures()
        return {"score": own[SCORE[self.name]], "figures": own, "arc_easy": arc["accuracy"], "arc_figures": arc}

    def search(self) -> dict[str, Any]:
        """The recipe for --memory; found once."""
        place = self.work / "searched.yaml"
        notes = place.with_suffix(".search.json")
        if not place.is_file():
            more = ["--resume"] if notes.is_file() else []
            limit = ["--time", self.args.time] if self.args.time else []
            words = ["search", "-o", place, "--memory", self.args.memory, *limit, "--measure", self.args.measure]
            common.edgeft(*words, *self.command(self.args.epochs, []), *more)
        found: dict[str, Any] = json.loads(notes.read_text())
        return {**found, "files": {"recipe": str(place)}}

    def equal_epochs(self) -> float:
        """As many as LoRA's time allows the searched scheme; quarters of an epoch."""
        for needed in ("lora", "searched"):
            if needed not in self.found:
                self.found[needed] = self.run(needed)
        times = self.found["lora"]["seconds"] / self.found["searched"]["seconds"]
        return max(0.25, int(4 * self.args.epochs * times) / 4)


def print_table(name: str, bench: Bench) -> None:
    metric = {"f1": "F1", "accuracy": "accuracy"}[SCORE[name]]
    first = next(iter(bench.found.values()))
    base = bench.base
    assert base is not None
    print(f"\n{name}: {bench.rows} rows, {bench.args.epochs:g} epochs, {bench.args.dev_rows} held-out rows\n")
    print(f"| method | trained | peak | seconds | held-out loss | {metric} | ARC-Easy |")
    print("|---|---|---|---|---|---|---|")
    print(f"| untuned | | | | {first['base_loss']:.3f} | {base['score']:.1f} | {base['arc_easy']:.1f} |")
    for method in METHODS:
        if method not in bench.found:
            continue
        row = bench.found[method]
        label = method if row["epochs"] == bench.args.epochs else f"{method} ({row['epochs']:g} epochs)"
        if method == "last-k":
            label = f"last {row['compared']['last_blocks']} blocks"
        print(
            f"| {label} | {row['trained_parameters'] / 1e6:.2f} M | {row['peak_bytes'] / 2**20:.0f} MiB "
            f"| {row['seconds']:.0f} | {row['heldout_loss']:.3f} | {row['score']:.1f} "
            f"| {row['arc_easy']:.1f} ({row['arc_easy'] - base['arc_easy']:+.1f}) |"
        )


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("data", type=Path, help="folder with squad, banking77 and arc_easy")
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--sets", nargs="+", choices=list(SUITES), default=["squad", "banking77"])
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, help="default: 1,000 of SQuAD, 2,000 of Banking77, 370 of ARC")
    parser.add_argument("--dev-rows", type=int, default=200)
    parser.add_argument("--arc-rows", type=int, default=570)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--memory", default="1GiB", help="for the searched scheme and the last blocks")
    parser.add_argument("--time", help="of training, for the search; default: no limit")
    parser.add_argument("--measure", default="3min", help="time for trials of the search")
    parser.add_argument("--set", action="append", default=[], help="further knobs, for all methods")
    parser.add_argument("--out", type=Path, help="keep the figures in this JSON file")
    parser.add_argument("--work", type=Path, help="keep the runs in this folder; default: gone afterwards")
    args = parser.parse_args()
    left_out = ("only", "sets", "out", "work")
    settings = {key: str(value) for key, value in vars(args).items() if key not in left_out}
    kept: dict[str, Any] = {"settings": settings, "sets": {}}
    if args.out and args.out.is_file():
        kept = json.loads(args.out.read_text())
    if kept["settings"] != settings:
        sys.exit(f"{args.out} was made with other settings: name another file")
    failed = []
    with tempfile.TemporaryDirectory() as place:
        benches = {name: Bench(name, args, args.work or Path(place), kept["sets"].get(name, {})) for name in args.sets}
        for name, bench in benches.items():
            for method in args.only:
                if method in bench.found:
                    continue
                print(f"{name}: {method} …", file=sys.stderr, flush=True)
                try:
                    bench.found[method] = bench.run(method)
                except common.Failed as error:
                    failed.append(str(error))
                    continue
                kept["sets"][name] = {"base": bench.base, "methods": bench.found}
                common.write_json(args.out, kept)
    for name, bench in benches.items():
        if bench.found:
            print_table(name, bench)
    if failed:
        sys.exit("\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
