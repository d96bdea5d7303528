"""What a search found, as a recipe file."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from edgeft import config
from edgeft.config import TENSORS, Recipe, format_duration, format_size

if TYPE_CHECKING:
    pass

WAYS = ("micro_batch_tokens", "recompute", "optimizer_state")  # what of `how` is chosen with the scheme


def recipe_text(recipe: Recipe, found: dict[str, Any], data: str) -> str:
    """A recipe file: what was found, what to expect, and the settings that it was searched with."""
    budget, compared, sample = found["budget"], found["compared"], found["sample"]
    allowed = format_size(budget["memory_bytes"])
    allowed += f" and {format_duration(budget['time_s'])}" if budget["time_s"] is not None else ""
    measured = len(found["measured"])
    agreed = found["rank_correlation"]
    trials = f"{measured} candidates measured" + (f", rank correlation {agreed:.2f}" if agreed is not None else "")
    all_gain = found["all_gain"] or 1.0
    others = {name: compared[key] / all_gain for name, key in (("greedy", "greedy"), ("random", "random"))}
    others[f"the last {compared['last_blocks']} blocks"] = compared["last_blocks_gain"] / all_gain
    lines = [
        f"# Found by `edgeft search` for {found['model']} on {data}, within {allowed}, seed {found['seed']}.",
        f"# Contribution: first order over {sample['rows']} rows ({sample['tokens']} tokens); {trials}.",
        f"# Evolution over {compared['evaluations']} schemes: {found['gain_share']:.1%} of what training everything "
        f"would bring",
        f"# ({', '.join(f'{name} {share:.1%}' for name, share in others.items())}).",
        f"# To expect: {found['trained_parameters'] / 1e6:.2f} M parameters trained, "
        f"{format_size(found['peak_bytes'])}, "
        f"{format_duration(found['seconds'])}.",
        f"about: found by search for {found['model']}, within {allowed}",
        "",
        "update:",
        "  method: sparse",
        "  choose: gradient  # of a share, the channels with the largest gradients",
        "  parts:",
        *(f"    - {_flow(part)}" for part in found["parts"]),
    ]
    kept = dataclasses.replace(recipe, how=dataclasses.replace(recipe.how, **found["how"]))
    for section in ("model", "data", "train", "how"):
        lines += _section(section, kept)
    return "\n".join(lines) + "\n"


def _section(name: str, recipe: Recipe) -> list[str]:
    """What differs from the defaults; not where files lie, nor of `how` what belongs to this machine."""
    values, defaults = (dataclasses.asdict(getattr(r, name)) for r in (recipe, Recipe()))
    names = WAYS if name == "how" else [key for key in values if key not in ("path", "heldout")]
    changed = {key: values[key] for key in names if values[key] != defaults[key]}
    return ["", f"{name}:", *(f"  {key}: {config.scalar(value)}" for key, value in changed.items())] if changed else []


def _flow(part: dict[str, Any]) -> str:
    blocks = ", ".join(map(str, part["blocks"]))
    words = [f"blocks: [{blocks}]"]
    if part["tensors"] != list(TENSORS):
        words.append(f"tensors: [{', '.join(part['tensors'])}]")
    if part["channels"] != 1:
        words.append(f"channels: {part['channels']:g}")
    words += [f"{name}: true" for name in ("biases", "norms") if part[name]]
    return "{" + ", ".join(words) + "}"
