"""Batch and buffer sizes that the stages use and the plan counts; no torch."""

BATCH = 256  # max tokens of a llama_decode call; more are hardly faster and need larger buffers
OUTPUTS = 64  # max logits of a call (4 bytes × vocabulary each); llama.cpp needs at least one per sequence
CELLS = 4096  # max KV cells, each for one token of one or several rows, unless a single row needs more
CACHE_BYTES = 256 << 20  # of the KV cache: fewer cells for large models
CACHE_SHARE = 0.1  # of the memory limit: the KV cache's limit
MIN_TOKENS = 1000  # fewer tokens do not pay for a copy with fast types
MEMORY_SHARE = 0.25  # of the memory limit: such a copy must never cause swapping
SPOOL_BYTES = 8 << 20  # packed updates are buffered in memory up to here, then in a temporary file
BATCH_TOKENS = 1024  # tokens per batch in the trainer; shared prefixes count once
TARGETS = 32  # positions compared per row, spread evenly: 32 x 150,000 logits are 20 MB
SCORED_TOKENS = 2048  # in one pass, as in evaluate/stack_scorer.py
EVAL_MIN_ROWS = 24  # scored at the end of a run whatever the time limit: fewer decide little
VERIFY_ROWS = 12  # held-out rows on which an exported file is verified

# Weights of all blocks from which on `export.type: auto` does not round: Qwen2.5-1.5B takes 8 minutes and 3.7 GiB
AUTO_KEEP_WEIGHTS = 500_000_000
# `export.type: keep`: tokens of training rows whose inputs the rounding is for, how many times smaller than
# training's its passes are, so that it stays below training's memory, and the steps of its last phase
ROUND_TOKENS = 2048
ROUND_WIDEST = 2048  # inputs whose products with each other are in memory: of 8,960 they would be 320 MB
ROUND_PARTS = 2
LAST_STEPS_SHARE, MIN_LAST_STEPS, MAX_LAST_STEPS = 0.125, 12, 40


def last_steps(steps: int) -> int:
    """Of the last phase, after so many steps of training."""
    return max(MIN_LAST_STEPS, min(MAX_LAST_STEPS, round(LAST_STEPS_SHARE * steps)))


def round_part_tokens(micro_batch_tokens: int) -> int:
    return max(1, micro_batch_tokens // ROUND_PARTS)
