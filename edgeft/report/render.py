"""The report and the model card as text: values from a run's summary, markup from the templates.

Every value is escaped in HTML; only drawings and marked answers, which are Markup already, are inserted as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from edgeft import __version__, config
from edgeft.report import words
from edgeft.report.answers import side_by_side
from edgeft.report.charts import charts, colour, comparison_charts, far_limit
from edgeft.report.summary import RunSummary


@lru_cache(maxsize=1)
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("edgeft.report"),
        autoescape=select_autoescape(disabled_extensions=("md.j2",), default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"size": config.format_size, "duration": config.format_duration, "count": config.format_count}
    made.globals |= {"words": words, "version": __version__}
    return made


def page(run: RunSummary, others: Sequence[RunSummary] = ()) -> str:
    """report.html: no script, font or image from anywhere else."""
    return _environment().get_template("report.html.j2").render(
        run=run,
        runs=[run, *others],
        recipe=config.dump(run.recipe),
        answers=side_by_side(run.result or {}),
        charts=charts(run),
        compared=comparison_charts([run, *others]) if others else {},
        legend=[(one.name, colour(i)) for i, one in enumerate([run, *others])],
        far_limit=far_limit(run),
        commands=commands(run),
    )  # fmt: skip


def card(run: RunSummary) -> str:
    """model-card.md."""
    return _environment().get_template("card.md.j2").render(run=run, commands=commands(run), tensors=_tensors(run))


def _tensors(run: RunSummary) -> list[str]:
    update = run.recipe.update
    named = {tensor for part in update.parts or [update] for tensor in part.tensors if part.channels}
    return [tensor for tensor in config.TENSORS if tensor in named] if update.weights else []


def commands(run: RunSummary) -> list[tuple[str, str]]:
    """(program, command line), for the report and the card."""
    name = re.sub(r"[^a-z0-9-]+", "-", run.name.lower()).strip("-") or "tuned"
    return [
        ("edgeft", f"edgeft chat {run.path}"),
        ("llama.cpp", f"llama-cli -m {run.path}/model.gguf -cnv"),
        ("Ollama", f"ollama create {name} -f {run.path}/Modelfile\nollama run {name}"),
    ]
