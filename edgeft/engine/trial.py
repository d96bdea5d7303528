"""The kernels' matrix products on this machine, measured: GFLOPS by operands, direction, type of the packed weight and
shape, and the error that their operands make. Measured once, and kept beside doctor's rates.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import numpy as np

from edgeft.engine import compiled
from edgeft.engine.compiled import BACKWARD, FORWARD, PRODUCTS, TRIAL_SHAPES, TRIAL_TYPES
from edgeft.host import device, doctor

TOKENS = 512
TRIAL_S = 0.1  # for each product


def measured(refresh: bool = False, threads: int | None = None) -> dict[str, float]:
    """{name: GFLOPS or error}, as `compiled.trial_name` names them. {}: the kernels cannot be compiled here."""
    if compiled.compiler() is None and not compiled.is_built():
        return {}
    found = doctor.measured_once(device.products_key, _measure, refresh, threads)
    return {name: value for name, value in found.items() if len(name.split()) == 4}


def gflops(threads: int) -> dict[str, float]:
    """By operands: the kernels' products, or torch's where there is no compiler."""
    return compiled.mean_rates(measured(threads=threads)) or doctor.gemm_rates(threads=threads)


def _measure(threads: int) -> dict[str, float]:
    from edgeft.engine import kernels

    backend = kernels.load()
    before = backend.threads
    backend.use_threads(threads)
    try:
        return dict(_results())
    finally:
        backend.use_threads(before)


def _results() -> Iterator[tuple[str, float]]:
    import torch

    from edgeft.engine import kernels
    from edgeft.engine.backend import Product
    from edgeft.engine.packed import Packed
    from edgeft.formats import ggml

    backend = kernels.load()
    able = {"fp32": True, "bf16": compiled.multiplies_bf16(), "int8": backend.multiplies_int8}
    for name in TRIAL_TYPES:
        for width in TRIAL_SHAPES:
            values = np.random.default_rng(0).standard_normal((width, width)).astype(np.float32)
            kind = ggml.type_id(name)
            weight = Packed(ggml.pack(values, kind).reshape(width, -1), kind, width, width)
            exact = torch.from_numpy(np.random.default_rng(1).standard_normal((TOKENS, width)).astype(np.float32))
            out = torch.empty(TOKENS, width)
            for products in filter(able.__getitem__, PRODUCTS):
                options = Product(int8=products == "int8")
                x = exact.bfloat16() if products == "bf16" else exact
                error = 0.0
                for matrix, direction in ((weight.T, FORWARD), (weight, BACKWARD)):
                    best = _best_s(functools.partial(backend.mm, x, matrix, out, options))
                    rate = round(2e-9 * TOKENS * width**2 / best, 1)
                    yield compiled.trial_name(products, direction, name, width), rate
                    reference = backend.mm(exact, matrix)
                    error = max(error, float((out - reference).norm() / reference.norm()))
                if products != "fp32":
                    yield compiled.trial_name(products, "error", name, width), error


def _best_s(product: Callable[[], object]) -> float:
    """Seconds of the best trial: other load only makes one slower."""
    product()
    best, end = float("inf"), time.perf_counter() + TRIAL_S
    while time.perf_counter() < end:
        begin = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - begin)
    return best
