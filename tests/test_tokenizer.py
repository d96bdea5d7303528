"""Tokenizers and chat templates, against llama.cpp and transformers themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeft.errors import DataError, ModelError
from edgeft.formats.gguf import encode_record, write
from edgeft.formats.source import demo_model
from edgeft.formats.tokenizer import PLAIN_TEMPLATE, GgufTokenizer, HfTokenizer, open_tokenizer, render

CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "  Where is Zürich? 世界 🙂\n\n\tTwo  spaces."},
    {"role": "assistant", "content": "In Switzerland."},
    {"role": "user", "content": "And Bern?"},
    {"role": "assistant", "content": "There too."},
]
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""  # TinyLlama's; its line breaks only come out right with trim_blocks and lstrip_blocks
BYTES = [f"<0x{i:02X}>" for i in range(256)]


@pytest.fixture(scope="module")
def demo() -> Path:
    path = demo_model()
    if path is None:
        pytest.skip("the embedded model is not installed")
    return path


def spm_file(path: Path, template: str | None = None, add_bos: bool = True) -> Path:
    """A GGUF file with a SentencePiece vocabulary and nothing else, as TinyLlama's but small."""
    words = [
        "▁",
        "▁h",
        "he",
        "ll",
        "▁he",
        "▁hell",
        "▁hello",
        "or",
        "▁w",
        "▁wor",
        "ld",
        "▁world",
        *"helowrd:?QAnsuetion",
    ]
    words = list(dict.fromkeys(words))
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *words]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(words)  # unknown, control, control, bytes, normal
    records = [
        encode_record("general.architecture", 8, "llama"),
        encode_record("tokenizer.ggml.model", 8, "llama"),
        encode_record("tokenizer.ggml.tokens", 9, tokens, 8),
        encode_record("tokenizer.ggml.scores", 9, scores, 6),
        encode_record("tokenizer.ggml.token_type", 9, kinds, 5),
        encode_record("tokenizer.ggml.bos_token_id", 4, 1),
        encode_record("tokenizer.ggml.eos_token_id", 4, 2),
        encode_record("tokenizer.ggml.add_bos_token", 7, add_bos),
    ]
    if template is not None:
        records.append(encode_record("tokenizer.chat_template", 8, template))
    with path.open("wb") as file:
        write(file, records, [])
    return path


def hf_folder(folder: Path, bos: bool = False, template: str | None = ZEPHYR) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_end|>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        ["hello world, hello there"] * 4, trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet)
    )
    if bos:
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
    made: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call, unused-ignore]
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>"
    )
    if template:
        made.chat_template = template
    made.save_pretrained(folder)
    return folder


def llama_ids(path: Path, text: str) -> list[int]:
    import llama_cpp

    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ids: list[int] = model.tokenize(text.encode(), add_bos=True, special=True)
    model.close()
    return ids


def test_bpe_ids_are_llama_cpps(demo: Path) -> None:
    tokenizer = open_tokenizer(demo)
    text = render(tokenizer, CHAT, generate=True)
    ids = tokenizer.encode(text)
    assert ids == llama_ids(demo, text)
    assert "".join(tokenizer.piece(i) for i in tokenizer.encode("héllo <|im_end|>")).endswith("<|im_end|>")
    assert tokenizer.decode(tokenizer.encode("Zürich 世界 🙂<|im_end|>")) == "Zürich 世界 🙂"
    assert tokenizer.has_template
    assert tokenizer.eos_text == "<|im_end|>"
    assert tokenizer.eos in tokenizer.eog
    assert tokenizer.vocab_size == 49152


def test_spm_ids_are_llama_cpps_and_bos_stands_once(tmp_path: Path) -> None:
    path = spm_file(tmp_path / "spm.gguf", ZEPHYR)
    tokenizer = GgufTokenizer(path)
    text = render(tokenizer, [m for m in CHAT if m["role"] != "system"], generate=True)
    ids = tokenizer.encode(text)
    assert ids == llama_ids(path, text)
    assert ids[0] == 1
    assert ids.count(2) == 4
    assert tokenizer.encode("hello world") == tokenizer.encode("<s>hello world")
    assert [tokenizer.piece(i) for i in tokenizer.encode("hello world")] == ["<s>", " hello", " world"]
    without = GgufTokenizer(spm_file(tmp_path / "nobos.gguf", add_bos=False))
    assert without.encode("hello world") == tokenizer.encode("hello world")[1:]


def test_long_text_and_odd_characters(demo: Path) -> None:
    tokenizer = open_tokenizer(demo)
    text = "word 🙂 " * 5000
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == []
    assert tokenizer.encode("nul \0 and \ud800 surrogate")  # not an exception
    with pytest.raises(IndexError):
        tokenizer.piece(10**9)


def test_model_without_template_gets_the_plain_one(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(spm_file(tmp_path / "plain.gguf"))
    assert not tokenizer.has_template
    assert tokenizer.template == PLAIN_TEMPLATE
    whole = render(tokenizer, CHAT, generate=False)
    assert whole.endswith("Question: And Bern?\nAnswer: There too.</s>\n")
    assert whole.startswith(render(tokenizer, CHAT[:2], generate=True) + " In Switz")


@pytest.mark.parametrize("template", [ZEPHYR, PLAIN_TEMPLATE])
def test_rendering_is_transformers(tmp_path: Path, template: str) -> None:
    tokenizer = HfTokenizer(hf_folder(tmp_path, template=template))
    for generate in (False, True):
        theirs = tokenizer._tok.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=generate)
        assert render(tokenizer, CHAT, generate) == theirs


def test_hf_tokenizer(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "a")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    tokenizer = open_tokenizer(folder)
    assert isinstance(tokenizer, HfTokenizer)
    assert tokenizer.eog == {1, 2, 5}  # <|im_end|> by its name, </s>, and what generation_config.json says
    ids = tokenizer.encode("hello world</s>")
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "hello world"
    assert "".join(map(tokenizer.piece, ids)) == "hello world</s>"
    with_bos = open_tokenizer(hf_folder(tmp_path / "b", bos=True))
    assert with_bos.encode("hello") == with_bos.encode("<s>hello") == [0, *tokenizer.encode("hello")]  # no </s> behind
    assert tokenizer.encode("\ud800")


def _stub(template: str) -> Any:
    return SimpleNamespace(template=template, bos_text="", eos_text="")


def test_template_errors() -> None:
    with pytest.raises(ModelError, match="broken, line 1"):
        render(_stub("{% for %}"), CHAT, False)
    with pytest.raises(DataError, match="roles must alternate"):
        render(_stub("{{ raise_exception('roles must alternate') }}"), CHAT, False)
    with pytest.raises(DataError):  # sandboxed
        render(_stub("{{ messages.__class__.__base__.__subclasses__() }}"), CHAT, False)


def test_template_helpers() -> None:
    template = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
    assert render(_stub(template), CHAT, False) == json.dumps(CHAT[0])
    assert render(_stub("{% generation %}a{% endgeneration %}{{ strftime_now('%Y') }}"), CHAT, False).startswith("a20")


@pytest.mark.parametrize("size", [3, 1000, 500_000, -1000])
def test_truncated_file(demo: Path, tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(demo.read_bytes()[:size])
    with pytest.raises(ModelError) as error:
        open_tokenizer(path)
    assert error.value.exit_code == 5


def test_unusable_models(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("this is no model, only some text in a file")
    (tmp_path / "empty").mkdir()
    spm = spm_file(tmp_path / "spm.gguf").read_bytes()
    (tmp_path / "notokens.gguf").write_bytes(spm.replace(b"ggml.tokens", b"ggml.tXkens"))
    for name in ("text.gguf", "empty", "missing.gguf", "no/such/place", "notokens.gguf"):
        with pytest.raises(ModelError) as error:
            open_tokenizer(tmp_path / name)
        assert "\n" not in error.value.message


def test_llama_cpp_is_silent(demo: Path) -> None:
    code = "import sys; from edgeft.formats.tokenizer import open_tokenizer; open_tokenizer(sys.argv[1]).encode('<s>a')"
    done = subprocess.run([sys.executable, "-c", code, str(demo)], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr == ""
