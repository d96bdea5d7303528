"""Tokens and templates of the families: what is trained on is what llama.cpp reads."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest

from edgeft.export import hf
from edgeft.export.convert import _space_prefix
from edgeft.formats import vocabulary
from edgeft.formats.gguf import GGUF, STRING, NewTensor, encode_record, write
from edgeft.formats.tokenizer import GgufTokenizer, quiet_llama
from edgeft.host import sandbox

TEXTS = [
    "Hello world, it's 12345 or 1,000,000! DON'T I'LL",
    "  two  spaces\n\n\tTab  \r\n x ",
    "Grüße, naïve café — “quotes” … ñ Ⅳ ½ 日本語 русский 😀",
    "camelCase HTTPServer a/b/c\n/d don’t We'Ve",
    "def f(x):\n    return x**2  # ok\n",
]
USER, ASSISTANT = ({"role": role, "content": text} for role, text in (("user", "Where is it?"), ("assistant", "Here.")))


def with_splitter(model: Path, name: str, path: Path) -> Path:
    """The embedded model with another pre-tokenizer, and one tensor of its own."""
    file = GGUF.open(model)
    records = [file.record(key) for key in file.records if key != "tokenizer.ggml.pre"]
    info = file.tensors["output_norm.weight"]
    tensor = NewTensor("output_norm.weight", info.shape, info.type, info.nbytes, lambda: file.bytes(info.name))
    with path.open("wb") as out:
        write(out, [*records, encode_record("tokenizer.ggml.pre", STRING, name)], [tensor])
    return path


@pytest.mark.parametrize("name", [*vocabulary.SPLITTERS, *vocabulary.SAME_SPLITTERS])
def test_a_pre_tokenizer_splits_as_in_llama_cpp(name: str, model: Path, tmp_path: Path) -> None:
    """Those that Hugging Face folders get."""
    file = with_splitter(model, name, tmp_path / "model.gguf")
    theirs, opened = GgufTokenizer(file), GGUF.open(file)
    made = hf._byte_level(opened, opened.get_key("tokenizer.ggml.tokens"))
    for text in TEXTS:
        assert made.encode(text).ids == theirs.encode(text), text
    splitter = vocabulary.SAME_SPLITTERS.get(name, name)
    assert vocabulary.splitter_name(json.loads(made.to_str())) == splitter


def test_gemmas_tokenizer_has_no_space_before_text() -> None:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    assert not _space_prefix({"normalizer": replace, "pre_tokenizer": split}, True)


# What the templates of the real models make of a conversation, in the words of a test
TEMPLATES = {
    "gemma": "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "phi3": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "granite": "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
    "exaone3": "{% for m in messages %}{% if m.role == 'user' %}[|user|]{{ m.content }}\n{% elif m.role == 'system' %}"
    "[|system|]{{ m.content }}[|endofturn|]\n{% else %}[|assistant|]{{ m.content }}[|endofturn|]\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[|assistant|]{% endif %}",
    "minicpm": "{% for m in messages %}{% if m.role == 'user' %}<用户>{{ m.content | trim }}<AI>{% else %}"
    "{{ m.content | trim }}{% endif %}{% endfor %}",
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}


def in_llama_cpp(template: str, messages: list[dict[str, str]]) -> str:
    """Rendered by llama.cpp, which knows the format by marks in the template."""
    llama: Any = quiet_llama()
    pairs = [(message["role"].encode(), message["content"].encode()) for message in messages]
    chat = (llama.llama_chat_message * len(pairs))(*(llama.llama_chat_message(*pair) for pair in pairs))
    buffer = ctypes.create_string_buffer(4096)
    size = llama.llama_chat_apply_template(template.encode(), chat, len(pairs), True, buffer, len(buffer))
    assert size > 0, "llama.cpp does not know this template"
    return buffer.raw[:size].decode()


@pytest.mark.parametrize("family", TEMPLATES)
def test_templates_render_as_in_llama_cpp(family: str) -> None:
    messages = [USER, ASSISTANT, USER]
    values = {"bos_token": "", "eos_token": "", "tools": None, "documents": None, "add_generation_prompt": True}
    ours = sandbox.chat(TEMPLATES[family], {**values, "messages": [dict(message) for message in messages]})
    assert ours == in_llama_cpp(TEMPLATES[family], messages)
