"""An Ollama Modelfile beside a GGUF file, or beside an adapter.

Its TEMPLATE is learned by rendering the file's own chat template, and is only written if it gives the same text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeft.errors import EdgeftError
from edgeft.formats.tokenizer import GgufTokenizer, Message, render
from edgeft.host.files import atomic_write

# words that no template contains or changes
SYSTEM = "Zsystem"
ASK, ANSWER, ASK_AGAIN, ANSWER_AGAIN, ASK_LAST = "Zask", "Zanswer", "Zmore", "Zreply", "Zlast"


@dataclass(frozen=True)
class Turns:
    """A chat template as the text between its messages: enough for ChatML, LLaMA 2 and 3, Mistral and Zephyr."""

    user: str  # before a question
    asked: str  # after a question
    answer: str  # before an earlier answer; mostly empty
    answered: str  # after an answer
    generate: str  # before the answer to generate, after `asked`
    system: tuple[str, str] | None = None  # around the system message; None: not supported
    inside: bool = False  # the system message is part of the first question (LLaMA 2)
    default: str | None = None  # system message where none is given; None: no system turn

    def text(self, messages: Sequence[Message]) -> str:
        """The text that Ollama renders from `go()`."""
        given = "".join(m["content"] for m in messages if m["role"] == "system")
        system = given or self.default
        block = system.join(self.system) if self.system and system is not None else ""
        parts = [] if self.inside else [block]
        block = block if self.inside else ""
        for message in messages:
            if message["role"] == "user":
                parts += [self.user, block, message["content"], self.asked]
                block = ""
            elif message["role"] == "assistant":
                parts += [self.answer, message["content"], self.answered]
        return "".join([*parts, self.generate])

    def go(self) -> str:
        """As a template of Go, which adds no white space."""
        front = block = ""
        if self.system is not None:
            before, after = self.system
            if self.inside:
                front = "{{ $system := .System }}"
                block = f'{{{{ if $system }}}}{before}{{{{ $system }}}}{after}{{{{ $system = "" }}}}{{{{ end }}}}'
            elif self.default is None:
                front = f"{{{{ if .System }}}}{before}{{{{ .System }}}}{after}{{{{ end }}}}"
            else:
                front = f"{before}{{{{ if .System }}}}{{{{ .System }}}}{{{{ else }}}}{self.default}{{{{ end }}}}{after}"
        user = f'{{{{ if eq .Role "user" }}}}{self.user}{block}{{{{ .Content }}}}{self.asked}'
        assistant = f'{{{{ else if eq .Role "assistant" }}}}{self.answer}{{{{ .Content }}}}{self.answered}'
        return f"{front}{{{{ range .Messages }}}}{user}{assistant}{{{{ end }}}}{{{{ end }}}}{self.generate}"


def learn(tokenizer: GgufTokenizer) -> Turns | None:
    """The pieces of a template, or None if it has other parts."""
    if "strftime_now" in tokenizer.template:
        return None  # the date would not change
    try:
        turns = _pieces(tokenizer)
        probes: list[list[tuple[str, ...]]] = [[(ASK,)], [(ASK, ANSWER), (ASK_AGAIN, ANSWER_AGAIN), (ASK_LAST,)]]
        talks = [_messages(system, *probe) for system in (["", SYSTEM] if turns.system else [""]) for probe in probes]
        if any(turns.text(talk) != _shown(tokenizer, talk, generate=True) for talk in talks):
            return None
    except (ValueError, EdgeftError):  # a piece is missing, or the template rejects the conversation
        return None
    pieces = "".join([turns.user, turns.asked, turns.answer, turns.answered, turns.generate, turns.default or ""])
    pieces += "".join(turns.system or ())
    return None if "{{" in pieces or '"""' in pieces else turns  # syntax of Go or Ollama


def _messages(system: str, *turns: tuple[str, ...]) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn, strict=False)]
    return messages


def _shown(tokenizer: GgufTokenizer, messages: list[Message], generate: bool) -> str:
    """Without the first BOS where llama.cpp and Ollama add it."""
    return render(tokenizer, messages, generate).removeprefix(tokenizer.bos_text if tokenizer.add_bos else "")


def _split(text: str, *words: str) -> list[str]:
    """The pieces around words that occur once each, in this order."""
    pieces = []
    for word in words:
        piece, match, text = text.partition(word)
        if not match or word in text:
            raise ValueError(word)
        pieces.append(piece)
    return [*pieces, text]


def _cut_end(text: str, end: str) -> str:
    if not text.endswith(end):
        raise ValueError(end)
    return text[: len(text) - len(end)]


def _pieces(tokenizer: GgufTokenizer) -> Turns:
    """Raises ValueError where the text does not consist of such pieces."""
    talk = _messages("", (ASK, ANSWER), (ASK_AGAIN,))
    first, asked, between, end = _split(_shown(tokenizer, talk, generate=True), ASK, ANSWER, ASK_AGAIN)
    answered = _split(_shown(tokenizer, talk[:2], generate=False), ANSWER)[1]
    if not between.startswith(answered):
        raise ValueError(answered)
    user = between[len(answered) :]
    bos = tokenizer.bos_text
    if bos and user.startswith(bos) and not first.endswith(user):  # LLaMA 2 begins every turn with BOS
        user, answered = user.removeprefix(bos), answered + bos
    shared = os.path.commonprefix([asked, end])  # noqa: RUF071 - by characters
    turns = Turns(user, shared, asked[len(shared) :], answered, end[len(shared) :])
    system = _system(tokenizer, user)
    if first == user:
        return turns if system is None else Turns(**vars(turns) | {"system": system[0], "inside": system[1]})
    if system is None or system[1]:
        raise ValueError(first)
    (before, after), _ = system
    default = _cut_end(first, after + user)
    if not default.startswith(before):
        raise ValueError(default)
    return Turns(**vars(turns) | {"system": system[0], "default": default[len(before) :]})


def _system(tokenizer: GgufTokenizer, user: str) -> tuple[tuple[str, str], bool] | None:
    """The text around a system message, and whether it is part of the question."""
    try:
        before, after, _ = _split(_shown(tokenizer, _messages(SYSTEM, (ASK,)), generate=True), SYSTEM, ASK)
    except (ValueError, EdgeftError):  # Mistral's first templates and Gemma's reject or ignore it
        return None
    if after.endswith(user):
        return (before, _cut_end(after, user)), False
    if before.startswith(user):
        return (before[len(user) :], after), True
    raise ValueError(before)


def modelfile(gguf_path: Path, adapter: Path | None = None) -> str:
    """The text of a Modelfile in the folder of this GGUF file, or of the adapter on it."""
    tokenizer = GgufTokenizer(gguf_path)
    turns = learn(tokenizer)
    if turns and '"""' in turns.go():  # it would end the template, and commands would follow
        turns = None
    made = adapter or gguf_path
    lines = [f"# ollama create {made.stem} -f {modelfile_path(made).name}", f"FROM ./{gguf_path.name}"]
    if adapter is not None:
        beside = gguf_path.resolve().parent == adapter.resolve().parent
        lines[1:] = [f"FROM {'./' + gguf_path.name if beside else gguf_path.resolve()}", f"ADAPTER ./{adapter.name}"]
    if turns:
        lines.append(f'TEMPLATE """{turns.go()}"""')
    else:
        lines.append("# No TEMPLATE: the file's own chat template is more than Ollama's language says in one line.")
        lines.append("# Ollama chooses one by what it finds in the file; `ollama show --template` prints it.")
    pieces = {tokenizer.piece(token) for token in tokenizer.eog}
    ends = sorted(piece for piece in pieces if piece and turns and piece in turns.answered)
    lines += [f'PARAMETER stop "{end}"' for end in ends or [tokenizer.eos_text] if _plain(end)]
    lines.append("PARAMETER temperature 0")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> bool:
    """Text that needs no escape in quotes; after a line break, a token could contain a command."""
    return bool(text) and text.isprintable() and '"' not in text


def modelfile_path(gguf_path: Path) -> Path:
    """`Modelfile`, or NAME.Modelfile if that is of another model."""
    path = gguf_path.with_name("Modelfile")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else None
    own = {f"FROM ./{gguf_path.name}", f"ADAPTER ./{gguf_path.name}"}
    return path if lines is None or own & set(lines) else gguf_path.with_suffix(".Modelfile")


def write_modelfile(gguf_path: Path, adapter: Path | None = None) -> Path:
    """Write it into the folder of the GGUF file, or of the adapter on it, and return its path."""
    path, text = modelfile_path(adapter or gguf_path), modelfile(gguf_path, adapter)
    with atomic_write(path) as file:
        file.write(text.encode())
    return path
