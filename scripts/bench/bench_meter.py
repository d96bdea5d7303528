"""What `bench.py` measures of the machine and of processes: the GEMM rate, and the memory of a process tree."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from edgeft.engine import compiled
from edgeft.host import device

SAMPLE_S = 0.1  # between looks at the memory of a process tree
GEMMS = ((1024, 1024, 1024), (1024, 576, 1536))  # the first is what shares are of; the second is SmolLM2's FFN
RATES = {"fp32": "1024x1024x1024", "bf16": "1024x1024x1024 bf16"}  # by a contender's products


def hwm_bytes(pid: int | str = "self") -> int:
    """Highest resident memory of a process so far; 0 where the system does not tell."""
    for line in device.read_text(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def gemm_gflops() -> dict[str, float]:
    """Matrix products, the best of several: fp32, and bf16 where the processor has instructions for it."""
    import torch

    torch.set_num_threads(device.cores())
    rates = {}
    for dtype in (torch.float32, torch.bfloat16) if compiled.multiplies_bf16() else (torch.float32,):
        for m, k, n in GEMMS:
            a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
            best = float("inf")
            for _ in range(12):
                began = time.perf_counter()
                a @ b
                best = min(best, time.perf_counter() - began)
            rates[f"{m}x{k}x{n}" + (" bf16" if dtype == torch.bfloat16 else "")] = 2 * m * k * n / best / 1e9
    return rates


class Tree:
    """A process and all below it, watched until it ends."""

    def __init__(self, command: list[str]) -> None:
        self.started = time.time()
        self.peak_bytes = 0
        began = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
            try:
                while True:
                    self._look(child.pid)
                    with suppress(subprocess.TimeoutExpired):
                        self.exit_code = child.wait(SAMPLE_S)
                        break
            except BaseException:
                child.terminate()
                raise
        self.seconds = time.monotonic() - began

    def _look(self, pid: int) -> None:
        """The larger of: memory of all processes now, and the highest that any one of them ever had."""
        resident = highest = 0
        with suppress(psutil.Error):
            root = psutil.Process(pid)
            for process in [root, *root.children(recursive=True)]:
                with suppress(psutil.Error):
                    resident += process.memory_info().rss
                    highest = max(highest, hwm_bytes(process.pid))
        self.peak_bytes = max(self.peak_bytes, resident, highest)
