"""The vocabulary in a GGUF file, checked before llama.cpp reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gguf.constants import GGUFValueType

from edgeft.errors import ExportError, ModelError
from edgeft.formats.gguf import ARRAY, GGUF, STRING

SENTENCEPIECE, BYTE_LEVEL = "llama", "gpt2"  # tokenizer.ggml.model
TOKENIZERS = (SENTENCEPIECE, BYTE_LEVEL)
_VOCABULARY = {"tokens": STRING, "scores": GGUFValueType.FLOAT32, "token_type": GGUFValueType.INT32, "merges": STRING}


def check_vocabulary(gguf: GGUF) -> None:
    """llama.cpp does not check types and lengths of these arrays, and aborts where a token occurs twice."""
    again = "download or copy it again"
    if gguf.get_key("split.count", 0) not in (0, 1):  # llama.cpp would open the others unchecked
        raise ModelError(f"{gguf.path} is one of several parts", "join them first: `llama-gguf-split --merge`")
    model = gguf.get_key("tokenizer.ggml.model")
    if model not in TOKENIZERS:
        what = "no vocabulary" if model is None else f"a vocabulary of type {str(model)[:40]!r}"
        raise ModelError(
            f"{gguf.path} has {what}, which is not supported",
            f"supported: {', '.join(TOKENIZERS)}; a vocabulary is part of every complete GGUF model file",
        )
    present = [key for key in _VOCABULARY if f"tokenizer.ggml.{key}" in gguf.records]
    arrays = {key: gguf.described(f"tokenizer.ggml.{key}") for key in present}
    count = arrays["tokens"][2] if "tokens" in arrays else 0
    for key, (kind, item, length) in arrays.items():
        if kind != ARRAY or item != _VOCABULARY[key] or (key != "merges" and length != count):
            raise ModelError(f"{gguf.path} is damaged: its tokenizer.ggml.{key} has a wrong type or length", again)
    if not count or (model == BYTE_LEVEL and "merges" not in arrays):
        raise ModelError(f"{gguf.path} has no vocabulary", "a vocabulary is part of every complete GGUF model file")
    tokens = {text or b"[EMPTY_%d]" % i for i, text in enumerate(gguf.texts("tokenizer.ggml.tokens"))}
    if len(tokens) < count:
        raise ModelError(f"{gguf.path} is damaged: a token occurs twice in its vocabulary", again)
    missing = [byte for byte in range(256) if b"<0x%02X>" % byte not in tokens and bytes([byte]) not in tokens]
    if model == SENTENCEPIECE and missing:
        raise ModelError(f"{gguf.path} is damaged: its vocabulary lacks tokens for single bytes", again)


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


_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_REGEX = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _ENDING + r"|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _ENDING + r"|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Splitter:
    """A pre-tokenizer."""

    regex: str = ""  # "": GPT-2's own
    digits: bool = False  # digits are split off one by one first
    ignore_merges: bool = False  # a word that is in the vocabulary is one token


SPLITTERS = {
    "gpt-2": Splitter(),
    "smollm": Splitter(digits=True),
    "llama-bpe": Splitter(LLAMA3_REGEX, ignore_merges=True),
    "qwen2": Splitter(QWEN2_REGEX),
    "tekken": Splitter(TEKKEN_REGEX, ignore_merges=True),
    "dbrx": Splitter(LLAMA3_REGEX),
    "gpt-4o": Splitter(GPT4O_REGEX),
}
# llama.cpp's aliases
SAME_SPLITTERS = {
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone"), "smollm"),
    **dict.fromkeys(("llama3", "llama-v3"), "llama-bpe"),
    "deepseek-r1-qwen": "qwen2",
    **dict.fromkeys(("olmo", "exaone4"), "gpt-2"),
}


def splitter_name(source: Any) -> str:
    """llama.cpp's name of a tokenizer.json's pre-tokenizer; an error unless it is certainly the same."""
    wanted = _splitter(source)
    for name, splitter in SPLITTERS.items():
        if splitter == wanted:
            return name
    raise ExportError(
        f"this tokenizer splits text in a way that has no known name in llama.cpp: "
        f"{json.dumps([source['normalizer'], source['pre_tokenizer']])[:240]}",
        f"known: {', '.join(SPLITTERS)}; export with --format hf and use llama.cpp's own converter",
    )


def _splitter(source: Any) -> Splitter | None:
    normalizer, pre = source["normalizer"], source["pre_tokenizer"] or {}
    *steps, last = pre.get("pretokenizers", [pre])
    # Qwen's NFC is the one normalizer that llama.cpp is known to omit; text is nearly always NFC already
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
