"""The contents of a run folder as one object: scores, curves, memory, time, updated tensors.

Only files of the run and the two models are read; a missing value is None or empty, never a guess.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeft.arch import of_gguf
from edgeft.errors import EdgeftError
from edgeft.formats import ggml
from edgeft.formats.gguf import GGUF
from edgeft.formats.source import demo_model, is_gguf
from edgeft.methods import scheme as schemes
from edgeft.run.events import EvalEvent, PauseEvent, PrepareEvent, ValidationEvent, read_events
from edgeft.run.folder import Run

STAGES = ("prepare", "search", "trunk", "train", "held-out loss", "export", "evaluate")  # in this order
MAP_ROWS = ("q", "k", "v", "o", "gate", "up", "down", "norms", "biases")


@dataclass
class TensorMap:
    depth: int
    moved: dict[tuple[int, str], float | None]  # ‖after - before‖ / ‖before‖; None: only that it was updated is known


@dataclass
class RunSummary:
    name: str
    path: Path
    recipe: Any
    model: str
    result: dict[str, Any] | None  # base and tuned on held-out rows
    suites: list[dict[str, Any]]  # other suites
    harness: dict[str, Any] | None
    done: dict[str, Any]
    plan: dict[str, Any]
    exported: dict[str, Any]
    counts: dict[str, Any]  # rows and tokens of the data
    scheme: dict[str, Any]
    train_loss: list[tuple[float, float]]  # step, loss
    heldout_loss: list[tuple[float, float]]
    memory: list[tuple[float, float]]  # seconds since training began, bytes
    stages: list[tuple[str, float]]  # name, seconds
    peaks: dict[str, int]  # highest memory in bytes, by stage
    heat: list[tuple[float, float]]  # seconds since the first reading, °C
    throttled: list[str]  # reasons for which the system slowed the machine down
    map: TensorMap | None
    base_bytes: int | None
    tuned_bytes: int | None
    compared: list[dict[str, Any]]  # files of `edgeft export --compare`

    @property
    def data_name(self) -> str:
        path = self.recipe.data.path
        return Path(path).name if path else "the embedded handbook"


def load_run_summary(run: Run) -> RunSummary:
    events = run.events()
    first = {name: next((e for e in events if e.get("event") == name), {}) for name in ("prepare", "scheme")}
    steps = _latest(e for e in events if e.get("event") == "step")
    checks = _latest(e for e in events if e.get("event") == "validation")
    origin = base_file(run)
    result, suites = results(run)
    return RunSummary(
        name=run.path.resolve().name,
        path=run.path,
        recipe=run.effective,
        model=Path(run.recipe.model.path or (origin.name if origin else "the embedded model")).name,
        result=result,
        suites=suites,
        harness=run.read_json(run.path / "eval-harness.json"),
        done=run.read_json(run.done) or {},
        plan=run.read_json(run.plan) or {},
        exported=run.read_json(run.path / "export.json") or {},
        counts=first["prepare"],
        scheme=first["scheme"],
        train_loss=[(e["step"], e["loss"]) for e in steps],
        heldout_loss=[(e["step"], e["heldout_loss"]) for e in checks if _number(e.get("heldout_loss"))],
        memory=_memory(steps),
        stages=_stages(run, events, steps),
        peaks=run.peaks(),
        heat=_heat(events),
        throttled=list(dict.fromkeys(why for e in _governed(events) for why in e.get("throttled") or [])),
        map=tensor_map(run, origin, first["scheme"]),
        base_bytes=origin.stat().st_size if origin else None,
        tuned_bytes=run.model.stat().st_size if run.model.is_file() else None,
        compared=_compared(run.read_json(run.compared) or {}),
    )


def _compared(result: dict[str, Any]) -> list[dict[str, Any]]:
    files = result.get("files")
    every = [one for one in files if isinstance(one, dict)] if isinstance(files, list) else []
    return [one for one in every if _number(one.get("bytes")) and _number(one.get("loss"))]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and bool(np.isfinite(value))


def _latest(events: Any) -> list[dict[str, Any]]:
    """The last event of each step: a resumed run repeats the steps after its checkpoint."""
    last = {e["step"]: e for e in events if isinstance(e.get("step"), int)}
    return [last[step] for step in sorted(last)]


def base_file(run: Run) -> Path | None:
    """The base model, if it is a GGUF file on this machine."""
    path = run.recipe.model.path
    file = Path(path) if path else demo_model()
    return file if file is not None and file.is_file() and is_gguf(str(file)) else None


def results(run: Run) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """(result on the run's held-out rows, results of other suites)."""
    main = _scores(run, run.evaluation) or _scores(run, run.path / "eval-trainer.json")
    others: dict[str, dict[str, Any]] = {}
    for file in sorted(run.path.glob("eval-*.json"), reverse=True):  # eval-keep.json replaces eval-keep-trainer.json
        other = _scores(run, file)
        if other and isinstance(other.get("suite"), str) and other["suite"] != "qa":
            others[other["suite"]] = other
    return main, [others[name] for name in sorted(others)]


def _scores(run: Run, file: Path) -> dict[str, Any] | None:
    """A result file; None if it is missing or damaged."""
    result = run.read_json(file) or {}
    tables = all(isinstance(result.get(key) or {}, dict) for key in ("base", "difference", "verdict"))
    return result if tables and isinstance(result.get("tuned"), dict) else None


def _memory(steps: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(seconds of training, bytes); time between two processes of one run does not count."""
    ends = itertools.accumulate(float(e.get("seconds") or 0.0) for e in steps)
    return [(end, e["rss_bytes"]) for end, e in zip(ends, steps, strict=True) if e.get("rss_bytes")]


def _governed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in events if e.get("event") == "governor" and "time" in e]


def _heat(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    read = [e for e in _governed(events) if _number(e.get("celsius"))]
    return [(e["time"] - read[0]["time"], e["celsius"]) for e in read]


def paused(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by reason, of all processes of the run."""
    times: dict[str, float] = {}
    for event in read_events(PauseEvent, events):
        for why, seconds in event.paused_s.items():
            times[why] = times.get(why, 0.0) + float(seconds)
    return times


def _stages(run: Run, events: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Seconds worked by stage, then seconds paused by reason; validation counts apart from training."""
    times: dict[str, float] = {}
    for event in run.stages():
        times[event.stage] = times.get(event.stage, 0.0) + event.worked_s
    checks_s = sum(event.seconds for event in read_events(ValidationEvent, events))
    scored = {(event.suite, event.who): event.seconds for event in read_events(EvalEvent, events)}
    if times:
        times["train"] = times.get("train", 0.0) - checks_s
    else:  # an old run folder: no time of search, trunk and export
        prepared = next((event.seconds for event in read_events(PrepareEvent, events)), 0.0)
        times = {"prepare": prepared, "train": sum(float(e.get("seconds") or 0.0) for e in steps)}
    times |= {"held-out loss": checks_s, "evaluate": times.pop("eval", 0.0) or sum(scored.values())}
    rows = [(name, times.get(name, 0.0)) for name in STAGES]
    rows += [(f"paused: {why}", seconds) for why, seconds in paused(events).items()]
    return [(name, seconds) for name, seconds in rows if seconds > 0.005]


def tensor_map(run: Run, origin: Path | None, scheme: dict[str, Any]) -> TensorMap | None:
    """From the base and the tuned file; without a base file, from the scheme."""
    try:
        if origin is not None and run.model.is_file():
            return compare_files(GGUF.open(origin), GGUF.open(run.model))
        if run.model.is_file() and scheme.get("blocks"):
            tuned = GGUF.open(run.model)
            depth = int(tuned.need("block_count"))
            made = schemes.make(run.effective.update, depth, of_gguf(tuned))
            keys = [*made.updates, *((b, "norms") for b in made.norms), *((b, "biases") for b, _ in made.biases)]
            return TensorMap(depth, dict.fromkeys(keys))
    except (EdgeftError, KeyError, OSError):
        pass  # the report does without its map
    return None


def compare_files(base: GGUF, tuned: GGUF) -> TensorMap:
    """Relative change of every tensor whose bytes differ. Norms and biases of a block are one figure each; an added
    bias counts with its norm."""
    rows = {linear.gguf: row for row, linear in of_gguf(tuned).linears.items()}
    sums: dict[tuple[int, str], np.ndarray] = {}  # squares: of the change, of the base
    for name in tuned.tensors:
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if not match:
            continue
        row = rows.get(match[2]) if match[3] == "weight" else "biases"
        row = row or ("norms" if "norm" in match[2] else None)
        if row is None:
            continue
        same_type = name in base.tensors and base.tensors[name].type == tuned.tensors[name].type
        if same_type and np.array_equal(base.bytes(name), tuned.bytes(name)):
            continue
        after = _values(tuned, name)
        before = _values(base, name) if name in base.tensors else None
        change = float(np.square(after - before).sum(dtype=np.float64)) if before is not None else float(after @ after)
        size = float(np.square(before).sum(dtype=np.float64)) if before is not None else 0.0
        key = (int(match[1]), row)
        sums[key] = sums.get(key, 0.0) + np.array((change, size))
    moved = {key: float(np.sqrt(change / size if size > 0 else change)) for key, (change, size) in sums.items()}
    return TensorMap(int(base.need("block_count")), {**moved})


def _values(gguf: GGUF, name: str) -> np.ndarray:
    """(n,) float32."""
    info = gguf.tensors[name]
    out = np.empty((int(np.prod(info.shape[1:])), int(info.shape[0])), np.float32)
    ggml.unpack(gguf.bytes(name), info.type, out)
    return out.reshape(-1)


def summary(run: Run) -> dict[str, Any]:
    """One line of `edgeft runs`."""
    done = run.read_json(run.done) or {}
    main, _ = results(run)
    counts: dict[str, Any] = next((e for e in run.events() if e.get("event") == "prepare"), {})
    score = None
    if main and main.get("base"):
        metric = (main.get("verdict") or {}).get("metric", "f1")
        metric = "loss" if main["tuned"].get(metric) is None else metric
        score = {"metric": metric, "base": main["base"].get(metric), "tuned": main["tuned"].get(metric)}
    model = run.recipe.model.path or demo_model()
    return {
        "run": run.path.name,
        "recipe": run.recipe.name,
        "model": Path(str(model)).name if model else "",
        "train_rows": counts.get("train_rows"),
        "state": "complete" if main else "trained" if done else "not finished",
        "score": score,
        "base_loss": done.get("base_loss"),
        "best_loss": done.get("best_loss"),
        "base_f1": ((main or {}).get("base") or {}).get("f1"),
        "tuned_f1": ((main or {}).get("tuned") or {}).get("f1"),
        "seconds": round(sum(event.worked_s for event in run.stages()), 2) or done.get("seconds"),
        "train_seconds": done.get("train_seconds"),
        "peak_bytes": max(run.peaks().values(), default=done.get("peak_bytes")),
    }
