"""Compares the memory of a run with its plan, and makes micro-batches smaller before the system runs out of memory.

Only the split of a step's rows into micro-batches changes: their gradients add up to the same sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgeft.errors import DoesNotFitError
from edgeft.host import device
from edgeft.host.system import trim_malloc
from edgeft.run.events import MemoryEvent
from edgeft.run.folder import Run
from edgeft.run.progress import Progress

CHECK_S = 0.2  # between two checks: each reads a few small files
MARGIN_SHARE = 0.02  # of the memory of the machine or its control group that stays free
MIN_MARGIN, MAX_MARGIN = 16 << 20, 256 << 20
MIN_TOKENS = 64  # of a micro-batch; GEMMs over fewer are inefficient


def is_out_of_memory(error: BaseException) -> bool:
    """Did an allocation fail? Under RLIMIT_DATA it does."""
    failed = isinstance(error, RuntimeError) and ("allocate memory" in str(error) or "bad_alloc" in str(error))
    return failed or isinstance(error, MemoryError)


class Watch:
    """Called between micro-batches."""

    def __init__(
        self, run: Run, progress: Progress, longest: int, resident: Callable[[], int], resize: Callable[[int], None]
    ) -> None:
        """longest: tokens of the longest row, the minimum of a micro-batch; resize: frees buffers that are larger than
        micro-batches of so many tokens need."""
        self.run, self.progress, self.longest = run, progress, longest
        self._resident, self._resize = resident, resize
        self.root: Path = device.ROOT
        self.clock: Callable[[], float] = time.monotonic
        plan: dict[str, Any] = run.read_json(run.plan) or {}
        stages, smaller = plan.get("stages") or {}, plan.get("smaller") or {}
        self.budget_bytes = int(plan.get("budget_bytes") or 0)
        self.tokens = run.effective.how.micro_batch_tokens  # of a micro-batch: halved when memory is short
        self._planned = {int(tokens): int(size) for tokens, size in smaller.items()}
        self._planned[self.tokens] = int((stages.get("train") or {}).get("bytes", 0))
        self._planned_trunk = int((stages.get("trunk") or {}).get("bytes", 0))
        self._checked = float("-inf")
        self._over = 0  # micro-batch that last exceeded the budget: reported once

    @property
    def planned_bytes(self) -> int:
        """Of training with the present micro-batches; 0: there is no plan."""
        return self._planned.get(self.tokens, 0)

    def check_memory(self, stage: str = "train") -> bool:
        """True: micro-batches are smaller from now on. DoesNotFitError if that is not enough."""
        if self.clock() - self._checked < CHECK_S:
            return False
        self._checked = self.clock()
        if not self._is_short(stage):
            return self._over_budget()
        if self.shrink("this machine is nearly out of memory"):
            return True
        self._free_buffers()
        if self._is_short(stage):
            memory = device.memory(self.root)
            raise self.out_of_memory(f"only {memory.available_bytes >> 20} MiB of memory are left on this machine")
        return False

    def shrink(self, why: str) -> bool:
        """Halves the micro-batch; False: it is at its minimum, since rows are not split."""
        half = self.tokens // 2
        if half < MIN_TOKENS or self.tokens <= self.longest:
            return False
        before, self.tokens = self.tokens, half
        resident = self._resident()
        self._free_buffers()
        self.run.log(MemoryEvent(why, resident, half, device.memory(self.root).available_bytes))
        self.progress.line(f"{why}: micro-batches of {half} tokens instead of {before}")
        return True

    def out_of_memory(self, what: str = "out of memory") -> DoesNotFitError:
        """The error when micro-batches cannot be smaller; it is logged."""
        self.run.log(MemoryEvent(what, self._resident(), stopped=True))
        return DoesNotFitError(
            f"{what}; stopped, and everything so far is saved",
            f"close other programs and continue with `edgeft finetune --resume --out {self.run.path}`, "
            f"or start another run with less: `edgeft plan --memory … --fit`",
        )

    def _is_short(self, stage: str) -> bool:
        """Is less available than the margin, or than the plan still needs?"""
        memory = device.memory(self.root)
        margin = min(MAX_MARGIN, max(MIN_MARGIN, int(MARGIN_SHARE * memory.ram_bytes)))
        planned = self._planned_trunk if stage == "trunk" else self.planned_bytes
        return memory.available_bytes < max(margin, planned - self._resident())

    def _over_budget(self) -> bool:
        """The plan was wrong: micro-batches shrink; at their minimum the run continues: the machine has memory."""
        resident = self._resident()
        if not self.budget_bytes or resident <= self.budget_bytes or self._over == self.tokens:
            return False
        self._over = self.tokens
        if self.shrink(f"the run uses {resident >> 20} MiB; the limit is {self.budget_bytes >> 20} MiB"):
            return True
        self.run.log(MemoryEvent("over budget", resident))
        return False

    def _free_buffers(self) -> None:
        self._resize(max(self.tokens, self.longest))
        trim_malloc()
