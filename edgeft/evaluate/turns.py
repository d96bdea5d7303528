"""Base and tuned model in turns on the same first rows, within a time limit, until the difference is clear.

One model is loaded at a time. It catches up with the other, and goes ahead of it to where the next look at both is
worth loading the other again: rows are looked at when 24, 48, 96, … of them are scored.
"""

from __future__ import annotations

from edgeft.evaluate.score import Scores, is_clear
from edgeft.evaluate.subject import SubjectScores
from edgeft.plan.limits import EVAL_MIN_ROWS

LOOK_SHARE = 0.05  # of the seconds of the remaining rows: so long may the load for an earlier look take
MIN_STEP = 8  # rows; for fewer it ends

ALL_ROWS, TIME_LIMIT, DECIDED = "all rows", "time limit", "decided"  # why it ended


class Turns:
    """limit_s: for both models together, loads included; at least EVAL_MIN_ROWS are scored, however long they take."""

    def __init__(self, base: SubjectScores, tuned: SubjectScores, limit_s: float, began: float) -> None:
        self.base, self.tuned, self.limit_s, self.began = base, tuned, limit_s, began
        self.total = len(tuned.rows.items)
        self.least = min(EVAL_MIN_ROWS, self.total)

    @property
    def count(self) -> int:
        """Rows that both have."""
        return min(self.base.count, self.tuned.count)

    def scores(self) -> tuple[Scores, Scores]:
        """Of base and tuned, on the same rows."""
        return Scores(self.base.scores.records[: self.count]), Scores(self.tuned.scores.records[: self.count])

    def run(self) -> str:
        """Why it ended."""
        this, other = self.tuned, self.base
        try:
            ended = self._ended()
            while not ended:
                ended = self._turn(this, other)
                this.close()
                this, other = other, this
        finally:
            self.base.close()
            self.tuned.close()
        return ended

    def _turn(self, this: SubjectScores, other: SubjectScores) -> str:
        """Why scoring ended, or "": it is the other's turn."""
        while this.count < other.count:
            this.extend(min(self._next_look(this.count), other.count, self._affordable()))
            if ended := self._ended():
                return ended
        while not self._should_switch(this, other):
            this.extend(max(this.count + 1, min(self._next_look(this.count), self._affordable())))
        return ""

    def _ended(self) -> str:
        if self.count == self.total:
            return ALL_ROWS
        if self.count < self.least:
            return ""
        if is_clear(*self.scores(), self.tuned.rows.suite):
            return DECIDED
        return TIME_LIMIT if self._affordable() - self.count < MIN_STEP else ""

    def _should_switch(self, this: SubjectScores, other: SubjectScores) -> bool:
        if this.count <= other.count:
            return False
        rows = self._affordable() - this.count
        return rows < MIN_STEP or this.load_s < LOOK_SHARE * rows * (self._row_s(this) + self._row_s(other))

    def _next_look(self, count: int) -> int:
        look = self.least
        while look <= count:
            look *= 2
        return min(look, self.total)

    def _affordable(self) -> int:
        """Rows that both can be scored on within the limit, as far as is known."""
        sides = (self.base, self.tuned)
        left = self.limit_s - (self.tuned.clock() - self.began)
        left -= sum(side.load_s or other.load_s for side, other in (sides, sides[::-1]) if not self._is_ready(side))
        for row in range(self.count, self.total):
            left -= sum(self._row_s(side) for side in sides if row >= side.count and not side.is_stored(row))
            if left < 0:
                return max(row, self.least)
        return self.total

    def _is_ready(self, side: SubjectScores) -> bool:
        return side.is_open or side.count == self.total

    def _row_s(self, side: SubjectScores) -> float:
        """Measured, or that of the other model."""
        other = self.base if side is self.tuned else self.tuned
        return side.row_s or other.row_s or 0.0
