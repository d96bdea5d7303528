"""A tuned GGUF file: its base with the updated tensors replaced.

Tensors that were not updated keep their bytes, and a file takes its name only when it is whole and has been checked.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

import numpy as np

import edgeft
from edgeft.arch import Architecture, of_gguf
from edgeft.errors import ExportError, RunError
from edgeft.formats import ggml
from edgeft.formats import gguf as files
from edgeft.formats.gguf import GGUF, NewTensor, TensorInfo
from edgeft.formats.types import PACKABLE, check_type, chosen_type
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
    types: dict[str, int]  # type → how many updated tensors are written in it
    updated: int  # tensors written anew, added biases among them
    kept: int  # tensors whose bytes are the base's
    checked: Any  # what the check returned


@dataclass(frozen=True)
class Labels:
    """What an exported file says of itself."""

    template: str | None = None  # chat template, added where the base has none
    recipe: str = ""
    base: str = ""  # name of the base; "": its file name


def export_gguf(
    source: Path,
    updates: Iterable[tuple[str, torch.Tensor]],
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
        kept = [info for name, info in base.tensors.items() if name not in new]
        # the base's order, so that a file without added biases has its tensors where the base has them
        tensors = [new.get(name) or _copied(base, info) for name, info in base.tensors.items()]
        tensors += [tensor for name, tensor in new.items() if name not in base.tensors]
        size, checked = place(out, _records(base, labels), tensors, base.alignment, check)
    types = Counter(ggml.type_name(tensor.type) for tensor in new.values())
    return Exported(out, size, dict(types), len(new), len(kept), checked)


def _pack_all(
    base: GGUF, updates: Iterable[tuple[str, torch.Tensor]], type_name: str, spool: IO[bytes]
) -> dict[str, NewTensor]:
    """Pack updates as they come; sizes are then known, and bytes come back from the spool in the file's order."""
    arch = of_gguf(base)
    sizes = arch.sizes(SimpleNamespace(**arch.values(base)))
    new: dict[str, NewTensor] = {}
    for name, value in updates:
        target, tensor = arch.gguf_name(name)
        if target in new:
            raise ValueError(f"{name} is updated twice")
        dense = value.detach().cpu().float().numpy()
        if offset := arch.norm_offset(tensor):
            dense = dense + np.float32(offset)
        shape = _check_shape(base, target, dense, arch)
        if not np.isfinite(dense.sum(dtype=np.float64)):  # of float32, sums are finite where every value is
            raise ExportError(f"{name} holds values that are not finite", "training diverged: use a lower train.lr")
        kind = ggml.F32 if dense.ndim == 1 else chosen_type(base.tensors[target], type_name)
        packed = _pack(name, dense.reshape(-1, shape[0]), kind)
        order = arch.row_order(tensor, sizes)
        if order is not None:  # back to the file's row order; packing runs along rows, so packed rows can be moved
            packed = packed.reshape(len(order), -1)[np.argsort(order)]
        start = spool.tell()
        spool.write(np.ascontiguousarray(packed).reshape(-1).data)
        new[target] = NewTensor(target, shape, kind, packed.nbytes, _spooled(spool, start, packed.nbytes))
    return new


def _check_shape(base: GGUF, target: str, dense: np.ndarray, arch: Architecture) -> tuple[int, ...]:
    """The tensor's shape as GGUF writes it, if the base has a place for it."""
    info = base.tensors.get(target)
    if info is not None:
        wanted = info.shape
    else:
        weight = base.tensors.get(target.removesuffix(".bias") + ".weight")
        readable = {arch.linears[tensor].gguf for tensor in arch.biases}
        if weight is None or not target.endswith(".bias") or target.split(".")[2] not in readable:
            raise ExportError(
                f"{base.path.name} has no place for {target}", "export with the base model the run was trained on"
            )
        wanted = weight.shape[1:]
    if dense.shape[::-1] != wanted:
        raise ExportError(
            f"{target} is {_times(dense.shape[::-1])}, and {_times(wanted)} in {base.path.name}",
            "export with the base model the run was trained on",
        )
    return wanted


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _pack(name: str, values: np.ndarray, kind: int) -> np.ndarray:
    label = ggml.type_name(kind)
    if label not in PACKABLE:  # `keep` on a type that exists only inside ggml
        raise ExportError(f"ggml cannot pack {name} into {label}", "--type q8_0 or --type f16 always work")
    if not ggml.fits_row(kind, values.shape[1]):
        width = values.shape[1]
        raise ExportError(
            f"{label} packs whole blocks, and {name} has rows of {width} values",
            "--type q8_0, q5_1, q5_0, q4_1 and q4_0 fit here" if width % 32 == 0 else "--type f16 takes any width",
        )
    if ggml.needs_imatrix(kind):
        raise ExportError(
            f"{label} cannot be packed without an importance matrix, and there is none for {name}",
            "use a type of 3 bits or more, for example --type q8_0",
        )
    return ggml.pack(values, kind)


def _spooled(spool: IO[bytes], start: int, nbytes: int) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        spool.seek(start)
        return np.frombuffer(spool.read(nbytes), dtype=np.uint8)

    return read


def _copied(base: GGUF, info: TensorInfo) -> NewTensor:
    return NewTensor(info.name, info.shape, info.type, info.nbytes, lambda: base.bytes(info.name))


def _records(base: GGUF, labels: Labels) -> list[bytes]:
    """The base's keys as they are, then ours; a base that edgeft tuned before gives up its own old ones."""
    records = [base.record(key) for key in base.records if key not in OWN_KEYS]
    if labels.template is not None and TEMPLATE_KEY not in base.records:
        records.append(files.encode_record(TEMPLATE_KEY, files.STRING, labels.template))
    values = (edgeft.__version__, labels.base or base.path.name, labels.recipe)
    return records + [
        files.encode_record(key, files.STRING, value) for key, value in zip(OWN_KEYS, values, strict=True) if value
    ]


def check_place(out: Path, source: Path | None = None) -> None:
    """Refuse a target that cannot be written, before any work is done."""
    if out.is_dir():
        raise RunError(f"{out} is a folder", "give a file name, for example -o model.gguf")
    if not out.parent.is_dir():
        raise RunError(f"there is no folder {out.parent}", "make it first, or choose another place with -o")
    if source is not None and out.exists() and out.samefile(source):
        raise ExportError(f"{out} is the base model itself", "choose another name with -o: the base is never changed")


def place(
    out: Path,
    records: list[bytes],
    tensors: list[NewTensor],
    alignment: int = 32,
    check: Callable[[Path], Any] | None = None,
) -> tuple[int, Any]:
    """Write a GGUF file beside `out`, have it checked and rename it; returns (bytes, what the check said).

    Whatever goes wrong, an earlier `out` stays as it was and nothing else is left behind.
    """
    temporary = out.with_name(out.name + ".part")  # the next try overwrites what a power cut left
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
        # also on Ctrl-C; a folder that takes no new file holds no temporary one either
        with suppress(OSError):
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
