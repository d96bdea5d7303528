"""Resident memory by stage and term, from what the code holds; only what libraries take is measured.

Resident is what the system counts for a process: pages of a mapped file are in it from their first use until they are
let go of.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from edgeft import methods
from edgeft.config import TENSORS, ExecutionConfig, Recipe
from edgeft.engine.limits import HEAD_ROWS, LOGITS_BYTES
from edgeft.methods.scheme import Scheme
from edgeft.plan.buffers import top_bytes
from edgeft.plan.limits import (
    BATCH,
    BATCH_TOKENS,
    CACHE_BYTES,
    CACHE_SHARE,
    CELLS,
    LEAST_TOKENS,
    MEMORY_SHARE,
    OUTPUTS,
    SCORED_TOKENS,
    SPOOL_BYTES,
    TARGETS,
)
from edgeft.plan.rows import Sizes, Workload
from edgeft.plan.shape import STATE_BYTES, Shape, trained_parameters, trained_tensors

MIB = 1 << 20

STAGES = ("prepare", "trunk", "train", "export", "eval")  # trunk and train are one process

TERMS = (
    *("libraries", "packed frozen weights", "trained weights", "gradients", "optimiser state", "saved activations"),
    *("boundary states", "logits chunk", "unpack scratch", "data"),
)

# Pages of a file that llama.cpp has mapped: they are in memory while there is room, and no run needs more for them.
GIVES_WAY = "mapped file"

# What a process holds before it has read a weight or a row, measured with torch 2.13 on x86-64.
PYTHON_BYTES = 75 * MIB  # Python, numpy, gguf, llama.cpp's library and its tokenizer: the stages without torch

# With torch, its matrix library's own buffers, and the kernels. 265 to 310 were seen: the system maps more or fewer
# pages of a library around those that are touched.
LEAN_BYTES = 290 * MIB

TRANSFORMERS_BYTES = 480 * MIB  # with transformers and PEFT besides

LLAMA_BYTES = 30 * MIB  # llama.cpp while it runs a model

HALF_BYTES = 25 * MIB  # code that the library makes for bf16 products,

# and keeps for every size of a pass, see block.padded: 0.6 MiB for each kind of product
SIZE_BYTES = 6 * MIB

LAST_BYTES = 4 * MIB  # for a size that only the last block has: fewer kinds

CHANNELS_BYTES = 7 * MIB  # besides Method.code_bytes, where some channels of a weight are trained,

SHARE_BYTES = 0.6 * MIB  # and for every further share of a tensor's channels that some block has

NO_SIZES = Sizes()

FAULT_BYTES = 64 << 10  # mapped around a page that is touched, where the system's cache has it

CACHED_BYTES = {"fp32": 4.0, "fp16": 2.0, "int8": 34 / 32}  # the trunk cache, a value of a state

# A row in Python: ids and mask, its path through the forest, its nodes' tokens, parents and positions.
TOKEN_BYTES = 28

ROW_BYTES = 2000

TEXT_BYTES = 40  # a token of a row that is there as text, too

VERIFY_ROWS = 12  # held-out rows on which an exported file is compared, as in pipeline.py


@dataclass(frozen=True)
class EngineSpec:
    """What computes: edgeft's kernels or plain torch, with bf16 products or without."""

    kernels: bool
    half: bool
    threads: int


def stages(
    shape: Shape,
    scheme: Scheme,
    recipe: Recipe,
    load: Workload,
    engine: EngineSpec,
    exported_bytes: int,
    budget_bytes: int,
) -> dict[str, dict[str, int]]:
    """Bytes by stage and term, at the peak of each."""
    found = {
        "prepare": _prepare(load),
        "trunk": _trunk(shape, scheme, recipe, load, engine),
        "train": _train(shape, scheme, recipe, load, engine),
        "export": _export(shape, scheme, recipe, load, engine, exported_bytes, budget_bytes),
        "eval": _eval(shape, scheme, recipe, load, max(exported_bytes, shape.file_bytes), budget_bytes),
    }
    if scheme.cut == 0 or recipe.how.trunk == "rerun":
        del found["trunk"]
    return {stage: {term: int(terms.get(term, 0)) for term in (*TERMS, GIVES_WAY)} for stage, terms in found.items()}


def weight_bytes(recipe: Recipe) -> int:
    """Of a trained number."""
    return methods.get(recipe.update.method).weight_bytes(recipe.update.rounding)


def state_bytes(recipe: Recipe) -> float:
    """Of a trained number, that the optimiser keeps."""
    if recipe.train.optimizer == "adamw":
        return STATE_BYTES[recipe.how.optimizer_state]
    moment = methods.get(recipe.update.method).momentum_bytes(recipe.how.optimizer_state)
    return moment if recipe.train.momentum else 0


def peak(terms: dict[str, int]) -> int:
    """What a stage must have; its resident memory may be larger by what gives way."""
    return sum(size for term, size in terms.items() if term != GIVES_WAY)


def libraries(shape: Shape, scheme: Scheme, engine: EngineSpec, sizes: Sizes = NO_SIZES) -> int:
    """sizes: of passes with bf16 products."""
    lean = engine.kernels and not scheme.method.uses_peft and shape.lean
    half = HALF_BYTES + _size_bytes(scheme) * sizes.whole + LAST_BYTES * sizes.asked if sizes.whole else 0
    return (LEAN_BYTES if lean else TRANSFORMERS_BYTES) + half


def _size_bytes(scheme: Scheme) -> int:
    if not scheme.shares:
        return SIZE_BYTES
    shares = {(tensor, share) for (_, tensor), share in scheme.shares.items()}
    further = len(shares) - len({tensor for tensor, _ in shares})
    partial = CHANNELS_BYTES + int(SHARE_BYTES * further) if any(share < 1 for _, share in shares) else 0
    return SIZE_BYTES + scheme.method.code_bytes + partial


def _data(load: Workload, texts: bool) -> int:
    tokens, rows = load.row_tokens + load.held_tokens, load.train_rows + load.heldout_rows
    return tokens * (TOKEN_BYTES + (TEXT_BYTES if texts else 0)) + rows * ROW_BYTES


def _embedding(shape: Shape, load: Workload) -> int:
    """Pages of its rows that the data's tokens touch."""
    return min(shape.embedding_bytes, load.unique_tokens * FAULT_BYTES) if shape.mapped else shape.embedding_bytes


def _largest(shape: Shape) -> int:
    """Values of the largest linear."""
    return max(rows * cols for _, rows, cols in shape.linears())


def _largest_packed(shape: Shape) -> int:
    return max((size for block in shape.blocks for size in block), default=0)


def _weights(shape: Shape, scheme: Scheme, how: ExecutionConfig, load: Workload, running: range) -> int:
    """Frozen weights in memory while these blocks run: as stored, and of `dense` ones float32 copies besides."""
    if not shape.mapped:
        return shape.file_bytes
    if shape.dense:
        whole = [t for b in scheme.blocks for t in TENSORS if scheme.share(b, t) >= 1 and scheme.method.dense]
        replaced = sum(rows * cols for rows, cols in map(shape.linear, whole))  # by the trained weights
        dense = 4 * (shape.depth * shape.block_parameters - replaced)
        return dense + _tables(shape, load, how)
    if how.spare_memory:
        return _largest_packed(shape) + _tables(shape, load, how)
    touched = {(block, tensor) for block in running for tensor in TENSORS}
    if scheme.method.replaces_base:  # what is trained as a whole was read once, and its pages released
        touched -= {(b, t) for b in scheme.blocks for t in TENSORS if scheme.share(b, t) >= 1}
    return sum(shape.packed_bytes(b, t) for b, t in touched) + _tables(shape, load, how)


def _tables(shape: Shape, load: Workload, how: ExecutionConfig) -> int:
    if how.spare_memory:
        return (shape.head_bytes or shape.embedding_bytes) * HEAD_ROWS // max(shape.vocabulary, HEAD_ROWS)
    return shape.head_bytes + _embedding(shape, load) if shape.head_bytes else shape.embedding_bytes


def _scratch(shape: Shape, engine: EngineSpec, trunk: bool) -> int:
    """Buffers for one unpacked weight; they grow to the largest that was asked for, and stay."""
    head = 4 * min(HEAD_ROWS, shape.vocabulary) * shape.width
    if shape.dense:
        return head
    wide = trunk or not engine.half or not shape.kernel_types  # in float32
    found = max(head, (4 if wide else 2) * _largest(shape))
    if engine.half and not shape.kernel_types:  # then to bf16
        found += 2 * _largest(shape)
    if shape.mapped:  # packed rows, put in order
        found += max((shape.packed_bytes(0, tensor) for tensor in shape.arch.interleaved), default=0)
    return found


def _forward(shape: Shape, tokens: int) -> int:
    """Float32 values that a block without gradient holds at its widest place, between gate and down."""
    return 4 * tokens * (8 * shape.width + shape.query + 2 * shape.ffn)


def _prepare(load: Workload) -> dict[str, float]:
    return {"libraries": PYTHON_BYTES, "data": _data(load, texts=True)}


def _trunk(shape: Shape, scheme: Scheme, recipe: Recipe, load: Workload, engine: EngineSpec) -> dict[str, float]:
    how = recipe.how
    tokens = max((one.tokens for one in load.trunk(how.micro_batch_tokens)), default=load.longest)
    running = range(1) if how.trunk_order == "blocks" else range(scheme.cut)
    return {
        "libraries": libraries(shape, scheme, engine),  # its products are float32
        "packed frozen weights": _weights(shape, scheme, how, load, running),
        "trained weights": weight_bytes(recipe) * trained_parameters(shape, scheme),
        "saved activations": _forward(shape, tokens),
        "boundary states": tokens * shape.width * (4 + CACHED_BYTES[how.trunk_dtype]),
        "unpack scratch": _scratch(shape, engine, trunk=True),
        "data": _data(load, texts=False),
    }


def _train(shape: Shape, scheme: Scheme, recipe: Recipe, load: Workload, engine: EngineSpec) -> dict[str, float]:
    how = recipe.how
    widest = load.widest(how.micro_batch_tokens)
    sizes = trained_tensors(shape, scheme)
    trained, largest = sum(sizes), max(sizes)
    turns = recipe.update.cycle_blocks  # gradients and moments of these alone
    active = trained * min(1.0, turns / len(scheme.blocks)) if turns else trained
    rows = LOGITS_BYTES // (4 * shape.vocabulary) or 1
    # in place there are no others, unless those of earlier passes wait for the last
    alone = how.step_in_place and all(len(step) <= 1 for step in load.passes(how.micro_batch_tokens))
    scratch = _scratch(shape, engine, trunk=scheme.cut > 0)
    if engine.half:  # a trained weight as a product reads it, and a gradient as a product gives it
        scratch += 2 * 2 * largest
    return {
        "libraries": libraries(shape, scheme, engine, load.sizes(how.micro_batch_tokens) if engine.half else NO_SIZES),
        "packed frozen weights": _weights(shape, scheme, how, load, range(scheme.cut, shape.depth)),
        "trained weights": weight_bytes(recipe) * trained,
        "gradients": 4 * (largest if alone else active),
        "optimiser state": state_bytes(recipe) * active,
        "saved activations": activations(shape, scheme, recipe, widest.tokens, widest.asked, engine),
        "boundary states": widest.tokens * shape.width * (4 + CACHED_BYTES[how.trunk_dtype]),
        "logits chunk": 4 * shape.vocabulary * min(rows, widest.targets) + 3 * 4 * widest.targets * shape.width,
        "unpack scratch": scratch,
        "data": _data(load, texts=False),
    }


def activations(shape: Shape, scheme: Scheme, recipe: Recipe, tokens: int, asked: int, engine: EngineSpec) -> int:
    """What one pass over the top keeps for its way back, and what it needs on the way."""
    how = recipe.how
    if engine.kernels:
        share = recipe.train.token_share
        kept = tokens if share >= 1 else min(tokens, max(asked, round(share * tokens)))
        pool, beside = top_bytes(shape, scheme, kept, asked, engine.half, how.recompute, engine.threads)
        return pool + beside + (_forward(shape, tokens) if kept < tokens else 0)
    # plain torch: q k v and the attention's output twice (before and after the heads are put together), gate, its
    # activation, up, and what down reads
    kept = 4 * shape.width + 3 * shape.query + 2 * shape.key + 4 * shape.ffn
    layers = max(sum(scheme.share(block, name) > 0 for name in TENSORS) for block in scheme.blocks)
    kept += layers * scheme.method.kept_by_torch(scheme, shape.width)
    blocks = shape.depth - scheme.cut
    return tokens * 4 * (blocks * shape.width + 2 * kept if how.recompute else (blocks + 1) * kept)


def _export(
    shape: Shape,
    scheme: Scheme,
    recipe: Recipe,
    load: Workload,
    engine: EngineSpec,
    exported_bytes: int,
    budget_bytes: int,
) -> dict[str, float]:
    """The trainer's model is there, first to say what it holds for likely, then beside llama.cpp with the new file."""
    tokens = min(BATCH_TOKENS, VERIFY_ROWS * load.longest)
    rows = min(TARGETS, max(1, load.answer_tokens))
    return {
        "libraries": libraries(shape, scheme, engine) + LLAMA_BYTES,
        "packed frozen weights": _weights(shape, scheme, _spare(recipe.how), load, range(0)),
        "trained weights": weight_bytes(recipe) * trained_parameters(shape, scheme),
        "saved activations": max(_forward(shape, tokens), _llama(shape, load.longest + 1, 0, budget_bytes)),
        "logits chunk": 2 * 4 * rows * shape.vocabulary + 3 * 8 * 4 * shape.vocabulary,
        "unpack scratch": _scratch(shape, engine, trunk=True),
        "data": _data(load, texts=True) + min(SPOOL_BYTES, exported_bytes),
        GIVES_WAY: exported_bytes,
    }


def _eval(
    shape: Shape, scheme: Scheme, recipe: Recipe, load: Workload, model_bytes: int, budget_bytes: int
) -> dict[str, float]:
    """Base and tuned model in llama.cpp, one after the other; the larger counts."""
    if not shape.mapped:  # in the trainer
        return {
            "libraries": TRANSFORMERS_BYTES,
            "packed frozen weights": shape.file_bytes,
            "trained weights": weight_bytes(recipe) * trained_parameters(shape, scheme),
            "saved activations": _forward(shape, SCORED_TOKENS),
            "logits chunk": 2 * LOGITS_BYTES,
            "data": _data(load, texts=True),
        }
    rows = min(recipe.eval.rows, load.heldout_rows)
    row = load.longest + recipe.eval.max_new_tokens
    wide = 2 * (shape.depth * shape.block_parameters + shape.vocabulary * shape.width)
    tokens = load.held_tokens * rows // max(1, load.heldout_rows)
    copied = recipe.eval.unpack and shape.slow_types and tokens >= LEAST_TOKENS
    copied = copied and (not budget_bytes or wide <= MEMORY_SHARE * budget_bytes)
    return {
        "libraries": PYTHON_BYTES + LLAMA_BYTES,
        "packed frozen weights": wide if copied else 0,
        "saved activations": _llama(shape, row, min(CELLS, rows * row), budget_bytes),
        "data": _data(load, texts=True),
        GIVES_WAY: 0 if copied else model_bytes,
    }


def _llama(shape: Shape, needed: int, wished: int, budget_bytes: int) -> int:
    """llama.cpp's keys and values, and the buffers of one of its passes."""
    room = budget_bytes or 1 << 60
    cell = 2 * 4 * shape.key * shape.depth
    cells = max(needed, min(wished, min(CACHE_BYTES, int(CACHE_SHARE * room)) // cell))
    cells += -cells % 256
    compute = 4 * BATCH * (3 * shape.width + 2 * shape.ffn + shape.query)
    return cells * cell + compute + 2 * 4 * OUTPUTS * shape.vocabulary


def _spare(how: ExecutionConfig) -> ExecutionConfig:
    """The export stage lets go of every page at once, whatever the recipe says."""
    return dataclasses.replace(how, spare_memory=True)


def boundary_bytes(shape: Shape, recipe: Recipe, load: Workload) -> tuple[int, int]:
    """(the trunk cache on the disk, files beside it while it is made)."""
    each = shape.width * CACHED_BYTES[recipe.how.trunk_dtype]
    between = 2 * 4 * shape.width * load.tree_tokens if recipe.how.trunk_order == "blocks" else 0
    return int(load.tree_tokens * each), between
