#!/usr/bin/env python3
"""Megabytes to download for edgeft on a Linux machine: every package that pip would install there, the largest first.

    scripts/bench/install_size.py [--machine aarch64] [--python 3.11] [--extra demo] [--pages]

pip resolves with the markers and tags of that machine, on whatever runs this script. A package without a wheel there is
marked `source`; what only its build needs is not counted. --pages downloads the wheels, too, and names the libraries
that a kernel with pages of 16 KiB (the Raspberry Pi 5's) cannot load.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import struct
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]
GLIBC = range(5, 37)  # tags manylinux_2_N, up to Debian bookworm's
PAGE_BYTES = 16 << 10
LOAD = 1  # type of a segment that is mapped
# pip reads markers from the machine that it runs on, whatever --platform says, and forbids source packages with it.
PIP = """
import json, sys
from pip._internal.cli import cmdoptions
from pip._internal.cli.main import main
from pip._vendor.packaging import markers
there = {**markers.default_environment(), **json.loads(sys.argv.pop(1))}
markers.default_environment = lambda: dict(there)
cmdoptions.check_dist_restriction = lambda *args, **options: None
sys.exit(main(sys.argv[1:]))
"""


def resolve(requirement: str, machine: str, python: str) -> list[dict[str, Any]]:
    """What pip would install: its own report."""
    there = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": machine}
    there |= {"python_version": python, "python_full_version": f"{python}.0"}
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC] + [
        f"manylinux{n}_{machine}" for n in (1, 2010, 2014)
    ]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        call = [sys.executable, "-c", PIP, json.dumps(there), "install", "--quiet", "--dry-run", "--ignore-installed"]
        call += ["--report", str(report), "--target", folder, "--implementation", "cp", "--python-version", python]
        call += [part for name in platforms for part in ("--platform", name)]
        done = subprocess.run([*call, requirement], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        return list(json.loads(report.read_text(encoding="utf-8"))["install"])


def size(url: str) -> int:
    if url.startswith("file:"):
        return os.stat(urllib.request.url2pathname(url.removeprefix("file://"))).st_size
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as answer:
        return int(answer.headers["Content-Length"])


def alignments(library: bytes) -> list[int]:
    """Of the segments that are mapped; empty for what is no 64-bit little-endian ELF file."""
    if library[:6] != b"\x7fELF\2\1":
        return []
    (begin,), (step, count) = struct.unpack_from("<Q", library, 32), struct.unpack_from("<HH", library, 54)
    at = [begin + i * step for i in range(count)]
    return [struct.unpack_from("<Q", library, i + 48)[0] for i in at if struct.unpack_from("<I", library, i)[0] == LOAD]


def unloadable(wheel: bytes) -> Iterator[str]:
    """Names of the wheel's libraries with a segment that is aligned to less than a page, and `` for each other one."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        for name in archive.namelist():
            if name.endswith(".so") or ".so." in name:
                smallest = min(alignments(archive.read(name)), default=PAGE_BYTES)
                yield f"{name} ({smallest})" if smallest < PAGE_BYTES else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="aarch64", choices=["aarch64", "x86_64"])
    parser.add_argument("--python", default="3.11")
    parser.add_argument("--extra", default="demo", help="extras of edgeft, by commas; '' for none")
    parser.add_argument("--pages", action="store_true")
    args = parser.parse_args()
    found = resolve(f"{TOP}[{args.extra}]" if args.extra else str(TOP), args.machine, args.python)
    files = [(package["metadata"], package["download_info"]["url"]) for package in found]
    files = [(package, url) for package, url in files if package["name"] != "edgeft"]
    sizes = {url: size(url) for _, url in files}
    for package, url in sorted(files, key=lambda file: -sizes[file[1]]):
        note = "" if url.endswith(".whl") else "  source"
        print(f"{sizes[url] / 1e6:8.2f}  {package['name']} {package['version']}{note}")
    wheels = sum(bytes for url, bytes in sizes.items() if url.endswith(".whl"))
    print(f"{wheels / 1e6:8.2f}  wheels\n{sum(sizes.values()) / 1e6:8.2f}  with source packages")
    if args.pages:
        checked: list[str] = []
        for url in sizes:
            if url.endswith(".whl") and not url.endswith("none-any.whl"):
                with urllib.request.urlopen(url) as answer:
                    checked += unloadable(answer.read())
        bad = [name for name in checked if name]
        print(
            f"libraries with segments aligned to less than {PAGE_BYTES} bytes: {len(bad)} of {len(checked)}",
            *bad,
            sep="\n",
        )


if __name__ == "__main__":
    main()
