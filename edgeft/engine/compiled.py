"""The C++ kernels as a library: compiled once for this machine's processor, and cached.

No torch here: the planner asks whether they are built.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from edgeft.errors import EdgeftError
from edgeft.host import cache, device

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = tuple(SOURCE.with_name(f"{name}.h") for name in ("products", "rounding", "threads", "unpack", "vectors"))
FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-schedule-insns", "-fopenmp-simd", "-shared",
    "-fPIC", "-pthread",
)  # fmt: skip
PRODUCTS, FORWARD, BACKWARD = ("fp32", "bf16", "int8"), "forward", "backward"
TRIAL_TYPES, TRIAL_SHAPES = ("q4_0", "q4_k", "q8_0"), (768, 2048)  # what `engine/trial.py` measures
TRIALS = [(name, width) for name in TRIAL_TYPES for width in TRIAL_SHAPES]
GAIN = {"fp32": 1.0, "bf16": 1.05, "int8": 1.1}  # that operands with fewer bits must bring
SAVED_SHARE = 0.4  # of the time of plain torch, by `scripts/bench/ablate.py`
COMPILE_S = 10.0  # on a slow board; 2 to 3 on a laptop
HINT = "install g++ or clang++, or go without the kernels: --set how.compile=off"


def compiler() -> str | None:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    return None


def _processor() -> str:
    """What -march=native depends on."""
    names = ("model name", "flags", "Features", "CPU part")
    known = {f"{name} {fact[name]}" for fact in device.cpu_facts() for name in names if name in fact}
    return " ".join([platform.machine(), *(sorted(known) or [platform.processor()]), *device.arm_features()])


def _flags() -> set[str]:
    """What the processor can do, by Linux's names."""
    return set(_processor().split())


def multiplies_bf16() -> bool:
    """Whether the processor has instructions for it. With them a product takes half the time, without several times.
    Not a trial: on a busy machine its result would vary, and with it a run's bits."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_flags())


def multiplies_int8() -> bool:
    """The same for dot products of bytes: a quarter of the time."""
    return not {"avx512_vnni", "avx_vnni", "asimddp"}.isdisjoint(_flags())


def trial_name(products: str, what: str, type_name: str, width: int) -> str:
    """Of a measured product; what: its direction, or `error`."""
    return f"{products} {what} {type_name} {width}x{width}"


def mean_rates(trials: dict[str, float]) -> dict[str, float]:
    """GFLOPS by operands, over all measured products with them; {} where none were measured."""
    rates: dict[str, list[float]] = {}
    for products in PRODUCTS:
        names = (trial_name(products, what, *of) for what in (FORWARD, BACKWARD) for of in TRIALS)
        if values := [trials[name] for name in names if name in trials]:
            rates[products] = values
    return {products: len(values) / sum(1 / value for value in values) for products, values in rates.items()}


def fastest_products(threads: int = 0) -> str:
    """Operands of products in training on this machine: as `edgeft doctor` measured, else by the processor's
    instructions. Two products forward, the trunk's among them, stand beside one backward."""
    able = {"fp32": True, "bf16": multiplies_bf16(), "int8": multiplies_int8()}
    count = min(threads or device.cores(), device.cores())
    trials = device.read_gemm_cache().get(device.products_key(device.cpu_name(), count), {})

    def seconds(products: str) -> float:
        weights = {FORWARD: 2, BACKWARD: 1}
        names = ((trial_name(products, way, *of), weight) for way, weight in weights.items() for of in TRIALS)
        return GAIN[products] * sum(weight / trials[name] for name, weight in names)

    try:
        return min(filter(able.__getitem__, PRODUCTS), key=seconds)
    except KeyError:  # not measured, or by another version
        return "bf16" if able["bf16"] else "int8" if able["int8"] else "fp32"


def library_file() -> Path:
    sources = (file.read_text() for file in (SOURCE, *HEADERS))
    name = hashlib.sha256("\n".join([*sources, *FLAGS, _processor()]).encode()).hexdigest()[:24]
    folder = cache.folder()
    if folder is None:
        raise EdgeftError("no folder for edgeft's kernels", "name one with EDGEFT_CACHE, or --set how.compile=off")
    return folder / "kernels" / f"{name}.so"


def pays(flops: float, flops_per_s: float) -> bool:
    """Whether this much work saves more time than compiling takes."""
    return SAVED_SHARE * flops / flops_per_s > COMPILE_S


def is_built() -> bool:
    return cache.folder() is not None and library_file().is_file()


def _target() -> str:
    """This processor, as a compiler's option."""
    if platform.machine() not in ("aarch64", "arm64"):
        return "-march=native"
    if sys.platform != "linux" or device.cpu_facts():
        return "-mcpu=native"
    # compilers read /proc/cpuinfo, which is not that of this processor under emulation
    extensions = {"asimdhp": "fp16", "asimddp": "dotprod", "i8mm": "i8mm", "bf16": "bf16"}
    found = [name for feature, name in extensions.items() if feature in device.arm_features()]
    return "+".join(["-march=armv8.2-a" if found else "-march=armv8-a", *found])


def build() -> Path:
    """The compiled library, built now if it is missing; a few seconds."""
    file = library_file()
    if file.is_file():
        return file
    program = compiler()
    if program is None:
        raise EdgeftError("no C++ compiler for edgeft's kernels", HINT)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        cache.private(file.parent.parent)  # whoever can write here runs code as this user
        cache.private(file.parent)
        result = subprocess.run(
            [program, *FLAGS, _target(), str(SOURCE), "-o", str(temporary)], capture_output=True, text=True
        )
        if result.returncode:
            error = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip()[:200])
            raise EdgeftError(f"{program} could not compile edgeft's kernels: {error}", HINT)
        os.replace(temporary, file)
    except OSError as refused:
        raise EdgeftError(f"cannot write edgeft's kernels to {file.parent}: {refused.strerror}", HINT) from None
    finally:
        temporary.unlink(missing_ok=True)
    return file


def trial_flops_per_s() -> float:
    """Operations a second of a float32 product in numpy, best of a few; a tenth of a second."""
    a = np.ones((512, 512), np.float32)
    best = float("inf")
    for _ in range(6):
        begin = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begin)
    return 2 * 512**3 / best
