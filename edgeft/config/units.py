"""Sizes and durations, parsed and formatted."""

from __future__ import annotations

import math
import re

from edgeft.config.reader import shown
from edgeft.errors import ConfigError

UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": (1000 if ending == "b" else 1024) ** power
    for power, letter in enumerate("kmgt", 1)
    for ending in ("ib", "b", "i", "")
}

TIMES = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}  # seconds


def parse_size(text: str, option: str = "--memory") -> int:
    """`1500MiB`, `1.5GiB`, `6GB`, `2G` (binary, as in ulimit and systemd) → bytes."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].lower() not in UNITS:
        raise ConfigError(f"`{option} {shown(text)}` is not a valid size", "for example 1500MiB, 1.5GiB or 6GB")
    count = int(float(match[1]) * UNITS[match[2].lower()])
    if not 1 << 20 <= count < 1 << 60:
        raise ConfigError(f"`{option} {text}` is {count} bytes: out of range", "for example 1500MiB, 1.5GiB or 6GB")
    return count


def parse_time(text: str, option: str, least: float = 1.0) -> float:
    """`90s`, `30min`, `1.5h` → seconds."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([A-Za-z]+)", text.strip())
    seconds = float(match[1]) * TIMES.get(match[2].lower(), math.nan) if match else math.nan
    if not least <= seconds:
        raise ConfigError(f"`{option} {shown(text)}` is not a valid duration", "for example 90s, 30min or 1.5h")
    return seconds


def format_size(count: float | None) -> str:
    if count is None:
        return "–"
    for unit, factor, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if count >= factor:
            return f"{count / factor:.{digits}f} {unit}"
    return f"{count:.0f} B"


def format_duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def format_count(number: float | None) -> str:
    """23.9 M."""
    if number is None:
        return "–"
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number:.0f}"
