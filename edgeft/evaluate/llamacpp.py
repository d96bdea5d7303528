"""One GGUF file in llama.cpp, in this process: tokens, losses, answers.

A token that several rows share at their start is computed once, and results are those of each row on its own.
"""

from __future__ import annotations

import codecs
import ctypes
import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgeft.errors import ModelError
from edgeft.evaluate.ask import Ask, Progress, Said
from edgeft.model.header import check_file

if TYPE_CHECKING:
    from typing_extensions import Self

    from edgeft.data.tokens import Encoded

Floats = npt.NDArray[np.float32]

# Most tokens in one call of llama_decode. From 64 on, the CPU's attention takes another path, which rounds otherwise: a
# row's logits would depend on how much of it was computed before. 32 is as fast, to within 10 %.
BATCH = 32
CELLS = 8192  # most KV cells (tokens x sequences), unless one row alone needs more
FLASH_ATTENTION = 1  # LLAMA_FLASH_ATTN_TYPE_ENABLED; without it, one token is rounded otherwise than several
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


@dataclass(eq=False)
class _Slot:
    """One sequence of the KV cache and the tokens it holds, token i in its cell i."""

    seq: int
    ids: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Job:
    """One answer in the making: `output[-1]` is chosen and not yet decoded."""

    slot: _Slot
    output: list[int]
    room: int  # most tokens the answer may have


class LlamaFile:
    """A GGUF file opened in llama.cpp. The KV cache is made when rows come, and as large as they need."""

    def __init__(self, path: str | Path, n_ctx: int = 0, threads: int = 0, parallel: int = 8) -> None:
        """n_ctx: longest row, answer included, 0 = the model's own; threads 0: all cores; parallel: answers at once."""
        if not 1 <= parallel <= BATCH:
            raise ValueError(f"parallel is {parallel}, and must be from 1 to {BATCH}")
        self.path = Path(path)
        self._model: Any = None
        self._ctx: Any = None
        if not self.path.is_file():
            raise ModelError(f"there is no file {self.path}", "give the path of a GGUF file")
        check_file(self.path)  # damage must not reach llama.cpp, which may abort
        api = self._api = _library()
        _errors.clear()
        self._model = api.llama_model_load_from_file(os.fsencode(self.path), api.llama_model_default_params())
        if not self._model:
            # the first line names the cause, later ones only say that loading failed
            said = f": {_errors[0]}" if _errors else ""
            raise ModelError(f"llama.cpp cannot load {self.path}{said}", "is it a complete GGUF file?")
        self._vocab = api.llama_model_get_vocab(self._model)
        self.vocab_size: int = api.llama_vocab_n_tokens(self._vocab)
        self.trained_ctx: int = api.llama_model_n_ctx_train(self._model)
        self.n_ctx = n_ctx or self.trained_ctx
        self.threads = threads or cores()
        self.parallel = parallel
        # a recurrent state cannot be cut back to a prefix
        self._cuttable = not (api.llama_model_is_recurrent(self._model) or api.llama_model_is_hybrid(self._model))
        self._slots: list[_Slot] = []
        self._slot_tokens = 0  # cells of each slot
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
        found = {p: logits.copy() for p, logits in self._read(row, sorted(set(where)))}
        return np.stack([found[p] for p in where]) if where else np.zeros((0, self.vocab_size), np.float32)

    def _read(self, ids: list[int], wanted: Sequence[int]) -> Iterator[tuple[int, Floats]]:
        """Run a row on its own and give the logits at the wanted positions (ascending), one view at a time."""
        if not wanted:
            return
        end = wanted[-1] + 1  # nothing is asked of what follows
        self._ready(end)
        slot = max(self._slots, key=lambda s: _common(s.ids, ids, wanted[0]))
        start = self._reuse(slot, ids, limit=wanted[0])
        yield from self._extend(slot, ids[:end], start, wanted)

    # ------------------------------------------------------------ generation

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

    def ask(self, asks: Sequence[Ask], max_new: int, progress: Progress | None = None) -> list[Said]:
        """Everything that is wanted of each prompt, from one pass over it; what prompts share is computed once."""
        said = [Said(0.0, [0.0] * len(ask.options), [False] * len(ask.options)) for ask in asks]
        if not all(ask.prompt for ask in asks):
            raise ValueError("a prompt needs at least one token")
        if not asks:
            return said
        answers = max_new > 0 and any(ask.generate for ask in asks)
        self._ready(
            max(len(ask.prompt) + max([len(o) - 1 for o in ask.options], default=0) for ask in asks),
            max(len(ask.prompt) for ask in asks) + max_new - 1 if answers else 0,
            min(self.parallel, len(asks)) if answers else 1,
        )
        waiting = deque(sorted(range(len(asks)), key=lambda i: asks[i].prompt))  # neighbours share prefixes
        running: list[_Job] = []
        finished = 0
        while waiting or running:
            while waiting and len(running) < len(self._slots):
                row = waiting.popleft()
                job = self._admit(asks[row], said[row], max_new, [other.slot for other in running])
                if job:
                    running.append(job)
                else:
                    finished += 1
                    if progress:
                        progress(finished, len(asks))
            going = [job for job in running if not self._ended(job)]
            if progress and len(going) < len(running):
                finished += len(running) - len(going)
                progress(finished, len(asks))
            if len(going) == len(running) and going:  # otherwise first fill the places that became free
                self._step(going)
            running = going
        for one in said:
            if one.output and self.eog(one.output[-1]):
                one.output.pop()
        return said

    def _admit(self, ask: Ask, said: Said, max_new: int, busy: list[_Slot]) -> _Job | None:
        """Read a prompt into a free slot, score what is to be scored, and begin the answer if one is wanted."""
        ids, last = ask.prompt, len(ask.prompt) - 1
        generate = ask.generate and max_new > 0
        order = sorted(range(len(ask.options)), key=ask.options.__getitem__)  # neighbours share their start
        option = ask.options[order[0]] if order else []
        row = ids + option[:-1]  # the first option is read with the prompt, in the same calls
        wanted = sorted({t - 1 for t in ask.targets} | (set(range(last, len(row))) if generate or order else set()))
        if not wanted:
            return None
        # The slot least like this prompt is the least likely to serve those after it.
        slot = min((s for s in self._slots if s not in busy), key=lambda s: _common(s.ids, ids, wanted[0]))
        start = self._reuse(slot, ids, limit=wanted[0])  # a wanted position is always decoded: its logits are needed
        targets = set(ask.targets)
        after: list[Floats] = []  # logits after the prompt and after each token of the current option
        for position, logits in self._extend(slot, row[: wanted[-1] + 1], start, wanted):
            if position + 1 in targets:
                said.prompt_nll += _surprise(logits, ids[position + 1])
            if position >= last and (generate or order):
                after.append(logits.copy())
        for i in order:
            shared = _common(option, ask.options[i], min(len(after), len(ask.options[i])) - 1)
            option, after = ask.options[i], after[: shared + 1]
            self._cut(slot, len(ids) + shared)
            row = ids + option[:-1]
            rest = range(len(ids) + shared, len(row))
            after += [logits.copy() for _, logits in self._extend(slot, row, len(ids) + shared, rest)]
            said.option_nll[i] = sum(_surprise(a, token) for a, token in zip(after, option, strict=True))
            said.option_greedy[i] = all(int(a.argmax()) == token for a, token in zip(after, option, strict=True))
        if not generate:
            return None
        # As long as the likeliest token is the option's own, the answer needs no further step.
        said.output = [int(after[0].argmax())]
        room = min(max_new, self.n_ctx - len(ids) + 1)
        while len(said.output) < min(room, len(after)) and said.output[-1] == option[len(said.output) - 1]:
            if self.eog(said.output[-1]):
                break
            said.output.append(int(after[len(said.output)].argmax()))
        self._cut(slot, len(ids) + len(said.output) - 1)
        return _Job(slot, said.output, room)

    def _ended(self, job: _Job) -> bool:
        return len(job.output) >= job.room or self.eog(job.output[-1])

    def _step(self, jobs: list[_Job]) -> None:
        """One more token for each."""
        slots = [job.slot for job in jobs]
        self._decode(slots, [job.output[-1] for job in jobs], [len(s.ids) for s in slots], [True] * len(jobs))
        for i, job in enumerate(jobs):
            job.output.append(int(self._logits(i).argmax()))

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
        self._ready(len(ids), self.n_ctx)  # whole from the start: a conversation grows
        random = np.random.default_rng(seed)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        limit = len(ids) - 1
        slot = max(self._slots, key=lambda s: _common(s.ids, ids, limit))
        start = self._reuse(slot, ids, limit)
        room = min(max_new, self.n_ctx - len(ids) + 1)
        ended = False
        if room > 0:
            ((_, logits),) = self._extend(slot, ids, start, [limit])
            for left in range(room - 1, -1, -1):
                token = _choose(logits, temperature, top_p, random)
                ended = self.eog(token)
                if ended:
                    break
                text = decoder.decode(self.piece(token))
                if text:
                    yield text
                if left:
                    self._decode([slot], [token], [len(slot.ids)], [True])
                    logits = self._logits(0)
        rest = decoder.decode(b"", final=True)
        if rest:
            yield rest
        return ended

    # ------------------------------------------------------------ the KV cache

    def _ready(self, needed: int, wished: int = 0, sequences: int = 1) -> None:
        """Have a KV cache for rows of `needed` tokens, of `wished` if the context allows."""
        if needed > self.n_ctx:
            raise ModelError(
                f"a row of {needed} tokens does not fit in a context of {self.n_ctx}",
                "shorten the row or open the file with a longer context",
            )
        tokens = min(max(needed, wished), self.n_ctx)
        tokens += -tokens % 256  # llama.cpp's own step
        sequences = max(1, min(sequences, CELLS // tokens))
        if self._slot_tokens >= tokens and len(self._slots) >= sequences:
            return
        api = self._api
        if self._ctx:
            api.llama_free(self._ctx)
        params = api.llama_context_default_params()
        params.n_ctx = tokens * sequences
        params.n_seq_max = sequences
        # Cells of its own for each sequence: each sums over its cells in the order it would alone, to the same bits.
        params.kv_unified = False
        params.flash_attn_type = FLASH_ATTENTION
        params.swa_full = True  # sliding-window layers keep everything, so that a prefix stays usable
        params.n_batch = params.n_ubatch = BATCH
        params.n_outputs_max = params.n_outputs_max_per_seq = BATCH  # logits are kept for as many
        params.n_threads = params.n_threads_batch = self.threads
        _errors.clear()
        self._ctx = api.llama_init_from_model(self._model, params)
        self._slots, self._slot_tokens = [], 0
        if not self._ctx:
            said = f": {_errors[0]}" if _errors else ""
            raise ModelError(
                f"llama.cpp cannot make {sequences} contexts of {tokens} tokens for {self.path}{said}",
                "take shorter rows or a smaller model",
            )
        self._memory = api.llama_get_memory(self._ctx)
        self._slots = [_Slot(seq) for seq in range(sequences)]
        self._slot_tokens = tokens

    def _reuse(self, slot: _Slot, ids: list[int], limit: int) -> int:
        """Make `slot` hold the longest start of `ids` (at most `limit` tokens) that any slot has; its length."""
        donor = max(self._slots, key=lambda s: (_common(s.ids, ids, limit), s is slot))
        n = _common(donor.ids, ids, limit) if self._cuttable else 0
        kept = donor.ids[:n]
        if donor is not slot or not n:
            self._drop(slot)
        if n:
            if donor is not slot:
                self._api.llama_memory_seq_cp(self._memory, donor.seq, slot.seq, -1, -1)  # only whole ones are copied
            self._api.llama_memory_seq_rm(self._memory, slot.seq, n, -1)
        slot.ids = kept
        return n

    def _cut(self, slot: _Slot, length: int) -> None:
        """Take away what a slot holds after its first `length` tokens."""
        if length >= len(slot.ids):
            return
        kept = slot.ids[:length]
        if self._cuttable:
            self._api.llama_memory_seq_rm(self._memory, slot.seq, length, -1)
            slot.ids = kept
        else:
            self._drop(slot)
            deque(self._extend(slot, kept, 0, []), maxlen=0)

    def _drop(self, slot: _Slot) -> None:
        self._api.llama_memory_seq_rm(self._memory, slot.seq, -1, -1)
        slot.ids = []

    def _extend(self, slot: _Slot, ids: list[int], start: int, wanted: Sequence[int]) -> Iterator[tuple[int, Floats]]:
        """Decode ids[start:] into a slot that holds ids[:start]; the logits at wanted positions, as they come."""
        asked = set(wanted)
        while start < len(ids):
            end = min(start + BATCH, len(ids))
            flags = [p in asked for p in range(start, end)]
            self._decode([slot] * (end - start), ids[start:end], range(start, end), flags)
            for i, flag in enumerate(flags):
                if flag:
                    yield start + i, self._logits(i)
            start = end

    # ------------------------------------------------------------ one call of llama_decode

    def _make_batch(self) -> None:
        """A llama_batch whose arrays are numpy's: filled by slices, freed with this object."""
        self._tokens, self._positions, self._seqs = (np.zeros(BATCH, np.int32) for _ in range(3))
        self._seq_counts = np.ones(BATCH, np.int32)  # each token belongs to one sequence
        self._flags = np.zeros(BATCH, np.int8)
        int_p = ctypes.POINTER(ctypes.c_int32)
        base = self._seqs.ctypes.data
        self._seq_pointers = (int_p * BATCH)(*(ctypes.cast(base + 4 * i, int_p) for i in range(BATCH)))
        self._batch = self._api.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(int_p),
            embd=None,
            pos=self._positions.ctypes.data_as(int_p),
            n_seq_id=self._seq_counts.ctypes.data_as(int_p),
            seq_id=ctypes.cast(self._seq_pointers, ctypes.POINTER(int_p)),
            logits=self._flags.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def _decode(
        self, slots: Sequence[_Slot], tokens: Sequence[int], positions: Sequence[int], flags: Sequence[bool]
    ) -> None:
        """Append tokens[i] at positions[i] to slots[i]; logits are kept where flags[i]."""
        n = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = positions
        self._seqs[:n] = [slot.seq for slot in slots]
        self._flags[:n] = flags
        self._batch.n_tokens = n
        code = self._api.llama_decode(self._ctx, self._batch)
        if code != 0:
            for slot in self._slots:
                self._drop(slot)
            raise ModelError(f"llama.cpp stopped with code {code} on {self.path}", "are the row's tokens this model's?")
        for slot, token in zip(slots, tokens, strict=True):
            slot.ids.append(token)

    def _logits(self, i: int) -> Floats:
        """(vocab,) view of the logits of the last call's token i; gone with the next call."""
        return np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._ctx, i), (self.vocab_size,))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _common(a: list[int], b: list[int], limit: int) -> int:
    """Length of the common start, at most `limit`."""
    n = min(len(a), len(b), limit)
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


def _surprise(logits: Floats, token: int) -> float:
    """-log p(token), in nats."""
    top = logits.max()
    return float(np.log(np.exp(logits - top).sum(dtype=np.float64)) + float(top) - float(logits[token]))


def _choose(logits: Floats, temperature: float, top_p: float, random: np.random.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()).astype(np.float64) / temperature
    p = np.exp(scaled)
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1]  # the fewest that hold top_p
    return int(random.choice(kept, p=p[kept] / p[kept].sum()))
