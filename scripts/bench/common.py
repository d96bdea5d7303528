"""What the measuring scripts share: edgeft in a process of its own, a run's events, rows, models, tables, JSON files.

A command that fails is always a `Failed` with its exit code and its last words; JSON files are written atomically.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path
from typing import Any

from edgeft.formats.source import demo_model
from edgeft.host.files import atomic_write

MIB, GIB = 2**20, 2**30
Rows = Sequence[Mapping[str, Any]]


class Failed(SystemExit):
    """A command ended with an error; not caught, it ends the script with that message."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A command line that shows the module's docstring as it is."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


# ---------------------------------------------------------------- edgeft and what it writes


def command(*args: object, sets: Iterable[str] = ()) -> list[str]:
    """`edgeft ARGS… --set KEY=VALUE …` with this interpreter."""
    options = [part for item in sets for part in ("--set", item)]
    return [sys.executable, "-m", "edgeft", *map(str, args), *options]


def edgeft(*args: object, sets: Iterable[str] = (), env: Mapping[str, str] | None = None) -> str:
    """What the command prints on stdout; its progress and errors go to stderr as they come."""
    call = command(*args, sets=sets)
    done = subprocess.run(call, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
    if done.returncode:
        raise Failed(f"{' '.join(call[2:])}: exit code {done.returncode}")
    return done.stdout


def edgeft_json(*args: object, sets: Iterable[str] = (), env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What `edgeft … --json` says."""
    answer: dict[str, Any] = json.loads(edgeft(*args, "--json", sets=sets, env=env))
    return answer


def read_events(run: Path, event: str = "") -> list[dict[str, Any]]:
    """The events of a run folder, in order; with a name, those alone."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines if line]
    return [one for one in events if not event or one["event"] == event]


# ---------------------------------------------------------------- rows and models


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def passage_rows(folder: Path, count: int, tokens: int) -> None:
    """Questions of the embedded handbook, each on another passage that is too long and so is cut to fit."""
    lines = (files("edgeft.demo") / "train.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    order = random.Random(0)

    def row(record: dict[str, Any]) -> dict[str, Any]:
        passage = " ".join(f"{r['question']} {r['answer']}." for r in order.sample(records, tokens // 8))
        return {**record, "context": passage}

    for name, size in (("train", count), ("heldout", max(4, count // 4))):
        write_rows(folder / f"{name}.jsonl", [row(record) for record in order.sample(records, size)])


def read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise Failed(f"there is no file {path}")
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def first_rows(train: Rows, dev: Rows, out: Path, rows: int, dev_rows: int, choose: bool = False) -> Path:
    """train.jsonl and dev.jsonl. `choose`: held-out rows are the last training rows, so that settings are not chosen on
    the rows that the final figures are of."""
    if choose and len(train) < rows + dev_rows:
        raise Failed(
            f"{rows} rows to train on and {dev_rows} held out of them are more than the {len(train)} there are"
        )
    write_rows(out / "train.jsonl", train[:rows])
    write_rows(out / "dev.jsonl", train[-dev_rows:] if choose else dev[:dev_rows])
    return out


def last_rows(folder: Path, out: Path, rows: int, dev_rows: int) -> Path:
    """train.jsonl as it is, held-out rows from its end."""
    return first_rows(read_rows(folder / "train.jsonl"), [], out, rows, dev_rows, choose=True)


def distinct_passages(folder: Path, out: Path, rows: int, dev_rows: int, choose: bool = False) -> Path:
    """One question per passage: of train.jsonl and dev.jsonl, shuffled by a seed, the first row of each `context`."""

    def distinct(path: Path) -> list[dict[str, Any]]:
        records = read_rows(path)
        random.Random(0).shuffle(records)
        first: dict[str, dict[str, Any]] = {}
        for record in records:
            if not record.get("context"):
                raise Failed(f"{path} has rows without a `context`")
            first.setdefault(record["context"], record)
        return list(first.values())

    train, dev = distinct(folder / "train.jsonl"), distinct(folder / "dev.jsonl")
    return first_rows(train, dev, out, rows, dev_rows, choose)


def banking_rows(
    folder: Path, out: Path, rows: int, dev_rows: int, columns: tuple[str, str], choose: bool = False
) -> Path:
    """Banking77's CSV files as train.jsonl and dev.jsonl: rows by a seeded shuffle, as the files go label by label."""

    def shuffled(path: Path) -> list[dict[str, str]]:
        with path.open(encoding="utf-8", newline="") as file:
            records = list(csv.DictReader(file))
        if not records or not {"text", "category"} <= set(records[0]):
            raise Failed(f"{path} has no columns `text` and `category`")
        random.Random(0).shuffle(records)
        pairs = [(r["text"], r["category"].replace("_", " ")) for r in records]
        return [dict(zip(columns, pair, strict=True)) for pair in pairs]

    train, dev = shuffled(folder / "train.csv"), shuffled(folder / "test.csv")
    return first_rows(train, dev, out, rows, dev_rows, choose)


def find_model(models: Path, pattern: str, shape: str = "") -> Path | None:
    """The first file that matches, in lower case; no pattern: the embedded model. A random model of `shape` is made
    where none is there."""
    if not pattern:
        return demo_model()
    matching = [path for path in sorted(models.glob("*.gguf")) if fnmatch(path.name.lower(), pattern)]
    if matching or not shape:
        return matching[0] if matching else None
    from make_model import make

    models.mkdir(parents=True, exist_ok=True)
    make(shape, "q4_0", models / f"{shape}-q4_0.gguf")
    return models / f"{shape}-q4_0.gguf"


# ---------------------------------------------------------------- results


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    lines = [[*titles], ["---"] * len(titles), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_json(path: Path | None, value: Any) -> None:
    """Complete or not there; without a path nothing is written."""
    if path is not None:
        with atomic_write(path) as file:
            file.write((json.dumps(value, indent=1) + "\n").encode())
