"""The report of a run: one HTML file that needs no network, and a short model card.

Both are made from the run folder alone, and can be made again at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgeft.run import Run, replacing


def write_report(run: Run, others: Sequence[Run] = (), out: Path | None = None) -> Path:
    """`report.html` in the run folder, or `out`."""
    from edgeft.report.page import page
    from edgeft.report.story import tell

    place = out or run.path / "report.html"
    text = page(tell(run), [tell(other) for other in others])
    with replacing(place) as file:
        file.write(text.encode("utf-8"))
    return place


def write_card(run: Run, out: Path | None = None) -> Path:
    """`model-card.md` in the run folder, or `out`."""
    from edgeft.report.card import card
    from edgeft.report.story import tell

    place = out or run.path / "model-card.md"
    with replacing(place) as file:
        file.write(card(tell(run)).encode("utf-8"))
    return place
