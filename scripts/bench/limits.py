#!/usr/bin/env python3
"""Whole runs (tokens, trunk, training, export, scores) under a hard memory limit, and the most that they needed.

    scripts/bench/limits.py [smollm2 tinyllama qwen llama2-7b] [--aim] [--limit MIB] [--models DIR] [--set KEY=VALUE]
        [--json]
    scripts/bench/limits.py qwen-learns --data DIR/squad [--models DIR]

Two steps show the memory; `qwen-learns` is a run as shipped, one epoch over 300 rows of --data, and 60 held-out rows
are scored. The planner is given the limit (--memory, and --fit but for `qwen-learns` and LLaMA-2-7B), and all
processes of the run are put under it: a control group, in which the kernel kills who takes more, or RLIMIT_DATA where
none can be made; the table says which. Pages of files count in a group and give way when memory is wanted, so `in use`
is what could not be given back, looked at every 20 ms; `stage` is the largest resident memory of any stage's process,
mapped files included.
TinyLlama and Qwen2.5 are looked for in --models by name; LLaMA-2-7B is made there (scripts/bench/make_model.py).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
from common import MIB, passage_rows

from edgeft.host.limit import Limit, hard_limit
from edgeft.run.folder import Run


@dataclass(frozen=True)
class Job:
    name: str
    limit_mib: int
    aim_mib: int
    file: str  # what its model file is called, in lower case; nothing: the embedded one
    sets: list[str]
    shape: str = ""  # a random model of this shape is made where no file is there
    fit: bool = True  # the planner may shrink what is trained
    tokens: int = 256  # of each row
    rows: int = 8
    steps: int = 2
    learns: bool = False  # a whole run on rows of --data


SHORT = ["eval.rows=4", "eval.max_new_tokens=8"]  # what takes time and no more memory
JOBS = [
    Job("smollm2", 600, 450, "", SHORT),
    Job("tinyllama", 900, 700, "*tinyllama*.gguf", SHORT),
    Job("qwen", 1200, 900, "*qwen2.5*1.5b*.gguf", SHORT),
    # the last five blocks with biases, attention and the first linear of the FFN, as in PockEngine's paper; low rank
    Job(
        "llama2-7b", 2048, 1536, "llama2-7b*.gguf",
        [*SHORT, "update.blocks=5", "update.tensors=q,k,v,o,up", "update.biases=true"],
        shape="llama2-7b", fit=False, tokens=64, rows=16,
    ),
    Job("qwen-learns", 1536, 1024, "*qwen2.5*1.5b*.gguf", [], fit=False, tokens=384, rows=300, learns=True),
]  # fmt: skip


@dataclass
class Outcome:
    job: str
    limit_bytes: int
    by: str  # what held the limit
    result: str  # `done`, or what went wrong
    in_use_bytes: int | None  # most memory that could not be given back
    group_bytes: int | None  # with pages of files
    peaks: dict[str, int]  # by stage
    seconds: float
    loss: list[float]  # held-out, before and after
    f1: list[float]  # the same


def forget_pages(path: Path) -> None:
    """Pages that others have read already would be counted as theirs."""
    if hasattr(os, "posix_fadvise"):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


class Watch(threading.Thread):
    """The most that is in use, looked at every 20 ms."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(daemon=True)
        self.limit, self.most, self.over = limit, 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            self.most = max(self.most, self.limit.used_bytes or 0)


def settings(job: Job) -> list[str]:
    sets = [f"data.max_tokens={job.tokens}", "how.trunk_place=run", "how.compile=on", "how.nice=0", *job.sets]
    if job.learns:
        return [*sets, f"data.rows={job.rows}", "data.heldout_rows=60", "train.epochs=1", "eval.time_share=0"]
    return [*sets, f"train.steps={job.steps}", "train.validations=1", f"train.batch_rows={job.rows // job.steps}"]


def run(job: Job, model: Path, folder: Path, limit_bytes: int, more: list[str], data: Path | None = None) -> Outcome:
    """The job as a user would start it, all of its processes under one limit. data: rows of a job that learns."""
    rows, place = data or folder / "rows", folder / "run"
    if not job.learns:
        passage_rows(rows, job.rows, job.tokens)
    sets = [*settings(job), *more]
    options: list[object] = ["--memory", f"{limit_bytes // MIB}MiB", "--model", model, "--data", rows, "--out", place]
    command = common.command("finetune", *options, "--json", *(["--fit"] if job.fit else []), sets=sets)
    forget_pages(model)
    began = time.monotonic()
    with hard_limit(limit_bytes) as limit:
        watch = Watch(limit)
        watch.start()
        done = subprocess.run(command, preexec_fn=limit.join, capture_output=True, text=True)
        watch.over.set()
        watch.join()
        kills, peak = limit.kills, limit.peak_bytes
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    result = "done" if not done.returncode else (errors or done.stderr.splitlines() or ["failed"])[-1]
    if kills:
        result = f"killed for memory: {result}"
    known = Run.open(place).peaks() if (place / "recipe.yaml").is_file() else {}
    return Outcome(
        job.name,
        limit_bytes,
        limit.kind,
        result,
        watch.most or None,
        peak,
        found.get("peaks", known),
        round(time.monotonic() - began, 1),
        [found[key] for key in ("base_loss", "best_loss") if key in found],
        [found["eval"][side]["f1"] for side in ("base", "tuned")] if job.learns and found else [],
    )


def table(found: list[Outcome]) -> str:
    def mib(size: int | None) -> str:
        return "?" if size is None else f"{size / MIB:,.0f} MiB"

    rows = []
    for one in found:
        stage, peak = max(one.peaks.items(), key=lambda item: item[1], default=("?", None))
        sizes = [mib(one.limit_bytes), one.by, mib(one.in_use_bytes), mib(one.group_bytes), f"{stage} {mib(peak)}"]
        loss = " → ".join(f"{value:.3f}" for value in one.loss)
        f1 = " → ".join(f"{value:.1f}" for value in one.f1)
        rows.append([one.job, *sizes, loss, f1, f"{one.seconds:.0f}", one.result])
    titles = ["job", "limit", "by", "in use", "group", "stage", "loss", "F1", "seconds", "result"]
    return common.table(titles, rows)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("jobs", nargs="*", choices=[[], *(job.name for job in JOBS)], metavar="JOB")
    parser.add_argument("--aim", action="store_true", help="the tighter limits")
    parser.add_argument("--limit", type=int, metavar="MIB", help="this limit for every job")
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and dev.jsonl")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--keep", type=Path, help="leave the runs in this folder")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the run ends, and its group is taken away
    found = []
    for job in JOBS:
        if job.name not in args.jobs and (args.jobs or job.learns):
            continue
        if job.learns and not args.data:
            parser.error(f"{job.name} needs --data")
        model = common.find_model(args.models, job.file, job.shape)
        if model is None:
            print(f"{job.name}: no {job.file} in {args.models}", file=sys.stderr)
            continue
        mib = args.limit or (job.aim_mib if args.aim else job.limit_mib)
        folder = (args.keep or Path(tempfile.gettempdir())) / f"limits-{job.name}-{os.getpid()}"
        folder.mkdir(parents=True)
        try:
            found.append(run(job, model, folder, mib * MIB, args.set, args.data if job.learns else None))
        finally:
            if not args.keep:
                shutil.rmtree(folder)
    print(json.dumps([asdict(one) for one in found], indent=1) if args.json else table(found))
    if any(one.result != "done" for one in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
