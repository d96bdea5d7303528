"""Plots by matplotlib: inline SVG in the page's own colours, light and dark, and the PNG file of a search.

Every SVG has a title and a description for screen readers, and needs neither a script nor a network.
"""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from edgeft.config import TENSORS
from edgeft.host.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 380  # in the plot's own units; text is 12 of them high, legible on a phone
TEXT = 12
STEPS = (1, 2, 2.5, 5, 10)  # between the ticks of an axis
Points = Sequence[tuple[float, float]]

# Colours of the style sheet, and the placeholder of each in the plot: matplotlib knows fixed colours only, and the
# page's change with the reader's light or dark setting.
NAMES = ("tuned", "base", "soft", "line", "fill", "ink", "card", "good", "bad", "c1", "c2", "c3", "c4")
COLOUR = {name: f"#{0x010203 + i:06x}" for i, name in enumerate(NAMES)} | {"c0": "#010203"}
SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "edgeft",  # the same run gives the same file
    "svg.fonttype": "none",  # text stays text: small, and it can be searched and copied
    "font.size": TEXT,
    "text.color": COLOUR["ink"],
    "axes.axisbelow": True,
    "grid.linewidth": 1.0,
    "lines.solid_capstyle": "round",
    **dict.fromkeys(("axes.edgecolor", "grid.color"), COLOUR["line"]),
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), COLOUR["soft"]),
    **{f"axes.spines.{side}": False for side in ("top", "left", "right")},
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
}


@dataclass
class Line:
    label: str
    points: Points
    style: str  # a colour of the style sheet: tuned, base, soft, c0 … c4; or faint
    dots: bool = False


@dataclass
class Limit:  # a horizontal line
    label: str
    value: float
    style: str = "bad"


class _Plot:
    """One figure with one pair of axes; `tip` gives an element a tooltip."""

    def __init__(self, title: str, height: float, left: float, right: float = 10, top: float = 8, bottom: float = 8):
        """Margins and height in the plot's units."""
        from matplotlib.figure import Figure

        self.title, self.height = title, height
        self.figure: Figure = Figure(figsize=(WIDTH / 72, height / 72))
        self.figure.patch.set_visible(False)
        width, tall = 1 - (left + right) / WIDTH, 1 - (top + bottom) / height
        self.axes: Axes = self.figure.add_axes((left / WIDTH, bottom / height, width, tall))
        self.axes.patch.set_visible(False)
        self.axes.tick_params(pad=6)
        self.tips: list[str] = []

    def tip(self, artist: Any, text: str) -> None:
        artist.set_gid(f"tip{len(self.tips)}")
        self.tips.append(text)

    def note(self, text: str, corner: tuple[float, float], offset: tuple[float, float], **how: Any) -> None:
        """Text beside a corner of the axes."""
        place: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "color": COLOUR["soft"]}
        self.axes.annotate(text, corner, offset, **place, **how)

    def written(self, about: str) -> Markup:
        """The SVG element, with the page's colours and font, and ids that no other plot of the page has."""
        for artist in self.figure.findobj():
            artist.set_clip_on(False)  # nothing is drawn outside: clip paths only make the page larger
        file = io.StringIO()
        self.figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        text = file.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>|<title>.*?</title>", "", text, flags=re.S)
        text = re.sub(r"<defs>\s*</defs>", "", text)
        for name, placeholder in COLOUR.items():
            text = text.replace(placeholder, f"var(--{name})")
        text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)  # the page's font
        text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
        for i, tip in enumerate(self.tips):
            text = text.replace(f'<g id="tip{i}">', f"<g><title>{escape(tip)}</title>")
        text = re.sub(r'<g id="[^"]*"', "<g", text)
        own = re.sub(r"[^a-z]+", "-", self.title.lower())
        text = re.sub(r'(id="|href="#|url\(#)(\w+)', rf"\g<1>{own}-\g<2>", text)
        text = re.sub(r"(\d\.\d\d)\d+(?=[^<>]*>)", r"\1", text)  # in tags, two decimals are enough
        text = re.sub(r">\s+<", "><", text)
        head = (
            f'<svg viewBox="0 0 {WIDTH} {self.height:g}" role="img" preserveAspectRatio="xMidYMid meet">'
            f"<title>{escape(self.title)}</title><desc>{escape(about or self.title)}</desc>"
        )
        return Markup(re.sub(r"<svg.*?>", lambda _: head, text, count=1, flags=re.S).strip())


def _settings() -> Any:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs that it builds its font cache
    import matplotlib

    return matplotlib.rc_context(SETTINGS)


def short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}".replace(",", " ")


@dataclass
class LineChart:
    """Lines over a common x axis; the page writes the legend above it."""

    title: str
    lines: Sequence[Line]
    x_label: str
    y_label: str
    limits: Sequence[Limit] = ()
    from_zero: bool = False
    log: bool = False
    area: bool = False  # the area below each line is filled

    def draw(self) -> Markup:
        self.lines = [line for line in self.lines if line.points]
        if not self.lines:
            return Markup()
        ys = [y for line in self.lines for _, y in line.points] + [limit.value for limit in self.limits]
        self.log = self.log and min(ys) > 0
        with _settings():
            plot = _Plot(self.title, 240, left=46, top=28, bottom=40)
            axes = plot.axes
            self._scale(axes)
            for line in self.lines:
                self._draw_line(plot, line)
            for limit in self.limits:
                axes.axhline(limit.value, color=COLOUR[limit.style], linewidth=1.6, linestyle=(0, (5, 4)))
                axes.annotate(
                    limit.label, (1, limit.value), (0, 4), xycoords=("axes fraction", "data"),
                    textcoords="offset points", ha="right", va="bottom", color=COLOUR["ink"],
                )  # fmt: skip
            low, high = axes.get_ylim()
            if not self.log:
                axes.set_ylim(0 if self.from_zero else low, max(high, 1.12 * max(ys) if self.limits else high))
            plot.note(self.y_label, (0, 1), (-42, 8))
            plot.note(self.x_label, (1, 0), (0, -24), ha="right", va="top")
            ends = [f"{n.label} from {short(n.points[0][1])} to {short(n.points[-1][1])}" for n in self.lines]
            return plot.written("; ".join([*ends, *(limit.label for limit in self.limits)]))

    def _scale(self, axes: Axes) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

        axes.grid(axis="y")
        if self.log:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
        xs = [x for line in self.lines for x, _ in line.points]
        axes.set_xlim(0 if self.from_zero else min(xs), max(max(xs), min(xs) + 1e-9))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS, integer=max(xs) > 5))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))

    def _draw_line(self, plot: _Plot, line: Line) -> None:
        x, y = zip(*line.points, strict=True)
        faint = line.style == "faint"
        colour = COLOUR["base" if faint else line.style]
        if self.area:
            plot.axes.fill_between(x, y, color=colour, alpha=0.14, linewidth=0)
        (drawn,) = plot.axes.plot(x, y, color=colour, linewidth=1 if faint else 2.4, alpha=0.35 if faint else 1)
        plot.tip(drawn, line.label)
        for px, py in line.points if line.dots else ():
            (dot,) = plot.axes.plot([px], [py], "o", color=colour, markersize=7, markeredgecolor=COLOUR["card"])
            plot.tip(dot, f"{line.label}: {short(py)} at {short(px)}")


def bars(title: str, rows: Sequence[tuple[str, float, str]], styles: Sequence[str] = ("tuned",)) -> Markup:
    """Horizontal bars: (name, value, value as text)."""
    if not rows:
        return Markup()
    with _settings():
        plot = _Plot(title, 10 + 30 * len(rows), left=92, right=80, top=2, bottom=2)
        axes = plot.axes
        names, values = [name for name, _, _ in rows], [max(value, 0.0) for _, value, _ in rows]
        drawn = axes.barh(range(len(rows)), values, height=0.64, color=[COLOUR[style] for style in styles])
        for bar, (name, _, text) in zip(drawn, rows, strict=True):
            plot.tip(bar, f"{name}: {text}")
        axes.bar_label(drawn, [text for _, _, text in rows], padding=7, color=COLOUR["ink"])
        axes.set_yticks(range(len(rows)), names, color=COLOUR["ink"])
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.set_xlim(0, max(values) or 1)
        return plot.written(", ".join(f"{name} {text}" for name, _, text in rows))


def intervals(title: str, rows: Sequence[tuple[str, float, float, float, bool]]) -> Markup:
    """Differences with their intervals around zero: (name, value, low, high, True if good)."""
    if not rows:
        return Markup()
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    with _settings():
        plot = _Plot(title, 44 + 40 * len(rows), left=112, right=16, bottom=26)
        axes = plot.axes
        axes.grid(axis="x")
        axes.axvline(0, color=COLOUR["soft"], linewidth=1.6)
        for i, (name, value, low, high, good) in enumerate(rows):
            style = ("good" if good else "bad") if low > 0 or high < 0 else "soft"
            drawn = axes.errorbar(
                [value], [i], xerr=[[value - low], [high - value]], fmt="o", color=COLOUR[style], markersize=11,
                elinewidth=3, capsize=6, capthick=2.4,
            )  # fmt: skip
            plot.tip(drawn.lines[0], f"{name}: {value:+.1f} ({low:+.1f} to {high:+.1f})")
        axes.set_yticks(range(len(rows)), [row[0] for row in rows], color=COLOUR["ink"])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        ends = [v for row in rows for v in row[1:4]]
        room = 0.06 * max(max([*ends, 0.0]) - min([*ends, 0.0]), 1e-9)
        axes.set_xlim(min([*ends, 0.0]) - room, max([*ends, 0.0]) + room)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:+g}" if x else "0"))
        return plot.written(", ".join(f"{name} {v:+.1f} ({lo:+.1f} to {hi:+.1f})" for name, v, lo, hi, _ in rows))


def split_bar(title: str, parts: Sequence[tuple[str, int, str]]) -> Markup:
    """One bar in parts: (name, count, style); the page names each with its count, so colour alone is not needed."""
    if not parts:
        return Markup()
    with _settings():
        plot = _Plot(title, 26, left=0, right=0, top=0, bottom=0)
        plot.axes.set_axis_off()
        total, start = sum(count for _, count, _ in parts) or 1, 0
        for name, count, style in parts:
            if count:
                gap = 0.005 * total
                (bar,) = plot.axes.barh([0], [max(count - gap, gap)], left=start, height=1, color=COLOUR[style])
                plot.tip(bar, f"{name}: {count}")
            start += count
        plot.axes.set_xlim(0, total)
        plot.axes.set_ylim(-0.5, 0.5)
        return plot.written(", ".join(f"{name} {count}" for name, count, _ in parts))


def heat_map(title: str, rows: Sequence[str], columns: int, values: dict[tuple[int, str], float | None]) -> Markup:
    """Columns × rows; a missing cell is empty, a cell without a value has the full colour."""
    from matplotlib.patches import Rectangle

    known = [v for v in values.values() if v is not None]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    with _settings():
        plot = _Plot(title, 44 + 20 * len(rows), left=50, right=4, top=4, bottom=40)
        axes = plot.axes
        for c, r in [(c, r) for r, row in enumerate(rows) for c in range(columns) if (c, row) not in values]:
            axes.add_patch(Rectangle((c + 0.05, r + 0.05), 0.9, 0.9, color=COLOUR["fill"], linewidth=0))
        for (column, row), value in values.items():
            share = 1.0 if value is None or not span else 0.25 + 0.75 * (value - low) / span
            place = (column + 0.05, rows.index(row) + 0.05)
            cell = axes.add_patch(Rectangle(place, 0.9, 0.9, color=COLOUR["tuned"], alpha=share, linewidth=0))
            text = "updated" if value is None else f"moved by {100 * value:.2f} %"
            plot.tip(cell, f"block {column}, {row}: {text}")
        axes.set_xlim(0, max(columns, 1))
        axes.set_ylim(len(rows), 0)
        width = (WIDTH - 54) / max(columns, 1)
        every = next((n for n in (1, 2, 5, 10, 20, 50) if n * width >= 26), 100)
        axes.set_xticks([c + 0.5 for c in range(0, columns, every)], [str(c) for c in range(0, columns, every)])
        axes.set_yticks([r + 0.5 for r in range(len(rows))], list(rows), color=COLOUR["ink"])
        axes.spines["bottom"].set_visible(False)
        plot.note("block", (1, 0), (0, -22), ha="right", va="top")
        return plot.written(f"{len(values)} of {columns * len(rows)} tensors were updated")


def needs_log_scale(values: Sequence[float]) -> bool:
    """True if the spread is so large that small values would look the same."""
    return bool(values) and min(values) > 0 and math.log(max(values) / min(values)) > math.log(8)


def write_heat_map(result: dict[str, Any], file: Path) -> None:
    """A PNG file: contribution of every tensor (rows) of every block (columns), and the share of it that is trained."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    values, shares = result["contribution"], result["shares"]
    depth = len(values)
    figure = Figure(figsize=(max(6.0, 0.32 * depth + 2.2), 3.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow([[row[t] for row in values] for t in range(len(TENSORS))], cmap="viridis", aspect="auto")
    for block, row in enumerate(shares):
        for tensor, share in enumerate(row):
            if share:  # a white frame, as high as the trained share of the channels
                corner = (block - 0.42, tensor + 0.42 - 0.84 * share)
                axes.add_patch(Rectangle(corner, 0.84, 0.84 * share, fill=False, ec="w", lw=1.2))
    if biased := result["biased_blocks"]:
        axes.plot([depth - biased - 0.45, depth - 0.55], [-0.62, -0.62], color="C1", lw=2, clip_on=False)
    axes.set_ylim(len(TENSORS) - 0.5, -0.5)
    axes.set_yticks(range(len(TENSORS)), TENSORS)
    axes.set_xticks(range(0, depth, 1 if depth <= 12 else 5 if depth <= 60 else 10))
    axes.set_xlabel("block")
    axes.set_title("contribution; white: share of the channels trained; bar: biases and norms", fontsize=9, pad=10)
    figure.colorbar(image, ax=axes, label="nats")
    with atomic_write(file) as output:
        figure.savefig(output, format="png", metadata={"Software": None})
