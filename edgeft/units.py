"""Amounts as people write them: `1.5GiB`, `30min`."""

from __future__ import annotations

import math
import re

from edgeft.errors import ConfigError

BYTES = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
SECONDS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}


def parse_bytes(text: str, option: str) -> int:
    return int(_parse(text, option, BYTES, "a size like 800MiB or 1.5GiB"))


def parse_seconds(text: str, option: str) -> float:
    return _parse(text, option, SECONDS, "a time like 90s, 30min or 2h")


def _parse(text: str, option: str, units: dict[str, int], like: str) -> float:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in units:
        raise ConfigError(f"`{option} {text[:40]}` is not {like}", f"units: {', '.join(filter(None, units))}")
    found = float(match[1]) * units[match[2]]
    if not 0 < found < math.inf and option != "--measure":
        raise ConfigError(f"`{option} {text[:40]}` leaves nothing", f"give {like}")
    return found
