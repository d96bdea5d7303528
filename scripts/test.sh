#!/usr/bin/env bash
# Sets up, then checks everything: lint, format, types, all tests. Arguments go to pytest (-m 'not slow' for the fast ones).
source "$(dirname "$0")/setup.sh"
# The report is opened in a browser, and the kernels run on an emulated Cortex-A76, where these programs are there or can be
# installed; otherwise those tests are skipped.
wanted=()
command -v chromedriver >/dev/null || wanted+=(chromium chromium-driver)
command -v qemu-aarch64 >/dev/null && command -v aarch64-linux-gnu-g++ >/dev/null ||
  [ "$(uname -m)" = aarch64 ] || wanted+=(qemu-user g++-aarch64-linux-gnu)
if [ ${#wanted[@]} -gt 0 ] && command -v apt-get >/dev/null; then
  as_root=(env)
  [ "$(id -u)" = 0 ] || as_root=(sudo -n)
  if "${as_root[@]}" true 2>/dev/null; then
    say "installing ${wanted[*]}"
    { timeout 120 "${as_root[@]}" apt-get -qq update &&
      timeout 600 "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq install -y --no-install-recommends "${wanted[@]}"; } >/dev/null 2>&1 ||
      echo "they could not be installed: the tests that need them are skipped"
  fi
fi
say "lint and format"
ruff check .
ruff format --check .
say "types, here and on other systems"
mypy
for platform in darwin win32; do
  mypy --platform $platform --cache-dir .mypy_cache/$platform edgeft
done
say "tests"
python -m pytest "$@"
