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
from collections.abc import Mapping, Sequence
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

# Special tokens that llama.cpp takes for the end of an answer, whatever else the model says.
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
        """Special tokens in the text are parsed; BOS stands in front once, when the model wants one."""
        ...

    def decode(self, ids: Ids) -> str:
        """Special tokens are left out."""
        ...

    def piece(self, token: int) -> str:
        """One token as text, special ones shown."""
        ...


def open_tokenizer(path: str | Path) -> Tokenizer:
    """A file is a GGUF file; a folder or a name of the form owner/name is Hugging Face's."""
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


# ---------------------------------------------------------------- GGUF, through llama.cpp


@functools.lru_cache(maxsize=1)
def _quiet_llama() -> tuple[Any, Any, deque[str]]:
    """The llama.cpp library with its log kept off the screen: (library, callback, its last error lines)."""
    from llama_cpp import llama_cpp

    errors: deque[str] = deque(maxlen=4)

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator, unused-ignore]
    def log(level: int, text: bytes, _: Any) -> None:
        if level == 4:  # GGML_LOG_LEVEL_ERROR
            errors.append(text.decode("utf-8", "replace").strip())

    return llama_cpp, log, errors


def quiet_llama() -> Any:
    """The low-level llama_cpp module; each call puts the silent log callback in place again."""
    library, log, _ = _quiet_llama()  # the cache keeps the callback alive
    library.llama_log_set(log, ctypes.c_void_p(0))
    return library


class GgufTokenizer:
    """llama.cpp's tokenizer of one GGUF file; the weights are not read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._llama = llama = quiet_llama()
        check_vocabulary(GGUF.open(self.path))  # damage must not reach llama.cpp, which may abort
        errors = _quiet_llama()[2]
        errors.clear()
        params = llama.llama_model_default_params()
        params.vocab_only = True
        model = llama.llama_model_load_from_file(str(self.path).encode(), params)
        if not model:
            prefix = r"(\w+: )?(error loading model( \w+)?: )*"  # the function's name, and the same words again
            reason = re.sub("^" + prefix, "", errors[0]) if errors else "llama.cpp cannot read it"
            raise ModelError(f"{self.path.name} is damaged or of an unknown kind: {reason}", "download the file again")
        self._model = model
        weakref.finalize(self, llama.llama_model_free, model).atexit = False
        self._vocab = vocab = llama.llama_model_get_vocab(model)
        self._buffer = (llama.llama_token * 4096)()
        self._bytes = ctypes.create_string_buffer(4096)
        self.vocab_size: int = llama.llama_vocab_n_tokens(vocab)
        if self.vocab_size == 0:
            raise ModelError(
                f"{self.path.name} has no vocabulary", "a vocabulary is part of every complete GGUF model file"
            )
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
        for _ in range(2):
            size = len(self._buffer)
            n = self._llama.llama_tokenize(self._vocab, data, len(data), self._buffer, size, special, True)
            if n >= 0:
                break
            self._buffer = (self._llama.llama_token * -n)()  # too small: -n is what it needs
        ids = cast("list[int]", self._buffer[:n])
        if special and self.add_eos and ids and ids[-1] == self.eos:
            ids.pop()  # the prompt goes on after this text
        return ids

    def decode(self, ids: Ids) -> str:
        tokens = (self._llama.llama_token * len(ids))(*ids)
        for _ in range(2):
            size = len(self._bytes)
            n = self._llama.llama_detokenize(self._vocab, tokens, len(ids), self._bytes, size, False, False)
            if n >= 0:
                break
            self._bytes = ctypes.create_string_buffer(-n)
        return self._bytes.raw[:n].decode("utf-8", "replace")

    def piece(self, token: int) -> str:
        if not 0 <= token < self.vocab_size:
            raise IndexError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        for _ in range(2):
            n = self._llama.llama_token_to_piece(self._vocab, token, self._bytes, len(self._bytes), 0, True)
            if n >= 0:
                break
            self._bytes = ctypes.create_string_buffer(-n)
        return self._bytes.raw[:n].decode("utf-8", "replace")


# ---------------------------------------------------------------- Hugging Face


class HfTokenizer:
    """transformers' tokenizer of a folder or hub id."""

    def __init__(self, path: str | Path) -> None:
        from edgeft.formats.hub import open_tokenizer_file, resolve

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
        except BaseException as error:  # a panic in Rust is no Exception
            raise ModelError(f"the tokenizer of {folder} cannot be used: {str(error)[:200]}") from None
        self._bos = [int(tok.bos_token_id)] if starts else []
        named = tok.chat_template.get("default") if isinstance(tok.chat_template, dict) else tok.chat_template
        self.has_template = bool(named)
        self.template: str = named or PLAIN_TEMPLATE
        self.eog = frozenset({self.eos} - {-1} | self._end_ids() | self._generation_ids(folder))

    def _end_ids(self) -> set[int]:
        return {i for i, token in self._tok.added_tokens_decoder.items() if str(token) in END_TEXTS}

    @staticmethod
    def _generation_ids(folder: Path) -> set[int]:
        try:
            ids = json.loads((folder / "generation_config.json").read_text("utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            return set()  # the file is optional
        return {i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)}

    def encode(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # lone surrogates would be refused
        ids = cast("list[int]", self._tok(text, add_special_tokens=False)["input_ids"])
        return ids if not self._bos or ids[:1] == self._bos else self._bos + ids

    def decode(self, ids: Ids) -> str:
        return cast(
            str, self._tok.decode([int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def piece(self, token: int) -> str:
        text = cast(str, self._tok.decode([token], clean_up_tokenization_spaces=False))
        mark = str(self._tok.convert_ids_to_tokens(token))
        return " " + text if mark.startswith("▁") and not text.startswith(" ") else text


# ---------------------------------------------------------------- the chat template


def render(tokenizer: Tokenizer, messages: Sequence[Message], generate: bool) -> str:
    """The conversation as the model reads it; `generate` adds what stands before an answer."""
    values = {"bos_token": tokenizer.bos_text, "eos_token": tokenizer.eos_text, "tools": None, "documents": None}
    given = {**values, "messages": [dict(m) for m in messages], "add_generation_prompt": generate}
    try:
        return sandbox.chat(tokenizer.template, given)
    except sandbox.Broken as error:
        raise ModelError(f"the model's chat template is broken, {error}", "take another copy of the model") from None
    except sandbox.Failed as error:
        hint = "the template may know no system message (leave data.system unset) or want user and assistant in turn"
        raise DataError(f"the model's chat template does not take this conversation: {error}", hint) from None
