"""How byte-level tokenizers split text before they merge bytes: llama.cpp's names (tokenizer.ggml.pre) and their rules.

A name is given only where llama.cpp splits in the same way for certain.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from edgeft.errors import ExportError

LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_REGEX = LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_REGEX = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Splitter:
    """One rule."""

    regex: str = ""  # "": GPT-2's own
    digits: bool = False  # digits are split off one by one first
    ignore_merges: bool = False  # a whole word in the vocabulary is taken as it is


SPLITTERS = {
    "gpt-2": Splitter(),
    "smollm": Splitter(digits=True),
    "llama-bpe": Splitter(LLAMA3_REGEX, ignore_merges=True),
    "qwen2": Splitter(QWEN2_REGEX),
    "tekken": Splitter(TEKKEN_REGEX, ignore_merges=True),
}
# other names under which llama.cpp does the same
SAME_SPLITTERS = {
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell"), "smollm"),
    **dict.fromkeys(("llama3", "llama-v3"), "llama-bpe"),
    "deepseek-r1-qwen": "qwen2",
}


def splitter_name(source: Any) -> str:
    """llama.cpp's name of a tokenizer.json's pre-tokenizer; only what is the same for certain."""
    found = _splitter(source)
    for name, splitter in SPLITTERS.items():
        if splitter == found:
            return name
    raise ExportError(
        f"this tokenizer splits text in a way that llama.cpp has no certain name for: "
        f"{json.dumps([source['normalizer'], source['pre_tokenizer']])[:240]}",
        f"known: {', '.join(SPLITTERS)}; export with --format hf and use llama.cpp's own converter",
    )


def _splitter(source: Any) -> Splitter | None:
    normalizer, pre = source["normalizer"], source["pre_tokenizer"] or {}
    *steps, last = pre.get("pretokenizers", [pre])
    # Qwen's NFC is the one normalizer that llama.cpp is known to leave out; text is nearly always NFC already
    if normalizer is not None and normalizer["type"] != "NFC":
        return None
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    regex, digits = "", False
    for step in steps:
        if step["type"] == "Split" and not regex and "Regex" in step["pattern"]:
            regex = step["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n")
        elif step["type"] == "Digits" and step["individual_digits"] and not regex:
            digits = True
        else:
            return None
    if bool(regex) == last.get("use_regex", True):  # split twice, or not at all
        return None
    return Splitter(regex, digits, bool(source["model"].get("ignore_merges", False)))
