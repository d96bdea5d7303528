"""One GGUF file in llama.cpp, in this process: tokens, losses, answers.

A token that several rows share at their start is computed once, and which rows are computed together does not matter.
"""

from __future__ import annotations

import codecs
import ctypes
import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeft.arch.check import check_file
from edgeft.errors import ModelError
from edgeft.evaluate.ask import Ask, Progress, Response
from edgeft.evaluate.branches import Branch, Cell, Floats, Step, common
from edgeft.evaluate.crowd import BatchScorer
from edgeft.formats.ggml import F16, F32
from edgeft.host import device
from edgeft.host.system import allowed_cpus
from edgeft.plan.limits import BATCH, CACHE_BYTES, CACHE_SHARE, OUTPUTS

if TYPE_CHECKING:
    from typing_extensions import Self

    from edgeft.data.tokens import Encoded


COPY_SHARE = 0.4  # of it may be a copy of the weights


CHUNK = 32  # tokens of one row read in one call, where it is alone

FLASH_ATTENTION = 1  # LLAMA_FLASH_ATTN_TYPE_ENABLED: cells of other rows are skipped, not multiplied and masked

ERROR_LEVEL = 4  # GGML_LOG_LEVEL_ERROR

_errors: deque[str] = deque(maxlen=8)  # what llama.cpp said went wrong, newest last


def _remember(level: int, text: bytes | None, _data: object) -> None:
    if level == ERROR_LEVEL and text:
        _errors.append(text.decode("utf-8", "replace").strip())


_callback: Any = None  # llama.cpp keeps a bare pointer: the reference must outlive every call


def _library() -> Any:
    """llama-cpp-python's low-level module, with all of llama.cpp's own printing off."""
    import llama_cpp.llama_cpp as api

    global _callback
    if _callback is None:
        _callback = api.llama_log_callback(_remember)
        api.llama_backend_init()
    api.llama_log_set(_callback, None)
    return api


class LlamaFile:
    """A GGUF file opened in llama.cpp. The KV cache is made when rows come, and as large as they need."""

    def __init__(
        self, path: str | Path, n_ctx: int = 0, threads: int = 0, parallel: int = OUTPUTS - 1, room_bytes: int = 0
    ) -> None:
        """n_ctx: longest row, answer included, 0 = the model's own; threads 0: all cores; parallel: rows at once.

        room_bytes: memory that this process may use, 0 = what is available here.
        """
        if not 1 <= parallel < OUTPUTS:
            raise ValueError(f"parallel is {parallel}, and must be from 1 to {OUTPUTS - 1}")
        self.path = Path(path)
        self._model: Any = None
        self._ctx: Any = None
        if not self.path.is_file():
            raise ModelError(f"there is no file {self.path}", "give the path of a GGUF file")
        check_file(self.path)  # damage must not reach llama.cpp, which may abort
        api = self._api = _library()
        _errors.clear()
        self.room_bytes = room(room_bytes)
        params = api.llama_model_default_params()
        # Weights in an order that is quicker to multiply are a copy of the whole file in memory, where the file itself
        # is mapped, and its pages can be given up.
        params.use_extra_bufts = self.path.stat().st_size < COPY_SHARE * self.room_bytes
        self._model = api.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self._model:
            # the first line names the cause, later ones only say that loading failed
            said = f": {_errors[0]}" if _errors else ""
            raise ModelError(f"llama.cpp cannot load {self.path}{said}", "is it a complete GGUF file?")
        self._vocab = api.llama_model_get_vocab(self._model)
        self.vocab_size: int = api.llama_vocab_n_tokens(self._vocab)
        self.trained_ctx: int = api.llama_model_n_ctx_train(self._model)
        self.n_ctx = n_ctx or self.trained_ctx
        self.threads = threads or len(allowed_cpus())
        self.parallel = parallel
        # a recurrent state cannot be cut back to a prefix
        self._cuttable = not (api.llama_model_is_recurrent(self._model) or api.llama_model_is_hybrid(self._model))
        self._sequences, self._kind = 0, F32
        self.cells = 0  # of the KV cache
        self.used = 0
        self.held = Branch(0)  # what was read last stays, for rows that begin alike
        self._make_batch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free llama.cpp's memory; may be called twice."""
        if self._ctx:
            self._api.llama_free(self._ctx)
        if self._model:
            self._api.llama_model_free(self._model)
        self._ctx = self._model = self._api = None  # a use after this is a bug, and not a crash

    # ------------------------------------------------------------ text and tokens

    def tokenize(self, text: str, special: bool = True, add_bos: bool = True) -> list[int]:
        """special: `<|im_end|>` and the like are tokens; add_bos: if the model wants one and it is not there."""
        data = text.encode("utf-8")
        room = len(data) + 8
        while True:
            buffer = (ctypes.c_int32 * room)()
            n = self._api.llama_tokenize(self._vocab, data, len(data), buffer, room, add_bos, special)
            if n >= 0:
                break
            room = -n
        ids = list(buffer[:n])
        bos = self._api.llama_vocab_bos(self._vocab)
        return ids[1:] if add_bos and ids[:2] == [bos, bos] else ids

    def detokenize(self, ids: Sequence[int], special: bool = False) -> str:
        given = (ctypes.c_int32 * len(ids))(*(int(i) for i in ids))
        room = 16 * len(ids) + 16
        while True:
            buffer = ctypes.create_string_buffer(room)
            n = self._api.llama_detokenize(self._vocab, given, len(ids), buffer, room, not special, special)
            if n >= 0:
                return buffer.raw[:n].decode("utf-8", "replace")
            room = -n

    def piece(self, token: int) -> bytes:
        """A token's own bytes, which may be part of a character; nothing for special tokens."""
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            n = self._api.llama_token_to_piece(self._vocab, token, buffer, room, 0, False)
            if n >= 0:
                return buffer.raw[:n]
            room = -n

    def eog(self, token: int) -> bool:
        """Does this token end a generation?"""
        return bool(self._api.llama_vocab_is_eog(self._vocab, token))

    # ------------------------------------------------------------ logits and loss

    def target_logits(self, ids: Sequence[int], positions: Sequence[int]) -> Floats:
        """(len(positions), vocab): what the model says after each of these positions."""
        row = [int(i) for i in ids]
        where = [int(p) for p in positions]
        if any(not 0 <= p < len(row) for p in where):
            raise ValueError(f"positions must lie in a row of {len(row)} tokens")
        if not where:
            return np.zeros((0, self.vocab_size), np.float32)
        end = max(where) + 1  # nothing is asked of what follows
        self.ready(end, 1)
        found = {p: logits.copy() for p, logits in self._extend(row[:end], sorted(set(where)))}
        return np.stack([found[p] for p in where])

    # ------------------------------------------------------------ loss and answers

    def loss(self, rows: Sequence[Encoded], progress: Progress | None = None) -> tuple[float, int]:
        """Sum of the negative log-likelihoods (nats) of all trained tokens, and how many there are."""
        asks = [Ask([int(i) for i in row.ids], [int(i) + 1 for i in np.flatnonzero(row.trained[1:])]) for row in rows]
        said = self.ask(asks, 0, progress)
        return sum(one.prompt_nll for one in said), sum(len(ask.targets) for ask in asks)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new: int, progress: Progress | None = None
    ) -> list[list[int]]:
        """Greedy answers up to an end-of-generation token (left out), several at a time, in the caller's order."""
        asks = [Ask([int(i) for i in prompt], generate=True) for prompt in prompts]
        return [one.output for one in self.ask(asks, max_new, progress)]

    def ask(self, asks: Sequence[Ask], max_new: int, progress: Progress | None = None) -> list[Response]:
        """Everything that is wanted of each prompt, from one pass over it; what prompts share is computed once."""
        return BatchScorer(self, asks, max_new, progress).run()

    def stream(
        self,
        prompt: Sequence[int],
        max_new: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Generator[str, None, bool]:
        """One answer in pieces of whole characters; returns whether the model ended it. Temperature 0: greedy."""
        ids = [int(i) for i in prompt]
        self.ready(self.n_ctx, 1, kind=F16)  # whole from the start: a conversation grows
        random = np.random.default_rng(seed)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        room = min(max_new, self.n_ctx - len(ids) + 1)
        ended = False
        if room > 0:
            ((_, logits),) = self._extend(ids, [len(ids) - 1])
            for left in range(room - 1, -1, -1):
                token = _choose(logits, temperature, top_p, random)
                ended = self.eog(token)
                if ended:
                    break
                text = decoder.decode(self.piece(token))
                if text:
                    yield text
                if left:
                    ids.append(token)
                    ((_, logits),) = self._extend(ids, [len(ids) - 1])
        rest = decoder.decode(b"", final=True)
        if rest:
            yield rest
        return ended

    # ------------------------------------------------------------ the KV cache

    def ready(self, needed: int, sequences: int, wished: int = 0, kind: int = F32) -> None:
        """Have a KV cache of `needed` cells, of `wished` if the memory for keys and values allows.

        In float16, llama.cpp also sums in float16, and many tokens otherwise than few: what a row gets would depend on
        the others. Scores take float32; a conversation, which is alone, half the memory.
        """
        api = self._api
        heads = max(api.llama_model_n_head(self._model), 1)
        width = api.llama_model_n_embd(self._model) // heads * api.llama_model_n_head_kv(self._model)
        cell_bytes = 2 * (2 if kind == F16 else 4) * max(width, 1) * api.llama_model_n_layer(self._model)
        cells = max(needed, min(wished, min(CACHE_BYTES, int(CACHE_SHARE * self.room_bytes)) // cell_bytes))
        cells += -cells % 256  # llama.cpp's own step
        if self.cells >= cells and self._sequences > sequences and self._kind == kind:
            return
        if self._ctx:
            api.llama_free(self._ctx)
        params = api.llama_context_default_params()
        params.n_ctx = cells
        params.n_seq_max = sequences + 1  # the first is what is held
        params.kv_unified = True  # one cell can belong to several sequences
        params.flash_attn_type = FLASH_ATTENTION
        params.type_k = params.type_v = kind
        params.swa_full = True  # sliding-window layers keep everything, so that a prefix stays usable
        params.n_batch = params.n_ubatch = BATCH
        params.n_outputs_max = params.n_outputs_max_per_seq = OUTPUTS
        params.n_threads = params.n_threads_batch = self.threads
        _errors.clear()
        self._ctx = api.llama_init_from_model(self._model, params)
        self.held, self.used, self.cells, self._sequences = Branch(0), 0, 0, 0
        if not self._ctx:
            said = f": {_errors[0]}" if _errors else ""
            raise ModelError(
                f"llama.cpp cannot make a context of {cells} tokens for {self.path}{said}",
                "take shorter rows or a smaller model",
            )
        self._memory = api.llama_get_memory(self._ctx)
        self.cells, self._sequences, self._kind = cells, sequences + 1, kind

    def fits(self, tokens: int) -> None:
        """Refuse a row that is longer than the context."""
        if tokens > self.n_ctx:
            raise ModelError(
                f"a row of {tokens} tokens does not fit in a context of {self.n_ctx}",
                "shorten the row or open the file with a longer context",
            )

    def copy(self, source: Branch, target: Branch, length: int) -> None:
        """Let an empty branch begin with the first `length` cells of another; nothing is computed."""
        if length:
            self._api.llama_memory_seq_cp(self._memory, source.seq, target.seq, 0, length)
        self.take(target, source.cells[:length])
        target.ids[:length] = source.ids[:length]

    def take(self, branch: Branch, cells: Sequence[Cell]) -> None:
        """Cells that a branch goes through from now on, behind those it has."""
        self.used += sum(not cell.branches for cell in cells)
        for cell in cells:
            cell.branches += 1
        branch.cells += cells

    def cut(self, branch: Branch, length: int) -> None:
        """Take away what a branch holds after its first `length` tokens."""
        if length >= len(branch.cells):
            return
        for cell in branch.cells[length:]:
            cell.branches -= 1
            self.used -= not cell.branches
        del branch.cells[length:], branch.ids[length:]
        self._api.llama_memory_seq_rm(self._memory, branch.seq, length, -1)

    def hold(self, branch: Branch, length: int) -> None:
        """Keep the first `length` tokens of a branch when it is gone."""
        self.cut(self.held, 0)
        self.copy(branch, self.held, length)

    def forget(self) -> None:
        """Empty the cache."""
        if self._ctx:
            self._api.llama_memory_clear(self._memory, False)
        self.held, self.used = Branch(0), 0

    def _extend(self, ids: list[int], wanted: Sequence[int]) -> Iterator[tuple[int, Floats]]:
        """Hold these tokens, computing what is not held yet; the logits at wanted positions (ascending), as views."""
        self.fits(len(ids))
        same = common(self.held.ids, ids, wanted[0])  # a wanted position is always decoded: its logits are needed
        self.cut(self.held, same if self._cuttable else 0)
        self.held.wanted = dict.fromkeys(wanted)
        while len(self.held.ids) < len(ids):
            start = len(self.held.ids)
            steps = [Step(ids[p], p, Cell(), [self.held]) for p in range(start, min(start + CHUNK, len(ids)))]
            self.held.ids += [step.token for step in steps]
            self.take(self.held, [step.cell for step in steps])
            yield from ((step.position, logits) for step, logits in self.decode(steps))

    # ------------------------------------------------------------ one call of llama_decode

    def _make_batch(self) -> None:
        """A llama_batch whose arrays are numpy's: filled by slices, freed with this object."""
        self._tokens, self._positions, self._counts = (np.zeros(BATCH, np.int32) for _ in range(3))
        self._seqs = np.zeros((BATCH, OUTPUTS), np.int32)
        self._flags = np.zeros(BATCH, np.int8)
        int_p = ctypes.POINTER(ctypes.c_int32)
        base = self._seqs.ctypes.data
        self._seq_pointers = (int_p * BATCH)(*(ctypes.cast(base + 4 * OUTPUTS * i, int_p) for i in range(BATCH)))
        self._batch = self._api.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(int_p),
            embd=None,
            pos=self._positions.ctypes.data_as(int_p),
            n_seq_id=self._counts.ctypes.data_as(int_p),
            seq_id=ctypes.cast(self._seq_pointers, ctypes.POINTER(int_p)),
            logits=self._flags.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def decode(self, steps: Sequence[Step]) -> Iterator[tuple[Step, Floats]]:
        """Compute at most BATCH steps; gives (step, (vocab,) view of its logits) where something is asked of it."""
        n = len(steps)
        self._tokens[:n] = [step.token for step in steps]
        self._positions[:n] = [step.position for step in steps]
        self._flags[:n] = [step.asked for step in steps]
        for i, step in enumerate(steps):
            self._counts[i] = len(step.branches)
            self._seqs[i, : len(step.branches)] = [branch.seq for branch in step.branches]
        self._batch.n_tokens = n
        code = self._api.llama_decode(self._ctx, self._batch)
        if code != 0:
            self.forget()
            raise ModelError(f"llama.cpp stopped with code {code} on {self.path}", "are the row's tokens this model's?")
        for i, step in enumerate(steps):
            if self._flags[i]:
                logits = self._api.llama_get_logits_ith(self._ctx, i)
                yield step, np.ctypeslib.as_array(logits, (self.vocab_size,))


def room(asked: int) -> int:
    """Memory that may be used: what is available, and no more than was asked for (0: as much as there is)."""
    available = device.memory().available_bytes
    return min(asked, available) if asked else available


def _choose(logits: Floats, temperature: float, top_p: float, random: np.random.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()).astype(np.float64) / temperature
    p = np.exp(scaled)
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1]  # the fewest that hold top_p
    return int(random.choice(kept, p=p[kept] / p[kept].sum()))
