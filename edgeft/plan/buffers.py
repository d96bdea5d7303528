"""The buffers that one pass over the top takes from the kernels' pool, counted by simulation.

It follows engine/block.py buffer by buffer, forward and backward. A test compares it with the real pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgeft.engine.limits import LISTS
from edgeft.methods.scheme import Scheme
from edgeft.plan.flops import Pass
from edgeft.plan.shape import Shape


@dataclass(eq=False)
class Buffer:
    row_bytes: int
    rows: int = 0  # the most ever written: pages beyond them are not resident
    used: bool = True


class SimulatedPool:
    """Models the pool in engine/memory.py: the first free buffer of a row size is reused; none is ever deleted."""

    def __init__(self) -> None:
        self.buffers: dict[int, list[Buffer]] = {}  # by bytes of a row

    def take(self, rows: int, row_bytes: int) -> Buffer:
        buffers = self.buffers.setdefault(row_bytes, [])
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


Stream = tuple[Buffer, Buffer | None]  # the residual stream, and the deferred residual


@dataclass
class _Saved:
    """Buffers that a block's backward pass reads, in the order in which they are freed."""

    rows: int  # tokens
    outputs: int  # of them, those computed beyond keys and values
    ffn: list[Buffer] = field(default_factory=list)  # gate, up and their input
    o: list[Buffer] = field(default_factory=list)  # input of o
    attention: list[Buffer] = field(default_factory=list)  # q, k, v and the attention output
    qkv: list[Buffer] = field(default_factory=list)  # input of q, k, v
    norms: list[Buffer] = field(default_factory=list)  # the stream before each norm
    heads: list[Buffer] = field(default_factory=list)  # q and k before their norms
    results: dict[str, Buffer] = field(default_factory=dict)  # of each half, before the norm after it

    def every(self) -> list[Buffer]:
        lists = self.ffn, self.o, self.attention, self.qkv, self.norms, self.heads, self.results.values()
        return [buffer for some in lists for buffer in some]


class TopPass:
    """One pass over the blocks from the cut on."""

    def __init__(self, shape: Shape, scheme: Scheme, half: bool, recompute: bool) -> None:
        self.shape, self.scheme, self.half = shape, scheme, half
        mode = scheme.recompute(recompute)
        self.frugal, self.recompute = mode == "selective", mode == "full"
        self.pool = SimulatedPool()
        self.value_bytes = 2 if half else 4  # bytes of a GEMM's input or output value
        self.context = 0  # tokens that the others see and that are not run with them
        self.places = {norm.place for norm in shape.arch.norms}
        self.scaled = shape.scaled  # what a half adds is multiplied

    def peak_bytes(self, widest: Pass) -> int:
        """Of the pool after the largest pass, plus what malloc holds."""
        tokens, outputs, context = widest.live, widest.outputs, widest.tokens - widest.live
        self.run(tokens, outputs, context)
        shape = self.shape
        blocks = 2 if self.recompute or self.frugal else shape.depth - self.scheme.cut
        sums = 4 * tokens * (shape.query // shape.head + 2) * blocks  # softmax sums, and each norm's scale
        # the last block's output rows, and their gradients scattered to all rows
        gathered = 2 * 4 * shape.width * (tokens + outputs)
        gathered += 4 * shape.width * (tokens + context) if context else 0
        return sum(b.row_bytes * b.rows for buffers in self.pool.buffers.values() for b in buffers) + sums + gathered

    def run(self, tokens: int, outputs: int, context: int = 0) -> None:
        """Forward and backward; context: tokens that are only read, before."""
        shape, pool, last, cut = self.shape, self.pool, self.shape.depth - 1, self.scheme.cut
        if context:
            self.read(context)
            self.context = context
        stream: Stream = (Buffer(0), None)  # boundary states are not from the pool
        inputs: dict[int, Stream] = {}
        saved: dict[int, _Saved] = {}
        for block in range(cut, last + 1):
            redo, inputs[block] = self.recompute and block < last, stream
            if self.frugal and block < last:
                saved[block], stream = self.frugal_forward(block, stream, tokens)
            else:
                saved[block], stream = self.forward(block, stream, tokens, outputs if block == last else tokens, redo)
            if redo:
                kept = saved[block]
                pool.free(*kept.every())
                stream[0].used = True  # by the next block
        grad: Buffer | None = self.fp32(outputs, shape.width)
        pool.free(stream[1])
        for block in reversed(range(cut, last + 1)):
            if redo := self.recompute and block < last:
                saved[block], (_, added) = self.forward(block, inputs[block], tokens, tokens, keep_input=True)
                pool.free(added)
            assert grad is not None  # None only below the cut
            backward = self.frugal_backward if self.frugal and block < last else self.backward
            grad = backward(block, saved[block], grad)
            if redo:
                pool.free(*inputs[block])

    def read(self, tokens: int) -> None:
        """Inference over the context; keys and values stay."""
        pool = self.pool
        stream: Stream = (Buffer(0), None)
        for block in range(self.scheme.cut, self.shape.depth - 1):
            before = stream[0]
            saved, stream = self.forward(block, stream, tokens, tokens)
            _, *keys_and_values, _ = saved.attention
            pool.free(*saved.every(), before)
            for buffer in (stream[0], *keys_and_values):
                buffer.used = True
        total, h = (self.fp32(tokens, self.shape.width) for _ in range(2))
        copy = self.bf16_copy(tokens, self.shape.width)
        self.products((tokens, self.shape.key), (tokens, self.shape.key))
        pool.free(total, h, copy, *stream)

    def joined(self, rows: int) -> list[Buffer]:
        """Keys and values of these rows and of the context."""
        return [self.fp32(rows + self.context, self.shape.key) for _ in range(2)] if self.context else []

    def fp32(self, rows: int, width: int) -> Buffer:
        return self.pool.take(rows, 4 * width)

    def ffn_buffer(self, rows: int) -> Buffer:
        """FFN activations, between gate and down."""
        return self.pool.take(rows, self.value_bytes * self.shape.ffn)

    def bf16_copy(self, rows: int, width: int) -> Buffer | None:
        """The bf16 copy of a GEMM's input; float32 GEMMs need none."""
        return self.pool.take(rows, 2 * width) if self.half else None

    def products(self, *sizes: tuple[int, int]) -> list[Buffer]:
        """Outputs of GEMMs over one input, (rows, width) each, in float32."""
        return [self.fp32(rows, width) for rows, width in sizes]

    def product(self, rows: int, width: int) -> Buffer:
        return self.products((rows, width))[0]

    def normed(self, place: str, stream: Buffer, rows: int) -> Buffer:
        """The norm of the stream, or the stream itself where the architecture has no norm here."""
        return self.fp32(rows, self.shape.width) if place in self.places else stream

    def result(self, half: str, out: Buffer, rows: int, results: dict[str, Buffer]) -> Buffer:
        """What a half adds to the stream; results: takes what its norm keeps."""
        if f"{half}_out" in self.places:
            results[half] = out
            return self.fp32(rows, self.shape.width)
        if self.scaled:  # in memory of torch's own
            self.pool.free(out)
            return Buffer(0)
        return out

    def result_back(self, half: str, grad: Buffer, rows: int, results: dict[str, Buffer]) -> Buffer:
        """The gradient of what `result` was given; grad stays."""
        if half not in results:
            return grad
        made = self.fp32(rows, self.shape.width)
        self.pool.free(results.pop(half))
        return made

    def head_norms(self, qkv: list[Buffer], outputs: int, rows: int) -> tuple[list[Buffer], list[Buffer]]:
        """(q, k and v as attention reads them, q and k that their norms keep)."""
        if "q" not in self.places:
            return qkv, []
        q, k, v = qkv
        return [*self.products((outputs, self.shape.query), (rows, self.shape.key)), v], [q, k]

    def head_norms_back(self, dq: Buffer, dk: Buffer, saved: _Saved) -> tuple[Buffer, Buffer]:
        if not saved.heads:
            return dq, dk
        q, k = saved.heads
        new_dk = self.fp32(saved.rows, self.shape.key)
        self.pool.free(k, dk)
        new_dq = self.fp32(saved.outputs, self.shape.query)
        self.pool.free(q, dq)
        return new_dq, new_dk

    def saved_inputs(self, block: int, tensors: Sequence[str], full: Buffer, rows: int, width: int) -> list[Buffer]:
        """What is saved of these layers' input: all of it, or only the channels that each weight gradient reads."""
        scheme, method = self.scheme, self.scheme.method
        updates = [update for tensor in tensors if (update := scheme.updates.get((block, tensor)))]
        widths = [method.kept_width(update, width) for update in updates]
        if sum(widths) >= width:
            return [full]
        value_bytes = [4 if method.traits_of(update).float32_inputs else self.value_bytes for update in updates]
        return [self.pool.take(rows, each * kept) for each, kept in zip(value_bytes, widths, strict=True)]

    def forward(
        self, block: int, stream: Stream, rows: int, outputs: int, keep_input: bool = False
    ) -> tuple[_Saved, tuple[Buffer, Buffer]]:
        """keep_input: for recomputation."""
        shape, pool = self.shape, self.pool
        x, deferred = stream
        total = self.fp32(rows, shape.width) if deferred is not None else x
        h = self.normed("attention", total, rows)
        x_copy = self.bf16_copy(rows, shape.width) or h
        qkv_inputs = self.saved_inputs(block, "qkv", x_copy, rows, shape.width)
        qkv = self.products((outputs, shape.query), (rows, shape.key), (rows, shape.key))
        qkv, heads = self.head_norms(qkv, outputs, rows)
        joined = self.joined(rows)
        mixed = self.fp32(outputs, shape.query)
        pool.free(*joined)
        o_copy = self.bf16_copy(outputs, shape.query)  # in float32 the attention saves it anyway
        o_inputs = self.saved_inputs(block, ("o",), o_copy, outputs, shape.query) if o_copy else []
        out = self.product(outputs, shape.width)
        if o_copy not in o_inputs:
            pool.free(o_copy)
        results: dict[str, Buffer] = {}
        out = self.result("attention", out, outputs, results)
        second = self.fp32(outputs, shape.width)
        h2 = self.normed("ffn", second, outputs)
        ffn_copy = self.bf16_copy(outputs, shape.width) or h2
        ffn_inputs = self.saved_inputs(block, ("gate", "up"), ffn_copy, outputs, shape.width)
        *gates, act = (self.ffn_buffer(outputs) for _ in range(3))
        added = self.product(outputs, shape.width)
        pool.free(act, out, None if keep_input else deferred)
        added = self.result("ffn", added, outputs, results)
        # an unsaved input is freed, and so is the buffer it was copied from
        pool.free(*(buffer for buffer in (ffn_copy, h2) if buffer not in (*ffn_inputs, second)))
        pool.free(*(buffer for buffer in (x_copy, h) if buffer not in (*qkv_inputs, total)))
        norms = [total, second]
        saved = _Saved(rows, outputs, [*gates, *ffn_inputs], o_inputs, [*qkv, mixed], qkv_inputs, norms, heads, results)
        return saved, (second, added)

    def backward(self, block: int, saved: _Saved, grad: Buffer) -> Buffer | None:
        shape, pool, scheme = self.shape, self.pool, self.scheme
        rows, outputs = saved.rows, saved.outputs
        dout = self.result_back("ffn", grad, outputs, saved.results)
        dy = self.bf16_copy(outputs, shape.width)
        dact = self.ffn_buffer(outputs)
        down = scheme.updates.get((block, "down"))
        reads_act = down is not None and not scheme.method.traits_of(down).frugal
        pool.free(dact, self.ffn_buffer(outputs) if reads_act else None)
        dx = self.product(outputs, shape.width)
        pool.free(dy, *saved.ffn, dout if dout is not grad else None)
        grad2 = self.normed("ffn", dx, outputs)  # without a norm, summed into what is there
        pool.free(saved.norms[1], dx if dx is not grad2 else None, grad)
        dout = self.result_back("attention", grad2, outputs, saved.results)
        dy = self.bf16_copy(outputs, shape.width)
        dmixed = self.product(outputs, shape.query)
        pool.free(dy, *saved.o, dout if dout is not grad2 else None)
        dq, dk, dv = self.attention_backward(outputs, rows)
        pool.free(dmixed, *saved.attention)
        dq, dk = self.head_norms_back(dq, dk, saved)
        wanted = block > scheme.cut or block in scheme.norms
        dh = None
        for width, count in ((shape.query, outputs), (shape.key, rows), (shape.key, rows)):
            dy = self.bf16_copy(count, width)
            if wanted and dh is None:
                dh = self.product(rows, shape.width)
            pool.free(dy)
        pool.free(dq, dk, dv, *saved.qkv)
        below = None
        if block > scheme.cut:
            assert dh is not None
            below = self.normed("attention", dh, rows)
        pool.free(saved.norms[0], dh if dh is not below else None, grad2)
        return below

    def attention_backward(self, outputs: int, rows: int) -> tuple[Buffer, Buffer, Buffer]:
        """Gradients of q, k and v; each list of work first sums k and v into buffers of its own."""
        joined, every = self.joined(rows), rows + self.context
        dq = self.fp32(outputs, self.shape.query)
        (dk, *other_dk), (dv, *other_dv) = ([self.fp32(every, self.shape.key) for _ in range(LISTS)] for _ in range(2))
        self.pool.free(*other_dk, *other_dv, *joined)
        if not self.context:
            return dq, dk, dv
        live = self.fp32(rows, self.shape.key), self.fp32(rows, self.shape.key)
        self.pool.free(dk, dv)
        return dq, *live

    def frugal_forward(self, block: int, stream: Stream, rows: int) -> tuple[_Saved, tuple[Buffer, Buffer]]:
        shape, pool = self.shape, self.pool
        x, deferred = stream
        total = self.fp32(rows, shape.width) if deferred is not None else x
        second, attended = self.attention_half(block, rows)
        pool.free(*attended.every())
        gates = self.gates(rows)
        act = self.saved_inputs(block, ("down",), gates[0], rows, shape.ffn) if self.scheme.share(block, "down") else []
        added = self.product(rows, shape.width)
        pool.free(*gates)
        results: dict[str, Buffer] = {}
        added = self.result("ffn", added, rows, results)
        if deferred is not None:
            pool.free(x, deferred)
        return _Saved(rows, rows, ffn=act, norms=[total], results=results), (second, added)

    def attention_half(self, block: int, rows: int) -> tuple[Buffer, _Saved]:
        """The stream after attention, and the buffers that the backward pass needs."""
        shape, pool = self.shape, self.pool
        h = self.normed("attention", Buffer(0), rows)
        copy = self.bf16_copy(rows, shape.width)
        qkv = self.products((rows, shape.query), (rows, shape.key), (rows, shape.key))
        qkv, heads = self.head_norms(qkv, rows, rows)
        joined = self.joined(rows)
        mixed = self.fp32(rows, shape.query)
        pool.free(copy, h, *joined)
        copy = self.bf16_copy(rows, shape.query)
        kept = []
        if self.scheme.share(block, "o"):
            kept = self.saved_inputs(block, ("o",), copy or mixed, rows, shape.query)
        out = self.product(rows, shape.width)
        pool.free(copy)
        results: dict[str, Buffer] = {}
        out = self.result("attention", out, rows, results)
        second = self.fp32(rows, shape.width)
        pool.free(out)
        return second, _Saved(rows, rows, o=kept, attention=[*qkv, mixed], heads=heads, results=results)

    def gates(self, rows: int) -> list[Buffer]:
        """Outputs of gate and up."""
        h = self.normed("ffn", Buffer(0), rows)
        copy = self.bf16_copy(rows, self.shape.width)
        outputs = [self.ffn_buffer(rows) for _ in range(2)]
        self.pool.free(copy, h)
        return outputs

    def frugal_backward(self, block: int, saved: _Saved, grad: Buffer) -> Buffer | None:
        shape, pool, rows = self.shape, self.pool, saved.rows
        dout = self.result_back("ffn", grad, rows, saved.results)
        second, again = self.attention_half(block, rows)
        dy = self.bf16_copy(rows, shape.width)
        dact = self.ffn_buffer(rows)
        pool.free(dy, dout if dout is not grad else None)
        gates = self.gates(rows)
        pool.free(dact)
        dnormed = self.product(rows, shape.width)
        pool.free(*gates)
        dx = self.fp32(rows, shape.width)
        pool.free(dnormed, second)
        dout = self.result_back("attention", dx, rows, again.results)
        dy = self.bf16_copy(rows, shape.width)
        dmixed = self.product(rows, shape.query)
        pool.free(dy, dout if dout is not dx else None)
        dq, dk, dv = self.attention_backward(rows, rows)
        pool.free(dmixed, *again.attention, *again.o)
        dq, dk = self.head_norms_back(dq, dk, again)
        dy = self.bf16_copy(rows, shape.query)
        dh = self.product(rows, shape.width)
        pool.free(dy, dq)
        for buffer in (dk, dv):
            dy = self.bf16_copy(rows, shape.key)
            pool.free(dy, buffer)
        below = self.normed("attention", dh, rows) if block > self.scheme.cut else None
        pool.free(dh if dh is not below else None, dx, grad, *saved.norms, *saved.ffn)
        return below
