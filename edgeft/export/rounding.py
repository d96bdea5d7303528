"""Rounds a matrix onto the grid of its packed form so that its product with real inputs changes least.

The error of an output row r of W - Q is r H rᵀ, with H = E[x xᵀ] over the inputs x. Columns are rounded one by one and
each one's error is passed to those that follow (GPTQ); then the blocks' scales are refitted to the codes by least
squares, and every code is looked at again, given all others. Rows of a matrix are independent of each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from edgeft.engine.backend import TORCH, Backend, GridJob, Product
from edgeft.errors import ExportError
from edgeft.formats.grid import Grid
from edgeft.plan.limits import ROUND_WIDEST as WIDEST

Tensor = torch.Tensor
DAMPING = 0.01  # of H's mean diagonal, added to it: inputs that were not seen count, too
RIDGE = 1e-3  # of a scale's own part in the least squares
STEP = 32  # columns whose errors are passed on together
ROWS = 64  # for which the scales are solved at a time


class Sensitivity:
    """H of one input, in windows of at most WIDEST columns, and what rounding needs of it."""

    def __init__(self, inputs: int, backend: Backend = TORCH) -> None:
        self.backend = backend
        self.windows = [slice(at, min(at + WIDEST, inputs)) for at in range(0, inputs, WIDEST)]
        self.sums = [torch.zeros(w.stop - w.start, w.stop - w.start) for w in self.windows]
        self._inverse: list[Tensor] = []

    def add(self, x: Tensor, weight: Tensor | None) -> None:
        """x (T, I); weight (T,): how much each token counts."""
        weighted = x if weight is None else x * weight[:, None]
        for window, total in zip(self.windows, self.sums, strict=True):
            self.backend.mm(weighted[:, window].T, x[:, window], total, Product(add=True))

    def finish(self) -> None:
        """Damps H and factors its inverse, once for all matrices that read this input."""
        for total in self.sums:
            mean = total.diagonal().mean().clamp(min=1e-12)
            total.div_(mean).diagonal().add_(DAMPING)
            try:
                inverse = torch.cholesky_inverse(torch.linalg.cholesky(total))
                self._inverse.append(torch.linalg.cholesky(inverse, upper=True).T.contiguous())
            except torch.linalg.LinAlgError:
                what = "the training rows' inputs of a layer cannot be used for rounding: NaN, infinite or too large"
                raise ExportError(what, "use --type q8_0") from None

    def factors(self) -> list[tuple[slice, Tensor, Tensor]]:
        """(columns, H, upper Cholesky factor of H⁻¹, transposed) of each window."""
        return list(zip(self.windows, self.sums, self._inverse, strict=True))


@dataclass
class _Part:
    """A window of a matrix on its grid, transposed: a column of the matrix is contiguous."""

    target: Tensor  # (I, O)
    levels: Tensor  # of all codes
    scale: Tensor  # (I, O) integers that multiply d
    low: Tensor | None  # the same for m
    d: Tensor  # (blocks, O)
    m: Tensor | None
    codes: Tensor  # (I, O) int64
    block: int

    @staticmethod
    def of(job: GridJob) -> _Part:
        def turned(values: Tensor) -> Tensor:
            return values.T.contiguous()

        codes, block = torch.empty(0, dtype=torch.int64), job.target.shape[1] // job.d.shape[1]
        low, m = (None if one is None else turned(one) for one in (job.low, job.m))
        return _Part(turned(job.target), job.levels, turned(job.scale), low, turned(job.d), m, codes, block)

    @property
    def steps(self) -> Tensor:
        return self.d.repeat_interleave(self.block, 0) * self.scale

    @property
    def floors(self) -> Tensor | None:
        if self.m is None or self.low is None:
            return None
        return self.m.repeat_interleave(self.block, 0) * self.low

    def values(self) -> Tensor:
        values, floors = self.steps * self.levels[self.codes], self.floors
        return values if floors is None else values + floors


def round_matrix(
    target: Tensor, sensitivity: Sensitivity, grid: Grid, rounds: int, backend: Backend = TORCH
) -> np.ndarray:
    """target (O, I) → packed bytes (O, bytes of a row). rounds: of refitting scales and codes."""
    codes = np.empty(grid.codes.shape, np.uint8)
    d, m = grid.d.copy(), None if grid.m is None else grid.m.copy()
    block, levels = grid.format.block, torch.from_numpy(grid.format.levels)
    for window, h, inverse in sensitivity.factors():
        blocks = slice(window.start // block, window.stop // block)

        def of(values: np.ndarray | None, columns: slice) -> Tensor | None:
            return None if values is None else torch.from_numpy(np.ascontiguousarray(values[:, columns]))

        job = GridJob(
            target[:, window].contiguous(),
            torch.from_numpy(np.ascontiguousarray(grid.scale[:, window])),
            of(grid.min, window),
            torch.from_numpy(np.ascontiguousarray(grid.d[:, blocks])),
            of(grid.m, blocks),
            torch.empty(len(target), window.stop - window.start, dtype=torch.uint8),
            levels,
            h,
            inverse,
            rounds,
            RIDGE,
        )
        if backend.rounds_rows:
            backend.round_rows(job)
        else:
            _round_rows(job)
        codes[:, window], d[:, blocks] = job.codes.numpy(), job.d.numpy()
        if m is not None and job.m is not None:
            m[:, blocks] = job.m.numpy()
    return grid.packed(codes, d, m)


def _round_rows(job: GridJob) -> None:
    """As the kernels do it."""
    part, nearest = _Part.of(job), _Nearest(job.levels)
    _pass_errors_on(part, job.lower, nearest)
    for _ in range(job.rounds):
        _refit_scales(part, job.h)
        _look_again(part, job.h, nearest)
    job.codes.copy_(part.codes.T)
    job.d.copy_(part.d.T)
    if job.m is not None and part.m is not None:
        job.m.copy_(part.m.T)


class _Nearest:
    """The code whose level is nearest."""

    def __init__(self, levels: Tensor) -> None:
        self.first, self.last = float(levels[0]), float(levels[-1])
        self.even = bool((levels.diff() == 1).all())
        self.between = (levels[1:] + levels[:-1]) / 2

    def __call__(self, wanted: Tensor) -> Tensor:
        if self.even:
            return (wanted.clamp_(self.first, self.last).round_() - self.first).long()
        return torch.bucketize(wanted, self.between)


def _inverse(steps: Tensor) -> Tensor:
    return torch.where(steps == 0, torch.zeros(()), 1 / steps)


def _pass_errors_on(part: _Part, lower: Tensor, nearest: _Nearest) -> None:
    """GPTQ: the columns that follow make up for the error of each, as far as they can before they are rounded."""
    left, steps, floors = part.target.clone(), part.steps, part.floors
    per_step = _inverse(steps)
    part.codes = torch.empty(left.shape, dtype=torch.int64)
    for start in range(0, len(left), STEP):
        stop = min(start + STEP, len(left))
        errors = torch.empty(stop - start, left.shape[1])
        for k in range(start, stop):
            wanted = left[k] if floors is None else left[k] - floors[k]
            code = part.codes[k] = nearest(wanted * per_step[k])
            errors[k - start] = (wanted - steps[k] * part.levels[code]) / lower[k, k]
            left[k + 1 : stop].addr_(lower[k + 1 : stop, k], errors[k - start], alpha=-1)
        left[stop:].addmm_(lower[stop:, start:stop], errors, alpha=-1)


def _look_again(part: _Part, h: Tensor, nearest: _Nearest) -> None:
    """Each code in turn becomes the best, given all others."""
    steps = part.steps
    per_step, levels = _inverse(steps) / h.diagonal()[:, None], part.levels[part.codes]
    slope = h @ (part.target - part.values())  # half the gradient: what a change of a column gains
    for start in range(0, len(steps), STEP):
        stop = min(start + STEP, len(steps))
        own, moved = slope[start:stop].clone(), torch.empty(stop - start, steps.shape[1])
        for k in range(start, stop):
            code = part.codes[k] = nearest(levels[k] + own[k - start] * per_step[k])
            moved[k - start] = (part.levels[code] - levels[k]) * steps[k]
            own.addr_(h[start:stop, k], moved[k - start], alpha=-1)
        slope.addmm_(h[:, start:stop], moved, alpha=-1)


def _refit_scales(part: _Part, h: Tensor) -> None:
    """d and m of all blocks of a row at once, for its codes: a linear least-squares problem, weighted by H."""
    sides = [part.scale * part.levels[part.codes], *([] if part.low is None else [part.low])]
    wanted = h @ (part.target - part.values())
    count = len(part.d)
    for at in range(0, part.target.shape[1], ROWS):
        rows = slice(at, at + ROWS)
        basis = [side[:, rows].reshape(count, part.block, -1) for side in sides]  # (blocks, values, rows)
        seen = [torch.einsum("sbo,sbi->soi", one, h.view(count, part.block, -1)) for one in basis]
        lines = [
            [torch.einsum("sotb,tbo->ost", one.view(*one.shape[:2], count, part.block), other) for other in basis]
            for one in seen
        ]
        matrix = torch.cat([torch.cat(line, 2) for line in lines], 1)  # (rows, n, n), n = blocks · 1 or 2
        right = torch.cat([(one * wanted[:, rows].reshape(one.shape)).sum(1) for one in basis]).T
        own = matrix.diagonal(dim1=1, dim2=2)
        own += RIDGE * own + 1e-6 * own.mean(1, keepdim=True).clamp(min=1e-12)
        change = torch.linalg.solve(matrix, right[..., None])[..., 0].T
        part.d[:, rows] = _half(part.d[:, rows] + change[:count])
        if part.m is not None:
            part.m[:, rows] = _half(part.m[:, rows] + change[count:])


def _half(values: Tensor) -> Tensor:
    return values.half().float()
