"""The figures of the package's layout stay within their bars."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

script = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "figures.py")))
FIGURES = script.figures()


def test_every_figure_has_a_bar() -> None:
    assert FIGURES.keys() == script.BARS.keys()


@pytest.mark.parametrize("figure", script.BARS)
def test_a_figure_is_within_its_bar(figure: str) -> None:
    value = FIGURES[figure]
    count = value if isinstance(value, int) else len(value)
    assert count <= script.BARS[figure], value
