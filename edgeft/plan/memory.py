"""Resident memory by stage and term, from what the code holds; only what libraries take is measured.

Resident is what the system counts for a process: pages of a mapped file count from their first use until released.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeft import methods
from edgeft.config import TENSORS, Recipe
from edgeft.engine.limits import HEAD_ROWS, LOGITS_BYTES
from edgeft.methods.scheme import Scheme
from edgeft.plan import limits
from edgeft.plan.buffers import Top
from edgeft.plan.rows import Sizes, Workload
from edgeft.plan.shape import STATE_BYTES, Shape, trained_parameters, trained_tensors

MIB = 1 << 20
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
SIZE_BYTES = 6 * MIB  # and keeps for every size of a pass, see block.padded: 0.6 MiB for each kind of product
LAST_BYTES = 4 * MIB  # for a size that only the last block has: fewer kinds
CHANNELS_BYTES = 7 * MIB  # besides Method.code_bytes, where some channels of a weight are trained,
SHARE_BYTES = 0.6 * MIB  # and for every further share of a tensor's channels that some block has
FAULT_BYTES = 64 << 10  # mapped around a page that is touched, where the system's cache has it
CACHED_BYTES = {"fp32": 4.0, "fp16": 2.0, "int8": 34 / 32}  # the trunk cache, a value of a state
TOKEN_BYTES = 28  # of a row in Python: ids and mask, its path through the forest, nodes' tokens, parents, positions
ROW_BYTES = 2000
TEXT_BYTES = 40  # a token of a row that is there as text, too
VERIFY_ROWS = 12  # held-out rows on which an exported file is compared


@dataclass(frozen=True)
class EngineSpec:
    """What computes: edgeft's kernels or plain torch, with bf16 products or without."""

    kernels: bool
    half: bool
    threads: int


@dataclass
class RunSpec:
    """What memory and time are computed from."""

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
        """Trained numbers."""
        return trained_parameters(self.shape, self.scheme)

    @property
    def weight_bytes(self) -> int:
        """Of all trained weights."""
        return methods.get(self.recipe.update.method).weight_bytes * self.trained


def stages(spec: RunSpec, budget_bytes: int) -> dict[str, dict[str, int]]:
    """Bytes by stage and term, at the peak of each; trunk and train are one process."""
    every: dict[str, dict[str, float]] = {
        "prepare": {"libraries": PYTHON_BYTES, "data": _data(spec.load, texts=True)},
        "trunk": _trunk(spec),
        "train": _train(spec),
        "export": _export(spec, budget_bytes),
        "eval": _eval(spec, budget_bytes),
    }
    if spec.scheme.cut == 0 or spec.recipe.how.trunk == "rerun":
        del every["trunk"]
    return {stage: {term: int(terms.get(term, 0)) for term in (*TERMS, GIVES_WAY)} for stage, terms in every.items()}


def state_bytes(recipe: Recipe) -> float:
    """Of a trained number, that the optimiser keeps."""
    if recipe.train.optimizer == "adamw":
        return STATE_BYTES[recipe.how.optimizer_state]
    moment = methods.get(recipe.update.method).momentum_bytes(recipe.how.optimizer_state)
    return moment if recipe.train.momentum else 0


def peak(terms: dict[str, int]) -> int:
    """What a stage must have; its resident memory may be larger by what gives way."""
    return sum(size for term, size in terms.items() if term != GIVES_WAY)


def _libraries(spec: RunSpec, sizes: Sizes | None = None) -> int:
    """sizes: of passes with bf16 products."""
    size = LEAN_BYTES if spec.lean else TRANSFORMERS_BYTES
    if sizes and sizes.whole:
        size += HALF_BYTES + _size_bytes(spec.scheme) * sizes.whole + LAST_BYTES * sizes.asked
    return size


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


def _weights(spec: RunSpec, running: range, release: bool) -> int:
    """Frozen weights in memory while these blocks run: as stored, and of `dense` ones float32 copies besides."""
    shape, scheme = spec.shape, spec.scheme
    if not shape.mapped:
        return shape.file_bytes
    tables, whole = _tables(spec, release), {(b, t) for (b, t), share in scheme.shares.items() if share >= 1}
    if shape.dense:
        replaced = [shape.linear(tensor) for _, tensor in whole if scheme.method.dense]  # by the trained weights
        return 4 * (shape.depth * shape.block_parameters - sum(rows * cols for rows, cols in replaced)) + tables
    if release:
        return max((size for block in shape.blocks for size in block), default=0) + tables
    touched = {(block, tensor) for block in running for tensor in TENSORS}
    if scheme.method.replaces_base:  # what is trained as a whole was read once, and its pages released
        touched -= whole
    return sum(shape.packed_bytes(b, t) for b, t in touched) + tables


def _tables(spec: RunSpec, release: bool) -> int:
    """Embedding and head; of a mapped embedding, the pages of rows that the data's tokens touch."""
    shape = spec.shape
    if release:
        return (shape.head_bytes or shape.embedding_bytes) * HEAD_ROWS // max(shape.vocabulary, HEAD_ROWS)
    if not shape.head_bytes:
        return shape.embedding_bytes
    return shape.head_bytes + min(shape.embedding_bytes, spec.load.unique_tokens * FAULT_BYTES)


def _scratch(shape: Shape, engine: EngineSpec, trunk: bool) -> int:
    """Buffers for one unpacked weight; they grow to the largest that was asked for, and stay."""
    head, largest = 4 * min(HEAD_ROWS, shape.vocabulary) * shape.width, max(r * c for _, r, c in shape.linears())
    if shape.dense:
        return head
    wide = trunk or not engine.half or not shape.kernel_types  # in float32
    size = max(head, (4 if wide else 2) * largest)
    if engine.half and not shape.kernel_types:  # then to bf16
        size += 2 * largest
    if shape.mapped:  # packed rows, put in order
        size += max((shape.packed_bytes(0, tensor) for tensor in shape.arch.interleaved), default=0)
    return size


def _forward(shape: Shape, tokens: int) -> int:
    """Float32 values that a block without gradient holds at its widest place, between gate and down."""
    return 4 * tokens * (8 * shape.width + shape.query + 2 * shape.ffn)


def _trunk(spec: RunSpec) -> dict[str, float]:
    shape, how = spec.shape, spec.recipe.how
    tokens = max((one.tokens for one in spec.load.trunk(how.micro_batch_tokens)), default=spec.load.longest)
    running = range(1) if how.trunk_order == "blocks" else range(spec.scheme.cut)
    return {
        "libraries": _libraries(spec),  # its products are float32
        "packed frozen weights": _weights(spec, running, how.spare_memory),
        "trained weights": spec.weight_bytes,
        "saved activations": _forward(shape, tokens),
        "boundary states": tokens * shape.width * (4 + CACHED_BYTES[how.trunk_dtype]),
        "unpack scratch": _scratch(shape, spec.engine, trunk=True),
        "data": _data(spec.load, texts=False),
    }


def _train(spec: RunSpec) -> dict[str, float]:
    shape, scheme, load, how = spec.shape, spec.scheme, spec.load, spec.recipe.how
    widest = load.widest(how.micro_batch_tokens)
    tensors = trained_tensors(shape, scheme)
    turns = spec.recipe.update.cycle_blocks  # gradients and moments of these alone
    active = sum(tensors) * min(1.0, turns / len(scheme.blocks)) if turns else sum(tensors)
    rows = LOGITS_BYTES // (4 * shape.vocabulary) or 1
    # in place there are no others, unless those of earlier passes wait for the last
    alone = how.step_in_place and all(len(step) <= 1 for step in load.passes(how.micro_batch_tokens))
    scratch = _scratch(shape, spec.engine, trunk=scheme.cut > 0)
    if spec.engine.half:  # a trained weight as a product reads it, and a gradient as a product gives it
        scratch += 2 * 2 * max(tensors)
    return {
        "libraries": _libraries(spec, load.sizes(how.micro_batch_tokens) if spec.engine.half else None),
        "packed frozen weights": _weights(spec, range(scheme.cut, shape.depth), how.spare_memory),
        "trained weights": spec.weight_bytes,
        "gradients": 4 * (max(tensors) if alone else active),
        "optimiser state": state_bytes(spec.recipe) * active,
        "saved activations": _activations(spec, widest.tokens, widest.asked),
        "boundary states": widest.tokens * shape.width * (4 + CACHED_BYTES[how.trunk_dtype]),
        "logits chunk": 4 * shape.vocabulary * min(rows, widest.targets) + 3 * 4 * widest.targets * shape.width,
        "unpack scratch": scratch,
        "data": _data(load, texts=False),
    }


def _activations(spec: RunSpec, tokens: int, asked: int) -> int:
    """What one pass over the top keeps for its backward pass, and its temporary buffers."""
    shape, scheme, recompute = spec.shape, spec.scheme, spec.recipe.how.recompute
    if spec.engine.kernels:
        return Top(shape, scheme, spec.engine.half, spec.engine.threads, recompute).peak_bytes(tokens, asked)
    # plain torch: q k v and the attention's output twice (before and after the heads are put together), gate, its
    # activation, up, and what down reads
    kept = 4 * shape.width + 3 * shape.query + 2 * shape.key + 4 * shape.ffn
    layers = max(sum(scheme.share(block, name) > 0 for name in TENSORS) for block in scheme.blocks)
    kept += layers * scheme.method.kept_by_torch(scheme, shape.width)
    blocks = shape.depth - scheme.cut
    return tokens * 4 * (blocks * shape.width + 2 * kept if recompute else (blocks + 1) * kept)


def _export(spec: RunSpec, budget_bytes: int) -> dict[str, float]:
    """The trainer's model is there, first to compute its likelihoods, then beside llama.cpp with the new file."""
    shape, load = spec.shape, spec.load
    tokens = min(limits.BATCH_TOKENS, VERIFY_ROWS * load.longest)
    rows = min(limits.TARGETS, max(1, load.answer_tokens))
    return {
        "libraries": _libraries(spec) + LLAMA_BYTES,
        "packed frozen weights": _weights(spec, range(0), release=True),  # always, whatever the recipe says
        "trained weights": spec.weight_bytes,
        "saved activations": max(_forward(shape, tokens), _llama(shape, load.longest + 1, 0, budget_bytes)),
        "logits chunk": 2 * 4 * rows * shape.vocabulary + 3 * 8 * 4 * shape.vocabulary,
        "unpack scratch": _scratch(shape, spec.engine, trunk=True),
        "data": _data(load, texts=True) + min(limits.SPOOL_BYTES, spec.exported_bytes),
        GIVES_WAY: spec.exported_bytes,
    }


def _eval(spec: RunSpec, budget_bytes: int) -> dict[str, float]:
    """Base and tuned model in llama.cpp, one after the other; the larger counts."""
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
    wide = 2 * (shape.depth * shape.block_parameters + shape.vocabulary * shape.width)
    tokens = load.held_tokens * rows // max(1, load.heldout_rows)
    copied = recipe.eval.unpack and shape.slow_types and tokens >= limits.LEAST_TOKENS
    copied = copied and (not budget_bytes or wide <= limits.MEMORY_SHARE * budget_bytes)
    return {
        "libraries": PYTHON_BYTES + LLAMA_BYTES,
        "packed frozen weights": wide if copied else 0,
        "saved activations": _llama(shape, row, min(limits.CELLS, rows * row), budget_bytes),
        "data": _data(load, texts=True),
        GIVES_WAY: 0 if copied else max(spec.exported_bytes, shape.file_bytes),
    }


def _llama(shape: Shape, needed: int, wished: int, budget_bytes: int) -> int:
    """llama.cpp's KV cache, and the buffers of one of its passes."""
    cell = 2 * 4 * shape.key * shape.depth
    room = min(limits.CACHE_BYTES, int(limits.CACHE_SHARE * (budget_bytes or 1 << 60)))
    cells = max(needed, min(wished, room // cell))
    cells += -cells % 256
    compute = 4 * limits.BATCH * (3 * shape.width + 2 * shape.ffn + shape.query)
    return cells * cell + compute + 2 * 4 * limits.OUTPUTS * shape.vocabulary


def boundary_bytes(spec: RunSpec) -> tuple[int, int]:
    """(the trunk cache on the disk, files beside it while it is made)."""
    width, tokens, how = spec.shape.width, spec.load.tree_tokens, spec.recipe.how
    between = 2 * 4 * width * tokens if how.trunk_order == "blocks" else 0
    return int(tokens * (width * CACHED_BYTES[how.trunk_dtype])), between
