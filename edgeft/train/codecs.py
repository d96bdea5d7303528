"""Formats of the trunk cache: hidden states as rows of bytes. Every row has the same number of bytes."""

from __future__ import annotations

import numpy as np
import torch

from edgeft.errors import ModelError
from edgeft.formats import ggml


class Codec:
    """States (T, d) float32 ↔ rows of bytes (T, row_bytes)."""

    tail_bytes = 0  # of the file, after its last row

    def __init__(self, width: int) -> None:
        self.width, self.row_bytes = width, 4 * width

    def encode(self, hidden: torch.Tensor) -> np.ndarray:
        return hidden.contiguous().numpy().view(np.uint8)

    def decode(self, rows: np.ndarray) -> torch.Tensor:
        # a copy in torch's memory: a GEMM's rounding depends on the alignment of its operands, and numpy's varies
        return torch.from_numpy(rows.view(np.float32)).clone()

    def tail(self) -> bytes:
        return b""

    def read_tail(self, data: bytes) -> None:
        """Restores the state of an earlier process."""


class Half(Codec):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.row_bytes = 2 * width

    def encode(self, hidden: torch.Tensor) -> np.ndarray:
        if not float(hidden.abs().max()) <= torch.finfo(torch.float16).max:
            raise ModelError(
                "this model's hidden states are too large for the fp16 trunk cache", "--set how.trunk_dtype=fp32"
            )
        return hidden.half().numpy().view(np.uint8)

    def decode(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows.view(np.float16)).float()


class Int8(Codec):
    """Channels divided by their median magnitude, then ggml's q8_0: groups of 32 int8 values with an fp16 scale each.

    LLaMA's hidden states have a few outlier channels: with one scale per token, all others lose their precision.
    Measured with the channel magnitudes of the first 400 tokens; in use they are those of the first micro-batch.
    Relative error of a token's states, mean over the tokens of 64 handbook rows in
    SmolLM2-135M at cuts 3, 11 and 20, all channels | all but the 4 largest | worst token of the latter at cut 20:
        one scale per token          2.7 2.9 2.9 %  | 6.3 4.8 4.2 %    | 65 %
        groups of 64                 1.4 1.4 1.4 %  | 2.8 2.3 2.0 %    | 20 %
        groups of 32 (q8_0)          1.0 1.1 1.0 %  | 2.1 1.7 1.4 %    | 15 %
        channels ÷ rms, q8_0         0.7 0.5 2.4 %  | 0.5 0.5 0.6 %    | 0.8 %
        channels ÷ median, q8_0      0.7 0.7 0.7 %  | 0.6 0.6 0.6 %    | 1.0 %   (this one)
        fp16                         0.02 %         | 0.02 %           | 0.03 %
    The rms is worse at cut 20, where one value reaches 24,827 and the largest of the median token is 119; probably
    (not measured) a few such tokens dominate the rms of a channel.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width)
        if not ggml.fits_row(ggml.Q8_0, width):
            raise ModelError(f"the int8 trunk cache packs 32 channels, and this model has {width}", "use fp16")
        self.row_bytes, self.tail_bytes = ggml.row_bytes(ggml.Q8_0, width), 4 * width
        self.channels: np.ndarray | None = None  # (d,) median magnitude in the first states encoded

    def encode(self, hidden: torch.Tensor) -> np.ndarray:
        values = hidden.numpy()
        if self.channels is None:
            sizes = np.median(np.abs(values), axis=0)
            self.channels = np.maximum(sizes, 1e-3 * sizes.mean() + 1e-12).astype(np.float32)
        return ggml.pack(values / self.channels, ggml.Q8_0).reshape(len(values), self.row_bytes)

    def decode(self, rows: np.ndarray) -> torch.Tensor:
        assert self.channels is not None
        out = torch.empty(len(rows), self.width)
        ggml.unpack(np.ascontiguousarray(rows), ggml.Q8_0, out.numpy(), 1)
        return out.mul_(torch.from_numpy(self.channels))

    def tail(self) -> bytes:
        return b"" if self.channels is None else self.channels.tobytes()

    def read_tail(self, data: bytes) -> None:
        channels = np.frombuffer(data, np.float32).copy()
        self.channels = channels if channels.any() else None  # block by block, they are written in the last block


CODECS = {"fp32": Codec, "fp16": Half, "int8": Int8}
