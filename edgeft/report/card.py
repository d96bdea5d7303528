"""The model card: what it is, what it was trained on, how good it is, how to run it; in Markdown."""

from __future__ import annotations

from edgeft import config
from edgeft.config import TENSORS
from edgeft.report import words
from edgeft.report.page import commands
from edgeft.report.story import RunSummary


def card(story: RunSummary) -> str:
    update = story.recipe.update
    blocks = story.scheme.get("blocks") or []
    named = {tensor for part in update.parts or [update] for tensor in part.tensors if part.channels}
    what = f"{', '.join(tensor for tensor in TENSORS if tensor in named)} of " if update.weights else ""
    where = f"{what}blocks {blocks[0]} to {blocks[-1]}" if blocks else f"{what}blocks {update.blocks}"
    lines = [
        f"# {story.name}",
        "",
        f"`{story.model}`, fine-tuned on device with edgeft (recipe `{story.recipe.name}`: {where}).",
        "",
    ]
    result = story.result
    if result:
        if words.verdict(result):
            lines += [f"**{words.verdict(result)}**", ""]
        lines += ["| held out | base | tuned | change (95 % interval) |", "|---|---|---|---|"]
        for name, after in result["tuned"].items():
            if name in words.METRICS and after is not None:
                before = words.figure(name, (result.get("base") or {}).get(name))
                change = words.difference(name, (result.get("difference") or {}).get(name))
                lines.append(f"| {words.METRICS[name]} | {before} | {words.figure(name, after)} | {change} |")
        lines.append("")
        if result.get("leaks"):
            lines += [f"{len(result['leaks'])} of {result['rows']} held-out rows are like training rows.", ""]
    for other in story.suites:
        lines += [f"- suite `{other['suite']}`: {words.verdict(other) or 'measured without its base model'}"]
    lines += [""] if story.suites else []
    facts = [
        ("training rows", config.format_count(story.counts.get("train_rows"))),
        ("held-out rows", config.format_count(story.counts.get("heldout_rows"))),
        ("parameters trained", config.format_count(story.done.get("trained_parameters"))),
        ("steps", str(story.done.get("steps", "–"))),
        ("time to train", config.format_duration(story.done.get("seconds"))),
        ("peak memory", config.format_size(story.done.get("peak_bytes"))),
        ("file", config.format_size(story.tuned_bytes)),
    ]
    lines += ["| made with | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts if value != "–"), ""]
    lines += ["## Run it", "", *(f"    {line}" for _, text in commands(story) for line in text.splitlines()), ""]
    lines += [
        "It was tuned for what its training rows are about. On anything else it may do worse than its base model "
        "(`--suite keep` measures that); limits and licence are the base model's.",
        "",
    ]
    return "\n".join(lines)
