"""The kernels on an emulated Cortex-A76 compute what they compute here: the same calls, replayed under qemu."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import astuple
from typing import Any

import emulated
import numpy as np
import pytest
import torch
from emulated import Buffer, Calls, CortexA76

from edgeft.data.tree import Tree
from edgeft.engine import compiled, kernels
from edgeft.engine.attention import Heads
from edgeft.engine.backend import AdamRule
from edgeft.engine.limits import KERNEL_TYPES
from edgeft.formats import ggml
from tests.support.rows import forest_parents

MISSING = emulated.missing() or ("g++" if compiled.compiler() is None else None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=f"needs {MISSING}")]
THREADS = 2
FP32, BF16, INT8 = range(3)
MINIMA = ("q4_1", "q5_1", "q2_k", "q4_k", "q5_k")  # scale · q + minimum is rounded once on ARM, as ggml does there


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> CortexA76:
    return CortexA76(tmp_path_factory.mktemp("arm"))


@pytest.fixture(scope="module")
def here() -> Any:
    return ctypes.CDLL(str(compiled.build()))


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().view(torch.int16).numpy()


def near(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))


def both(board: CortexA76, here: Any, calls: Calls, *wanted: Buffer) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the board has in these buffers, and this machine."""
    one, two = board.run(calls), calls.here(here)
    return [(one[buffer.number], two[buffer.number]) for buffer in wanted]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86 compiler")
@pytest.mark.parametrize("processor", ["native", "haswell", "x86-64", "cortex-a72"])
def test_no_warnings_on_others(processor: str) -> None:
    command = ["c++", f"-march={processor}"] if "cortex" not in processor else [emulated.COMPILER, f"-mcpu={processor}"]
    emulated.output_of(*command, *compiled.FLAGS, *emulated.WARNINGS, compiled.SOURCE, "-o", os.devnull)


@pytest.mark.parametrize("kind", [FP32, BF16, INT8])
def test_products(board: CortexA76, here: Any, kind: int) -> None:
    """Each type, both ways round, sizes that are no whole number of tiles."""
    if kind == INT8 and not here.multiplies_bytes():
        pytest.skip("this machine has no dot product of bytes")
    calls, results = Calls(), []
    for name in ("q4_0", "q4_1", "q4_k", "q6_k", "q8_0", None):
        results.append(emulated.product(calls, kind, 41, 70, 768, name, True, THREADS))
        results.append(emulated.product(calls, kind, 7, 261, 256, name, True, THREADS))
        depth = 96 if kind == INT8 else 70
        results.append(emulated.product(calls, kind, 41, 256, depth, name, False, THREADS))
    for got, want in both(board, here, calls, *results):
        assert near(got, want) < 1e-5
        assert np.linalg.norm(want) > 1


@pytest.mark.parametrize("type_id", KERNEL_TYPES, ids=str)
def test_unpacked_bits(board: CortexA76, here: Any, type_id: int) -> None:
    calls, values = Calls(), ggml.block_values(type_id)
    data = calls.buffer(ggml.pack(numbers(64, 512), type_id))
    full, half = calls.buffer(np.zeros(64 * 512, np.float32)), calls.buffer(np.zeros(64 * 512, np.int16))
    sizes = 64 * 512 // values, ggml.row_bytes(type_id, values), values, THREADS
    calls.call("unpack", data, type_id, full, *sizes)
    calls.call("unpack_half", data, type_id, half, *sizes)
    (got, want), (got_half, want_half) = both(board, here, calls, full, half)
    if any(type_id == ggml.type_id(name) for name in MINIMA):
        assert np.abs(got - want).max() < 2**-23 * np.abs(want).max()
        assert np.mean(got_half != want_half) < 1e-3
    else:
        assert np.array_equal(got, want)
        assert np.array_equal(got_half, want_half)


def test_norms_and_gates(board: CortexA76, here: Any) -> None:
    rows, width = 9, 70
    calls, results = Calls(), []
    x, more, dy, weight = (calls.buffer(numbers(rows, width, seed=seed)) for seed in range(4))
    total, y, dx = (calls.buffer(np.zeros((rows, width), np.float32)) for _ in range(3))
    scale = calls.buffer(np.zeros(rows, np.float32))
    shape = rows, width, THREADS
    calls.call("norm", x, more, weight, 1e-5, total, y, scale, *shape)
    calls.call("norm_back", total, scale, weight, dy, more, dx, *shape)
    results += [total, y, dx]
    for name in ("swiglu", "geglu"):
        out = calls.buffer(np.zeros((rows, width), np.float32))
        calls.call(name, x, more, out, rows * width, THREADS)
        gate, up, act = (calls.buffer(numbers(rows, width, seed=seed)) for seed in (5, 6, 7))
        calls.call(f"{name}_back", gate, up, dy, act, rows * width, THREADS)
        results += [out, gate, up, act]
    for got, want in both(board, here, calls, *results):
        assert near(got, want) < 1e-5


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (50, 2.0)])
def test_attention(board: CortexA76, here: Any, window: int, cap: float) -> None:
    tree, calls = Tree(forest_parents("passages")).within(window), Calls()
    heads, length = Heads(6, 2, 16, 0.25, cap), len(tree.size)
    plan = kernels.KernelPlan(tree, heads, None, 2)
    arrays = [calls.buffer(array) for array in plan._arrays]
    table = kernels._Tree(*[None] * len(arrays), plan.lists, tree.window)
    described = calls.buffer(table, {8 * i: array for i, array in enumerate(arrays)})
    shape = calls.buffer(kernels._Heads(*astuple(heads)))
    q, k, v, dout = (calls.buffer(numbers(length, 16 * n, seed=n)) for n in (6, 2, 2, 6))
    out, dq = (calls.buffer(np.zeros((length, 96), np.float32)) for _ in range(2))
    sums = calls.buffer(np.zeros((length, 6), np.float32))
    calls.call("attend", described, shape, q, k, v, out, sums, THREADS)
    parts = [[calls.buffer(np.zeros((length, 32), np.float32)) for _ in range(plan.lists)] for _ in range(2)]
    dk, dv = (calls.buffer(np.zeros(len(part), np.int64), {8 * i: b for i, b in enumerate(part)}) for part in parts)
    calls.call("attend_back", described, shape, q, k, v, out, sums, dout, dq, dk, dv, length, THREADS)
    for got, want in both(board, here, calls, out, sums, dq, *parts[0], *parts[1]):
        assert near(got, want) < 1e-5


@pytest.mark.parametrize("kind", ["adamw", "adamw_bf16", "adamw_bytes"])
def test_a_step_of_adamw(board: CortexA76, here: Any, kind: str) -> None:
    """What is rounded by chance may differ by a rounding in a few numbers."""
    count, calls = 1000, Calls()
    rule = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, 0.1, 0.001, 1.0, 7)
    weight, gradient = calls.buffer(numbers(count)), calls.buffer(numbers(count, seed=1))
    first, second = 0.1 * numbers(count, seed=2), numbers(count, seed=3) ** 2
    if kind == "adamw_bf16":
        first, second = bf16(first), bf16(second)
    if kind == "adamw_bytes":
        first, second = (np.random.default_rng(n).integers(1, 255, count).astype(np.uint8) for n in (2, 3))
    moments = [calls.buffer(first), calls.buffer(second)]
    held = [*moments, calls.buffer(numbers(8, seed=4) ** 2)] if kind == "adamw_bytes" else moments
    described = calls.buffer(kernels._Rule(*astuple(rule)))
    calls.call(kind, weight, 0, gradient, *held, count, described, THREADS)
    (got, want), *kept = both(board, here, calls, weight, *moments)
    assert near(got, want) < 1e-5
    assert not np.array_equal(want, numbers(count))
    for one, two in kept:
        if kind == "adamw":
            assert near(one, two) < 1e-5
        else:
            assert np.mean(one != two) < 0.01
