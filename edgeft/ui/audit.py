"""`edgeft audit` in the terminal: a table of settings, what was read, and what that means, in plain words."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from edgeft.audit.words import conclusion, sent_as, setting_name
from edgeft.ui.console import one_line

SHOWN_CHARACTERS = 300


def print_audit(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=f"sent: {sent_as(result)}", title_justify="left")
    for name in ("message", "attack"):
        table.add_column(name)
    for name in ("rows read", "tokens", "ROUGE-1", "ROUGE-2", "canary", "answers", "guess: tokens", "ROUGE-1"):
        table.add_column(name, justify="right")
    for one in result["settings"]:
        guess, answers = one["guess"], one["answers"]
        table.add_row(
            setting_name(one), one["attack"], f"{one['exact']} of {one['rows']}", _share(one["tokens"]),
            _share(one["rouge1"]), _share(one["rouge2"]), "read" if one["canary_found"] else "–",
            f"{answers['seen']} of {answers['of']}", _share(guess["tokens"]), _share(guess["rouge1"]),
        )  # fmt: skip
    console.print()
    console.print(table)
    for one in result["settings"]:
        console.print(f"{setting_name(one)}: {conclusion(one)}", markup=False, soft_wrap=True)
    single = [one for one in result["settings"] if (one["kind"], one["rows"]) == ("gradient", 1)]
    if not result["match_steps"] and any(not one["exact"] for one in single):
        console.print("Gradient matching, which reads short rows where the span does not, was not tried: --match 40")
    first = result["settings"][0]
    for pair in first["read"][:1]:
        console.print(f"\n  sent from  {one_line(pair['row'])[:SHOWN_CHARACTERS]}", soft_wrap=True)
        console.print(f"  read       {one_line(pair['read'])[:SHOWN_CHARACTERS] or '–'}", soft_wrap=True)


def _share(value: float) -> str:
    return f"{value:.0%}"
