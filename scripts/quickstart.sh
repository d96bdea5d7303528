#!/usr/bin/env bash
# From a fresh clone to a fine-tuned GGUF file: sets up, fine-tunes the embedded model on the embedded handbook,
# exports, measures before and after on held-out wordings with llama.cpp, and asks the exported file a question.
source "$(dirname "$0")/setup.sh"
run=runs/quickstart
resume=$([ -f $run/recipe.yaml ] && echo --resume || true)

say "fine-tune, export, evaluate before and after: edgeft finetune --recipe sparse-bp --out $run $resume"
edgeft finetune --recipe sparse-bp --out $run $resume
say "ask the exported file: edgeft chat $run --prompt …"
question="Where is the serial number printed on an Ostrel?"
printf '> %s\n' "$question"
edgeft chat $run --prompt "$question"
