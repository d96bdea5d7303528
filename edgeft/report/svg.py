"""Plots as inline SVG: small, sharp at any size, in the page's own colours.

Every plot has a title that is read aloud, and needs neither a script nor a network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 440  # in the plot's own units; letters are 12 of them, so that they can be read at 358 pixels, too
Points = Sequence[tuple[float, float]]


@dataclass
class Line:
    label: str
    points: Points
    style: str  # a class of the style sheet: tuned, base, soft, c0 … c4
    dots: bool = False


@dataclass
class Limit:
    """A horizontal line."""

    label: str
    value: float
    style: str = "limit"


def figure(title: str, height: float, body: str, about: str = "") -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" preserveAspectRatio="xMidYMid meet">'
        f"<title>{escape(title)}</title><desc>{escape(about or title)}</desc>{body}</svg>"
    )


def text(x: float, y: float, words: str, anchor: str = "start", style: str = "tick") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(words)}</text>'


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round values from at or below `low` to at or above `high`."""
    span = max(high - low, 1e-12)
    raw = span / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.floor(low / step)
    return [i * step for i in range(first, math.ceil(high / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten around the values."""
    found = [m * 10.0**e for e in range(-6, 7) for m in (1, 2, 5)]
    inside = [v for v in found if low <= v <= high]
    below, above = [v for v in found if v < low], [v for v in found if v > high]
    return [*below[-1:], *inside, *above[:1]]


def short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}".replace(",", " ")


def line_chart(
    title: str,
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    limits: Sequence[Limit] = (),
    zero: bool = False,
    log: bool = False,
    area: bool = False,
) -> str:
    """Lines over a common x axis; the legend stands above, the values of the last points at the right."""
    lines = [line for line in lines if line.points]
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [limit.value for limit in limits]
    if not xs:
        return ""
    left, right, top, bottom, height = 46.0, 10.0, 26.0 + 8 * len(limits), 34.0, 240.0
    log = log and min(ys) > 0
    grid = log_ticks(min(ys), max(ys)) if log else ticks(0 if zero else min(ys), max(ys))
    low, high = grid[0], grid[-1]
    x_grid = [x for x in ticks(min(xs), max(xs)) if min(xs) <= x <= max(xs)]
    x_low, x_span = min(xs), max(max(xs) - min(xs), 1e-9)

    def px(x: float) -> float:
        return left + (x - x_low) / x_span * (WIDTH - left - right)

    def py(y: float) -> float:
        share = (math.log(y / low) / math.log(high / low)) if log else (y - low) / max(high - low, 1e-12)
        return height - bottom - share * (height - top - bottom)

    parts = []
    for y in grid:
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>')
        parts.append(text(left - 6, py(y) + 4, short(y), "end"))
    parts += [text(px(x), height - bottom + 16, short(x), "middle") for x in x_grid]
    parts.append(text(WIDTH - right, height - 3, x_label, "end"))
    parts.append(text(4, 11, y_label))
    for limit in limits:
        y = py(limit.value)
        parts.append(f'<line class="{limit.style}" x1="{left}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(WIDTH - right, y - 4, limit.label, "end", "tick strong"))
    for line in lines:
        path = " ".join(f"{'L' if i else 'M'}{px(x):.1f} {py(y):.1f}" for i, (x, y) in enumerate(line.points))
        if area:
            floor = height - bottom
            ends = f"L{px(line.points[-1][0]):.1f} {floor:.1f} L{px(line.points[0][0]):.1f} {floor:.1f} Z"
            parts.append(f'<path class="area {line.style}" d="{path} {ends}"/>')
        parts.append(f'<path class="line {line.style}" d="{path}"><title>{escape(line.label)}</title></path>')
        if line.dots:
            parts += [
                f'<circle class="dot {line.style}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="3.5">'
                f"<title>{escape(line.label)}: {short(y)} at {short(x)}</title></circle>"
                for x, y in line.points
            ]
    told = "; ".join(f"{line.label} from {short(line.points[0][1])} to {short(line.points[-1][1])}" for line in lines)
    told += "".join(f"; {limit.label}" for limit in limits)
    return figure(title, height, "".join(parts), told)


def bars(title: str, rows: Sequence[tuple[str, float, str]], style: str = "tuned") -> str:
    """Horizontal bars: (name, value, how the value is written)."""
    if not rows:
        return ""
    left, right, step = 92.0, 84.0, 30.0
    largest = max(value for _, value, _ in rows) or 1.0
    parts = []
    for i, (name, value, words) in enumerate(rows):
        y = 6 + i * step
        width = max(2.0, value / largest * (WIDTH - left - right))
        parts.append(text(left - 8, y + 15, name, "end", "label"))
        parts.append(f'<rect class="bar {style}" x="{left}" y="{y}" width="{width:.1f}" height="20" rx="4"/>')
        parts.append(text(left + width + 7, y + 15, words, "start", "tick strong"))
    told = ", ".join(f"{name} {words}" for name, _, words in rows)
    return figure(title, 12 + step * len(rows), "".join(parts), told)


def intervals(title: str, rows: Sequence[tuple[str, float, float, float, bool]]) -> str:
    """Differences with their intervals around zero: (name, value, low, high, is it good?)."""
    if not rows:
        return ""
    left, right, step = 112.0, 14.0, 34.0
    ends = [v for _, value, low, high, _ in rows for v in (value, low, high)] + [0.0]
    grid = ticks(min(ends), max(ends))
    low_end, span = grid[0], max(grid[-1] - grid[0], 1e-9)
    height = 12 + step * len(rows) + 24

    def px(x: float) -> float:
        return left + (x - low_end) / span * (WIDTH - left - right)

    floor = height - 22
    parts = [f'<line class="grid" x1="{px(x):.1f}" x2="{px(x):.1f}" y1="4" y2="{floor:.1f}"/>' for x in grid]
    parts += [text(px(x), height - 6, f"{x:+g}" if x else "0", "middle") for x in grid]
    parts.append(f'<line class="zero" x1="{px(0):.1f}" x2="{px(0):.1f}" y1="4" y2="{floor:.1f}"/>')
    for i, (name, value, low, high, good) in enumerate(rows):
        y = 6 + i * step + step / 2
        clear = low > 0 or high < 0
        style = ("good" if good else "bad") if clear else "soft"
        parts.append(text(left - 10, y + 4, name, "end", "label"))
        parts.append(f'<line class="whisker {style}" x1="{px(low):.1f}" x2="{px(high):.1f}" y1="{y}" y2="{y}"/>')
        for end in (low, high):
            parts.append(
                f'<line class="whisker {style}" x1="{px(end):.1f}" x2="{px(end):.1f}" y1="{y - 5}" y2="{y + 5}"/>'
            )
        parts.append(
            f'<circle class="dot {style}" cx="{px(value):.1f}" cy="{y}" r="5.5"><title>{escape(name)}: {value:+.1f} '
            f"({low:+.1f} to {high:+.1f})</title></circle>"
        )
    told = ", ".join(f"{name} {value:+.1f} ({low:+.1f} to {high:+.1f})" for name, value, low, high, _ in rows)
    return figure(title, height, "".join(parts), told)


def split_bar(title: str, parts_given: Sequence[tuple[str, int, str]]) -> str:
    """One bar in parts: (name, count, style); each is named with its count, so colour is not needed."""
    total = sum(count for _, count, _ in parts_given) or 1
    x, body = 0.0, ""
    for name, count, style in parts_given:
        width = count / total * WIDTH
        if count:
            body += f'<rect class="bar {style}" x="{x:.1f}" y="0" width="{max(width - 2, 1):.1f}" height="26" rx="4">'
            body += f"<title>{escape(name)}: {count}</title></rect>"
        x += width
    return figure(title, 26, body, ", ".join(f"{name} {count}" for name, count, _ in parts_given))


def heat_map(title: str, rows: Sequence[str], columns: int, values: dict[tuple[int, str], float | None]) -> str:
    """Columns × rows; a missing cell is empty, a cell without a value is filled as it is."""
    left, top, bottom, height = 50.0, 4.0, 34.0, 20.0
    width = (WIDTH - left - 4) / max(columns, 1)
    known = [v for v in values.values() if v is not None]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    gap = 1.5 if width > 6 else 0.5
    parts = []
    for r, row in enumerate(rows):
        y = top + r * height
        parts.append(text(left - 7, y + 14, row, "end", "label"))
        for column in range(columns):
            key = (column, row)
            place = (
                f'x="{left + column * width:.1f}" y="{y:.1f}" width="{max(width - gap, 0.8):.1f}" '
                f'height="{height - gap:.1f}" rx="{min(2.5, width / 4):.1f}"'
            )
            if key not in values:
                parts.append(f'<rect class="cell empty" {place}/>')
                continue
            value = values[key]
            share = 1.0 if value is None or not span else 0.3 + 0.7 * (value - low) / span
            told = f"block {column}, {row}: " + ("updated" if value is None else f"moved by {100 * value:.2f} %")
            parts.append(f'<rect class="cell" fill-opacity="{share:.2f}" {place}><title>{told}</title></rect>')
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if n * width >= 24 or n == 100)
    floor = top + len(rows) * height
    parts += [
        text(left + (column + 0.5) * width, floor + 14, str(column), "middle") for column in range(0, columns, every)
    ]
    parts.append(text(WIDTH - 4, floor + 29, "block", "end"))
    return figure(title, floor + bottom, "".join(parts), f"{len(values)} of {columns * len(rows)} tensors were updated")
