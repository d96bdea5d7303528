"""A federation of a few devices: rounds, resumption, and what a device refuses. Without a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeft import config
from edgeft.config import Recipe
from edgeft.errors import ConfigError, DamagedError, DataError, EdgeftError, ModelError
from edgeft.federated import blob, session, simulate
from edgeft.federated.device import Device, open_device
from edgeft.federated.privacy import Privacy
from edgeft.federated.server import Reply, ServerState, run_rounds
from edgeft.federated.simulate import LocalFleet
from edgeft.federated.state import DeviceState, device_file
from edgeft.federated.task import Terms, shared_part
from edgeft.federated.update import Layout, decode
from edgeft.federated.worker import do_step
from edgeft.formats.source import model_id
from edgeft.pipeline.finetune import finetune
from edgeft.run.folder import Run
from edgeft.train import checkpoint
from tests.conftest import Edgeft
from tests.support.runs import Lines

SETS = (
    *("update.blocks=[2]", "update.tensors=v,o", "train.batch_rows=2", "how.threads=1", "how.compile=off"),
    *("how.checkpoint_s=0", "data.max_tokens=256", "how.trunk_place=run", "export.type=f16"),
)
Make = Callable[..., "Federation"]


class Federation:
    """A server and devices in this process; what devices and server print is in `lines`."""

    def __init__(self, folder: Path, model: Path, data: Path, count: int, *sets: str, **terms: Any) -> None:
        self.folder, self.lines = folder, Lines()
        own = [f"model.path={model}", *SETS, *sets]
        recipe = config.apply_sets(config.load_recipe("sparse-bp"), [f"data.path={data}", *own])
        self.recipe = session.federated_recipe(recipe, local_epochs=1.0)
        given = {"rounds": 3, "min_clients": min(2, count), "send": "top:5%", **terms}
        rule = given.pop("rule", "mean")
        self.terms = Terms("f00", model_id(str(model)), "tiny.gguf", recipe=shared_part(self.recipe), **given)
        self.run = Run.start(folder / "server", self.recipe, resume=(folder / "server").exists())
        if not self.run.tokens.is_file():
            do_step(self.run, "prepare", self.lines)
        self.run.write_json(self.run.path / "terms.json", {**asdict(self.terms), "rule": rule})
        do_step(self.run, "begin", self.lines)
        self.terms = self.state().terms
        files = simulate.split(str(data), "random", count, folder / "rows")
        self.devices = [self.device(f"device-{number + 1}", file) for number, file in enumerate(files)]

    def device(self, name: str, rows: Path, step: Callable[[Run, str], Any] | None = None) -> Device:
        own = config.apply_sets(Recipe(), [f"data.path={rows}", f"model.path={self.recipe.model.path}", *SETS[3:]])
        run = open_device(self.folder / name, self.terms, own)
        return Device(name, run, self.terms, step or (lambda run, name: do_step(run, name, self.lines)))

    def run_rounds(self, devices: list[Any] | None = None) -> ServerState:
        state = self.state()
        run_rounds(self.run, state, LocalFleet(devices or self.devices, self.lines), self.lines)
        return state

    def state(self) -> ServerState:
        state = ServerState.load(self.run)
        assert state is not None
        return state


@pytest.fixture
def federation(tiny: Path, data: Path, tmp_path: Path) -> Make:
    return lambda count=2, *sets, **terms: Federation(tmp_path, tiny, data, count, *sets, **terms)


def vector(state: ServerState) -> np.ndarray:
    return state.layout.flatten(state.trained)


def bits(state: ServerState) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in {**state.fixed, **state.trained}.items()}


@pytest.mark.slow
def test_a_federation_ends_and_its_result_is_a_run(federation: Make) -> None:
    made = federation(2, "train.low_rank_lr=5e-3", rounds=4, send="dense")
    start = made.state()
    assert not vector(start).any()
    assert any(name.endswith(".down") and np.ptp(array) for name, array in start.fixed.items())
    state = made.run_rounds()
    assert state.round == 4
    assert [len(record["devices"]) for record in state.history] == [2, 2, 2, 2]
    assert sum(device["rows"] for device in state.history[0]["devices"]) == 12
    assert vector(state).any()
    do_step(made.run, "finish", made.lines)
    result = finetune(made.run, "eval")
    assert made.run.model.is_file()
    assert result["eval"]["rows"] == 4
    page = (made.run.path / "report.html").read_text("utf-8")
    assert "2 devices trained this model together" in page
    assert page.count('<tr><th scope="row">device-') == 2
    found = session.status(made.run.path)
    assert (found["round"], found["complete"], list(found["devices"])) == (4, True, ["device-1", "device-2"])


def test_the_mean_of_dense_updates_is_that_of_the_devices_deltas(federation: Make) -> None:
    made = federation(2, rounds=1, send="dense", min_clients=2)
    before = vector(made.state())
    replies = [device.answer(made.state().task(device.name).pack()) for device in made.devices]
    layout = made.state().layout
    deltas = [decode(reply.update, layout, made.terms.sends) for reply in replies]
    for device, delta in zip(made.devices, deltas, strict=True):
        tensors = checkpoint.read(device.run.best)[0]
        trained = layout.flatten({name: tensors[name].numpy() for name, _ in layout.shapes})
        np.testing.assert_array_equal(trained - before, delta)
    state = made.state()
    assert state.finish_round(replies) == []
    rows = np.array([reply.rows for reply in replies], float)
    wanted = before + sum(share * delta for share, delta in zip(rows / rows.sum(), deltas, strict=True))
    np.testing.assert_allclose(vector(state), wanted, rtol=1e-5, atol=1e-8)


def test_a_device_trains_the_support_alone(federation: Make) -> None:
    """What it sends is the whole change of its weights, to the rounding that it keeps."""
    made = federation(1, rounds=2, min_clients=1)
    device, state = made.devices[0], made.state()
    before = Layout.of(state.trained).flatten(state.trained)
    reply = device.answer(state.task(device.name).pack())
    tensors = checkpoint.read(device.run.best)[0]
    after = Layout.of(state.trained).flatten({name: tensors[name].numpy() for name in state.trained})
    kept = DeviceState.load(device.run)
    assert state.support is not None
    assert kept is not None
    outside = np.ones(len(after), bool)
    outside[state.support] = False
    assert after[outside].tobytes() == before[outside].tobytes()
    sent = decode(reply.update, state.layout, made.terms.sends)
    np.testing.assert_array_equal(kept.residual, (after - before)[state.support] - sent)
    assert np.linalg.norm(kept.residual) < 0.02 * np.linalg.norm(sent)


def test_the_support_holds_the_largest_gradients(federation: Make) -> None:
    """Of the server's own rows; and it is the same in all rounds."""
    made = federation(1, rounds=2, min_clients=1, send="top:1%")
    before = made.state()
    assert before.support is not None
    assert (np.diff(before.support) > 0).all()
    assert len(before.support) == -(-before.layout.total // 100)
    line = next(line for line in made.lines.lines if "numbers are trained" in line)
    assert line.startswith(f"{len(before.support):,} numbers are trained")
    state = made.run_rounds()
    np.testing.assert_array_equal(state.support, before.support)


def test_a_restarted_server_chooses_the_same_support(federation: Make) -> None:
    made = federation(1, min_clients=1)
    before = ServerState.file(made.run).read_bytes()
    ServerState.file(made.run).unlink()
    do_step(made.run, "begin", made.lines)
    assert ServerState.file(made.run).read_bytes() == before


def test_weight_decay_does_not_go_with_a_support(tmp_path: Path, tiny: Path) -> None:
    recipe = config.apply_sets(config.load_recipe("sparse-bp"), [f"model.path={tiny}", "train.weight_decay=0.1"])
    plan = session.Plan.read(1, 1, "top:1%", None, "mean")
    with pytest.raises(ConfigError, match="weight_decay") as error:
        session.start(tmp_path / "fed", recipe, plan)
    assert "--send dense" in error.value.hint
    assert not (tmp_path / "fed").exists()


def test_the_trunk_runs_once_for_all_rounds(federation: Make) -> None:
    made = federation(2)
    made.run_rounds()
    said = [line for line in made.lines.lines if line.startswith("trunk: ") and "read from the cache" in line]
    assert len(said) == 2 * 2  # two devices, in the second and the third round


def test_a_server_that_is_killed_continues_at_its_round(federation: Make) -> None:
    """It loses what it did since the last saved round, asks again, and devices send the same bytes without training."""
    made = federation(2, rounds=2)

    class Killed(Exception):
        pass

    class DiesAfter:
        def __init__(self, device: Device) -> None:
            self.name, self.device = device.name, device

        def answer(self, data: bytes) -> Reply:
            self.device.answer(data)
            raise Killed

    with pytest.raises(Killed):
        made.run_rounds([made.devices[0], DiesAfter(made.devices[1])])
    assert made.state().round == 0
    kept = [device_file(device.run).read_bytes() for device in made.devices]
    steps = [device.run.metrics.read_bytes() for device in made.devices]
    state = made.state()
    replies = [device.answer(state.task(device.name).pack()) for device in made.devices]
    assert [device_file(device.run).read_bytes() for device in made.devices] == kept
    for before, device in zip(steps, made.devices, strict=True):
        assert b'"event": "step"' not in device.run.metrics.read_bytes()[len(before) :]
    state.finish_round(replies)
    assert made.run_rounds().round == 2


def test_a_device_that_is_killed_sends_the_same_bytes(federation: Make, tmp_path: Path) -> None:
    """Killed after a step, it continues; its update is that of a device left alone."""
    made = federation(1, rounds=1, min_clients=1)
    task = made.state().task("device-1").pack()
    wanted = made.devices[0].answer(task)
    other = made.device("other", tmp_path / "rows" / "device-1.jsonl")

    class Killed(BaseException):
        pass

    from edgeft.federated.local import RoundTrainer

    def die_at_2(trainer: Any, path: Path, write: Any = RoundTrainer._write) -> None:
        write(trainer, path)
        if trainer.step == 2:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundTrainer, "_write", die_at_2)
        with pytest.raises(Killed):
            other.answer(task)
    assert DeviceState.load(other.run) is None
    again = other.answer(task)
    assert any("resumed after step 2" in line for line in made.lines.lines)
    assert (again.update, again.rows) == (wanted.update, wanted.rows)


def test_a_device_keeps_what_did_not_reach_the_model(federation: Make) -> None:
    """Its update came too late: all of it, what was sent included, is added to the next one."""
    made = federation(1, rounds=2, min_clients=1)
    device, state = made.devices[0], made.state()
    device.answer(state.task(device.name).pack())
    kept = DeviceState.load(device.run)
    assert kept is not None
    assert kept.residual.any()
    late, there = replace(state.task(device.name), round=1), replace(state.task(device.name), round=1, accepted=0)
    sent = decode(kept.update, state.layout, made.terms.sends)
    residuals = [kept.kept(task) for task in (there, late)]
    assert residuals[0] is not None
    assert residuals[1] is not None
    np.testing.assert_array_equal(residuals[0], kept.residual)
    np.testing.assert_array_equal(residuals[1], kept.residual + sent)
    assert kept.kept(replace(late, terms=replace(made.terms, federation="other"))) is None


def test_rounds_share_one_schedule(federation: Make) -> None:
    """The rate of the last step of all rounds is the lowest: rounds do not warm up again."""
    made = federation(1, rounds=3, min_clients=1)
    made.run_rounds()
    rates = [event["lr"] for event in made.devices[0].run.events() if event["event"] == "step"]
    assert len(rates) == 3 * 6
    peak = rates.index(max(rates))
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 0.3 * max(rates)


def test_rows_that_are_far_from_the_model_raise_the_rate_of_all_devices(federation: Make) -> None:
    """By the loss of the server's held-out rows: about 7, that of random weights."""
    made = federation(1, "train.lr_loss=5", "train.low_rank_lr=1e-3", rounds=1, min_clients=1, send="dense")
    train = made.terms.recipe["train"]
    (before,) = [event["heldout_loss"] for event in made.run.events() if event["event"] == "validation"]
    assert train["low_rank_lr"] == pytest.approx(1e-3 * (before / 5) ** 2)
    assert train["lr_loss"] == 0


# ---------------------------------------------------------------- faults


def noisy(reply: Reply, layout: Layout, send: Any, change: Callable[[np.ndarray], Any]) -> Reply:
    from edgeft.federated.update import encode

    numbers = decode(reply.update, layout, send)
    changed = change(numbers)
    return replace(reply, update=encode(numbers if changed is None else changed.astype(np.float32), layout, send)[0])


class Bad:
    """A device whose reply is changed on its way."""

    def __init__(self, device: Device, change: Callable[[Reply], Reply | None]) -> None:
        self.name, self.device, self.change = device.name, device, change

    def answer(self, data: bytes) -> Reply:
        reply = self.change(self.device.answer(data))
        if reply is None:
            raise EdgeftError("no answer in time")
        return reply


def test_a_round_ends_with_the_devices_that_are_usable(federation: Make) -> None:
    made = federation(4, rounds=1, send="dense", min_clients=1)
    layout, send = made.state().layout, made.terms.sends
    other = Layout((("x", (3,)),))
    from edgeft.federated.update import encode

    def nan(numbers: np.ndarray) -> None:
        numbers[3] = np.nan

    bad = [
        Bad(made.devices[0], lambda reply: noisy(reply, layout, send, nan)),
        Bad(made.devices[1], lambda reply: replace(reply, update=encode(np.ones(3, np.float32), other, send)[0])),
        Bad(made.devices[2], lambda reply: None),
    ]
    state = made.run_rounds([*bad, made.devices[3]])
    assert [device["name"] for device in state.history[0]["devices"]] == ["device-4"]
    remarks = sorted(state.history[0]["remarks"])
    assert "NaN" in remarks[0]
    assert "has 32 bytes; `dense` has" in remarks[1]
    assert "no answer in time" in remarks[2]
    assert all(line.startswith(f"device-{n + 1}: refused: ") for n, line in enumerate(remarks))
    assert np.isfinite(vector(state)).all()
    assert any(line.startswith("round 1: device-1: refused") for line in made.lines.lines)


def test_an_update_a_hundred_times_too_large_is_clipped(federation: Make) -> None:
    made = federation(3, rounds=1, send="dense")
    layout, send = made.state().layout, made.terms.sends
    huge = Bad(made.devices[1], lambda reply: noisy(reply, layout, send, lambda numbers: numbers * 100))
    state = made.run_rounds([made.devices[0], huge, made.devices[2]])
    assert "device-2: its update is" in state.history[0]["remarks"][0]
    assert state.history[0]["norm"] < 3 * state.usual


@pytest.mark.parametrize("share", ["dense", "top:5%"])
@pytest.mark.parametrize(("rule", "least"), [("mean", 0.6), ("trimmed", 0.8), ("krum", 0.8)])
def test_a_poisoned_device_among_eight_does_not_ruin_the_model(
    federation: Make, rule: str, least: float, share: str
) -> None:
    """Its sign flipped, ten times as large: the model still moves as it does with the seven others alone."""
    made = federation(8, "train.batch_rows=1", rounds=1, send=share, min_clients=7, rule=rule)
    layout, send, state = made.state().layout, made.terms.sends, made.state()
    replies = [device.answer(state.task(device.name).pack()) for device in made.devices]
    poisoned = noisy(replies[3], layout, send, lambda numbers: -10 * numbers)
    honest = made.state()
    honest.rule = "mean"
    honest.finish_round([reply for reply in replies if reply.name != poisoned.name])
    state.finish_round([poisoned if reply.name == poisoned.name else reply for reply in replies])
    one, other = vector(state), vector(honest)
    assert one @ other > least * np.linalg.norm(one) * np.linalg.norm(other)
    assert state.history[0]["remarks"]


def test_a_device_that_is_stopped_stops_the_simulation(federation: Make) -> None:
    """Ctrl-C in a round's process arrives as its exit code; any other error is that device's alone."""
    made = federation(2, rounds=1, min_clients=1)

    def fail(code: int) -> Callable[[Reply], Reply]:
        def change(reply: Reply) -> Reply:
            error = EdgeftError("stopped")
            error.exit_code = code
            raise error

        return change

    with pytest.raises(EdgeftError, match="stopped"):
        made.run_rounds([Bad(made.devices[0], fail(130)), made.devices[1]])
    state = made.run_rounds([Bad(made.devices[0], fail(4)), made.devices[1]])
    assert state.history[0]["remarks"] == ["device-1: refused: stopped"]


@pytest.mark.parametrize("rule", ["mean", "trimmed", "krum"])
def test_sparse_updates_are_aggregated_by_every_rule(federation: Make, rule: str) -> None:
    """All devices send the same numbers, so none is divided by devices that did not send it."""
    made = federation(5, "train.batch_rows=1", rounds=1, send="top:2%", min_clients=5, rule=rule)
    state = made.run_rounds()
    moved = np.flatnonzero(Layout.of(state.trained).flatten(state.trained))
    assert state.support is not None
    assert len(moved) > 0.9 * len(state.support) == 0.9 * made.terms.sends.count(state.layout.total)
    assert set(moved) <= set(state.support.tolist())


def test_too_few_devices_end_it_with_a_hint_and_nothing_is_lost(federation: Make) -> None:
    made = federation(2, rounds=2, min_clients=2)
    silent = Bad(made.devices[1], lambda reply: None)
    with pytest.raises(EdgeftError, match="fewer than 2 updates could be used, 3 times") as error:
        made.run_rounds([made.devices[0], silent])
    assert "--resume" in error.value.hint
    assert made.state().round == 0
    with pytest.raises(EdgeftError, match="1 of at least 2 devices"):
        made.run_rounds([made.devices[0]])
    assert made.run_rounds().round == 2


def test_another_base_model_is_refused_before_anything_runs(federation: Make, tiny: Path, tmp_path: Path) -> None:
    made = federation(1, min_clients=1)
    other = tmp_path / "other.gguf"
    data = bytearray(tiny.read_bytes())
    data[-9] ^= 1  # one bit of one frozen weight
    other.write_bytes(bytes(data))
    with pytest.raises(ModelError, match="not the base model"):
        open_device(tmp_path / "x", made.terms, config.apply_sets(Recipe(), [f"model.path={other}"]))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("change", ["version", "rounds", "recipe", "send", "nothing"])
def test_terms_that_are_not_understood_are_refused(federation: Make, change: str) -> None:
    made = federation(1, min_clients=1)
    values = json.loads(json.dumps(asdict(made.terms)))
    assert Terms.read(dict(values)) == made.terms
    wrong: dict[str, Any] = {
        "version": {**values, "protocol": 99, "version": "9.9"},
        "rounds": {**values, "rounds": "many"},
        "recipe": {**values, "recipe": {"how": {"threads": 99}}},
        "send": {**values, "send": "everything"},
        "nothing": None,
    }
    with pytest.raises(EdgeftError) as error:
        Terms.read(wrong[change])
    if change == "version":
        assert "9.9" in error.value.message
        assert "same version" in error.value.hint


@pytest.mark.parametrize(
    "change", ["shape", "name", "nan", "type", "bytes", "round", "no support", "few", "order", "range"]
)
def test_a_task_that_does_not_fit_the_device_is_refused(federation: Make, change: str) -> None:
    made = federation(1, min_clients=1)
    task = made.state().task("device-1")
    name = next(iter(task.trained))
    trained = dict(task.trained)
    if change == "shape":
        trained[name] = np.zeros((2, 2), np.float32)
    elif change == "name":
        trained["layers.9.mlp.up_proj.up"] = trained.pop(name)
    elif change == "nan":
        trained[name] = np.full_like(trained[name], np.nan)
    elif change == "type":
        trained[name] = trained[name].astype(np.float64)
    assert task.support is not None
    supports = {"no support": None, "few": task.support[1:], "order": task.support[::-1], "range": task.support + 10**6}
    support = supports.get(change, task.support)
    data = replace(task, trained=trained, support=support, round=99 if change == "round" else 0).pack()
    if change == "bytes":
        data = data[:-5] + b"x" + data[-4:]
    with pytest.raises(DataError):
        made.devices[0].answer(data)
    assert DeviceState.load(made.devices[0].run) is None


def test_a_damaged_state_file_is_an_error_with_a_hint(federation: Make) -> None:
    made = federation(1, min_clients=1, rounds=1)
    made.run_rounds()
    for file, load in (
        (ServerState.file(made.run), lambda: ServerState.load(made.run)),
        (device_file(made.devices[0].run), lambda: DeviceState.load(made.devices[0].run)),
    ):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
        with pytest.raises(DamagedError) as error:
            load()
        assert error.value.hint


def test_random_bytes_are_no_blob() -> None:
    random = np.random.default_rng(0)
    data = blob.pack({"a": 1}, {"x": np.arange(5.0)})
    assert blob.unpack(data)[0] == {"a": 1}
    for _ in range(300):
        changed = bytearray(data)
        changed[random.integers(len(data))] ^= 1 << int(random.integers(8))
        with pytest.raises(DataError):
            blob.unpack(bytes(changed[: random.integers(1, len(data) + 1)]))


# ---------------------------------------------------------------- noise


@pytest.mark.slow
def test_training_stops_when_the_noise_budget_is_used_up(federation: Make) -> None:
    """Noise for three rounds, seven asked for."""
    pytest.importorskip("opacus")
    noise = Privacy(8.0, 1e-5, clip=0.1).calibrated(3).noise
    privacy = {"epsilon": 8.0, "delta": 1e-5, "clip": 0.1, "noise": noise}
    made = federation(2, rounds=7, privacy=privacy, min_clients=2)
    state = made.run_rounds()
    assert state.round == 3
    spent = [record["epsilon"] for record in state.history]
    assert spent == sorted(spent)
    assert 7 < spent[-1] <= 8
    assert any("another one would exceed" in line for line in made.lines.lines)
    assert any("of 8 spent" in line for line in made.lines.lines)
    assert made.run_rounds().round == 3  # also after a restart


def test_with_noise_a_device_sends_a_clipped_update(federation: Make) -> None:
    privacy = {"epsilon": 8.0, "delta": 1e-5, "clip": 1e-3, "noise": 1e-9}
    made = federation(1, rounds=1, privacy=privacy, min_clients=1, send="dense")
    reply = made.devices[0].answer(made.state().task("device-1").pack())
    numbers = decode(reply.update, made.state().layout, made.terms.sends)
    assert np.linalg.norm(numbers) == pytest.approx(1e-3, rel=1e-3)


# ---------------------------------------------------------------- rows of the devices


def test_rows_of_one_value_are_on_one_device(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answer": "a", "article": f"a{n % 7}"} for n in range(70)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = simulate.split(str(file), "by:article", 3, tmp_path / "split")
    found = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert sorted((row for part in found for row in part), key=str) == sorted(rows, key=str)
    articles = [{row["article"] for row in part} for part in found]
    assert sum(map(len, articles)) == 7
    assert sorted(map(len, found)) == [20, 20, 30]
    assert simulate.split(str(file), "by:article", 3, tmp_path / "again")[0].read_bytes() == files[0].read_bytes()
    assert [len(f.read_text().splitlines()) for f in simulate.split(str(file), "random", 4, tmp_path / "r")] == [
        18, 18, 17, 17,
    ]  # fmt: skip
    assert len(simulate.split(str(file), "random", 2, tmp_path / "l", limit=9)) == 2


@pytest.mark.parametrize(("how", "count"), [("by:nothing", 2), ("by:", 2), ("article", 2), ("by:article", 8)])
def test_a_split_that_is_not_possible_is_an_error_with_a_hint(how: str, count: int, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": "q", "answer": "a", "article": n % 7}) + "\n" for n in range(70)))
    with pytest.raises(ConfigError) as error:
        simulate.split(str(file), how, count, tmp_path / "split")
    assert error.value.hint


@pytest.mark.parametrize("sets", [["update.blocks=auto"], ["how.weights=bf16"]])
def test_a_recipe_that_cannot_be_federated_is_refused(sets: list[str]) -> None:
    recipe = config.apply_sets(config.load_recipe("sparse-rule"), sets)
    with pytest.raises(ConfigError) as error:
        session.federated_recipe(recipe, 1.0)
    assert error.value.hint
    kept = session.federated_recipe(config.load_recipe("sparse-bp"), 2.0)
    assert (kept.train.epochs, kept.train.average) == (2.0, 0.0)


@pytest.mark.slow
def test_devices_and_server_killed_at_random_lose_nothing(tmp_path: Path) -> None:
    """A few rounds; `tests/harness/federated_crash.py --rounds 100` is the long one."""
    import federated_crash

    said = federated_crash.crash(tmp_path, rounds=5, count=2, device_kills=0.5, server_kills=2, seed=1)
    assert "bit for bit" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rule": "median"}, "--aggregate median"),
        ({"rule": "krum", "dp": "epsilon=8,delta=1e-5,noise=1"}, "does not go with `--aggregate krum`"),
        ({"send": "some"}, "--send some"),
        ({"dp": "epsilon=many"}, "--dp epsilon=many"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_runs(options: dict[str, str], said: str) -> None:
    given = {"send": "top:1%", "dp": None, "rule": "mean", **options}
    with pytest.raises(ConfigError) as error:
        session.Plan.read(3, 2, given["send"], given["dp"], given["rule"])  # type: ignore[arg-type]
    assert said in error.value.message
    assert error.value.hint


@pytest.mark.slow
def test_a_simulation_that_is_killed_continues(edgeft: Any, tiny: Path, data: Path, tmp_path: Path) -> None:
    """As a command: a split by a column, too; then its status, and what is refused."""
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text("utf-8").splitlines()]
    for number, row in enumerate(rows):
        row["article"] = f"a{number % 3}"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (tmp_path / "device.yaml").write_text("ram_bytes: 4294967296\nbudget_bytes: 4294967296\ncores: 1\n")
    place = ("--out", tmp_path / "sim", "--data", tmp_path / "rows.jsonl", "--device", tmp_path / "device.yaml")
    how = ("--clients", 2, "--split", "by:article", "--set", "how.compile=off", "--set", "how.threads=1")
    sets = [part for one in (*SETS[:3], "data.max_tokens=256") for part in ("--set", one)]
    first = edgeft("federate", "simulate", *place, *how, "--rounds", 1, "--model", tiny, *sets, "--json")
    assert first.returncode == 0, first.stderr
    assert "eval" not in json.loads(first.stdout)
    assert (tmp_path / "sim" / "model.gguf").is_file()
    again = edgeft("federate", "simulate", *place, *how, "--resume", "--json")
    assert again.returncode == 0, again.stderr
    status = edgeft("federate", "status", tmp_path / "sim")
    assert "round 1 of 1" in status.stdout
    assert "device-2" in status.stdout
    assert edgeft("federate", "status", tmp_path).returncode == 6
    refused = edgeft("federate", "simulate", *place, *how, "--rounds", 1, "--model", tiny)
    assert "already contains a run" in refused.stderr


def test_finetune_does_not_continue_a_federation(edgeft: Edgeft, tmp_path: Path) -> None:
    """It would train on the server's own rows."""
    (tmp_path / "terms.json").write_text("{}")
    done = edgeft("finetune", "--resume", "--out", tmp_path)
    assert done.returncode == 6
    assert "is of a federation that is not complete" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["terms.json"]
