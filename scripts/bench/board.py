#!/usr/bin/env python3
"""What a board is and how fast: one table to paste into an issue. scripts/bench/pi.sh sets up and calls it.

    scripts/bench/board.py [--steps 8] [--tokens 256]

Temperature and throttling are read before, and after the products, the run and the prefill.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import numpy as np
import prefill
import torch

from edgeft.engine import kernels
from edgeft.engine.backend import Product
from edgeft.engine.packed import Packed
from edgeft.formats import ggml
from edgeft.formats.source import demo_model
from edgeft.host import doctor, sensors

SHAPES = ((576, 576), (1536, 576), (1536, 1536), (8960, 1536))  # outputs, inputs: SmolLM2-135M and Qwen2.5-1.5B
TRIAL_S = 1.0
Rows = list[tuple[str, str]]


def best(run: Callable[[], object]) -> float:
    """Seconds of the fastest trial."""
    run()
    fastest, end = float("inf"), time.perf_counter() + TRIAL_S
    while time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - begin)
    return fastest


def gflops(tokens: int, outputs: int, inputs: int, option: Product) -> float:
    values = np.random.default_rng(0).standard_normal((outputs, inputs)).astype(np.float32)
    kind = ggml.type_id("q8_0")
    weight = Packed(ggml.pack(values, kind).reshape(outputs, -1), kind, outputs, inputs)
    x, out = torch.randn(tokens, inputs), torch.empty(tokens, outputs)
    return 2e-9 * tokens * outputs * inputs / best(lambda: kernels.load().mm(x, weight.T, out, option))


def products(tokens: int) -> Rows:
    """GFLOPS of products with Q8_0 weights, which are unpacked on the way."""
    options = {"fp32": Product(), "int8": Product(int8=True)} if kernels.load().multiplies_int8 else {"fp32": Product()}
    rows = []
    for outputs, inputs in SHAPES:
        rates = [f"{name} {gflops(tokens, outputs, inputs, option):.1f}" for name, option in options.items()]
        rows.append((f"product {tokens}×{inputs}×{outputs}, GFLOPS", ", ".join(rates)))
    return rows


def heat() -> str:
    degrees = [f"{row['celsius']:.0f} °C" for row in sensors.temperatures() if row["celsius"] is not None]
    throttled = sensors.Throttling(doctor.ROOT).seen()
    firmware = sensors.vcgencmd(doctor.ROOT, "get_throttled").strip()
    return ", ".join(filter(None, [max(degrees, default="no sensor"), *throttled, firmware]))


def machine() -> Rows:
    report = doctor.examine()
    system, cpu, memory = report["system"], report["cpu"], report["memory"]
    versions = report["versions"]
    return [
        ("board", system["board"] or "unknown"),
        ("system", f"{system['os']}, {system['arch']}, pages of {page_kib()} KiB"),
        ("processor", f"{cpu['name']}, {cpu['cores']} cores, {' '.join(cpu['simd'])}"),
        ("memory", f"{memory['physical_bytes'] / 2**30:.1f} GiB, {memory['available_bytes'] / 2**30:.1f} available"),
        ("disk", str(report["disk"]["kind"])),
        ("torch's products, GFLOPS", ", ".join(f"{k} {v}" for k, v in report["gemm"]["gflops"].items())),
        ("GB/s", ", ".join(f"{k} {v}" for k, v in report["bytes"].items())),
        ("compiler", (report["compiler"] or {}).get("version", "none")),
        ("packages", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]


def page_kib() -> int:
    import mmap

    return mmap.PAGESIZE // 1024


def run(steps: int, folder: Path) -> Rows:
    """Seconds of each stage, and the highest memory, of the embedded example."""
    common.edgeft("finetune", "--recipe", "sparse-bp", "--out", folder, sets=[f"train.steps={steps}"])
    stages = common.read_events(folder, "stage")
    rows = [(f"{stage['stage']}, seconds", f"{stage['worked_s']:.1f}") for stage in stages]
    peak = max(stage["peak_bytes"] for stage in stages)
    return [*rows, ("peak memory", f"{peak / common.MIB:.0f} MiB")]


def beside_llama(tokens: int) -> Rows:
    source = str(demo_model())
    rows = prefill.token_rows(source, None, 8, tokens)
    with torch.no_grad():
        passes = ("edgeft", prefill.edgeft_pass(source, rows)), ("llama.cpp", prefill.llama_pass(source, rows))
        seconds = {name: best(run) for name, run in passes}
    rates = ", ".join(f"{name} {8 * tokens / time_s:.0f}" for name, time_s in seconds.items())
    return [("trunk and prefill, tokens/s", rates)]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    rows = [*machine(), ("heat before", heat())]
    rows += [*products(args.tokens), ("heat after products", heat())]
    with tempfile.TemporaryDirectory() as folder:
        rows += [*run(args.steps, Path(folder) / "run"), ("heat after the run", heat())]
    rows += [*beside_llama(args.tokens), ("heat after prefill", heat())]
    print(common.table(["", "this board"], rows))


if __name__ == "__main__":
    main()
