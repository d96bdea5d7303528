"""Probe of this machine: the memory, cores and CPU that a run can use here; and device profiles.

Nothing here imports torch, and every reader takes the root of a file tree, which may be another machine's.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import math
import platform
import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeft.config.reader import build, read_yaml
from edgeft.config.resolve import check_heat, find_file
from edgeft.config.schema import Device, ExecutionConfig, GovernorConfig
from edgeft.errors import ConfigError
from edgeft.host import cache
from edgeft.host.files import read_json
from edgeft.host.system import allowed_cpus

ROOT = Path("/")

# The other quarter is for the system, the desktop and above all the page cache: frozen weights are read from a mapped
# file, and when their pages do not fit beside the run they are fetched from disk again in every step. It is also the
# share that a Raspberry Pi 5 profile leaves (6 of 8 GiB).
BUDGET_SHARE = 0.75

# Laptops and PCs run hotter than boards: most throttle at 95 to 105 °C. A board is known by its device tree and gets
# the defaults, which keep a Raspberry Pi below its 80 °C.
PC_HEAT = {"target_celsius": 85.0, "limit_celsius": 95.0}

# /proc/cpuinfo of an ARM machine has (implementer, part) instead of a name.
ARM_CORES = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD05): "Cortex-A55",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0A): "Cortex-A75",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD41): "Cortex-A78",
    (0x41, 0xD42): "Cortex-A78AE",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x4E, 0x004): "Carmel",
}

# Features → (AT_HWCAP or AT_HWCAP2, bit), from Linux's asm/hwcap.h
ARM_FEATURES = {
    "asimd": (16, 1), "fphp": (16, 9), "asimdhp": (16, 10), "asimddp": (16, 20), "sve": (16, 22), "sve2": (26, 1),
    "i8mm": (26, 13), "bf16": (26, 14),
}  # fmt: skip


def read_text(path: Path) -> str:
    """The text of a small file, without surrounding white space and NULs; "" if it is absent or unreadable."""
    try:
        return path.read_bytes().decode("utf-8", "replace").strip(" \t\r\n\0")
    except OSError:  # a sleeping sensor gives an error instead of a value
        return ""


def read_int(path: Path) -> int | None:
    try:
        return int(read_text(path))
    except ValueError:  # absent, or "max"
        return None


def command_output(command: list[str], timeout: float = 10.0) -> str:
    """ "" if the command is absent, fails, or takes longer than `timeout` seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@dataclass(frozen=True)
class Mount:
    device: str  # "179:2"
    root: str  # the part of the file system that is mounted
    point: str
    kind: str  # "ext4", "cgroup2", …
    source: str  # "/dev/mmcblk0p2"
    options: str  # of the file system; names the controllers of a version 1 control group


def mounts(root: Path = ROOT) -> list[Mount]:
    """/proc/self/mountinfo: `36 35 98:0 /root /point rw,noatime master:1 - ext3 /dev/sda1 rw`."""
    table = []
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        left, sign, right = line.partition(" - ")
        a, b = left.split(), right.split()
        if sign and len(a) >= 6 and len(b) >= 2:
            part, point = (text.replace("\\040", " ") for text in a[3:5])
            table.append(Mount(a[2], part, point, b[0], b[1], b[2] if len(b) > 2 else ""))
    return table


def control_groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's control groups for `memory` or `cpu`, from its own one up to the top."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            version = 2
        elif controller in controllers.split(","):
            version = 1
        else:
            continue
        for mount in mounts(root):
            if mount.kind != ("cgroup2" if version == 2 else "cgroup"):
                continue
            if version == 1 and controller not in mount.options.split(","):
                continue
            # Inside a container the mount may begin at the container's own group, while the path counts from the top.
            top = mount.root.rstrip("/")
            inside = path[len(top) :] if path == top or path.startswith(top + "/") else ""
            parts = [part for part in inside.split("/") if part]
            if ".." in parts:  # the process was moved out of its namespace: only the mount point can be seen
                parts = []
            base = root / mount.point.lstrip("/")
            for depth in range(len(parts), -1, -1):
                yield version, base.joinpath(*parts[:depth])


def stat_value(path: Path, name: str) -> int | None:
    for line in read_text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return None


@dataclass(frozen=True)
class Memory:
    physical_bytes: int
    limit_bytes: int | None  # tightest control group that is below the physical memory
    available_bytes: int  # can be allocated now without swapping

    @property
    def ram_bytes(self) -> int:
        return self.physical_bytes if self.limit_bytes is None else self.limit_bytes


def memory(root: Path = ROOT) -> Memory:
    """Swap is not counted: training touches all of its memory in every step, and would only wait for the disk."""
    info = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            info[key] = int(words[0]) * 1024  # given in kB
    if "MemTotal" in info:
        physical = info["MemTotal"]
        available = info.get("MemAvailable", info.get("MemFree", 0))
    else:  # macOS, Windows
        import psutil

        virtual = psutil.virtual_memory()
        physical, available = int(virtual.total), int(virtual.available)

    limit = physical
    for version, group in control_groups(root, "memory"):
        if version == 2:
            # Above memory.high a process is throttled until it makes no progress: the same as a limit here.
            limits = [read_int(group / "memory.max"), read_int(group / "memory.high")]
            used, stat, before = read_int(group / "memory.current"), group / "memory.stat", ""
        else:
            # hierarchical_memory_limit includes parents that a container cannot see.
            stat, before = group / "memory.stat", "total_"
            limits = [read_int(group / "memory.limit_in_bytes"), stat_value(stat, "hierarchical_memory_limit")]
            used = read_int(group / "memory.usage_in_bytes")
        here = min((n for n in limits if n is not None and n > 0), default=physical)
        if here < physical:
            limit = min(limit, here)
            # Cached file pages count as used, those of mapped weights too, and are evictable; tmpfs is in
            # neither of these two.
            cached = sum(stat_value(stat, f"{before}{kind}_file") or 0 for kind in ("inactive", "active"))
            available = min(available, max(0, here - max(0, (used or 0) - cached)))
    return Memory(physical, limit if limit < physical else None, available)


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time that the control groups allow; None: no limit."""
    quota = math.inf
    for version, group in control_groups(root, "cpu"):
        if version == 2:
            share, _, period = read_text(group / "cpu.max").partition(" ")  # "150000 100000" or "max 100000"
        else:
            share, period = read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us")
        if share.isdigit() and period.isdigit() and int(share) > 0 and int(period) > 0:  # -1: no limit
            quota = min(quota, int(share) / int(period))
    return None if math.isinf(quota) else quota


def cores(root: Path = ROOT, cpus: set[int] | None = None) -> int:
    """Physical cores this process may use.

    Two hyper-threads of a core share its multipliers, so a matrix product gains nothing from the second one.
    A quota of 1.5 makes two: both threads are stopped together, and 1.5 CPUs' worth of work gets done.
    """
    allowed = allowed_cpus() if cpus is None else cpus
    topology = root / "sys/devices/system/cpu"
    siblings = {read_text(topology / f"cpu{cpu}/topology/thread_siblings_list") or f"cpu{cpu}" for cpu in allowed}
    quota = cpu_quota(root)
    return max(1, len(siblings) if quota is None else min(len(siblings), math.ceil(quota)))


def arm_features() -> list[str]:
    """What this ARM processor can do, by /proc/cpuinfo's names; from the auxiliary vector, which is right under
    emulation, too."""
    if sys.platform != "linux" or platform.machine() != "aarch64":
        return []
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return [name for name, (vector, bit) in ARM_FEATURES.items() if getauxval(vector) >> bit & 1]


def cpu_facts(root: Path = ROOT) -> list[dict[str, str]]:
    """/proc/cpuinfo, one dictionary per paragraph; [] if it is that of another machine, which runs an emulator."""
    facts = _cpu_facts(root)
    foreign = root == ROOT and platform.machine() == "aarch64" and not any("CPU implementer" in fact for fact in facts)
    return [] if foreign else facts


def _cpu_facts(root: Path) -> list[dict[str, str]]:
    paragraphs = read_text(root / "proc/cpuinfo").split("\n\n")
    facts = []
    for paragraph in paragraphs:
        pairs = (line.partition(":") for line in paragraph.splitlines())
        facts.append({key.strip(): value.strip() for key, sign, value in pairs if sign})
    return [fact for fact in facts if fact]


def cpu_name(root: Path = ROOT) -> str:
    """`Intel(R) Core(TM) i5-8250U CPU @ 1.60GHz`, `Cortex-A76`, `Apple M1`; big.LITTLE: `A + B`."""
    kinds: list[str] = []
    for fact in cpu_facts(root):
        name = fact.get("model name", "")
        if "CPU part" in fact:
            try:
                key = (int(fact["CPU implementer"], 16), int(fact["CPU part"], 16))
                name = ARM_CORES.get(key, name or f"ARM {key[0]:#x}:{key[1]:#x}")
            except (KeyError, ValueError):
                pass
        if name and name not in kinds:
            kinds.append(name)
    apple = platform.system() == "Darwin"
    brand = command_output(["sysctl", "-n", "machdep.cpu.brand_string"]) if apple else ""
    return " + ".join(kinds) or brand or platform.processor() or platform.machine()


def gemm_cache() -> Path | None:
    """The user's cache file; None without a home folder."""
    return cache.folder("gemm.json")


def gemm_key(cpu: str, threads: int) -> str:
    """The rate depends on the CPU, the library and the threads."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    return f"{cpu} | torch {version} | {threads} threads"


def bytes_key(cpu: str, threads: int) -> str:
    """The key of the rates of copying and writing."""
    return f"{gemm_key(cpu, threads)} | bytes"


def products_key(cpu: str, threads: int) -> str:
    """The key of the rates and errors of the kernels' products."""
    return f"{cpu} | kernels | {threads} threads"


def read_gemm_cache() -> dict[str, dict[str, float]]:
    """Key → dtype → GFLOPS, and by `bytes_key` GB/s. Damaged entries are left out and measured again."""
    path = gemm_cache()
    good: dict[str, dict[str, float]] = {}
    for key, rates in ((read_json(path) if path else None) or {}).items():
        numbers = list(rates.values()) if isinstance(rates, dict) else []
        if numbers and all(type(n) in (int, float) and 0 < n < math.inf for n in numbers):
            good[key] = {dtype: float(n) for dtype, n in rates.items()}
    return good


def this_machine(root: Path = ROOT) -> Device:
    """The profile `auto`. Its speed is known once `edgeft doctor` has measured it, and 0 before."""
    ram, count, cpu = memory(root).ram_bytes, cores(root), cpu_name(root)
    return Device(
        name="auto",
        about=f"this machine: {cpu}, {count} core{'s' if count > 1 else ''}, {ram / 2**30:.1f} GiB",
        ram_bytes=ram,
        budget_bytes=int(ram * BUDGET_SHARE),
        cores=count,
        gemm_gflops=read_gemm_cache().get(gemm_key(cpu, count), {}).get("fp32", 0.0),
        how={"threads": count},  # "all cores" would ignore a container's quota
        governor={} if read_text(root / "proc/device-tree/model") else dict(PC_HEAT),
    )


def load_device(name: str) -> Device:
    """A shipped profile, a user's file, or `auto`: this machine."""
    if name == "auto":
        return this_machine()
    path = find_file("device", name)
    values = read_yaml(path)
    values.setdefault("name", path.stem)
    profile = typing.cast(Device, build(Device, values))
    build(ExecutionConfig, profile.how, "how")  # a profile sets how a run computes, never what it learns
    check_heat(build(GovernorConfig, profile.governor, "governor"))
    if not 0 < profile.budget_bytes <= profile.ram_bytes:
        raise ConfigError(
            f"`budget_bytes` of `{profile.name}` is {profile.budget_bytes}, and its `ram_bytes` {profile.ram_bytes}",
            "a budget is above 0 and at most ram_bytes",
        )
    return profile
