"""The buffers that one pass over the top takes from the kernels' pool, counted by simulation.

It follows engine/block.py buffer by buffer, forward and backward; a test compares it with what the pool gives out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgeft.engine.limits import padded
from edgeft.methods.scheme import Scheme
from edgeft.plan.shape import Shape


@dataclass(eq=False)
class Buffer:
    row_bytes: int
    rows: int = 0  # most that were ever written: pages beyond them are not in memory
    used: bool = True


class Buffers:
    """As the pool in engine/memory.py: by the bytes of a row, the first that is free; none is ever deleted."""

    def __init__(self) -> None:
        self.of: dict[int, list[Buffer]] = {}

    def take(self, rows: int, row_bytes: int) -> Buffer:
        buffers = self.of.setdefault(row_bytes, [])
        buffer = next((buffer for buffer in buffers if not buffer.used), None)
        if buffer is None:
            buffer = Buffer(row_bytes)
            buffers.append(buffer)
        buffer.used, buffer.rows = True, max(buffer.rows, rows)
        return buffer

    def free(self, *buffers: Buffer | None) -> None:
        for buffer in buffers:
            if buffer is not None:
                buffer.used = False


Stream = tuple[Buffer, Buffer | None]  # the residual stream, and what is still to be added to it


@dataclass
class _Saved:
    """What a block's backward pass reads, in the order in which it is freed."""

    rows: int  # tokens
    asked: int  # of them, those that go beyond keys and values
    ffn: list[Buffer] = field(default_factory=list)  # gate, up and their input
    o: list[Buffer] = field(default_factory=list)  # the input of o
    attention: list[Buffer] = field(default_factory=list)  # q, k, v and their mix
    qkv: list[Buffer] = field(default_factory=list)  # the input of q, k, v
    norms: list[Buffer] = field(default_factory=list)  # the stream before each norm


class Top:
    """One pass over the blocks from the cut on."""

    def __init__(self, shape: Shape, scheme: Scheme, half: bool, threads: int, recompute: bool) -> None:
        self.shape, self.scheme, self.half, self.threads, self.recompute = shape, scheme, half, threads, recompute
        self.frugal = not recompute and scheme.frugal
        self.pool = Buffers()
        self.each = 2 if half else 4  # bytes of a value that a product reads or gives

    def peak_bytes(self, tokens: int, asked: int) -> int:
        """Of the pool after the largest pass, and beside it from malloc."""
        self.run(tokens, asked)
        shape = self.shape
        blocks = 2 if self.recompute or self.frugal else shape.depth - self.scheme.cut
        sums = 4 * tokens * (shape.query // shape.head + 2) * blocks  # of softmax, and each norm's scale
        # the last block's rows that ask, and the gradients of all rows made from theirs
        picked = 2 * 4 * shape.width * (tokens + asked)
        return sum(b.row_bytes * b.rows for buffers in self.pool.of.values() for b in buffers) + sums + picked

    def run(self, tokens: int, asked: int) -> None:
        """Forward and backward."""
        shape, pool, last, cut = self.shape, self.pool, self.shape.depth - 1, self.scheme.cut
        stream: Stream = (Buffer(0), None)  # the boundary states are no buffer of the pool
        given: dict[int, Stream] = {}
        saved: dict[int, _Saved] = {}
        for block in range(cut, last + 1):
            again, given[block] = self.recompute and block < last, stream
            if self.frugal and block < last:
                saved[block], stream = self.frugal_forward(block, stream, tokens)
            else:
                saved[block], stream = self.forward(block, stream, tokens, asked if block == last else tokens, again)
            if again:
                kept = saved[block]
                pool.free(*kept.ffn, *kept.o, *kept.attention, *kept.qkv, *kept.norms)
                stream[0].used = True  # the next block's
        grad: Buffer | None = self.full(asked, shape.width)
        pool.free(stream[1])
        for block in reversed(range(cut, last + 1)):
            if again := self.recompute and block < last:
                saved[block], (_, added) = self.forward(block, given[block], tokens, tokens, hold=True)
                pool.free(added)
            assert grad is not None  # it ends at the cut
            back = self.frugal_backward if self.frugal and block < last else self.backward
            grad = back(block, saved[block], grad)
            if again:
                pool.free(*given[block])

    def full(self, rows: int, width: int) -> Buffer:
        return self.pool.take(rows, 4 * width)

    def wide(self, rows: int) -> Buffer:
        """Values between gate and down."""
        return self.pool.take(padded(rows) if self.half else rows, self.each * self.shape.ffn)

    def copied(self, rows: int, width: int) -> Buffer | None:
        """The bf16 copy of what a product reads or gives; float32 products need none."""
        return self.pool.take(padded(rows), 2 * width) if self.half else None

    def products(self, *sizes: tuple[int, int]) -> list[Buffer]:
        """What products over one input give, (rows, width) each, in float32."""
        small = [self.copied(rows, width) for rows, width in sizes]
        outputs = [self.full(rows, width) for rows, width in sizes]
        self.pool.free(*small)
        return outputs

    def product(self, rows: int, width: int) -> Buffer:
        return self.products((rows, width))[0]

    def keeps(self, block: int, tensors: Sequence[str], given: Buffer, rows: int, width: int) -> list[Buffer]:
        """What of the input of these layers is kept: all of it, or what the gradients of each read."""
        scheme, method = self.scheme, self.scheme.method
        shares = [share for tensor in tensors if (share := scheme.share(block, tensor))]
        widths = [method.kept_width(scheme, share, width) for share in shares]
        if sum(widths) >= width:
            return [given]
        each = 4 if method.float32_inputs else self.each
        return [self.pool.take(padded(rows) if self.half else rows, each * few) for few in widths]

    def forward(
        self, block: int, stream: Stream, rows: int, asked: int, hold: bool = False
    ) -> tuple[_Saved, tuple[Buffer, Buffer]]:
        """hold: what the block is given stays, so that it can be run again."""
        shape, pool = self.shape, self.pool
        x, more = stream
        total = self.full(rows, shape.width) if more is not None else x
        h = self.full(rows, shape.width)
        given = self.copied(rows, shape.width) or h
        qkv_inputs = self.keeps(block, "qkv", given, rows, shape.width)
        qkv = self.products((asked, shape.query), (rows, shape.key), (rows, shape.key))
        mixed = self.full(asked, shape.query)
        o_given = self.copied(asked, shape.query)  # in float32 the attention keeps it anyway
        o_inputs = self.keeps(block, ("o",), o_given, asked, shape.query) if o_given else []
        out = self.product(asked, shape.width)
        if o_given not in o_inputs:
            pool.free(o_given)
        second, h2 = self.full(asked, shape.width), self.full(asked, shape.width)
        ffn_given = self.copied(asked, shape.width) or h2
        ffn_inputs = self.keeps(block, ("gate", "up"), ffn_given, asked, shape.width)
        *gates, act = (self.wide(asked) for _ in range(3))
        added = self.product(asked, shape.width)
        pool.free(act, out, None if hold else more)
        # an input that nobody keeps is free, and so is what it was copied from
        pool.free(*(buffer for buffer in (ffn_given, h2) if buffer not in ffn_inputs))
        pool.free(*(buffer for buffer in (given, h) if buffer not in qkv_inputs))
        saved = _Saved(rows, asked, [*gates, *ffn_inputs], o_inputs, [*qkv, mixed], qkv_inputs, [total, second])
        return saved, (second, added)

    def backward(self, block: int, saved: _Saved, grad: Buffer) -> Buffer | None:
        shape, pool, scheme = self.shape, self.pool, self.scheme
        rows, asked = saved.rows, saved.asked
        dy = self.copied(asked, shape.width)
        dact = self.wide(asked)
        reads = scheme.share(block, "down") and not scheme.method.frugal
        pool.free(dact, self.wide(asked) if reads else None)
        dx = self.product(asked, shape.width)
        pool.free(self.copied(asked, shape.width))  # up's part is made before it is added
        pool.free(dy, *saved.ffn)
        grad2 = self.full(asked, shape.width)
        pool.free(saved.norms[1], dx, grad)
        dy = self.copied(asked, shape.width)
        dmixed = self.product(asked, shape.query)
        pool.free(dy, *saved.o)
        dq, dk, dv = self.attention_backward(asked, rows)
        pool.free(dmixed, *saved.attention)
        wanted = block > scheme.cut or block in scheme.norms
        dh = None
        for width, count in ((shape.query, asked), (shape.key, rows), (shape.key, rows)):
            dy = self.copied(count, width)
            if wanted and dh is None:
                dh = self.product(rows, shape.width)
            elif wanted:
                pool.free(self.copied(rows, shape.width))
            pool.free(dy)
        pool.free(dq, dk, dv, *saved.qkv)
        below = self.full(rows, shape.width) if block > scheme.cut else None
        pool.free(saved.norms[0], dh, grad2)
        return below

    def attention_backward(self, asked: int, rows: int) -> tuple[Buffer, Buffer, Buffer]:
        """The gradients of q, k and v; every thread sums its own of k and v first."""
        dq = self.full(asked, self.shape.query)
        (dk, *other_dk), (dv, *other_dv) = (
            [self.full(rows, self.shape.key) for _ in range(self.threads)] for _ in range(2)
        )
        self.pool.free(*other_dk, *other_dv)
        return dq, dk, dv

    def frugal_forward(self, block: int, stream: Stream, rows: int) -> tuple[_Saved, tuple[Buffer, Buffer]]:
        shape, pool = self.shape, self.pool
        x, more = stream
        total = self.full(rows, shape.width) if more is not None else x
        second, made = self.attended(block, rows)
        pool.free(*made)
        gates = self.gates(rows)
        kept = self.keeps(block, ("down",), gates[0], rows, shape.ffn) if self.scheme.share(block, "down") else []
        added = self.product(rows, shape.width)
        pool.free(*gates)
        if more is not None:
            pool.free(x, more)
        return _Saved(rows, rows, ffn=kept, norms=[total]), (second, added)

    def attended(self, block: int, rows: int) -> tuple[Buffer, list[Buffer]]:
        """The stream after the first half, and what the backward pass needs."""
        shape, pool = self.shape, self.pool
        h = self.full(rows, shape.width)
        given = self.copied(rows, shape.width)
        made = self.products((rows, shape.query), (rows, shape.key), (rows, shape.key))
        mixed = self.full(rows, shape.query)
        pool.free(given, h)
        made.append(mixed)
        given = self.copied(rows, shape.query)
        if self.scheme.share(block, "o"):
            made += self.keeps(block, ("o",), given or mixed, rows, shape.query)
        out = self.product(rows, shape.width)
        pool.free(given)
        second = self.full(rows, shape.width)
        pool.free(out)
        return second, made

    def gates(self, rows: int) -> list[Buffer]:
        """Gate and up."""
        h = self.full(rows, self.shape.width)
        given = self.copied(rows, self.shape.width)
        outputs = [self.wide(rows) for _ in range(2)]
        self.pool.free(given, h)
        return outputs

    def frugal_backward(self, block: int, saved: _Saved, grad: Buffer) -> Buffer | None:
        shape, pool, rows = self.shape, self.pool, saved.rows
        second, made = self.attended(block, rows)
        dy = self.copied(rows, shape.width)
        dact = self.wide(rows)
        pool.free(dy)
        gates = self.gates(rows)
        pool.free(dact)
        dnormed = self.product(rows, shape.width)
        pool.free(self.copied(rows, shape.width))  # up's part is made before it is added
        pool.free(*gates)
        dx = self.full(rows, shape.width)
        pool.free(dnormed, second)
        dy = self.copied(rows, shape.width)
        dmixed = self.product(rows, shape.query)
        pool.free(dy)
        dq, dk, dv = self.attention_backward(rows, rows)
        pool.free(dmixed, *made)
        dy = self.copied(rows, shape.query)
        dh = self.product(rows, shape.width)
        pool.free(dy, dq)
        for buffer in (dk, dv):
            dy = self.copied(rows, shape.key)
            pool.free(self.copied(rows, shape.width))
            pool.free(dy, buffer)
        below = self.full(rows, shape.width) if block > self.scheme.cut else None
        pool.free(dh, dx, grad, *saved.norms, *saved.ffn)
        return below
