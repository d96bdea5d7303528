"""Text to token ids and back, and the model's chat template.

A GGUF file is always read by llama.cpp's own tokenizer, so the ids trained on are the ids that inference sees.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from edgeft import config
from edgeft.errors import DataError, ModelError
from edgeft.formats.gguf import GGUF
from edgeft.formats.vocabulary import check_vocabulary
from edgeft.host import sandbox

# For models without a template; export writes it into the file, so that llama.cpp renders the same text.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Answer: ' + message['content'] + eos_token + '\\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
)

# Special tokens that end an answer in llama.cpp, whatever the model's configuration says.
END_TEXTS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"}
    | {"<|end_of_text|>", "<end_of_utterance>", "<|eot|>", "<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>"}
)

Message = Mapping[str, str]
Ids = Sequence[int] | npt.NDArray[np.int32]


class Tokenizer(Protocol):
    template: str  # jinja source
    has_template: bool  # False: `template` is PLAIN_TEMPLATE
    bos_text: str
    eos_text: str
    eos: int  # -1 if the model has none
    eog: frozenset[int]  # ids that end a generation
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Special tokens in the text are parsed; BOS is added once, if the model wants one."""
        ...

    def decode(self, ids: Ids) -> str:
        """Without special tokens."""
        ...

    def piece(self, token: int) -> str:
        """One token as text, also a special one."""
        ...


def open_tokenizer(path: str | Path) -> Tokenizer:
    """Of a GGUF file, a Hugging Face folder or a hub id."""
    place = config.place(path)
    try:
        if place.is_dir():
            return HfTokenizer(place)
        if place.exists() or place.suffix.lower() == ".gguf":
            return GgufTokenizer(place)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        return HfTokenizer(str(path))
    raise ModelError(f"there is no model at {path}", "give a GGUF file, a Hugging Face folder or a hub id (owner/name)")


LLAMA_ERRORS: deque[str] = deque(maxlen=8)  # error messages of llama.cpp, newest last


@functools.cache
def _log_callback() -> Any:  # llama.cpp keeps a bare pointer: the cache keeps the callback alive
    from llama_cpp import llama_cpp

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator, unused-ignore]
    def log(level: int, text: bytes | None, _: Any) -> None:
        if level == 4 and text:  # GGML_LOG_LEVEL_ERROR
            LLAMA_ERRORS.append(text.decode("utf-8", "replace").strip())

    llama_cpp.llama_backend_init()
    return log


def quiet_llama() -> Any:
    """The low-level module of llama-cpp-python; each call turns off the output of llama.cpp again."""
    from llama_cpp import llama_cpp

    llama_cpp.llama_log_set(_log_callback(), ctypes.c_void_p(0))
    return llama_cpp


def filled(array: type[Any], room: int, call: Callable[[Any, int], int]) -> Any:
    """The values that llama.cpp writes into an array of `array`; it returns -n where it needs space for n."""
    while (n := call(buffer := (array * room)(), room)) < 0:
        room = -n
    return buffer[:n]


class GgufTokenizer:
    """llama.cpp's tokenizer of one GGUF file; the weights are not read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._llama = llama = quiet_llama()
        check_vocabulary(GGUF.open(self.path))  # llama.cpp may abort on a damaged file
        LLAMA_ERRORS.clear()
        params = llama.llama_model_default_params()
        params.vocab_only = True
        model = llama.llama_model_load_from_file(str(self.path).encode(), params)
        if not model:
            prefix = r"(\w+: )?(error loading model( \w+)?: )*"  # llama.cpp's function name and repeated words
            reason = re.sub("^" + prefix, "", LLAMA_ERRORS[0]) if LLAMA_ERRORS else "llama.cpp cannot read it"
            raise ModelError(f"{self.path.name} is damaged or of an unknown kind: {reason}", "download the file again")
        self._model = model
        weakref.finalize(self, llama.llama_model_free, model).atexit = False
        self._vocab = vocab = llama.llama_model_get_vocab(model)
        self.vocab_size: int = llama.llama_vocab_n_tokens(vocab)
        if self.vocab_size == 0:
            hint = "a vocabulary is part of every complete GGUF model file"
            raise ModelError(f"{self.path.name} has no vocabulary", hint)
        self.bos: int = llama.llama_vocab_bos(vocab)
        self.eos: int = llama.llama_vocab_eos(vocab)
        if max(self.bos, self.eos) >= self.vocab_size:
            raise ModelError(f"{self.path.name} names tokens that it does not have", "download the file again")
        self.add_bos = bool(llama.llama_vocab_get_add_bos(vocab)) and self.bos >= 0
        self.add_eos = bool(llama.llama_vocab_get_add_eos(vocab)) and self.eos >= 0
        self.bos_text = self.piece(self.bos) if self.bos >= 0 else ""
        self.eos_text = self.piece(self.eos) if self.eos >= 0 else ""
        self.eog = frozenset(i for i in range(self.vocab_size) if llama.llama_vocab_is_eog(vocab, i))
        template = llama.llama_model_chat_template(model, None)
        self.has_template = bool(template)
        self.template = template.decode("utf-8", "replace") if template else PLAIN_TEMPLATE

    def encode(self, text: str) -> list[int]:
        special = not (self.add_bos and self.bos_text and text.startswith(self.bos_text))
        data = text.encode("utf-8", "replace")
        call = functools.partial(self._llama.llama_tokenize, self._vocab, data, len(data))
        ids: list[int] = filled(ctypes.c_int32, 4096, lambda buffer, size: call(buffer, size, special, True))
        if special and self.add_eos and ids and ids[-1] == self.eos:
            ids.pop()  # the prompt continues after this text
        return ids

    def decode(self, ids: Ids) -> str:
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        call = functools.partial(self._llama.llama_detokenize, self._vocab, tokens, len(ids))
        text: bytes = filled(ctypes.c_char, 4096, lambda buffer, size: call(buffer, size, False, False))
        return text.decode("utf-8", "replace")

    def piece(self, token: int) -> str:
        if not 0 <= token < self.vocab_size:
            raise IndexError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        call = functools.partial(self._llama.llama_token_to_piece, self._vocab, token)
        text: bytes = filled(ctypes.c_char, 64, lambda buffer, size: call(buffer, size, 0, True))
        return text.decode("utf-8", "replace")


class HfTokenizer:
    """transformers' tokenizer of a folder or hub id."""

    def __init__(self, path: str | Path) -> None:
        from edgeft.formats.source import open_tokenizer_file, resolve

        folder = resolve(str(path))
        self._tok: Any = open_tokenizer_file(folder)
        tok = self._tok
        self.vocab_size = len(tok)
        self.bos_text: str = tok.bos_token or ""
        self.eos_text: str = tok.eos_token or ""
        self.eos: int = -1 if tok.eos_token_id is None else int(tok.eos_token_id)
        try:
            starts = tok.bos_token_id is not None and tok("a")["input_ids"][:1] == [tok.bos_token_id]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise ModelError(f"the tokenizer of {folder} cannot be used: {str(error)[:200]}") from None
        self._bos = [int(tok.bos_token_id)] if starts else []
        named = tok.chat_template.get("default") if isinstance(tok.chat_template, dict) else tok.chat_template
        self.has_template = bool(named)
        self.template: str = named or PLAIN_TEMPLATE
        ends = {i for i, token in tok.added_tokens_decoder.items() if str(token) in END_TEXTS}
        self.eog = frozenset({self.eos} - {-1} | ends | self._generation_ids(folder))

    @staticmethod
    def _generation_ids(folder: Path) -> set[int]:
        try:
            ids = json.loads((folder / "generation_config.json").read_text("utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            return set()  # the file is optional
        return {i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)}

    def encode(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # lone surrogates are errors
        ids = cast("list[int]", self._tok(text, add_special_tokens=False)["input_ids"])
        return ids if not self._bos or ids[:1] == self._bos else self._bos + ids

    def decode(self, ids: Ids) -> str:
        plain = [int(i) for i in ids]
        return cast(str, self._tok.decode(plain, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def piece(self, token: int) -> str:
        text = cast(str, self._tok.decode([token], clean_up_tokenization_spaces=False))
        mark = str(self._tok.convert_ids_to_tokens(token))
        return " " + text if mark.startswith("▁") and not text.startswith(" ") else text


def render(tokenizer: Tokenizer, messages: Sequence[Message], generate: bool) -> str:
    """The conversation as the model reads it; `generate` adds the start of an answer."""
    values = {"bos_token": tokenizer.bos_text, "eos_token": tokenizer.eos_text, "tools": None, "documents": None}
    variables = {**values, "messages": [dict(m) for m in messages], "add_generation_prompt": generate}
    try:
        return sandbox.chat(tokenizer.template, variables)
    except sandbox.Broken as error:
        raise ModelError(f"the model's chat template is broken, {error}", "download the model again") from None
    except sandbox.Failed as error:
        hint = "it may have no system message (leave data.system unset) or require alternating user and assistant"
        raise DataError(f"the model's chat template rejects this conversation: {error}", hint) from None
