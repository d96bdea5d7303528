#!/usr/bin/env bash
# Sets up, then checks everything: lint, format, types, all tests. Arguments go to pytest (-m 'not slow' for the fast ones).
source "$(dirname "$0")/setup.sh"
say "lint and format"
ruff check .
ruff format --check .
say "types"
mypy
say "tests"
python -m pytest "$@"
