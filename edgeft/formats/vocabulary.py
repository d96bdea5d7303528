"""The vocabulary in a GGUF file, checked before llama.cpp reads it."""

from __future__ import annotations

from gguf.constants import GGUFValueType

from edgeft.errors import ModelError
from edgeft.formats.gguf import ARRAY, GGUF, STRING

SENTENCEPIECE, BYTE_LEVEL = "llama", "gpt2"  # tokenizer.ggml.model
TOKENIZERS = (SENTENCEPIECE, BYTE_LEVEL)
_VOCABULARY = {"tokens": STRING, "scores": GGUFValueType.FLOAT32, "token_type": GGUFValueType.INT32, "merges": STRING}


def check_vocabulary(gguf: GGUF) -> None:
    """llama.cpp takes types and lengths of these arrays for granted, and aborts where a token stands twice."""
    again = "download or copy it again"
    if gguf.get_key("split.count", 0) not in (0, 1):  # llama.cpp would open the others, which nobody has looked at
        raise ModelError(f"{gguf.path} is one of several parts", "join them first: `llama-gguf-split --merge`")
    model = gguf.get_key("tokenizer.ggml.model")
    if model not in TOKENIZERS:
        said = "no vocabulary" if model is None else f"a vocabulary of type {str(model)[:40]!r}"
        raise ModelError(
            f"{gguf.path} has {said}, which is not supported",
            f"supported: {', '.join(TOKENIZERS)}; a vocabulary is part of every complete GGUF model file",
        )
    there = {
        key: gguf.described(f"tokenizer.ggml.{key}") for key in _VOCABULARY if f"tokenizer.ggml.{key}" in gguf.records
    }
    count = there["tokens"][2] if "tokens" in there else 0
    for key, (kind, item, length) in there.items():
        if kind != ARRAY or item != _VOCABULARY[key] or (key != "merges" and length != count):
            raise ModelError(f"{gguf.path} is damaged: its tokenizer.ggml.{key} are not what they should be", again)
    if not count or (model == BYTE_LEVEL and "merges" not in there):
        raise ModelError(f"{gguf.path} has no vocabulary", "a vocabulary is part of every complete GGUF model file")
    tokens = {text or b"[EMPTY_%d]" % i for i, text in enumerate(gguf.texts("tokenizer.ggml.tokens"))}
    if len(tokens) < count:
        raise ModelError(f"{gguf.path} is damaged: a token stands twice in its vocabulary", again)
    if model == SENTENCEPIECE and not all(
        b"<0x%02X>" % byte in tokens or bytes([byte]) in tokens for byte in range(256)
    ):
        raise ModelError(f"{gguf.path} is damaged: its vocabulary lacks tokens for single bytes", again)
