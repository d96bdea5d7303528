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
        self._free: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}  # by width, with the count when idle

    def resize(self, rows: int) -> None:
        """Buffers for passes of so many tokens from now on."""
        self.rows = rows if _use_count else 0
        self._free = {}

    def take(self, rows: int, width: int) -> torch.Tensor:
        """(rows, width) float32, with anything in it."""
        if not 0 < rows <= self.rows:
            return torch.empty(rows, width)
        assert _use_count is not None
        buffers = self._free.setdefault(width, [])
        for storage, idle in buffers:
            if _use_count(storage._cdata) == idle:
                break
        else:
            storage = torch.empty(self.rows * width).untyped_storage()
            buffers.append((storage, _use_count(storage._cdata)))
        return torch.empty(0).set_(storage, 0, (rows, width))  # type: ignore[call-overload,no-any-return]

    def like(self, x: torch.Tensor) -> torch.Tensor:
        return self.take(x.shape[0], x.shape[1])


pool = Pool()
