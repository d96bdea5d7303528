"""One run, one folder: its recipe, tokens, trunk cache, checkpoints, metrics, report and exported model.

Every file but metrics.jsonl is written under a temporary name, fsynced and renamed; one process at a time works here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from edgeft import config
from edgeft.errors import ConfigError, RunError
from edgeft.model import DEMO_HUB_ID, demo_model

MAX_JSON_BYTES = 256 << 20  # a file is read whole
_LEFT = re.compile(r"\..+\.(\d{1,9})(?:\.[^.]*)?\.tmp")  # the number is its process
LOCK_WAIT_S = 1.0  # a process that was killed a moment ago may still be on its way out


def model_source(path: str | None) -> str:
    """What `--model` means: a file, a folder, a hub id, or with nothing the embedded model."""
    if path is not None:
        return path
    embedded = demo_model()
    return str(embedded) if embedded else DEMO_HUB_ID


@contextlib.contextmanager
def writing(path: Path, hint: str = "choose another place with -o") -> Iterator[None]:
    """Turns what the system says about a failed write into one line and a hint."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = f"free some space (an interrupted run goes on with --resume), or {hint}"
        raise RunError(f"cannot write {path}: {(error.strerror or str(error)).lower()}", hint) from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its place only when it is whole and on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # what went wrong first is told
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A rename is on the disk only when its folder is."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):  # some file systems cannot do this
            raise


def sweep(folder: Path, locked: bool = False) -> None:
    """Takes away what processes that were killed left half written; locked: only this one writes there."""
    for path in folder.glob(".*.tmp"):
        owner = _LEFT.fullmatch(path.name)
        # by the number alone, one that was killed a moment ago, or another that has its number now, would seem alive
        if owner and (int(owner[1]) != os.getpid() if locked else not _lives(int(owner[1]))):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_left(file: Path) -> bool:
    """By a start that was killed before there was a run."""
    return file.name == "lock" or _LEFT.fullmatch(file.name) is not None


def _lives(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        pass
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """What is missing or damaged is None."""
    try:
        small = path.is_file() and path.stat().st_size <= MAX_JSON_BYTES
        found = json.loads(path.read_text(encoding="utf-8")) if small else None
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, values: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(values, indent=1).encode())


def _remove(path: Path) -> None:
    """A file, a link itself, or a folder with all that is in it; nothing if it is not there."""
    import shutil

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)  # it does not follow links
    else:
        path.unlink(missing_ok=True)


class Run:
    """A run folder and the names of what lies in it."""

    def __init__(self, path: Path, recipe: config.Recipe) -> None:
        self.path, self.recipe = path, recipe
        self.recipe_file = path / "recipe.yaml"
        self.tokens = path / "tokens.npz"
        self.trunk = path / "trunk"  # with how.trunk_place=run, or where the shared cache cannot be used
        self.checkpoints = path / "checkpoints"
        self.best = path / "best.safetensors"
        self.metrics = path / "metrics.jsonl"
        self.done = path / "done.json"
        self.plan = path / "plan.json"
        self.searched = path / "search.json"  # with update.blocks=auto
        self.exported = path / "export.json"
        self.evaluation = path / "eval.json"
        self.peaks = path / "peaks.json"  # bytes, by stage
        self.model = path / "model.gguf"
        self._lock: IO[str] | None = None

    @staticmethod
    def open(path: str | Path) -> Run:
        """A run that is there already."""
        path = Path(path)
        file = path / "recipe.yaml"
        if not file.is_file():
            raise RunError(f"{path} is no run folder (it holds no recipe.yaml)", "`edgeft runs` lists the runs")
        return Run(path, config.build(config.Recipe, config.read_yaml(file)))

    @staticmethod
    def start(path: Path, recipe: config.Recipe, resume: bool) -> Run:
        """A new run, or with `resume` the one that is there, if it learns the same thing."""
        run = Run(path, recipe)
        if run.recipe_file.exists():
            if not resume:
                raise RunError(f"{path} holds a run already", "go on with --resume, or name another folder with --out")
            earlier = Run.open(path).recipe
            if recipe.update.unknown and earlier.update.blocks == "auto":
                recipe.update = earlier.update  # with what the run has found out
            before, now = config.what(earlier), config.what(recipe)
            changed = [
                f"{part}.{key} {before[part].get(key)!r} → {value!r}"
                for part in now
                for key, value in now[part].items()
                if before[part].get(key) != value
            ]
            if changed:
                raise RunError(
                    f"{path} was made with another recipe: {'; '.join(changed[:3])}",
                    "resume with the same settings, or name another folder with --out",
                )
        elif path.exists() and (not path.is_dir() or any(not _is_left(file) for file in path.iterdir())):
            raise RunError(f"{path} is there already and is no run folder", "name another folder with --out")
        elif resume:
            raise RunError(f"there is no run in {path} to resume", "leave out --resume to start one")
        with writing(path):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.chmod(0o700)  # it holds the user's data
        run.lock()
        for folder in (path, run.checkpoints, run.trunk):
            sweep(folder, locked=True)
        run.write_recipe()
        return run

    def write_recipe(self) -> None:
        with replacing(self.recipe_file) as file:
            file.write(config.dump(self.recipe).encode())

    def lock(self) -> None:
        """Held until this process ends, however it ends."""
        import fcntl

        with writing(self.path / "lock"):
            self._lock = (self.path / "lock").open("w")
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"{self.path} is in use by another process", "wait for it, or stop it first"
                    ) from None
            time.sleep(0.05)

    def lock_handle(self) -> int | None:
        """For a stage's own process, which holds the same lock until it ends."""
        return None if self._lock is None else self._lock.fileno()

    def discard_if_empty(self) -> None:
        """Takes away a folder in which nothing has been made yet."""
        if self.tokens.exists():
            return
        if self._lock is not None:
            self._lock.close()
        made = (self.plan, self.metrics, self.recipe_file, self.path / "lock")
        with contextlib.suppress(OSError):  # the disk is read-only
            if not {path.name for path in self.path.iterdir()} - {file.name for file in made}:
                for file in made:
                    file.unlink(missing_ok=True)
                self.path.rmdir()

    def drop_data(self) -> None:
        """Takes away the rows' tokens and what was computed from them; what was learned stays."""
        from edgeft import cache

        with writing(self.path):
            self.tokens.unlink(missing_ok=True)
            _remove(self.trunk)
            cache.forget(self.path)

    @staticmethod
    def check_removable(path: Path) -> None:
        """RunError where `remove` must not do anything; a damaged recipe is no reason."""
        if path.is_symlink():
            raise RunError(f"{path} is a link", "name the folder itself")
        if not (path / "recipe.yaml").is_file() or not (path / "lock").is_file():
            raise RunError(f"{path} is no run folder (it holds no recipe.yaml or no lock)", "`edgeft runs` lists them")
        if Path.cwd().is_relative_to(path.resolve()):
            raise RunError(f"{path} is the folder that you are in", "leave it first")

    @staticmethod
    def remove(path: Path) -> int:
        """Takes away a whole run, with what it alone uses in the shared cache; bytes freed. No link is followed."""
        from edgeft import cache

        Run.check_removable(path)
        run = Run(path, config.Recipe())
        run.lock()
        size = sum(file.lstat().st_size for file in path.rglob("*"))
        with writing(path, "`ls -l` shows who may"):
            freed = cache.forget(path)
            for item in path.iterdir():
                if item.name not in ("recipe.yaml", "lock"):  # last: without them it would be no run any more
                    _remove(item)
            _remove(path)
        return size + freed

    def log(self, **values: Any) -> None:
        """One line of metrics.jsonl."""
        line = json.dumps({"time": round(time.time(), 3), **values}) + "\n"
        with writing(self.metrics), self.metrics.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line  # the one before was cut off
            file.write(line.encode())

    def read_json(self, path: Path) -> dict[str, Any] | None:
        return read_json(path)

    def write_json(self, path: Path, values: dict[str, Any]) -> None:
        write_json(path, values)

    def events(self) -> list[dict[str, Any]]:
        """What metrics.jsonl holds; a last line cut off by a crash is left out."""
        found = []
        with contextlib.suppress(OSError):
            for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, RecursionError):
                    event = json.loads(line)
                    found += [event] if isinstance(event, dict) else []
        return found


def runs(folder: Path) -> list[Run]:
    """The runs below a folder, newest last."""
    found = []
    for file in sorted(folder.glob("*/recipe.yaml"), key=lambda f: f.stat().st_mtime):
        with contextlib.suppress(RunError, ConfigError):
            found.append(Run.open(file.parent))
    return found
