"""What `edgeft doctor` reports: this machine, its speed, the profile that suits it, and what is not available on it.

It never fails because a machine lacks something: unknown values are None or an empty list.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edgeft.errors import RunError
from edgeft.host import cache, device, sensors, system
from edgeft.host.device import ROOT, command_output, read_text
from edgeft.host.files import write_json
from edgeft.host.limit import can_make_group

PACKAGES = ("edgeft", "torch", "transformers", "llama-cpp-python", "bitsandbytes")

# Common name → names in /proc/cpuinfo (`flags`, on ARM `Features`) and macOS' hw.optional; one is enough.
SIMD = {
    "AVX2": ("avx2", "avx2_0"),
    "AVX512": ("avx512f",),
    "VNNI": ("avx512_vnni", "avx_vnni", "avx512vnni"),
    "AMX": ("amx_int8", "amx_bf16"),
    "NEON": ("asimd", "neon", "advsimd"),
    "dotprod": ("asimddp", "arm.feat_dotprod"),
    "i8mm": ("i8mm", "arm.feat_i8mm"),
    "SVE": ("sve", "arm.feat_sve"),
}

# Words in /proc/device-tree/model → profiles of that board, by memory.
BOARDS = (
    (r"Raspberry Pi (5|Compute Module 5|500)\b", ("rpi5", "rpi5-16gb")),
    (r"Raspberry Pi (4|Compute Module 4|400)\b", ("rpi4",)),
    (r"Jetson Orin Nano\b", ("jetson-orin-nano",)),
)

TRIAL_S = 0.3  # per dtype
WRITE_BYTES, WRITE_S = 1 << 29, 1.0  # of the disk's trial, whichever comes first; a shorter one gives random rates
SHAPE = (512, 1024, 1024)  # (tokens, in, out): the size of one linear layer over a micro-batch, 1.07 GFLOP


def simd(root: Path = ROOT) -> list[str]:
    """Vector extensions that matter for matrix products, by name."""
    words: set[str] = set(device.arm_features()) if root == ROOT else set()
    for fact in device.cpu_facts(root)[:1]:
        words.update((fact.get("flags", "") + " " + fact.get("Features", "")).lower().split())
    if not words:  # macOS: "hw.optional.arm.FEAT_DotProd: 1"
        words = _apple_words(command_output(["sysctl", "hw.optional"]))
    return [name for name, any_of in SIMD.items() if words & set(any_of)]


def _apple_words(text: str) -> set[str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip().lower().removeprefix("hw.optional.") for key, _, value in pairs if value.strip() == "1"}


def _best_gflops(product: Callable[[], object]) -> float:
    """Best of the trials that fit into TRIAL_S: other load only makes a trial slower."""
    rows, inner, out = SHAPE
    start = time.perf_counter()
    product()  # the first call generates code and starts threads
    best, end = time.perf_counter() - start, start + TRIAL_S
    while time.perf_counter() < end:
        begin = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - begin)
    return round(2 * rows * inner * out / best / 1e9, 1)


@contextlib.contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_gemm(threads: int) -> dict[str, float]:
    """GFLOPS of y = x Wᵀ by dtype. A dtype that this build of torch cannot multiply is left out."""
    import torch

    rows, inner, out = SHAPE
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
    # Own generators: measuring must not change the random state of a run.
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(0)).mul(30)  # ± 127 is over 4 sigma
    w = torch.randn(out, inner, generator=torch.Generator().manual_seed(1)).mul(30)
    rates: dict[str, float] = {}
    with _torch_threads(threads):
        for name, dtype in kinds.items():
            multiply = torch._int_mm if name == "int8" else torch.mm
            product = functools.partial(multiply, x.to(dtype), w.to(dtype).T)
            with contextlib.suppress(RuntimeError, NotImplementedError):
                rates[name] = _best_gflops(product)
    return rates


def gemm_rates(refresh: bool = False, threads: int | None = None) -> dict[str, float]:
    """GFLOPS by dtype (fp32, bf16, fp16, int8), measured once (about 1.5 s), then read from the user's cache file."""
    return measured_once(device.gemm_key, measure_gemm, refresh, threads)


def byte_rates(refresh: bool = False, threads: int | None = None) -> dict[str, float]:
    """GB/s copied in memory (`copy`) and written to the cache folder's disk (`write`); measured once, in 1 to 2 s."""
    return measured_once(device.bytes_key, lambda n: {"copy": _copy_rate(n), **_write_rate()}, refresh, threads)


def _copy_rate(threads: int) -> float:
    """GB/s read and written by all threads, on more data than any processor's caches hold."""
    import torch

    x = torch.ones(1 << 24)
    with _torch_threads(threads):
        y = x + 1.0
        best = float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            torch.add(x, 1.0, out=y)
            best = min(best, time.perf_counter() - begin)
    return round(2 * x.nbytes / best / 1e9, 3)


def _write_rate() -> dict[str, float]:
    """GB/s as a checkpoint is written: with its checksum and fsync. {} where nothing can be written."""
    path = device.gemm_cache()
    if path is None:
        return {}
    data = os.urandom(1 << 22)
    place = path.with_name(f"{path.name}.{os.getpid()}.trial")
    try:
        cache.private(path.parent)
        begin, written, seconds = time.perf_counter(), 0, 0.0
        with place.open("wb") as file:
            while written < WRITE_BYTES and seconds < WRITE_S:
                for _ in range(16):
                    file.write(data)
                    zlib.crc32(data)
                file.flush()
                os.fsync(file.fileno())
                written, seconds = written + 16 * len(data), time.perf_counter() - begin
        return {"write": round(written / seconds / 1e9, 3)}
    except OSError:  # read-only, or full
        return {}
    finally:
        with contextlib.suppress(OSError):
            place.unlink(missing_ok=True)


def measured_once(
    key_of: Callable[[str, int], str], measure: Callable[[int], dict[str, float]], refresh: bool, threads: int | None
) -> dict[str, float]:
    """What `measure` gives for this processor and so many threads, from the user's cache file if it is there."""
    count, path, known = threads or device.cores(), device.gemm_cache(), device.read_gemm_cache()
    key = key_of(device.cpu_name(), count)
    if refresh or key not in known:
        known[key] = measure(count)
        if path is not None:
            with contextlib.suppress(OSError, RunError):  # read-only home, full disk: it is measured again next time
                cache.private(path.parent)
                write_json(path, known)
    return known[key]


def accelerator() -> dict[str, Any]:
    """{"kind": "cuda" | "mps" | "none", "name", "memory_bytes"} as torch sees it."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a driver that is too old; here it counts as no accelerator
        if torch.cuda.is_available():
            gpu = torch.cuda.get_device_properties(0)
            return {"kind": "cuda", "name": gpu.name, "memory_bytes": int(gpu.total_memory)}
    if torch.backends.mps.is_available():
        return {"kind": "mps", "name": device.cpu_name(), "memory_bytes": None}  # shares the machine's memory
    return {"kind": "none", "name": None, "memory_bytes": None}


def compiler() -> dict[str, str] | None:
    """The C++ compiler that a build would use; llama-cpp-python and compiled steps need one."""
    try:
        own = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # an unclosed quotation mark
        own = []
    for command in filter(None, [own, ["c++"], ["g++"], ["clang++"]]):
        path = shutil.which(command[0])
        text = command_output([path, *command[1:], "--version"]) if path else ""
        if path and text:
            return {"path": path, "version": text.splitlines()[0]}
    return None


def versions() -> dict[str, str | None]:
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def disk_kind(folder: Path, root: Path = ROOT) -> str | None:
    """`SD card`, `eMMC`, `NVMe`, `SSD`, `hard disk`, `USB disk`, `virtual disk`, `memory`, `network`; or None."""
    holding = [m for m in device.mounts(root) if folder == Path(m.point) or Path(m.point) in folder.parents]
    if not holding:
        return None
    mount = max(enumerate(holding), key=lambda pair: (len(Path(pair[1].point).parts), pair[0]))[1]  # later ones cover
    if mount.kind in ("tmpfs", "ramfs"):
        return "memory"
    if mount.kind in ("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse.sshfs"):
        return "network"
    block = root / "sys/dev/block" / mount.device
    if not block.exists():  # btrfs and others have device numbers of their own: go by the name
        block = root / "sys/class/block" / Path(mount.source).name
        if not mount.source.startswith("/dev/") or not block.exists():
            return None
    return _block_kind(block.resolve())


def _block_kind(block: Path) -> str | None:
    below = sorted((block / "slaves").glob("*")) if (block / "slaves").is_dir() else []
    if below:  # encryption, LVM, RAID: the disk below
        return _block_kind(below[0].resolve())
    disk = block.parent if (block / "partition").exists() else block
    name = disk.name
    if name.startswith("mmcblk"):
        return "SD card" if read_text(disk / "device/type") == "SD" else "eMMC"
    if name.startswith("nvme"):
        return "NVMe"
    if name.startswith(("vd", "xvd")):  # virtual disks report that they rotate
        return "virtual disk"
    if re.search(r"/usb\d", str(disk)):
        return "USB disk"
    return {"0": "SSD", "1": "hard disk"}.get(read_text(disk / "queue/rotational"))


def disk(folder: Path | None = None, root: Path = ROOT) -> dict[str, Any]:
    where = (folder or Path.cwd()).resolve()
    usage = shutil.disk_usage(where)
    kind = disk_kind(where, root)
    return {"folder": str(where), "free_bytes": usage.free, "total_bytes": usage.total, "kind": kind}


def board(root: Path = ROOT) -> str | None:
    """`Raspberry Pi 5 Model B Rev 1.0`; None on machines without a device tree."""
    return read_text(root / "proc/device-tree/model") or None


def pick_profile(root: Path = ROOT) -> dict[str, str]:
    """{"name", "reason"}: the shipped profile of this board, else `auto`."""
    model, ram = board(root), device.memory(root).ram_bytes
    for pattern, profiles in BOARDS:
        if model is None or not re.search(pattern, model):
            continue
        for name in profiles:
            # A board reports up to 10 % less than is printed on it; with far more, the profile would waste the rest.
            if 0.85 <= ram / device.load_device(name).ram_bytes <= 1.3:
                return {"name": name, "reason": f"this is a {model} with {ram / 2**30:.1f} GiB"}
        known = " and ".join(f"{device.load_device(n).ram_bytes / 2**30:.0f}" for n in profiles)
        reason = f"this is a {model}, but with {ram / 2**30:.1f} GiB; its profiles are for {known} GiB"
        return {"name": "auto", "reason": reason}
    return {"name": "auto", "reason": "no shipped profile is for this machine; `auto` measures it"}


def unavailable(root: Path = ROOT) -> list[dict[str, str]]:
    """[{"what", "why"}]: what this system lacks, and on Linux what this machine does."""
    missing = system.missing()
    if sys.platform == "linux":
        if not can_make_group(root):
            missing.append(("control groups", "none can be made here: --enforce limits with RLIMIT_DATA"))
        if not sensors.thermometers(root) and not sensors.vcgencmd(root, "measure_temp"):
            missing.append(("temperatures", "no thermometer can be read: runs do not pause for heat"))
    return [{"what": what, "why": why} for what, why in missing]


def examine(root: Path = ROOT, folder: Path | None = None, refresh: bool = False) -> dict[str, Any]:
    """Everything above as plain dictionaries. Rates are those of the machine it runs on, whatever `root` is."""
    memory, profile = device.memory(root), device.this_machine(root)
    quota = device.cpu_quota(root)
    report: dict[str, Any] = {
        "system": {"os": f"{platform.system()} {platform.release()}", "arch": platform.machine(), "board": board(root)},
        "memory": {
            "physical_bytes": memory.physical_bytes,
            "limit_bytes": memory.limit_bytes,
            "ram_bytes": memory.ram_bytes,
            "available_bytes": memory.available_bytes,
            "budget_bytes": profile.budget_bytes,
        },
        "cpu": {
            "name": device.cpu_name(root),
            "cores": profile.cores,
            "logical_cpus": len(system.allowed_cpus()),
            "quota": quota,
            "simd": simd(root),
        },
        "gemm": {"threads": device.cores(), "gflops": {}, "fastest": None, "error": None},
        "bytes": {},
        "accelerator": {"kind": "none", "name": None, "memory_bytes": None},
        "compiler": compiler(),
        "temperatures": sensors.temperatures(root),
        "throttled": sensors.Throttling(root).seen(),
        "power": sensors.power(root),
        "disk": disk(folder, root),
        "versions": versions(),
        "profile": pick_profile(root),
        "unavailable": unavailable(root),
    }
    try:
        rates = gemm_rates(refresh)
        report["bytes"] = byte_rates(refresh)
        floats = [name for name in rates if name != "int8"]  # gradients are not computed in int8
        report["gemm"].update(gflops=rates, fastest=max(floats, key=lambda name: rates[name], default=None))
        report["accelerator"] = accelerator()
    except (ImportError, OSError) as error:  # a torch that does not load is a reason to run doctor
        report["gemm"]["error"] = f"torch cannot be loaded: {error}".splitlines()[0]
    return report
