"""The report as one HTML page: no script, no font, no picture from anywhere else.

It is for somebody who did not watch the run: the verdict first, then what it rests on, then how the run went.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from edgeft import __version__, config
from edgeft.evaluate import metrics
from edgeft.report import svg, words
from edgeft.report.story import ROWS, RunSummary

SHOWN = 6  # answers side by side; the rest can be unfolded
FOLDED = 20
FAR = 3.0  # a budget so many times the memory used is told, not drawn: it would flatten the plot
LONGEST = 600  # letters of an answer
SERIES = ("c0", "c1", "c2", "c3", "c4")
CSP = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(story: RunSummary, others: Sequence[RunSummary] = ()) -> str:
    body = [
        _hero(story),
        _comparison([story, *others]) if others else "",
        _scores(story),
        _answers(story),
        _other_suites(story),
        _course(story),
        _updated(story),
        _use(story),
        _settings(story),
    ]
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{CSP}"><link rel="icon" href="data:,">'
        f"<title>{escape(story.name)} · edgeft report</title><style>{style}</style></head><body><main>"
        '<header class="top"><span><strong>edgeft</strong> report</span>'
        f"<span>run <strong>{escape(story.name)}</strong> · "
        f"{escape(story.recipe.name or 'own recipe')} · {escape(story.model)}</span></header>"
        + "".join(body)
        + f"<footer>Made by edgeft {__version__} on the machine that trained the model. This file holds everything it "
        "shows; nothing is loaded from a network.</footer></main></body></html>\n"
    )


def _section(title: str, body: str, name: str, about: str = "") -> str:
    if not body:
        return ""
    note = f'<p class="soft">{about}</p>' if about else ""
    return f'<section id="{name}"><h2>{escape(title)}</h2>{note}{body}</section>'


def _figure(title: str, drawing: str, caption: str = "", legend: str = "", name: str = "") -> str:
    if not drawing:
        return ""
    told = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f'<figure class="card" id="{name}"><h3>{escape(title)}</h3>{legend}{drawing}{told}</figure>'


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    return (
        '<div class="legend">'
        + "".join(f'<span><i class="{style}"></i>{escape(label)}</span>' for label, style in entries)
        + "</div>"
    )


# ---------------------------------------------------------------- the verdict


def _hero(story: RunSummary) -> str:
    result = story.result
    found = (result or {}).get("verdict")
    if result and found:
        metric, outcome = found["metric"], found["result"]
        before, after = result["base"][metric], result["tuned"][metric]
        head = {"better": "The tuned model is better", "worse": "The tuned model is worse"}.get(
            outcome, "No clear difference"
        )
        figures = f"{words.METRICS[metric]} {words.figure(metric, before)} → {words.figure(metric, after)}"
        title, lead = head, f'<span class="big">{escape(figures)}</span>{_lead(result)}'
    else:
        outcome, title = "unclear", "Trained, and not yet measured"
        lead = f"Measure it with <code>edgeft eval {escape(str(story.path))}</code>."
        if not story.done:
            title = "This run is not finished"
            lead = f"Go on with <code>edgeft finetune --resume --out {escape(str(story.path))}</code>."
    badge = {"better": "better", "worse": "worse"}.get(outcome, "not clear")
    return (
        f'<section class="card hero" id="verdict"><span class="badge {outcome}">{badge}</span>'
        f"<h1>{escape(title)}</h1><p>{lead}</p>{_tiles(story)}{_leaks(result)}</section>"
    )


def _lead(result: dict[str, Any]) -> str:
    found = result["verdict"]
    name = found["metric"]
    change = result["difference"][name]
    unit, digits = ("nats a token", 3) if name == "loss" else ("points", 1)
    sure = (
        ""
        if change["low"] is None
        else f" With 95 % confidence the true change lies between <strong>{change['low']:+.{digits}f}</strong> and "
        f"<strong>{change['high']:+.{digits}f}</strong>."
    )
    counts = result.get("changed") or {}
    rows = (
        f" {counts['better']} rows got better, {counts['worse']} got worse, {counts['same']} stayed as they were."
        if counts
        else ""
    )
    return (
        f"Both models answered the same {result['rows']} held-out rows: {words.METRICS[name]} changed by "
        f"<strong>{change['value']:+.{digits}f} {unit}</strong>.{sure}{rows}"
    )


def _leaks(result: dict[str, Any] | None) -> str:
    leaks = (result or {}).get("leaks") or []
    if not leaks or result is None:
        return ""
    exact = sum(leak["kind"] == "exact" for leak in leaks)
    return (
        f'<p class="note"><strong>{len(leaks)} of {result["rows"]} held-out rows are in the training set, too</strong> '
        f"({exact} the same, {len(leaks) - exact} nearly). Scores on them say little. For example: "
        f"“{escape(leaks[0]['text'][:120])}” ({escape(leaks[0]['source'])}, like "
        f"{escape(leaks[0]['train_source'])}).</p>"
    )


def _tiles(story: RunSummary) -> str:
    done, trained = story.done, story.done.get("trained_parameters") or story.scheme.get("trained_parameters")
    tiles = [
        ("training rows", config.format_count(story.counts.get("train_rows")), ""),
        ("parameters trained", config.format_count(trained), ""),
        ("time to train", config.format_duration(done.get("seconds")), ""),
        ("peak memory", config.format_size(done.get("peak_bytes") or story.peaks.get("train")), _of_budget(story)),
        (
            "file",
            config.format_size(story.tuned_bytes),
            f"was {config.format_size(story.base_bytes)}" if story.base_bytes else "",
        ),
    ]
    return (
        '<dl class="tiles">'
        + "".join(
            f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)} <small>{escape(note)}</small></dd></div>'
            for name, value, note in tiles
            if value != "–"
        )
        + "</dl>"
    )


def _of_budget(story: RunSummary) -> str:
    budget = story.plan.get("budget_bytes")
    return f"of {config.format_size(budget)} allowed" if budget else ""


# ---------------------------------------------------------------- scores


def _score_table(result: dict[str, Any]) -> str:
    rows = []
    for name, after in result["tuned"].items():
        if name not in words.METRICS or after is None:
            continue
        before = (result.get("base") or {}).get(name)
        change = words.difference(name, (result.get("difference") or {}).get(name)) or "–"
        value, _, interval = change.partition(" (")
        change = f"{value} <small>({interval}</small>" if interval else change
        rows.append(
            f'<tr><th scope="row">{words.METRICS[name]}</th><td class="n">{words.figure(name, before)}</td>'
            f'<td class="n">{words.figure(name, after)}</td><td class="n wrap">{change}</td></tr>'
        )
    return (
        '<div class="scroll"><table><thead><tr><th></th><th class="n">base</th><th class="n">tuned</th>'
        f'<th class="n wrap">change (95 % interval)</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _interval_plot(result: dict[str, Any]) -> str:
    rows = []
    for name, found in (result.get("difference") or {}).items():
        if name not in words.PLAIN and found["low"] is not None:
            rows.append((words.METRICS[name], found["value"], found["low"], found["high"], found["value"] > 0))
    return svg.intervals("Change against the base model, in points", rows)


def _scores(story: RunSummary) -> str:
    result = story.result
    if not result:
        return ""
    left = f'<div class="card"><h3>Base and tuned</h3>{_score_table(result)}'
    counts = result.get("changed")
    if counts:
        parts = [
            ("better", counts["better"], "good"),
            ("unchanged", counts["same"], "line"),
            ("worse", counts["worse"], "bad"),
        ]
        left += (
            f'<figure id="rows" style="margin-top:18px">{svg.split_bar("Rows that changed", parts)}<figcaption>'
            + " · ".join(f"<strong>{count}</strong> {name}" for name, count, _ in parts)
            + "</figcaption></figure>"
        )
    right = _figure(
        "Change, and how sure it is",
        _interval_plot(result),
        "Points of change with 95 % intervals from a paired bootstrap over rows. An interval that crosses zero is no "
        "clear difference.",
        name="intervals",
    )
    return _section("Does it answer better?", f'<div class="grid2">{left}</div>{right}</div>', "scores")


def _other_suites(story: RunSummary) -> str:
    cards = []
    for result in story.suites:
        told = words.verdict(result)
        cards.append(
            f'<div class="card"><h3>{escape(result["suite"])}</h3><p class="soft">{escape(told)}</p>'
            f"{_score_table(result)}</div>"
        )
    if story.harness:
        rows = [
            f'<tr><th scope="row">{escape(task)}</th><td>{escape(metric)}</td>'
            f'<td class="n">{_plain((story.harness.get("base") or {}).get(task, {}).get(metric))}</td>'
            f'<td class="n">{_plain(value)}</td></tr>'
            for task, values in story.harness["tuned"].items()
            for metric, value in values.items()
        ]
        cards.append(
            '<div class="card"><h3>lm-evaluation-harness</h3><div class="scroll"><table><thead><tr><th>task</th>'
            '<th>metric</th><th class="n">base</th><th class="n">tuned</th></tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div></div>"
        )
    return _section("Other suites", f'<div class="grid2">{"".join(cards)}</div>' if cards else "", "suites")


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


# ---------------------------------------------------------------- answers side by side


def _answers(story: RunSummary) -> str:
    result = story.result
    if not result:
        return ""
    first = [e for e in result.get("examples", []) if e.get("tuned") is not None]
    seen = {json.dumps(e, sort_keys=True) for e in first}
    worse = [_stripped(e) for e in result.get("worse", []) if e.get("tuned") is not None]
    better = [_stripped(e) for e in result.get("better", []) if e.get("tuned") is not None][::-1]
    for example in [*worse[:2], *better]:
        if len(first) < SHOWN and json.dumps(example, sort_keys=True) not in seen:
            first.append(example)
            seen.add(json.dumps(example, sort_keys=True))
    if not first:
        return ""
    body = f'<div class="answers">{"".join(_answer(e) for e in first)}</div>'
    for title, rows in (
        ("Rows that got worse, worst first", worse),
        ("Rows that got better, largest gain first", better),
    ):
        if rows:
            body += (
                f'<details><summary>{title} ({len(rows[:FOLDED])} shown)</summary><div class="answers">'
                + "".join(_answer(e) for e in rows[:FOLDED])
                + "</div></details>"
            )
    return _section(
        "Before and after",
        body,
        "answers",
        "The same questions, which training never saw, to both models. Words that only the tuned model says are "
        "marked; ✓ means that the answer is in it.",
    )


def _stripped(example: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in example.items() if key != "gain"}


def _answer(example: dict[str, Any]) -> str:
    base, tuned = example.get("base"), example.get("tuned") or ""
    want = example["answers"][0] if example["answers"] else ""
    old, new = difference_marked(base or "", tuned) if base is not None else ("", escape(tuned))
    sides = [("base", base, old)] if base is not None else []
    sides.append(("tuned", tuned, new))
    cells = "".join(
        f'<div class="{who}"><b>{who} {_tick(said or "", example["answers"])}</b>{shown or "<em>nothing</em>"}</div>'
        for who, said, shown in sides
    )
    return (
        f'<article class="card answer"><div class="q">{escape(example["question"][:LONGEST])}</div>'
        f'<div class="want">expected: {escape(want[:LONGEST])}</div><div class="pair">{cells}</div></article>'
    )


def _tick(said: str, answers: list[str]) -> str:
    right = metrics.contains(said, answers)
    style, word, sign = ("yes", "right", "✓") if right else ("no", "wrong", "✗")
    return f'<span class="mark {style}" title="{word}" aria-label="{word}" role="img">{sign}</span>'


def difference_marked(before: str, after: str) -> tuple[str, str]:
    """Both as HTML: what only the first has in <del>, what only the second has in <ins>."""
    a, b = (re.findall(r"\S+\s*", text[:LONGEST]) for text in (before, after))  # words with the space behind them
    old: list[str] = []
    new: list[str] = []
    matched = difflib.SequenceMatcher(None, [w.strip() for w in a], [w.strip() for w in b], autojunk=False)
    for kind, a0, a1, b0, b1 in matched.get_opcodes():
        for pieces, tag, out in ((a[a0:a1], "del", old), (b[b0:b1], "ins", new)):
            text = escape("".join(pieces))
            inner = text.rstrip()  # the space behind a mark stays outside
            out.append(f"<{tag}>{inner}</{tag}>{text[len(inner) :]}" if kind != "equal" and inner else text)
    return "".join(old), "".join(new)


# ---------------------------------------------------------------- how the run went


def _smooth(points: svg.Points, share: float = 0.1) -> list[tuple[float, float]]:
    """A running mean, so that the trend is seen among the steps' noise."""
    width = max(1, round(len(points) * share))
    return [
        (x, sum(y for _, y in points[max(0, i - width + 1) : i + 1]) / len(points[max(0, i - width + 1) : i + 1]))
        for i, (x, _) in enumerate(points)
    ]


def _loss_plot(story: RunSummary) -> str:
    train = _thin(story.train_loss)
    lines = [
        svg.Line("training loss, each step", train, "faint"),
        svg.Line("training loss, running mean", _smooth(train), "base"),
        svg.Line("held-out loss", story.heldout_loss, "tuned", dots=True),
    ]
    values = [y for line in lines for _, y in line.points]
    log = svg.log_scale(values)
    drawing = svg.line_chart("Loss over steps", lines, "step", "nats a token" + (", log scale" if log else ""), log=log)
    best = story.done.get("best_step")
    caption = f"The model of step {best} is kept: its held-out loss was the lowest." if best else ""
    legend = _legend([("training", "base"), ("held out", "tuned")])
    return _figure("Loss", drawing, caption, legend, "loss")


def _thin(points: list[tuple[float, float]], most: int = 600) -> list[tuple[float, float]]:
    step = -(-len(points) // most) if points else 1
    return points[::step]


def _memory_plot(story: RunSummary) -> str:
    if not story.memory:
        return ""
    unit = 2**30
    peak, plan, budget = story.done.get("peak_bytes"), story.plan.get("peak_bytes"), story.plan.get("budget_bytes")
    limits = []
    told = f"Highest: {config.format_size(peak)}." if peak else ""
    if story.peaks:
        told = (
            "Highest by stage: " + ", ".join(f"{name} {config.format_size(b)}" for name, b in story.peaks.items()) + "."
        )
    if plan:
        limits.append(svg.Limit(f"planned {config.format_size(plan)}", plan / unit, "c1"))
    if budget and budget <= FAR * max(plan or 0, peak or 0, *(b for _, b in story.memory)):
        limits.append(svg.Limit(f"allowed {config.format_size(budget)}", budget / unit))
    elif budget:
        told += f" Allowed were {config.format_size(budget)}, far above this plot."
    points = [(t, b / unit) for t, b in _thin(story.memory)]
    drawing = svg.line_chart(
        "Memory while training", [svg.Line("resident memory", points, "tuned")], "seconds of training", "GiB", limits,
        zero=True, area=True,
    )  # fmt: skip
    return _figure("Memory", drawing, told, "", "memory")


def _heat_plot(story: RunSummary) -> str:
    """Only where there is a sensor, or something was lost without one."""
    governor = story.recipe.governor
    limits = [
        svg.Limit(f"{name} {value:g} °C", value, style)
        for name, value, style in (
            ("target", governor.target_celsius, "c1"),
            ("limit", governor.limit_celsius, "bad"),
        )
        if value
    ]
    told = f"The system slowed the machine down: {escape(', '.join(story.throttled))}." if story.throttled else ""
    lines = [svg.Line("processor", _thin(story.heat), "tuned")]
    drawing = svg.line_chart("Temperature", lines, "seconds since the first reading, with pauses", "°C", limits)
    return _figure("Temperature", drawing or (f"<p>{told}</p>" if told else ""), told if drawing else "", "", "heat")


def _course(story: RunSummary) -> str:
    stages = svg.bars("Time by stage", [(name, s, config.format_duration(s)) for name, s in story.stages])
    total = sum(s for _, s in story.stages)
    cards = _loss_plot(story) + _memory_plot(story)
    cards += _figure("Time by stage", stages, f"In all {config.format_duration(total)}.", "", "time") + _heat_plot(
        story
    )
    return _section("How the run went", f'<div class="grid2">{cards}{_sizes(story)}</div>' if cards else "", "course")


def _sizes(story: RunSummary) -> str:
    rows = [
        (n, float(b), config.format_size(b)) for n, b in (("base", story.base_bytes), ("tuned", story.tuned_bytes)) if b
    ]
    check = story.exported.get("check") or {}
    told = (
        f"In llama.cpp the exported file says the same as the trainer on {check['top1']:.1f} % of {check['tokens']} "
        f"tokens, with a mean KL of {check['mean_kl']:.4f}."
        if check
        else ""
    )
    return _figure("File size", svg.bars("File size", rows, [name for name, _, _ in rows]), told, "", "sizes")


def _updated(story: RunSummary) -> str:
    found = story.map
    if found is None:
        return ""
    rows = [row for row in ROWS if row not in ("norms", "biases") or any(key[1] == row for key in found.moved)]
    drawing = svg.heat_map("What was updated: blocks and tensors", rows, found.depth, found.moved)
    values = [v for v in found.moved.values() if v is not None]
    far = max(found.moved, key=lambda key: found.moved[key] or 0.0) if values else None
    caption = (
        f"{len(found.moved)} tensors in {len({b for b, _ in found.moved})} of {found.depth} blocks were updated; "
        "all others keep their bytes. "
    )
    if far is not None:
        caption += (
            "The stronger the colour, the further it moved (the length of the change against the length of the "
            f"weights): from {100 * min(values):.1f} % to {100 * max(values):.1f} %, furthest {far[1]} of block "
            f"{far[0]}."
        )
    cut = story.scheme.get("cut")
    if cut:
        caption += f" Blocks 0 to {cut - 1} are the trunk: they ran once, and what they gave was kept."
    return _section("What was updated", _figure("Blocks and tensors", drawing, caption, "", "map"), "updated")


# ---------------------------------------------------------------- runs side by side


def _comparison(stories: Sequence[RunSummary]) -> str:
    def row(name: str, cells: Sequence[str]) -> str:
        return f'<tr><th scope="row">{escape(name)}</th>' + "".join(f'<td class="n">{c}</td>' for c in cells) + "</tr>"

    names = [name for name in words.METRICS if any(name in ((s.result or {}).get("tuned") or {}) for s in stories)]
    rows = [
        row("recipe", [escape(s.recipe.name) for s in stories]),
        row("model", [escape(s.model) for s in stories]),
        row("training rows", [config.format_count(s.counts.get("train_rows")) for s in stories]),
        row("parameters trained", [config.format_count(s.done.get("trained_parameters")) for s in stories]),
        row("time to train", [config.format_duration(s.done.get("seconds")) for s in stories]),
        row("peak memory", [config.format_size(s.done.get("peak_bytes")) for s in stories]),
        row("held-out rows", [str((s.result or {}).get("rows", "–")) for s in stories]),
    ]
    for name in names:
        cells = []
        for story in stories:
            result = story.result or {}
            base, tuned = (result.get("base") or {}).get(name), (result.get("tuned") or {}).get(name)
            cells.append(f"{words.figure(name, base)} → <strong>{words.figure(name, tuned)}</strong>")
        rows.append(row(words.METRICS[name], cells))
    head = "".join(f'<th class="n">{escape(s.name)}</th>' for s in stories)
    table = (
        f'<div class="card scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
    lines = [svg.Line(s.name, s.heldout_loss, SERIES[i % 5], dots=True) for i, s in enumerate(stories)]
    values = [y for line in lines for _, y in line.points]
    log = svg.log_scale(values)
    loss = svg.line_chart(
        "Held-out loss of each run", lines, "step", "nats a token" + (", log scale" if log else ""), log=log
    )
    memory = svg.line_chart(
        "Memory of each run",
        [svg.Line(s.name, [(t, b / 2**30) for t, b in _thin(s.memory)], SERIES[i % 5]) for i, s in enumerate(stories)],
        "seconds of training", "GiB", zero=True,
    )  # fmt: skip
    legend = _legend([(s.name, SERIES[i % 5]) for i, s in enumerate(stories)])
    plots = _figure("Held-out loss", loss, "", legend, "compare-loss") + _figure(
        "Memory", memory, "", legend, "compare-memory"
    )
    return _section("Runs side by side", f'{table}<div class="grid2" style="margin-top:20px">{plots}</div>', "compare")


# ---------------------------------------------------------------- using it, and how it was made


def commands(story: RunSummary) -> list[tuple[str, str]]:
    """(where, what to type), for the report and the card."""
    name = re.sub(r"[^a-z0-9-]+", "-", story.name.lower()).strip("-") or "tuned"
    return [
        ("here", f"edgeft chat {story.path}"),
        ("llama.cpp", f"llama-cli -m {story.path}/model.gguf -cnv"),
        ("Ollama", f"ollama create {name} -f {story.path}/Modelfile\nollama run {name}"),
    ]


def _use(story: RunSummary) -> str:
    if story.tuned_bytes is None:
        return ""
    lines = "".join(f"<h3>{escape(where)}</h3><pre>{escape(line)}</pre>" for where, line in commands(story))
    return _section(
        "Use it", f'<div class="card use">{lines}</div>', "use", "One GGUF file; LM Studio opens it as it is."
    )


def _settings(story: RunSummary) -> str:
    plan = story.plan
    rows = [(name, config.format_size(count)) for name, count in (plan.get("terms") or {}).items()]
    planned = ""
    if rows:
        body = "".join(f'<tr><th scope="row">{escape(n)}</th><td class="n">{v}</td></tr>' for n, v in rows)
        peak = config.format_size(plan.get("peak_bytes"))
        total = f'<tr><th scope="row">in all</th><td class="n"><strong>{peak}</strong></td></tr>'
        planned = f'<div class="card"><h3>Planned memory</h3><table><tbody>{body}{total}</tbody></table></div>'
    facts = [
        ("base model", story.model),
        ("data", Path(story.recipe.data.path).name if story.recipe.data.path else "the embedded handbook"),
        ("format", str(story.counts.get("format", "–"))),
        (
            "rows",
            f"{story.counts.get('train_rows', '–')} to train on, {story.counts.get('heldout_rows', '–')} held out",
        ),
        ("tokens", config.format_count(story.counts.get("train_tokens"))),
        ("steps", str(story.done.get("steps", "–"))),
        ("machine", str(story.counts.get("machine", "–"))),
        ("memory allowed", config.format_size(plan.get("budget_bytes"))),
        (
            "micro-batch",
            f"{(plan.get('how') or {}).get('micro_batch_tokens', story.recipe.how.micro_batch_tokens)} tokens",
        ),
        ("threads", str(story.recipe.how.threads or "all cores")),
    ]
    table = "".join(
        f'<tr><th scope="row">{escape(n)}</th><td class="n">{escape(v)}</td></tr>' for n, v in facts if v != "–"
    )
    recipe = escape(config.dump(story.recipe))
    body = (
        '<div class="grid2"><div class="card"><h3>Model, data and device</h3>'
        f"<table><tbody>{table}</tbody></table></div>{planned}</div>"
        f"<details><summary>The whole recipe</summary><pre>{recipe}</pre></details>"
    )
    return _section("How it was made", body, "settings")
