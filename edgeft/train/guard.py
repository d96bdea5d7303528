"""Steps whose loss or gradient is no finite number: skipped and counted, with what follows from too many in a row.

All of it depends on the steps alone and stands in every checkpoint, so that a resumed run does the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass
class Guard:
    LIMIT: ClassVar[int] = 3  # skipped steps in a row, after which training goes back

    skipped: int = 0  # steps so far
    in_row: int = 0  # of them, the last ones
    rate: float = 1.0  # the learning rate's factor: below 1 once training has gone back

    def good(self, loss: float, norm: float) -> bool:
        """Counts a step."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_row = 0
            return True
        self.skipped += 1
        self.in_row += 1
        return False

    def why(self, loss: float, norm: float) -> str:
        return f"the gradient's norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"

    def back(self) -> None:
        self.in_row, self.rate = 0, 0.5
