#!/usr/bin/env bash
# Sets up, then checks everything: lint, format, types, all tests. Arguments go to pytest (-m 'not slow' for the fast ones).
source "$(dirname "$0")/setup.sh"
# The report is opened in a browser where there is one, or one can be installed; otherwise those tests are skipped.
if ! command -v chromedriver >/dev/null && command -v apt-get >/dev/null; then
  as_root=(env)
  [ "$(id -u)" = 0 ] || as_root=(sudo -n)
  if "${as_root[@]}" true 2>/dev/null; then
    say "installing chromium"
    { timeout 120 "${as_root[@]}" apt-get -qq update &&
      timeout 300 "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq install -y --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 ||
      echo "it could not be installed: no test will open the report"
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
