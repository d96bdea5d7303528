"""A plan: the fastest execution of a run that fits its budget; or what would fit, where none does.

*How* is chosen freely (micro-batch, recomputation, order of the trunk, page release, AdamW's precision). *What* is
learned stays as it is, unless `fit` was asked for.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeft.config import CHANNELS, TENSORS, Device, ExecutionConfig, PartConfig, Recipe
from edgeft.engine import compiled
from edgeft.engine.limits import kernels_can_run
from edgeft.errors import ConfigError, DoesNotFitError
from edgeft.host import device
from edgeft.host.files import Need, path_size
from edgeft.methods import scheme as schemes
from edgeft.methods.scheme import Scheme
from edgeft.plan import memory, seconds
from edgeft.plan.flops import step_flops
from edgeft.plan.memory import EngineSpec, RunSpec
from edgeft.plan.rows import Workload, total
from edgeft.plan.seconds import Rates
from edgeft.plan.shape import STATE_BYTES, Shape, exported_bytes, trained_parameters
from edgeft.run.folder import Run

SMALLEST = 64  # tokens of a micro-batch, below which products are too thin to be worth it
SLACK = 0.03  # of the budget is left free: a plan may be off by so much
ATTENTION = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Machine:
    """Where it runs."""

    name: str
    rates: Rates
    timed: bool  # are these known?
    threads: int
    bf16: bool  # the processor has instructions for such products
    built: bool  # kernels are compiled already
    compiler: bool  # or can be

    @staticmethod
    def here(threads: int) -> Machine:
        count = min(threads or device.cores(), device.cores())
        rates, able = seconds.of_this_machine(count), compiled.compiler() is not None
        return Machine("this machine", rates, True, count, compiled.multiplies_bf16(), compiled.is_built(), able)

    @staticmethod
    def of(profile: Device, threads: int) -> Machine:
        """Another machine; that it has a compiler is assumed, bf16 instructions are not."""
        known, count = seconds.of_profile(profile), threads or profile.cores
        rates = known or Rates(1e11, 0.0, 1e10, seconds.WRITE_BYTES, "nothing: the profile says no rate")
        return Machine(profile.name, rates, known is not None, count, bf16=False, built=False, compiler=True)


class Job(RunSpec):
    """One run as it is planned."""

    def __init__(
        self, recipe: Recipe, shape: Shape, load: Workload, machine: Machine, engine: EngineSpec | None = None
    ) -> None:
        """engine: where a run has one already."""
        self.recipe, self.shape, self.load, self.machine = recipe, shape, load, machine
        self.scheme = schemes.make(recipe.update, shape.depth, shape.arch)
        self.engine = engine or self._engine()
        self.free_products = engine is None and recipe.how.products == "auto"
        free = engine is None and recipe.how.compile == "auto" and not self.engine.kernels
        able = kernels_can_run(shape.head, shape.gate)
        self.asked = recipe if free and machine.compiler and able else None  # kernels are worth it only to fit
        # the plan is for what `auto` resolves to
        compile_, products = "on" if self.engine.kernels else "off", "bf16" if self.engine.half else "fp32"
        self.recipe = replace(recipe, how=replace(recipe.how, compile=compile_, products=products))
        self.exported_bytes = exported_bytes(shape, self.scheme, recipe.export.type)

    def _engine(self) -> EngineSpec:
        """As engine/choose.py will choose."""
        how, machine, load = self.recipe.how, self.machine, self.load
        kernels = how.compile == "on"
        if how.compile == "auto":
            steps = load.passes(how.micro_batch_tokens)
            every = total([one for step in steps for one in step])
            work = step_flops(self.shape, self.scheme, every._replace(pairs=0, asked_pairs=0))
            worth = compiled.pays(work * load.steps / max(1, len(steps)), machine.rates.fp32)
            able = kernels_can_run(self.shape.head, self.shape.gate)
            kernels = able and (machine.built or (machine.compiler and worth))
        half = how.products == "bf16" or (how.products == "auto" and kernels and machine.bf16)
        return EngineSpec(kernels, half, machine.threads)

    def with_kernels(self) -> Job:
        """Compiled although the run is too short to gain time by it: they need less memory than plain torch."""
        assert self.asked is not None
        recipe = replace(self.asked, how=replace(self.asked.how, compile="on"))
        return Job(recipe, self.shape, self.load, self.machine)

    def with_how(self, how: ExecutionConfig) -> Job:
        job = copy.copy(self)
        job.recipe = replace(self.recipe, how=how)
        job.engine = replace(self.engine, half=how.products == "bf16")
        return job

    def peak(self, budget_bytes: int) -> int:
        return max(map(memory.peak, memory.stages(self, budget_bytes).values()))

    def clock(self) -> seconds.Clock:
        return seconds.Clock(self, self.machine.rates)

    def seconds(self) -> float:
        return sum(self.clock().stages().values())


def _states(job: Job) -> list[str]:
    """Precisions of AdamW's moments, from the one that was asked for down, where there is code for others."""
    asked, order = job.recipe.how.optimizer_state, list(STATE_BYTES)
    if not job.engine.kernels or job.recipe.train.optimizer != "adamw":
        return [asked]
    return [state for state in order[order.index(asked) :] if state in job.scheme.method.optimizer_states]


def ways(job: Job) -> Iterator[ExecutionConfig]:
    """As asked first, then all that need less, in any combination; the last needs least."""
    asked = job.recipe.how
    size = asked.micro_batch_tokens
    sizes = [size, *(n for n in (512, 256, 128, SMALLEST) if n < size)]
    # bf16 products need code for every size; where nobody asked for them, they can be left out
    products = [asked.products] + (["fp32"] if job.free_products and asked.products == "bf16" else [])
    axes: dict[str, list[Any]] = {
        "products": products,
        "optimizer_state": _states(job),
        "trunk_order": [asked.trunk_order] + (["blocks"] if asked.trunk_order == "rows" else []),
        "spare_memory": sorted({asked.spare_memory, True}),
        "recompute": sorted({asked.recompute, True}),
        "micro_batch_tokens": sizes,
    }
    for values in itertools.product(*axes.values()):
        yield replace(asked, **dict(zip(axes, values, strict=True)))


def least(job: Job) -> Job:
    """The execution that needs least."""
    return job.with_how(list(ways(job))[-1])


def choose(job: Job, budget_bytes: int) -> Job | None:
    """As asked, if that fits; else the fastest way that does."""
    best: tuple[float, Job] | None = None
    for number, way in enumerate(ways(job)):
        tried = job.with_how(way)
        if budget_bytes and tried.peak(budget_bytes) > (1 - SLACK) * budget_bytes:
            continue
        if number == 0:
            return tried
        took = tried.seconds()
        if best is None or took < best[0]:
            best = (took, tried)
    return best[1] if best else None


@dataclass(frozen=True)
class Change:
    """Settings that make a run smaller."""

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
    """The upper part of what is trained: the trunk grows, and with it what runs only once."""
    blocks, found = scheme.blocks, []
    for share in (0.75, 0.5, 0.25, 0.0):
        kept = blocks[-max(1, round(share * len(blocks))) :]
        spec: Any = f"{kept[0]}-{kept[-1]}" if kept[-1] - kept[0] + 1 == len(kept) else list(kept)
        if len(kept) < len(blocks) and spec not in found:
            found.append(spec)
    return found


def _tensor_options(tensors: Sequence[str]) -> list[list[str]]:
    wanted = ([t for t in TENSORS if t != "gate"], [*ATTENTION, "down"], [*ATTENTION], ["v", "o"])
    options = [[t for t in some if t in tensors] for some in wanted]
    return [some for n, some in enumerate(options) if some and set(some) < set(tensors) and some not in options[:n]]


def smaller(job: Job) -> Iterator[Change]:
    """Runs that learn less, those that learn most of it first."""
    update = job.recipe.update
    axes: dict[str, list[Any]] = {"model.frozen": ["auto"] if job.recipe.model.frozen == "dense" else []}
    if update.parts:
        axes["update.parts"] = [
            [replace(part, channels=min(part.channels, share)) for part in update.parts] for share in CHANNELS[1:]
        ]
    else:
        axes["update.blocks"] = _block_options(job.scheme)
        if update.weights:  # biases and norms are few: fewer tensors would save nothing
            axes["update.tensors"] = _tensor_options(update.tensors)
        if job.scheme.method.ranked:
            axes["update.rank"] = [rank for rank in (8, 4, 2) if rank < update.rank]
        elif update.weights:
            axes["update.channels"] = [share for share in CHANNELS if share < update.channels]
    found: list[tuple[int, int, Change]] = []
    for picked in itertools.product(*([None, *values] for values in axes.values())):
        settings = {key: value for key, value in zip(axes, picked, strict=True) if value is not None}
        if not settings:
            continue
        try:
            change = Change(settings, _changed(job, settings))
        except ConfigError:
            continue  # does not go with the rest of the recipe
        found.append((-trained_parameters(change.job.shape, change.job.scheme), len(settings), change))
    yield from (change for _, _, change in sorted(found, key=lambda one: one[:2]))


def _changed(job: Job, settings: dict[str, Any]) -> Job:
    recipe = job.recipe
    for key, value in settings.items():
        part, _, name = key.partition(".")
        recipe = replace(recipe, **{part: replace(getattr(recipe, part), **{name: value})})
    shape = replace(job.shape, dense=False) if "model.frozen" in settings else job.shape
    load = job.load.cut(settings["data.max_tokens"]) if "data.max_tokens" in settings else job.load
    changed = Job(recipe, shape, load, job.machine, job.engine)
    changed.free_products = job.free_products
    return changed


def fits(job: Job, budget_bytes: int) -> int | None:
    """The least that it needs, if that is within the budget."""
    need = least(job).peak(budget_bytes)
    return need if need <= (1 - SLACK) * budget_bytes else None


def proposals(job: Job, budget_bytes: int) -> list[str]:
    """Up to three settings of different kinds that were tried and fit."""
    found: dict[str, str] = {}
    shorter = (n for n in (256, 128, 64) if n < job.load.longest)
    shorter_rows = (Change({"data.max_tokens": n}, _changed(job, {"data.max_tokens": n})) for n in shorter)
    for change in sorted([*smaller(job), *shorter_rows], key=lambda one: len(one.settings)):
        kind = " ".join(change.settings)
        if kind in found or (len(found) >= 1 and len(change.settings) > 1):
            continue
        need = fits(change.job, budget_bytes)
        if need is not None:
            found[kind] = f"`{change.options()}` fits in {size(need)}"
        if len(found) == 3:
            break
    return list(found.values())


def make(job: Job, budget_bytes: int, fit: bool = False) -> tuple[Job, dict[str, Any]]:
    """(the run as it is done, the plan as plan.json holds it); DoesNotFitError if it cannot be done."""
    chosen = choose(job, budget_bytes)
    to_fit = chosen is None and job.asked is not None
    if to_fit:
        job = job.with_kernels()
        chosen = choose(job, budget_bytes)
    changed: list[str] = []
    if chosen is None and fit:
        for change in smaller(job):
            if fits(change.job, budget_bytes) is not None and (chosen := choose(change.job, budget_bytes)):
                before = {key: operator.attrgetter(key)(job.recipe) for key in change.settings}
                changed = [f"{key} {_yaml(before[key])} → {_yaml(value)}" for key, value in change.settings.items()]
                break
    if chosen is None:
        raise _refusal(job, budget_bytes, fit)
    return chosen, {**_figures(job, chosen, budget_bytes), "changed": changed, "compiled_to_fit": to_fit}


def _refusal(job: Job, budget_bytes: int, fit: bool) -> DoesNotFitError:
    stages = memory.stages(least(job), budget_bytes)
    worst = max(stages, key=lambda name: memory.peak(stages[name]))
    tried = proposals(job, budget_bytes)
    hint = ", ".join(tried) + ("" if fit else "; or let `--fit` choose")
    if not tried:
        terms = sorted(stages[worst].items(), key=lambda item: -item[1])
        largest = ", ".join(f"{term} {size(count)}" for term, count in terms[:2])
        hint = f"nothing smaller that was tried fits ({largest} at the least): use a smaller model, or more memory"
    return DoesNotFitError(
        f"this needs {size(memory.peak(stages[worst]))} at the least (in the {worst} stage), "
        f"and {size(budget_bytes)} are allowed",
        hint,
    )


def _figures(asked: Job, chosen: Job, budget_bytes: int) -> dict[str, Any]:
    stages = memory.stages(chosen, budget_bytes)
    clock = chosen.clock()
    took = clock.stages()
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
                "resident_bytes": sum(terms.values()),  # with pages of a file that give way
                "terms": terms,
                "seconds": round(took.get(name, 0.0), 2) if machine.timed else None,
            }
            for name, terms in stages.items()
        },
        "seconds": round(sum(took.values()), 1) if machine.timed else None,
        "search_seconds": round(took.get("search", 0.0), 1) if machine.timed else None,  # before training
        "bound": max(clock.parts, key=clock.parts.__getitem__, default="matrix products"),
        "disk": disk_bytes(chosen),
        "machine": {"name": machine.name, "threads": chosen.engine.threads, "rates": machine.rates.source},
        "engine": {"kernels": chosen.engine.kernels, "half": chosen.engine.half},
        "how": dataclasses.asdict(how),
        "smaller": _halved(chosen, budget_bytes),
        "trained_parameters": chosen.trained,
        "steps": load.steps,
        "rows": {
            "train": load.train_rows,
            "heldout": load.heldout_rows,
            "longest": load.longest,
            "tokens": load.row_tokens,
            "tree_tokens": load.train_tree_tokens,
            "sampled": load.sampled,
        },
        "asked": dataclasses.asdict(replace(asked.recipe.how, products=how.products)),
    }


def _halved(job: Job, budget_bytes: int) -> dict[str, int]:
    """Bytes of training with smaller micro-batches, which a run goes to when memory turns out to be short."""
    sizes, tokens = {}, job.recipe.how.micro_batch_tokens // 2
    while tokens >= SMALLEST:
        smaller = job.with_how(replace(job.recipe.how, micro_batch_tokens=tokens))
        sizes[str(tokens)] = memory.peak(memory.stages(smaller, budget_bytes)["train"])
        tokens //= 2
    return sizes


def disk_bytes(job: Job) -> dict[str, int]:
    """By what is written."""
    how, trained = job.recipe.how, job.trained
    cache, between = memory.boundary_bytes(job)
    cached = job.scheme.cut > 0 and how.trunk == "cache"
    state = memory.state_bytes(job.recipe)
    return {
        "trunk cache": cache if cached else 0,
        "trunk, while it is made": between if cached and job.scheme.cut > 1 else 0,
        # one more than is kept: the oldest goes when the newest is there
        "checkpoints": int((how.keep_checkpoints + 1) * trained * (4 + state)),
        "best weights": 2 * 4 * trained,
        "exported model": job.exported_bytes,
    }


def disk_needs(run: Run, shape: Shape, scheme: Scheme) -> list[Need]:
    """What a run will still write, except the trunk cache, whose size is known only when the rows are."""
    how, trained = run.effective.how, trained_parameters(shape, scheme)
    needs: list[Need] = []
    if not run.tokens.is_file():
        rows = Path(run.recipe.data.path) if run.recipe.data.path else None
        if rows is not None and os.path.isfile(rows):  # of a folder, nobody knows yet which files are rows
            needs.append((run.path, "tokens", 2 * path_size(rows)))  # ids, and the rows' own text
    if not run.done.is_file():
        each = int(trained * (4 + STATE_BYTES[how.optimizer_state]))  # weights and AdamW's two moments
        # one more than is kept: the oldest goes when the newest is there
        needs.append((run.path, "checkpoints", max(0, (how.keep_checkpoints + 1) * each - path_size(run.checkpoints))))
        needs.append((run.path, "best weights", max(0, 2 * 4 * trained - path_size(run.best))))
    if not (run.exported.is_file() and run.model.is_file()):
        needs.append((run.path, "exported model", exported_bytes(shape, scheme, run.recipe.export.type)))
    return needs


def size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
