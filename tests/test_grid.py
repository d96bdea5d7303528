"""ggml's block formats taken apart and put together again: the same bytes, and the values that ggml unpacks."""

from __future__ import annotations

import numpy as np
import pytest

from edgeft.formats import ggml
from edgeft.formats.grid import FORMATS, Grid, grid_of

ROWS, COLS = 6, 768
kinds = pytest.mark.parametrize("name", FORMATS)


def some(name: str) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal((ROWS, COLS)).astype(np.float32)
    return ggml.pack(values, ggml.type_id(name)).reshape(ROWS, -1)


def by_ggml(packed: np.ndarray, name: str) -> np.ndarray:
    out = np.empty((ROWS, COLS), np.float32)
    ggml.unpack(np.ascontiguousarray(packed), ggml.type_id(name), out)
    return out


def named(grid: Grid, codes: np.ndarray, d: np.ndarray, m: np.ndarray | None) -> np.ndarray:
    """In float64: ggml rounds in its own order."""
    count = COLS // d.shape[1]
    values = np.repeat(d.astype(np.float64), count, 1) * grid.scale * grid.format.levels[codes]
    if m is not None and grid.min is not None:
        values += np.repeat(m.astype(np.float64), count, 1) * grid.min
    return values


@kinds
def test_a_matrix_comes_back_with_the_same_bytes(name: str) -> None:
    packed = some(name)
    grid = grid_of(packed, ggml.type_id(name), COLS)
    assert (grid.packed(grid.codes, grid.d, grid.m) == packed).all()
    np.testing.assert_allclose(named(grid, grid.codes, grid.d, grid.m), by_ggml(packed, name), rtol=1e-6, atol=1e-7)


@kinds
def test_ggml_unpacks_the_values_that_were_chosen(name: str) -> None:
    """Every code in every place, and other scales; scales inside a block keep their bits."""
    random = np.random.default_rng(1)
    grid = grid_of(some(name), ggml.type_id(name), COLS)
    codes = random.integers(0, len(grid.format.levels), (ROWS, COLS)).astype(np.uint8)
    d, m = (
        None if one is None else (one * random.uniform(0.5, 2, one.shape)).astype(np.float16).astype(np.float32)
        for one in (grid.d, grid.m)
    )
    assert d is not None
    packed = grid.packed(codes, d, m)
    np.testing.assert_allclose(named(grid, codes, d, m), by_ggml(packed, name), rtol=1e-6, atol=1e-6)
    again = grid_of(packed, ggml.type_id(name), COLS)
    assert (again.codes == codes).all()
    assert (again.scale == grid.scale).all()
