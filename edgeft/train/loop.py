"""The training loop: from the trunk's cache to the best checkpoint.

The order of rows, the schedule and the optimiser depend on the recipe and the step alone, so a resumed run
ends with the same bits as an uninterrupted one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from edgeft.data.forest import Forest, epoch_order
from edgeft.data.tokens import Encoded
from edgeft.engine.optimizer import is_bias_or_norm
from edgeft.engine.stack import Batch, Stack, batch_of
from edgeft.errors import DamagedError, DoesNotFitError, EdgeftError, RunError, StoppedError
from edgeft.host.files import disk_size
from edgeft.host.system import peak_bytes
from edgeft.methods.layer import checkpoint_tensors
from edgeft.methods.scheme import Rotation, Scheme
from edgeft.plan import disk, shape_of_config
from edgeft.plan.flops import Pass, choosing_rows, step_flops
from edgeft.plan.flops import Schedule as Schedule
from edgeft.run import events
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from edgeft.train import checkpoint, trunk
from edgeft.train.average import Average
from edgeft.train.governor import Governor, stop_requests
from edgeft.train.nodes import NodeLostError, Nodes
from edgeft.train.totals import Guard, Remaining, StepTotals
from edgeft.train.watch import Watch, is_out_of_memory


class Trainer:
    """One run's training. `parameters` are the trained ones by name; everything else is frozen."""

    def __init__(
        self,
        run: Run,
        stack: Stack,
        scheme: Scheme,
        parameters: dict[str, nn.Parameter],
        sides: tuple[list[Encoded], list[Encoded]],
        progress: Progress,
        nodes: Nodes = Nodes(),
    ) -> None:
        """sides: training and held-out rows."""
        train, heldout = sides
        self.recipe, self.nodes = run.effective, nodes
        self.run, self.stack, self.scheme, self.parameters = run, stack, scheme, parameters
        self.average = Average(parameters, self.recipe.train.average)
        self.stored = checkpoint_tensors(stack, parameters) | self.average.tensors()
        self.progress = progress
        how = self.recipe.how
        self.backend, self.memory = stack.options.backend, stack.options.backend.memory
        stack.configure(recompute=scheme.recompute(how.recompute))
        if scheme.frugal and self.backend.runs_blocks:
            self.memory.map_large_buffers()  # autograd's own sums, outside the pool, left 100 to 200 MiB of holes
        self.schedule = Schedule(len(train), self.recipe.train, stack.width)
        heldout = heldout[: self.schedule.validation_rows(len(heldout))]
        self.forest = Forest(train + heldout, share=how.tree)
        self.rows = list(range(len(train)))
        self.live = self.forest.live(self.rows, scheme.tokens) if scheme.tokens else None
        self.heldout = list(range(len(train), len(train) + len(heldout)))
        self.rotation = Rotation(scheme, self.recipe.train.seed)
        self.optimizer = scheme.method.optimizer(stack, parameters, self.recipe)
        self.shape = shape_of_config(stack.arch, stack.config)
        self.step = self.best_step = 0
        self.best_loss, self.base_loss = math.inf, math.nan
        self.trained_s = self.checkpoint_s = 0.0  # in steps, by all processes of this run; writing checkpoints, in this
        self.save_s, self.save_bytes = 0.0, 0  # of the last checkpoint
        self.saved: int | None = None  # step of the last checkpoint
        self.saved_at = 0.0
        self.disk_bytes = disk_size(run.path)
        self.guard = Guard()
        self.began = time.monotonic()
        self.governor = Governor(run, progress)  # `fit` makes one that handles stop requests
        self.trunk = trunk.Trunk(stack, scheme.cut, None)  # `fit` opens the cache
        self._epoch, self._order = -1, list[int]()  # rows of an epoch, in their order
        self.process = psutil.Process()
        longest = max(map(len, self.forest.paths))
        # no reference to self: a cycle would keep an unused trainer alive, and with it the lock of its run
        process, pool = self.process, self.memory.pool
        rss = lambda: int(process.memory_info().rss)  # noqa: E731
        self.watch = Watch(run, progress, longest, rss, pool.resize)
        self.remaining = Remaining(run.read_json(run.plan) or {}, self.schedule.steps)

    @property
    def main(self) -> str:
        """The parameter whose learning rate is shown: a bias or norm only where nothing else is trained."""
        return min(self.parameters, key=is_bias_or_norm)

    def _choose_channels(self) -> None:
        """`update.choose: gradient`: a backward pass over a few rows."""
        order = epoch_order(self.forest, self.rows, self.recipe.train.seed, 0, grouped=False)
        rows = order[: choosing_rows([len(self.forest.paths[row]) for row in order])]
        before = self.stack.options.recompute
        self.stack.configure(recompute="none")  # whole inputs are looked at
        chosen: bool | None = None
        while chosen is None:
            # inputs are kept beside what training keeps; where that is recomputed, one row at a time
            parts = self.forest.micro_batches(rows, self.watch.tokens // 2 if before == "none" else 1)
            try:
                chosen = self.scheme.method.choose_channels(self.stack, self.scheme, partial(self._observe, parts))
            except (MemoryError, RuntimeError) as error:
                self._out_of_memory(error)
        self.stack.configure(recompute=before)
        if not chosen:
            return
        self.memory.pool.resize(self.memory.pool.rows)  # it used buffers of other widths than training does
        self.memory.trim(always=True)  # and part of it ran in plain torch, outside the pool
        self.progress.line(f"directions or channels chosen by the gradients of {len(rows)} rows")

    def _observe(self, parts: Iterable[list[int]]) -> None:
        for part in parts:
            self.loss(*batch_of(self.forest, part, self.live)).backward()  # type: ignore[no-untyped-call]
            self.optimizer.clear()

    def step_rows(self, step: int) -> list[int]:
        epoch, place = divmod(step, self.schedule.per_epoch)
        if self._epoch != epoch:
            grouped = self.recipe.train.order == "grouped"
            self._order = epoch_order(self.forest, self.rows, self.recipe.train.seed, epoch, grouped)
            self._epoch = epoch
        size = self.recipe.train.batch_rows
        return self._order[place * size : (place + 1) * size]

    def backward(self, rows: list[int], stopping: Callable[[], bool]) -> StepTotals | None:
        """Gradients of the mean loss over all targets of these rows, whatever the micro-batches; None: stopped.

        Of several nodes, this one's part of the sum.
        """
        targets = self.forest.trained(rows)
        parts = self._parts(self._share(rows))
        totals = StepTotals()
        if not parts and not self.nodes.agree():
            return None
        while parts:
            if stopping():
                self.nodes.agree(stops=True)
                return None
            if self.watch.check_memory():  # the same rows in smaller micro-batches
                parts = self._parts([row for part in parts for row in part])
            part = parts.pop(0)
            nodes, batch = batch_of(self.forest, part, self.live)
            piece = self.loss(nodes, batch) / targets
            totals.loss += float(piece.detach())
            if not parts and not self.nodes.agree():
                return None
            with nullcontext() if parts else self._last_pass(totals.loss):
                piece.backward()  # type: ignore[no-untyped-call]
            del piece  # its graph would hold memory into the next pass
            totals.tokens += len(nodes)
            totals.flops += self.flops(batch)
        return totals

    @contextmanager
    def _last_pass(self, loss: float) -> Iterator[None]:
        with self.nodes.adding(self.parameters.values(), self.memory.gradients), self.optimizer.last_pass(loss):
            yield

    def _share(self, rows: list[int]) -> list[int]:
        """This node's part of them."""
        return self.forest.split(rows, self.nodes.count)[self.nodes.rank] if self.nodes.several else rows

    def _parts(self, rows: list[int]) -> list[list[int]]:
        return list(self.forest.micro_batches(rows, self.watch.tokens))

    def loss(self, nodes: np.ndarray, batch: Batch) -> torch.Tensor:
        """Sum over the batch's targets."""
        at_cut = self.trunk.hidden(nodes, batch)
        hidden = self.stack.top(at_cut, batch, self.scheme.cut)
        return self.stack.head.loss(hidden, batch.targets)

    def flops(self, batch: Batch) -> float:
        """Forward and backward, of this batch."""
        queries = torch.unique(batch.at)
        context = batch.positions + 1  # tokens that each one attends to
        live = context if batch.tree.live is None else context[batch.tree.live]
        counts = len(context), int(context.sum()), len(queries), int(context[queries].sum()), len(batch.targets)
        sizes = Pass(*counts, len(live), int(live.sum()))
        active = self.rotation.active
        below = [step_flops(self.shape, scheme, sizes, back=False) for scheme in (self.scheme, active)]
        return step_flops(self.shape, active, sizes) + below[0] - below[1]

    def heldout_loss(self) -> float:
        """Mean nats per target over the held-out rows."""
        if not self.heldout:
            return math.nan
        total = 0.0
        with torch.no_grad():
            for part in self.forest.micro_batches(self._share(self.heldout), self.watch.tokens):
                self.governor.pause_if_needed()  # a stop request waits until this loop is done
                total += float(self.loss(*batch_of(self.forest, part)))
        return self.nodes.sum(total)[0] / self.forest.trained(self.heldout)

    def trunk_job(self, model_id: str) -> trunk.Job:
        products = self.stack.options.products
        computed_by = self.backend.name + ("" if products == "fp32" else f" {products}")
        return trunk.Job(self.stack, self.forest, self.scheme.cut, self.recipe, model_id, computed_by)

    def fit(self, job: trunk.Job) -> None:
        self.began = time.monotonic()
        with stop_requests() as stop_requested:
            self.governor = Governor(self.run, self.progress, stop_requested)
            with self.run.stage("trunk"):
                ready = trunk.prepare(self.run, job, self.progress, self._between_trunks, lambda: self.watch.tokens)
                if ready is None:
                    raise self._stopped()
            self.trunk = ready
            self.memory.trim()
            self.nodes.wait()
            self.nodes.take_newest(self.run, damage_reporter(self.run, self.progress))
            self._restore()
            self._fit(lambda: self.governor.pause_if_needed(self.save))  # the machine may lose power in a pause

    def _between_trunks(self) -> bool:
        """True: stop requested."""
        self.watch.check_memory("trunk")
        return self.governor.pause_if_needed()

    def _fit(self, stopping: Callable[[], bool]) -> None:
        validate_after = self.schedule.validate_after()
        self.memory.pool.resize(max(self.watch.tokens, max(map(len, self.forest.paths))))
        self.progress.stage("train", self.schedule.steps)
        self.progress.advance(self.step)
        if self.step == 0:
            self._begin()
        self.schedule.base_loss = self.base_loss
        peak = self.schedule.low_rank_peak if self.main.endswith(".up") else self.schedule.peak
        self.progress.line(f"{self.schedule.steps} steps, peak learning rate {peak:.2g}")
        self.saved_at = time.monotonic()
        while self.step < self.schedule.steps:
            if not self._train_step(stopping):
                continue
            if self.step in validate_after:
                self._validate()
            if time.monotonic() - self.saved_at >= self._save_every():
                self.save()
        self.save()
        self.progress.end()
        self._write_done()

    def _begin(self) -> None:
        """Chooses channels, computes the held-out loss before training, and saves the weights for a rollback."""
        checkpoint.delete(self.run.best)  # of an attempt whose checkpoints are lost
        self._choose_channels()
        self.nodes.align(self.stored)
        begin = self.governor.worked_s()
        products = self.stack.options.products
        of = f"{len(self.rows)} rows, {len(self.heldout)} held out" + ("" if products == "fp32" else f", {products}")
        of += self.scheme.method.base_note
        # a value of an earlier run may be on one of several nodes only
        cached = not self.nodes.several
        self.base_loss = self.trunk.cached_value("base_loss", of, self.heldout_loss) if cached else self.heldout_loss()
        self.run.log(events.ValidationEvent(0, self.base_loss, round(self.governor.worked_s() - begin, 3)))
        self.progress.line(f"held-out loss before training: {self.base_loss:.4f}")
        self.save()

    def _train_step(self, stopping: Callable[[], bool]) -> bool:
        """One optimiser step; False: it was skipped, or is repeated in smaller micro-batches."""
        begin = self.governor.worked_s()
        rates = (self.schedule.lr, self.schedule.bias_lr, self.schedule.low_rank_lr)
        self.optimizer.set_rate(*(rate(self.step) * self.guard.rate for rate in rates))
        self.rotation.advance(self.step, self.parameters, self.optimizer)
        try:
            totals = self.backward(self.step_rows(self.step), stopping)
            if totals is not None:
                totals = self.nodes.add(totals, self.parameters.values())
        except NodeLostError:
            self.optimizer.clear()
            self.save()
            raise
        except (DoesNotFitError, MemoryError, RuntimeError) as error:
            self._out_of_memory(error)
            return False
        if totals is None:
            self.optimizer.clear()
            self.save()
            raise self._stopped()
        norm = self.optimizer.step()
        self.step += 1
        self.average.add(self.step)
        seconds = self.governor.worked_s() - begin
        self.trained_s += seconds
        if not self.guard.good(totals.loss, norm):
            self._skip_step(totals.loss, norm)
            return False
        rss = self.process.memory_info().rss
        self.run.log(
            events.StepEvent(
                self.step, totals.loss, self.optimizer.rate(self.main), norm, totals.tokens, totals.flops,
                round(seconds, 4), rss, self.watch.planned_bytes, self._remaining_s(seconds),
            )
        )  # fmt: skip
        note = f"loss {totals.loss:.3f} · {totals.tokens / seconds:.0f} tokens/s · {rss / 2**30:.2f} GiB"
        self.progress.advance(1, note + self.governor.note)
        return True

    def _write_done(self) -> None:
        if not self.best_step:
            raise EdgeftError(
                "the held-out loss was never finite",
                f"start another run with a lower rate, for example --set train.lr={self.recipe.train.lr / 4:g}",
            )
        self.run.write_json(
            self.run.done,
            {
                "steps": self.step,
                "base_loss": self.base_loss,
                "best_loss": self.best_loss,
                "best_step": self.best_step,
                "train_seconds": round(self.trained_s, 2),  # steps only
                "seconds": round(time.monotonic() - self.began, 2),  # of the last process, with trunk and validation
                "cpu_seconds": round(time.process_time(), 2),  # of the last process, with loading
                "trained_parameters": sum(p.numel() for p in self.parameters.values()),
                "skipped_steps": self.guard.skipped,
                "rate_factor": self.guard.rate,
                "peak_bytes": peak_bytes(),
                "checkpoint_s": round(self.checkpoint_s, 3),  # of the last process
                **self.governor.totals(),
            },
        )

    def _remaining_s(self, seconds: float) -> float | None:
        """Remaining seconds of the run, with all later stages; this step took `seconds`."""
        self.remaining.step(seconds)
        left = self.remaining.left(self.step)
        if left is None:
            return None
        self.progress.left(*left)
        return round(left[1], 1)

    def _out_of_memory(self, error: Exception) -> None:
        """The step is repeated in smaller micro-batches; if that is not possible, the run is saved and stops."""
        if not isinstance(error, DoesNotFitError) and not is_out_of_memory(error):
            raise error
        self.optimizer.clear()
        can_repeat = not isinstance(error, DoesNotFitError) and not self.recipe.how.step_in_place
        can_repeat = can_repeat and self.nodes.sums is None  # others have gradients of this step already
        if can_repeat and self.watch.shrink("out of memory"):
            return
        self.save()
        raise error if isinstance(error, DoesNotFitError) else self.watch.out_of_memory() from None

    def _validate(self) -> None:
        begin = self.governor.worked_s()
        self.nodes.align(self.stored)
        with self.average.applied():
            loss = self.heldout_loss()
        better = loss < self.best_loss or not self.heldout
        seconds = round(self.governor.worked_s() - begin, 3)
        self.run.log(events.ValidationEvent(self.step, loss, seconds, better))
        self.progress.line(f"step {self.step}: held-out loss {loss:.4f}{' (best so far)' if better else ''}")
        if better:
            self.best_loss, self.best_step = loss, self.step
            self.save()

    def _skip_step(self, loss: float, norm: float) -> None:
        """The step did not change the weights; after several in a row, training rolls back, once."""
        guard, why = self.guard, self.guard.why(loss, norm)
        self.run.log(events.SkippedEvent(self.step, why, guard.in_row))
        self.progress.advance(1)
        self.progress.line(f"step {self.step}: {why}; skipped")
        if guard.in_row < guard.LIMIT:
            if self.step in self.schedule.validate_after():
                self._validate()
            return
        if guard.rate < 1:
            raise EdgeftError(
                f"training diverged again, at half the learning rate: {why} at step {self.step}",
                f"start another run with a lower rate, for example --set train.lr={self.recipe.train.lr / 8:g}",
            )
        self._roll_back()

    def _roll_back(self) -> None:
        """To the best weights so far, or the initial ones, at half the rate.

        The choice depends on the steps alone, not on when checkpoints were written: a run that is killed and resumed
        rolls back to the same weights. The moments are reset, since they led here.
        """
        good = self.run.best if self.best_step else checkpoint.name(self.run.checkpoints, 0)
        self.optimizer.forget()
        self._check_names(checkpoint.read(good, checkpoint.into(self.stored, checkpoint.skip))[0])
        self.step, self.saved = self.best_step, None
        self.guard.halve_rate()
        self.save()
        checkpoint.drop_after(self.run.checkpoints, self.step)
        self.run.log(events.RollbackEvent(self.step, self.guard.rate))
        self.progress.line(f"rolled back to step {self.step}, at half the learning rate")
        self.progress.stage("train", self.schedule.steps)
        self.progress.advance(self.step)

    def _check_names(self, tensors: dict[str, torch.Tensor]) -> None:
        missing = self.stored.keys() - tensors.keys()
        if missing:
            raise EdgeftError(f"a checkpoint of {self.run.path} has no {min(missing)}", "it belongs to another recipe")

    def _save_every(self) -> float:
        """Seconds; 0 means after every step."""
        share = self.save_bytes / self.disk_bytes if self.disk_bytes else 0.0  # some file systems report no size
        return disk.save_every(self.recipe.how.checkpoint_s, self.remaining.training_s(), self.save_s, share)

    def save(self) -> None:
        """Unless this step is saved. Not used within a validation: a resume would skip that validation."""
        if self.saved == self.step:
            return
        begin = time.monotonic()
        path = checkpoint.name(self.run.checkpoints, self.step)
        checkpoint.make_room(self.run.checkpoints, self.run.best, self.recipe.how.keep_checkpoints)
        self._write(path)
        self.save_bytes = path.stat().st_size
        if self.step and self.step == self.best_step:
            checkpoint.name_best(path, self.run.best)
        self.saved, self.saved_at = self.step, time.monotonic()
        self.save_s = self.saved_at - begin
        self.checkpoint_s += self.save_s
        self.run.log(events.CheckpointEvent(self.step, round(self.save_s, 3)))

    def _write(self, path: Path) -> None:
        moments, numbers = self.optimizer.state()
        tensors: dict[str, torch.Tensor] = {**self.stored, **moments}
        state = {
            "optimizer": dict(sorted(numbers.items())),  # a resumed run writes the same bytes
            "step": self.step,
            "best_loss": self.best_loss if math.isfinite(self.best_loss) else None,
            "best_step": self.best_step,
            "base_loss": self.base_loss,
            "guard": asdict(self.guard),
        }  # nothing that depends on the time: the same run writes the same bytes
        checkpoint.write(path, tensors, state)

    def _restore(self) -> None:
        report = damage_reporter(self.run, self.progress)
        folder, best = self.run.checkpoints, self.run.best
        found = checkpoint.all_of(folder, best)
        newest = checkpoint.newest(folder, report, checkpoint.into(self.stored), best)
        if newest is None:
            if found:
                self.progress.line("no checkpoint is left to resume from: training starts again")
            return
        tensors, state = newest
        self._check_names(tensors)
        self.optimizer.restore(tensors, state["optimizer"])
        self.step = self.saved = int(state["step"])
        self.best_loss = math.inf if state["best_loss"] is None else float(state["best_loss"])
        self.best_step = int(state["best_step"])
        self.base_loss = float(state["base_loss"])
        steps = events.read_events(events.StepEvent, self.run.events())
        self.trained_s = sum({step.step: step.seconds for step in steps if step.step <= self.step}.values())
        self.guard = Guard(**state["guard"])
        self._restore_best(report)
        self.run.log(events.ResumeEvent(self.step))
        self.progress.line(f"resumed after step {self.step}")

    def _restore_best(self, report: checkpoint.Report) -> None:
        if not self.best_step:
            return
        path = checkpoint.name(self.run.checkpoints, self.step)
        if self.step == self.best_step and path.is_file():
            checkpoint.name_best(path, self.run.best)  # killed before that, or another best one was damaged
            return
        try:
            checkpoint.best(self.run, self.best_step, report, checkpoint.skip)
        except DamagedError as error:
            report(self.run.best, f"{error.message}; the best of the following steps is kept instead")
            checkpoint.delete(self.run.best)
            self.best_loss, self.best_step = math.inf, 0

    def _stopped(self) -> StoppedError:
        return StoppedError(
            f"stopped at step {self.step} of {self.schedule.steps}; everything so far is saved",
            f"continue with `edgeft finetune --resume --out {self.run.path}`",
        )


def damage_reporter(run: Run, progress: Progress) -> checkpoint.Report:
    """Reports a damaged file on the screen and in metrics.jsonl."""

    def report(path: Path, what: str) -> None:
        run.log(events.DamagedEvent(path.name, what))
        progress.line(what)

    return report


def load_trained(stored: dict[str, torch.Tensor], run: Run, progress: Progress) -> dict[str, Any]:
    """Reads the best checkpoint into a stack with the scheme applied; stored: the stack's tensors by name."""
    done = run.read_json(run.done) or {}
    wrong = f"{run.best} is not of this model and recipe", "export with the model that the run was made with"
    report, best_step = damage_reporter(run, progress), int(done.get("best_step", 0))
    try:
        tensors, state = checkpoint.best(run, best_step, report, checkpoint.into(stored, checkpoint.skip))
    except RunError:
        raise
    except EdgeftError:  # a tensor of another shape
        raise DamagedError(*wrong) from None
    if stored.keys() - tensors.keys():
        raise DamagedError(*wrong)
    return state
