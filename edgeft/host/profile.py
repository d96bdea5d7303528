"""Device profiles: a shipped or own YAML file, or `auto`, this machine."""

from __future__ import annotations

import typing

from edgeft.config.reader import build, read_yaml
from edgeft.config.resolve import apply_sets, check_heat, find_file, load_recipe, use_profile
from edgeft.config.schema import Device, ExecutionConfig, GovernorConfig, Recipe
from edgeft.errors import ConfigError


def load_device(name: str) -> Device:
    """A shipped profile, a user's file, or `auto`: this machine."""
    if name == "auto":
        from edgeft.host.device import this_machine

        return this_machine()
    path = find_file("device", name)
    values = read_yaml(path)
    values.setdefault("name", path.stem)
    device = typing.cast(Device, build(Device, values))
    build(ExecutionConfig, device.how, "how")  # a profile sets how a run computes, never what it learns
    check_heat(build(GovernorConfig, device.governor, "governor"))
    if not 0 < device.budget_bytes <= device.ram_bytes:
        raise ConfigError(
            f"`budget_bytes` of `{device.name}` is {device.budget_bytes}, and its `ram_bytes` {device.ram_bytes}",
            "a budget is above 0 and at most ram_bytes",
        )
    return device


def resolve(recipe: str, device: str, sets: list[str]) -> tuple[Recipe, Device]:
    """Recipe file, then the device's `how` and `governor`, then `--set`: later ones win."""
    named, profile = load_recipe(recipe), load_device(device)
    return apply_sets(use_profile(named, profile), sets), profile
