"""Several nodes train one model: real processes that talk over the loopback interface, as torchrun would start them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from edgeft.errors import ConfigError
from edgeft.host import cluster
from edgeft.run.folder import Run
from edgeft.train import checkpoint
from tests.support.rows import small_rows
from tests.support.runs import wait_for_step

SETS = (
    *("train.batch_rows=3", "train.epochs=2", "train.lr=1e-3", "train.validations=2", "how.checkpoint_s=0"),
    *("how.compile=off", "how.trunk_place=run", "update.blocks=[1,2,3]"),
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(model: Path, data: Path, out: Path, rank: int, count: int, port: int, *more: str) -> subprocess.Popen[bytes]:
    """One node's command; its output goes to a file beside the run."""
    environment = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sets = [part for item in SETS for part in ("--set", item)]
    command = ["finetune", "--recipe", "sparse-rule", "--model", model, "--data", data, "--out", out, "--threads", "1"]
    with out.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "edgeft", *map(str, command), "--until", "train", *sets, *more],
            env={**os.environ, **{name: str(value) for name, value in environment.items()}},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def together(model: Path, data: list[Path], folder: Path, *more: str) -> list[Run]:
    """A node for each of `data`; both runs, complete."""
    port, outs = free_port(), [folder / f"node{rank}" for rank in range(len(data))]
    nodes = [start(model, rows, outs[rank], rank, len(data), port, *more) for rank, rows in enumerate(data)]
    for node, out in zip(nodes, outs, strict=True):
        assert node.wait(timeout=300) == 0, out.with_suffix(".log").read_text()
    return [Run.open(out) for out in outs]


def best(run: Run) -> dict[str, torch.Tensor]:
    return checkpoint.read(run.best)[0]


def losses(run: Run) -> list[float]:
    return [event["loss"] for event in run.events() if event["event"] == "step"]


@pytest.fixture(scope="module")
def pair(tiny: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    return together(tiny, [data, data], tmp_path_factory.mktemp("pair"))


@pytest.mark.slow
def test_two_nodes_learn_what_one_learns(pair: list[Run], tiny: Path, data: Path, tmp_path: Path) -> None:
    (alone,) = together(tiny, [data], tmp_path)
    assert losses(pair[0]) == pytest.approx(losses(alone), rel=1e-5)
    assert losses(pair[0]) == losses(pair[1])
    for name, want in best(alone).items():
        assert torch.equal(best(pair[0])[name], best(pair[1])[name]), name
        off = (best(pair[0])[name].float() - want.float()).norm()
        assert off <= 1e-3 * want.float().norm(), name  # Adam makes much of the rounding of a gradient near 0
    done = [run.read_json(run.done) or {} for run in (*pair, alone)]
    assert done[0]["best_loss"] == done[1]["best_loss"] == pytest.approx(done[2]["best_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_lost_node_is_reported_and_all_go_on_from_the_newest_step(
    pair: list[Run], tiny: Path, data: Path, tmp_path: Path
) -> None:
    outs, port = [tmp_path / "node0", tmp_path / "node1"], free_port()
    first, second = (start(tiny, data, out, rank, 2, port) for rank, out in enumerate(outs))
    wait_for_step(outs[1], 2, second)
    second.kill()  # its stage ends with it
    assert first.wait(timeout=120) == 1
    (error,) = [line for line in outs[0].with_suffix(".log").read_text().splitlines() if line.startswith("error:")]
    assert "127.0.0.1 was lost" in error
    second.wait()
    for path in checkpoint.all_of(Run.open(outs[1]).checkpoints):  # a node that lost its files, or stopped earlier
        path.unlink()
    Run.open(outs[1]).best.unlink(missing_ok=True)
    runs = together(tiny, [data, data], tmp_path, "--resume")
    for run in runs:
        for name, want in best(pair[0]).items():
            assert torch.equal(best(run)[name], want), name


@pytest.mark.slow
def test_one_node_is_stopped_and_all_stop_and_go_on(pair: list[Run], tiny: Path, data: Path, tmp_path: Path) -> None:
    outs, port = [tmp_path / "node0", tmp_path / "node1"], free_port()
    nodes = [start(tiny, data, out, rank, 2, port) for rank, out in enumerate(outs)]
    wait_for_step(outs[1], 2, nodes[1])
    nodes[1].send_signal(signal.SIGTERM)
    assert [node.wait(timeout=120) for node in nodes] == [130, 130]
    steps = [len(losses(Run.open(out))) for out in outs]
    assert steps[0] == steps[1] < len(losses(pair[0]))
    for run in together(tiny, [data, data], tmp_path, "--resume"):
        for name, want in best(pair[0]).items():
            assert torch.equal(best(run)[name], want), name


@pytest.mark.slow
def test_nodes_with_other_rows_are_refused(tiny: Path, data: Path, tmp_path: Path) -> None:
    other, port = small_rows(tmp_path / "rows", train=11), free_port()
    nodes = [start(tiny, rows, tmp_path / f"n{rank}", rank, 2, port) for rank, rows in enumerate((data, other))]
    assert [node.wait(timeout=120) for node in nodes] == [2, 2]
    for rank in range(2):
        assert "node 1 has another rows than node 0" in (tmp_path / f"n{rank}.log").read_text()


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("", "does not name several"),
        ("127.0.0.1", "does not name several"),
        ("10.255.0.1,10.255.0.1", "does not name several"),
        ("198.51.100.1,198.51.100.2", "none of them is this machine"),
        ("127.0.0.1,198.51.100.2", "cannot reach"),
        ("127.0.0.1:99999999,198.51.100.2", "does not name several"),
        ("no-such-host.invalid,127.0.0.1", "no address"),
    ],
)
def test_nodes_that_cannot_be(nodes: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ConfigError, match=message):
        cluster.use_nodes(nodes)


def test_the_place_among_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert cluster.place() == cluster.Place()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert cluster.place() == cluster.Place(3, 4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cluster.place().suffix == "-node3"  # nodes of one machine have run folders of their own
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(ConfigError, match="RANK=4"):
        cluster.place()
