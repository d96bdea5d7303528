"""A conversation with one GGUF file, through llama.cpp.

What the model reads is always the whole conversation in the file's own chat template; only its new part is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from edgeft.errors import DataError
from edgeft.evaluate.llamacpp import LlamaFile
from edgeft.formats.tokenizer import open_tokenizer, render

if TYPE_CHECKING:
    from typing_extensions import Self

from typing import TYPE_CHECKING

from edgeft.arch.check import check_model
from edgeft.errors import RunError
from edgeft.formats.source import model_source as model_source
from edgeft.run.folder import Run

if TYPE_CHECKING:
    pass

LONGEST_CTX = 4096  # tokens kept in memory, even if the model could read more
LEAST_ROOM = 64  # tokens an answer must have room for before old turns are dropped


class Chat:
    """Keeps the messages; `notices` says what the person should know about the last answer."""

    def __init__(
        self,
        path: str | Path,
        system: str | None = None,
        temperature: float = 0.0,
        top_p: float = 0.95,
        max_new: int = 256,
        n_ctx: int = 0,
        threads: int = 0,
        seed: int | None = None,
    ) -> None:
        """n_ctx 0: the model's own length, at most LONGEST_CTX; temperature 0: always the likeliest token."""
        self.tokenizer = open_tokenizer(path)
        self.file = LlamaFile(path, n_ctx=n_ctx, threads=threads, parallel=1)
        self.file.n_ctx = min(self.file.n_ctx, n_ctx or LONGEST_CTX)
        self.temperature, self.top_p, self.max_new, self.seed = temperature, top_p, max_new, seed
        self.system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []  # user and assistant in turn, without the system message
        self.notices: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()

    def ask(self, question: str) -> Iterator[str]:
        """The answer in pieces. What came before an interruption stays in the conversation."""
        self.notices = []
        self.messages.append({"role": "user", "content": question})
        try:
            ids = self._fit()
        except Exception:
            self.messages.pop()  # the conversation can go on
            raise
        answer = ""
        pieces = self.file.stream(ids, self.max_new, self.temperature, self.top_p, self.seed)
        try:
            while True:
                try:
                    piece = next(pieces)
                except StopIteration as end:
                    if not end.value:
                        self.notices.append("the answer was cut off: it reached its greatest length")
                    break
                if not answer:
                    piece = piece.lstrip()  # some vocabularies begin every answer with a space
                answer += piece
                if piece:
                    yield piece
        finally:
            self.messages.append({"role": "assistant", "content": answer.strip()})

    def _fit(self) -> list[int]:
        """The conversation as tokens; its oldest turns go when too little room is left for an answer."""
        room = min(self.max_new, LEAST_ROOM, self.file.n_ctx // 2)
        dropped = 0
        while True:
            ids = self.tokenizer.encode(render(self.tokenizer, self.system + self.messages, generate=True))
            if len(ids) + room <= self.file.n_ctx:
                break
            if len(self.messages) == 1:
                raise DataError(
                    f"this message needs {len(ids)} tokens, and the context holds {self.file.n_ctx}",
                    f"an answer needs room for {room}: ask something shorter",
                )
            del self.messages[:2]
            dropped += 1
        if dropped:
            turns = "turn was" if dropped == 1 else f"{dropped} turns were"
            self.notices.append(f"the context of {self.file.n_ctx} tokens is full: the oldest {turns} dropped")
        return ids


def chat_file(target: Path) -> Path:
    """The GGUF file that `edgeft chat RUN|FILE` means."""
    if not target.is_dir():
        check_model(str(target))
        return target
    run = Run.open(target)
    if not run.model.is_file():
        raise RunError(f"{target} has no exported model yet", f"write it with `edgeft export {target}`")
    return run.model
