"""The buffers that one pass over the top takes from the kernels' pool, counted by going through it in thought.

It follows model/block.py buffer by buffer, forward and backward; a test holds it to what the pool really gives out.
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
    """As model/pool.py: by the bytes of a row, the first that is free, and none is ever given back."""

    def __init__(self) -> None:
        self.of: dict[int, list[Buffer]] = {}

    def take(self, rows: int, row_bytes: int) -> Buffer:
        buffers = self.of.setdefault(row_bytes, [])
        found = next((buffer for buffer in buffers if not buffer.used), None)
        if found is None:
            found = Buffer(row_bytes)
            buffers.append(found)
        found.used, found.rows = True, max(found.rows, rows)
        return found

    def free(self, *buffers: Buffer | None) -> None:
        for buffer in buffers:
            if buffer is not None:
                buffer.used = False

    @property
    def bytes(self) -> int:
        return sum(buffer.row_bytes * buffer.rows for some in self.of.values() for buffer in some)


Stream = tuple[Buffer, Buffer | None]  # the residual stream, and what is still to be added to it


@dataclass
class _Saved:
    """What a block's backward pass reads."""

    rows: int  # tokens
    asked: int  # of them, those that go beyond keys and values
    norms: list[Buffer] = field(default_factory=list)  # the stream before each norm
    qkv_inputs: list[Buffer] = field(default_factory=list)
    qkv: list[Buffer] = field(default_factory=list)
    mixed: list[Buffer] = field(default_factory=list)
    o_inputs: list[Buffer] = field(default_factory=list)
    ffn_inputs: list[Buffer] = field(default_factory=list)
    gates: list[Buffer] = field(default_factory=list)


class _Top:
    """One pass over the blocks from the cut on."""

    def __init__(self, shape: Shape, scheme: Scheme, half: bool, threads: int, recompute: bool) -> None:
        self.shape, self.scheme, self.half, self.threads, self.recompute = shape, scheme, half, threads, recompute
        self.frugal = not recompute and scheme.frugal
        self.pool = Buffers()
        self.each = 2 if half else 4  # bytes of a value that a product reads or gives

    # ------------------------------------------------ pieces

    def full(self, rows: int, width: int) -> Buffer:
        return self.pool.take(rows, 4 * width)

    def operand(self, x: Buffer, rows: int, width: int) -> Buffer:
        """x itself, or in bf16 a copy of it."""
        return self.pool.take(padded(rows), 2 * width) if self.half else x

    def products(self, *sizes: tuple[int, int]) -> list[Buffer]:
        """What products over one input give, (rows, width) each, in float32."""
        small = [self.pool.take(padded(rows), 2 * width) for rows, width in sizes] if self.half else []
        found = [self.full(rows, width) for rows, width in sizes]
        self.pool.free(*small)
        return found

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

    def release(self, given: Buffer, x: Buffer, kept: Sequence[Buffer]) -> None:
        """An input that nobody keeps is free, and so is what it was copied from."""
        self.pool.free(*(buffer for buffer in (given, x) if buffer not in kept))

    # ------------------------------------------------ forward

    def forward(
        self, block: int, stream: Stream, rows: int, asked: int, hold: bool = False
    ) -> tuple[_Saved, tuple[Buffer, Buffer]]:
        """hold: what the block is given stays, so that it can be run again."""
        shape, pool = self.shape, self.pool
        saved = _Saved(rows, asked)
        x, more = stream
        total = self.full(rows, shape.width) if more is not None else x
        h = self.full(rows, shape.width)
        given = self.operand(h, rows, shape.width)
        saved.qkv_inputs = self.keeps(block, "qkv", given, rows, shape.width)
        saved.qkv = self.products((asked, shape.query), (rows, shape.key), (rows, shape.key))
        mixed = self.full(asked, shape.query)
        o_given = self.operand(mixed, asked, shape.query)
        if self.half:  # in float32 it is kept by the attention anyway
            saved.o_inputs = self.keeps(block, ("o",), o_given, asked, shape.query)
        out = self.product(asked, shape.width)
        if o_given is not mixed and o_given not in saved.o_inputs:
            pool.free(o_given)
        second, h2 = self.full(asked, shape.width), self.full(asked, shape.width)
        ffn_given = self.operand(h2, asked, shape.width)
        saved.ffn_inputs = self.keeps(block, ("gate", "up"), ffn_given, asked, shape.width)
        count = padded(asked) if self.half else asked
        saved.gates = [pool.take(count, self.each * shape.ffn) for _ in range(2)]
        act = pool.take(count, self.each * shape.ffn)
        added = self.product(asked, shape.width)
        pool.free(act, out)
        self.release(ffn_given, h2, saved.ffn_inputs)
        self.release(given, h, saved.qkv_inputs)
        if not hold:
            pool.free(more)
        saved.norms, saved.mixed = [total, second], [mixed]
        return saved, (second, added)

    # ------------------------------------------------ backward

    def backward(self, block: int, saved: _Saved, grad: Buffer) -> Buffer | None:
        shape, pool, scheme = self.shape, self.pool, self.scheme
        rows, asked = saved.rows, saved.asked
        count = padded(asked) if self.half else asked

        def operand(x: Buffer, of: int, width: int) -> Buffer | None:
            return self.operand(x, of, width) if self.half else None  # in float32 it is x itself

        dy = operand(grad, asked, shape.width)
        dact = pool.take(count, self.each * shape.ffn)
        reads = scheme.share(block, "down") and not scheme.method.frugal
        act = pool.take(count, self.each * shape.ffn) if reads else None
        pool.free(dact, act)
        dx = self.product(asked, shape.width)
        if self.half:  # up's part is made before it is added
            pool.free(pool.take(count, 2 * shape.width))
        pool.free(dy, *saved.gates, *saved.ffn_inputs)
        grad2 = self.full(asked, shape.width)
        pool.free(saved.norms[1], dx, grad)
        dy = operand(grad2, asked, shape.width)
        dmixed = self.product(asked, shape.query)
        pool.free(dy, *(buffer for buffer in saved.o_inputs if buffer is not saved.mixed[0]))
        dq = self.full(asked, shape.query)
        parts = [self.full(rows, shape.key) for _ in range(2 * self.threads)]
        pool.free(*parts[1 : self.threads], *parts[self.threads + 1 :])
        pool.free(dmixed, *saved.qkv, *saved.mixed)
        wanted = block > scheme.cut or scheme.normed(block)
        dh = None
        for buffer, width, of in ((dq, shape.query, asked), (parts[0], shape.key, rows), (parts[0], shape.key, rows)):
            dy = operand(buffer, of, width)
            if wanted and dh is None:
                dh = self.product(rows, shape.width)
            elif wanted and self.half:
                pool.free(pool.take(padded(rows), 2 * shape.width))
            pool.free(dy)
        pool.free(dq, parts[0], parts[self.threads], *saved.qkv_inputs)
        below = self.full(rows, shape.width) if block > scheme.cut else None
        pool.free(saved.norms[0], dh, grad2)
        return below

    # ------------------------------------------------ where no weight is trained

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
        return _Saved(rows, rows, norms=[total], ffn_inputs=kept), (second, added)

    def attended(self, block: int, rows: int) -> tuple[Buffer, list[Buffer]]:
        """The stream after the first half, and what the way back needs."""
        shape, pool = self.shape, self.pool
        made = self.mixed(rows)
        mixed = made[3]
        given = self.operand(mixed, rows, shape.query)
        made += self.keeps(block, ("o",), given, rows, shape.query) if self.scheme.share(block, "o") else []
        out = self.product(rows, shape.width)
        if given is not mixed:
            pool.free(given)
        second = self.full(rows, shape.width)
        pool.free(out)
        return second, made

    def mixed(self, rows: int) -> list[Buffer]:
        """q, k, v and what o reads."""
        shape = self.shape
        h = self.full(rows, shape.width)
        given = self.operand(h, rows, shape.width)
        found = self.products((rows, shape.query), (rows, shape.key), (rows, shape.key))
        found.append(self.full(rows, shape.query))
        self.pool.free(given, h)
        return found

    def gates(self, rows: int) -> list[Buffer]:
        """Gate and up."""
        shape = self.shape
        h = self.full(rows, shape.width)
        given = self.operand(h, rows, shape.width)
        count = padded(rows) if self.half else rows
        found = [self.pool.take(count, self.each * shape.ffn) for _ in range(2)]
        self.pool.free(given, h)
        return found

    def frugal_backward(self, block: int, saved: _Saved, grad: Buffer) -> Buffer | None:
        shape, pool, rows = self.shape, self.pool, saved.rows

        def back(gradients: Sequence[tuple[Buffer | None, int]], width: int) -> Buffer | None:
            """Through linears: the gradient of what they read."""
            found = None
            for number, (buffer, inner) in enumerate(gradients):
                dy = self.pool.take(padded(rows), 2 * inner) if self.half else None
                if number == 0:
                    found = self.product(rows, width)
                elif self.half:
                    pool.free(pool.take(padded(rows), 2 * width))
                pool.free(dy, buffer)
            return found

        second, made = self.attended(block, rows)
        count = padded(rows) if self.half else rows
        dy = pool.take(count, 2 * shape.width) if self.half else None
        dact = pool.take(count, self.each * shape.ffn)
        pool.free(dy)
        gates = self.gates(rows)
        pool.free(dact)
        dnormed = self.product(rows, shape.width)
        if self.half:  # up's part is made before it is added
            pool.free(pool.take(count, 2 * shape.width))
        pool.free(*gates)
        dx = self.full(rows, shape.width)
        pool.free(dnormed, second)
        dmixed = back([(None, shape.width)], shape.query)
        dq = self.full(rows, shape.query)
        parts = [self.full(rows, shape.key) for _ in range(2 * self.threads)]
        pool.free(*parts[1 : self.threads], *parts[self.threads + 1 :], dmixed, *made)
        dh = back([(dq, shape.query), (parts[0], shape.key), (parts[self.threads], shape.key)], shape.width)
        below = self.full(rows, shape.width) if block > self.scheme.cut else None
        pool.free(dh, dx, grad, *saved.norms, *saved.ffn_inputs)
        return below


def _forget(pool: Buffers, saved: _Saved) -> None:
    pool.free(*saved.norms, *saved.qkv_inputs, *saved.qkv, *saved.mixed, *saved.o_inputs)
    pool.free(*saved.ffn_inputs, *saved.gates)


def run(top: _Top, tokens: int, asked: int) -> None:
    """One pass, forward and backward."""
    shape, scheme, pool, last = top.shape, top.scheme, top.pool, top.shape.depth - 1
    stream: Stream = (Buffer(0), None)  # the boundary states are no buffer of the pool
    given: dict[int, Stream] = {}
    kept: dict[int, _Saved] = {}
    for block in range(scheme.cut, shape.depth):
        again = top.recompute and block < last
        given[block] = stream
        if top.frugal and block < last:
            kept[block], after = top.frugal_forward(block, stream, tokens)
        else:
            kept[block], after = top.forward(block, stream, tokens, asked if block == last else tokens, hold=again)
        if again:
            _forget(pool, kept[block])
            after[0].used = True  # the next block's
        stream = after
    grad: Buffer | None = top.full(asked, shape.width)
    pool.free(stream[1])
    for block in reversed(range(scheme.cut, shape.depth)):
        if top.recompute and block < last:
            kept[block], (_, added) = top.forward(block, given[block], tokens, tokens, hold=True)
            pool.free(added)
        assert grad is not None  # it ends at the cut
        back = top.frugal_backward if top.frugal and block < last else top.backward
        grad = back(block, kept[block], grad)
        if top.recompute and block < last:
            pool.free(*given[block])


def top_bytes(
    shape: Shape, scheme: Scheme, tokens: int, asked: int, half: bool, recompute: bool, threads: int
) -> tuple[int, int]:
    """(bytes of the pool after the largest pass, bytes beside it that come from malloc)."""
    top = _Top(shape, scheme, half, threads, recompute)
    run(top, tokens, asked)
    heads = shape.query // shape.head
    blocks = shape.depth - scheme.cut
    sums = 4 * tokens * (heads + 2) * (2 if recompute or top.frugal else blocks)  # of softmax, and each norm's scale
    # the last block's rows that ask, and the gradients of all rows made from theirs
    picked = 2 * 4 * shape.width * (tokens + asked)
    return top.pool.bytes, sums + picked
