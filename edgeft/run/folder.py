"""One run, one folder: its recipe, tokens, trunk cache, checkpoints, metrics, report and exported model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgeft import config
from edgeft.errors import ConfigError, ConfigWarning, RunError
from edgeft.host.files import _TMP, LockFile, atomic_write, read_json, remove_tree, sweep, wrap_os_errors, write_json
from edgeft.host.system import peak_bytes
from edgeft.run.events import Event, StageEvent, read_events
from edgeft.run.record import Resolved, of_earlier_version

LOCK_WAIT_S = 1.0  # a killed process may take a moment to exit


def _is_leftover(file: Path) -> bool:
    """Was it left by a process that was killed before the run existed?"""
    return file.name == "lock" or _TMP.fullmatch(file.name) is not None


class Run:
    """A run folder and the paths in it."""

    def __init__(self, path: Path, recipe: config.Recipe) -> None:
        self.path, self.recipe = path, recipe
        self.recipe_file = path / "recipe.yaml"
        self.tokens = path / "tokens.npz"
        self.trunk = path / "trunk"  # with how.trunk_place=run, or where the shared cache cannot be used
        self.checkpoints = path / "checkpoints"
        self.best = path / "best.safetensors"
        self.metrics = path / "metrics.jsonl"
        self.done = path / "done.json"
        self.plan = path / "plan.json"  # the planner's figures
        self.record = path / "resolved.json"
        self.searched = path / "search.json"  # with update.blocks=auto: its figures, or why it was skipped
        self.exported = path / "export.json"
        self.evaluation = path / "eval.json"
        self.model = path / "model.gguf"
        self.adapter = path / "adapter.gguf"
        self.compared = path / "compare.json"
        self._lock: LockFile | None = None
        self._resolved: Resolved | None = None
        self.paused_s = 0.0  # by the governor, in this process
        self._inner_s = self._inner_paused_s = 0.0  # of stages nested in the present one

    @staticmethod
    def open(path: str | Path) -> Run:
        """An existing run."""
        path = Path(path)
        file = path / "recipe.yaml"
        if not file.is_file():
            raise RunError(f"{path} is not a run folder (it has no recipe.yaml)", "`edgeft runs` lists the runs")
        return Run(path, config.build(config.Recipe, config.read_yaml(file), recorded=True))

    @staticmethod
    def start(path: Path, recipe: config.Recipe, resume: bool) -> Run:
        """A new run, or with `resume` the existing one if it has the same learning identity."""
        if (path / "recipe.yaml").exists():
            if not resume:
                raise RunError(f"{path} already contains a run", "continue with --resume, or choose another --out")
            earlier = Run.open(path).recipe
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConfigWarning)
                config.build(config.Recipe, config.read_yaml(path / "recipe.yaml"))  # rejects values that were removed
            if recipe.update.needs_search and earlier.update.blocks == "auto":  # earlier versions filled in the parts
                recipe = dataclasses.replace(recipe, update=earlier.update)
            before, now = config.learning_identity(earlier), config.learning_identity(recipe)
            changed = [
                f"{part}.{key} {before[part].get(key)!r} → {value!r}"
                for part in now
                for key, value in now[part].items()
                if before[part].get(key) != value
            ]
            if changed:
                hint = "resume with the same settings, or choose another folder with --out"
                raise RunError(f"{path} was made with another recipe: {'; '.join(changed[:3])}", hint)
        elif path.exists() and (not path.is_dir() or any(not _is_leftover(file) for file in path.iterdir())):
            raise RunError(f"{path} already exists and is not a run folder", "choose another folder with --out")
        elif resume:
            raise RunError(f"there is no run in {path} to resume", "leave out --resume to start one")
        run = Run(path, recipe)
        with wrap_os_errors(path):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.chmod(0o700)  # it contains the user's data
        run.lock()
        for folder in (path, run.checkpoints, run.trunk):
            sweep(folder, locked=True)
        with atomic_write(run.recipe_file) as file:
            file.write(config.dump(recipe).encode())
        return run

    def recorded(self) -> Resolved | None:
        """The record, also of a run made by an earlier version; None: not resolved yet."""
        if self._resolved is None:
            exists = self.record.is_file()
            self._resolved = Resolved.read(self.record) if exists else of_earlier_version(self.path, self.recipe)
        return self._resolved

    @property
    def fitted(self) -> config.Recipe:
        """The recipe as asked, or as --fit reduced it; before the search."""
        smaller = (read_json(self.plan) or {}).get("fitted")
        if not smaller:
            return self.recipe
        update = config.build(config.UpdateConfig, smaller["update"], "update", recorded=True)
        model = config.build(config.ModelConfig, smaller["model"], "model", recorded=True)
        return dataclasses.replace(self.recipe, update=update, model=model)

    @property
    def needs_search(self) -> bool:
        return self.fitted.update.needs_search and self.recorded() is None and read_json(self.searched) is None

    def write_record(self, resolved: Resolved) -> None:
        write_json(self.record, dataclasses.asdict(resolved))
        self._resolved = resolved

    @property
    def effective(self) -> config.Recipe:
        """The recipe as it runs; before the record is written, as asked."""
        recorded = self.recorded()
        return recorded.recipe if recorded else self.recipe

    def lock(self) -> None:
        """Held until this process ends, even if it is killed."""
        deadline = time.monotonic() + LOCK_WAIT_S
        with wrap_os_errors(self.path / "lock"):
            self._lock = LockFile(self.path / "lock")
            while not self._lock.exclusive():
                if time.monotonic() > deadline:
                    raise RunError(f"{self.path} is in use by another process", "wait for it, or stop it first")
                time.sleep(0.05)

    def lock_handle(self) -> int | None:
        """For the process of a stage, which holds the same lock until it ends."""
        return None if self._lock is None else self._lock.handle

    def discard_if_empty(self) -> None:
        """Deletes the folder of a run that has no results yet."""
        if self.tokens.exists():
            return
        if self._lock is not None:
            self._lock.close()
        made = (self.plan, self.searched, self.metrics, self.recipe_file, self.path / "lock")
        with contextlib.suppress(OSError):  # the disk is read-only
            if not {path.name for path in self.path.iterdir()} - {file.name for file in made}:
                for file in made:
                    file.unlink(missing_ok=True)
                self.path.rmdir()

    def drop_data(self) -> None:
        """Deletes the tokens and the trunk cache; trained weights stay."""
        from edgeft.host import cache

        with wrap_os_errors(self.path):
            self.tokens.unlink(missing_ok=True)
            remove_tree(self.trunk)
            cache.remove_user(self.path)

    @staticmethod
    def check_removable(path: Path) -> None:
        """RunError if `remove` must not delete it; a damaged recipe may be deleted."""
        if path.is_symlink():
            raise RunError(f"{path} is a link", "give the folder itself")
        if not (path / "recipe.yaml").is_file() or not (path / "lock").is_file():
            raise RunError(f"{path} is not a run folder (it has no recipe.yaml or no lock)", "`edgeft runs` lists them")
        if Path.cwd().is_relative_to(path.resolve()):
            raise RunError(f"{path} is the current folder", "leave it first")

    @staticmethod
    def remove(path: Path) -> int:
        """Deletes a run, and shared cache entries that only it uses; bytes freed. No link is followed."""
        from edgeft.host import cache

        Run.check_removable(path)
        run = Run(path, config.Recipe())
        run.lock()
        files = [file.lstat() for file in path.rglob("*")]
        size = sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values())  # hard links count once
        with wrap_os_errors(path, "check the permissions with `ls -l`"):
            freed = cache.remove_user(path)
            for item in path.iterdir():
                if item.name not in ("recipe.yaml", "lock"):  # last: without them it would not be a run folder
                    remove_tree(item)
            remove_tree(path)
        return size + freed

    def log(self, event: Event) -> None:
        """One line of metrics.jsonl."""
        line = json.dumps({"time": round(time.time(), 3), **event.to_json()}) + "\n"
        with wrap_os_errors(self.metrics), self.metrics.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line  # the previous line is truncated
            file.write(line.encode())

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Writes a StageEvent at the end, also when the stage fails or is stopped."""
        begin, start, complete = time.time(), time.monotonic(), False
        paused, inner, inner_paused = self.paused_s, self._inner_s, self._inner_paused_s
        try:
            yield
            complete = True
        finally:
            paused_s = self.paused_s - paused - (self._inner_paused_s - inner_paused)
            worked_s = time.monotonic() - start - paused_s - (self._inner_s - inner)
            self._inner_s, self._inner_paused_s = inner + worked_s + paused_s, inner_paused + paused_s
            end, worked, waited = round(time.time(), 3), round(worked_s, 3), round(paused_s, 3)
            with contextlib.nullcontext() if complete else contextlib.suppress(RunError):
                self.log(StageEvent(name, round(begin, 3), end, worked, waited, peak_bytes(), complete))

    def stages(self) -> list[StageEvent]:
        return read_events(StageEvent, self.events())

    def peaks(self) -> dict[str, int]:
        """Highest memory in bytes, by stage."""
        peaks: dict[str, int] = {}
        for event in self.stages():
            peaks[event.stage] = max(event.peak_bytes, peaks.get(event.stage, 0))
        before = {} if peaks else read_json(self.path / "peaks.json") or {}  # from a version without stage events
        return peaks or {name: size for name, size in before.items() if isinstance(size, int)}

    def read_json(self, path: Path) -> dict[str, Any] | None:
        return read_json(path)

    def write_json(self, path: Path, values: dict[str, Any]) -> None:
        write_json(path, values)

    def events(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; one truncated by a crash is skipped."""
        events = []
        with contextlib.suppress(OSError):
            for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, RecursionError):
                    event = json.loads(line)
                    events += [event] if isinstance(event, dict) else []
        return events


def runs(folder: Path) -> list[Run]:
    """The runs below a folder, newest last."""
    opened = []
    for file in sorted(folder.glob("*/recipe.yaml"), key=lambda f: f.stat().st_mtime):
        with contextlib.suppress(RunError, ConfigError):
            opened.append(Run.open(file.parent))
    return opened
