"""An update as bytes: exact for what was sent, small, and hostile bytes are refused in bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeft.errors import ConfigError, DataError
from edgeft.federated.update import Feedback, Layout, Send, decode, encode

LAYOUT = Layout((("layers.3.mlp.up_proj.up", (48, 16)), ("layers.3.self_attn.q_proj.bias", (7,)), ("z", (5, 3))))
LARGE = Layout(tuple((f"layers.{number}.up", (2048, 16)) for number in range(30)))
SENDS = [Send(), Send.parse("top:1%"), Send.parse("top:20%"), Send.parse("top:100%")]


def vector(layout: Layout, seed: int = 0) -> np.ndarray:
    """Normal numbers, of another size in each tensor."""
    random = np.random.default_rng(seed)
    sizes = np.repeat(10.0 ** -np.arange(len(layout.shapes)), np.diff(layout.bounds))
    return (random.standard_normal(layout.size) * sizes).astype(np.float32)


@pytest.mark.parametrize("send", SENDS, ids=str)
@pytest.mark.parametrize("layout", [LAYOUT, LARGE], ids=["small", "large"])
def test_what_is_decoded_is_exactly_what_was_sent(layout: Layout, send: Send) -> None:
    numbers = vector(layout)
    data, sent = encode(numbers, layout, send)
    assert decode(data, layout, send).tobytes() == sent.tobytes()
    assert len(data) <= send.max_bytes(layout)
    if send.dense:
        assert sent.tobytes() == numbers.tobytes()


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.floats(0.01, 1.0),
    st.integers(0, 1 << 30),
    st.sampled_from(["normal", "zero", "equal", "tiny", "one large"]),
)
def test_any_numbers_come_back(sizes: list[int], share: float, seed: int, kind: str) -> None:
    layout = Layout(tuple((f"t{number}", (size,)) for number, size in enumerate(sizes)))
    numbers = vector(layout, seed)
    if kind != "normal":
        numbers[:] = {"zero": 0.0, "equal": -2.5, "tiny": 1e-45, "one large": 1e-3}[kind]
    if kind == "one large":
        numbers[seed % layout.size] = 3e38
    data, sent = encode(numbers, layout, Send(share))
    assert decode(data, layout, Send(share)).tobytes() == sent.tobytes()
    assert np.count_nonzero(sent) <= Send(share).count(layout.size)


def test_the_largest_numbers_are_sent_to_within_half_a_level() -> None:
    numbers = vector(LARGE)
    _, sent = encode(numbers, LARGE, Send(0.01))
    chosen = np.flatnonzero(sent)
    smallest = np.sort(np.abs(numbers))[-Send(0.01).count(LARGE.size)]
    assert np.abs(numbers[chosen]).min() >= smallest
    assert len(chosen) == Send(0.01).count(LARGE.size)
    for part, original in zip(LARGE.split(sent).values(), LARGE.split(numbers).values(), strict=True):
        where = part != 0
        if where.any():
            assert np.abs(part - original)[where].max() <= np.abs(original).max() / 127 / 2 * 1.001


def test_one_percent_takes_a_hundredth_of_the_dense_bytes() -> None:
    data, _ = encode(vector(LARGE), LARGE, Send.parse("top:1%"))
    assert len(data) <= 4 * LARGE.size / 100


def test_neighbouring_numbers_take_no_more_than_scattered_ones() -> None:
    """All that is sent is in one tensor, or at one end: the worst case of the code stays within its limit."""
    for place in (slice(0, 9830), slice(LARGE.size - 9830, LARGE.size)):
        numbers = np.zeros(LARGE.size, np.float32)
        numbers[place] = 1
        data, sent = encode(numbers, LARGE, Send(0.01))
        assert decode(data, LARGE, Send(0.01)).tobytes() == sent.tobytes()
        assert len(data) <= Send(0.01).max_bytes(LARGE)


def test_error_feedback_loses_nothing() -> None:
    """What was sent over all rounds, and what is still kept, sum to all updates."""
    feedback, total, sent = Feedback(LAYOUT), np.zeros(LAYOUT.size), np.zeros(LAYOUT.size)
    for number in range(60):
        update = vector(LAYOUT, number)
        data, residual = feedback.encode(update, Send(0.05))
        feedback = Feedback(LAYOUT, residual)
        total += update
        sent += decode(data, LAYOUT, Send(0.05))
    np.testing.assert_allclose(sent + feedback.residual, total, atol=1e-4)
    assert np.count_nonzero(sent) > 5 * Send(0.05).count(LAYOUT.size)  # others have their turn as well


@pytest.mark.parametrize("text", ["", "top", "top:0%", "top:101%", "top:1", "dense%", "top:-1%", "top:1e3%"])
def test_an_unknown_way_to_send_is_an_error_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Send.parse(text)
    assert "top:1%" in error.value.hint


@pytest.mark.parametrize("send", SENDS, ids=str)
def test_changed_bytes_are_refused_or_decode_to_numbers(send: Send) -> None:
    """Also with a right checksum, as an attacker writes it; whatever is decoded has the layout's size."""
    data, _ = encode(vector(LAYOUT), LAYOUT, send)
    random = np.random.default_rng(5)
    refused = 0
    for _ in range(1500):
        changed = bytearray(data)
        for _ in range(random.integers(1, 4)):
            changed[random.integers(len(changed))] = random.integers(256)
        if random.random() < 0.2:
            changed = changed[: random.integers(len(changed))]
        if random.random() < 0.2:
            changed += bytes(int(random.integers(1, 9)))
        if len(changed) > 20:
            struct.pack_into("<I", changed, 16, zlib.crc32(changed[20:], zlib.crc32(changed[:16])))
        try:
            assert decode(bytes(changed), LAYOUT, send).shape == (LAYOUT.size,)
        except DataError:
            refused += 1
    assert refused > 100


def test_a_flipped_bit_is_noticed() -> None:
    data, _ = encode(vector(LAYOUT), LAYOUT, Send(0.2))
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(DataError):
            decode(bytes(changed), LAYOUT, Send(0.2))


def test_an_update_of_another_kind_or_size_is_refused() -> None:
    data, _ = encode(vector(LAYOUT), LAYOUT, Send(0.2))
    for layout, send in ((LAYOUT, Send()), (LAYOUT, Send(0.1)), (LARGE, Send(0.2))):
        with pytest.raises(DataError):
            decode(data, layout, send)


def test_hostile_bytes_take_no_more_memory_than_an_honest_update() -> None:
    """A gigabyte of bytes is refused by its length, and stated counts allocate nothing."""
    send = Send(0.01)
    honest, _ = encode(vector(LARGE), LARGE, send)
    tracemalloc.start()
    decode(honest, LARGE, send)
    allowed = tracemalloc.get_traced_memory()[1]
    for data in (bytes(1 << 26), b"EFTU\x01\x01\x1f\x00" + b"\xff" * 12, b"\xff" * send.max_bytes(LARGE)):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(DataError):
            decode(data, LARGE, send)
        assert tracemalloc.get_traced_memory()[1] - before <= allowed
    tracemalloc.stop()


def test_the_layout_keeps_names_and_shapes() -> None:
    tensors = {name: np.full(shape, number, np.float32) for number, (name, shape) in enumerate(LAYOUT.shapes)}
    assert Layout.of(tensors) == LAYOUT
    back = LAYOUT.split(LAYOUT.flatten(tensors))
    assert back.keys() == tensors.keys()
    assert all((back[name] == tensors[name]).all() for name in tensors)
    assert LAYOUT.digest != Layout((("z", (5, 3)),)).digest
