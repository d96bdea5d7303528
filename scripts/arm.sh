#!/usr/bin/env bash
# edgeft on an emulated Raspberry Pi 5, on any x86 Debian: an arm64 Debian in a folder, edgeft and its packages' aarch64 builds
# in it, the fast tests and a few steps as Cortex-A76, and the same steps here.
#
#   scripts/arm.sh [FOLDER]      # default ~/.cache/edgeft-arm; 5 GB; the first time about an hour, the tests several
#
# As root (chroot). A stage that is done leaves FOLDER/NAME.done and is not repeated; its output is in FOLDER/NAME.log.
# Not part of the test command. Afterwards: umount FOLDER/root/{proc,sys,dev/shm} before FOLDER is deleted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(realpath -m "${1:-$HOME/.cache/edgeft-arm}")
root=$folder/root
python=${PYTHON:-$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || echo python3)}
repository=$PWD
export PYTHONPATH=$repository
[ "$(id -u)" = 0 ] || { echo "error: a root folder needs root"; echo "hint: sudo scripts/arm.sh"; exit 1; } >&2
mkdir -p "$folder"

# stage NAME "what it does" FUNCTION: one line, unless it is done
stage() {
  if [ -e "$folder/$1.done" ]; then
    echo "$1: done before"
    return
  fi
  local begin=$SECONDS
  printf '%s: %s … ' "$1" "$2"
  if ! "$3" >"$folder/$1.log" 2>&1; then
    echo "failed"
    tail -n 5 "$folder/$1.log" >&2
    echo "hint: the whole output is in $folder/$1.log" >&2
    exit 1
  fi
  touch "$folder/$1.done"
  echo "$((SECONDS - begin)) s"
}

# a command on the emulated board
board() {
  mountpoint -q "$root/proc" || mount -t proc proc "$root/proc"
  mountpoint -q "$root/sys" || mount -t sysfs -o ro sysfs "$root/sys"
  mountpoint -q "$root/dev/shm" || { mkdir -p "$root/dev/shm" && mount -t tmpfs tmpfs "$root/dev/shm"; }
  chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/bin:/bin:/usr/sbin:/sbin LANG=C.UTF-8 TERM=dumb \
    QEMU_CPU=cortex-a76 EDGEFT_CACHE=/cache PYTHONDONTWRITEBYTECODE=1 \
    bash -c "cd /edgeft && $1"
}

tools() {
  apt-get -q update
  DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends \
    debootstrap qemu-user-static binfmt-support g++-aarch64-linux-gnu cmake ninja-build
}

system() {
  mountpoint -q /proc/sys/fs/binfmt_misc || mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
  update-binfmts --enable qemu-aarch64
  rm -rf "$root"
  debootstrap --arch=arm64 --variant=minbase --include=python3,python3-dev,python3-venv,g++,git,procps,libgomp1 \
    bookworm "$root"
}

# llama-cpp-python's own build, with the cross compiler: a wheel with aarch64 libraries
llama() {
  mkdir -p "$folder/wheels" "$folder/llama"
  rm -f "$folder"/llama/*.whl
  local flags="-mcpu=cortex-a76" # has dot products and half precision
  CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc \
    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_C_FLAGS=$flags -DCMAKE_CXX_FLAGS=$flags -DGGML_NATIVE=OFF \
    -DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16 -DGGML_OPENMP=OFF -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF" \
    "$python" -m pip wheel --no-deps --no-cache-dir --no-binary llama-cpp-python -w "$folder/llama" llama-cpp-python
  "$python" -m pip install -q --target "$folder/tags" wheel
  PYTHONPATH=$folder/tags "$python" -m wheel tags --remove --platform-tag manylinux_2_28_aarch64 "$folder"/llama/*.whl
  mv "$folder"/llama/*.whl "$folder/wheels"
}

# aarch64 builds of everything, unpacked by this machine's pip
packages() {
  local platform
  rm -rf "$folder/packages" "$root/packages"
  for platform in manylinux2014 manylinux_2_17 manylinux_2_24 manylinux_2_26 manylinux_2_27 manylinux_2_28 manylinux_2_31 manylinux_2_34; do
    echo "--platform=${platform}_aarch64"
  done >"$folder/platforms"
  "$python" -m pip wheel -q --no-deps -w "$folder/edgeft" .
  # pip asks this machine what a requirement's `platform_machine` is, whatever --platform says
  cat >"$folder/pip_aarch64.py" <<'END'
import platform, sys

platform.machine = lambda: "aarch64"
from pip._internal.cli.main import main

sys.exit(main())
END
  # shellcheck disable=SC2046
  "$python" "$folder/pip_aarch64.py" install --target "$folder/packages" --only-binary=:all: $(cat "$folder/platforms") --python-version 3.11 \
    --implementation cp --abi cp311 --abi abi3 --abi none --no-compile --find-links "$folder/wheels" \
    "$(echo "$folder"/edgeft/edgeft-*.whl)[demo]" pytest pytest-xdist hypothesis selenium
  rm -rf "$folder"/packages/edgeft "$folder"/packages/edgeft-*
  mv "$folder/packages" "$root"
  # not PYTHONPATH: some tests start Python without it
  printf '/edgeft\n/packages\n' >"$root/usr/lib/python3/dist-packages/edgeft.pth"
}

# the files of this checkout
copy() {
  rm -rf "$root/edgeft"
  mkdir -p "$root/edgeft"
  git -C "$repository" ls-files -z | tar -C "$repository" --null -T - -cf - | tar -C "$root/edgeft" -xf -
}

tests() { board "python3 -m pytest -v -n $(nproc) --dist loadfile -m 'not slow' -p no:cacheprovider ${TESTS:-}"; }

# The same five steps in float32 on both sides, one file each
steps="--recipe sparse-rule --until export --threads 2 --set train.steps=5 --set train.batch_rows=4 \
  --set data.rows=40 --set data.heldout_rows=16 --set how.products=fp32 --set how.compile=on"
question="Where is the serial number printed on an Ostrel?"
steps_here() {
  rm -rf "$folder/run"
  # shellcheck disable=SC2086
  "$python" -m edgeft finetune $steps --out "$folder/run"
}
steps_there() { board "rm -rf /run5 && python3 -m edgeft finetune $steps --out /run5"; }

across() {
  local run
  rm -rf "$root/here" && cp -r "$folder/run" "$root/here"
  for run in "$folder/run" "$root/run5"; do "$python" -m edgeft chat "$run" --max-tokens 16 --prompt "$question"; done >"$folder/answers.here"
  board "for run in /here /run5; do python3 -m edgeft chat \$run --max-tokens 16 --prompt '$question'; done" >"$folder/answers.there"
  diff "$folder/answers.here" "$folder/answers.there"
}

table() {
  "$python" - "$folder" <<'END'
import json, pathlib, sys

folder = pathlib.Path(sys.argv[1])

def losses(run):
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]

here, there = losses(folder / "run"), losses(folder / "root/run5")
print("\n| step | loss here | Cortex-A76 | relative difference |\n| --- | --- | --- | --- |")
for step, (x, y) in enumerate(zip(here, there, strict=True), 1):
    print(f"| {step} | {x:.6f} | {y:.6f} | {abs(x - y) / x:.1e} |")
print("\nexported files asked on both sides: the same answers")
tests = folder / "tests.log"
print("fast tests: " + (tests.read_text().splitlines()[-1] if tests.is_file() else "not run"))
END
}

stage tools "Debian's packages" tools
stage system "an arm64 Debian" system
stage llama "llama.cpp for Cortex-A76" llama
stage packages "aarch64 packages" packages
copy
stage here "five steps here" steps_here
stage there "five steps there" steps_there
stage across "each side asks both files" across
stage tests "fast tests there" tests
table
