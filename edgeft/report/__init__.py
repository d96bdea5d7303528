"""The report of a run: one HTML file that needs no network, and a short model card.

Both are made from the run folder alone, and can be made again at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgeft.host.files import atomic_write
from edgeft.run.folder import Run


def write_report(run: Run, others: Sequence[Run] = (), out: Path | None = None) -> Path:
    """`report.html` in the run folder, or `out`."""
    from edgeft.report.render import page
    from edgeft.report.summary import load_run_summary

    place = out or run.path / "report.html"
    text = page(load_run_summary(run), [load_run_summary(other) for other in others])
    with atomic_write(place) as file:
        file.write(text.encode("utf-8"))
    return place


def write_card(run: Run, out: Path | None = None) -> Path:
    """`model-card.md` in the run folder, or `out`."""
    from edgeft.report.render import card
    from edgeft.report.summary import load_run_summary

    place = out or run.path / "model-card.md"
    with atomic_write(place) as file:
        file.write(card(load_run_summary(run)).encode("utf-8"))
    return place
