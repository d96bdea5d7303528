"""Sensors of the machine: temperatures, throttling, battery and mains.

Everything is read below one root: `/`, another machine's tree in tests, or the folder in EDGEFT_SYSFS, which holds
`sys/class/thermal/…`. A value that is absent or unreadable is None or empty, never an error.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeft.errors import ConfigError
from edgeft.host.device import ROOT, command_output, read_int, read_text

# Names of thermal zones and hwmon chips that belong to the processor; others (disk, battery, radio) have their own
# limits, and training does not heat them much.
PROCESSOR = re.compile(r"cpu|x86_pkg|soc|coretemp|k10temp|zenpower|tctl|tdie|^tj[-_]", re.IGNORECASE)

# Bits of the Raspberry Pi's firmware: now in 0 to 3, "has happened since the start" in 16 to 19.
FIRMWARE = ("under-voltage", "frequency capped by the firmware", "throttled by the firmware", "soft temperature limit")
STICKY = 16
VCGENCMD = ("usr/bin/vcgencmd", "opt/vc/bin/vcgencmd")
ASK_S = 2.0  # longest wait for vcgencmd; it answers in milliseconds


def root() -> Path:
    return Path(os.environ.get("EDGEFT_SYSFS") or ROOT)


@dataclass(frozen=True)
class Thermometer:
    name: str
    path: Path  # holds 1/1000 °C
    critical: Path | None = None

    def celsius(self) -> float | None:
        """None for values that sleeping or absent sensors give (a Jetson's -256 °C)."""
        value = read_int(self.path)
        return value / 1000 if value is not None and -40_000 < value < 150_000 else None


def thermometers(root: Path) -> list[Thermometer]:
    """Thermal zones, then hwmon: those that give a value now; a sensor in both is listed once."""
    by_name: dict[str, Thermometer] = {}

    def add(sensor: Thermometer) -> None:
        if sensor.celsius() is not None:
            by_name.setdefault(sensor.name.lower().replace("-", "_"), sensor)

    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        trips = {read_text(p): p.with_name(p.name.replace("_type", "_temp")) for p in zone.glob("trip_point_*_type")}
        add(Thermometer(read_text(zone / "type") or zone.name, zone / "temp", trips.get("critical")))
    for chip in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        for path in sorted(chip.glob("temp*_input")):
            part = path.name.removesuffix("_input")
            words = [read_text(chip / "name") or chip.name, read_text(chip / f"{part}_label")]
            add(Thermometer(" ".join(filter(None, words)), path, chip / f"{part}_crit"))
    return list(by_name.values())


def temperatures(root: Path = ROOT) -> list[dict[str, Any]]:
    """[{"sensor", "celsius", "critical"}]"""
    rows = []
    for sensor in thermometers(root):
        critical = read_int(sensor.critical) if sensor.critical else None
        limit = critical / 1000 if critical is not None and 0 < critical < 150_000 else None
        rows.append({"sensor": sensor.name, "celsius": sensor.celsius(), "critical": limit})
    return rows


def vcgencmd(root: Path, *words: str) -> str:
    """The answer of the Raspberry Pi's firmware, "" on other machines."""
    for place in VCGENCMD:
        program = root / place
        if program.is_file():
            return command_output([str(program), *words], ASK_S)
    return ""


class Throttling:
    """Why this machine is throttled now, or was since the last call."""

    def __init__(self, root: Path) -> None:
        self.root = root
        cpus = root / "sys/devices/system/cpu"
        counters = {  # events since the start; Intel's, then a Jetson's
            "heat": sorted(cpus.glob("cpu*/thermal_throttle/*_throttle_count")),
            "over-current": sorted((root / "sys/class/hwmon").glob("hwmon*/oc*_event_cnt")),
        }
        self.counters = [(why, path) for why, paths in counters.items() for path in paths]
        # Steps by which the kernel lowers the processor's frequency; 0 is none. Fans are left out.
        self.cooling = [
            device / "cur_state"
            for device in sorted((root / "sys/class/thermal").glob("cooling_device*"))
            if re.match(r"(thermal-)?cpufreq|processor", read_text(device / "type"), re.IGNORECASE)
        ]
        self.firmware = next(iter(sorted((root / "sys/devices/platform").glob("soc*/*firmware*/get_throttled"))), None)
        self.before = {path: read_int(path) or 0 for _, path in self.counters}
        self.happened = self._bits() >> STICKY

    def _bits(self) -> int:
        """The firmware's bits: `0x50005` from its file, `throttled=0x50005` from the tool."""
        text = read_text(self.firmware) if self.firmware else vcgencmd(self.root, "get_throttled")
        try:
            return int(text.rpartition("=")[2] or "0", 16)
        except ValueError:
            return 0

    def seen(self) -> list[str]:
        reasons = []
        for why, path in self.counters:
            count = read_int(path) or 0
            if count > self.before[path]:
                reasons.append(why)
            self.before[path] = count
        if any((read_int(path) or 0) > 0 for path in self.cooling):
            reasons.append("heat")
        bits = self._bits()
        now = bits | (bits >> STICKY & ~self.happened)
        self.happened |= bits >> STICKY
        reasons += [why for bit, why in enumerate(FIRMWARE) if now >> bit & 1]
        return list(dict.fromkeys(reasons))


def power(root: Path = ROOT) -> dict[str, Any]:
    """{"plugged": bool | None, "batteries": [{"name", "percent", "status", "energy_wh"}]}; None = unknown."""
    plugged: bool | None = None
    batteries: list[dict[str, Any]] = []
    folder = root / "sys/class/power_supply"
    for supply in sorted(folder.glob("*")) if folder.is_dir() else ():
        if read_text(supply / "scope") == "Device":  # a mouse's battery
            continue
        kind = read_text(supply / "type")
        if kind == "Battery":
            energy = read_int(supply / "energy_now")  # µWh
            if energy is None:
                charge, volt = read_int(supply / "charge_now"), read_int(supply / "voltage_now")  # µAh, µV
                energy = None if charge is None or volt is None else charge * volt // 10**6
            batteries.append(
                {
                    "name": supply.name,
                    "percent": read_int(supply / "capacity"),
                    "status": read_text(supply / "status") or None,
                    "energy_wh": None if energy is None else round(energy / 1e6, 1),
                }
            )
        elif kind in ("Mains", "USB") and (online := read_int(supply / "online")) is not None:
            plugged = bool(plugged) or online > 0
    if sys.platform != "linux" and root == ROOT:
        import psutil

        if (battery := psutil.sensors_battery()) is not None:
            plugged = battery.power_plugged
            batteries = [{"name": "battery", "percent": round(battery.percent), "status": None, "energy_wh": None}]
    return {"plugged": plugged, "batteries": batteries}


class Sensors:
    """The values that decide whether a run pauses. Paths are searched for once: a reading takes microseconds."""

    def __init__(self, root: Path, wanted: list[str] | None = None) -> None:
        """wanted: names of the thermometers that count; none: the processor's, or all if none has such a name."""
        self.root = root
        every = {sensor.name: sensor for sensor in thermometers(root)}
        if unknown := [name for name in wanted or [] if name not in every]:
            raise ConfigError(f"this machine has no sensor `{unknown[0]}`", f"it has: {', '.join(every) or 'none'}")
        names = wanted or [name for name in every if PROCESSOR.search(name)] or list(every)
        self.thermometers = [every[name] for name in names]
        self.throttling = Throttling(root)

    def celsius(self) -> float | None:
        """The hottest thermometer that counts; without any, the Pi's firmware."""
        values = [value for sensor in self.thermometers if (value := sensor.celsius()) is not None]
        if values:
            return max(values)
        answer = re.search(r"temp=([\d.]+)", vcgencmd(self.root, "measure_temp"))
        return float(answer[1]) if answer else None

    def battery(self) -> tuple[float | None, bool]:
        """(charge in percent, is it discharging). Several batteries: their mean."""
        supply = power(self.root)
        levels = [battery["percent"] for battery in supply["batteries"] if battery["percent"] is not None]
        states = [battery["status"] for battery in supply["batteries"]]
        # A charger may be too weak: the battery's state counts before the plug's.
        drained = "Discharging" in states or (bool(levels) and "Charging" not in states and supply["plugged"] is False)
        return (sum(levels) / len(levels) if levels else None), drained
