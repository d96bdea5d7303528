"""What the figures of an audit mean, in plain words; used by the terminal and the benchmark."""

from __future__ import annotations

from typing import Any

MORE = 0.1  # by this share of the tokens more than a guess: something was read


def setting_name(setting: dict[str, Any]) -> str:
    rows = "1 row" if setting["rows"] == 1 else f"{setting['rows']} rows"
    return f"gradient of {rows}" if setting["kind"] == "gradient" else f"local epoch of {rows}"


def sent_as(result: dict[str, Any]) -> str:
    noise = result["dp"]
    parts = [
        "everything" if result["send"] == "dense" else f"only the {result['send'].replace(':', ' ')} of the numbers"
    ]
    if noise is not None:
        private = f" (ε = {noise['epsilon']:g}, δ = {noise['delta']:g})" if noise["epsilon"] else ""
        parts.append(f"clipped to {noise['clip']:g}, with noise of {noise['noise']:.3g} times that{private}")
    return ", ".join(parts)


def conclusion(setting: dict[str, Any]) -> str:
    """One or two sentences on what an honest but curious server could read."""
    exact, rows, more = setting["exact"], setting["rows"], setting["tokens"] - setting["guess"]["tokens"]
    share = f"{setting['tokens']:.0%} of the tokens"
    if exact == rows:
        return "an honest but curious server could read " + ("it" if rows == 1 else "every row") + ", word for word."
    if exact:
        return f"an honest but curious server could read {exact} of {rows} rows word for word, and {share}."
    if more >= MORE:
        text = f"an honest but curious server could read {share}; a guess has {setting['guess']['tokens']:.0%}."
    else:
        text = f"the rows could not be read: {share}, and a guess has {setting['guess']['tokens']:.0%}."
    answers = setting["answers"]
    if answers["seen"]:
        text += f" Of the answers' {answers['of']} different tokens it could list {answers['seen']}, "
        return text + f"among {len(answers['listed'])}; a guess has {answers['guess']}."
    return text if more >= MORE else text + " That is no proof that nobody can."
