"""Differential privacy by device: each clips its update and adds Gaussian noise before anything leaves it.

The sum over `min_clients` devices has `noise` times the clip as its standard deviation; Opacus' accountant composes
the rounds. What follows on the device, int8 and error feedback, is post-processing. The epsilon is that of the model,
which everybody sees: the server also sees each update, with 1/√min_clients of the noise.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from edgeft.errors import ConfigError
from edgeft.federated.needs import missing
from edgeft.federated.update import Vector

HINT = "for example `--dp epsilon=8,delta=1e-5`; `clip=1` and `noise=1.1` are optional"


@dataclass(frozen=True)
class Privacy:
    epsilon: float  # budget over all rounds
    delta: float
    clip: float = 1.0  # largest norm of a device's update
    noise: float = 0.0  # standard deviation of the summed noise over the clip; 0: what the rounds need

    @staticmethod
    def parse(text: str) -> Privacy:
        known = {field.name for field in fields(Privacy)}
        values: dict[str, float] = {}
        for item in text.split(","):
            key, _, value = (part.strip() for part in item.partition("="))
            try:
                values[key] = float(value)
            except ValueError:
                raise ConfigError(f"`--dp {text}`: `{item}` is not a number", HINT) from None
            if key not in known or not math.isfinite(values[key]) or values[key] <= 0:
                raise ConfigError(f"`--dp {text}`: `{item}` is unknown or not above 0", HINT)
        if not {"epsilon", "delta"} <= values.keys() or values["delta"] >= 1:
            raise ConfigError(f"`--dp {text}` needs epsilon, and a delta below 1", HINT)
        return Privacy(**values)

    def calibrated(self, rounds: int) -> Privacy:
        """With the least noise that so many rounds may have, unless it is given."""
        if self.noise:
            return self
        utils = _opacus("opacus.accountants.utils")
        try:
            noise = utils.get_noise_multiplier(
                target_epsilon=self.epsilon,
                target_delta=self.delta,
                sample_rate=1.0,
                steps=rounds,
                accountant="rdp",
                epsilon_tolerance=self.epsilon / 1000,
            )
        except ValueError as error:
            raise ConfigError(f"no noise is enough for epsilon {self.epsilon:g}: {error}", HINT) from None
        return replace(self, noise=float(noise))

    def spent(self, rounds: Sequence[float]) -> float:
        """Epsilon after these rounds. rounds: the noise of each, as `noise_of` has it."""
        if not rounds:
            return 0.0
        accountant = _opacus("opacus.accountants").RDPAccountant()
        for noise in rounds:
            accountant.step(noise_multiplier=noise, sample_rate=1.0)  # every device takes part in every round
        return float(accountant.get_epsilon(self.delta))

    def noise_of(self, clients: int, min_clients: int) -> float:
        """Of the sum over so many devices: each adds its part, whoever else takes part."""
        return self.noise * math.sqrt(clients / min_clients)

    def protect(self, vector: Vector, min_clients: int, random: np.random.Generator | None = None) -> Vector:
        """On the device: clipped, with its part of the noise. random: for tests; else seeded by the system."""
        random = random or np.random.default_rng(secrets.randbits(256))
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        scale = min(1.0, self.clip / norm) if norm else 1.0
        noise = random.standard_normal(len(vector)) * (self.noise * self.clip / math.sqrt(min_clients))
        return (vector * scale + noise).astype(np.float32)


def _opacus(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing("--dp", error) from None
