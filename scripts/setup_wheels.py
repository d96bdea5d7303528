#!/usr/bin/env python3
"""Installs torch without CUDA libraries and llama.cpp, compiled once, into the environment that runs this script.

    .venv/bin/python scripts/setup_wheels.py

The standard library is enough. The compiled wheel is kept in edgeft's cache folder, under a key of what the build
depends on; pip reads version, Python and platform from its name. What already satisfies pyproject.toml stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterable
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
LLAMA = "llama-cpp-python"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
REACH_S = 5.0
NO_CPU_BUILD = (
    f"torch comes with CUDA libraries, several GB: pip offers no CPU build, and {CPU_INDEX} cannot be reached"
)
# Left out, 110 of 193 steps: what edgeft does not call, images and the library of llama.cpp's own programs. The package
# forces the second on in CMake's cache, where a variable set after its `project` comes before it.
# Without AMX: GCC 11 and 12 drop stores to the tile configuration, and llama.cpp then crashes at the first product.
LEAN = "-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama_cpp_INCLUDE="
LEAN_CMAKE = "set(LLAMA_BUILD_COMMON OFF)\nadd_compile_options(-U__AMX_INT8__)\n"
JOB_BYTES = 640 << 20  # the largest of what is compiled took 447 MiB, half of it less than 180 (GCC 12)
NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI vendor; class of graphics cards
EVERY_S = 15.0  # between lines of progress where they cannot be overwritten


def fail(what: str, hint: str) -> None:
    sys.exit(f"error: {what}\nhint: {hint}")


def requirements(name: str) -> list[str]:
    """The dependency as pyproject.toml states it, with its markers; read without tomllib, which Python 3.10 lacks."""
    text = (TOP / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(rf'^    "({name}[<>=;][^"]*)"', text, re.MULTILINE)


def pip(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pip", *args], capture_output=True, text=True, errors="replace")


def is_satisfied(names: list[str]) -> bool:
    """By what is installed: without an index and links, pip finds nothing else."""
    options = ("--quiet", "--no-deps", "--no-index", "--dry-run")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *names],
        capture_output=True,
        env={**os.environ, "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull},
    )
    return done.returncode == 0


def last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if re.search(r"\berror\b", line, re.IGNORECASE)]
    return lines[-1] if lines else "no message"


# ---------------------------------------------------------------- torch


def has_nvidia_card(root: Path = Path("/")) -> bool:
    """Also one without a driver, and one in a container or in WSL, where the bus is not shown."""
    if any((root / file).exists() for file in ("dev/nvidiactl", "dev/nvidia0", "usr/lib/wsl/lib/libcuda.so.1")):
        return True
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        with contextlib.suppress(OSError):
            card = vendor.with_name("class").read_text().startswith(DISPLAY)
            if card and vendor.read_text().strip() == NVIDIA:
                return True
    return False


def newest_cpu_build(versions: Iterable[str], low: str, high: str) -> str | None:
    """Of versions such as 2.13.0+cpu, the newest with low ≤ version < high."""

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))

    builds = [version for version in versions if re.fullmatch(r"[\d.]+\+cpu", version)]
    return max((v for v in builds if numbers(low) <= numbers(v) < numbers(high)), key=numbers, default=None)


def is_reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=REACH_S):
            return True
    except (OSError, ValueError):
        return False


def install_torch() -> None:
    """On x86 Linux without an NVIDIA card, the CPU build; elsewhere pip chooses by the markers of pyproject.toml."""
    names = requirements("torch")
    if (sys.platform, platform.machine()) != ("linux", "x86_64") or has_nvidia_card() or is_satisfied(names):
        return
    low, high = re.findall(r"[\d.]+", names[-1])[:2]
    offered = pip("index", "versions", "torch").stdout.partition("Available versions:")[2].splitlines()[:1]
    build = newest_cpu_build(re.split(r",\s*", offered[0].strip()) if offered else [], low, high)
    if build:
        chosen = [f"torch=={build}"]
    elif is_reachable(f"{CPU_INDEX}/torch/"):
        chosen = ["--index-url", CPU_INDEX, *names]
    else:
        print(NO_CPU_BUILD)
        return
    print("installing torch, the build for the CPU", flush=True)
    done = pip("install", "--quiet", "--no-deps", *chosen)
    if done.returncode:
        fail(f"torch could not be installed: {last_error(done.stderr)}", "check the network and the space on the disk")


# ---------------------------------------------------------------- llama.cpp


def cache_folder(part: str) -> Path:
    """As edgeft.host.cache.folder, which needs packages that are not installed yet."""
    override, base = os.environ.get("EDGEFT_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    if override:
        return Path(override).expanduser().absolute() / part
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "edgeft" / part


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def native_features() -> list[str]:
    """What the compiler may use on this processor beyond its default: the macros that `native` adds."""
    option = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"

    def macros(*options: str) -> set[str]:
        call = [*compiler(), *options, "-dM", "-E", "-x", "c++", os.devnull]
        with contextlib.suppress(OSError):
            return set(subprocess.run(call, capture_output=True, text=True).stdout.splitlines())
        return set()

    return sorted(macros(option) - macros())


def build_key(features: Iterable[str]) -> str:
    """Everything that the build depends on and the wheel's name does not say."""
    options = {name: os.environ.get(name, "") for name in ("CMAKE_ARGS", "CXXFLAGS", "CFLAGS")}
    parts = [platform.machine(), *platform.libc_ver(), sorted(features), options, LEAN, LEAN_CMAKE]
    return f"{platform.machine()}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that is free or can be freed, within a container's limit; None where the system does not say."""
    found = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        text = (root / "proc/meminfo").read_text()
        found.append(int(re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024)  # type: ignore[index]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups, version 2 and 1
        with contextlib.suppress(OSError, ValueError):
            found.append(int((root / "sys/fs/cgroup" / file).read_text()))
    return min(found, default=None)


def jobs(cores: int, memory: int | None) -> int:
    """Compilers at a time: all cores, but each within the memory that is there; at least one."""
    return max(1, min(cores, cores if memory is None else memory // JOB_BYTES))


def show_progress(lines: Iterable[str], log: Path) -> None:
    """The build's output goes to a file, the share that is done to the terminal."""
    begun = shown = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(line)
            file.flush()
            done = re.match(r"\s*\[\s*(\d+)(?:/(\d+)|%)\]", line)  # ninja: [12/345], make: [ 12%]
            now = time.monotonic()
            if not done or now - shown < (0.2 if sys.stdout.isatty() else EVERY_S):
                continue
            share, shown = 100 * int(done[1]) // int(done[2] or 100), now
            text = f"  compiling llama.cpp: {share:3} %, {now - begun:.0f} s"
            print(text, end="\r" if sys.stdout.isatty() else "\n", flush=True)
    print(f"  compiling llama.cpp: ended after {time.monotonic() - begun:.0f} s")


def build(requirement: str, folder: Path) -> None:
    """Compiles the wheel, and puts it into the folder whole. Not from pip's cache, which knows no processors."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(jobs(cores, available_bytes()))
    log = folder / "build.log"
    print(f"llama.cpp is downloaded and compiled, {count} files at a time; minutes, once", flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        call = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-cache-dir", "-w", place, requirement]
        lean = Path(place) / "lean.cmake"
        lean.write_text(LEAN_CMAKE, encoding="utf-8")
        options = f"{LEAN}{shlex.quote(str(lean))} {os.environ.get('CMAKE_ARGS', '')}"
        env = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": count, "PIP_PROGRESS_BAR": "off", "CMAKE_ARGS": options}
        with subprocess.Popen(
            call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=env
        ) as child:
            assert child.stdout is not None
            show_progress(child.stdout, log)
        wheels = list(Path(place).glob("*.whl"))
        if child.returncode or not wheels:
            text = log.read_text(encoding="utf-8")
            killed = " Killed" in text
            what = "the compiler was killed: out of memory" if killed else cause(text)
            hint = "set CMAKE_BUILD_PARALLEL_LEVEL=1, close other programs" if killed else f"all of its output: {log}"
            fail(f"llama.cpp could not be compiled: {what}", hint)
        os.replace(wheels[0], folder / wheels[0].name)


def cause(log: str) -> str:
    """The compiler's or CMake's own message; pip's that something failed comes last and says less."""
    for pattern in (r"^.*(?:fatal )?error: .*$", r"^\s*CMake Error.*$\n.*$", r"^\s*ERROR: .*$"):
        found = re.search(pattern, log, re.MULTILINE)
        if found:
            return " ".join(found[0].split())
    return "no message"


def is_whole(wheel: Path) -> bool:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, EOFError):
        return False


def install_llama() -> None:
    (requirement,) = requirements(LLAMA)
    if is_satisfied([requirement]):
        return
    folder = cache_folder("wheels") / build_key(native_features())
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # what is in it will be executed
        for wheel in folder.glob("*.whl"):
            if not is_whole(wheel):
                print(f"the kept wheel {wheel} is damaged: llama.cpp is compiled again")
                wheel.unlink()
    except OSError as error:
        fail(f"cannot write {folder}: {error.strerror}", "set EDGEFT_CACHE to a folder of yours")
    kept = ("install", "--quiet", "--no-deps", "--no-index", "--only-binary=:all:", "--find-links", str(folder))
    if pip(*kept, requirement).returncode:
        build(requirement, folder)
        done = pip(*kept, requirement)
        if done.returncode:
            fail(f"the wheel of llama.cpp cannot be installed: {last_error(done.stderr)}", f"delete {folder}")
    else:
        print(f"llama.cpp: the wheel compiled before, in {folder}")


if __name__ == "__main__":
    install_torch()
    install_llama()
