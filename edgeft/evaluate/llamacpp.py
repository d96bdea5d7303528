"""One GGUF file in llama.cpp, in this process: tokens, losses, answers.

A prefix that rows share is computed once, and the result of a row does not depend on the other rows.
"""

from __future__ import annotations

import codecs
import ctypes
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgeft.arch.check import check_file
from edgeft.data.tokens import common_prefix
from edgeft.errors import ModelError
from edgeft.evaluate.batch_scorer import BatchScorer, Branch, Cell, Floats, Step
from edgeft.evaluate.request import Request, Response, RowProgress
from edgeft.formats import ggml
from edgeft.formats.adapter import check_adapter
from edgeft.formats.ggml import F16, F32, SLOW
from edgeft.formats.gguf import GGUF, NewTensor, TensorInfo, write
from edgeft.formats.tokenizer import LLAMA_ERRORS, filled, quiet_llama
from edgeft.host import device
from edgeft.host.system import allowed_cpus
from edgeft.plan.limits import BATCH, CACHE_BYTES, CACHE_SHARE, MEMORY_SHARE, MIN_TOKENS, OUTPUTS

COPY_SHARE = 0.4  # of the usable memory, at most, for a copy of the weights
CHUNK = 32  # tokens of one row read in one call, where it is alone
FLASH_ATTENTION = 1  # LLAMA_FLASH_ATTN_TYPE_ENABLED: cells of other rows are skipped, not multiplied and masked


@dataclass(frozen=True)
class Sampling:
    """How the next token of a conversation is selected."""

    max_new: int = 256  # tokens
    temperature: float = 0.0  # 0: greedy
    top_p: float = 0.95
    seed: int | None = None


def _refused(path: Path, hint: str) -> ModelError:
    """The first line names the cause, later ones only say that loading failed."""
    reason = f": {LLAMA_ERRORS[0]}" if LLAMA_ERRORS else ""
    return ModelError(f"llama.cpp cannot load {path}{reason}", hint)


class LlamaFile(AbstractContextManager["LlamaFile"]):
    """A GGUF file in llama.cpp, maybe with an adapter. The KV cache is allocated with the first rows, as they need."""

    def __init__(
        self,
        path: str | Path,
        n_ctx: int = 0,
        threads: int = 0,
        parallel: int = OUTPUTS - 1,
        room_bytes: int = 0,
        adapter: Path | None = None,
    ) -> None:
        """n_ctx: longest row with its answer, 0: the model's own; threads 0: all cores; parallel: rows at once;
        room_bytes: memory limit of this process, 0: the available memory."""
        if not 1 <= parallel < OUTPUTS:
            raise ValueError(f"parallel is {parallel}, and must be from 1 to {OUTPUTS - 1}")
        self.path = Path(path)
        self._model: Any = None
        self._ctx: Any = None
        self._adapter: Any = None
        if not self.path.is_file():
            raise ModelError(f"no file {self.path}", "give the path of a GGUF file")
        check_file(self.path)  # llama.cpp may abort on a damaged file
        if adapter is not None:
            check_adapter(adapter, self.path)
        api = self._api = quiet_llama()
        LLAMA_ERRORS.clear()
        self.room_bytes = usable_bytes(room_bytes)
        params = api.llama_model_default_params()
        # Weights repacked for faster products are a copy of the whole file in memory; the file itself is mapped, and
        # the system can drop its pages. Products with AMX need that copy, and crash if GCC 11 or 12 compiled them.
        amx = b"AMX_INT8 = 1" in api.llama_print_system_info()
        params.use_extra_bufts = not amx and self.path.stat().st_size < COPY_SHARE * self.room_bytes
        self._model = api.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self._model:
            raise _refused(self.path, "check that it is a complete GGUF file")
        if adapter is not None:
            self._adapter = api.llama_adapter_lora_init(self._model, os.fsencode(adapter))
            if not self._adapter:
                raise _refused(adapter, "export it again")
        self._vocab = api.llama_model_get_vocab(self._model)
        self.vocab_size: int = api.llama_vocab_n_tokens(self._vocab)
        self.trained_ctx: int = api.llama_model_n_ctx_train(self._model)
        self.n_ctx = n_ctx or self.trained_ctx
        self.threads = threads or len(allowed_cpus())
        self.parallel = parallel
        # a recurrent state cannot be truncated to a prefix
        self._can_truncate = not (api.llama_model_is_recurrent(self._model) or api.llama_model_is_hybrid(self._model))
        self._sequences, self._kind = 0, F32
        self.cells = 0  # of the KV cache
        self.used = 0
        self.held = Branch(0)  # the last tokens read, for rows that share them
        self._make_batch()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free llama.cpp's memory; may be called twice."""
        if self._ctx:
            self._api.llama_free(self._ctx)
        if self._model:
            self._api.llama_model_free(self._model)  # and its adapters
        self._ctx = self._model = self._adapter = self._api = None  # a later call is a Python error, not a crash

    def tokenize(self, text: str, special: bool = True, add_bos: bool = True) -> list[int]:
        """special: parse `<|im_end|>` and the like as tokens; add_bos: if the model wants one and it is missing."""
        data = text.encode("utf-8")
        call = partial(self._api.llama_tokenize, self._vocab, data, len(data))
        ids: list[int] = filled(ctypes.c_int32, len(data) + 8, lambda buffer, n: call(buffer, n, add_bos, special))
        bos = self._api.llama_vocab_bos(self._vocab)
        return ids[1:] if add_bos and ids[:2] == [bos, bos] else ids

    def piece(self, token: int) -> bytes:
        """Bytes of a token, maybe part of a character; empty for special tokens."""
        call = partial(self._api.llama_token_to_piece, self._vocab, token)
        return bytes(filled(ctypes.c_char, 64, lambda buffer, size: call(buffer, size, 0, False)))

    def ends_generation(self, token: int) -> bool:
        """True if this token ends a generation."""
        return bool(self._api.llama_vocab_is_eog(self._vocab, token))

    def target_logits(self, ids: Sequence[int], positions: Sequence[int]) -> Floats:
        """(len(positions), vocab): logits after each of these positions."""
        row, where = [int(i) for i in ids], [int(p) for p in positions]
        if any(not 0 <= p < len(row) for p in where):
            raise ValueError(f"positions must be in a row of {len(row)} tokens")
        if not where:
            return np.zeros((0, self.vocab_size), np.float32)
        end = max(where) + 1  # later tokens are not needed
        self.reserve(end, 1)
        logits = {p: view.copy() for p, view in self._extend(row[:end], sorted(set(where)))}
        return np.stack([logits[p] for p in where])

    def respond(self, requests: Sequence[Request], max_new: int, progress: RowProgress | None = None) -> list[Response]:
        """All responses from one pass over each prompt; shared prefixes are computed once."""
        return BatchScorer(self, requests, max_new, progress).run()

    def stream(self, prompt: Sequence[int], sampling: Sampling) -> Generator[str, None, bool]:
        """One answer in pieces of whole characters; returns True if the model ended it."""
        ids = [int(i) for i in prompt]
        self.reserve(self.n_ctx, 1, kind=F16)  # at full size: a conversation grows
        random = np.random.default_rng(sampling.seed)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        room = min(sampling.max_new, self.n_ctx - len(ids) + 1)
        ended = False
        if room > 0:
            ((_, logits),) = self._extend(ids, [len(ids) - 1])
            for left in range(room - 1, -1, -1):
                token = _sample(logits, sampling, random)
                ended = self.ends_generation(token)
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

    def reserve(self, needed: int, sequences: int, preferred: int = 0, kind: int = F32) -> None:
        """A KV cache of at least `needed` cells, of `preferred` if the memory for keys and values allows.

        In float16, llama.cpp also sums in float16, and large batches in another order than small ones: the result of a
        row would depend on the others. Scores use float32; a conversation, which is alone, float16.
        """
        api = self._api
        heads = max(api.llama_model_n_head(self._model), 1)
        width = api.llama_model_n_embd(self._model) // heads * api.llama_model_n_head_kv(self._model)
        cell_bytes = 2 * (2 if kind == F16 else 4) * max(width, 1) * api.llama_model_n_layer(self._model)
        cells = max(needed, min(preferred, min(CACHE_BYTES, int(CACHE_SHARE * self.room_bytes)) // cell_bytes))
        cells += -cells % 256  # llama.cpp's own step
        if self.cells >= cells and self._sequences > sequences and self._kind == kind:
            return
        if self._ctx:
            api.llama_free(self._ctx)
        params = api.llama_context_default_params()
        params.n_ctx = cells
        params.n_seq_max = sequences + 1  # the first holds `held`
        params.kv_unified = True  # one cell can belong to several sequences
        params.flash_attn_type = FLASH_ATTENTION
        params.type_k = params.type_v = kind
        params.swa_full = True  # sliding-window layers keep all tokens, so that a prefix stays usable
        params.n_batch = params.n_ubatch = BATCH
        params.n_outputs_max = params.n_outputs_max_per_seq = OUTPUTS
        params.n_threads = params.n_threads_batch = self.threads
        LLAMA_ERRORS.clear()
        self._ctx = api.llama_init_from_model(self._model, params)
        self.held, self.used, self.cells, self._sequences = Branch(0), 0, 0, 0
        if not self._ctx:
            reason = f": {LLAMA_ERRORS[0]}" if LLAMA_ERRORS else ""
            what = f"llama.cpp cannot create a context of {cells} tokens for {self.path}{reason}"
            raise ModelError(what, "use shorter rows or a smaller model")
        if self._adapter:
            adapters, scales = (api.llama_adapter_lora_p_ctypes * 1)(self._adapter), (ctypes.c_float * 1)(1.0)
            if api.llama_set_adapters_lora(self._ctx, adapters, 1, scales):
                raise ModelError(f"llama.cpp cannot apply the adapter to {self.path}", "export it again")
        self._memory = api.llama_get_memory(self._ctx)
        self.cells, self._sequences, self._kind = cells, sequences + 1, kind

    def check_length(self, tokens: int) -> None:
        """ModelError for a row longer than the context."""
        if tokens > self.n_ctx:
            what = f"a row of {tokens} tokens does not fit in a context of {self.n_ctx}"
            raise ModelError(what, "shorten the row or open the file with a longer context")

    def copy(self, source: Branch, target: Branch, length: int) -> None:
        """Start an empty branch with the first `length` cells of another; nothing is computed."""
        if length:
            self._api.llama_memory_seq_cp(self._memory, source.seq, target.seq, 0, length)
        self.append_cells(target, source.cells[:length])
        target.ids[:length] = source.ids[:length]

    def append_cells(self, branch: Branch, cells: Sequence[Cell]) -> None:
        """Append cells to a branch."""
        self.used += sum(not cell.branches for cell in cells)
        for cell in cells:
            cell.branches += 1
        branch.cells += cells

    def truncate(self, branch: Branch, length: int) -> None:
        """Drop all but the first `length` tokens of a branch."""
        if length >= len(branch.cells):
            return
        for cell in branch.cells[length:]:
            cell.branches -= 1
            self.used -= not cell.branches
        del branch.cells[length:], branch.ids[length:]
        self._api.llama_memory_seq_rm(self._memory, branch.seq, length, -1)

    def hold(self, branch: Branch, length: int) -> None:
        """Keep the first `length` tokens of a branch beyond its end."""
        self.truncate(self.held, 0)
        self.copy(branch, self.held, length)

    def clear(self) -> None:
        """Empty the cache."""
        if self._ctx:
            self._api.llama_memory_clear(self._memory, False)
        self.held, self.used = Branch(0), 0

    def _extend(self, ids: list[int], wanted: Sequence[int]) -> Iterator[tuple[int, Floats]]:
        """Compute the tokens that are not in `held` yet; yields (position, view of its logits), positions ascending."""
        self.check_length(len(ids))
        same = min(common_prefix(self.held.ids, ids), wanted[0])  # wanted positions are decoded again for their logits
        self.truncate(self.held, same if self._can_truncate else 0)
        self.held.wanted = dict.fromkeys(wanted)
        while len(self.held.ids) < len(ids):
            start = len(self.held.ids)
            steps = [Step(ids[p], p, Cell(), [self.held]) for p in range(start, min(start + CHUNK, len(ids)))]
            self.held.ids += [step.token for step in steps]
            self.append_cells(self.held, [step.cell for step in steps])
            yield from ((step.position, logits) for step, logits in self.decode(steps))

    def _make_batch(self) -> None:
        """A llama_batch over numpy arrays: filled by slices, freed with this object."""
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
        """Compute at most BATCH steps; yields (step, (vocab,) view of its logits) for those that need them."""
        n = len(steps)
        self._tokens[:n] = [step.token for step in steps]
        self._positions[:n] = [step.position for step in steps]
        self._flags[:n] = [step.needs_logits for step in steps]
        for i, step in enumerate(steps):
            self._counts[i] = len(step.branches)
            self._seqs[i, : len(step.branches)] = [branch.seq for branch in step.branches]
        self._batch.n_tokens = n
        code = self._api.llama_decode(self._ctx, self._batch)
        if code != 0:
            self.clear()
            hint = "check that the tokens of the row are from this model's vocabulary"
            raise ModelError(f"llama.cpp stopped with code {code} on {self.path}", hint)
        for i, step in enumerate(steps):
            if self._flags[i]:
                logits = self._api.llama_get_logits_ith(self._ctx, i)
                yield step, np.ctypeslib.as_array(logits, (self.vocab_size,))


def usable_bytes(limit: int) -> int:
    """The available memory, at most `limit` (0: no limit)."""
    available = device.memory().available_bytes
    return min(limit, available) if limit else available


def _sample(logits: Floats, sampling: Sampling, random: np.random.Generator) -> int:
    if sampling.temperature <= 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()).astype(np.float64) / sampling.temperature
    p = np.exp(scaled)
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), sampling.top_p)) + 1]  # the fewest that reach top_p
    return int(random.choice(kept, p=p[kept] / p[kept].sum()))


WIDE = ggml.F16


@contextmanager
def with_fast_types(path: str | Path, tokens: int, room_bytes: int = 0) -> Iterator[Path]:
    """The file itself, or a copy in memory if that pays off for this many tokens, deleted with the context.

    room_bytes: memory limit of this process, 0: the available memory.
    """
    source = Path(path)
    if tokens < MIN_TOKENS or not hasattr(os, "memfd_create"):  # Linux only
        yield source
        return
    base = GGUF.open(source)
    tensors = [
        _widened(base, info) if _slow(base, info) else base.unchanged(name) for name, info in base.tensors.items()
    ]
    size = sum(tensor.nbytes for tensor in tensors)
    if size == sum(i.nbytes for i in base.tensors.values()) or size > MEMORY_SHARE * usable_bytes(room_bytes):
        yield source
        return
    with open(os.memfd_create(source.name), "wb") as file:
        write(file, [base.record(key) for key in base.records], tensors, base.alignment)
        yield Path(f"/proc/self/fd/{file.fileno()}")


def _slow(base: GGUF, info: TensorInfo) -> bool:
    """True for a matrix in a slow type that is multiplied; an embedding that is not also the head is only looked up."""
    multiplied = info.name != "token_embd.weight" or "output.weight" not in base.tensors
    return ggml.type_name(info.type) in SLOW and len(info.shape) == 2 and multiplied


def _widened(base: GGUF, info: TensorInfo) -> NewTensor:
    columns, rows = info.shape

    def values() -> np.ndarray:
        dense = np.empty((rows, columns), np.float32)
        ggml.unpack(base.bytes(info.name), info.type, dense)
        return ggml.pack(dense, WIDE)

    return NewTensor(info.name, info.shape, WIDE, rows * ggml.row_bytes(WIDE, columns), values)
