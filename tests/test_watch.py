"""Memory that runs short: smaller passes with the same gradients, then a checkpoint and exit code 3; real limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from edgeft import config
from edgeft.errors import DoesNotFitError
from edgeft.host.device import memory
from edgeft.pipeline import stages
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train import checkpoint, loop
from edgeft.train.watch import CHECK_S, Watch, is_out_of_memory
from tests.conftest import Edgeft
from tests.support.rows import small_rows
from tests.support.runs import Lines, start
from tests.support.runs import last_checkpoint as last

MIB = 2**20


class Machine:
    """A file tree of a machine with so much memory, and a process in one of its control groups."""

    def __init__(self, root: Path, version: int = 0, total: int = 8192) -> None:
        self.root, self.version, self.total = root, version, total
        (root / "proc/self").mkdir(parents=True)
        if version == 2:
            (root / "proc/self/cgroup").write_text("0::/app\n")
            (root / "proc/self/mountinfo").write_text("30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
            self.group = root / "sys/fs/cgroup/app"
        elif version == 1:
            (root / "proc/self/cgroup").write_text("4:memory:/app\n")
            (root / "proc/self/mountinfo").write_text(
                "30 20 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            )
            self.group = root / "sys/fs/cgroup/memory/app"
        if version:
            self.group.mkdir(parents=True)
        self.set(available=total)

    def set(self, available: int, limit: int = 0, used: int = 0, cached: int = 0) -> None:
        """MiB."""
        (self.root / "proc/meminfo").write_text(
            f"MemTotal: {self.total << 10} kB\nMemAvailable: {available << 10} kB\nSwapFree: 99999999 kB\n"
        )
        if self.version == 2:
            (self.group / "memory.max").write_text(str(limit * MIB) if limit else "max")
            (self.group / "memory.current").write_text(str(used * MIB))
            (self.group / "memory.stat").write_text(
                f"anon 5\ninactive_file {7 * MIB}\nactive_file {(cached - 7) * MIB}\n"
            )
        elif self.version == 1:
            (self.group / "memory.limit_in_bytes").write_text(str(limit * MIB) if limit else "9223372036854771712")
            (self.group / "memory.usage_in_bytes").write_text(str(used * MIB))
            stat = f"total_inactive_file {7 * MIB}\ntotal_active_file {(cached - 7) * MIB}\n"
            (self.group / "memory.stat").write_text(stat)


class Watched:
    """A watch over a run that uses so many MiB."""

    def __init__(self, folder: Path, machine: Machine, plan: dict[str, Any] | None = None, longest: int = 100) -> None:
        self.run = Run.start(folder, config.apply_sets(config.Recipe(), ["how.micro_batch_tokens=512"]), False)
        if plan is not None:
            self.run.write_json(folder / "plan.json", plan)
        self.used, self.now, self.given_back = 400, 0.0, []  # type: ignore[var-annotated]
        self.said = Lines()
        self.watch = Watch(self.run, self.said, longest, lambda: self.used * MIB, self.given_back.append)
        self.watch.root, self.watch.clock = machine.root, lambda: self.now

    def check_memory(self) -> bool:
        self.now += 2 * CHECK_S
        return self.watch.check_memory()

    @property
    def tokens(self) -> int:
        return self.watch.tokens


@pytest.mark.parametrize("version", [0, 1, 2])
def test_passes_get_smaller_and_then_it_stops(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path / "root", version)
    one = Watched(tmp_path / "run", machine)
    assert not one.check_memory()

    def press() -> None:
        if version:
            machine.set(
                available=4000, limit=600, used=900, cached=310
            )  # 10 of 600 MiB are left: the page cache is evictable
        else:
            machine.set(available=100)

    if version:
        machine.set(available=4000, limit=600, used=590, cached=200)
        assert not one.check_memory()  # the group is nearly full, and a third of it pages of files
    press()
    assert not one.watch.check_memory()  # it looked just now
    assert one.check_memory()
    assert one.tokens == 256
    assert one.given_back == [256]
    assert one.check_memory()
    assert one.tokens == 128
    assert one.check_memory()
    assert (one.tokens, one.given_back[-1]) == (64, 100)  # 64 and below is no use: the longest row has 100
    with pytest.raises(DoesNotFitError, match="of memory are left") as caught:
        one.check_memory()
    assert caught.value.exit_code == 3
    assert "--resume" in caught.value.hint
    machine.set(available=6000, limit=4000, used=100, cached=50)
    assert not one.check_memory()
    assert [e["micro_batch_tokens"] for e in one.run.events() if "micro_batch_tokens" in e] == [256, 128, 64]
    assert len([line for line in one.said.lines if "micro-batches of" in line]) == 3


def test_what_the_plan_will_still_take_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "root")
    stages = {"train": {"bytes": 1500 * MIB}, "trunk": {"bytes": 500 * MIB}}
    plan = {"stages": stages, "smaller": {"256": 900 * MIB, "128": 600 * MIB}, "budget_bytes": 4096 * MIB}
    one = Watched(tmp_path / "run", machine, plan)
    assert one.watch.planned_bytes == 1500 * MIB
    machine.set(available=1200)  # 400 are used and 1500 planned: 1100 more
    assert not one.check_memory()
    machine.set(available=1000)
    one.now += 1
    assert not one.watch.check_memory("trunk")  # that one needs 100 more only
    assert one.check_memory()
    assert (one.tokens, one.watch.planned_bytes) == (256, 900 * MIB)
    assert not one.check_memory()


def test_a_plan_that_was_wrong_is_told_and_smaller_passes_are_tried(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "root")
    one = Watched(tmp_path / "run", machine, {"budget_bytes": 500 * MIB}, longest=200)
    assert not one.check_memory()
    one.used = 600
    assert one.check_memory()
    assert one.tokens == 256
    assert one.check_memory()
    assert one.tokens == 128
    assert not one.check_memory()  # a row is 200: it cannot be smaller, and the machine has room
    assert not one.check_memory()
    assert len([e for e in one.run.events() if e.get("why") == "over budget"]) == 1


def test_swap_is_no_memory_and_pages_of_files_are(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "root", 2)
    machine.set(available=5000, limit=1000, used=950, cached=500)
    found = memory(machine.root)
    assert found.ram_bytes == 1000 * MIB
    assert found.available_bytes == 550 * MIB


# ---------------------------------------------------------------- inside training


def shortage(monkeypatch: pytest.MonkeyPatch, looks: list[str]) -> None:
    """What the watch finds, look by look: `smaller`, `stop` or nothing."""

    def look(self: Watch, stage: str = "train") -> bool:
        what = looks.pop(0) if looks and stage == "train" else ""
        if what == "stop":
            raise self.out_of_memory("only 3 MiB of memory are left on this machine")
        return what == "smaller" and self.shrink("memory is short")

    monkeypatch.setattr(Watch, "check_memory", look)


def test_smaller_passes_add_up_to_the_same(three_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = ("train.steps=1", "train.batch_rows=8", "how.micro_batch_tokens=512", "train.clip=0", "train.lr=1e-4")
    whole = start(tmp_path / "whole", three_blocks, *sets)
    stages.train(whole, Progress())
    cut = start(tmp_path / "cut", three_blocks, *sets)
    shortage(monkeypatch, ["smaller"])
    stages.train(cut, Progress())
    (step,) = (e for e in cut.events() if e["event"] == "step")
    (before,) = (e for e in whole.events() if e["event"] == "step")
    assert step["loss"] == pytest.approx(before["loss"], rel=1e-5)
    assert step["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-4)
    assert [e["micro_batch_tokens"] for e in cut.events() if e["event"] == "memory"] == [256]
    ours, theirs = last(cut), last(whole)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs if not name.startswith("adamw"))


def test_it_saves_and_stops_with_3_and_can_be_resumed(
    three_blocks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = start(tmp_path / "whole", three_blocks, "train.steps=3")
    stages.train(whole, Progress())
    run = start(tmp_path / "run", three_blocks, "train.steps=3")
    with monkeypatch.context() as patch:
        shortage(patch, ["", "", "stop"])
        with pytest.raises(DoesNotFitError, match="everything so far is saved"):
            stages.train(run, Progress())
    assert checkpoint.all_of(run.checkpoints)
    assert run.read_json(run.done) is None
    assert run._lock is not None
    run._lock.close()
    again = Run.start(run.path, Run.open(run.path).recipe, True)
    stages.train(again, Progress())
    ours, theirs = last(again), last(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)  # the step that was broken off is taken anew


def test_refused_memory_makes_passes_smaller(
    three_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, refused = loop.Trainer.loss, [1]

    def loss(self: loop.Trainer, nodes: Any, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and refused:
            refused.pop()
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: …")
        return plain(self, nodes, batch)

    monkeypatch.setattr(loop.Trainer, "loss", loss)
    run = start(tmp_path / "run", three_blocks, "train.steps=2", "how.micro_batch_tokens=512")
    stages.train(run, Progress())
    assert [e["micro_batch_tokens"] for e in run.events() if e["event"] == "memory"] == [256]
    assert (run.read_json(run.done) or {})["steps"] == 2
    refused += [1, 1, 1, 1]
    short = start(tmp_path / "short", three_blocks, "train.steps=2", "how.micro_batch_tokens=128")
    with pytest.raises(DoesNotFitError, match="out of memory"):
        stages.train(short, Progress())


def test_what_is_a_refusal() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)


# ---------------------------------------------------------------- held to it by the system

SMALL = [
    *("--set", "update.blocks=[28]", "--set", "update.tensors=v,o", "--set", "train.steps=2"),
    *("--set", "train.batch_rows=2", "--set", "how.micro_batch_tokens=64", "--set", "how.threads=1"),
]


@pytest.mark.slow
def test_enforced(edgeft: Edgeft, tmp_path: Path) -> None:
    rows = small_rows(tmp_path / "rows", 4, 2)
    options = ["--enforce", "--data", rows, "--until", "train", "--json", *SMALL]
    result = edgeft("finetune", "--out", tmp_path / "run", "--memory", "900MiB", *options)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["limit"]["bytes"] == 900 * MIB
    assert found["limit"]["by"] in ("cgroup v1", "cgroup v2", "RLIMIT_DATA")
    assert max(found["peaks"].values()) < 900 * MIB
