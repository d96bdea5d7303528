"""What schemes cost, as the search needs it: tables of the planned cost of every part that a scheme can have.

Blocks between the cut and the last one cost the same, so that one of them stands for all. Where parts share a buffer,
or one stage's peak hides another's, a sum of parts is not the whole: the scheme that wins is planned as a whole.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgeft.config import TENSORS, ExecutionConfig
from edgeft.methods import SPARSE
from edgeft.methods.scheme import Scheme
from edgeft.plan import fit, memory
from edgeft.plan.shape import exported_bytes
from edgeft.search.evolve import PLACES, SHARES, Floats, Problem

BELOW = 5  # blocks that a stack is asked about with, to see what a tensor adds in its middle
GROUPS = ((0, 1, 2), (3,), (4, 5), (6,))  # q k v, o, gate up, down: those that read the same
ANCHOR = "k"  # the smallest tensor


class Costs:
    """Training on these rows by this recipe, with any scheme."""

    def __init__(self, job: fit.Job) -> None:
        self.job, self.shape = job, job.shape
        self.ways = self._ways()

    def _ways(self) -> list[ExecutionConfig]:
        """Micro-batches, recomputation, AdamW's precision; of micro-batches that come to the same passes, one.

        Moments of one byte are left out where nobody asked for them: a step with them is off by some 10 %.
        """
        asked, load = self.job.recipe.how, self.job.load
        rest = operator.attrgetter("trunk_order", "spare_memory", "products")
        different: dict[tuple[object, ...], ExecutionConfig] = {}
        for how in fit.ways(self.job):
            if rest(how) == rest(asked) and how.optimizer_state in (asked.optimizer_state, "fp32", "bf16"):
                passes = sum(len(step) for step in load.passes(how.micro_batch_tokens))
                different.setdefault((passes, how.recompute, how.optimizer_state), how)
        return list(different.values())

    def _planned(self, scheme: Scheme, how: ExecutionConfig) -> fit.Job:
        job = self.job.with_how(how)
        job.scheme = scheme
        job.exported_bytes = exported_bytes(self.shape, scheme, job.recipe.export.type)
        return job

    def of(self, scheme: Scheme, how: ExecutionConfig, budget_bytes: float) -> Floats:
        """(bytes at the peak of the run, seconds of trunk and training)."""
        job = self._planned(scheme, how)
        return np.array([job.peak(int(min(budget_bytes, 1 << 60))), _seconds(job)])

    def _parts(self, scheme: Scheme, how: ExecutionConfig) -> Floats:
        """(bytes of training without AdamW's moments, these, seconds)."""
        job = self._planned(scheme, how)
        terms = memory.stages(job, 0)["train"]
        moments = terms["optimiser state"]
        return np.array([memory.peak(terms) - moments, moments, _seconds(job)])

    def problem(self, budget: Floats) -> Problem:
        """With nothing to gain yet."""
        depth, asked = self.shape.depth, self.ways[0]
        tables: dict[tuple[int, bool], list[Floats]] = {}
        every: list[list[Floats]] = []
        for how in self.ways:
            passes = (how.micro_batch_tokens, how.recompute)
            if passes not in tables:
                tables[passes] = self._tables(replace(how, optimizer_state=asked.optimizer_state))
            moments, asked_moments = (memory.state_bytes(replace(self.job.recipe, how=one)) for one in (how, asked))
            share = moments / (asked_moments or 1)
            weights = np.array([[1.0, share, 0.0], [0.0, 0.0, 1.0]])  # (bytes, moments, seconds) → (bytes, seconds)
            every.append([table @ weights.T for table in tables[passes]])
        fixed, small, *cost = (np.stack(some) for some in zip(*every, strict=True))
        nothing = np.zeros((depth, len(TENSORS), len(SHARES)))
        return Problem(nothing, nothing[:, 0, 0], fixed, GROUPS, tuple(cost), small, budget)

    def _tables(self, how: ExecutionConfig) -> list[Floats]:
        """[with each cut (depth, 3), for each block's biases and norms, for each group (depth, places, 3)]: `_parts`.

        All beside a few channels of the cut, without which no weight at all would be trained: another case.
        """
        depth, low = self.shape.depth, max(0, self.shape.depth - BELOW)
        fixed = np.array([self._parts(_scheme({(block, ANCHOR): SHARES[1]}), how) for block in range(depth)])
        small, cost = np.zeros((depth, 3)), [np.zeros((depth, PLACES ** len(group), 3)) for group in GROUPS]
        anchor = {(low, ANCHOR): SHARES[1]}
        for block in sorted({min(low + 1, depth - 1), depth - 1}):
            same = slice(None, -1) if block < depth - 1 else slice(-1, None)
            for group, table in zip(GROUPS, cost, strict=True):
                for number in range(1, PLACES ** len(group)):
                    places = [number // PLACES**n % PLACES for n in range(len(group))]
                    shares = {(block, TENSORS[t]): SHARES[p] for t, p in zip(group, places, strict=True) if p}
                    table[same, number] = self._parts(_scheme({**anchor, **shares}), how) - fixed[low]
            biases = [(block, tensor) for tensor in self.shape.arch.biases]
            small[same] = self._parts(_scheme(anchor, biases, [block]), how) - fixed[low]
        at = next(n for n, group in enumerate(GROUPS) if TENSORS.index(ANCHOR) in group)
        fixed -= cost[at][:, PLACES ** GROUPS[at].index(TENSORS.index(ANCHOR))]
        return [fixed, np.maximum(small, 0), *(np.maximum(table, 0) for table in cost)]


def _seconds(job: fit.Job) -> float:
    stages = job.clock().stages()
    return stages.get("trunk", 0.0) + stages["train"]


def _scheme(
    shares: dict[tuple[int, str], float], biases: Sequence[tuple[int, str]] = (), norms: Sequence[int] = ()
) -> Scheme:
    return Scheme(SPARSE, shares, frozenset(biases), frozenset(norms))
