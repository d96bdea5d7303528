"""Costs of schemes for the search: tables of the planned cost of every part that a scheme can have.

Blocks between the cut and the last one cost the same, so one of them is planned for all. Where parts share a buffer, or
one stage's peak hides another's, costs do not add up exactly: the best scheme is planned again as a whole.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from edgeft.config import TENSORS, ExecutionConfig
from edgeft.methods import SPARSE
from edgeft.methods.base import Update
from edgeft.methods.scheme import Scheme
from edgeft.plan import fit, memory
from edgeft.plan.shape import exported_bytes
from edgeft.search.evolve import LEVELS, SHARES, Floats, Problem

PROBE_BLOCKS = 5  # blocks above the cut with which a tensor's cost is planned
GROUPS = ((0, 1, 2), (3,), (4, 5), (6,))  # q k v, o, gate up, down: tensors with the same input
ANCHOR = "k"  # the smallest tensor


class Costs:
    """Of training on these rows with this recipe, by scheme."""

    def __init__(self, job: fit.Job) -> None:
        self.job, self.shape = job, job.shape
        self.options = self._options()

    def _options(self) -> list[ExecutionConfig]:
        """Micro-batches, recomputation, AdamW's precision; one of the micro-batches that lead to the same passes.

        8-bit moments are used only if requested: a step with them is off by some 10 %.
        """
        requested, load = self.job.recipe.how, self.job.load
        rest = operator.attrgetter("trunk_order", "spare_memory")
        distinct: dict[tuple[object, ...], ExecutionConfig] = {}
        for how in fit.execution_options(self.job):
            if rest(how) == rest(requested) and how.optimizer_state in (requested.optimizer_state, "fp32", "bf16"):
                passes = sum(len(step) for step in load.passes(how.micro_batch_tokens))
                distinct.setdefault((passes, how.recompute, how.optimizer_state), how)
        return list(distinct.values())

    def _planned(self, scheme: Scheme, how: ExecutionConfig) -> fit.Job:
        job = self.job.with_how(how)
        job.scheme = scheme
        job.exported_bytes = exported_bytes(self.shape, scheme, job.recipe.export.type)
        return job

    def of(self, scheme: Scheme, how: ExecutionConfig, budget_bytes: float) -> Floats:
        """(peak bytes of the run, seconds of trunk and training)."""
        job = self._planned(scheme, how)
        return np.array([job.peak(int(min(budget_bytes, 1 << 60))), _seconds(job)])

    def _parts(self, scheme: Scheme, how: ExecutionConfig) -> Floats:
        """(bytes of training without AdamW's moments, bytes of the moments, seconds)."""
        job = self._planned(scheme, how)
        terms = memory.stages(job, 0)["train"]
        moments = terms["optimiser state"]
        return np.array([memory.peak(terms) - moments, moments, _seconds(job)])

    def problem(self, budget: Floats) -> Problem:
        """The costs; gains are 0."""
        depth, weights = self.shape.depth, np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])  # `_parts` → (bytes, seconds)
        by_option = [[table @ weights.T for table in self._tables(how)] for how in self.options]
        fixed, biases, *cost = (np.stack(table) for table in zip(*by_option, strict=True))
        no_gain = np.zeros((depth, len(TENSORS), len(SHARES)))
        return Problem(no_gain, no_gain[:, 0, 0], fixed, GROUPS, tuple(cost), biases, budget)

    def _tables(self, how: ExecutionConfig) -> list[Floats]:
        """`_parts` [of each cut (depth, 3), of each block's biases and norms, of each group (depth, levels, 3)].

        All are planned beside a few trained channels of the cut: without any trained weight, the plan differs.
        """
        depth, low = self.shape.depth, max(0, self.shape.depth - PROBE_BLOCKS)
        fixed = np.array([self._parts(_scheme({(block, ANCHOR): SHARES[1]}), how) for block in range(depth)])
        biases_cost, cost = np.zeros((depth, 3)), [np.zeros((depth, LEVELS ** len(group), 3)) for group in GROUPS]
        anchor = {(low, ANCHOR): SHARES[1]}
        for block in sorted({min(low + 1, depth - 1), depth - 1}):
            blocks = slice(None, -1) if block < depth - 1 else slice(-1, None)
            for group, table in zip(GROUPS, cost, strict=True):
                for number in range(1, LEVELS ** len(group)):
                    levels = [number // LEVELS**n % LEVELS for n in range(len(group))]
                    shares = {(block, TENSORS[t]): SHARES[i] for t, i in zip(group, levels, strict=True) if i}
                    table[blocks, number] = self._parts(_scheme({**anchor, **shares}), how) - fixed[low]
            biases = [(block, tensor) for tensor in self.shape.arch.biases]
            biases_cost[blocks] = self._parts(_scheme(anchor, biases, [block]), how) - fixed[low]
        at = next(n for n, group in enumerate(GROUPS) if TENSORS.index(ANCHOR) in group)
        fixed -= cost[at][:, LEVELS ** GROUPS[at].index(TENSORS.index(ANCHOR))]
        return [fixed, np.maximum(biases_cost, 0), *(np.maximum(table, 0) for table in cost)]


def _seconds(job: fit.Job) -> float:
    stages = job.clock().stages()
    return stages.get("trunk", 0.0) + stages["train"]


def _scheme(
    shares: dict[tuple[int, str], float], biases: Sequence[tuple[int, str]] = (), norms: Sequence[int] = ()
) -> Scheme:
    return Scheme(SPARSE, {key: Update(share) for key, share in shares.items()}, frozenset(biases), frozenset(norms))
