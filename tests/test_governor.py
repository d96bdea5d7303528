"""Sensors on file trees of other machines, the governor on a simulated processor, and in real runs."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgeft import config
from edgeft.config import Device, Recipe, apply_sets, load_recipe, windows
from edgeft.config.resolve import use_profile
from edgeft.errors import ConfigError
from edgeft.host import sensors
from edgeft.host.device import load_device
from edgeft.host.sensors import Sensors
from edgeft.pipeline import stages
from edgeft.report.summary import load_run_summary
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train import checkpoint, governor
from edgeft.train.governor import Governor
from edgeft.ui.screen import Screen
from tests.conftest import Edgeft
from tests.support.machine import tree
from tests.support.runs import Lines, command, start, wait_for_step

ZONE = "sys/class/thermal/thermal_zone0"
SUPPLY = "sys/class/power_supply"


def resolve(recipe: str, device: str, sets: list[str]) -> tuple[Recipe, Device]:
    """As the command line does: recipe file, then the device's `how` and `governor`, then `--set`."""
    profile = load_device(device)
    return config.apply_sets(use_profile(config.load_recipe(recipe), profile), sets), profile


def machine(root: Path, celsius: float = 50.0, **more: str | int) -> Path:
    return tree(root, {f"{ZONE}/type": "cpu-thermal\n", f"{ZONE}/temp": round(1000 * celsius), **more})


def heat(root: Path, celsius: float) -> None:
    """As the kernel does it: a reader never sees half of it."""
    (root / "new").write_text(f"{round(1000 * celsius)}\n")
    (root / "new").replace(root / ZONE / "temp")


# ---------------------------------------------------------------- sensors


def test_the_hottest_of_the_processors_sensors_counts(tmp_path: Path) -> None:
    hwmon = "sys/class/hwmon/hwmon"
    root = machine(
        tmp_path,
        61.0,
        **{
            "sys/class/thermal/thermal_zone1/type": "soc0-thermal\n",
            "sys/class/thermal/thermal_zone1/temp": 63500,
            "sys/class/thermal/thermal_zone2/type": "battery\n",
            "sys/class/thermal/thermal_zone2/temp": 70000,
            f"{hwmon}0/name": "nvme\n",
            f"{hwmon}0/temp1_input": 80000,
            f"{hwmon}0/temp1_label": "Composite\n",
        },
    )
    assert Sensors(root).celsius() == 63.5
    assert Sensors(root, ["nvme Composite", "battery"]).celsius() == 80.0
    with pytest.raises(ConfigError, match="no sensor `nvme`") as caught:
        Sensors(root, ["nvme"])
    assert "nvme Composite" in caught.value.hint
    only = tree(tmp_path / "only", {f"{hwmon}0/name": "acpitz\n", f"{hwmon}0/temp1_input": 44000})
    assert Sensors(only).celsius() == 44.0  # none is called a processor's
    assert Sensors(tmp_path / "nothing").celsius() is None


def test_throttling_by_the_kernel(tmp_path: Path) -> None:
    cpu, cooling = "sys/devices/system/cpu/cpu0/thermal_throttle", "sys/class/thermal/cooling_device"
    root = tree(
        tmp_path,
        {
            f"{cpu}/core_throttle_count": 7,
            f"{cooling}0/type": "pwm-fan\n",
            f"{cooling}0/cur_state": 3,
            f"{cooling}1/type": "cpufreq-cpu0\n",
            f"{cooling}1/cur_state": 0,
            "sys/class/hwmon/hwmon3/oc3_event_cnt": 1,
        },
    )
    seen = sensors.Throttling(root).seen
    assert seen() == []  # counts from before are not ours, and a fan that turns is no loss
    tree(root, {f"{cpu}/core_throttle_count": 8})
    assert seen() == ["heat"]
    assert seen() == []
    tree(root, {f"{cooling}1/cur_state": 2, "sys/class/hwmon/hwmon3/oc3_event_cnt": 2})
    assert seen() == ["over-current", "heat"]
    assert seen() == ["heat"]


def test_throttling_by_a_pis_firmware(tmp_path: Path) -> None:
    file = "sys/devices/platform/soc/soc:firmware/get_throttled"
    seen = sensors.Throttling(tree(tmp_path, {file: "10000\n"})).seen
    assert seen() == []  # once since the start, before us
    tree(tmp_path, {file: "50005\n"})
    assert seen() == ["under-voltage", "throttled by the firmware"]
    tree(tmp_path, {file: "d0000\n"})
    assert seen() == ["soft temperature limit"]  # over again, but it happened
    tree(tmp_path, {file: "nonsense\n"})
    assert seen() == []


def test_the_pis_own_tool(tmp_path: Path) -> None:
    tool = tree(tmp_path, {"usr/bin/vcgencmd": ""}) / "usr/bin/vcgencmd"
    tool.write_text('#!/bin/sh\n[ $1 = measure_temp ] && echo "temp=48.3\'C" || cat "$(dirname "$0")/bits"\n')
    tool.chmod(0o755)
    tree(tmp_path, {"usr/bin/bits": "throttled=0x0\n"})
    found = Sensors(tmp_path)
    assert found.celsius() == 48.3
    assert found.throttling.seen() == []
    tree(tmp_path, {"usr/bin/bits": "throttled=0x20002\n"})
    assert found.throttling.seen() == ["frequency capped by the firmware"]
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert found.celsius() is None
    assert found.throttling.seen() == []


@pytest.mark.parametrize(
    ("files", "percent", "drained"),
    [
        ({}, None, False),
        ({"AC/type": "Mains\n", "AC/online": 0}, None, False),  # no battery: nothing that could run out
        ({"BAT0/type": "Battery\n", "BAT0/capacity": 55, "BAT0/status": "Discharging\n"}, 55, True),
        ({"BAT0/type": "Battery\n", "BAT0/capacity": 55, "BAT0/status": "Charging\n"}, 55, False),
        ({"BAT0/type": "Battery\n", "BAT0/capacity": 80, "BAT0/status": "Not charging\n"}, 80, False),
        # a charger that is too weak
        (
            {
                "BAT0/type": "Battery\n", "BAT0/capacity": 9, "BAT0/status": "Discharging\n",
                "U/type": "USB\n", "U/online": 1,
            },
            9,
            True,
        ),
        # status unknown: the plug tells
        ({"BAT0/type": "Battery\n", "BAT0/capacity": 40, "AC/type": "Mains\n", "AC/online": 0}, 40, True),
        ({"BAT0/type": "Battery\n", "BAT0/capacity": 40, "AC/type": "Mains\n", "AC/online": 1}, 40, False),
        # two, of which one is used first
        (
            {
                "BAT0/type": "Battery\n", "BAT0/capacity": 90, "BAT0/status": "Unknown\n",
                "BAT1/type": "Battery\n", "BAT1/capacity": 10, "BAT1/status": "Discharging\n",
            },
            50,
            True,
        ),
    ],
)  # fmt: skip
def test_battery(tmp_path: Path, files: dict[str, str | int], percent: float | None, drained: bool) -> None:
    tree(tmp_path, {f"{SUPPLY}/{name}": text for name, text in files.items()})
    assert Sensors(tmp_path).battery() == (percent, drained)


# ---------------------------------------------------------------- knobs


def test_windows() -> None:
    assert windows("") == []
    assert windows("22:00-07:00") == [(1320, 420)]
    assert windows(" 9:30 - 12:00, 22:00-24:00 ") == [(570, 720), (1320, 1440)]
    for wrong in ("22-7", "22:00", "22:00-22:00", "24:00-07:00", "10:60-11:00", "10:00-25:00", "22:00-07:00-08:00"):
        with pytest.raises(ValueError, match="not a time span"):
            windows(wrong)


@pytest.mark.parametrize(
    ("window", "inside", "outside"),
    [((1320, 420), (1320, 1439, 0, 419), (420, 720, 1319)), ((570, 720), (570, 719), (0, 569, 720, 1439))],
)
def test_over_midnight(window: tuple[int, int], inside: tuple[int, ...], outside: tuple[int, ...]) -> None:
    assert all(governor._inside(minute, *window) for minute in inside)
    assert not any(governor._inside(minute, *window) for minute in outside)


def test_governor_is_how_and_never_what(tmp_path: Path) -> None:
    plain = load_recipe("sparse-bp")
    changed = apply_sets(plain, ["governor.target_celsius=60", "governor.schedule=22:00-07:00", "how.nice=0"])
    assert (changed.governor.schedule, changed.how.nice, plain.how.nice) == ("22:00-07:00", 0, 10)
    assert config.learning_identity(changed) == config.learning_identity(plain)
    run = Run.start(tmp_path / "run", plain, False)
    assert run._lock
    run._lock.close()
    assert Run.start(tmp_path / "run", changed, True).recipe.governor == changed.governor


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["governor.target=60"], "did you mean `target_celsius`?"),
        (["governor.schedule=tonight"], "governor.schedule`: `tonight` is not a time span"),
        (["governor.battery_percent=101"], "from 0 to 100"),
        (["governor.limit_celsius=70"], "`governor.limit_celsius` is 70, `governor.target_celsius` is 75"),
        (["how.nice=-5"], "from 0 to 19"),
    ],
)
def test_wrong_knobs(sets: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_sets(load_recipe("sparse-bp"), sets)
    assert words in caught.value.message + caught.value.hint


def test_profiles_keep_below_what_their_machine_bears() -> None:
    bears = {"rpi4": 82, "rpi5": 85, "rpi5-16gb": 85, "jetson-orin-nano": 99, "laptop-8gb": 95, "laptop-16gb": 100}
    for name, throttles in bears.items():
        found, _ = resolve("sparse-bp", name, [])
        heat = found.governor
        assert heat.target_celsius < heat.limit_celsius < throttles, name
        assert heat.limit_celsius - heat.hysteresis_celsius < heat.limit_celsius, name
    assert load_device("laptop-8gb").governor["battery_percent"] == 40
    with pytest.raises(ConfigError, match="limit_celsius"):
        apply_sets(resolve("sparse-bp", "rpi5", [])[0], ["governor.target_celsius=82"])


def test_auto_knows_boards_from_pcs(tmp_path: Path) -> None:
    from edgeft.host.device import this_machine

    pi = tree(tmp_path, {"proc/meminfo": "MemTotal: 8000000 kB\n", "proc/device-tree/model": "Raspberry Pi 5\0"})
    assert this_machine(pi).governor == {}
    (pi / "proc/device-tree/model").unlink()
    assert this_machine(pi).governor["target_celsius"] == 85


# ---------------------------------------------------------------- the control loop


@dataclass
class Plant:
    """A first-order processor: it nears ambient + rise while it works and ambient while it does not, with time constant
    tau; its sensor is `lag` seconds late and says whole degrees."""

    root: Path
    rise: float
    ambient: float
    tau: float
    lag: float
    celsius: float = 0.0
    seen: float = 0.0
    now: float = 0.0
    others: float = 0.0  # what other programs add to the rise

    def __post_init__(self) -> None:
        self.celsius = self.seen = self.ambient
        machine(self.root, self.ambient)

    def work(self, seconds: float) -> None:
        self._pass(seconds, self.ambient + self.rise + self.others)

    def sleep(self, seconds: float) -> None:
        self._pass(seconds, self.ambient + self.others)

    def _pass(self, seconds: float, towards: float) -> None:
        from math import ceil, exp

        parts = min(ceil(seconds / 0.25), 100)
        for _ in range(parts):
            self.celsius = towards + (self.celsius - towards) * exp(-seconds / parts / self.tau)
            self.seen = self.celsius + (self.seen - self.celsius) * exp(-seconds / parts / max(self.lag, 1e-3))
        self.now += seconds
        (self.root / ZONE / "temp").write_text(f"{round(self.seen)}000\n")


@pytest.fixture
def governed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Governor]:
    """A governor whose time is the plant's."""

    def make(plant: Plant, *sets: str, **more: object) -> Governor:
        monkeypatch.setenv("EDGEFT_SYSFS", str(plant.root))
        run = Run.start(tmp_path / "run", apply_sets(load_recipe("sparse-bp"), list(sets)), False)
        return Governor(run, Lines(), clock=lambda: plant.now, sleep=plant.sleep, **more)  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize(
    ("rise", "ambient", "tau", "lag", "micro_batch"),
    [
        (60, 25, 60, 2, 1.0),  # a Pi 5 with a heat sink
        (75, 35, 60, 2, 1.5),  # in a closed case in summer
        (75, 35, 180, 5, 4.0),  # with larger parts of work
        (55, 22, 600, 5, 4.0),  # in a heavy metal case
        (90, 20, 30, 1, 0.3),  # a laptop without a fan
        (90, 30, 240, 8, 6.0),
        (51, 25, 90, 3, 1.0),  # nearly cool enough by itself
    ],
)
def test_it_settles_at_the_target(
    tmp_path: Path,
    governed: Callable[..., Governor],
    rise: float,
    ambient: float,
    tau: float,
    lag: float,
    micro_batch: float,
) -> None:
    plant = Plant(tmp_path / "machine", rise, ambient, tau, lag)
    control = governed(plant, "governor.target_celsius=75", "governor.limit_celsius=90")
    late: list[float] = []
    shares: list[float] = []
    highest = worked = 0.0
    while plant.now < 2700:
        plant.work(micro_batch)
        worked += micro_batch
        highest = max(highest, plant.celsius)
        if plant.now > 1800:
            late.append(plant.celsius)
            shares.append(control.pace.share)
        control.pause_if_needed()
    assert max(abs(celsius - 75) for celsius in late) <= 2
    sides = [celsius > 75 for celsius in late if abs(celsius - 75) > 1]
    assert len(list(itertools.groupby(sides))) <= 1  # it does not go from one side to the other
    assert max(shares) - min(shares) < 0.12  # one whole degree of the sensor is worth 0.05
    assert highest < 75 + 7  # on the way up, too, it stays below a Pi's limit
    assert control.paused_s["heat"] == pytest.approx(plant.now - worked, abs=0.1)
    assert sum(e["paused_s"].get("heat", 0) for e in control.run.events()) == pytest.approx(
        control.paused_s["heat"], abs=60
    )


def test_a_cool_machine_is_not_slowed(tmp_path: Path, governed: Callable[..., Governor]) -> None:
    plant = Plant(tmp_path / "machine", 40, 25, 60, 2)  # 65 °C at the most
    control = governed(plant)
    while plant.now < 900:
        plant.work(1.0)
        control.pause_if_needed()
    assert not control.paused_s
    assert control.note == " · 65 °C"


def test_above_the_limit_it_stops_until_it_is_cool(tmp_path: Path, governed: Callable[..., Governor]) -> None:
    plant = Plant(tmp_path / "machine", 60, 25, 60, 0)
    sets = ["governor.target_celsius=0", "governor.limit_celsius=80", "governor.hysteresis_celsius=15"]
    control = governed(plant, *sets)
    pauses = []
    for _ in range(500):
        plant.work(1.0)
        hot, before = plant.seen, control.paused_s["heat"]
        saved: list[float] = []
        control.pause_if_needed(lambda at=hot, to=saved: to.append(at))  # type: ignore[misc]
        if control.paused_s["heat"] > before:
            pauses.append((hot, plant.seen, control.paused_s["heat"] - before))
            assert saved == [hot]  # once, before it paused
        else:
            assert not saved
    assert len(pauses) > 2
    for hot, cool, seconds in pauses:
        assert 79.5 <= hot < 82
        assert 63 < cool <= 65.5
        assert seconds > 15
    lines = control.progress.lines  # type: ignore[attr-defined]
    assert lines[0] == "pausing: 80 °C is too hot; it resumes at 65 °C"
    assert lines[1].endswith(" s: resuming")


def test_on_battery(tmp_path: Path, governed: Callable[..., Governor]) -> None:
    plant = Plant(tmp_path / "machine", 10, 25, 60, 0)
    battery = {f"{SUPPLY}/BAT0/type": "Battery\n", f"{SUPPLY}/BAT0/status": "Discharging\n"}
    tree(plant.root, {**battery, f"{SUPPLY}/BAT0/capacity": 31})
    control = governed(plant, "governor.battery_percent=30")

    def becomes(after: float, **files: str | int) -> None:
        """Something happens while it waits."""
        ends.append((plant.now + after, {f"{SUPPLY}/BAT0/{name}": text for name, text in files.items()}))

    ends: list[tuple[float, dict[str, str | int]]] = []

    def sleep(seconds: float) -> None:
        plant.sleep(seconds)
        while ends and plant.now >= ends[0][0]:
            tree(plant.root, ends.pop(0)[1])

    control._sleep = sleep
    plant.work(20)
    control.pause_if_needed()
    assert control.paused_s["battery"] == 0
    tree(plant.root, {f"{SUPPLY}/BAT0/capacity": 29})
    plant.work(20)
    becomes(100, capacity=34)  # above the level, but not by enough
    becomes(200, capacity=36)
    control.pause_if_needed()
    assert control.paused_s["battery"] == pytest.approx(200, abs=governor.SLOW_READ_S + 2)
    tree(plant.root, {f"{SUPPLY}/BAT0/capacity": 12})
    plant.work(20)
    becomes(50, status="Charging\n")  # however low
    control.pause_if_needed()
    assert control.paused_s["battery"] == pytest.approx(250, abs=2 * governor.SLOW_READ_S + 4)
    lines = control.progress.lines  # type: ignore[attr-defined]
    assert lines[0].endswith("the battery is discharging, at 29 %; it resumes when it is charged or above 35 %")
    assert {e["pausing"] for e in control.run.events() if "pausing" in e} == {"battery"}


def test_in_its_windows_only(tmp_path: Path, governed: Callable[..., Governor]) -> None:
    plant = Plant(tmp_path / "machine", 10, 25, 60, 0)
    evening = (21 * 60 + 55) * 60.0  # 21:55
    clock = lambda: time.gmtime(evening + plant.now)  # noqa: E731
    control = governed(plant, "governor.schedule=22:00-07:00,07:20-12:00", local=clock)
    control.pause_if_needed()
    assert plant.now == pytest.approx(300, abs=2)  # until 22:00
    plant.work(9 * 3600 - 60)  # 06:59
    control.pause_if_needed()
    assert control.paused_s["schedule"] == pytest.approx(300, abs=2)
    plant.work(660)  # 07:10
    control.pause_if_needed()
    assert control.paused_s["schedule"] == pytest.approx(900, abs=4)
    assert control.totals()["paused_s"] == {"schedule": pytest.approx(900, abs=4)}


def test_a_pause_ends_when_asked_to_stop(tmp_path: Path, governed: Callable[..., Governor]) -> None:
    plant = Plant(tmp_path / "machine", 10, 25, 60, 0)
    machine(plant.root, 99)
    control = governed(plant, stop_requested=lambda: plant.now > 60)
    plant._pass = lambda seconds, towards: setattr(plant, "now", plant.now + seconds)  # type: ignore[method-assign]
    assert control.pause_if_needed()
    assert 60 < plant.now < 60 + 2 * governor.NAP_S


def test_the_time_left_leaves_pauses_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    screen = Screen(Console(highlight=False))
    screen.stage("train", 10)
    now[0] += 20
    screen.advance(2)
    screen.pause("pausing: too hot")
    now[0] += 3600
    assert screen.clock() == 1020
    screen.resume("after 3600 s: resuming")
    now[0] += 20
    screen.advance(2)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith("· 1 min 20 s left")
    assert shown[1:3] == ["pausing: too hot", "after 3600 s: resuming"]
    assert shown[3].endswith("· 1 min 0 s left")


# ---------------------------------------------------------------- real runs


class Weather(Lines):
    """Makes the machine hot after a step, and cool when it pauses."""

    def __init__(self, root: Path, hot_after: int) -> None:
        super().__init__()
        self.root, self.hot_after, self.steps = root, hot_after, 0
        self.paused_after: list[int] = []

    def stage(self, name: str, total: float) -> None:
        self.training = name == "train"

    def advance(self, amount: float, note: str = "") -> None:
        self.steps += int(amount) if self.training else 0
        if amount and self.steps == self.hot_after:
            heat(self.root, 90.0)

    def pause(self, text: str) -> None:
        super().pause(text)
        self.paused_after.append(self.steps)
        heat(self.root, 45.0)


@pytest.mark.slow
def test_a_run_with_pauses_learns_the_same_bits(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = ["train.epochs=2", "how.micro_batch_tokens=64"]  # several micro-batches a step
    calm = start(tmp_path / "calm", data, *sets)
    stages.train(calm, Progress())
    monkeypatch.setenv("EDGEFT_SYSFS", str(machine(tmp_path / "machine")))
    monkeypatch.setattr(governor, "READ_S", 0.02)
    weather = Weather(tmp_path / "machine", hot_after=5)
    warm = start(tmp_path / "warm", data, *sets)
    stages.train(warm, weather)
    assert weather.paused_after == [5]
    assert "pausing: 90 °C is too hot; it resumes at 74 °C" in weather.lines
    losses = [[e["loss"] for e in run.events() if e["event"] == "step"] for run in (calm, warm)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 12
    assert calm.best.read_bytes() == warm.best.read_bytes()
    done, before = warm.read_json(warm.done), calm.read_json(calm.done)
    assert done is not None
    assert before is not None
    assert done["paused_s"]["heat"] > 0
    assert before["paused_s"] == {}
    assert done["throttled"] == []
    assert 0 < done["governor_s"] < 1
    assert 0 < done["checkpoint_s"] < done["seconds"]
    told = [e for e in warm.events() if e["event"] == "governor"]
    assert [e["celsius"] for e in told if "pausing" in e] == [90.0]
    story = load_run_summary(warm)
    assert dict(story.stages)["paused: heat"] == pytest.approx(done["paused_s"]["heat"], abs=0.01)
    assert max(celsius for _, celsius in story.heat) == 90.0
    from edgeft.report.render import write_report

    page = write_report(warm).read_text()
    assert "<title>Temperature</title>" in page
    assert "target 75 °C" in page
    assert "<title>Temperature</title>" not in write_report(calm).read_text()


def test_a_checkpoint_is_written_before_a_long_pause(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path / "machine")
    monkeypatch.setenv("EDGEFT_SYSFS", str(root))
    monkeypatch.setattr(governor, "READ_S", 0.02)
    saved = []

    class Looks(Weather):
        def pause(self, text: str) -> None:
            found = checkpoint.newest(run.checkpoints, lambda *_: None)
            saved.append(found and found[1]["step"])
            super().pause(text)

    run = start(tmp_path / "run", data, "train.epochs=2")
    stages.train(run, Looks(root, hot_after=7))
    assert saved == [7]


def wait_for_pause(run: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while not any(e.get("pausing") for e in (Run.open(run).events() if (run / "recipe.yaml").exists() else [])):
        assert time.monotonic() < deadline, "it did not pause"
        assert process.poll() is None, "it ended before it paused"
        time.sleep(0.05)


@pytest.mark.slow
def test_stopped_in_a_pause_and_resumed(data: Path, tmp_path: Path, edgeft: Edgeft) -> None:
    """The processes are the real ones: Ctrl-C in the terminal reaches a stage that waits."""
    root, folder = machine(tmp_path / "machine"), tmp_path / "run"
    line = command(folder, data, "--until", "train", "--device", "rpi5")
    for knob in ("train.epochs=30", "train.steps=120", "how.checkpoint_s=120", "how.threads=1"):
        line += ["--set", knob]
    env = {**os.environ, "EDGEFT_SYSFS": str(root)}
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    wait_for_step(folder, 2, process)
    heat(root, 88.0)
    wait_for_pause(folder, process)
    time.sleep(1.0)
    reached = max(e["step"] for e in Run.open(folder).events() if e["event"] == "step")
    found = checkpoint.newest(folder / "checkpoints", lambda *_: None)
    assert found is not None
    assert found[1]["step"] == reached  # the first one: written because of the pause
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert time.monotonic() - asked < 10  # not after the pause, which would never end
    assert process.returncode == 130
    assert f"stopped at step {reached} of 120" in stderr.decode()
    assert "pausing: 88 °C is too hot; it resumes at 74 °C" in stdout.decode()
    again = edgeft("finetune", "--resume", "--out", folder, "--until", "train", "--json")
    assert again.returncode == 0, again.stderr
    result = json.loads(again.stdout)
    assert result["steps"] == 120
    assert result["paused_s"]["heat"] > 0.5  # of the process before this one


@pytest.mark.slow
def test_options_and_low_priority(data: Path, tmp_path: Path, edgeft: Edgeft) -> None:
    import psutil

    hour = time.localtime().tm_hour
    later = f"{(hour + 2) % 24:02}:00-{(hour + 3) % 24:02}:00"  # not within the next hour
    line = [*command(tmp_path / "run", data), "--schedule", later, "--threads", "1"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_pause(tmp_path / "run", process)
    (stage,) = psutil.Process(process.pid).children()
    assert stage.ionice().value == 7
    assert min(os.getpriority(os.PRIO_PROCESS, thread.id) for thread in stage.threads()) >= 10
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0)  # the parent only waits
    assert os.getsid(stage.pid) == os.getsid(process.pid)  # Linux weighs sessions against each other first
    assert os.getpgid(stage.pid) == stage.pid  # Ctrl-C reaches the foreground's group
    process.terminate()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert f"pausing: it runs only {later}" in stdout.decode()
    recipe = Run.open(tmp_path / "run").recipe
    assert (recipe.how.threads, recipe.governor.schedule) == (1, later)
    refused = edgeft("finetune", "--schedule", "tonight", "--out", tmp_path / "none")
    assert refused.returncode == 2
    assert "not a time span" in refused.stderr
