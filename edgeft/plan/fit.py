"""A plan: the fastest execution of a run that fits its memory budget, or suggestions that would fit.

*How* is chosen freely (micro-batch, recomputation, order of the trunk, page release, AdamW's precision). *What* is
learned stays the same, unless `fit` is requested.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeft.config import CHANNELS, TENSORS, Device, ExecutionConfig, PartConfig, Recipe
from edgeft.engine import compiled
from edgeft.engine.limits import kernels_can_run
from edgeft.errors import ConfigError, DoesNotFitError
from edgeft.host import device
from edgeft.host.files import disk_size
from edgeft.methods import scheme as schemes
from edgeft.methods.scheme import Scheme
from edgeft.plan import disk, memory, seconds
from edgeft.plan.flops import step_flops
from edgeft.plan.memory import EngineSpec, RunSpec
from edgeft.plan.rows import Workload, total
from edgeft.plan.seconds import Rates
from edgeft.plan.shape import STATE_BYTES, Shape, exported_bytes, trained_parameters

MIN_MICRO_BATCH = 64  # tokens; smaller GEMMs are inefficient
SLACK = 0.03  # share of the budget left free: the error margin of a plan
ATTENTION = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Machine:
    """The machine that a run is planned for."""

    name: str
    rates: Rates
    timed: bool  # the rates are known
    threads: int
    products: str  # the fastest operands of GEMMs that the processor has instructions for
    built: bool  # kernels are already compiled
    compiler: bool  # or can be compiled
    disk_bytes: int = 0  # size of the run's disk; 0: unknown

    @staticmethod
    def here(threads: int, folder: Path = Path()) -> Machine:
        """folder: of the run, or where it will be."""
        count = min(threads or device.cores(), device.cores())
        rates, compiler = seconds.of_this_machine(count), compiled.compiler() is not None
        products, built = compiled.fastest_products(count), compiled.is_built()
        return Machine("this machine", rates, True, count, products, built, compiler, disk_size(folder))

    @staticmethod
    def of(profile: Device, threads: int) -> Machine:
        """Another machine, assumed to have a compiler."""
        known, count = seconds.of_profile(profile), threads or profile.cores
        rates = known or Rates(1e11, 0.0, 0.0, 1e10, seconds.WRITE_BYTES, "nothing: the profile gives no rate")
        return Machine(profile.name, rates, known is not None, count, profile.products, built=False, compiler=True)


class Job(RunSpec):
    """One run to plan."""

    def __init__(
        self, recipe: Recipe, shape: Shape, load: Workload, machine: Machine, engine: EngineSpec | None = None
    ) -> None:
        """engine: of a run that already has one."""
        recipe = replace(recipe, update=schemes.with_blocks(recipe.update, shape.depth, shape.weights))
        self.recipe, self.shape, self.machine = recipe, shape, machine
        scheme = schemes.make(recipe.update, shape.depth, shape.arch)
        self.scheme = schemes.with_weights(scheme, recipe.how.weights, recipe.train.average)
        self.load = load.with_gradients(scheme.tokens)
        self.resumed = False  # weights stay in the type that its checkpoints have
        self.engine = engine or self._engine()
        undecided = engine is None and recipe.how.compile == "auto" and not self.engine.kernels
        supported = kernels_can_run(shape.head, shape.gate)
        self.requested = recipe if undecided and machine.compiler and supported else None  # for with_kernels
        # plan for what `auto` resolves to
        compile_, products = "on" if self.engine.kernels else "off", self.engine.products
        self.recipe = replace(recipe, how=replace(recipe.how, compile=compile_, products=products))
        self.exported_bytes = exported_bytes(shape, self.scheme, recipe.export.type)

    def _engine(self) -> EngineSpec:
        """The engine that engine/choose.py will choose."""
        how, machine, load = self.recipe.how, self.machine, self.load
        kernels = how.compile == "on"
        if how.compile == "auto":
            steps = load.passes(how.micro_batch_tokens)
            summed = total([micro_batch for step in steps for micro_batch in step])
            work = step_flops(self.shape, self.scheme, summed._replace(pairs=0, output_pairs=0, live_pairs=0))
            pays = compiled.pays(work * load.steps / max(1, len(steps)), machine.rates.fp32)
            supported = kernels_can_run(self.shape.head, self.shape.gate)
            kernels = supported and (machine.built or (machine.compiler and pays))
        products = how.products
        if products == "auto":
            products = machine.products if kernels else "fp32"
        return EngineSpec(kernels, products, machine.threads)

    def with_kernels(self) -> Job:
        """With kernels compiled to save memory, although the run is too short for them to save time."""
        assert self.requested is not None
        recipe = replace(self.requested, how=replace(self.requested.how, compile="on"))
        return Job(recipe, self.shape, self.load, self.machine)

    def with_how(self, how: ExecutionConfig) -> Job:
        job = copy.copy(self)
        job.recipe = replace(self.recipe, how=how)
        job.engine = replace(self.engine, products=how.products)
        return job

    def peak(self, budget_bytes: int) -> int:
        return max(map(memory.peak, memory.stages(self, budget_bytes).values()))

    def clock(self) -> seconds.Clock:
        return seconds.Clock(self, self.machine.rates, self.machine.disk_bytes)

    def seconds(self) -> float:
        return sum(self.clock().stages().values())


def _precisions(job: Job) -> list[dict[str, Any]]:
    """Of AdamW's moments, then of weights, from the requested ones down, where the engine supports others; at last a
    step in place, where it saves all but one gradient."""
    how, method, order = job.recipe.how, job.scheme.method, list(STATE_BYTES)
    if not job.engine.kernels or job.recipe.train.optimizer != "adamw":
        return [{}]
    states = [state for state in order[order.index(how.optimizer_state) :] if state in method.optimizer_states]
    levels: list[dict[str, Any]] = [{"optimizer_state": state} for state in states]
    if method.bf16_weights and job.scheme.replaced and not job.resumed and not job.recipe.train.average:
        least = {**levels[-1], "weights": "bf16"}
        levels += [level for level in (least, {**least, "step_in_place": True}) if replace(how, **level) != how]
    return levels


def execution_options(job: Job) -> Iterator[ExecutionConfig]:
    """As requested first, then all combinations of options that need less memory; the last needs least."""
    requested = job.recipe.how
    size = requested.micro_batch_tokens
    sizes = [size, *(n for n in (512, 256, 128, MIN_MICRO_BATCH) if n < size)]
    axes: dict[str, list[Any]] = {
        "trunk_order": [requested.trunk_order] + (["blocks"] if requested.trunk_order == "rows" else []),
        "spare_memory": sorted({requested.spare_memory, True}),
        "recompute": sorted({requested.recompute, True}),
        "micro_batch_tokens": sizes,
    }
    for precision, *values in itertools.product(_precisions(job), *axes.values()):
        yield replace(requested, **precision, **dict(zip(axes, values, strict=True)))


def least_memory(job: Job) -> Job:
    """With the execution options that need least memory."""
    return job.with_how(list(execution_options(job))[-1])


def choose(job: Job, budget_bytes: int) -> Job | None:
    """As requested if that fits, else the fastest option that does."""
    best: tuple[float, Job] | None = None
    for number, option in enumerate(execution_options(job)):
        candidate = job.with_how(option)
        if budget_bytes and candidate.peak(budget_bytes) > (1 - SLACK) * budget_bytes:
            continue
        if number == 0:
            return candidate
        duration = candidate.seconds()
        if best is None or duration < best[0]:
            best = (duration, candidate)
    return best[1] if best else None


@dataclass(frozen=True)
class Reduction:
    """Settings that reduce what a run learns, and its memory."""

    settings: dict[str, Any]  # `update.blocks` → value
    job: Job

    def options(self) -> str:
        return " ".join(f"--set {key}={_yaml(value)}" for key, value in self.settings.items())


def _yaml(value: Any) -> str:
    if isinstance(value, PartConfig):
        known = dataclasses.asdict(value).items()
        return "{" + ",".join(f"{key}: {_yaml(item)}" for key, item in known) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_yaml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _block_options(scheme: Scheme) -> list[Any]:
    """The upper part of the trained blocks: the trunk grows, which runs only once."""
    blocks, options = scheme.blocks, []
    for share in (0.75, 0.5, 0.25, 0.0):
        kept = blocks[-max(1, round(share * len(blocks))) :]
        spec: Any = f"{kept[0]}-{kept[-1]}" if kept[-1] - kept[0] + 1 == len(kept) else list(kept)
        if len(kept) < len(blocks) and spec not in options:
            options.append(spec)
    return options


def _tensor_options(tensors: Sequence[str]) -> list[list[str]]:
    choices = ([t for t in TENSORS if t != "gate"], [*ATTENTION, "down"], [*ATTENTION], ["v", "o"])
    options = [[t for t in choice if t in tensors] for choice in choices]
    return [kept for n, kept in enumerate(options) if kept and set(kept) < set(tensors) and kept not in options[:n]]


def reductions(job: Job) -> Iterator[Reduction]:
    """Runs that train less, most trained parameters first."""
    update = job.recipe.update
    axes: dict[str, list[Any]] = {"model.frozen": ["auto"] if job.recipe.model.frozen == "dense" else []}
    if update.parts:
        axes["update.parts"] = [
            [replace(part, channels=min(part.channels, share)) for part in update.parts] for share in CHANNELS[1:]
        ]
    else:
        axes["update.blocks"] = _block_options(job.scheme)
        if update.weights:  # biases and norms are small: fewer tensors would save nothing
            axes["update.tensors"] = _tensor_options(update.tensors)
        if job.scheme.method.ranked:
            axes["update.rank"] = [rank for rank in (8, 4, 2) if rank < update.rank]
        elif update.low_rank:
            axes["update.low_rank"] = [rank for rank in (8, 4) if rank < update.low_rank]
        elif update.weights:
            axes["update.channels"] = [share for share in CHANNELS if share < update.channels]
    candidates: list[tuple[int, int, Reduction]] = []
    for combination in itertools.product(*([None, *values] for values in axes.values())):
        settings = {key: value for key, value in zip(axes, combination, strict=True) if value is not None}
        if not settings:
            continue
        try:
            reduction = Reduction(settings, _with_settings(job, settings))
        except ConfigError:
            continue  # conflicts with the rest of the recipe
        candidates.append((-trained_parameters(reduction.job.shape, reduction.job.scheme), len(settings), reduction))
    yield from (reduction for _, _, reduction in sorted(candidates, key=lambda candidate: candidate[:2]))


def _with_settings(job: Job, settings: dict[str, Any]) -> Job:
    recipe = job.recipe
    for key, value in settings.items():
        part, _, name = key.partition(".")
        recipe = replace(recipe, **{part: replace(getattr(recipe, part), **{name: value})})
    shape = replace(job.shape, dense=False) if "model.frozen" in settings else job.shape
    load = job.load.truncated(settings["data.max_tokens"]) if "data.max_tokens" in settings else job.load
    return Job(recipe, shape, load, job.machine, job.engine)


def peak_if_fits(job: Job, budget_bytes: int) -> int | None:
    """The least memory that it needs, or None if that exceeds the budget."""
    peak = least_memory(job).peak(budget_bytes)
    return peak if peak <= (1 - SLACK) * budget_bytes else None


def suggestions(job: Job, budget_bytes: int) -> list[str]:
    """Up to three settings of different kinds that fit, verified by planning."""
    fitting: dict[str, str] = {}
    shorter = (n for n in (256, 128, 64) if n < job.load.longest)
    shorter_rows = (Reduction({"data.max_tokens": n}, _with_settings(job, {"data.max_tokens": n})) for n in shorter)
    for reduction in sorted([*reductions(job), *shorter_rows], key=lambda item: len(item.settings)):
        kind = " ".join(reduction.settings)
        if kind in fitting or (len(fitting) >= 1 and len(reduction.settings) > 1):
            continue
        peak = peak_if_fits(reduction.job, budget_bytes)
        if peak is not None:
            fitting[kind] = f"`{reduction.options()}` fits in {size(peak)}"
        if len(fitting) == 3:
            break
    return list(fitting.values())


def make(job: Job, budget_bytes: int, fit: bool = False) -> tuple[Job, dict[str, Any]]:
    """(the run as planned, the contents of plan.json); DoesNotFitError if nothing fits."""
    chosen = choose(job, budget_bytes)
    to_fit = chosen is None and job.requested is not None
    if to_fit:
        job = job.with_kernels()
        chosen = choose(job, budget_bytes)
    changed: list[str] = []
    if chosen is None and fit:
        for smaller in reductions(job):
            if peak_if_fits(smaller.job, budget_bytes) is not None and (chosen := choose(smaller.job, budget_bytes)):
                before = {key: operator.attrgetter(key)(job.recipe) for key in smaller.settings}
                changed = [f"{key} {_yaml(before[key])} → {_yaml(value)}" for key, value in smaller.settings.items()]
                break
    if chosen is None:
        raise _does_not_fit(job, budget_bytes, fit)
    return chosen, {**_figures(job, chosen, budget_bytes), "changed": changed, "compiled_to_fit": to_fit}


def _does_not_fit(job: Job, budget_bytes: int, fit: bool) -> DoesNotFitError:
    stages = memory.stages(least_memory(job), budget_bytes)
    worst = max(stages, key=lambda name: memory.peak(stages[name]))
    suggested = suggestions(job, budget_bytes)
    hint = ", ".join(suggested) + ("" if fit else "; or let `--fit` choose")
    if not suggested:
        terms = sorted(stages[worst].items(), key=lambda item: -item[1])
        largest = ", ".join(f"{term} {size(count)}" for term, count in terms[:2])
        hint = f"no smaller setting fits (largest terms: {largest}): use a smaller model, or more memory"
    return DoesNotFitError(
        f"this needs at least {size(memory.peak(stages[worst]))} ({worst} stage); the limit is {size(budget_bytes)}",
        hint,
    )


def _figures(requested: Job, chosen: Job, budget_bytes: int) -> dict[str, Any]:
    stages = memory.stages(chosen, budget_bytes)
    clock = chosen.clock()
    durations = clock.stages()
    peaks = {name: memory.peak(terms) for name, terms in stages.items()}
    worst = max(peaks, key=lambda name: peaks[name])
    how, load, machine = chosen.recipe.how, chosen.load, chosen.machine
    return {
        "budget_bytes": budget_bytes,
        "peak_bytes": peaks[worst],
        "peak_stage": worst,
        "terms": stages[worst],
        "stages": {
            name: {
                "bytes": peaks[name],
                "resident_bytes": sum(terms.values()),  # including evictable pages of a mapped file
                "terms": terms,
                "seconds": round(durations.get(name, 0.0), 2) if machine.timed else None,
            }
            for name, terms in stages.items()
        },
        "seconds": round(sum(durations.values()), 1) if machine.timed else None,
        "search_seconds": round(durations.get("search", 0.0), 1) if machine.timed else None,  # before training
        "bound": max(clock.parts, key=clock.parts.__getitem__, default="matrix products"),
        "disk": disk.disk_bytes(chosen),
        "written": disk.written_bytes(chosen, clock.saves),
        "machine": {"name": machine.name, "threads": chosen.engine.threads, "rates": machine.rates.source},
        "engine": {"kernels": chosen.engine.kernels, "products": chosen.engine.products},
        "how": dataclasses.asdict(how),
        "smaller": _halved(chosen, budget_bytes),
        "trained_parameters": chosen.trained,
        "steps": load.steps,
        "rows": {
            "train": load.train_rows,
            "heldout": load.heldout_rows,
            "scored": clock.eval_rows,  # at most
            "longest": load.longest,
            "tokens": load.row_tokens,
            "tree_tokens": load.train_tree_tokens,
            "sampled": load.sampled,
        },
        "asked": dataclasses.asdict(replace(requested.recipe.how, products=how.products)),
    }


def _halved(job: Job, budget_bytes: int) -> dict[str, int]:
    """Bytes of training with smaller micro-batches, the fallback when memory runs short during a run."""
    sizes, tokens = {}, job.recipe.how.micro_batch_tokens // 2
    while tokens >= MIN_MICRO_BATCH:
        halved = job.with_how(replace(job.recipe.how, micro_batch_tokens=tokens))
        sizes[str(tokens)] = memory.peak(memory.stages(halved, budget_bytes)["train"])
        tokens //= 2
    return sizes


def size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
