# Sourced by the other scripts: makes or reuses .venv with everything that edgeft needs.
# Needs Python 3.10 or newer and a C++ compiler: llama.cpp is compiled, once for all virtual environments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }
fail() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 1; }

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "there is no $python" "install Python 3.10 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  fail "$("$python" --version) is too old" "install Python 3.10 or newer, or set PYTHON=/path/to/python3"
command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
  fail "there is no C++ compiler" "install g++ (Debian: apt install g++) or Apple's command line tools"

stamp=$(cat pyproject.toml | cksum)
if [ ! -x .venv/bin/edgeft ] || [ "$(cat .venv/.edgeft-setup 2>/dev/null)" != "$stamp" ]; then
  say "setting up .venv"
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --upgrade pip
  .venv/bin/python scripts/setup_wheels.py  # torch without CUDA, llama.cpp
  echo "downloading and installing the other packages"
  .venv/bin/python -m pip install --quiet -e '.[demo,dev]'
  printf '%s' "$stamp" > .venv/.edgeft-setup
else
  say "using .venv as it is"
fi
export PATH="$PWD/.venv/bin:$PATH"
