#!/usr/bin/env bash
# From a fresh clone to a fine-tuned GGUF file: sets up, fine-tunes the embedded model on the embedded handbook,
# exports, measures before and after on held-out wordings, and asks the exported file a question.
source "$(dirname "$0")/setup.sh"
run=runs/quickstart
resume=$([ -f $run/recipe.yaml ] && echo --resume || true)

say "1. fine-tune (edgeft finetune --recipe sparse-bp --out $run --until train)"
edgeft finetune --recipe sparse-bp --out $run --until train $resume
say "2. export to GGUF, checked in llama.cpp (edgeft export $run)"
edgeft export $run
say "3. before and after, on wordings that were held out (edgeft eval $run/model.gguf)"
edgeft eval $run/model.gguf
say "4. ask the exported file (edgeft chat $run --prompt …)"
question="Where is the serial number printed on an Ostrel?"
printf '> %s\n' "$question"
edgeft chat $run --prompt "$question"
