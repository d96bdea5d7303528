"""ggml's block formats as grids: value = step · level + floor, for each of a matrix's values.

A grid's codes and its scales d (and m) can be replaced; everything else in a block keeps its bits. What ggml unpacks
from the bytes are the values that the grid names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgeft.formats import ggml

# (rows, blocks, bytes of a block) uint8
Blocks = np.ndarray
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


@dataclass(frozen=True)
class Format:
    """One type. Scales within a block, where it has any, are integers that stay as they are."""

    block: int  # values of a block
    levels: np.ndarray  # by code, ascending
    read: Callable[[Blocks], np.ndarray]  # → codes (rows, blocks, values) uint8
    write: Callable[[Blocks, np.ndarray], None]  # codes, into the blocks
    d_at: int  # byte at which d, an fp16, stands
    m_at: int = -1  # the same for m; -1: there is none
    scales: Callable[[Blocks], np.ndarray] | None = None  # → (rows, blocks, groups) float32, that multiply d
    mins: Callable[[Blocks], np.ndarray] | None = None  # the same for m


@dataclass
class Grid:
    """A packed matrix, taken apart: value = d · scale · level(code) + m · min."""

    format: Format
    blocks: Blocks
    codes: np.ndarray  # (rows, cols) uint8
    d: np.ndarray  # (rows, blocks) float32, of fp16 values
    m: np.ndarray | None
    scale: np.ndarray  # (rows, cols) float32: integers
    min: np.ndarray | None

    def packed(self, codes: np.ndarray, d: np.ndarray, m: np.ndarray | None) -> np.ndarray:
        """Bytes (rows, bytes of a row) of the matrix with these in place of its own."""
        blocks, form = self.blocks.copy(), self.format
        form.write(blocks, codes.reshape(*blocks.shape[:2], form.block))
        for at, values in ((form.d_at, d), (form.m_at, m)):
            if values is not None:
                blocks[:, :, at : at + 2] = values.astype(np.float16)[..., None].view(np.uint8)
        return blocks.reshape(len(blocks), -1)


def grid_of(packed: np.ndarray, type_id: int, cols: int) -> Grid:
    """packed: (rows, bytes of a row) uint8."""
    form = FORMATS[ggml.type_name(type_id)]
    rows, count = len(packed), cols // form.block
    blocks = np.ascontiguousarray(packed).reshape(rows, count, -1)

    def halves(at: int) -> np.ndarray:
        values: np.ndarray = np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[..., 0].astype(np.float32)
        return values

    def spread(parts: np.ndarray) -> np.ndarray:
        """A number for each value, from one for each group."""
        return np.repeat(parts.reshape(rows, -1), cols // (parts.shape[1] * parts.shape[2]), axis=1)

    one = np.ones((rows, count, 1), np.float32)
    scale = spread(form.scales(blocks) if form.scales else one)
    m, low = None, None
    if form.m_at >= 0:
        m, low = halves(form.m_at), spread(form.mins(blocks) if form.mins else one)
    return Grid(form, blocks, form.read(blocks).reshape(rows, cols), halves(form.d_at), m, scale, low)


# ---------------------------------------------------------------- 32 values in a block


def _nibbles(at: int) -> tuple[Callable[[Blocks], np.ndarray], Callable[[Blocks, np.ndarray], None]]:
    """16 bytes: low halves are the first 16 values."""

    def read(blocks: Blocks) -> np.ndarray:
        part = blocks[:, :, at : at + 16]
        return np.concatenate([part & 15, part >> 4], axis=2)

    def write(blocks: Blocks, codes: np.ndarray) -> None:
        blocks[:, :, at : at + 16] = codes[..., :16] & 15 | codes[..., 16:] << 4

    return read, write


def _five_bits(high: int) -> tuple[Callable[[Blocks], np.ndarray], Callable[[Blocks, np.ndarray], None]]:
    """4 bytes with the fifth bits, then as `_nibbles`."""
    low_read, low_write = _nibbles(high + 4)

    def read(blocks: Blocks) -> np.ndarray:
        bits = np.unpackbits(blocks[:, :, high : high + 4], axis=2, bitorder="little")
        codes: np.ndarray = low_read(blocks) | bits << 4
        return codes

    def write(blocks: Blocks, codes: np.ndarray) -> None:
        low_write(blocks, codes & 15)
        blocks[:, :, high : high + 4] = np.packbits(codes >> 4, axis=2, bitorder="little")

    return read, write


def _read_bytes(blocks: Blocks) -> np.ndarray:
    return blocks[:, :, 2:34] ^ 128  # -128 is code 0


def _write_bytes(blocks: Blocks, codes: np.ndarray) -> None:
    blocks[:, :, 2:34] = codes ^ 128


# ---------------------------------------------------------------- 256 values in a block


def _read_k4(blocks: Blocks, at: int = 16) -> np.ndarray:
    """128 bytes in four parts of 32: low halves, then high halves."""
    part = blocks[:, :, at : at + 128].reshape(*blocks.shape[:2], 4, 1, 32)
    return np.concatenate([part & 15, part >> 4], axis=3).reshape(*blocks.shape[:2], 256)


def _write_k4(blocks: Blocks, codes: np.ndarray, at: int = 16) -> None:
    parts = codes.reshape(*codes.shape[:2], 4, 2, 32)
    blocks[:, :, at : at + 128] = (parts[..., 0, :] & 15 | parts[..., 1, :] << 4).reshape(*codes.shape[:2], 128)


def _read_k5(blocks: Blocks) -> np.ndarray:
    """Byte l of 32 has the fifth bits of value l of the eight groups."""
    bits = np.unpackbits(blocks[:, :, 16:48, None], axis=3, bitorder="little")  # (…, 32, 8)
    codes: np.ndarray = _read_k4(blocks, 48) | bits.swapaxes(2, 3).reshape(*blocks.shape[:2], 256) << 4
    return codes


def _write_k5(blocks: Blocks, codes: np.ndarray) -> None:
    _write_k4(blocks, codes & 15, 48)
    bits = (codes >> 4).reshape(*codes.shape[:2], 8, 32).swapaxes(2, 3)
    blocks[:, :, 16:48] = np.packbits(bits, axis=3, bitorder="little")[..., 0]


def _read_k6(blocks: Blocks) -> np.ndarray:
    """In each half of 128 values: 64 bytes of low halves, 32 bytes of four high pairs."""
    low = blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 1, 64)
    high = blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    lows = np.concatenate([low & 15, low >> 4], axis=3).reshape(*blocks.shape[:2], 2, 4, 32)
    highs = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes: np.ndarray = (lows | highs << 4).reshape(*blocks.shape[:2], 256)
    return codes


def _write_k6(blocks: Blocks, codes: np.ndarray) -> None:
    parts = codes.reshape(*codes.shape[:2], 2, 4, 32)
    lows = (parts & 15).reshape(*codes.shape[:2], 2, 2, 64)
    blocks[:, :, :128] = (lows[..., 0, :] | lows[..., 1, :] << 4).reshape(*codes.shape[:2], 128)
    highs = (parts >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    blocks[:, :, 128:192] = np.bitwise_or.reduce(highs, axis=3).reshape(*codes.shape[:2], 64)


def _six_bits(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """(scales, mins) of eight groups, from 12 bytes."""
    first, second, rest = (blocks[:, :, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, rest & 15 | (first >> 6) << 4], axis=2)
    mins = np.concatenate([second & 63, rest >> 4 | (second >> 6) << 4], axis=2)
    return scales.astype(np.float32), mins.astype(np.float32)


def _xs_scales(blocks: Blocks) -> np.ndarray:
    """Six bits for each of eight groups, less 32: four low ones in bytes 4 to 7, two high ones in bytes 2 and 3."""
    low = blocks[:, :, 4:8, None] >> np.array([0, 4], np.uint8) & 15
    high = blocks[:, :, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    shape = (*blocks.shape[:2], 8)
    scales: np.ndarray = (low.reshape(shape) | high.reshape(shape) << 4).astype(np.float32) - 32
    return scales


def _read_xs(blocks: Blocks) -> np.ndarray:
    part = blocks[:, :, 8:136].reshape(*blocks.shape[:2], 8, 16)
    return np.concatenate([part & 15, part >> 4], axis=3).reshape(*blocks.shape[:2], 256)


def _write_xs(blocks: Blocks, codes: np.ndarray) -> None:
    parts = codes.reshape(*codes.shape[:2], 8, 32)
    blocks[:, :, 8:136] = (parts[..., :16] & 15 | parts[..., 16:] << 4).reshape(*codes.shape[:2], 128)


def _levels(count: int, zero: int = 0) -> np.ndarray:
    return np.arange(count, dtype=np.float32) - zero


def _q6_scales(blocks: Blocks) -> np.ndarray:
    return blocks[:, :, 192:208].view(np.int8).astype(np.float32)


FORMATS = {
    "q4_0": Format(32, _levels(16, 8), *_nibbles(2), d_at=0),
    "q4_1": Format(32, _levels(16), *_nibbles(4), d_at=0, m_at=2),
    "q5_0": Format(32, _levels(32, 16), *_five_bits(2), d_at=0),
    "q5_1": Format(32, _levels(32), *_five_bits(4), d_at=0, m_at=2),
    "q8_0": Format(32, _levels(256, 128), _read_bytes, _write_bytes, d_at=0),
    "iq4_nl": Format(32, IQ4_LEVELS, *_nibbles(2), d_at=0),
    "q4_k": Format(
        *(256, _levels(16), _read_k4, _write_k4, 0, 2, lambda b: _six_bits(b)[0], lambda b: -_six_bits(b)[1])
    ),
    "q5_k": Format(
        *(256, _levels(32), _read_k5, _write_k5, 0, 2, lambda b: _six_bits(b)[0], lambda b: -_six_bits(b)[1])
    ),
    "q6_k": Format(256, _levels(64, 32), _read_k6, _write_k6, d_at=208, scales=_q6_scales),
    "iq4_xs": Format(256, IQ4_LEVELS, _read_xs, _write_xs, d_at=0, scales=_xs_scales),
}
