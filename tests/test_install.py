"""Installing: torch by platform, llama.cpp compiled within memory and kept, and what is known of a wheel."""

from __future__ import annotations

import io
import os
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import install_size
import pytest
import setup_wheels
from packaging.requirements import Requirement

from edgeft.host import cache

PI = {"sys_platform": "linux", "platform_machine": "aarch64"}
ELSEWHERE = [
    {"sys_platform": "linux", "platform_machine": "x86_64"},
    {"sys_platform": "darwin", "platform_machine": "arm64"},
    {"sys_platform": "win32", "platform_machine": "AMD64"},
]
GIB = 1 << 30


def torch_range(there: dict[str, str]) -> Requirement:
    (found,) = [
        requirement
        for requirement in map(Requirement, setup_wheels.requirements("torch"))
        if requirement.marker and requirement.marker.evaluate(dict(there))
    ]
    return found


def test_linux_on_aarch64_takes_a_build_without_cuda() -> None:
    wanted = torch_range(PI).specifier
    assert "2.9.1" in wanted
    assert not [version for version in ("2.10.0", "2.11.0", "2.13.0") if version in wanted]


@pytest.mark.parametrize("there", ELSEWHERE, ids=lambda there: there["sys_platform"])
def test_other_machines_take_the_newest_torch(there: dict[str, str]) -> None:
    wanted = torch_range(there).specifier
    assert "2.13.0" in wanted
    assert "2.13.0+cpu" in wanted
    assert "2.14.0" not in wanted


def test_the_newest_cpu_build_within_the_range_is_chosen() -> None:
    versions = ["2.15.0", "2.14.0+cpu", "2.13.0", "2.9.1+cpu", "2.12.1+cpu", "2.13.0+cu130"]
    assert setup_wheels.newest_cpu_build(versions, "2.6", "2.14") == "2.12.1+cpu"
    assert setup_wheels.newest_cpu_build(["2.13.0"], "2.6", "2.14") is None


def test_an_nvidia_card_is_found_by_its_vendor_and_class(tmp_path: Path) -> None:
    for name, vendor, kind in (
        ("0", "0x10de", "0x040300"),
        ("1", "0x8086", "0x030000"),
    ):  # its audio, another's graphics
        device = tmp_path / "sys/bus/pci/devices" / name
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    assert not setup_wheels.has_nvidia_card(tmp_path)
    (device / "vendor").write_text("0x10de\n")
    assert setup_wheels.has_nvidia_card(tmp_path)


# ---------------------------------------------------------------- llama.cpp


@pytest.mark.parametrize(
    ("cores", "memory", "count"),
    [(4, 8 * GIB, 4), (4, 2 * GIB, 3), (4, int(0.6 * GIB), 1), (2, 64 * GIB, 2), (1, 0, 1), (4, None, 4)],
)
def test_as_many_compilers_as_memory_and_cores_allow(cores: int, memory: int | None, count: int) -> None:
    assert setup_wheels.jobs(cores, memory) == count


def test_memory_is_what_the_machine_and_its_container_leave(tmp_path: Path) -> None:
    assert setup_wheels.available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  4000000 kB\nMemAvailable:  3000000 kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert setup_wheels.available_bytes(tmp_path) == 3000000 * 1024
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{GIB}\n")
    assert setup_wheels.available_bytes(tmp_path) == GIB


def test_wheels_are_kept_in_edgefts_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for override, base in (("", ""), ("", str(tmp_path)), (str(tmp_path / "own"), ""), ("", "relative")):
        monkeypatch.setenv("EDGEFT_CACHE", override)
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert setup_wheels.cache_folder("wheels") == cache.folder("wheels")


def test_the_key_follows_the_processor_and_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    features = setup_wheels.native_features()
    key = setup_wheels.build_key(features)
    assert setup_wheels.build_key(reversed(features)) == key
    assert setup_wheels.build_key([*features, "#define __ARM_FEATURE_DOTPROD 1"]) != key
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_BLAS=ON")
    assert setup_wheels.build_key(features) != key


def test_llama_cpp_is_compiled_without_amx() -> None:
    (option,) = re.findall(r"add_compile_options\((.*)\)", setup_wheels.LEAN_CMAKE)
    call = [*setup_wheels.compiler(), "-dM", "-E", "-x", "c++", os.devnull]
    if subprocess.run([*call, "-march=sapphirerapids"], capture_output=True).returncode:
        pytest.skip("this compiler knows no processor with AMX")
    macros = [
        subprocess.run([*call, "-march=sapphirerapids", *more], capture_output=True, text=True, check=True).stdout
        for more in ([], [option])
    ]
    assert "__AMX_INT8__" in macros[0]
    assert "__AMX_INT8__" not in macros[1]


def test_a_wheel_that_was_cut_short_is_not_whole(tmp_path: Path) -> None:
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a.py", "x = 1\n" * 1000)
    assert setup_wheels.is_whole(wheel)
    data = wheel.read_bytes()
    wheel.write_bytes(data[:-100])
    assert not setup_wheels.is_whole(wheel)
    wheel.write_bytes(data[:500] + b"\1" + data[501:])
    assert not setup_wheels.is_whole(wheel)


BROKEN = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x.cpp:3:1: error: no such thing", "llama.cpp could not be compiled: x.cpp:3:1: error: no such thing"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "the compiler was killed: out of memory"),
    ],
)
def test_a_failed_build_ends_in_one_line_and_a_hint(tmp_path: Path, line: str, message: str) -> None:
    source, folder = tmp_path / "source", tmp_path / "cache"
    source.mkdir()
    folder.mkdir()
    (source / "pyproject.toml").write_text(BROKEN)
    (source / "backend.py").write_text(
        f"def build_wheel(*args):\n    print({line!r}, flush=True)\n    raise SystemExit(1)\n"
    )
    code = "import sys, pathlib, setup_wheels; setup_wheels.build(sys.argv[1], pathlib.Path(sys.argv[2]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(folder)],
        capture_output=True,
        text=True,
        cwd=Path(setup_wheels.__file__).parent,
    )
    assert done.returncode == 1
    assert re.fullmatch(rf"error: .*{re.escape(message)}\nhint: .+\n", done.stderr)
    assert [file.name for file in folder.iterdir()] == ["build.log"]


def test_progress_is_the_share_that_ninja_or_make_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_wheels, "EVERY_S", 0.0)
    setup_wheels.show_progress(["  [3/12] c++ a.cpp\n", "[ 50%] Building CXX object\n", "other\n"], tmp_path / "log")
    assert re.findall(r"(\d+) %", capsys.readouterr().out) == ["25", "50"]
    assert (tmp_path / "log").read_text().endswith("other\n")


# ---------------------------------------------------------------- wheels for a platform


def elf(align: int) -> bytes:
    """A header with one mapped segment, as in a 64-bit little-endian library."""
    head = b"\x7fELF\2\1" + bytes(26) + struct.pack("<QQIHHHHHH", 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return head + struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 0, 0, align)


def test_libraries_that_16_kib_pages_cannot_load_are_named() -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("small.so", elf(4096))
        archive.writestr("lib/large.so.1", elf(65536))
        archive.writestr("a.py", "")
    assert list(install_size.unloadable(packed.getvalue())) == ["small.so (4096)", ""]
    assert all(align >= 4096 for align in install_size.alignments(Path(sys.executable).read_bytes()))
