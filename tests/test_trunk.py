"""The trunk's cache: one file for all runs that want it, whatever happens on the way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeft import config
from edgeft.data.forest import Forest
from edgeft.data.rows import Row
from edgeft.data.tokens import Encoded
from edgeft.engine.load import load
from edgeft.engine.stack import Stack, batch_of
from edgeft.errors import ModelError, RunError
from edgeft.formats import source
from edgeft.host import cache
from edgeft.host.files import LockFile
from edgeft.pipeline import prepare as preparing
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train import codecs, trunk
from tests.conftest import Edgeft
from tests.support.rows import small_rows

CUT = 3


def forest(rows: int = 12, seed: int = 0) -> Forest:
    random = np.random.default_rng(seed)
    start = random.integers(10, 1000, 6)
    made = [np.concatenate([start, random.integers(10, 1000, 4 + i % 5)]).astype(np.int32) for i in range(rows)]
    return Forest([Encoded(ids, np.arange(len(ids)) > 5, Row([], [])) for ids in made])


FOREST = forest()


@pytest.fixture(scope="module")
def stack(model: Path) -> Stack:
    return load(model)


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trunk"


class Lines(Progress):
    """Remembers what was said and how much was computed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[float] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def advance(self, amount: float, note: str = "") -> None:
        self.steps.append(amount)

    @property
    def computed(self) -> int:
        return len(self.steps[1:])


def prepare(
    folder: Path, stack: Stack, *sets: str, f: Forest = FOREST, id: str = "weights", stop: Any = None, **more: Any
) -> tuple[trunk.Trunk | None, Lines]:
    recipe = config.apply_sets(config.Recipe(), ["how.micro_batch_tokens=16", *sets])
    folder.mkdir(parents=True, exist_ok=True)
    said = Lines()
    job = trunk.Job(stack, f, CUT, recipe, id, **more)
    found = trunk.prepare(Run(folder, recipe), job, said, stop or (lambda: False))
    return found, said


def hidden(found: trunk.Trunk | None, f: Forest = FOREST) -> torch.Tensor:
    assert found is not None
    nodes, batch = batch_of(f, list(range(len(f.paths))))
    return found.hidden(nodes, batch)


def files(shared: Path) -> list[Path]:
    return sorted(shared.glob("*/states.bin"))


def test_a_second_run_takes_what_the_first_made(tmp_path: Path, stack: Stack, shared: Path) -> None:
    first, made = prepare(tmp_path / "a", stack)
    assert made.computed
    second, said = prepare(tmp_path / "b", stack, "train.lr=1e-5", "train.epochs=9")
    assert not said.computed
    assert "earlier run" in said.lines[0]
    assert torch.equal(hidden(first), hidden(second))
    _, batch = batch_of(FOREST, list(range(12)))
    assert torch.allclose(hidden(first), stack.trunk(batch, CUT), rtol=1e-2, atol=1e-2)
    assert first is not None
    assert second is not None
    assert first.cached_value("base_loss", "3 rows", lambda: 1.5) == 1.5
    assert second.cached_value("base_loss", "3 rows", lambda: 2.5) == 1.5  # what the first computed
    assert second.cached_value("base_loss", "4 rows", lambda: 2.5) == 2.5
    assert len(files(shared)) == 1
    assert not (tmp_path / "a" / "trunk").exists()
    for path in (shared, files(shared)[0].parent):
        assert path.stat().st_mode & 0o777 == 0o700
    first.close()  # type: ignore[union-attr]
    second.close()  # type: ignore[union-attr]
    third, said = prepare(tmp_path / "c", stack)
    assert not said.computed
    assert "earlier run" in said.lines[0]
    assert torch.equal(hidden(third), hidden(prepare(tmp_path / "c", stack)[0]))


@pytest.mark.parametrize(
    "other",
    [
        {"id": "other weights"},
        {"f": forest(seed=1)},
        {"sets": ["how.trunk_dtype=fp32"]},
        {"sets": ["model.frozen=dense"]},
        {"engine": "faster"},
        {"f": Forest([Encoded(FOREST.tokens[p], np.ones(len(p), bool), Row([], [])) for p in FOREST.paths], False)},
    ],
    ids=["weights", "tokens", "dtype", "packing", "engine", "parents"],
)
def test_anything_it_depends_on_makes_another(
    other: dict[str, Any], tmp_path: Path, stack: Stack, shared: Path
) -> None:
    prepare(tmp_path / "a", stack)
    _, said = prepare(tmp_path / "b", stack, *other.pop("sets", []), **other)
    assert said.computed
    assert len(files(shared)) == 2


def test_in_the_run_folder_nothing_is_shared(tmp_path: Path, stack: Stack, shared: Path) -> None:
    for name in ("a", "b"):
        found, said = prepare(tmp_path / name, stack, "how.trunk_place=run")
        assert said.computed
        assert (tmp_path / name / "trunk" / "states.bin").is_file()
        assert found is not None
        found.close()
    assert not files(shared)
    assert not prepare(tmp_path / "a", stack, "how.trunk_place=run")[1].computed
    assert prepare(tmp_path / "b", stack, "how.trunk_place=run", id="other")[1].computed  # made anew in its place


def test_where_the_shared_cache_cannot_be_it_lies_in_the_run_folder(
    tmp_path: Path, stack: Stack, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, said = prepare(tmp_path / "a", stack, "how.trunk_cache_bytes=1000")
    assert "exceed the shared cache's limit" in said.lines[0]
    monkeypatch.setenv("EDGEFT_CACHE", "/proc/nowhere")
    _, said = prepare(tmp_path / "b", stack)
    assert "cannot be used" in said.lines[0]
    for name in ("a", "b"):
        assert (tmp_path / name / "trunk" / "states.bin").is_file()


@pytest.mark.parametrize("order", ["rows", "blocks"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32", "int8"])
def test_both_orders_give_the_same_bits(
    order: str, dtype: str, tmp_path: Path, stack: Stack, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does one that is stopped at every place on its way."""
    monkeypatch.setattr(trunk, "ROWS_PER_SYNC", 5)
    monkeypatch.setattr(trunk, "SYNC_S", 0.0)
    plain = hidden(prepare(tmp_path / "plain", stack, f"how.trunk_dtype={dtype}", "how.trunk_place=run")[0])
    sets = [f"how.trunk_dtype={dtype}", f"how.trunk_order={order}"]
    found, times = None, 0
    while found is None:
        times += 1
        asked = [False] * 4  # when it takes the cache, then for up to three micro-batches
        found, _ = prepare(tmp_path / "a", stack, *sets, stop=lambda left=asked: left.pop() if left else True)
        assert times < 30
    assert times > 1
    assert torch.equal(hidden(found), plain)
    assert {p.name for p in files(shared)[0].parent.iterdir()} == {"lock", "note.json", "states.bin"}


@pytest.mark.parametrize("damage", ["short", "flipped", "note gone", "note torn", "states gone"])
def test_what_is_damaged_is_made_anew(damage: str, tmp_path: Path, stack: Stack, shared: Path) -> None:
    first, _ = prepare(tmp_path / "a", stack)
    wanted = hidden(first)
    assert first is not None
    first.close()
    (file,) = files(shared)
    data = bytearray(file.read_bytes())
    if damage == "short":
        file.write_bytes(data[:-100])
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "states gone":
        file.unlink()
    elif damage == "note gone":
        file.with_name("note.json").unlink()
    else:
        file.with_name("note.json").write_text('{"key": "')
    found, said = prepare(tmp_path / "b", stack)
    assert said.computed
    assert torch.equal(hidden(found), wanted)


def test_the_least_recently_used_goes_and_one_in_use_stays(tmp_path: Path, stack: Stack, shared: Path) -> None:
    size = len(FOREST) * stack.width * 2
    limit = f"how.trunk_cache_bytes={int(2.5 * size)}"
    kept, _ = prepare(tmp_path / "a", stack, limit, id="in use, the oldest")
    for name in ("b", "c"):
        time.sleep(0.02)
        found, _ = prepare(tmp_path / name, stack, limit, id=name)
        assert found is not None
        found.close()
    assert len(files(shared)) == 2  # b has gone
    assert prepare(tmp_path / "d", stack, limit, id="in use, the oldest")[1].computed == 0
    assert prepare(tmp_path / "e", stack, limit, id="c")[1].computed == 0
    assert prepare(tmp_path / "f", stack, limit, id="b")[1].computed
    assert hidden(kept).isfinite().all()


def test_two_at_once_make_it_once(tmp_path: Path, stack: Stack, shared: Path) -> None:
    """flock is between open files: two threads stand for two processes."""
    entry = cache.Entry(shared / trunk.Job(stack, FOREST, CUT, config.Recipe(), "weights").key()[:32])
    assert entry.acquire(lambda: False, lambda: False, lambda: None) == "make"
    found: list[tuple[trunk.Trunk | None, Lines]] = []
    waiting = threading.Thread(target=lambda: found.append(prepare(tmp_path / "b", stack)))
    waiting.start()
    time.sleep(0.6)
    assert not found
    entry.close()
    waiting.join(60)
    assert found[0][1].computed
    assert "another process" in found[0][1].lines[0]
    stopped, _ = prepare(tmp_path / "c", stack, id="other", stop=lambda: True)
    assert stopped is None


def test_a_lock_of_a_folder_that_was_taken_away_is_not_taken_for_the_new_one(shared: Path) -> None:
    first, second = cache.Entry(shared / "x"), cache.Entry(shared / "x")
    assert first._try()
    second._lock = LockFile(second.lock_file)
    first.delete()
    assert not second._try()
    assert second._try()  # the second time with a folder of its own


def test_int8_keeps_small_channels_beside_huge_ones() -> None:
    random = np.random.default_rng(0)
    sizes = np.ones(64, np.float32)
    sizes[[3, 40]] = 2000.0
    states = torch.from_numpy((random.standard_normal((50, 64)) * sizes).astype(np.float32))
    states[0] *= 200  # one token far larger than all others
    codec = codecs.Int8(64)
    back = codec.decode(codec.encode(states))
    small = sizes == 1.0
    error = (back - states)[:, small].norm(dim=1) / states[:, small].norm(dim=1)
    assert error.max() < 0.02
    assert ((back - states).norm(dim=1) / states.norm(dim=1)).max() < 0.04
    again = codecs.Int8(64)
    again.read_tail(codec.tail())
    assert torch.equal(again.decode(codec.encode(states)), back)
    with pytest.raises(ModelError, match="32 channels"):
        codecs.Int8(40)


def test_fp16_refuses_what_it_cannot_hold() -> None:
    for bad in (1e5, float("nan")):
        with pytest.raises(ModelError, match="too large for the fp16"):
            codecs.Half(2).encode(torch.tensor([[1.0, bad]]))


def test_a_full_disk_is_said(tmp_path: Path, stack: Stack, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match="no space left") as caught:
        prepare(tmp_path / "a", stack)
    assert "edgeft cache" in caught.value.hint
    assert not files(shared)
    monkeypatch.undo()


def test_weights_are_named_by_all_of_their_bytes(tmp_path: Path) -> None:
    data = bytearray(1 << 20)
    (tmp_path / "a.gguf").write_bytes(data)
    (tmp_path / "copy.gguf").write_bytes(data)
    data[777_777] = 1
    (tmp_path / "b.gguf").write_bytes(data)
    names = [source.model_id(str(tmp_path / f"{n}.gguf")) for n in ("a", "copy", "b", "a")]
    assert names[0] == names[1] == names[3] != names[2]
    (tmp_path / "a.gguf").write_bytes(data)
    assert source.model_id(str(tmp_path / "a.gguf")) == names[2]


def test_mapped_weights_leave_memory(model: Path) -> None:
    def mapped() -> int:
        with open("/proc/self/smaps", encoding="utf-8") as file:
            inside, total = False, 0
            for line in file:
                if "-" in line.split()[0] and ":" not in line.split()[0]:
                    inside = line.rstrip().endswith(model.name)
                elif inside and line.startswith("Rss:"):
                    total += int(line.split()[1]) * 1024
        return total

    if not Path("/proc/self/smaps").exists():
        pytest.skip("needs /proc")
    own = load(model)
    _, batch = batch_of(FOREST, list(range(12)))
    before = own.trunk(batch, 8)
    full = mapped()
    trunk.release_blocks(own, 0, 8)
    assert mapped() < full - 8 * 1_500_000  # of 2.2 MB a block
    assert torch.equal(own.trunk(batch, 8), before)


def test_the_command_shows_and_clears(
    tmp_path: Path, stack: Stack, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from edgeft.cli import app

    runner = CliRunner()
    assert "is empty" in runner.invoke(app, ["cache"]).stdout
    used, _ = prepare(tmp_path / "a", stack)
    free, _ = prepare(tmp_path / "b", stack, id="other")
    assert used is not None
    assert free is not None
    free.close()
    found = json.loads(runner.invoke(app, ["cache", "--json"]).stdout)
    assert [row["state"] for row in found["entries"]] == ["whole", "in use"]
    assert found["entries"][0]["tokens"] == len(FOREST)
    assert "in use" in runner.invoke(app, ["cache"]).stdout
    cleared = runner.invoke(app, ["cache", "--clear"]).stdout
    assert "1 in use and kept" in cleared
    assert len(files(shared)) == 1
    used.close()
    assert json.loads(runner.invoke(app, ["cache", "--clear", "--json"]).stdout)["entries"] == []
    assert not files(shared)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["rows", "blocks"])
def test_killed_in_the_trunk_it_goes_on_where_it_was(order: str, tmp_path: Path, edgeft: Edgeft, shared: Path) -> None:
    data = small_rows(tmp_path / "rows", train=100, heldout=4)
    sets = ["update.blocks=28-29", "train.steps=1", "how.micro_batch_tokens=64", f"how.trunk_order={order}"]
    options = ["--data", str(data), "--until", "train", *(part for s in sets for part in ("--set", s))]
    code = (
        "import edgeft.train.trunk as t; t.ROWS_PER_SYNC = 16; t.SYNC_S = 0.05; "
        "from edgeft.pipeline import stages; from edgeft.run.folder import Run; "
        "from edgeft.run.progress import Progress; "
        "import sys; stages.do_stage(Run.open(sys.argv[1]), 'train', Progress())"
    )
    run = tmp_path / "run"
    assert edgeft("finetune", "--out", run, *options, "--until", "prepare").returncode == 0
    process = subprocess.Popen([sys.executable, "-c", code, str(run)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    reached = 0
    while reached < 3 and time.monotonic() < deadline:
        for note in shared.glob("*/note.json"):
            with contextlib.suppress(ValueError):
                reached = int(json.loads(note.read_text() or "{}").get("reached", 0))
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run([sys.executable, "-c", code, str(run)], check=True, stderr=subprocess.DEVNULL)
    (file,) = files(shared)
    broken = file.read_bytes()
    assert json.loads(file.with_name("note.json").read_text())["crc32"]
    cache.clear(shared)
    whole = Run(tmp_path / "whole", Run.open(run).recipe)
    whole.path.mkdir()
    for name in ("recipe.yaml", "tokens.npz"):
        (whole.path / name).write_bytes((run / name).read_bytes())
    subprocess.run([sys.executable, "-c", code, str(whole.path)], check=True, stderr=subprocess.DEVNULL)
    assert files(shared)[0].read_bytes() == broken
    assert (whole.path / "best.safetensors").read_bytes() == (run / "best.safetensors").read_bytes()


def test_training_needs_no_texts(tmp_path: Path) -> None:
    from edgeft.data import tokens

    data = small_rows(tmp_path / "rows")
    recipe = config.load_recipe("sparse-bp")
    recipe = config.apply_sets(recipe, [f"data.path={data}"])
    run = Run.start(tmp_path / "run", recipe, False)
    preparing.prepare(run, Progress())
    for full, bare in zip(tokens.load(run.tokens), tokens.load(run.tokens, texts=False), strict=True):
        assert len(full) == len(bare)
        for a, b in zip(full, bare, strict=True):
            assert a.ids.tolist() == b.ids.tolist()
            assert a.trained.tolist() == b.trained.tolist()
            assert not b.row.messages
