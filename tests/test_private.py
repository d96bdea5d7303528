"""A run belongs to its user: nobody else may read it, it can be taken away, and nothing of it leaves the machine."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgeft import config
from edgeft.cli import app
from edgeft.errors import RunError
from edgeft.host import cache, offline
from edgeft.run.folder import Run
from tests.conftest import Edgeft
from tests.support.rows import small_rows

runner = CliRunner()
QUICK = [part for s in ("update.blocks=28-29", "train.steps=2") for part in ("--set", s)]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def made_run(path: Path) -> Run:
    run = Run.start(path, config.Recipe(), resume=False)
    run.tokens.write_bytes(b"x")
    (run.path / "checkpoints").mkdir()
    assert run._lock is not None
    run._lock.close()
    return run


def made_entry(name: str, *users: Path) -> cache.Entry:
    root = cache.folder("trunk")
    assert root is not None
    with cache.changing(root):
        entry = cache.Entry(root / name)
    entry.path.mkdir()
    assert entry.lock_if_unused()
    entry.states.write_bytes(bytes(100))
    entry.write_note({"crc32": 1})
    for user in users:
        cache.add_user(entry, user)
    entry.close()
    return entry


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- who may look


def test_folders_are_private_whatever_the_umask(own: Path) -> None:
    before = os.umask(0)
    try:
        run = made_run(own / "runs" / "a")
        made_entry("k", run.path)
    finally:
        os.umask(before)
    assert mode(run.path) == 0o700
    assert mode(own / "cache") == mode(own / "cache" / "trunk") == mode(own / "cache" / "trunk" / "k") == 0o700


def test_a_cache_folder_that_was_open_is_closed(own: Path) -> None:
    (own / "cache").mkdir(mode=0o755)
    (own / "model.bin").write_bytes(b"x")
    cache.file_hash(own / "model.bin")
    assert (own / "cache" / "weights.json").is_file()
    assert mode(own / "cache") == 0o700


# ---------------------------------------------------------------- edgeft runs rm


def test_a_run_is_taken_away_whole(own: Path) -> None:
    outside = own / "outside.txt"
    outside.write_text("mine")
    first, second = made_run(own / "runs" / "a"), made_run(own / "runs" / "b")
    (first.path / "link.txt").symlink_to(outside)
    (first.path / "folder").symlink_to(own)
    alone, both = made_entry("alone", first.path), made_entry("both", first.path, second.path)
    listed = runner.invoke(app, ["runs", "--json"])
    assert {row["run"] for row in json.loads(listed.stdout)} == {"a", "b"}
    result = runner.invoke(app, ["runs", "rm", "a", "--yes", "--json"])
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)["removed"]) == ["runs/a"]
    assert not first.path.exists()
    assert outside.read_text() == "mine"  # no link was followed
    assert not alone.path.exists()
    assert both.path.exists()  # another run uses it
    assert runner.invoke(app, ["runs", "rm", str(second.path), "--yes"]).exit_code == 0
    assert not both.path.exists()


def test_a_damaged_run_can_be_taken_away(own: Path) -> None:
    run = made_run(own / "runs" / "a")
    run.recipe_file.write_text("[" * 100)
    assert runner.invoke(app, ["runs", "rm", "a", "--yes"]).exit_code == 0
    assert not run.path.exists()


def test_what_is_no_run_is_not_taken_away(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = own / "mine"
    mine.mkdir()
    (mine / "recipe.yaml").write_text("train: {epochs: 1}")  # a folder with a recipe of one's own is no run
    run = made_run(own / "runs" / "a")
    (own / "link").symlink_to(run.path)
    for name in ("mine", "nothing", "link", "."):
        says = "is a link" if name == "link" else "is not a run folder"
        result = runner.invoke(app, ["runs", "rm", name, "--yes"])
        assert result.exit_code == 6, result.output
        assert says in " ".join(result.stderr.split())
    assert (mine / "recipe.yaml").is_file()
    assert run.tokens.is_file()
    monkeypatch.chdir(run.path)
    with pytest.raises(RunError, match="is the current folder"):
        Run.remove(run.path)


def test_a_run_in_use_is_not_taken_away(own: Path) -> None:
    run = made_run(own / "runs" / "a")
    run.lock()
    other = [sys.executable, "-m", "edgeft", "runs", "rm", str(run.path), "--yes"]
    result = subprocess.run(other, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert result.returncode == 6, result.stderr
    assert "in use" in result.stderr
    assert run.tokens.is_file()


def test_nobody_is_asked_where_nobody_is(own: Path) -> None:
    run = made_run(own / "runs" / "a")
    for args in (["runs", "rm", "a"], ["runs", "rm"], ["runs", "a", "b"]):
        assert runner.invoke(app, args).exit_code == 2
    assert run.tokens.is_file()
    gone = runner.invoke(app, ["runs", "rm", "other"])  # that there is none is said before anybody is asked
    assert gone.exit_code == 6
    assert "not a run folder" in " ".join(gone.stderr.split())


def test_a_long_name_is_listed_whole(own: Path) -> None:
    name = "a-name-that-is-longer-than-its-column-in-a-narrow-terminal"
    made_run(own / "runs" / name)
    shown = runner.invoke(app, ["runs"], env={"COLUMNS": "60"}).stdout
    parts = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    assert "".join(parts) == name


# ---------------------------------------------------------------- --no-keep-data


@pytest.mark.slow
def test_a_run_that_keeps_no_data_offline(tmp_path: Path, edgeft: Edgeft, monkeypatch: pytest.MonkeyPatch) -> None:
    """One real run for both: all stages with every socket forbidden, and nothing of the rows left at the end."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK)
    log = tmp_path / "sockets.txt"
    monkeypatch.setenv("EDGEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hook), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    monkeypatch.setenv("SOCKETS_LOG", str(log))
    for name in (*offline.OFFLINE, *offline.QUIET):
        monkeypatch.delenv(name, raising=False)
    probe = subprocess.run([sys.executable, "-c", "import socket; socket.socket()"], capture_output=True, text=True)
    assert probe.returncode == 1
    assert "forbidden" in probe.stderr  # the hook works
    log.unlink()
    data, folder = small_rows(tmp_path / "rows"), tmp_path / "run"
    blocks = ["--set", "update.blocks=27-29", *QUICK[2:]]
    done = edgeft("finetune", "--data", data, "--out", folder, *blocks, "--no-keep-data", "--json")
    assert done.returncode == 0, done.stderr
    assert not log.exists(), log.read_text()
    assert json.loads(done.stdout)["eval"]["rows"] == 4
    assert not (folder / "tokens.npz").exists()
    assert not (folder / "trunk").exists()
    assert not list((tmp_path / "cache" / "trunk").glob("*/states.bin"))
    # what needs the rows says so in one line, or takes others
    scored = edgeft("eval", folder)
    assert scored.returncode == 6
    assert "holds no rows" in scored.stderr
    assert "--data" in scored.stderr
    scored = edgeft(
        "eval", folder / "model.gguf", "--data", data / "heldout.jsonl", "--limit", 2, "--json", "--offline"
    )
    assert scored.returncode == 0, scored.stderr
    again = edgeft("export", folder, "-o", tmp_path / "again.gguf")
    assert again.returncode == 6
    assert "has no rows to verify" in again.stderr
    assert "--until prepare" in again.stderr
    assert edgeft("report", folder).returncode == 0
    assert edgeft("finetune", "--resume", "--until", "prepare", "--out", folder).returncode == 0
    assert edgeft("export", folder, "-o", tmp_path / "again.gguf").returncode == 0
    assert not log.exists(), log.read_text()


# ---------------------------------------------------------------- offline


# Every process that Python starts from here, stages and renderers included, records and refuses the network.
HOOK = """
import os, sys
WATCHED = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.bind")
def hook(event, args):
    if event in WATCHED or (event == "socket.__new__" and args[1] != 1):  # 1: AF_UNIX
        with open(os.environ["SOCKETS_LOG"], "a") as file:
            file.write(f"{sys.argv} {event} {args[1:]}\\n")
        raise RuntimeError("sockets are forbidden")
sys.addaudithook(hook)
"""


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["data", "nobody/nothing-at-all", "--offline"], 4),
        (["finetune", "--model", "nobody/nothing-at-all", "--offline"], 5),
        (["finetune", "--data", "nobody/nothing-at-all", "--offline"], 4),
    ],
)
def test_offline_a_hub_id_is_refused_at_once(
    args: list[str], code: int, tmp_path: Path, edgeft: Edgeft, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)]))
    monkeypatch.setenv("SOCKETS_LOG", str(tmp_path / "sockets.txt"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    result = edgeft(*args, cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert "nobody/nothing-at-all is neither a file nor in the hub's cache" in result.stderr
    assert "without --offline" in result.stderr
    assert not (tmp_path / "sockets.txt").exists(), (tmp_path / "sockets.txt").read_text()


def test_offline_is_chosen_by_what_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*offline.OFFLINE, *offline.QUIET):
        monkeypatch.setenv(name, "")  # put back afterwards
    offline.disable_network_if(False, "owner/name", None)
    assert not offline.on()
    offline.disable_network_if(False, str(tmp_path), None)
    assert offline.on()
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    offline.disable_network_if(True, "owner/name")
    assert offline.on()
    assert os.environ["HF_DATASETS_OFFLINE"] == "1"
