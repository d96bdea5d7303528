"""What schemes cost, as the search needs it: tables made by asking the planner for every part that a scheme can have.

Blocks between the cut and the last one cost the same, so that one of them stands for all. Where parts share a buffer,
or one stage's peak hides another's, a sum of parts is not the whole: of what was found, the whole is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeft.config import TENSORS, HowConfig, Recipe
from edgeft.data.tokens import Encoded
from edgeft.model.header import BIASES
from edgeft.plan import STATE_BYTES, Shape, fit
from edgeft.plan.memory import Engine
from edgeft.plan.rows import Load
from edgeft.sparse.evolve import SHARES, Problem
from edgeft.sparse.scheme import Scheme

BELOW = 5  # blocks that a stack is asked about with, to see what a tensor adds in its middle

Floats = npt.NDArray[np.float64]


class Costs:
    """Training on these rows by this recipe, with any scheme."""

    def __init__(
        self,
        recipe: Recipe,
        shape: Shape,
        train: Sequence[Encoded],
        heldout: Sequence[Encoded],
        machine: fit.Machine,
        engine: Engine | None,
    ) -> None:
        self.job = fit.Job(recipe, shape, Load(train, heldout, recipe), machine, engine)
        self.shape = shape
        self.ways = self._ways()

    def _ways(self) -> list[HowConfig]:
        """Micro-batches, recomputation, AdamW's precision; of micro-batches that come to the same passes, one."""
        asked, load = self.job.recipe.how, self.job.load
        found: dict[tuple[object, ...], HowConfig] = {}
        for way in fit.ways(asked, self.job.engine):
            if (way.trunk_order, way.spare_memory) == (asked.trunk_order, asked.spare_memory):
                passes = sum(len(step) for step in load.passes(way.micro_batch_tokens))
                found.setdefault((passes, way.recompute, way.optimizer_state), way)
        return list(found.values())

    def _planned(self, scheme: Scheme, how: HowConfig) -> fit.Job:
        job = self.job.with_how(how)
        job.scheme = scheme
        job.exported_bytes = fit.exported_bytes(self.shape, scheme, job.recipe.export.type)
        return job

    def of(self, scheme: Scheme, how: HowConfig, budget_bytes: float) -> Floats:
        """(bytes at the peak of the run, seconds of trunk and training)."""
        job = self._planned(scheme, how)
        return np.array([job.peak(int(min(budget_bytes, 1 << 60))), _seconds(job)])

    def _parts(self, scheme: Scheme, how: HowConfig) -> Floats:
        """(bytes of training without AdamW's moments, these, seconds)."""
        job = self._planned(scheme, how)
        terms = job.stages(0)["train"]
        moments = terms["optimiser state"]
        return np.array([sum(terms.values()) - moments, moments, _seconds(job)])

    def problem(self, budget: Floats) -> Problem:
        """With nothing to gain yet."""
        depth, tables = self.shape.depth, {}
        asked = self.ways[0].optimizer_state
        fixed, small = np.zeros((len(self.ways), depth, 2)), np.zeros((len(self.ways), depth, 2))
        cost = np.zeros((len(self.ways), depth, len(TENSORS), len(SHARES), 2))
        for number, how in enumerate(self.ways):
            passes = (how.micro_batch_tokens, how.recompute)
            if passes not in tables:
                tables[passes] = self._tables(dataclasses.replace(how, optimizer_state=asked))
            share = STATE_BYTES[how.optimizer_state] / STATE_BYTES[asked]
            for table, of in zip((fixed, cost, small), tables[passes], strict=True):
                table[number, ..., 0] = of[..., 0] + share * of[..., 1]
                table[number, ..., 1] = of[..., 2]
        nothing = np.zeros((depth, len(TENSORS), len(SHARES)))
        return Problem(nothing, nothing[:, 0, 0], fixed, cost, small, budget)

    def _tables(self, how: HowConfig) -> tuple[Floats, Floats, Floats]:
        """(with each cut, for each block, tensor and share, for each block's biases and norms), all as `_parts`."""
        depth, arch = self.shape.depth, self.shape.arch
        fixed = np.array([self._parts(_scheme({}, norms=[block]), how) for block in range(depth)])
        cost, small = np.zeros((depth, len(TENSORS), len(SHARES), 3)), np.zeros((depth, 3))
        low = max(0, depth - BELOW)
        for block in {min(low + 1, depth - 1), depth - 1}:
            same = slice(None, -1) if block < depth - 1 else slice(-1, None)
            for t, tensor in enumerate(TENSORS):
                for s, share in enumerate(SHARES[1:], 1):
                    cost[same, t, s] = self._parts(_scheme({(block, tensor): share}, norms=[low]), how) - fixed[low]
            biases = [(block, tensor) for tensor in BIASES[arch]]
            small[same] = self._parts(_scheme({}, biases, [low, block]), how) - fixed[low]
        return fixed, np.maximum(cost, 0), np.maximum(small, 0)


def _seconds(job: fit.Job) -> float:
    found = job.clock().stages(job.exported_bytes)
    return found.get("trunk", 0.0) + found["train"]


def _scheme(
    shares: dict[tuple[int, str], float], biases: Sequence[tuple[int, str]] = (), norms: Sequence[int] = ()
) -> Scheme:
    return Scheme("sparse", shares, frozenset(biases), frozenset(norms))
