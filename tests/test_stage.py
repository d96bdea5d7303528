"""Stages in processes of their own: small, alone in their run folder, and gone with their parent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgeft import config
from edgeft.errors import DoesNotFitError, EdgeftError, KilledError, RunError
from edgeft.host import device, limit
from edgeft.pipeline import finetune
from edgeft.run import supervise
from edgeft.run.folder import Run
from edgeft.run.record import Allowance
from tests.conftest import Edgeft
from tests.support.rows import small_rows

QUICK = ["update.blocks=27-28", "update.tensors=v,o", "train.batch_rows=2", "how.threads=1", "train.steps=20000"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.start(tmp_path / "run", config.Recipe(), False)


def fake(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """A stage that does something else; `given` is what the parent hands over."""
    monkeypatch.setattr(
        supervise, "BOOT", "import json, os, signal, sys, time; given = json.loads(sys.argv[1])\n" + code
    )


ANSWER = (
    "times = {'begin': 1.0, 'end': 2.0, 'worked_s': 1.0, 'paused_s': 0.0, 'peak_bytes': 5, 'event': 'stage'}\n"
    "with open(os.path.join(given['run'], 'metrics.jsonl'), 'a') as log:\n"
    "    log.write(json.dumps({'stage': given['stage'], **times}) + '\\n')\n"
    "os.write(given['answer'], json.dumps({'peak': 5}).encode())"
)


def test_stages_are_done_once_and_their_peaks_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = "{'prepare': ['tokens.npz'], 'train': ['done.json'], 'export': ['model.gguf', 'export.json'], 'eval': []}"
    fake(
        monkeypatch,
        f"for name in {made}[given['stage']]: open(os.path.join(given['run'], name), 'w').write('{{\"loss\": 1}}')\n"
        f"open(os.path.join(given['run'], 'order'), 'a').write(given['stage'] + ' ')\n" + ANSWER,
    )
    found = finetune.finetune(run, "export")
    assert found == {
        "run": str(run.path),
        "loss": 1,
        "peaks": {"prepare": 5, "train": 5, "export": 5},
        "export": {"loss": 1},
    }
    assert finetune.finetune(run, "export") == found
    assert (run.path / "order").read_text() == "prepare train export "
    assert finetune.finetune(run, "eval")["eval"] is None
    assert (run.path / "order").read_text() == "prepare train export eval "


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 137), (signal.SIGSEGV, 139)])
def test_a_killed_stage_is_told(run: Run, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int) -> None:
    fake(monkeypatch, f"os.kill(os.getpid(), {int(number)})")
    with pytest.raises(KilledError, match=f"prepare stage was killed by {number.name}") as caught:
        finetune.finetune(run, "eval")
    assert caught.value.exit_code == code
    assert ("out of memory?" in caught.value.message) == (number == signal.SIGKILL)


@pytest.mark.skipif(not limit.can_make_group(), reason="no control group can be made here")
def test_a_stage_that_takes_more_than_its_limit_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = []

    def noted(bytes_: int) -> contextlib.AbstractContextManager[limit.Limit]:
        found = limit.hard_limit(bytes_)
        groups.append(found)
        return found

    monkeypatch.setattr(finetune, "hard_limit", noted)
    fake(monkeypatch, "taken = bytearray(b'1') * (400 << 20)")
    with pytest.raises(DoesNotFitError, match="the prepare stage used more than 128 MiB and was killed") as caught:
        finetune.finetune(run, "eval", Allowance(budget_bytes=128 << 20), enforce=True)
    assert caught.value.exit_code == 3
    assert len(groups) == 1
    assert not [path for _, group in device.control_groups(device.ROOT, "memory") for path in group.glob("edgeft-*")]


def test_without_groups_a_stage_is_refused_what_goes_beyond_its_limit(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "hard_limit", lambda size: limit.hard_limit(size, root=tmp_path))
    fake(
        monkeypatch,
        "from edgeft.pipeline import stages, worker\nstages.do_stage = lambda *_: bytearray(1 << 30)\nworker.main()",
    )
    with pytest.raises(DoesNotFitError, match="out of memory in the prepare stage") as caught:
        finetune.finetune(run, "eval", Allowance(budget_bytes=600 << 20), enforce=True)
    assert caught.value.exit_code == 3


def test_an_error_comes_with_its_hint_and_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, 'os.write(given[\'answer\'], b\'{"error": ["no", "try"], "peak": 1}\'); sys.exit(4)')
    with pytest.raises(EdgeftError) as caught:
        finetune.finetune(run, "eval")
    assert (caught.value.message, caught.value.hint, caught.value.exit_code) == ("no", "try", 4)
    assert not run.path.exists()  # nothing was made


def test_a_bug_ends_with_its_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "sys.exit(1)")
    with pytest.raises(SystemExit) as caught:
        finetune.finetune(run, "eval")
    assert caught.value.code == 1


def test_the_lock_is_held_by_parent_and_stage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(
        monkeypatch,
        "import fcntl\n"
        "assert os.fstat(given['lock']).st_ino == os.stat(os.path.join(given['run'], 'lock')).st_ino\n"
        "other = open(os.path.join(given['run'], 'lock'))\n"
        "try: fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except OSError: " + ANSWER,
    )
    assert supervise.StageRunner(run).do("prepare") == 5
    with pytest.raises(RunError, match="in use"):
        Run.start(run.path, run.recipe, True)


def test_the_users_own_files_are_not_imported(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("json", "rich", "random", "edgeft"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    recipe = config.apply_sets(run.recipe, [f"data.path={tmp_path / 'none.jsonl'}"])
    run.recipe_file.write_text(config.dump(recipe))
    with pytest.raises(EdgeftError, match=r"none\.jsonl") as caught:
        supervise.StageRunner(run).do("prepare")
    assert caught.value.exit_code == 4


def test_the_parent_stays_small(tmp_path: Path) -> None:
    code = (
        "import sys; from edgeft.run.supervise import StageRunner; StageRunner.do = lambda self, name: 0; "
        "from typer.testing import CliRunner; from edgeft.cli import app; "
        f"result = CliRunner().invoke(app, ['finetune', '--until', 'prepare', '--out', {str(tmp_path / 'run')!r}]); "
        "heavy = ('torch', 'transformers', 'numpy', 'gguf', 'llama_cpp', 'datasets', 'tokenizers', 'peft'); "
        "print(result.exit_code, [m for m in heavy if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "0 []", result.stdout + result.stderr


# ---------------------------------------------------------------- for real


def begin(folder: Path, data: Path, *more: str) -> subprocess.Popen[str]:
    sets = [part for s in QUICK for part in ("--set", s)]
    command = [sys.executable, "-m", "edgeft", "finetune", "--data", str(data), "--out", str(folder), *sets, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(folder: Path, event: str, process: subprocess.Popen[str]) -> psutil.Process:
    """The stage's process, once metrics.jsonl has such an event."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, IndexError):
            if f'"event": "{event}"' in (folder / "metrics.jsonl").read_text():
                return psutil.Process(process.pid).children()[0]
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("it did not get there")


def gone(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        process.wait(20)
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.parametrize("way", ["parent", "both", "group"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_however_it_is_asked_it_saves_once_and_stops(number: signal.Signals, way: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = begin(folder, small_rows(tmp_path / "rows"))
    child = wait_for(folder, "step", process)
    if way == "group":
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    if way == "both":
        child.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert stderr.count("error: stopped at step") == 1
    assert "Traceback" not in stdout + stderr
    assert gone(child)
    steps = [e["step"] for e in Run.open(folder).events() if e["event"] == "step"]
    saved = sorted((folder / "checkpoints").glob("*.safetensors"))
    assert [int(p.stem.partition("-")[2]) for p in saved][-1] == steps[-1]
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.slow
def test_no_stage_outlives_its_parent_and_the_run_can_be_resumed(tmp_path: Path, edgeft: Edgeft) -> None:
    folder, data = tmp_path / "run", small_rows(tmp_path / "rows")
    process = begin(folder, data)
    child = wait_for(folder, "step", process)
    busy = edgeft("finetune", "--resume", "--out", folder)
    assert busy.returncode == 6
    assert "in use by another process" in busy.stderr
    process.kill()
    process.communicate()
    assert gone(child)
    again = begin(folder, data, "--resume")
    child = wait_for(folder, "step", again)
    child.kill()
    _, stderr = again.communicate(timeout=60)
    assert again.returncode == 137
    assert "error: the train stage was killed by SIGKILL (out of memory?)" in stderr
    assert "--resume" in stderr


@pytest.mark.slow
def test_training_imports_no_more_than_it_needs(tmp_path: Path, edgeft: Edgeft) -> None:
    folder = tmp_path / "run"
    more = ["train.steps=1", "how.compile=on", "how.recompute=true"]
    sets = [part for s in [*QUICK[:-1], *more] for part in ("--set", s)]
    data = small_rows(tmp_path / "rows")
    assert edgeft("finetune", "--data", data, "--out", folder, *sets, "--until", "prepare").returncode == 0
    code = (
        "import sys; from edgeft.pipeline import stages; from edgeft.run.folder import Run; "
        "from edgeft.run.progress import Progress; "
        f"stages.do_stage(Run.open({str(folder)!r}), 'train', Progress()); "
        "more = ('datasets', 'llama_cpp', 'peft', 'pandas', 'pyarrow', 'bitsandbytes', 'torch._dynamo', 'sympy'); "
        "print([m for m in more if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.slow
def test_the_result_has_every_stages_peak(tmp_path: Path, edgeft: Edgeft) -> None:
    sets = [part for s in [*QUICK[:-1], "train.steps=2"] for part in ("--set", s)]
    result = edgeft("finetune", "--data", small_rows(tmp_path / "rows"), "--out", tmp_path / "run", *sets, "--json")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert list(found["peaks"]) == list(finetune.STAGES)
    assert found["peaks"]["prepare"] < found["peaks"]["train"]
    assert found["peaks"]["train"] == pytest.approx(found["peak_bytes"], rel=0.1)
    assert "steps" in found


def test_every_stage_writes_when_it_ran_and_what_it_took(run: Run) -> None:
    def train_until_stopped() -> None:
        with run.stage("train"):
            with run.stage("trunk"):
                time.sleep(0.02)
            run.paused_s += 0.01
            time.sleep(0.03)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_until_stopped()
    run.metrics.write_text(run.metrics.read_text() + '{"event": "stage", "stage": "train", "begin": "noon"}\n[]\n')
    trunk, train = run.stages()
    assert (trunk.stage, trunk.complete, trunk.paused_s) == ("trunk", True, 0.0)
    assert (train.stage, train.complete, train.paused_s) == ("train", False, 0.01)
    assert train.begin <= trunk.begin <= trunk.end <= train.end
    assert 0.02 <= trunk.worked_s < train.end - train.begin - train.worked_s  # and not counted in both
    assert run.peaks() == {"trunk": trunk.peak_bytes, "train": train.peak_bytes}
    assert trunk.peak_bytes > 10 << 20
