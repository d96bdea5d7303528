"""Disk space that a run needs, by kind of file, and the bytes that it writes in all."""

from __future__ import annotations

import os
from pathlib import Path

from edgeft.config import Recipe, TrainConfig
from edgeft.host.files import Need, path_size
from edgeft.methods.scheme import Scheme
from edgeft.plan import memory
from edgeft.plan.memory import RunSpec
from edgeft.plan.shape import Shape, exported_bytes, trained_parameters
from edgeft.run.folder import Run

SHARE = 0.02  # maximum share of the time spent writing checkpoints: they are rarer on a slow disk
WEAR = 0.1  # share of the disk's size that the checkpoints of a run may write without being made rarer
RARE_S = 1200.0  # seconds of work that may be lost to spare the disk


def save_every(interval_s: float, training_s: float, save_s: float, share: float) -> float:
    """Seconds between checkpoints; 0: after every step. share: one checkpoint's size over the disk's.

    SD cards and eMMC wear out after some hundred to some thousand writes of their whole size. Where checkpoints would
    write over a tenth of the disk in a run, they are made rarer, down to one in 20 minutes; where even these would
    write more than the whole disk, rarer still.
    """
    if not interval_s:
        return 0.0
    once = training_s * share  # at this interval, they write the disk's size
    return max(interval_s, save_s / SHARE, min(once / WEAR, RARE_S), once)


def expected_saves(train: TrainConfig, steps: int, training_s: float, every_s: float) -> int:
    """Checkpoints after that of step 0: one at each validation, assumed to be the best so far, and those between."""
    validations = min(train.validations, steps)
    if not every_s:
        return steps
    between = int(training_s / validations / every_s)
    return min(steps, validations * (1 + between))


def checkpoint_bytes(recipe: Recipe, shape: Shape, scheme: Scheme) -> tuple[int, int]:
    """(weights and their average, optimiser state) in one checkpoint; with `cycle`, the state of the active blocks."""
    state = memory.state_bytes(recipe) * memory.active_share(scheme)
    weights = memory.weight_bytes(recipe, shape, scheme) + memory.average_bytes(recipe, shape, scheme)
    return weights, int(state * trained_parameters(shape, scheme))


def checkpoint_space(recipe: Recipe, shape: Shape, scheme: Scheme) -> int:
    """Of all checkpoints, the best and the one being written included."""
    return (recipe.how.keep_checkpoints + 1) * sum(checkpoint_bytes(recipe, shape, scheme))


def trunk_bytes(spec: RunSpec) -> tuple[int, int, int]:
    """(cache, temporary files, bytes written to them); each block but the last writes one of the two files."""
    cut, how = spec.scheme.cut, spec.recipe.how
    if not cut or how.trunk != "cache":
        return 0, 0, 0
    cache, temporary = memory.boundary_bytes(spec)
    return cache, temporary if cut > 1 else 0, (cut - 1) * temporary // 2


def disk_bytes(spec: RunSpec) -> dict[str, int]:
    """Space needed, by kind of file."""
    cache, temporary, _ = trunk_bytes(spec)
    return {
        "trunk cache": cache,
        "trunk, while it is made": temporary,
        "checkpoints": checkpoint_space(spec.recipe, spec.shape, spec.scheme),
        "exported model": spec.exported_bytes,
    }


def written_bytes(spec: RunSpec, saves: int) -> dict[str, int]:
    """Bytes written over the whole run, by kind of file; saves: checkpoints after that of step 0."""
    cache, _, between = trunk_bytes(spec)
    weights, state = checkpoint_bytes(spec.recipe, spec.shape, spec.scheme)
    return {
        "trunk cache": cache,
        "trunk, while it is made": between,
        "checkpoints": weights + saves * (weights + state),  # there is no state before the first step
        "exported model": spec.exported_bytes,
    }


def disk_needs(run: Run, shape: Shape, scheme: Scheme) -> list[Need]:
    """What a run has yet to write, except the trunk cache, whose size is known only after tokenization."""
    needs: list[Need] = []
    if not run.tokens.is_file():
        rows = Path(run.recipe.data.path) if run.recipe.data.path else None
        if rows is not None and os.path.isfile(rows):  # which files of a folder are rows is not known yet
            needs.append((run.path, "tokens", 2 * path_size(rows)))  # token ids and text
    if not run.done.is_file():
        space = checkpoint_space(run.effective, shape, scheme)
        needs.append((run.path, "checkpoints", max(0, space - path_size(run.checkpoints, run.best))))
    if not (run.exported.is_file() and run.model.is_file()):
        needs.append((run.path, "exported model", exported_bytes(shape, scheme, run.recipe.export.type)))
    return needs
