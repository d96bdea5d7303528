"""The probe and the doctor, driven with file trees of other machines and run on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgeft.config import ExecutionConfig, build
from edgeft.engine import compiled, trial
from edgeft.host import device, doctor, limit, sensors
from edgeft.host.device import load_device
from tests.conftest import Edgeft
from tests.support.machine import tree

GIB = 2**30
NO_LIMIT = 9223372036854771712  # what version 1 control groups say when there is none
V1_CPU = "sys/fs/cgroup/cpu/b/cpu.cfs"
V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def meminfo(total: int, available: int) -> str:
    return f"MemTotal: {total >> 10} kB\nMemFree: 1024 kB\nMemAvailable: {available >> 10} kB\nSwapTotal: 99999999 kB\n"


def v1(controller: str, at: str = "/") -> str:
    return f"35 31 0:32 {at} /sys/fs/cgroup/{controller} rw - cgroup cgroup rw,{controller}\n"


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("files", "limit", "available"),
    [
        ({}, None, 6 * GIB),
        # version 2: own group, parents, memory.high; "max" is no limit
        ({"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": V2}, None, 6 * GIB),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "proc/self/mountinfo": V2,
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/memory.max": 3 * GIB,
                "sys/fs/cgroup/a/memory.current": 2 * GIB,
                "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            3 * GIB,
            2 * GIB,  # 3 - (2 - 1 of cache)
        ),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "proc/self/mountinfo": V2,
                "sys/fs/cgroup/a/b/memory.max": 4 * GIB,
                "sys/fs/cgroup/a/b/memory.high": 2 * GIB,
                "sys/fs/cgroup/a/b/memory.current": 5 * GIB,
            },
            2 * GIB,
            0,
        ),
        # a limit above the physical memory is none
        (
            {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2, "sys/fs/cgroup/a/memory.max": 9 * GIB},
            None,
            6 * GIB,
        ),
        # moved out of its namespace: the mount point is all there is to see
        (
            {"proc/self/cgroup": "0::/../x\n", "proc/self/mountinfo": V2, "sys/fs/cgroup/memory.max": 1 * GIB},
            1 * GIB,
            1 * GIB,
        ),
        # version 1: own group and parents
        (
            {
                "proc/self/cgroup": "4:memory:/a/b\n1:cpu:/z\n0::/\n",
                "proc/self/mountinfo": v1("cpu") + v1("memory"),
                "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": NO_LIMIT,
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": 5 * GIB,
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": 1 * GIB,
            },
            5 * GIB,
            4 * GIB,
        ),
        # version 1: a parent that cannot be seen from inside, in a mount that begins at the container's group
        (
            {
                "proc/self/cgroup": "4:memory:/docker/id\n",
                "proc/self/mountinfo": v1("memory", at="/docker/id"),
                "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
                "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {2 * GIB}\ntotal_inactive_file 7\n",
            },
            2 * GIB,
            2 * GIB,
        ),
        # a group of the same beginning is not a parent
        (
            {
                "proc/self/cgroup": "4:memory:/docker/id2\n",
                "proc/self/mountinfo": v1("memory", at="/docker/id"),
                "sys/fs/cgroup/memory/2/memory.limit_in_bytes": 1 * GIB,
            },
            None,
            6 * GIB,
        ),
    ],
)
def test_memory(tmp_path: Path, files: dict[str, str | int], limit: int | None, available: int) -> None:
    root = tree(tmp_path, {"proc/meminfo": meminfo(8 * GIB, 6 * GIB), **files})
    found = device.memory(root)
    assert found == device.Memory(8 * GIB, limit, available)
    assert found.ram_bytes == (limit or 8 * GIB)  # swap is not in it
    auto = device.this_machine(root)
    assert auto.ram_bytes == found.ram_bytes
    assert auto.budget_bytes == found.ram_bytes * 3 // 4


def test_memory_without_proc_comes_from_psutil(tmp_path: Path) -> None:
    import psutil

    found = device.memory(tmp_path)
    assert found.physical_bytes == psutil.virtual_memory().total
    assert 0 < found.available_bytes <= found.physical_bytes
    assert found.limit_bytes is None


# ---------------------------------------------------------------- cores


@pytest.mark.parametrize(
    ("cpus", "siblings", "files", "count"),
    [
        ({0, 1, 2, 3}, {}, {}, 4),
        ({2, 3}, {}, {}, 2),  # taskset, cpuset
        ({0, 1, 2, 3}, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, {}, 2),  # hyper-threads
        ({0, 1}, {0: "0,2", 1: "1,3"}, {}, 2),
        ({0, 1, 2, 3}, {}, {"sys/fs/cgroup/a/cpu.max": "200000 100000\n"}, 2),
        ({0, 1, 2, 3}, {}, {"sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 2),
        ({0, 1, 2, 3}, {}, {"sys/fs/cgroup/a/cpu.max": "max 100000\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        ({0, 1}, {}, {"sys/fs/cgroup/a/cpu.max": "800000 100000\n"}, 2),
        ({0, 1, 2, 3}, {}, {f"{V1_CPU}_quota_us": 300000, f"{V1_CPU}_period_us": 100000}, 3),
        ({0, 1, 2, 3}, {}, {f"{V1_CPU}_quota_us": -1, f"{V1_CPU}_period_us": 100000}, 4),
    ],
)
def test_cores(
    tmp_path: Path, cpus: set[int], siblings: dict[int, str], files: dict[str, str | int], count: int
) -> None:
    topology = {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": s for n, s in siblings.items()}
    groups = {"proc/self/cgroup": "2:cpu,cpuacct:/b\n0::/a\n", "proc/self/mountinfo": V2 + v1("cpu")}
    assert device.cores(tree(tmp_path, {**groups, **topology, **files}), cpus) == count


def test_this_machine() -> None:
    auto = load_device("auto")
    assert auto.name == "auto"
    assert 1 <= auto.cores <= (os.cpu_count() or 1)
    assert 0 < auto.budget_bytes < auto.ram_bytes
    assert build(ExecutionConfig, auto.how).threads == auto.cores


def test_probe_follows_the_affinity_of_the_process() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no CPU affinity")
    one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    code = f"{one}\nfrom edgeft.host.device import cores; print(cores())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


@pytest.mark.parametrize("module", ["edgeft.host.device", "edgeft.host.doctor", "edgeft.config"])
def test_heavy_libraries_are_imported_late(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numpy', 'psutil') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---------------------------------------------------------------- CPU

PI5 = "processor\t: 0\nFeatures\t: fp asimd asimdhp asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0b\n\n"
INTEL = "processor\t: 0\nmodel name\t: Intel(R) Core(TM) i5\nflags\t\t: fpu sse avx2 avx512f avx512_vnni\n\n"
BIG_LITTLE = PI5 + PI5.replace("0xd0b", "0xd05")
NEW_ARM = "processor\t: 0\nFeatures\t: asimd asimddp i8mm sve\nCPU implementer\t: 0x41\nCPU part\t: 0xfff\n\n"


@pytest.mark.parametrize(
    ("cpuinfo", "name", "simd"),
    [
        (PI5 * 4 + "Revision\t: d04170\nModel\t: Raspberry Pi 5\n", "Cortex-A76", ["NEON", "dotprod"]),
        (INTEL * 2, "Intel(R) Core(TM) i5", ["AVX2", "AVX512", "VNNI"]),
        (BIG_LITTLE, "Cortex-A76 + Cortex-A55", ["NEON", "dotprod"]),
        (NEW_ARM, "ARM 0x41:0xfff", ["NEON", "dotprod", "i8mm", "SVE"]),
        ("model name : AMD\nflags : avx2 avx_vnni amx_int8\n", "AMD", ["AVX2", "VNNI", "AMX"]),
        ("model name : old\nflags : sse\n", "old", []),
    ],
)
def test_cpu(tmp_path: Path, cpuinfo: str, name: str, simd: list[str]) -> None:
    root = tree(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert device.cpu_name(root) == name
    assert doctor.simd(root) == simd


def test_apple_silicon() -> None:
    said = (
        "hw.optional.neon: 1\nhw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: 0\nhw.optional.AdvSIMD: 1\n"
    )
    words = doctor._apple_words(said)
    assert [name for name, any_of in doctor.SIMD.items() if words & set(any_of)] == ["NEON", "dotprod"]


# ---------------------------------------------------------------- sensors and disks


def test_temperatures(tmp_path: Path) -> None:
    zone, hwmon = "sys/class/thermal/thermal_zone", "sys/class/hwmon/hwmon"
    root = tree(
        tmp_path,
        {
            f"{zone}0/type": "cpu-thermal\n",
            f"{zone}0/temp": 52300,
            f"{zone}0/trip_point_0_type": "passive\n",
            f"{zone}0/trip_point_0_temp": 80000,
            f"{zone}0/trip_point_1_type": "critical\n",
            f"{zone}0/trip_point_1_temp": 110000,
            f"{zone}1/type": "cv0-thermal\n",
            f"{zone}1/temp": -256000,  # switched off
            f"{zone}2/type": "silent\n",  # gives nothing at all
            f"{hwmon}0/name": "cpu_thermal\n",  # the first zone once more
            f"{hwmon}0/temp1_input": 52300,
            f"{hwmon}1/name": "nvme\n",
            f"{hwmon}1/temp1_input": 41850,
            f"{hwmon}1/temp1_label": "Composite\n",
            f"{hwmon}1/temp1_crit": 84850,
        },
    )
    assert sensors.temperatures(root) == [
        {"sensor": "cpu-thermal", "celsius": 52.3, "critical": 110.0},
        {"sensor": "nvme Composite", "celsius": 41.85, "critical": 84.85},
    ]
    assert sensors.temperatures(tmp_path / "nothing") == []


def test_power(tmp_path: Path) -> None:
    supply = "sys/class/power_supply"
    root = tree(
        tmp_path,
        {
            f"{supply}/AC/type": "Mains\n",
            f"{supply}/AC/online": 0,
            f"{supply}/BAT0/type": "Battery\n",
            f"{supply}/BAT0/capacity": 81,
            f"{supply}/BAT0/status": "Discharging\n",
            f"{supply}/BAT0/charge_now": 4_000_000,  # µAh
            f"{supply}/BAT0/voltage_now": 11_500_000,  # µV
            f"{supply}/BAT1/type": "Battery\n",
            f"{supply}/BAT1/energy_now": 20_540_000,  # µWh
            f"{supply}/mouse/type": "Battery\n",
            f"{supply}/mouse/scope": "Device\n",
            f"{supply}/ucsi/type": "USB\n",
            f"{supply}/ucsi/online": 1,
        },
    )
    assert sensors.power(root) == {
        "plugged": True,
        "batteries": [
            {"name": "BAT0", "percent": 81, "status": "Discharging", "energy_wh": 46.0},
            {"name": "BAT1", "percent": None, "status": None, "energy_wh": 20.5},
        ],
    }
    (root / supply / "ucsi/online").write_text("0\n")
    assert sensors.power(root)["plugged"] is False
    assert sensors.power(tmp_path / "nothing") == {"plugged": None, "batteries": []}


@pytest.mark.skipif(sys.platform != "linux", reason="psutil lists Linux's folder")
def test_power_without_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where /sys is not mounted: psutil fails there."""
    monkeypatch.setattr("psutil._pslinux.POWER_SUPPLY_PATH", str(tmp_path / "power_supply"))
    monkeypatch.setattr(sensors, "ROOT", tmp_path)
    assert sensors.power(tmp_path) == {"plugged": None, "batteries": []}


@pytest.mark.parametrize(
    ("mount", "block", "files", "kind"),
    [
        ("179:2 / / rw - ext4 /dev/root rw", "mmc0/block/mmcblk0/mmcblk0p2", {"../device/type": "SD\n"}, "SD card"),
        ("179:2 / / rw - ext4 /dev/root rw", "mmc0/block/mmcblk0/mmcblk0p2", {"../device/type": "MMC\n"}, "eMMC"),
        ("259:2 / / rw - ext4 /dev/nvme0n1p2 rw", "nvme/nvme0/nvme0n1/nvme0n1p2", {}, "NVMe"),
        ("8:1 / / rw - ext4 /dev/sda1 rw", "ata1/block/sda/sda1", {"../queue/rotational": 1}, "hard disk"),
        ("8:1 / / rw - ext4 /dev/sda1 rw", "ata1/block/sda/sda1", {"../queue/rotational": 0}, "SSD"),
        ("8:1 / / rw - ext4 /dev/sda1 rw", "pci/usb2/2-1/block/sda/sda1", {"../queue/rotational": 0}, "USB disk"),
        ("8:1 / / rw - ext4 /dev/sda1 rw", "ata1/block/sda/sda1", {}, None),
        ("254:0 / / rw - ext4 /dev/vda rw", "virtio1/block/vda", {"queue/rotational": 1}, "virtual disk"),
        ("0:40 / / rw - tmpfs tmpfs rw", None, {}, "memory"),
        ("0:41 / / rw - nfs4 server:/home rw", None, {}, "network"),
        ("0:42 / / rw - overlay overlay rw", None, {}, None),
    ],
)
def test_disk_kind(
    tmp_path: Path, mount: str, block: str | None, files: dict[str, str | int], kind: str | None
) -> None:
    root = tree(tmp_path, {"proc/self/mountinfo": f"27 1 {mount}\n"})
    if block:
        folder = root / "sys/devices" / block
        folder.mkdir(parents=True)
        if ".." in "".join(files) or folder.name[-2:] in ("p2", "a1"):
            (folder / "partition").write_text("1\n")
        tree(root, {os.path.normpath(f"sys/devices/{block}/{name}"): text for name, text in files.items()})
        link = root / "sys/dev/block" / mount.split()[0]
        link.parent.mkdir(parents=True)
        link.symlink_to(Path("../../devices") / block)
    assert doctor.disk_kind(Path("/home/pi/run"), root) == kind


def test_disk_kind_goes_through_encryption_and_takes_the_nearest_mount(tmp_path: Path) -> None:
    lines = [
        "1 0 0:5 / / rw - tmpfs tmpfs rw",
        "2 1 0:30 /@home /home rw - btrfs /dev/mapper/crypt rw",  # btrfs: a number that is no block device's
        "3 1 0:6 / /home2 rw - nfs4 server:/ rw",
        "5 1 0:8 / /home2 rw - tmpfs tmpfs rw",  # mounted over the one before
        "4 1 0:7 / /my\\040disk rw - nfs4 server:/ rw",
    ]
    root = tree(tmp_path, {"proc/self/mountinfo": "\n".join(lines)})
    dm, nvme = root / "sys/devices/virtual/block/dm-0", root / "sys/devices/pci/nvme0n1/nvme0n1p3"
    (dm / "slaves").mkdir(parents=True)
    tree(nvme, {"partition": 3})
    (dm / "slaves/nvme0n1p3").symlink_to(nvme)
    names = root / "sys/class/block"
    names.mkdir(parents=True)
    (names / "crypt").symlink_to(dm)
    assert doctor.disk_kind(Path("/home/me"), root) == "NVMe"
    assert doctor.disk_kind(Path("/home"), root) == "NVMe"
    assert doctor.disk_kind(Path("/home2/me"), root) == "memory"
    assert doctor.disk_kind(Path("/my disk/me"), root) == "network"


# ---------------------------------------------------------------- which profile


@pytest.mark.parametrize(
    ("model", "ram_gib", "name"),
    [
        ("Raspberry Pi 5 Model B Rev 1.0\0", 7.87, "rpi5"),
        ("Raspberry Pi 5 Model B Rev 1.1\0", 15.8, "rpi5-16gb"),
        ("Raspberry Pi 5 Model B Rev 1.0\0", 3.9, "auto"),
        ("Raspberry Pi Compute Module 5 Rev 1.0\0", 7.87, "rpi5"),
        ("Raspberry Pi 500 Rev 1.0\0", 7.87, "rpi5"),
        ("Raspberry Pi 4 Model B Rev 1.4\0", 3.79, "rpi4"),
        ("Raspberry Pi 4 Model B Rev 1.4\0", 7.7, "auto"),
        ("Raspberry Pi 400 Rev 1.0\0", 3.79, "rpi4"),
        ("Raspberry Pi 3 Model B Plus Rev 1.3\0", 0.9, "auto"),
        ("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0", 7.44, "jetson-orin-nano"),
        ("NVIDIA Jetson AGX Orin\0", 30.0, "auto"),
        (None, 7.8, "auto"),
    ],
)
def test_profile(tmp_path: Path, model: str | None, ram_gib: float, name: str) -> None:
    root = tree(tmp_path, {"proc/meminfo": meminfo(int(ram_gib * GIB), GIB)})
    if model:
        tree(root, {"proc/device-tree/model": model})
    picked = doctor.pick_profile(root)
    assert picked["name"] == name
    assert picked["reason"]
    assert "\0" not in picked["reason"]
    if model and any(known in model for known in ("Pi 5", "Pi 4", "Orin Nano")):
        assert model.rstrip("\0") in picked["reason"]
        assert f"{ram_gib:.1f} GiB" in picked["reason"]


def test_profile_in_a_small_container_is_auto(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": meminfo(8 * GIB, 6 * GIB),
            "proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0",
            "proc/self/cgroup": "0::/a\n",
            "proc/self/mountinfo": V2,
            "sys/fs/cgroup/a/memory.max": 2 * GIB,
        },
    )
    assert doctor.pick_profile(root)["name"] == "auto"


# ---------------------------------------------------------------- measured rates


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("EDGEFT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "TRIAL_S", 0.01)
    return tmp_path / "cache/edgeft/gemm.json"


def test_rates_are_measured_once(cache: Path) -> None:
    assert device.this_machine().gemm_gflops == 0.0  # not known yet, and not guessed
    rates = doctor.gemm_rates()
    assert rates["fp32"] > 0.1
    assert set(rates) <= {"fp32", "bf16", "fp16", "int8"}
    key = device.gemm_key(device.cpu_name(), device.cores())
    assert json.loads(cache.read_text()) == {key: rates}
    assert [p.name for p in cache.parent.iterdir()] == ["gemm.json"]

    cache.write_text(json.dumps({key: {"fp32": 12345.0}, "another machine": {"fp32": 1.0}}))
    assert doctor.gemm_rates() == {"fp32": 12345.0}  # read, not measured
    assert device.this_machine().gemm_gflops == 12345.0
    fresh = doctor.gemm_rates(refresh=True)
    assert fresh["fp32"] != 12345.0
    assert json.loads(cache.read_text()) == {key: fresh, "another machine": {"fp32": 1.0}}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "[" * 100000, '{"KEY": 3}', '{"KEY": {}}', '{"KEY": {"fp32": "x"}}',
     '{"KEY": {"fp32": NaN}}', '{"KEY": {"fp32": -1}}', '{"KEY": {"fp32": true}}', '{"KEY": {"fp32": Infinity}}'],
)  # fmt: skip
def test_damaged_cache_is_measured_again(cache: Path, text: str) -> None:
    key = device.gemm_key(device.cpu_name(), 1)
    cache.parent.mkdir(parents=True)
    cache.write_text(text.replace("KEY", key))
    assert device.read_gemm_cache() == {}
    rates = doctor.gemm_rates(threads=1)
    assert json.loads(cache.read_text()) == {key: rates}


def test_bytes_a_second_are_measured_once(cache: Path) -> None:
    rates = doctor.byte_rates(threads=1)
    assert rates["copy"] > 0.1
    assert rates["write"] > 0
    assert json.loads(cache.read_text()) == {device.bytes_key(device.cpu_name(), 1): rates}
    assert [p.name for p in cache.parent.iterdir()] == ["gemm.json"]
    assert doctor.byte_rates(threads=1) == rates
    assert device.this_machine().gemm_gflops == 0.0


def test_cache_that_cannot_be_written(cache: Path) -> None:
    cache.parent.parent.write_text("a file where the folder should be")
    assert doctor.gemm_rates(threads=1)["fp32"] > 0


def test_cache_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEFT_CACHE", str(tmp_path / "mine"))
    assert device.gemm_cache() == tmp_path / "mine/gemm.json"
    monkeypatch.delenv("EDGEFT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says to ignore it
    assert device.gemm_cache() == tmp_path / ".cache/edgeft/gemm.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert device.gemm_cache() == tmp_path / ".cache/edgeft/gemm.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert device.gemm_cache() == Path("/elsewhere/edgeft/gemm.json")


def test_measuring_leaves_threads_and_seeds_alone(cache: Path) -> None:
    import torch

    before = torch.get_num_threads()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    doctor.measure_gemm(1)
    assert torch.get_num_threads() == before
    assert torch.equal(torch.rand(3), expected)


# ---------------------------------------------------------------- the whole


def test_examine_this_machine(cache: Path, tmp_path: Path) -> None:
    report = doctor.examine(folder=tmp_path)
    assert json.loads(json.dumps(report)) == report  # plain values only
    assert report["gemm"]["gflops"]["fp32"] > 0
    assert report["gemm"]["fastest"] in ("fp32", "bf16", "fp16")
    assert report["gemm"]["error"] is None
    assert report["memory"]["ram_bytes"] == load_device("auto").ram_bytes
    assert report["disk"]["folder"] == str(tmp_path.resolve())
    assert report["disk"]["free_bytes"] > 0
    assert report["versions"]["torch"]
    assert report["versions"]["python"].startswith("3.")
    assert report["accelerator"]["kind"] in ("none", "cuda", "mps")
    assert load_device(report["profile"]["name"]).budget_bytes > 0
    missing = {row["what"] for row in report["unavailable"]}
    assert ("control groups" in missing) == (not limit.can_make_group())
    assert ("temperatures" in missing) == (not report["temperatures"])


def test_examine_a_pi(cache: Path, tmp_path: Path) -> None:
    root = tree(
        tmp_path / "pi",
        {
            "proc/meminfo": meminfo(int(7.87 * GIB), 6 * GIB),
            "proc/cpuinfo": PI5 * 4,
            "proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0",
            "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
            "sys/class/thermal/thermal_zone0/temp": 48000,
        },
    )
    report = doctor.examine(root, tmp_path)
    assert report["system"]["board"] == "Raspberry Pi 5 Model B Rev 1.0"
    assert report["cpu"]["name"] == "Cortex-A76"
    assert report["profile"]["name"] == "rpi5"
    assert report["temperatures"][0]["celsius"] == 48.0
    assert [row["what"] for row in report["unavailable"]] == ["control groups"]
    (root / "sys/class/thermal/thermal_zone0/temp").unlink()
    assert [row["what"] for row in doctor.unavailable(root)] == ["control groups", "temperatures"]


def test_examine_with_a_broken_torch(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libgomp.so.1: cannot open shared object file\\nmore')")
    code = "import json; from edgeft.host.doctor import examine; print(json.dumps(examine()))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["gemm"]["error"] == "torch cannot be loaded: libgomp.so.1: cannot open shared object file"
    assert report["gemm"]["gflops"] == {}
    assert report["memory"]["ram_bytes"] > 0


def test_compiler_comes_from_cxx_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "my c++"
    own.write_text('#!/bin/sh\necho "mine 1.0 $1"\necho more\n')
    own.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{own}' -Wall")
    assert doctor.compiler() == {"path": str(own), "version": "mine 1.0 -Wall"}
    own.write_text("#!/bin/sh\nexit 1\n")  # the stub of a system without its developer tools
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert doctor.compiler() is None
    monkeypatch.setenv("CXX", "'unclosed")
    assert doctor.compiler() is None


def test_doctor_tells_of_a_compiler_that_does_not_compile(
    edgeft: Edgeft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("EDGEFT_CACHE", str(tmp_path))
    result = edgeft("doctor", "--json")
    assert result.returncode == 0, result.stderr
    machine = json.loads(result.stdout)
    assert machine["products"] == {}
    assert any(row["what"] == "kernels" and "/bin/false" in row["why"] for row in machine["unavailable"])


def test_damaged_rates_of_products_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    key = device.products_key(device.cpu_name(), device.cores())
    monkeypatch.setattr(device, "read_gemm_cache", lambda: {key: {"x": 1.0, "fp32 forward q4_k 768x768": 5.0}})
    assert compiled.mean_rates(device.read_gemm_cache()[key]) == {"fp32": 5.0}
    assert compiled.fastest_products() in ("fp32", "bf16", "int8")
    assert set(trial.measured()) == {"fp32 forward q4_k 768x768"}
