#!/usr/bin/env bash
# For a Raspberry Pi, or any board: what it is, its products, a short quickstart, and the trunk beside llama.cpp's prefill.
# Prints one table to paste into an issue; about ten minutes on a Pi 5. Arguments go to board.py.
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
say "measuring; leave the board alone meanwhile"
python scripts/bench/board.py "$@"
