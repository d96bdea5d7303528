"""A tuned GGUF file: its base with the updated tensors replaced.

Tensors that were not updated keep their bytes, and a file takes its name only when it is whole and has been checked.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

import numpy as np

import edgeft
from edgeft.arch import Architecture, Sizes, of_gguf
from edgeft.errors import ExportError, RunError
from edgeft.formats import ggml
from edgeft.formats import gguf as files
from edgeft.formats.ggml import check_type, chosen_type
from edgeft.formats.gguf import GGUF, NewTensor
from edgeft.host.files import sync_folder, wrap_os_errors
from edgeft.plan.limits import SPOOL_BYTES

if TYPE_CHECKING:
    import torch

OWN_KEYS = ("edgeft.version", "edgeft.base", "edgeft.recipe")
TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True)
class Exported:
    path: Path
    bytes: int
    types: dict[str, int]  # type → number of updated tensors
    updated: int  # tensors replaced or added
    kept: int  # tensors whose bytes are the base's
    checked: Any  # what the check returned


@dataclass(frozen=True)
class PackedRows:
    """A matrix that is packed already, rows in transformers' order."""

    data: np.ndarray  # (rows, bytes of a row) uint8
    type: int


@dataclass(frozen=True)
class Labels:
    """Metadata of an exported file."""

    template: str | None = None  # chat template, added where the base has none
    recipe: str = ""
    base: str = ""  # name of the base; "": its file name


def export_gguf(
    source: Path,
    updates: Iterable[tuple[str, torch.Tensor | PackedRows]],
    out: Path,
    type_name: str = "auto",
    check: Callable[[Path], Any] | None = None,
    labels: Labels = Labels(),
) -> Exported:
    """Write `source` with `updates` to `out`; `check` reads the complete file under a temporary name, and may raise.

    `updates` go by transformers' names (layers.3.mlp.up_proj.weight), rows in transformers' order. At most one dense
    tensor is in memory at a time.
    """
    out = Path(out)
    base = GGUF.open(source)
    check_type(type_name)
    check_place(out, base.path)
    with tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES, dir=str(out.parent)) as spool:
        with wrap_os_errors(out):
            new = _pack_all(base, updates, type_name, spool)
        # the base's order, so that a file without added biases has its tensors where the base has them
        tensors = [new.get(name) or base.unchanged(name) for name in base.tensors]
        tensors += [tensor for name, tensor in new.items() if name not in base.tensors]
        size, checked = place(out, _records(base, labels), tensors, base.alignment, check)
    types = Counter(ggml.type_name(tensor.type) for tensor in new.values())
    return Exported(out, size, dict(types), len(new), len(base.tensors.keys() - new), checked)


def _pack_all(
    base: GGUF, updates: Iterable[tuple[str, torch.Tensor | PackedRows]], type_name: str, spool: IO[bytes]
) -> dict[str, NewTensor]:
    """Updates packed into `spool`, from which they are later read in the order of the file."""
    arch = of_gguf(base)
    sizes = arch.sizes(SimpleNamespace(**arch.values(base)))
    new: dict[str, NewTensor] = {}
    packed_parts: dict[str, list[_RowPart]] = {}

    def dense_ones() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in updates:
            if isinstance(value, PackedRows):
                target, part = _row_part(name, value, arch, sizes)
                packed_parts.setdefault(target, []).append(part)
            else:
                yield name, value

    for name, (target, tensor), dense in _whole_tensors(base, dense_ones(), arch, sizes):
        if target in new:
            raise ValueError(f"{name} is updated twice")
        if offset := arch.norm_offset(tensor):
            dense = dense + np.float32(offset)
        shape = _check_shape(base, target, dense, arch)
        if not np.isfinite(dense.sum(dtype=np.float64)):  # a float64 sum of float32 values is finite if all of them are
            raise ExportError(f"{name} holds values that are not finite", "training diverged: use a lower train.lr")
        kind = ggml.F32 if dense.ndim == 1 else chosen_type(base.tensors[target].type, type_name)
        packed = ggml.pack(dense.reshape(-1, shape[0]), kind, name)
        order = arch.row_order(tensor, sizes)
        if order is not None:  # back to the file's row order; packing runs along rows, so packed rows can be moved
            packed = packed.reshape(len(order), -1)[np.argsort(order)]
        start = spool.tell()
        spool.write(np.ascontiguousarray(packed).reshape(-1).data)
        new[target] = NewTensor(target, shape, kind, packed.nbytes, _spooled(spool, start, packed.nbytes))
    for target, parts in packed_parts.items():
        info = base.tensors[target]
        new[target] = NewTensor(target, info.shape, info.type, info.nbytes, partial(_joined, base, target, parts))
    return new


@dataclass(frozen=True)
class _RowPart:
    """Packed rows and their place in the file's tensor."""

    where: slice
    value: PackedRows
    order: np.ndarray | None  # rows in the file → in transformers

    def in_file_order(self) -> np.ndarray:
        data: np.ndarray = self.value.data if self.order is None else self.value.data[np.argsort(self.order)]
        return data


def _row_part(name: str, value: PackedRows, arch: Architecture, sizes: Sizes) -> tuple[str, _RowPart]:
    target, tensor = arch.gguf_name(name)
    return target, _RowPart(arch.linears[tensor].rows(sizes), value, arch.row_order(tensor, sizes))


def _joined(base: GGUF, target: str, parts: list[_RowPart]) -> np.ndarray:
    """The tensor with these rows; linears that share one may not all be updated."""
    info = base.tensors[target]
    if any(part.value.type != info.type for part in parts):
        raise ValueError(f"{target} is packed in another type than in {base.path.name}")
    whole = base.bytes(target).reshape(info.shape[1], -1).copy()
    for part in parts:
        whole[part.where] = part.in_file_order()
    return whole


def _whole_tensors(
    base: GGUF, updates: Iterable[tuple[str, torch.Tensor]], arch: Architecture, sizes: Sizes
) -> Iterator[tuple[str, tuple[str, str], np.ndarray]]:
    """(name, (GGUF name, tensor), values); updates of linears that share a tensor come as one, with its other rows."""
    shared: dict[str, tuple[str, np.ndarray]] = {}  # one at a time: updates come block by block
    for name, value in updates:
        target, tensor = arch.gguf_name(name)
        first = arch.linears[tensor].first_row if tensor in arch.linears and target in base.tensors else None
        if shared and target not in shared:
            yield from _drain(shared)
        if first is None:
            yield name, (target, tensor), value.detach().cpu().float().numpy()
            continue
        if not shared:
            info = base.tensors[target]
            whole = np.empty(info.shape[::-1], np.float32)
            ggml.unpack(base.bytes(target), info.type, whole.reshape(-1, info.shape[0]))
            shared[target] = name, whole
        shared[target][1][first(sizes) : first(sizes) + len(value)] = value.detach().cpu().float().numpy()
    yield from _drain(shared)


def _drain(shared: dict[str, tuple[str, np.ndarray]]) -> Iterator[tuple[str, tuple[str, str], np.ndarray]]:
    for target, (name, whole) in shared.items():
        yield name, (target, ""), whole
    shared.clear()


def _check_shape(base: GGUF, target: str, dense: np.ndarray, arch: Architecture) -> tuple[int, ...]:
    """The shape in the GGUF file, if the base has a place for the tensor."""
    hint = "export with the base model the run was trained on"
    if target in base.tensors:
        wanted = base.tensors[target].shape
    else:
        weight = base.tensors.get(target.removesuffix(".bias") + ".weight")
        readable = {arch.linears[tensor].gguf for tensor in arch.biases}
        if weight is None or not target.endswith(".bias") or target.split(".")[2] not in readable:
            raise ExportError(f"{base.path.name} has no place for {target}", hint)
        wanted = weight.shape[1:]
    if dense.shape[::-1] != wanted:
        given, needed = (" x ".join(map(str, shape)) for shape in (dense.shape[::-1], wanted))
        raise ExportError(f"{target} is {given}, and {needed} in {base.path.name}", hint)
    return wanted


def _spooled(spool: IO[bytes], start: int, nbytes: int) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        spool.seek(start)
        return np.frombuffer(spool.read(nbytes), dtype=np.uint8)

    return read


def _records(base: GGUF, labels: Labels) -> list[bytes]:
    """The base's keys unchanged, then those of edgeft, which replace any that the base has."""
    records = [base.record(key) for key in base.records if key not in OWN_KEYS]
    if labels.template is not None and TEMPLATE_KEY not in base.records:
        records.append(files.encode_record(TEMPLATE_KEY, files.STRING, labels.template))
    values = (edgeft.__version__, labels.base or base.path.name, labels.recipe)
    return records + [
        files.encode_record(key, files.STRING, value) for key, value in zip(OWN_KEYS, values, strict=True) if value
    ]


def check_place(out: Path, source: Path | None = None) -> None:
    """Reject a target that cannot be written, before any work is done."""
    if out.is_dir():
        raise RunError(f"{out} is a folder", "give a file name, for example -o model.gguf")
    if not out.parent.is_dir():
        raise RunError(f"there is no folder {out.parent}", "create it first, or choose another place with -o")
    if source is not None and out.exists() and out.samefile(source):
        raise ExportError(f"{out} is the base model itself", "choose another name with -o: the base is never changed")


def place(
    out: Path,
    records: list[bytes],
    tensors: list[NewTensor],
    alignment: int = 32,
    check: Callable[[Path], Any] | None = None,
) -> tuple[int, Any]:
    """Write a GGUF file beside `out`, check it and rename it: (bytes, result of the check). On an error `out` is
    unchanged and nothing is left behind."""
    temporary = out.with_name(out.name + ".part")  # the next attempt overwrites what a power failure left
    try:
        with wrap_os_errors(out):
            _check_space(out, records, tensors, alignment)
            with temporary.open("wb") as file:
                files.write(file, records, tensors, alignment)  # and fsync
            size = temporary.stat().st_size
        checked = check(temporary) if check else None
        with wrap_os_errors(out):
            temporary.replace(out)
            sync_folder(out.parent)
    except BaseException:
        with suppress(OSError):  # a folder that takes no new file holds no temporary one either
            temporary.unlink(missing_ok=True)
        raise
    return size, checked


def _check_space(out: Path, records: list[bytes], tensors: list[NewTensor], alignment: int) -> None:
    header = 24 + sum(map(len, records)) + sum(len(t.name.encode()) + 24 + 8 * len(t.shape) for t in tensors)
    needed = header + sum(t.nbytes + -t.nbytes % alignment for t in tensors) + alignment
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise RunError(
            f"{out.name} needs {needed / 2**20:,.0f} MiB, and {out.parent} has {free / 2**20:,.0f} MiB free",
            "free some space, or choose another place with -o",
        )
