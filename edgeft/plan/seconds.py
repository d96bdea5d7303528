"""Seconds by stage: floating-point work and bytes moved, over what the machine does of each in a second.

Work is counted from the rows themselves; rates are those that `edgeft doctor` measured here, or a device profile's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from edgeft.config import Device
from edgeft.engine import compiled
from edgeft.engine.limits import LOGITS_BYTES
from edgeft.host import device
from edgeft.plan.flops import ATTENTION_BACK, Pass, Schedule, search_pays, search_tokens, step_flops
from edgeft.plan.memory import VERIFY_ROWS, RunSpec, state_bytes
from edgeft.plan.rows import total

# Shares of doctor's rates that the kernels reach inside a step, measured on two cores with AVX-512.
PRODUCTS = 0.9  # of the trial's product: layers are of other sizes
HALF_PRODUCTS = 0.74  # the same in bf16, where what lies around a product weighs more
ATTENTION = 0.6  # the attention kernel against a float32 product
PLAIN = 0.5  # plain torch against the kernels, whole steps
LLAMA = 0.6  # llama.cpp's products, mostly of 8-bit integers, against float32 ones

# Bytes that are read and written once for every …
BLOCK_VALUES = 12  # value of a block's width, forward and backward: norms, residuals and what stands between products
WEIGHT_BYTES = 4.6  # … packed weight that is unpacked to float32, and 2.6 to bf16
FETCH_BYTES = 2.0  # … of these besides, where its pages were given back: what finding them again costs
ADAM_BYTES = {"fp32": 32, "bf16": 32, "8bit": 32}  # … trained number in a step: gradient, moments, itself, and rounding
CAST_BYTES = 22  # … trained number in a pass with bf16 products: the weight twice, and its gradient

# Where a machine has not been measured: what it moves in a second follows what it multiplies.
COPY_PER_FLOP = 0.1  # bytes
WRITE_BYTES = 150e6  # a second, to an SD card or a slow disk: these keep their rate
HALF_GAIN = 2.0  # bf16 products against float32 ones, where the processor has instructions for them

START_S = {"prepare": 0.6, "lean": 2.8, "transformers": 8.0, "eval": 1.0}  # until a stage begins to work
ROW_S = 0.0012  # a row to tokens
PACK_VALUES = 1.5e8  # a second, to q8_0
HASH_BYTES = 1.0e9  # a second
DENSE_BYTES = 0.8e9  # a second, of weights that become float32 when they are loaded
# Many disks take a first gigabyte faster than what follows: measured 1.0 and 0.35 GB/s where doctor's trial found 1.3.
FIRST_BYTES, FIRST_WRITES, LONG_WRITES = 1e9, 0.75, 0.25


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second."""

    fp32: float  # floating-point operations of a float32 product
    bf16: float
    copy: float  # bytes moved in memory, by all threads
    write: float  # bytes to the disk, as doctor's trial found it
    source: str  # where these come from, in words

    def to_disk(self, count: float) -> float:
        """Seconds for so many bytes, with their checksum."""
        first = FIRST_WRITES * self.write
        rest = max(LONG_WRITES * self.write, min(first, WRITE_BYTES))
        return min(count, FIRST_BYTES) / first + max(0.0, count - FIRST_BYTES) / rest


def of_profile(profile: Device) -> Rates | None:
    """None: the profile does not say."""
    if not profile.gemm_gflops:
        return None
    fp32 = profile.gemm_gflops * 1e9
    return Rates(fp32, 0.0, COPY_PER_FLOP * fp32, WRITE_BYTES, f"the profile `{profile.name}`, not measured")


def of_this_machine(threads: int) -> Rates:
    """As doctor has measured it; before that, a short trial with numpy."""
    cpu, count = device.cpu_name(), threads or device.cores()
    key, known = device.gemm_key(cpu, count), device.read_gemm_cache()
    moved = known.get(device.bytes_key(cpu, count), {})
    write = moved["write"] * 1e9 if "write" in moved else WRITE_BYTES
    if key in known and "fp32" in known[key]:
        fp32, bf16 = (known[key].get(name, 0.0) * 1e9 for name in ("fp32", "bf16"))
        return Rates(fp32, bf16, moved.get("copy", COPY_PER_FLOP * fp32 / 1e9) * 1e9, write, "measured by doctor")
    fp32 = compiled.trial_flops_per_s()
    bf16 = HALF_GAIN * fp32 if compiled.multiplies_bf16() else 0.0
    return Rates(fp32, bf16, COPY_PER_FLOP * fp32, write, "a short trial; `edgeft doctor` measures it well")


class Clock:
    """Seconds of a run's parts."""

    def __init__(self, spec: RunSpec, rates: Rates) -> None:
        self.spec, self.rates, self.trained = spec, rates, spec.trained
        self.shape, self.scheme, self.recipe, self.load = spec.shape, spec.scheme, spec.recipe, spec.load
        self.parts: dict[str, float] = {}  # what the time goes into, in seconds

    def _add(self, what: str, seconds: float) -> float:
        self.parts[what] = self.parts.get(what, 0.0) + seconds
        return seconds

    def _products(self, flops: float, half: bool) -> float:
        rates = self.rates
        rate = HALF_PRODUCTS * rates.bf16 if half and rates.bf16 else PRODUCTS * rates.fp32
        return flops / rate / (1.0 if self.spec.engine.kernels else PLAIN)

    def _between(self, tokens: int, blocks: int, ways: int) -> float:
        shape = self.shape
        values = BLOCK_VALUES * (shape.width + shape.query // 2 + shape.ffn // 2)
        return 4 * values * tokens * blocks * ways / 3 / self.rates.copy

    def _unpack(self, values: int, times: int, half: bool) -> float:
        if self.shape.dense:
            return 0.0
        each = WEIGHT_BYTES - (2 if half else 0) + (FETCH_BYTES if self.recipe.how.spare_memory else 0)
        return times * values * (each / self.rates.copy + self.shape.unpack_flops / self.rates.fp32)

    @cached_property
    def _frozen(self) -> int:
        """Values above the cut that are packed; a weight of which all channels are trained is not."""
        values, scheme = (self.shape.depth - self.scheme.cut) * self.shape.block_parameters, self.scheme
        if scheme.method.dense:
            trained = [self.shape.linear(tensor) for (_, tensor), share in scheme.shares.items() if share >= 1]
            values -= sum(rows * cols for rows, cols in trained)
        return values

    def trunk(self, passes: Sequence[Pass]) -> float:
        """These passes up to the cut."""
        one, count = total(passes), len(passes)
        shape, cut = self.shape, self.scheme.cut
        flops = 2.0 * shape.block_parameters * one.tokens * cut
        found = self._add("matrix products", self._products(flops, False))
        found += self._add("attention", 4.0 * shape.query * one.pairs * cut / (ATTENTION * self.rates.fp32))
        found += self._add("norms and gates", self._between(one.tokens, cut, 1))
        return found + self._add("unpacking weights", self._unpack(cut * shape.block_parameters, count, False))

    def top(self, passes: Sequence[Pass], back: bool) -> float:
        """These passes from the cut on."""
        one, count = total(passes), len(passes)
        shape, half, recompute = self.shape, self.spec.engine.half, self.recipe.how.recompute and back
        frugal = back and self.spec.engine.kernels and self.scheme.frugal
        blocks = shape.depth - self.scheme.cut
        head = 2.0 * shape.vocabulary * shape.width * one.targets * (2 if back else 1)
        pairs = one.pairs * (blocks - 1) + one.asked_pairs
        attention = 4.0 * shape.query * pairs
        flops = step_flops(shape, self.scheme, one, back=back)
        flops -= head + attention * (1 + ATTENTION_BACK if back else 1)
        kept = 0  # of a block's weights, those that are not multiplied with a second time
        if frugal and not recompute:
            kept = sum(rows * cols for name, rows, cols in shape.linears() if name == "down")
        if recompute or frugal:
            flops += 2.0 * (shape.block_parameters - kept) * one.tokens * (blocks - 1)
        found = self._add("matrix products", self._products(flops, half) + self._products(head, False))
        again = 1.0 if recompute or frugal else 0.0
        attention *= 1 + again + (ATTENTION_BACK if back else 0)
        found += self._add("attention", attention / (ATTENTION * self.rates.fp32))
        found += self._add("norms and gates", self._between(one.tokens, blocks, int(1 + again + (2 if back else 0))))
        found += self._add("unpacking weights", self._unpack(self._frozen, count * int(1 + again + back), half))
        pieces = sum(-(-each.targets * 4 * shape.vocabulary // LOGITS_BYTES) for each in passes)
        rows = shape.vocabulary * shape.width * pieces * (1 + back)  # the head is unpacked for every piece of logits
        found += self._add("unpacking weights", rows * WEIGHT_BYTES / self.rates.copy)
        if half and back and self.scheme.method.casts:
            found += self._add("optimiser", count * self.trained * CAST_BYTES / self.rates.copy)
        return found

    def stages(self) -> dict[str, float]:
        """Seconds by stage."""
        self.parts = {}
        load, recipe = self.load, self.recipe
        found = {"prepare": START_S["prepare"] + ROW_S * (load.train_rows + load.heldout_rows)}
        start = START_S["lean" if self.spec.lean else "transformers"]
        if self.shape.dense:
            start += 4 * self.shape.depth * self.shape.block_parameters / DENSE_BYTES
        if self.scheme.cut and recipe.how.trunk == "cache":
            found["trunk"] = self._trunk_stage()
        if recipe.update.needs_search:
            found["search"] = self._search_stage(start)
        found["train"] = start + self._train_stage()
        found["export"] = start + self._export_stage()
        found["eval"] = START_S["eval"] + self._eval_stage()
        return found

    def _trunk_stage(self) -> float:
        load, how = self.load, self.recipe.how
        rows = (load.train_rows + load.heldout_rows) / max(1, len(load.rows) + len(load.held))
        seconds = rows * self.trunk(load.trunk(how.micro_batch_tokens))
        cached = load.tree_tokens * self.shape.width
        written = 2 * cached * (1 if how.trunk_order == "rows" else 1 + 4 * self.scheme.cut)
        return seconds + self._add("disk", self.rates.to_disk(written))

    def _search_stage(self, start: float) -> float:
        """Before training; 0 where it does not pay."""
        load, shape = self.load, self.shape
        tokens = load.train_tree_tokens, max(0, load.tree_tokens - load.train_tree_tokens)
        if not search_pays(*tokens, Schedule(load.train_rows, self.recipe.train).passes):
            return 0.0
        flops = 2.0 * shape.depth * shape.block_parameters * search_tokens(*tokens)
        return start + self._add("matrix products", self._products(flops, self.spec.engine.half))

    def _train_stage(self) -> float:
        load, recipe = self.load, self.recipe
        how, train = recipe.how, recipe.train
        steps = load.passes(how.micro_batch_tokens)
        before = dict(self.parts)
        every = [one for step in steps for one in step]
        sampled = self.top(every, True)
        if self.scheme.cut and how.trunk == "rerun":
            sampled += self.trunk(every)
        factor = load.steps / max(1, len(steps))
        for what, seconds in self.parts.items():  # those looked at stand for all
            self.parts[what] = before.get(what, 0.0) + factor * (seconds - before.get(what, 0.0))
        found = factor * sampled
        found += self._add("optimiser", load.steps * self.trained * ADAM_BYTES[how.optimizer_state] / self.rates.copy)
        validations = (1 + min(train.validations, load.steps)) * load.held_scale
        found += validations * self.top(load.validation(how.micro_batch_tokens), False)
        state = state_bytes(recipe)
        # the first, the last, and the best after about half of the validations
        written = self.trained * (4 + (4 + state) + 4 * max(1, train.validations // 2))
        found += self._add("disk", self.rates.to_disk(written))
        often = found // max(how.checkpoint_s, 1.0)  # never more than 2 % of the time
        found += self._add("disk", min(0.02 * found, often * self.rates.to_disk(self.trained * (4 + state))))
        return found + self._add("reading the model", self.shape.file_bytes / HASH_BYTES)

    def _export_stage(self) -> float:
        shape, load = self.shape, self.load
        weights = shape.depth * shape.block_parameters
        tokens = min(VERIFY_ROWS, load.heldout_rows or VERIFY_ROWS) * load.longest
        found = self.trained / PACK_VALUES + self._add("disk", self.rates.to_disk(self.spec.exported_bytes))
        found += 2.0 * weights * tokens / self.rates.fp32 * (1 / PRODUCTS + 1 / LLAMA)
        return found + weights * WEIGHT_BYTES / self.rates.copy

    def _eval_stage(self) -> float:
        shape, load, rows = self.shape, self.load, min(self.recipe.eval.rows, self.load.heldout_rows)
        weights = shape.depth * shape.block_parameters + shape.vocabulary * shape.width
        share = rows / max(1, load.heldout_rows)
        tokens = share * load.held_tokens + rows * min(self.recipe.eval.max_new_tokens, 2 * load.answer_tokens + 2)
        return 2 * 2.0 * weights * tokens / (LLAMA * self.rates.fp32)
