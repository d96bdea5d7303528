"""`edgeft finetune`: all stages in order, each in its own process; complete ones are skipped."""

from __future__ import annotations

import contextlib
from typing import Any

from edgeft.errors import EdgeftError
from edgeft.host.files import read_json
from edgeft.host.limit import hard_limit
from edgeft.run.folder import Run
from edgeft.run.record import Allowance
from edgeft.run.supervise import StageRunner

STAGES = ("prepare", "train", "export", "eval")


def complete(run: Run, name: str) -> bool:
    """Whether all output files of a stage are valid."""
    outputs = {
        "prepare": (run.tokens,),
        "train": (run.done,),
        "export": (run.model, run.exported),
        "eval": (run.evaluation,),
    }
    return all(file.is_file() and (file.suffix != ".json" or read_json(file) is not None) for file in outputs[name])


def finetune(
    run: Run, until: str, allowed: Allowance = Allowance(), to_stderr: bool = False, enforce: bool = False
) -> dict[str, Any]:
    """Every stage up to `until`; returns the combined results. enforce: the system limits the memory."""
    peaks: dict[str, int] = {}
    with contextlib.ExitStack() as contexts:
        limit = contexts.enter_context(hard_limit(allowed.budget_bytes)) if enforce else None
        runner = contexts.enter_context(StageRunner(run, allowed, to_stderr, limit))
        for name in STAGES[: STAGES.index(until) + 1]:
            if complete(run, name):
                continue
            if name == "train" and run.needs_search:
                peaks["search"] = runner.do("search")
            try:
                peaks[name] = runner.do(name)
            except EdgeftError:
                if name == "prepare":
                    run.discard_if_empty()  # an error in the arguments leaves no folder behind
                raise
    if until == STAGES[-1] and not run.recipe.how.keep_data:
        run.drop_data()
    wanted, peaks = STAGES[: STAGES.index(until) + 1], peaks | run.peaks()  # as the events have them
    result: dict[str, Any] = {"run": str(run.path)}
    if "train" in wanted:
        result |= read_json(run.done) or {}
    result["peaks"] = {name: peaks[name] for name in peaks if name in (*wanted, "search")}
    if limit is not None:
        result["limit"] = {"bytes": limit.bytes, "by": limit.kind}
    if "export" in wanted:
        result["export"] = read_json(run.exported)
    if "eval" in wanted:
        result["eval"] = read_json(run.evaluation)
    return result
