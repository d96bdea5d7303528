"""The heat map of a search: contribution of every tensor of every block, and the share of it that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeft.config import TENSORS
from edgeft.host.files import atomic_write


def write_heat_map(result: dict[str, Any], file: Path) -> None:
    """A PNG file: blocks from left to right, tensors from top to bottom."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    values, shares = result["contribution"], result["shares"]
    depth = len(values)
    figure = Figure(figsize=(max(6.0, 0.32 * depth + 2.2), 3.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow([[row[t] for row in values] for t in range(len(TENSORS))], cmap="viridis", aspect="auto")
    for block in range(depth):
        for tensor in range(len(TENSORS)):
            share = shares[block][tensor]
            if share:  # a white frame, as high as the trained share of the channels
                axes.add_patch(
                    Rectangle(
                        (block - 0.42, tensor + 0.42 - 0.84 * share), 0.84, 0.84 * share, fill=False, ec="w", lw=1.2
                    )
                )
    if result["biased_blocks"]:
        axes.plot(
            [depth - result["biased_blocks"] - 0.45, depth - 0.55], [-0.62, -0.62], color="C1", lw=2, clip_on=False
        )
    axes.set_ylim(len(TENSORS) - 0.5, -0.5)
    axes.set_yticks(range(len(TENSORS)), TENSORS)
    axes.set_xticks(range(0, depth, 1 if depth <= 12 else 5 if depth <= 60 else 10))
    axes.set_xlabel("block")
    axes.set_title("contribution; white: share of the channels trained; bar: biases and norms", fontsize=9, pad=10)
    figure.colorbar(image, ax=axes, label="nats")
    with atomic_write(file) as output:
        figure.savefig(output, format="png", metadata={"Software": None})
