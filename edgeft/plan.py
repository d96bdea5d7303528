"""What a run will need in memory, term by term, and how to make it fit a device.

Only *how* is chosen here (micro-batch, recomputation); *what* is learned is never changed, it is refused.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from edgeft.config import TENSORS, HowConfig, Recipe
from edgeft.errors import ConfigError, DoesNotFitError
from edgeft.model import LOGITS_BYTES, compiled, is_gguf
from edgeft.model.gguf import GGUF
from edgeft.model.header import header_values, plain_rotation
from edgeft.sparse.scheme import channel_count

if TYPE_CHECKING:
    from edgeft.sparse.scheme import Scheme

LIBRARIES_BYTES = 480 << 20  # Python, torch, transformers and the trainer's own tables, measured after loading
HALF_BYTES = 130 << 20  # code that the library makes for bf16 products, see block.padded
LEAN_BYTES = 300 << 20  # the same without transformers
MIB = 2**20
STATE_BYTES = {"fp32": 8, "bf16": 4, "8bit": 2.04}  # AdamW's two moments of a trained number


@dataclass(frozen=True)
class Shape:
    """What memory depends on, of any model."""

    depth: int
    width: int
    query: int  # values of all query heads of a token
    key: int  # of all key heads
    ffn: int
    vocabulary: int
    head: int  # values of one head
    gate: str  # the activation between gate and up
    file_bytes: int  # packed weights as they sit in memory, or are mapped
    lean: bool = False  # the kernels run it without transformers

    def linear(self, tensor: str) -> tuple[int, int]:
        """(outputs, inputs)."""
        return {
            "q": (self.query, self.width),
            "k": (self.key, self.width),
            "v": (self.key, self.width),
            "o": (self.width, self.query),
            "gate": (self.ffn, self.width),
            "up": (self.ffn, self.width),
            "down": (self.width, self.ffn),
        }[tensor]

    def linears(self) -> list[tuple[str, int, int]]:
        """(tensor, outputs, inputs) of a block."""
        return [(name, *self.linear(name)) for name in TENSORS]

    @property
    def block_parameters(self) -> int:
        return sum(rows * cols for _, rows, cols in self.linears())


def shape_of_config(config: Any, file_bytes: int = 0) -> Shape:
    """From transformers' configuration of a model."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        depth=config.num_hidden_layers,
        width=config.hidden_size,
        query=config.num_attention_heads * head,
        key=config.num_key_value_heads * head,
        ffn=config.intermediate_size,
        vocabulary=config.vocab_size,
        head=head,
        gate=getattr(config, "hidden_act", "silu"),
        file_bytes=file_bytes,
    )


def shape_of(source: str, frozen: str) -> Shape:
    """From a GGUF header or a Hugging Face configuration; no weight is read."""
    if is_gguf(source):
        gguf = GGUF.open(source)
        config: Any = SimpleNamespace(**header_values(gguf))
        size, lean = sum(t.nbytes for t in gguf.tensors.values()), plain_rotation(header_values(gguf))
    else:
        from edgeft.model.hf import read_config, resolve

        config = read_config(resolve(source))
        size, lean = 0, False
    shape = dataclasses.replace(shape_of_config(config, size), lean=lean)
    bytes_each = {"dense": 4.0, "int8": 1.01}.get(frozen, 0.57 if not is_gguf(source) else 0.0)
    if bytes_each:  # unpacked, or packed anew: not the file's own bytes
        tables = shape.vocabulary * shape.width * (2 if not is_gguf(source) else 1)
        shape = dataclasses.replace(shape, file_bytes=int(shape.depth * shape.block_parameters * bytes_each) + tables)
    return shape


def trained_parameters(shape: Shape, scheme: Scheme) -> int:
    total = 2 * shape.width * sum(map(scheme.normed, scheme.blocks))
    for block in scheme.blocks:
        for tensor, rows, cols in shape.linears():
            share = scheme.share(block, tensor)
            if share and scheme.method in ("lora", "tinytl"):  # of a lite branch, B alone
                total += scheme.rank * (rows + (cols if scheme.method == "lora" else 0))
            elif share:
                total += rows * channel_count(share, cols)
            total += rows if scheme.biased(block, tensor) else 0
    return total


def estimate(shape: Shape, scheme: Scheme, how: HowConfig, longest: int) -> dict[str, int]:
    """Bytes by term, at the peak of training; `longest` row in tokens."""
    tokens = max(how.micro_batch_tokens, longest)
    top = shape.depth - scheme.cut
    trained = trained_parameters(shape, scheme)
    w, f = shape.width, shape.ffn
    kernels = how.compile == "on" or (how.compile == "auto" and compiled.is_built())
    lora = scheme.method == "lora"
    if kernels:
        # float32 values kept per token and block: the stream before each norm and their outputs, q k v, the attention's
        # output, gate and up
        kept = 4 * w + shape.query * 2 + shape.key * 2 + 2 * f
        # where products are of bf16, what they read is kept as they read it: two bytes less for each of these values
        if how.products == "bf16":
            kept = 3 * w + shape.query * 5 // 2 + shape.key * 2 + f
    else:
        # plain torch: q k v and the attention's output twice (before and after the heads are put together), gate, its
        # activation, up, and what down reads
        kept = 4 * w + shape.query * 3 + shape.key * 2 + 4 * f
        if lora:  # every adapter keeps its input, and what is between its matrices
            adapters = max(sum(scheme.share(block, name) > 0 for name in TENSORS) for block in scheme.blocks)
            kept += adapters * (scheme.rank + w // 2)
    activations = tokens * 4 * (top * w + 2 * kept if how.recompute else (top + 1) * kept)
    return {
        "libraries": (LEAN_BYTES if kernels and not lora and shape.lean else LIBRARIES_BYTES)
        + (HALF_BYTES if kernels and how.products == "bf16" else 0),
        "packed weights": shape.file_bytes,
        "trained weights": 4 * trained,
        "gradients": 4 * trained,
        "optimiser state": int(STATE_BYTES[how.optimizer_state] * trained),
        "saved activations": activations,
        "logits": min(LOGITS_BYTES, tokens * 4 * shape.vocabulary),
        "unpack scratch": 4 * max(shape.ffn * shape.width, min(8192, shape.vocabulary) * shape.width),
    }


def fit(recipe: Recipe, shape: Shape, scheme: Scheme, longest: int, budget_bytes: int) -> dict[str, Any]:
    """Chooses `how` so that the run stays within the budget: the first, and so fastest, way that does."""
    asked = recipe.how
    sizes = sorted({asked.micro_batch_tokens, *(s for s in (512, 256, 128, 64) if s < asked.micro_batch_tokens)})[::-1]
    ways = [dataclasses.replace(asked, micro_batch_tokens=size) for size in sizes if size >= 256 or asked.recompute]
    ways += [dataclasses.replace(asked, micro_batch_tokens=size, recompute=True) for size in sizes]
    needs = []
    for way in ways or [asked]:
        terms = estimate(shape, scheme, way, longest)
        needs.append(sum(terms.values()))
        if needs[-1] <= budget_bytes or not budget_bytes:
            recipe.how = way
            return {
                "budget_bytes": budget_bytes,
                "peak_bytes": needs[-1],
                "terms": terms,
                "how": dataclasses.asdict(way),
            }
    raise DoesNotFitError(
        f"this needs {_size(min(needs))}, and {_size(budget_bytes)} are allowed",
        _proposals(recipe, shape, ways[-1], longest, budget_bytes),
    )


def _proposals(recipe: Recipe, shape: Shape, how: HowConfig, longest: int, budget_bytes: int) -> str:
    """Settings that were tried and fit."""
    from edgeft.sparse import scheme as schemes

    found: list[str] = []
    # fewer blocks in the middle: on question answering the last ones learn little
    tries: list[dict[str, Any]] = [{"blocks": f"{low}%-67%"} for low in (23, 37, 50, 60)]
    tries += [{"method": "lora", "rank": 16}, {"weights": False, "norms": True}]
    for change in tries:
        try:
            changed = schemes.make(dataclasses.replace(recipe.update, **change), shape.depth, "llama")
        except ConfigError:
            continue  # does not go with the rest of the recipe
        need = sum(estimate(shape, changed, how, longest).values())
        if need <= budget_bytes:
            options = " ".join(f"--set update.{key}={str(value).lower()}" for key, value in change.items())
            if "blocks" in change and any("update.blocks" in text for text in found):
                continue
            found.append(f"`{options}` fits in {_size(need)}")
    smaller = sum(estimate(shape, schemes.make(recipe.update, shape.depth, "llama"), how, 128).values())
    if longest > 128 and smaller <= budget_bytes:
        found.append(f"`--set data.max_tokens=128` fits in {_size(smaller)}")
    return ", ".join(found[:3]) or "take a smaller model, or a device with more memory"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / MIB:.0f} MiB"


def describe(plan: dict[str, Any]) -> str:
    parts = sorted(plan["terms"].items(), key=lambda item: -item[1])
    how = plan["how"]
    way = f"micro-batch {how['micro_batch_tokens']} tokens" + (", recomputing" if how["recompute"] else "")
    largest = ", ".join(f"{name} {_size(size)}" for name, size in parts[:4])
    return f"memory: {_size(plan['peak_bytes'])} planned of {_size(plan['budget_bytes'])} allowed ({largest}; {way})"
