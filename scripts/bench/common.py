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


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
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


def banking_rows(folder: Path, out: Path, rows: int, dev_rows: int, columns: tuple[str, str]) -> Path:
    """Banking77's CSV files as train.jsonl and dev.jsonl: rows by a seeded shuffle, as the files go label by label."""
    for source, target, count in (("train.csv", "train.jsonl", rows), ("test.csv", "dev.jsonl", dev_rows)):
        with (folder / source).open(encoding="utf-8", newline="") as file:
            records = list(csv.DictReader(file))
        if not records or not {"text", "category"} <= set(records[0]):
            raise Failed(f"{folder / source} has no columns `text` and `category`")
        random.Random(0).shuffle(records)
        pairs = [(r["text"], r["category"].replace("_", " ")) for r in records[:count]]
        write_rows(out / target, (dict(zip(columns, pair, strict=True)) for pair in pairs))
    return out


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
