"""What a search may spend: memory and time of training, time of trials."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from edgeft import config

MEASURE_S = 180.0  # for trials, where nothing is said


@dataclass(frozen=True)
class Budget:
    memory_bytes: float
    time_s: float = math.inf  # of trunk and training; infinite: what the recipe's own scheme takes
    measure_s: float = 0.0  # of trials; 0: first order alone

    @staticmethod
    def read(
        memory: str | None, time: str | None, measure: str | None, device_bytes: int, before: Budget | None
    ) -> Budget:
        """As people write it; what is left out is as before, or as the device has it."""
        found = before or Budget(float(device_bytes), measure_s=MEASURE_S)
        if memory is not None:
            found = dataclasses.replace(found, memory_bytes=float(config.parse_size(memory)))
        if time is not None:
            limit = config.parse_time(time, "--time")
            found = dataclasses.replace(found, time_s=limit, measure_s=limit / 10)
        if measure is not None:
            found = dataclasses.replace(found, measure_s=config.parse_time(measure, "--measure", least=0.0))
        return found


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
