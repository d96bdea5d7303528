"""A conversation with one GGUF file, through llama.cpp.

The model always reads the whole conversation in the chat template of the file; only the new part is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from edgeft.arch.check import check_model
from edgeft.errors import DataError, RunError
from edgeft.evaluate.compare import base_of_adapter, run_of
from edgeft.evaluate.llamacpp import LlamaFile, Sampling
from edgeft.formats.adapter import is_adapter
from edgeft.formats.tokenizer import open_tokenizer, render
from edgeft.run.folder import Run

MAX_CTX = 4096  # tokens of the KV cache, even if the model allows more
MIN_ANSWER = 64  # tokens; old turns are dropped where less is left for an answer


class Chat(AbstractContextManager["Chat"]):
    """Holds the messages; `notices` are for the user, about the last answer."""

    def __init__(
        self,
        path: str | Path,
        system: str | None = None,
        sampling: Sampling = Sampling(),
        n_ctx: int = 0,
        threads: int = 0,
        adapter: Path | None = None,
    ) -> None:
        """n_ctx 0: the context of the model, at most MAX_CTX."""
        self.tokenizer = open_tokenizer(path)
        self.file = LlamaFile(path, n_ctx=n_ctx, threads=threads, parallel=1, adapter=adapter)
        self.file.n_ctx = min(self.file.n_ctx, n_ctx or MAX_CTX)
        self.sampling = sampling
        self.system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []  # user and assistant in turn, without the system message
        self.notices: list[str] = []

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def ask(self, question: str) -> Iterator[str]:
        """The answer in pieces. An interrupted answer stays in the conversation."""
        self.notices = []
        self.messages.append({"role": "user", "content": question})
        try:
            ids = self._fit()
        except Exception:
            self.messages.pop()  # the conversation can go on
            raise
        answer = ""
        pieces = self.file.stream(ids, self.sampling)
        try:
            while True:
                try:
                    piece = next(pieces)
                except StopIteration as end:
                    if not end.value:
                        self.notices.append("the answer was cut off at its maximum length")
                    break
                if not answer:
                    piece = piece.lstrip()  # some vocabularies begin every answer with a space
                answer += piece
                if piece:
                    yield piece
        finally:
            self.messages.append({"role": "assistant", "content": answer.strip()})

    def _fit(self) -> list[int]:
        """The conversation as tokens; the oldest turns are dropped when too little room is left for an answer."""
        room = min(self.sampling.max_new, MIN_ANSWER, self.file.n_ctx // 2)
        dropped = 0
        while True:
            ids = self.tokenizer.encode(render(self.tokenizer, self.system + self.messages, generate=True))
            if len(ids) + room <= self.file.n_ctx:
                break
            if len(self.messages) == 1:
                raise DataError(
                    f"this message has {len(ids)} tokens; the context holds {self.file.n_ctx}",
                    f"an answer needs {room} of them: ask something shorter",
                )
            del self.messages[:2]
            dropped += 1
        if dropped:
            turns = "turn was" if dropped == 1 else f"{dropped} turns were"
            self.notices.append(f"the context of {self.file.n_ctx} tokens is full: the oldest {turns} dropped")
        return ids


def chat_file(target: Path) -> tuple[Path, Path | None]:
    """The GGUF file of `edgeft chat RUN|FILE`, and the adapter on it."""
    if target.is_dir():
        run = Run.open(target)
        target = run.model if run.model.is_file() else run.adapter
        if not target.is_file():
            raise RunError(f"{run.path} has no exported model yet", f"write it with `edgeft export {run.path}`")
    if is_adapter(target):
        return base_of_adapter(target, run_of(target)), target
    check_model(str(target))
    return target, None
