"""Resident memory by stage and term, computed from what the code allocates; only library overhead is measured.

Resident memory is what the OS counts for a process: pages of a mapped file count from first use until released.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import repeat

from edgeft import methods
from edgeft.config import TENSORS, Recipe
from edgeft.engine.limits import HEAD_ROWS, LOGITS_BYTES
from edgeft.methods.base import Update
from edgeft.methods.scheme import Scheme
from edgeft.plan import limits
from edgeft.plan.buffers import TopPass
from edgeft.plan.flops import Pass
from edgeft.plan.rows import Workload
from edgeft.plan.shape import STATE_BYTES, Shape, trained_parameters, trained_tensors

MIB = 1 << 20
TERMS = (
    *("libraries", "packed frozen weights", "trained weights", "gradients", "optimiser state", "saved activations"),
    *("boundary states", "logits chunk", "unpack scratch", "data"),
)
# Pages of a file mapped by llama.cpp: resident while there is room, and no run needs memory for them.
EVICTABLE = "mapped file"

# Resident memory of a process before it has read a weight or a row, measured with torch 2.13 on x86-64.
PYTHON_BYTES = 75 * MIB  # stages without torch: Python, numpy, gguf, llama.cpp's library and its tokenizer
# With torch, its BLAS library's buffers, and the kernels. Measured 265 to 310: the OS maps more or fewer pages of a
# library around those that are touched.
LEAN_BYTES = 290 * MIB
TRANSFORMERS_BYTES = 480 * MIB  # with transformers and PEFT as well
LLAMA_BYTES = 30 * MIB  # llama.cpp while it runs a model
FAULT_BYTES = 64 << 10  # mapped around a touched page, where the page cache has it (fault-around)
INT8_BYTES = 1.4  # per value, at most: a byte, and of 32 a scale and sums
CACHED_BYTES = {"fp32": 4.0, "fp16": 2.0, "int8": 34 / 32}  # per value of the trunk cache
TOKEN_BYTES = 28  # per token in Python: ids and mask, path through the forest, nodes' tokens, parents, positions
ROW_BYTES = 2000
TEXT_BYTES = 40  # per token of a row whose text is loaded, too


@dataclass(frozen=True)
class EngineSpec:
    """edgeft's kernels or plain torch, and the operands of GEMMs."""

    kernels: bool
    products: str
    threads: int

    @property
    def half(self) -> bool:
        return self.products == "bf16"


@dataclass
class RunSpec:
    """What memory and time depend on."""

    recipe: Recipe
    shape: Shape
    load: Workload
    scheme: Scheme
    engine: EngineSpec
    exported_bytes: int

    @property
    def lean(self) -> bool:
        """The kernels run it without transformers."""
        return self.engine.kernels and not self.scheme.method.uses_peft and self.shape.lean

    @property
    def trained(self) -> int:
        """Trained parameters."""
        return trained_parameters(self.shape, self.scheme)

    @property
    def may_be_kept(self) -> bool:
        """Updates may be rounded onto the base's own types."""
        wanted = self.recipe.export.type
        small = self.shape.weights < limits.AUTO_KEEP_WEIGHTS
        asked = wanted == "keep" or (wanted == "auto" and small)
        return asked and not self.shape.dense and bool(self.scheme.updates)

    @property
    def weight_bytes(self) -> int:
        """Of all trained weights."""
        return weight_bytes(self.recipe, self.shape, self.scheme)


def stages(spec: RunSpec, budget_bytes: int) -> dict[str, dict[str, int]]:
    """Bytes by stage and term, at each stage's peak; trunk and train are one process."""
    by_stage: dict[str, dict[str, float]] = {
        "prepare": {"libraries": PYTHON_BYTES, "data": _data(spec.load, texts=True)},
        "trunk": _trunk(spec),
        "train": _train(spec),
        "export": _export(spec, budget_bytes),
        "eval": _eval(spec, budget_bytes),
    }
    if spec.scheme.cut == 0 or spec.recipe.how.trunk == "rerun":
        del by_stage["trunk"]
    return {stage: {term: int(terms.get(term, 0)) for term in (*TERMS, EVICTABLE)} for stage, terms in by_stage.items()}


def weight_bytes(recipe: Recipe, shape: Shape, scheme: Scheme) -> int:
    """Of all trained weights, and of the directions that gradients chose for low-rank updates."""
    every = scheme.method.weight_bytes * trained_parameters(shape, scheme)
    if not scheme.method.ranked:  # LoRA's are trained, those of lite branches from a seed
        every += 4 * sum(update.rank * shape.linear(tensor)[1] for (_, tensor), update in scheme.updates.items())
    in_bf16 = scheme.replaced if recipe.how.weights == "bf16" and scheme.method.bf16_weights else ()
    return every - 2 * sum(math.prod(shape.linear(tensor)) for _, tensor in in_bf16)


def average_bytes(recipe: Recipe, shape: Shape, scheme: Scheme) -> int:
    """Of `train.average`, beside the weights."""
    return 4 * trained_parameters(shape, scheme) if recipe.train.average else 0


def state_bytes(recipe: Recipe) -> float:
    """Optimiser state per trained parameter."""
    if recipe.train.optimizer == "adamw":
        return STATE_BYTES[recipe.how.optimizer_state]
    moment = methods.get(recipe.update.method).momentum_bytes(recipe.how.optimizer_state)
    return moment if recipe.train.momentum else 0


def active_share(scheme: Scheme) -> float:
    """Share of the trained parameters that have gradients and optimiser state at a time."""
    return min(1.0, scheme.cycle_blocks / len(scheme.blocks)) if scheme.cycle_blocks else 1.0


def peak(terms: dict[str, int]) -> int:
    """What a stage needs; its resident memory may be larger by the evictable pages."""
    return sum(size for term, size in terms.items() if term != EVICTABLE)


def _libraries(spec: RunSpec) -> int:
    return LEAN_BYTES if spec.lean else TRANSFORMERS_BYTES


def _data(load: Workload, texts: bool) -> int:
    tokens, rows = load.row_tokens + load.held_tokens, load.train_rows + load.heldout_rows
    return tokens * (TOKEN_BYTES + (TEXT_BYTES if texts else 0)) + rows * ROW_BYTES


def _weights(spec: RunSpec, running: range, release: bool) -> int:
    """Resident frozen weights while these blocks run: packed, or float32 copies with `dense`."""
    shape, scheme = spec.shape, spec.scheme
    if not shape.mapped:
        return shape.file_bytes
    tables = _tables(spec, release)
    if shape.dense:
        replaced = [shape.linear(tensor) for _, tensor in scheme.replaced]  # by trained weights
        return 4 * (shape.weights - sum(rows * cols for rows, cols in replaced)) + tables
    if release:
        return max((size for block in shape.blocks for size in block), default=0) + tables
    # fully trained weights were read once, and their pages released
    touched = {(block, tensor) for block in running for tensor in TENSORS} - scheme.replaced
    return sum(shape.packed_bytes(b, t) for b, t in touched) + tables


def _tables(spec: RunSpec, release: bool) -> int:
    """Embedding and head; of a mapped embedding, only the pages that the data's tokens touch."""
    shape = spec.shape
    if release:
        return (shape.head_bytes or shape.embedding_bytes) * HEAD_ROWS // max(shape.vocabulary, HEAD_ROWS)
    if not shape.head_bytes:
        return shape.embedding_bytes
    return shape.head_bytes + min(shape.embedding_bytes, spec.load.unique_tokens * FAULT_BYTES)


def _scratch(spec: RunSpec, tokens: int, back: bool = False, fp32: bool = False) -> int:
    """Buffers that products pack their operands into; they grow to the largest request, and are not freed.

    tokens: of a pass, where inputs are packed as well."""
    shape, engine = spec.shape, spec.engine
    head, largest = 4 * min(HEAD_ROWS, shape.vocabulary) * shape.width, max(r * c for _, r, c in shape.linears())
    widest = max(shape.ffn, shape.query, shape.width)
    if not engine.kernels:
        size = head if shape.dense else max(head, 4 * largest)
        if shape.mapped and not shape.dense:  # packed rows, reordered
            size += max((shape.packed_bytes(0, tensor) for tensor in shape.arch.interleaved), default=0)
        return size
    value_bytes = 2 if engine.half and not fp32 else 4
    size = max(head, value_bytes * largest)
    if engine.products == "int8" and not fp32:  # with scales
        size = max(size, int(INT8_BYTES * (largest + tokens * widest)))
    if back and any(spec.scheme.method.traits_of(update).dense for update in spec.scheme.updates.values()):
        inputs = value_bytes * tokens * (widest + (shape.ffn if engine.half else 0))  # of a weight's gradient
        size = max(size, inputs)
    if not shape.mapped or any(map(_unpacks, spec.scheme.updates.values(), repeat(spec.scheme.method))):
        size += value_bytes * largest  # dense, before it is packed
    return size


def _unpacks(update: Update, method: methods.Method) -> bool:
    """Products read a dense copy of the weight: some of its channels are trained, or it is int8."""
    traits = method.traits_of(update)
    return (update.share < 1 and not update.rank) or (traits.replaces_base and not traits.dense)


def _forward(shape: Shape, tokens: int) -> int:
    """Float32 activations of a block without gradient at its peak, between gate and down."""
    return 4 * tokens * (8 * shape.width + shape.query + 2 * shape.ffn)


def _trunk(spec: RunSpec) -> dict[str, float]:
    shape, scheme, how = spec.shape, spec.scheme, spec.recipe.how
    tokens = max((p.tokens for p in spec.load.trunk(how.micro_batch_tokens)), default=spec.load.longest)
    running = range(1) if how.trunk_order == "blocks" else range(scheme.cut)
    return {
        "libraries": _libraries(spec),
        "packed frozen weights": _weights(spec, running, how.spare_memory),
        "trained weights": spec.weight_bytes + average_bytes(spec.recipe, shape, scheme),
        "saved activations": _forward(shape, tokens),
        "boundary states": tokens * shape.width * (4 + CACHED_BYTES[how.trunk_dtype]),
        "unpack scratch": _scratch(spec, tokens),
        "data": _data(spec.load, texts=False),
    }


def _train(spec: RunSpec) -> dict[str, float]:
    shape, scheme, load, how = spec.shape, spec.scheme, spec.load, spec.recipe.how
    widest = load.widest(how.micro_batch_tokens)
    tensors = trained_tensors(shape, scheme)
    active = sum(tensors) * active_share(scheme)
    rows = LOGITS_BYTES // (4 * shape.vocabulary) or 1
    # validation's passes may be larger
    scored = max([widest.targets, *(part.targets for part in load.validation(how.micro_batch_tokens))])
    # a step in place holds one gradient at a time, unless gradients accumulate over micro-batches
    alone = how.step_in_place and all(len(step) <= 1 for step in load.passes(how.micro_batch_tokens))
    return {
        "libraries": _libraries(spec),
        "packed frozen weights": _weights(spec, range(scheme.cut, shape.depth), how.spare_memory),
        "trained weights": spec.weight_bytes + average_bytes(spec.recipe, shape, scheme),
        "gradients": 4 * (max(tensors) if alone else active),
        "optimiser state": state_bytes(spec.recipe) * active,
        "saved activations": _activations(spec, widest),
        "boundary states": widest.tokens * shape.width * (4 + CACHED_BYTES[how.trunk_dtype]),
        "logits chunk": 4 * shape.vocabulary * min(rows, scored) + 3 * 4 * widest.targets * shape.width,
        "unpack scratch": _scratch(spec, widest.tokens, back=True),
        "data": _data(load, texts=False),
    }


def _activations(spec: RunSpec, widest: Pass) -> int:
    """What one pass over the top saves for its backward pass, and its temporary buffers."""
    shape, scheme, recompute = spec.shape, spec.scheme, spec.recipe.how.recompute
    if spec.engine.kernels:
        return TopPass(shape, scheme, spec.engine.half, recompute).peak_bytes(widest)
    tokens = widest.tokens  # here the context is no less work
    # plain torch: q, k, v, the attention output twice (before and after heads are merged), gate, its activation, up,
    # and the input of down
    kept = 4 * shape.width + 3 * shape.query + 2 * shape.key + 4 * shape.ffn
    layers = max(sum(scheme.share(block, name) > 0 for name in TENSORS) for block in scheme.blocks)
    update = next(iter(scheme.updates.values()), Update())
    kept += layers * scheme.method.kept_by_torch(update, shape.width)
    blocks = shape.depth - scheme.cut
    return tokens * 4 * (blocks * shape.width + 2 * kept if recompute else (blocks + 1) * kept)


def _export(spec: RunSpec, budget_bytes: int) -> dict[str, float]:
    """The trainer's model stays loaded: it computes likelihoods, then llama.cpp runs the new file."""
    shape, load = spec.shape, spec.load
    tokens = min(limits.BATCH_TOKENS, limits.VERIFY_ROWS * load.longest)
    rows = min(limits.TARGETS, max(1, load.answer_tokens))
    checked = {
        "libraries": _libraries(spec) + LLAMA_BYTES,
        "packed frozen weights": _weights(spec, range(0), release=True),  # regardless of the recipe
        "trained weights": spec.weight_bytes,
        "saved activations": max(_forward(shape, tokens), _llama(shape, load.longest + 1, 0, budget_bytes)),
        "logits chunk": 2 * 4 * rows * shape.vocabulary + 3 * 8 * 4 * shape.vocabulary,
        "unpack scratch": _scratch(spec, tokens, fp32=True),
        "data": _data(load, texts=True) + min(limits.SPOOL_BYTES, spec.exported_bytes),
        EVICTABLE: spec.exported_bytes,
    }
    rounded = _rounding(spec) if spec.may_be_kept else {}
    return {what: max(count, rounded.get(what, 0)) for what, count in checked.items()}


def _rounding(spec: RunSpec) -> dict[str, float]:
    """`keep`: passes as in training over fewer tokens, whose inputs are multiplied with each other."""
    shape, train = spec.shape, _train(spec)
    widest = min(max(cols for _, _, cols in shape.linears()), limits.ROUND_WIDEST)
    states = 4 * limits.ROUND_TOKENS * shape.width
    kept = {what: train[what] for what in ("packed frozen weights", "logits chunk", "unpack scratch")}
    return kept | {"saved activations": train["saved activations"] / limits.ROUND_PARTS + states + 4 * 3 * widest**2}


def _eval(spec: RunSpec, budget_bytes: int) -> dict[str, float]:
    """Base and tuned model in llama.cpp, one after the other: the larger one."""
    shape, load, recipe = spec.shape, spec.load, spec.recipe
    if not shape.mapped:  # in the trainer
        return {
            "libraries": TRANSFORMERS_BYTES,
            "packed frozen weights": shape.file_bytes,
            "trained weights": spec.weight_bytes,
            "saved activations": _forward(shape, limits.SCORED_TOKENS),
            "logits chunk": 2 * LOGITS_BYTES,
            "data": _data(load, texts=True),
        }
    rows = min(recipe.eval.rows, load.heldout_rows)
    row = load.longest + recipe.eval.max_new_tokens
    unpacked = 2 * (shape.weights + shape.vocabulary * shape.width)
    tokens = load.held_tokens * rows // max(1, load.heldout_rows)
    copied = recipe.eval.unpack and shape.slow_types and tokens >= limits.MIN_TOKENS
    copied = copied and (not budget_bytes or unpacked <= limits.MEMORY_SHARE * budget_bytes)
    return {
        "libraries": PYTHON_BYTES + LLAMA_BYTES,
        "packed frozen weights": unpacked if copied else 0,
        "saved activations": _llama(shape, row, min(limits.CELLS, rows * row), budget_bytes),
        "data": _data(load, texts=True),
        EVICTABLE: 0 if copied else max(spec.exported_bytes, shape.file_bytes),
    }


def _llama(shape: Shape, required: int, preferred: int, budget_bytes: int) -> int:
    """llama.cpp's KV cache and compute buffers."""
    cell = 2 * 4 * shape.key * shape.depth
    room = min(limits.CACHE_BYTES, int(limits.CACHE_SHARE * (budget_bytes or 1 << 60)))
    cells = max(required, min(preferred, room // cell))
    cells += -cells % 256
    compute = 4 * limits.BATCH * (3 * shape.width + 2 * shape.ffn + shape.query)
    return cells * cell + compute + 2 * 4 * limits.OUTPUTS * shape.vocabulary


def boundary_bytes(spec: RunSpec) -> tuple[int, int]:
    """(trunk cache on disk, temporary files while it is written)."""
    width, tokens, how = spec.shape.width, spec.load.tree_tokens, spec.recipe.how
    temporary = 2 * 4 * width * tokens if how.trunk_order == "blocks" else 0
    return int(tokens * (width * CACHED_BYTES[how.trunk_dtype])), temporary
