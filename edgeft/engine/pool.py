"""Memory for activations that is used again: buffers of one size for each width, however many tokens a pass has.

Left to malloc, tensors of ever other sizes leave holes between them, or each is given fresh pages, which takes time.
A buffer is free when no tensor uses its storage any more.
"""

from __future__ import annotations

import torch

_use_count = getattr(torch._C, "_storage_Use_Count", None)  # tensors and Python objects that hold a storage


class Pool:
    def __init__(self) -> None:
        self.rows = 0  # tokens that a buffer holds; 0: everything comes from torch itself
        # by a row's bytes, with the count when idle
        self._free: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}

    def resize(self, rows: int) -> None:
        """Buffers for passes of so many tokens from now on."""
        self.rows = rows if _use_count else 0
        self._free = {}

    def take(self, rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(rows, width), with anything in it."""
        if not 0 < rows <= self.rows:
            return torch.empty(rows, width, dtype=dtype)
        assert _use_count is not None
        size = width * dtype.itemsize
        buffers = self._free.setdefault(size, [])
        for storage, idle in buffers:
            if _use_count(storage._cdata) == idle:
                break
        else:
            storage = torch.empty(self.rows * size, dtype=torch.uint8).untyped_storage()
            buffers.append((storage, _use_count(storage._cdata)))
        return torch.empty(0, dtype=dtype).set_(storage, 0, (rows, width))  # type: ignore[call-overload,no-any-return]

    def like(self, x: torch.Tensor) -> torch.Tensor:
        return self.take(x.shape[0], x.shape[1], x.dtype)


pool = Pool()
