"""Batch and buffer sizes that the stages keep to and the plan counts on; no torch."""

BATCH = 256  # most tokens in one call of llama_decode; more are hardly faster, and their buffers grow
OUTPUTS = 64  # most logits of one call (4 bytes × vocabulary each); llama.cpp wants at least as many as sequences
CELLS = 4096  # most KV cells, each for one token of one or several rows, unless one row alone needs more
CACHE_BYTES = 256 << 20  # of the KV cache: fewer cells for large models
CACHE_SHARE = 0.1  # of the memory that may be used: the KV cache's limit
LEAST_TOKENS = 1000  # fewer are read before the copy with fast types is made
MEMORY_SHARE = 0.25  # of the memory that may be used: such a copy is never worth swapping
SPOOL_BYTES = 8 << 20  # packed updates wait in memory up to here, beyond it in a nameless file
BATCH_TOKENS = 1024  # tokens that run through the trainer at a time; shared prefixes count once
TARGETS = 32  # positions compared per row, spread evenly: 32 x 150,000 logits are 20 MB
SCORED_TOKENS = 2048  # in one pass, as in evaluate/trainer.py
