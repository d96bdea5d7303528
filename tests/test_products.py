"""Matrix products of the kernels: the oracle is torch in float64, on what ggml itself unpacks."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from edgeft.engine import compiled, kernels
from edgeft.engine.backend import TORCH, Backend, Product
from edgeft.engine.packed import Packed
from edgeft.formats import ggml

needs_kernels = pytest.mark.skipif(compiled.compiler() is None, reason="needs a C++ compiler")
SIZES = [(1, 16, 64), (7, 5, 32), (33, 70, 130), (100, 257, 67), (200, 16, 576), (97, 576, 16)]
TYPES = [
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_nl",
    "iq4_xs",
    "f16",
    "bf16",
]


@pytest.fixture(params=["torch", pytest.param("kernels", marks=needs_kernels)])
def backend(request: pytest.FixtureRequest) -> Backend:
    return TORCH if request.param == "torch" else kernels.load()


def near(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def packed(name: str, rows: int, cols: int, order: bool = False) -> tuple[Packed, torch.Tensor]:
    """A random matrix, and what ggml unpacks of it."""
    kind = ggml.type_id(name)
    values = np.random.default_rng(0).standard_normal((rows, cols)).astype(np.float32)
    data = ggml.pack(values, kind).reshape(rows, -1)
    dense = np.empty_like(values)
    ggml.unpack(data, kind, dense)
    matrix, exact = Packed(data, kind, rows, cols), torch.from_numpy(dense)
    if order:
        numbers = np.random.default_rng(1).permutation(rows)
        matrix, exact = matrix.permuted(numbers), exact[torch.from_numpy(numbers)]
    return matrix, exact


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_of_a_product(backend: Backend, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Either side may be turned; a bias, a factor, a sum with what is there, into a part of a larger matrix."""
    rows, cols, depth = size
    torch.manual_seed(0)
    x, w, bias = torch.randn(rows, depth).to(dtype), torch.randn(cols, depth).to(dtype), torch.randn(cols)
    exact = x.double() @ w.double().T
    close, rounded = 1e-6, 1e-6 if dtype == torch.float32 else 5e-3
    assert near(backend.mm(x, w.T), exact) < rounded
    assert near(backend.mm(x, w.T.contiguous(), options=Product(float32=True)), exact) < close
    assert near(backend.mm(x.T.contiguous().T, w.T, options=Product(float32=True)), exact) < close
    scaled = backend.mm(x, w.T, options=Product(scale=0.5, bias=bias, float32=True))
    assert near(scaled, 0.5 * exact + bias) < close
    wide = torch.ones(rows, cols + 9)
    backend.mm(x, w.T, wide[:, 4 : 4 + cols], Product(add=True))
    assert near(wide[:, 4 : 4 + cols], exact + 1) < close
    assert bool((wide[:, :4] == 1).all())
    assert bool((wide[:, 4 + cols :] == 1).all())
    half = torch.ones(rows, cols, dtype=torch.bfloat16)
    assert near(backend.mm(x, w.T, half, Product(add=True)), exact + 1) < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_may_be_columns_of_wider_ones(backend: Backend, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    x, y = (torch.randn(37, 1700).to(dtype)[:, 100:1500] for _ in range(2))
    for a, b in ((x.T, y), (x, y.T)):
        assert near(backend.mm(a, b, options=Product(float32=True)), a.double() @ b.double()) < 1e-5


@pytest.mark.parametrize("name", TYPES)
def test_packed_weights_are_multiplied_as_ggml_unpacks_them(backend: Backend, name: str) -> None:
    matrix, exact = packed(name, 70, 768, order=True)
    torch.manual_seed(0)
    x, dy = torch.randn(41, 768), torch.randn(41, 70)
    assert near(backend.mm(x, matrix.T), x.double() @ exact.double().T) < 1e-6
    assert near(backend.mm(dy, matrix), dy.double() @ exact.double()) < 1e-6
    assert near(backend.mm(dy[:, 8:40], matrix.part(8, 40)), dy[:, 8:40].double() @ exact[8:40].double()) < 1e-6
    if backend is not TORCH:
        half = Product(float32=True)
        assert near(backend.mm(x.bfloat16(), matrix.T, options=half), x.double() @ exact.double().T) < 5e-3
        assert near(backend.mm(dy.bfloat16(), matrix, options=half), dy.double() @ exact.double()) < 5e-3


@needs_kernels
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("size", [(1, 7, 256), (41, 70, 768), (250, 300, 512)], ids=str)
def test_bytes_are_near(name: str, size: tuple[int, int, int]) -> None:
    """A few per mille of the norm, and no more but in a group with a number far out."""
    backend, (rows, cols, depth) = kernels.load(), size
    matrix, exact = packed(name, cols, depth)
    torch.manual_seed(0)
    x = torch.randn(rows, depth)
    x[:, 3] *= 20
    got = backend.mm(x, matrix.T, options=Product(int8=True))
    assert near(got, x.double() @ exact.double().T) < 0.04
    assert near(got, x.double() @ exact.double().T) > 1e-4  # in bytes it is
    zeros = torch.zeros(rows, depth)
    assert bool((backend.mm(zeros, matrix.T, options=Product(int8=True)) == 0).all())


@needs_kernels
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("size", [(1, 32, 256), (41, 96, 768), (250, 320, 512)], ids=str)
def test_gradients_in_bytes_are_near(name: str, size: tuple[int, int, int]) -> None:
    """The gradient of an input: the weight is the other way round, and its groups run along its outputs."""
    backend, (rows, outputs, inputs) = kernels.load(), size
    matrix, exact = packed(name, outputs, inputs, order=True)
    torch.manual_seed(0)
    dy = torch.randn(rows, outputs) * 1e-6
    dy[:, 3] *= 20
    want = dy.double() @ exact.double()
    got = backend.mm(dy, matrix, options=Product(int8=True))
    assert 1e-4 < near(got, want) < 0.04
    total = torch.ones(rows, inputs)
    backend.mm(dy, matrix, total, Product(int8=True, add=True))
    assert torch.equal(total, got + 1)
    assert bool((backend.mm(torch.zeros_like(dy), matrix, options=Product(int8=True)) == 0).all())


@needs_kernels
def test_weights_of_one_size_are_bytes_both_ways() -> None:
    """Groups whose largest number is a power of two times 127 lose nothing in this direction, either."""
    random = np.random.default_rng(3)
    w = random.integers(-127, 128, (96, 70)).astype(np.float32)
    w[::32], dy = 127, torch.from_numpy(random.integers(-127, 128, (41, 96))).float()
    dy[:, ::32] = 127
    exact = torch.from_numpy(w)
    assert near(kernels.load().mm(dy, exact, options=Product(int8=True)), dy.double() @ exact.double()) < 1e-6


@needs_kernels
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0", "q4_k"])
def test_weights_that_are_bytes_lose_nothing(name: str) -> None:
    """Nor do whole numbers up to 127 on the other side."""
    matrix, exact = packed(name, 70, 768, order=True)
    x = torch.from_numpy(np.random.default_rng(2).integers(-127, 128, (41, 768))).float()
    x[:, ::32] = 127
    got = kernels.load().mm(x, matrix.T, options=Product(int8=True))
    assert near(got, x.double() @ exact.double().T) < 1e-6


@needs_kernels
def test_a_depth_that_is_no_whole_number_of_groups_stays_in_float32() -> None:
    x, w = torch.randn(9, 40), torch.randn(16, 40)
    assert near(kernels.load().mm(x, w.T, options=Product(int8=True)), x.double() @ w.double().T) < 1e-6


@needs_kernels
@pytest.mark.parametrize("options", [Product(), Product(int8=True)], ids=["fp32", "int8"])
@pytest.mark.parametrize("turned", [True, False], ids=["forward", "backward"])
def test_a_product_is_the_same_whatever_the_threads(options: Product, turned: bool) -> None:
    weight, _ = packed("q4_k", 1024, 512)
    matrix = weight.T if turned else weight
    x, before, found = torch.randn(333, matrix.shape[0]), kernels.load().threads, []
    try:
        for threads in (1, 2, 5, 2):
            kernels.load().use_threads(threads)
            found.append(kernels.load().mm(x, matrix, options=options).clone())
    finally:
        kernels.load().use_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


CALLS = """
import ctypes, sys, torch
add, long, at = ctypes.CDLL(sys.argv[1]).add, ctypes.c_long, ctypes.c_void_p
x = torch.ones(40 * 4096)
y = torch.zeros_like(x)
sizes = [n * 4096 - 7 for n in (40, 2, 3, 17, 2, 5)]
for call in range(400_000):
    size = sizes[call % len(sizes)]
    add(at(x.data_ptr()), at(x.data_ptr()), at(y.data_ptr()), long(size), 8)
    if call % 500 == 0:
        assert bool((y[:size] == 2).all()), call
        y.zero_()
"""


@needs_kernels
def test_no_piece_of_work_is_lost_or_done_twice() -> None:
    """Short jobs of few and of many pieces, on more threads than there are cores: these are stopped anywhere, and go on
    in the middle of the next job. A piece that is counted twice lets the caller wait for ever."""
    subprocess.run([sys.executable, "-c", CALLS, str(compiled.build())], check=True, timeout=120)


@needs_kernels
def test_the_kernels_need_no_openmp() -> None:
    """Apple's compiler has none, and its threads wait for each other at every product."""
    tool = shutil.which("readelf")
    if tool is None:
        pytest.skip("needs readelf")
    needed = subprocess.run([tool, "-d", str(compiled.build())], capture_output=True, text=True, check=True).stdout
    assert "NEEDED" in needed
    assert "gomp" not in needed
