"""The report and the model card as text: values from a run's summary, markup from the templates.

Every value is escaped in HTML; only drawings and marked answers, which are Markup already, are inserted as they are.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from edgeft import __version__, config
from edgeft.evaluate import metrics
from edgeft.host.files import atomic_write
from edgeft.report import words
from edgeft.report.charts import charts, colour, comparison_charts, far_limit
from edgeft.report.summary import RunSummary, load_run_summary
from edgeft.run.folder import Run

SHOWN = 6  # answers in view; the others are folded
FOLDED = 20  # answers in each folded list
MAX_CHARS = 600  # of a question or an answer


def write_report(run: Run, others: Sequence[Run] = (), out: Path | None = None) -> Path:
    """`report.html` in the run folder, or `out`."""
    return _write(page(*map(load_run_summary, [run, *others])), out or run.path / "report.html")


def write_card(run: Run, out: Path | None = None) -> Path:
    """`model-card.md` in the run folder, or `out`."""
    return _write(card(load_run_summary(run)), out or run.path / "model-card.md")


def _write(text: str, place: Path) -> Path:
    with atomic_write(place) as file:
        file.write(text.encode("utf-8"))
    return place


@lru_cache(maxsize=1)
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("edgeft.report"),
        autoescape=select_autoescape(disabled_extensions=("md.j2",), default=True),
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {"size": config.format_size, "duration": config.format_duration, "count": config.format_count}
    made.globals |= {"words": words, "version": __version__}
    return made


def page(run: RunSummary, *others: RunSummary) -> str:
    """report.html: no script, font or image from anywhere else."""
    return _environment().get_template("report.html.j2").render(
        run=run,
        runs=[run, *others],
        recipe=config.dump(run.recipe),
        answers=side_by_side(run.result or {}),
        charts=charts(run),
        compared=comparison_charts([run, *others]) if others else {},
        legend=[(one.name, colour(i)) for i, one in enumerate([run, *others])],
        files_legend=[(one["name"], colour(i)) for i, one in enumerate(run.compared)],
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


def side_by_side(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """`shown`, and the folded lists `worse` and `better`, largest change first."""
    shown = [e for e in result.get("examples", []) if e.get("tuned") is not None]
    worse, better = (
        [{k: v for k, v in e.items() if k != "gain"} for e in result.get(key, []) if e.get("tuned") is not None]
        for key in ("worse", "better")
    )
    better.reverse()
    for example in [*worse[:2], *better]:
        if len(shown) < SHOWN and example not in shown:
            shown.append(example)
    lists = {"shown": shown, "worse": worse[:FOLDED], "better": better[:FOLDED]}
    return {name: [_answer(example) for example in rows] for name, rows in lists.items()}


def _answer(example: dict[str, Any]) -> dict[str, Any]:
    base, tuned, accepted = example.get("base"), example["tuned"], example["answers"]
    old, new = difference_marked(base, tuned) if base is not None else (Markup(), escape(tuned))
    sides = [
        {"model": model, "right": bool(metrics.contains(text, accepted)), "text": marked}
        for model, text, marked in (("base", base, old), ("tuned", tuned, new))
        if text is not None
    ]
    expected = accepted[0][:MAX_CHARS] if accepted else ""
    return {"question": example["question"][:MAX_CHARS], "expected": expected, "sides": sides}


def difference_marked(before: str, after: str) -> tuple[Markup, Markup]:
    """Words that only the first text has are in <del>, words that only the second has in <ins>."""
    a, b = (re.findall(r"\S+\s*", text[:MAX_CHARS]) for text in (before, after))  # words with the space behind them
    old, new = Markup(), Markup()
    matched = difflib.SequenceMatcher(None, [w.strip() for w in a], [w.strip() for w in b], autojunk=False)
    for kind, a0, a1, b0, b1 in matched.get_opcodes():
        old += _marked("del", "".join(a[a0:a1]), kind)
        new += _marked("ins", "".join(b[b0:b1]), kind)
    return old, new


def _marked(tag: str, text: str, kind: str) -> Markup:
    inner = text.rstrip()  # the space behind a mark stays outside
    if kind == "equal" or not inner:
        return escape(text)
    return Markup("<{0}>{1}</{0}>{2}").format(tag, inner, text[len(inner) :])
