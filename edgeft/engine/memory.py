"""The memory that a backend computes in: pooled activations, scratch buffers, buffers of weight gradients.

Where it is allocated never changes a number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from edgeft.host.system import set_malloc_option, trim_malloc

_use_count = getattr(torch._C, "_storage_Use_Count", None)  # tensors and Python objects that hold a storage

# mallopt's numbers in glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
# Buffers from here on get pages of their own. By default glibc raises this to 32 MiB, and what is freed between others
# stays.
LARGE_BYTES = 1 << 20


class Pool:
    """Activation buffers, reused: one size for each width, however many tokens a pass has.

    With malloc alone, tensors of varying sizes leave holes between them, or each gets fresh pages, which takes time.
    A buffer is free when no tensor uses its storage any more.
    """

    def __init__(self) -> None:
        self.rows = 0  # tokens that a buffer holds; 0: everything comes from torch itself
        self._buffers: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}  # by bytes of a row; with the idle count

    def resize(self, rows: int) -> None:
        """Drops all buffers; new ones hold passes of this many tokens."""
        self.rows = rows if _use_count else 0
        self._buffers = {}

    def take(self, rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(rows, width), uninitialised."""
        if not 0 < rows <= self.rows:
            return torch.empty(rows, width, dtype=dtype)
        assert _use_count is not None
        size = width * dtype.itemsize
        buffers = self._buffers.setdefault(size, [])
        for storage, idle in buffers:
            if _use_count(storage._cdata) == idle:
                break
        else:
            storage = torch.empty(self.rows * size, dtype=torch.uint8).untyped_storage()
            buffers.append((storage, _use_count(storage._cdata)))
        return torch.empty(0, dtype=dtype).set_(storage, 0, (rows, width))  # type: ignore[call-overload,no-any-return]

    def like(self, x: torch.Tensor) -> torch.Tensor:
        return self.take(x.shape[0], x.shape[1], x.dtype)

    def held_bytes(self) -> int:
        """Of all buffers, free or in use."""
        return self.rows * sum(size * len(buffers) for size, buffers in self._buffers.items())

    def used_bytes(self) -> int:
        """Of the buffers in use."""
        assert _use_count is not None
        every = (one for buffers in self._buffers.values() for one in buffers)
        return sum(storage.nbytes() for storage, idle in every if _use_count(storage._cdata) != idle)


class Scratch:
    """One buffer, valid until the next `take`."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, rows: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        size = rows * cols * dtype.itemsize
        if len(self.buffer) < size:
            self.buffer = torch.empty(0, dtype=torch.uint8)  # free the old one before allocating the new one
            self.buffer = torch.empty(size, dtype=torch.uint8)
        return self.buffer[:size].view(dtype).view(rows, cols)


class Gradients:
    """Gradients that layers add to `.grad` themselves, in buffers kept from step to step: fresh pages take time."""

    def __init__(self) -> None:
        self._buffers = WeakIdKeyDictionary()
        self.on_ready: Callable[[torch.Tensor], None] | None = None  # called after each; autograd's hooks miss these

    def allocate(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter's `.grad`, uninitialised."""
        if parameter not in self._buffers:
            self._buffers[parameter] = torch.empty(parameter.shape)
        parameter.grad = self._buffers[parameter]
        assert parameter.grad is not None
        return parameter.grad

    def release(self, parameter: torch.Tensor) -> None:
        """The gradient and its buffer."""
        parameter.grad = None
        self._buffers.pop(parameter, None)


class Memory:
    """`release_pages`: pages of mapped weights return to the system after every product. They come again from its
    cache, if that has room for them, or else from the disk."""

    def __init__(self) -> None:
        self.pool, self.gradients = Pool(), Gradients()
        self.weights = Scratch()  # an unpacked weight, some of whose columns are replaced
        self.packed_rows = Scratch()  # packed rows in another order
        self.logits = Scratch()
        self.products = Scratch()  # what a product packs of its operands
        self.release_pages = False

    def set_release(self, wanted: bool) -> None:
        """Freed buffers return at once, too. malloc keeps its settings for the rest of the process."""
        self.release_pages = wanted
        if wanted:
            self.map_large_buffers()
            set_malloc_option(M_ARENA_MAX, 1)

    def map_large_buffers(self) -> None:
        """Large freed buffers return at once, at the price of fresh pages for the next; for the rest of the process."""
        set_malloc_option(M_MMAP_THRESHOLD, LARGE_BYTES)
        set_malloc_option(M_TRIM_THRESHOLD, LARGE_BYTES)

    def trim(self, always: bool = False) -> None:
        """Returns what is free now; where memory is not short, most of it is about to be used again."""
        if self.release_pages or always:
            trim_malloc()
