"""The update as a GGUF LoRA adapter, for `llama-cli --lora`, llama-server, llama-cpp-python and Ollama's ADAPTER.

The base file stays as it is. Low-rank updates are exact up to the rounding of their numbers; others are cut to the
smallest rank that passes the check; what an adapter has no place for is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import edgeft
from edgeft.arch import Architecture, Sizes, of_gguf
from edgeft.engine.stack import Stack
from edgeft.errors import ExportError
from edgeft.export.gguf import Exported, Labels, check_place, place
from edgeft.formats import adapter as names
from edgeft.formats import ggml
from edgeft.formats.gguf import FLOAT32, GGUF, STRING, NewTensor, encode_record
from edgeft.methods.base import weight_of
from edgeft.methods.scheme import Scheme

RANKS = (8, 16, 32, 64, 128)  # that are tried, in this order, where the update is not of low rank itself
EXTRA = 16  # directions of the sketch beyond the rank that is wanted


@dataclass(frozen=True)
class Pair:
    """W + B A."""

    down: torch.Tensor  # A (r, I)
    up: torch.Tensor  # B (O, r)

    def cut(self, rank: int) -> Pair:
        """Its largest directions, where the pair is sorted by them."""
        return Pair(self.down[:rank], self.up[:, :rank])


def export_lora(
    source: Path, stack: Stack, scheme: Scheme, out: Path, check: Callable[[Path], Any], labels: Labels = Labels()
) -> Exported:
    """Write the adapter to `out`; `check` reads the complete file under a temporary name, and may raise."""
    base = GGUF.open(source)
    check_place(out, base.path)
    _check_places(scheme)
    pairs, exact = _pairs(base, stack, scheme)
    ranks = (0,) if exact else RANKS
    for rank in ranks:
        cut = {name: pair.cut(rank) if rank else pair for name, pair in pairs.items()}
        tensors = [tensor for name, pair in cut.items() for tensor in _tensors(name, pair, _largest(cut))]
        records = _records(base, labels, _largest(cut))
        try:
            size, checked = place(out, records, tensors, check=check)
        except ExportError as error:
            if rank == ranks[-1]:
                raise _not_low_rank(error, rank) if rank else error from None
            continue
        types = {name: sum(t.type == kind for t in tensors) for kind in (ggml.Q8_0, ggml.F16) for name in [_name(kind)]}
        return Exported(out, size, types, len(cut), len(base.tensors), checked)
    raise AssertionError("there is always a rank to try")


def _name(kind: int) -> str:
    return ggml.type_name(kind)


def _not_low_rank(error: ExportError, rank: int) -> ExportError:
    return ExportError(
        f"this update is not of low rank: cut to rank {rank}, {error.message}",
        "use --format gguf, or train low-rank updates (recipe `sparse-bp`)",
    )


def _check_places(scheme: Scheme) -> None:
    kinds = [kind for kind, there in (("biases", scheme.biases), ("norms", scheme.norms)) if there]
    if kinds:
        what = f"this run trained {' and '.join(kinds)}, and llama.cpp's adapters have no place for them"
        raise ExportError(what, "use --format gguf")
    if not scheme.updates:
        raise ExportError(
            "this run trained no weights, so there is nothing to put into an adapter", "use --format gguf"
        )


def _pairs(base: GGUF, stack: Stack, scheme: Scheme) -> tuple[dict[str, Pair], bool]:
    """(pair of each GGUF tensor, whether all of them are exact)."""
    arch = of_gguf(base)
    sizes = arch.sizes(SimpleNamespace(**arch.values(base)))
    parts: dict[str, list[tuple[slice, Pair]]] = {}
    exact = True
    for number, tensor in scheme.updates:
        layer, linear = stack.linear(number, tensor), arch.linears[tensor]
        name = f"blk.{number}.{linear.gguf}.weight"
        if name not in base.tensors:
            hint = "export with the base model the run was trained on"
            raise ExportError(f"{base.path.name} has no place for {name}", hint)
        rows = linear.rows(sizes)
        found = scheme.method.low_rank(layer)
        if found is None:
            found, exact = _largest_directions(weight_of(layer) - _base_weight(base, name, rows, arch, tensor)), False
        down, up = (part.detach().float() for part in found)
        parts.setdefault(name, []).append((rows, Pair(down, _in_file_order(up, arch, tensor, sizes))))
    return {name: _joined(every, base.tensors[name].shape[1]) for name, every in parts.items()}, exact


def _in_file_order(up: torch.Tensor, arch: Architecture, tensor: str, sizes: Sizes) -> torch.Tensor:
    order = arch.row_order(tensor, sizes)
    return up if order is None else up[torch.from_numpy(np.argsort(order))]


def _joined(parts: list[tuple[slice, Pair]], rows: int) -> Pair:
    """One pair for a tensor that several linears share: each has its own directions, and its own rows of B."""
    if len(parts) == 1 and parts[0][1].up.shape[0] == rows:
        return parts[0][1]
    down = torch.cat([pair.down for _, pair in parts])
    up = torch.zeros(rows, len(down))
    start = 0
    for where, pair in parts:
        up[where, start : start + len(pair.down)] = pair.up
        start += len(pair.down)
    return Pair(down, up)


def _base_weight(base: GGUF, name: str, rows: slice, arch: Architecture, tensor: str) -> torch.Tensor:
    """(O, I) in transformers' row order."""
    info = base.tensors[name]
    whole = np.empty(info.shape[::-1], np.float32)
    ggml.unpack(base.bytes(name), info.type, whole)
    part = whole[rows]
    order = arch.row_order(tensor, arch.sizes(SimpleNamespace(**arch.values(base))))
    return torch.from_numpy(part if order is None else part[order])


def _largest_directions(change: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(A, B) of the largest singular values, falling, at the highest rank that is tried."""
    rank = min(RANKS[-1], *change.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left, values, right = torch.svd_lowrank(change, min(rank + EXTRA, *change.shape), niter=3)
    roots = values[:rank].sqrt()
    return roots[:, None] * right[:, :rank].T, left[:, :rank] * roots


def _largest(pairs: dict[str, Pair]) -> int:
    return max(len(pair.down) for pair in pairs.values())


def _tensors(name: str, pair: Pair, alpha: int) -> Iterator[NewTensor]:
    """A and B in GGUF's order; llama.cpp multiplies by alpha over the rank, and alpha is the largest rank of all."""
    rank = len(pair.down)
    for part, values in zip(names.PARTS, (pair.down, pair.up * (rank / alpha)), strict=True):
        rows, cols = values.shape
        kind = ggml.Q8_0 if ggml.fits_row(ggml.Q8_0, cols) else ggml.F16
        yield NewTensor(
            name + part, (cols, rows), kind, rows * ggml.row_bytes(kind, cols), partial(_packed, values, kind, name)
        )


def _packed(values: torch.Tensor, kind: int, name: str) -> np.ndarray:
    if not torch.isfinite(values).all():
        raise ExportError(f"the update of {name} holds values that are not finite", "use a lower train.lr")
    return ggml.pack(values.numpy(), kind, name)


def _records(base: GGUF, labels: Labels, alpha: int) -> list[bytes]:
    values = {
        "general.architecture": base.arch,
        "general.type": "adapter",
        names.KIND: names.TYPE,
        "general.name": f"{labels.recipe or 'update'} of {labels.base or base.path.name}",
        "edgeft.version": edgeft.__version__,
        names.BASE_KEY: labels.base or base.path.name,
        "edgeft.recipe": labels.recipe,
    }
    records = [encode_record(key, STRING, value) for key, value in values.items() if value]
    return [*records, encode_record(names.ALPHA, FLOAT32, float(alpha))]
