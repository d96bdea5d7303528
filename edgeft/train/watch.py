"""Memory while a run goes on: what it uses beside what was planned, and smaller micro-batches before the system acts.

Only how a step's rows are cut into passes changes here: their gradients add up to the same sums.
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

LOOK_S = 0.2  # between two looks: each reads a few small files
MARGIN_SHARE = 0.02  # of the machine's memory, or of its control group's, that is left alone
LEAST_MARGIN, MOST_MARGIN = 16 << 20, 256 << 20
SMALLEST = 64  # tokens of a micro-batch; products of fewer are too thin to be worth it


def is_refusal(error: BaseException) -> bool:
    """Did the system refuse memory? That is how a limit on data (RLIMIT_DATA) shows itself."""
    refused = isinstance(error, RuntimeError) and ("allocate memory" in str(error) or "bad_alloc" in str(error))
    return refused or isinstance(error, MemoryError)


class Watch:
    """Asked between micro-batches."""

    def __init__(
        self,
        run: Run,
        progress: Progress,
        longest: int,
        resident: Callable[[], int],
        give_back: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """longest: tokens of a row, below which no micro-batch can be; give_back: lets go of the buffers that are kept
        for the next pass, which will have so many tokens at the most."""
        self.run, self.progress, self.longest = run, progress, longest
        self._resident, self._give_back = resident, give_back
        self.root: Path = device.ROOT
        self.clock: Callable[[], float] = time.monotonic
        plan: dict[str, Any] = run.read_json(run.plan) or {}
        stages, smaller = plan.get("stages") or {}, plan.get("smaller") or {}
        self.budget_bytes = int(plan.get("budget_bytes") or 0)
        self.tokens = run.effective.how.micro_batch_tokens  # of a micro-batch: halved where memory runs short
        self._planned = {int(tokens): int(size) for tokens, size in smaller.items()}
        self._planned[self.tokens] = int((stages.get("train") or {}).get("bytes", 0))
        self._planned_trunk = int((stages.get("trunk") or {}).get("bytes", 0))
        self._looked = float("-inf")
        self._over = 0  # micro-batch at which the budget was passed last: told once

    @property
    def planned_bytes(self) -> int:
        """Of training with micro-batches as they are now; 0: nothing was planned."""
        return self._planned.get(self.tokens, 0)

    def check_memory(self, stage: str = "train") -> bool:
        """True: micro-batches are smaller from now on. DoesNotFitError where that does not help."""
        if self.clock() - self._looked < LOOK_S:
            return False
        self._looked = self.clock()
        if not self._short(stage):
            return self._over_budget()
        if self.smaller("the machine's memory is nearly used up"):
            return True
        self._back()
        if self._short(stage):
            memory = device.memory(self.root)
            raise self.refused(f"only {memory.available_bytes >> 20} MiB of memory are left on this machine")
        return False

    def smaller(self, why: str) -> bool:
        """Half the micro-batch, if there is one: rows are not cut."""
        half = self.tokens // 2
        if half < SMALLEST or self.tokens <= self.longest:
            return False
        before, self.tokens = self.tokens, half
        resident = self._resident()
        self._back()
        self.run.log(MemoryEvent(why, resident, half, device.memory(self.root).available_bytes))
        self.progress.line(f"{why}: micro-batches of {half} tokens instead of {before}")
        return True

    def refused(self, what: str = "the system gave no more memory") -> DoesNotFitError:
        """The error where passes cannot be smaller; it is logged."""
        self.run.log(MemoryEvent(what, self._resident(), stopped=True))
        return DoesNotFitError(
            f"{what}; stopped, and everything so far is saved",
            f"close other programs and go on with `edgeft finetune --resume --out {self.run.path}`, "
            f"or start another run with less: `edgeft plan --memory … --fit`",
        )

    def _short(self, stage: str) -> bool:
        """Is less left than the margin, or than the plan is still going to take?"""
        memory = device.memory(self.root)
        margin = min(MOST_MARGIN, max(LEAST_MARGIN, int(MARGIN_SHARE * memory.ram_bytes)))
        planned = self._planned_trunk if stage == "trunk" else self.planned_bytes
        return memory.available_bytes < max(margin, planned - self._resident())

    def _over_budget(self) -> bool:
        """The plan was wrong: smaller passes bring a run back, and if not it goes on, since the machine has room."""
        resident = self._resident()
        if not self.budget_bytes or resident <= self.budget_bytes or self._over == self.tokens:
            return False
        self._over = self.tokens
        if self.smaller(f"{resident >> 20} MiB are used, and {self.budget_bytes >> 20} MiB are allowed"):
            return True
        self.run.log(MemoryEvent("over budget", resident))
        return False

    def _back(self) -> None:
        self._give_back(max(self.tokens, self.longest))
        trim_malloc()
