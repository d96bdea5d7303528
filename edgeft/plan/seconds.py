"""Seconds by stage: FLOPs and bytes moved, divided by the machine's rates.

Work is counted from the rows themselves. Rates are measured by `edgeft doctor`, or come from a device profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from edgeft.config import Device
from edgeft.engine import compiled
from edgeft.engine.limits import LOGITS_BYTES
from edgeft.host import device
from edgeft.plan.disk import checkpoint_bytes, expected_saves, save_every, trunk_bytes
from edgeft.plan.flops import ATTENTION_BACK, Pass, Schedule, attended, search_pays, search_tokens, step_flops
from edgeft.plan.limits import EVAL_MIN_ROWS, last_steps
from edgeft.plan.memory import RunSpec
from edgeft.plan.rows import total

# Share of doctor's rates that a step reaches, measured on two cores with AVX-512.
PRODUCTS = 0.9  # of the benchmark's GEMM rate: layers have other sizes
HALF_PRODUCTS = 0.74  # the same in bf16, where overhead around a GEMM weighs more
ATTENTION = 0.6  # the attention kernel, relative to a float32 GEMM
PLAIN = 0.5  # plain torch, relative to the kernels, whole steps
LLAMA = 0.6  # llama.cpp's GEMMs, mostly 8-bit integer, relative to float32

# Bytes read and written, per …
BLOCK_VALUES = 12  # … value of a block's width, forward and backward: norms, residuals and other elementwise work
NORM_VALUES = 6  # … value of a further norm, forward and backward
WEIGHT_BYTES = 4.6  # … packed weight unpacked to float32; 2.6 to bf16
FETCH_BYTES = 2.0  # … packed weight in addition, where its pages were released: page faults
ADAM_BYTES = {"fp32": 32, "bf16": 32, "8bit": 32}  # … trained parameter and step: gradient, moments, weight, rounding

# For a machine that was not measured: memory bandwidth is assumed proportional to its FLOP/s.
COPY_PER_FLOP = 0.1  # bytes
WRITE_BYTES = 150e6  # per second, to an SD card or a slow disk, whose rate is steady
HALF_GAIN = 2.0  # speedup of bf16 GEMMs, where the processor has instructions for them,
INT8_GAIN = 2.0  # and of int8 ones; 0.4 of float32's instructions on a Cortex-A76

START_S = {"prepare": 0.6, "lean": 2.8, "transformers": 8.0, "eval": 1.0}  # startup time of a stage
ROW_S = 0.0012  # tokenization of a row
PACK_VALUES = 1.5e8  # per second, quantized to q8_0
ROUND_FLOPS = 33_000.0  # for each value that `keep` rounds: 6 million a second at 200 GFLOPS
HASH_BYTES = 1.0e9  # per second
DENSE_BYTES = 0.8e9  # per second, of weights unpacked to float32 at load
# Many disks write the first gigabyte faster than the rest: measured 1.0 and 0.35 GB/s where doctor measured 1.3.
FIRST_BYTES, FIRST_WRITES, LONG_WRITES = 1e9, 0.75, 0.25


@dataclass(frozen=True)
class Rates:
    """A machine's throughput, per second."""

    fp32: float  # FLOPs of a float32 GEMM
    bf16: float
    int8: float  # of packed weights, with conversions
    copy: float  # bytes moved in memory, by all threads
    write: float  # bytes to the disk, as measured by doctor
    source: str  # how they were obtained

    def to_disk(self, count: float) -> float:
        """Seconds to write this many bytes and their checksum."""
        first = FIRST_WRITES * self.write
        rest = max(LONG_WRITES * self.write, min(first, WRITE_BYTES))
        return min(count, FIRST_BYTES) / first + max(0.0, count - FIRST_BYTES) / rest


def of_profile(profile: Device) -> Rates | None:
    """None: the profile gives no rate."""
    if not profile.gemm_gflops:
        return None
    fp32 = profile.gemm_gflops * 1e9
    int8 = INT8_GAIN * fp32 if profile.products == "int8" else 0.0
    return Rates(fp32, 0.0, int8, COPY_PER_FLOP * fp32, WRITE_BYTES, f"the profile `{profile.name}`, not measured")


def of_this_machine(threads: int) -> Rates:
    """As measured by doctor; else by a short numpy benchmark."""
    cpu, count = device.cpu_name(), threads or device.cores()
    key, known = device.gemm_key(cpu, count), device.read_gemm_cache()
    moved = known.get(device.bytes_key(cpu, count), {})
    write = moved["write"] * 1e9 if "write" in moved else WRITE_BYTES
    measured = compiled.mean_rates(known.get(device.products_key(cpu, count), {})) or known.get(key, {})
    if "fp32" in measured:
        fp32, bf16, int8 = (measured.get(name, 0.0) * 1e9 for name in ("fp32", "bf16", "int8"))
        return Rates(fp32, bf16, int8, moved.get("copy", COPY_PER_FLOP * fp32 / 1e9) * 1e9, write, "measured by doctor")
    fp32 = compiled.trial_flops_per_s()
    bf16 = HALF_GAIN * fp32 if compiled.multiplies_bf16() else 0.0
    int8 = INT8_GAIN * fp32 if compiled.multiplies_int8() else 0.0
    source = "a short benchmark; `edgeft doctor` measures more exactly"
    return Rates(fp32, bf16, int8, COPY_PER_FLOP * fp32, write, source)


class Clock:
    """Predicts the seconds of a run."""

    def __init__(self, spec: RunSpec, rates: Rates, disk_bytes: int = 0) -> None:
        """disk_bytes: size of the run's disk; 0: unknown."""
        self.spec, self.rates, self.disk_bytes, self.trained = spec, rates, disk_bytes, spec.trained
        self.shape, self.scheme, self.recipe, self.load = spec.shape, spec.scheme, spec.recipe, spec.load
        self.parts: dict[str, float] = {}  # seconds by kind of work
        self.step_s = 0.0  # of training
        self.saves = 0  # checkpoints after that of step 0
        self.eval_rows = 0  # held-out rows scored at the end, at most

    def _add(self, what: str, seconds: float) -> float:
        self.parts[what] = self.parts.get(what, 0.0) + seconds
        return seconds

    def _products(self, flops: float, frozen: float = 0.0) -> float:
        """frozen: the share of products with packed weights, in FLOPs."""
        rates, products = self.rates, self.spec.engine.products
        if products == "int8" and rates.int8:
            return (flops - frozen) / (PRODUCTS * rates.fp32) + frozen / (PRODUCTS * rates.int8)
        rate = HALF_PRODUCTS * rates.bf16 if products == "bf16" and rates.bf16 else PRODUCTS * rates.fp32
        return flops / rate / (1.0 if self.spec.engine.kernels else PLAIN)

    def _elementwise(self, tokens: int, blocks: int, sweeps: int) -> float:
        shape = self.shape
        values = BLOCK_VALUES * (shape.width + shape.query // 2 + shape.ffn // 2) + NORM_VALUES * shape.more_norms
        return 4 * values * tokens * blocks * sweeps / 3 / self.rates.copy

    def _unpack(self, values: int, times: int, half: bool) -> float:
        if self.shape.dense:
            return 0.0
        each = WEIGHT_BYTES - (2 if half else 0) + (FETCH_BYTES if self.recipe.how.spare_memory else 0)
        return times * values * (each / self.rates.copy + self.shape.unpack_flops / self.rates.fp32)

    @cached_property
    def _frozen(self) -> int:
        """Packed values above the cut; a weight with all channels trained is not packed."""
        values, scheme = (self.shape.depth - self.scheme.cut) * self.shape.block_parameters, self.scheme
        whole = [key for key in scheme.replaced if scheme.method.traits_of(scheme.updates[key]).dense]
        trained = [self.shape.linear(tensor) for _, tensor in whole]
        return values - sum(rows * cols for rows, cols in trained)

    def trunk(self, passes: Sequence[Pass]) -> float:
        """Of these passes, below the cut."""
        summed, count = total(passes), len(passes)
        shape, cut = self.shape, self.scheme.cut
        flops = 2.0 * shape.block_parameters * summed.tokens * cut
        pairs = shape.attended(range(cut), summed.tokens, summed.pairs)
        half = self.spec.engine.half
        seconds = self._add("matrix products", self._products(flops, flops))
        seconds += self._add("attention", 4.0 * shape.query * pairs / (ATTENTION * self.rates.fp32))
        seconds += self._add("norms and gates", self._elementwise(summed.tokens, cut, 1))
        return seconds + self._add("unpacking weights", self._unpack(cut * shape.block_parameters, count, half))

    def top(self, passes: Sequence[Pass], back: bool) -> float:
        """Of these passes, from the cut on."""
        summed, count = total(passes), len(passes)
        shape, half = self.shape, self.spec.engine.half
        mode = self.scheme.recompute(self.recipe.how.recompute) if back else "none"
        frugal = mode == "selective" and self.spec.engine.kernels  # plain torch has no such mode
        recompute = mode == "full" or frugal
        blocks = shape.depth - self.scheme.cut
        head = 2.0 * shape.vocabulary * shape.width * summed.targets * (2 if back else 1)
        attention = 4.0 * shape.query * attended(shape, self.scheme.cut, summed)
        live = 4.0 * shape.query * attended(shape, self.scheme.cut, summed, live=True)
        flops = step_flops(shape, self.scheme, summed, back=back)
        flops -= head + attention + (ATTENTION_BACK * live if back else 0)
        kept = 0  # weights of a block that need no recomputation
        if frugal:
            kept = sum(rows * cols for name, rows, cols in shape.linears() if name == "down")
        if recompute:
            flops += 2.0 * (shape.block_parameters - kept) * summed.live * (blocks - 1)
        frozen = 2.0 * self._frozen * (summed.tokens + summed.live * (recompute + back))
        products = self._products(flops, min(flops, frozen)) + head / (PRODUCTS * self.rates.fp32)
        seconds = self._add("matrix products", products)
        recomputed = 1.0 if recompute else 0.0
        attention += live * (recomputed + (ATTENTION_BACK if back else 0))
        seconds += self._add("attention", attention / (ATTENTION * self.rates.fp32))
        swept = self._elementwise(summed.tokens, blocks, 1)
        swept += self._elementwise(summed.live, blocks, int(recomputed + (2 if back else 0)))
        seconds += self._add("norms and gates", swept)
        # the context runs on its own, as in inference
        twice = sum(p.live < p.tokens for p in passes) if back else 0
        times = count * int(1 + recomputed + back) + twice
        seconds += self._add("unpacking weights", self._unpack(self._frozen, times, half))
        chunks = sum(-(-p.targets * 4 * shape.vocabulary // LOGITS_BYTES) for p in passes)
        rows = shape.vocabulary * shape.width * chunks * (1 + back)  # the head is unpacked for every chunk of logits
        seconds += self._add("unpacking weights", rows * WEIGHT_BYTES / self.rates.copy)
        return seconds

    def stages(self) -> dict[str, float]:
        """Seconds by stage."""
        self.parts = {}
        load, recipe = self.load, self.recipe
        stages = {"prepare": START_S["prepare"] + ROW_S * (load.train_rows + load.heldout_rows)}
        start = START_S["lean" if self.spec.lean else "transformers"]
        if self.shape.dense:
            start += 4 * self.shape.weights / DENSE_BYTES
        if self.scheme.cut and recipe.how.trunk == "cache":
            stages["trunk"] = self._trunk_stage()
        if recipe.update.needs_search:
            stages["search"] = self._search_stage(start)
        stages["train"] = start + self._train_stage()
        stages["export"] = start + self._export_stage()
        trained = sum(stages.get(name, 0.0) for name in ("trunk", "search", "train"))
        stages["eval"] = START_S["eval"] + self._eval_stage(trained)
        return stages

    def _trunk_stage(self) -> float:
        load, how = self.load, self.recipe.how
        rows = (load.train_rows + load.validation_rows) / max(1, len(load.rows) + len(load.held))
        seconds = rows * self.trunk(load.trunk(how.micro_batch_tokens))
        cache, _, between = trunk_bytes(self.spec)
        return seconds + self._add("disk", self.rates.to_disk(cache + 2 * between))  # each block reads it again

    def _search_stage(self, start: float) -> float:
        """Before training; 0 where it does not pay."""
        load, shape = self.load, self.shape
        tokens = load.train_tree_tokens, max(0, load.tree_tokens - load.train_tree_tokens)
        if not search_pays(*tokens, Schedule(load.train_rows, self.recipe.train).passes):
            return 0.0
        flops = 2.0 * shape.weights * search_tokens(*tokens)
        return start + self._add("matrix products", self._products(flops))

    def _train_stage(self) -> float:
        load, recipe = self.load, self.recipe
        how, train = recipe.how, recipe.train
        steps = load.passes(how.micro_batch_tokens)
        before = dict(self.parts)
        passes = [p for step in steps for p in step]
        sampled = self.top(passes, True)
        if self.scheme.cut and how.trunk == "rerun":
            sampled += self.trunk(passes)
        factor = load.steps / max(1, len(steps))
        self.step_s = sampled / max(1, len(steps))
        for what, seconds in self.parts.items():  # extrapolate from the sampled steps
            self.parts[what] = before.get(what, 0.0) + factor * (seconds - before.get(what, 0.0))
        total_s = factor * sampled
        if self.scheme.chooses:
            total_s += self.top(load.choosing(how.micro_batch_tokens), True)
        total_s += self._add("optimiser", load.steps * self.trained * ADAM_BYTES[how.optimizer_state] / self.rates.copy)
        validations = (1 + min(train.validations, load.steps)) * load.held_scale
        total_s += validations * self.top(load.validation(how.micro_batch_tokens), False)
        total_s += self._checkpoints(total_s)
        return total_s + self._add("reading the model", self.shape.file_bytes / HASH_BYTES)

    def _checkpoints(self, training_s: float) -> float:
        weights, state = checkpoint_bytes(self.recipe, self.shape, self.scheme)
        save_s = self.rates.to_disk(weights + state)
        share = (weights + state) / self.disk_bytes if self.disk_bytes else 0.0
        every_s = save_every(self.recipe.how.checkpoint_s, training_s, save_s, share)
        self.saves = expected_saves(self.recipe.train, self.load.steps, training_s, every_s)
        return self._add("disk", self.rates.to_disk(weights) + self.saves * save_s)

    def _export_stage(self) -> float:
        shape, load = self.shape, self.load
        weights = shape.weights
        tokens = load.verify_tokens
        packed = [shape.linear(tensor) for _, tensor in self.scheme.updates]
        seconds = sum(rows * cols for rows, cols in packed) / PACK_VALUES + self._add(
            "disk", self.rates.to_disk(self.spec.exported_bytes)
        )
        seconds += 2.0 * weights * tokens / self.rates.fp32 * (1 / PRODUCTS + 1 / LLAMA)
        seconds += weights * WEIGHT_BYTES / self.rates.copy
        return seconds + (self._rounding(packed) if self.spec.may_be_kept else 0.0)

    def _rounding(self, matrices: Sequence[tuple[int, int]]) -> float:
        """`keep`: the matrices, and the last phase once."""
        steps = last_steps(self.load.steps)
        rounding = sum(rows * cols for rows, cols in matrices) * ROUND_FLOPS / self.rates.fp32
        return self._add("rounding", rounding + steps * self.step_s)

    def _eval_stage(self, trained: float) -> float:
        """Of the rows that fit the time limit; it is less where the base model's answers are stored, or the difference
        is clear with fewer rows. trained: seconds of search, trunk and training."""
        shape, load, asked = self.shape, self.load, self.recipe.eval
        rows = min(asked.rows, load.heldout_rows)
        weights = shape.weights + shape.vocabulary * shape.width
        tokens = load.scored_tokens / max(1, load.heldout_rows) + min(asked.max_new_tokens, 2 * load.answer_tokens + 2)
        row_s = 2 * 2.0 * weights * tokens / (LLAMA * self.rates.fp32)
        if asked.time_share:
            affordable = int((asked.time_share * trained - START_S["eval"]) / row_s)
            rows = min(rows, max(affordable, EVAL_MIN_ROWS))
        self.eval_rows = rows
        return row_s * rows
