"""What the machine says about itself while it works: temperatures, throttling, battery and mains.

Everything is read below one root: `/`, another machine's tree in tests, or where the environment's EDGEFT_SYSFS points
(a folder that holds `sys/class/thermal/…`). What is absent or cannot be read is None or empty, never an error.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeft.errors import ConfigError
from edgeft.host.device import ROOT, read_int, read_text

# Sensors of the processor by what thermal zones and hwmon chips are called; others (disk, battery, radio) have their
# own limits, and training does not heat them much.
PROCESSOR = re.compile(r"cpu|x86_pkg|soc|coretemp|k10temp|zenpower|tctl|tdie|^tj[-_]", re.IGNORECASE)

# Bits of the Raspberry Pi's firmware: now in 0 to 3, "has happened since the start" in 16 to 19.
FIRMWARE = ("under-voltage", "frequency capped by the firmware", "throttled by the firmware", "soft temperature limit")
STICKY = 16
VCGENCMD = ("usr/bin/vcgencmd", "opt/vc/bin/vcgencmd")
ASK_S = 2.0  # longest wait for vcgencmd; it answers in milliseconds


def root() -> Path:
    return Path(os.environ.get("EDGEFT_SYSFS") or ROOT)


# ---------------------------------------------------------------- temperatures


@dataclass(frozen=True)
class Thermometer:
    name: str
    path: Path  # holds 1/1000 °C
    critical: Path | None = None

    def celsius(self) -> float | None:
        """Absurd values are what sleeping or absent sensors give (a Jetson's say -256 °C)."""
        value = read_int(self.path)
        return value / 1000 if value is not None and -40_000 < value < 150_000 else None


def thermometers(root: Path) -> list[Thermometer]:
    """Thermal zones, then hwmon; a sensor that both interfaces show is listed once, if it gives a value now."""
    found: dict[str, Thermometer] = {}

    def add(made: Thermometer) -> None:
        if made.celsius() is not None:
            found.setdefault(made.name.lower().replace("-", "_"), made)

    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        trips = {read_text(p): p.with_name(p.name.replace("_type", "_temp")) for p in zone.glob("trip_point_*_type")}
        add(Thermometer(read_text(zone / "type") or zone.name, zone / "temp", trips.get("critical")))
    for chip in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        for path in sorted(chip.glob("temp*_input")):
            part = path.name.removesuffix("_input")
            words = [read_text(chip / "name") or chip.name, read_text(chip / f"{part}_label")]
            add(Thermometer(" ".join(filter(None, words)), path, chip / f"{part}_crit"))
    return list(found.values())


def temperatures(root: Path = ROOT) -> list[dict[str, Any]]:
    """[{"sensor", "celsius", "critical"}], for people."""
    found = []
    for one in thermometers(root):
        critical = read_int(one.critical) if one.critical else None
        limit = critical / 1000 if critical is not None and 0 < critical < 150_000 else None
        found.append({"sensor": one.name, "celsius": one.celsius(), "critical": limit})
    return found


# ---------------------------------------------------------------- throttling


def vcgencmd(root: Path, *words: str) -> str:
    """What the Raspberry Pi's firmware answers, "" where there is none."""
    for place in VCGENCMD:
        program = root / place
        if program.is_file():
            try:
                done = subprocess.run([program, *words], capture_output=True, text=True, timeout=ASK_S)
            except (OSError, subprocess.SubprocessError):
                return ""
            return done.stdout.strip() if done.returncode == 0 else ""
    return ""


class Throttling:
    """What slows this machine down now, or did since it was last asked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        cpus = root / "sys/devices/system/cpu"
        counters = {  # events since the start; Intel's, then a Jetson's
            "heat": sorted(cpus.glob("cpu*/thermal_throttle/*_throttle_count")),
            "over-current": sorted((root / "sys/class/hwmon").glob("hwmon*/oc*_event_cnt")),
        }
        self.counters = [(why, path) for why, paths in counters.items() for path in paths]
        # The kernel lowers the processor's frequency in steps; 0 is none. A fan is a cooling device, too, and no loss.
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
        found = []
        for why, path in self.counters:
            count = read_int(path) or 0
            if count > self.before[path]:
                found.append(why)
            self.before[path] = count
        if any((read_int(path) or 0) > 0 for path in self.cooling):
            found.append("heat")
        bits = self._bits()
        now = bits | (bits >> STICKY & ~self.happened)
        self.happened |= bits >> STICKY
        found += [why for place, why in enumerate(FIRMWARE) if now >> place & 1]
        return list(dict.fromkeys(found))


# ---------------------------------------------------------------- battery and mains


def power(root: Path = ROOT) -> dict[str, Any]:
    """{"plugged": bool | None, "batteries": [{"name", "percent", "status", "energy_wh"}]}; None = cannot be told."""
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
    if not folder.is_dir() and root == ROOT:  # macOS
        import psutil

        if (seen := psutil.sensors_battery()) is not None:
            plugged = seen.power_plugged
            batteries = [{"name": "battery", "percent": round(seen.percent), "status": None, "energy_wh": None}]
    return {"plugged": plugged, "batteries": batteries}


# ---------------------------------------------------------------- for the governor


class Sensors:
    """The few values that decide whether a run may go on. Paths are looked for once: a reading takes microseconds."""

    def __init__(self, root: Path, wanted: list[str] | None = None) -> None:
        """wanted: names of the thermometers that count; none: the processor's, or all if none is called so."""
        self.root = root
        there = {one.name: one for one in thermometers(root)}
        if unknown := [name for name in wanted or [] if name not in there]:
            raise ConfigError(f"this machine has no sensor `{unknown[0]}`", f"it has: {', '.join(there) or 'none'}")
        chosen = wanted or [name for name in there if PROCESSOR.search(name)] or list(there)
        self.thermometers = [there[name] for name in chosen]
        self.throttling = Throttling(root)

    def celsius(self) -> float | None:
        """The hottest thermometer that counts; without any, what the Pi's firmware says."""
        values = [value for one in self.thermometers if (value := one.celsius()) is not None]
        if values:
            return max(values)
        told = re.search(r"temp=([\d.]+)", vcgencmd(self.root, "measure_temp"))
        return float(told[1]) if told else None

    def battery(self) -> tuple[float | None, bool]:
        """(charge in percent, is it being drained). Several batteries: their mean."""
        found = power(self.root)
        levels = [one["percent"] for one in found["batteries"] if one["percent"] is not None]
        states = [one["status"] for one in found["batteries"]]
        # A charger may be too weak: what the battery says counts before what the plug says.
        drained = "Discharging" in states or (bool(levels) and "Charging" not in states and found["plugged"] is False)
        return (sum(levels) / len(levels) if levels else None), drained
