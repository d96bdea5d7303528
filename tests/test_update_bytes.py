"""An update as bytes: exact for what was sent, small, and hostile bytes are refused in bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeft.errors import ConfigError, DataError
from edgeft.federated.update import Feedback, Layout, Send, decode, encode

SHAPES = (("layers.3.mlp.up_proj.up", (48, 16)), ("layers.3.self_attn.q_proj.bias", (7,)), ("z", (5, 3)))
LAYOUT = Layout(SHAPES)
LARGE = Layout(tuple((f"layers.{number}.up", (2048, 16)) for number in range(30)))
SENDS = [Send(), Send.parse("top:1%"), Send.parse("top:20%"), Send.parse("top:99.9%"), Send.parse("top:100%")]


def with_support(layout: Layout, send: Send, seed: int = 0) -> Layout:
    """As a server makes it."""
    sizes = np.random.default_rng(seed).random(layout.total).astype(np.float32)
    return Layout(layout.shapes, send.choose(sizes))


def vector(layout: Layout, seed: int = 0) -> np.ndarray:
    """Normal numbers, of another size in each tensor."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(layout.size) * 10.0**-layout.owner).astype(np.float32)


@pytest.mark.parametrize("send", SENDS, ids=str)
@pytest.mark.parametrize("layout", [LAYOUT, LARGE], ids=["small", "large"])
def test_what_is_decoded_is_exactly_what_was_sent(layout: Layout, send: Send) -> None:
    layout = with_support(layout, send)
    numbers = vector(layout)
    data, sent = encode(numbers, layout, send)
    assert decode(data, layout, send).tobytes() == sent.tobytes()
    assert len(data) == send.bytes_of(layout)
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
    layout = with_support(Layout(tuple((f"t{n}", (size,)) for n, size in enumerate(sizes))), Send(share), seed)
    numbers = vector(layout, seed)
    if kind != "normal":
        numbers[:] = {"zero": 0.0, "equal": -2.5, "tiny": 1e-45, "one large": 1e-3}[kind]
    if kind == "one large":
        numbers[seed % layout.size] = 3e38
    data, sent = encode(numbers, layout, Send(share))
    assert decode(data, layout, Send(share)).tobytes() == sent.tobytes()
    Send(share).check(layout.support, layout.total)


def test_numbers_are_sent_to_within_half_a_level_of_their_tensor() -> None:
    layout = with_support(LARGE, Send(0.01))
    numbers = vector(layout)
    _, sent = encode(numbers, layout, Send(0.01))
    for number in range(len(layout.shapes)):
        mine = layout.owner == number
        assert np.abs(sent - numbers)[mine].max() <= np.abs(numbers[mine]).max() / 127 / 2 * 1.001


def test_the_support_holds_the_largest_and_of_equal_ones_the_first() -> None:
    sizes = np.array([1, 5, 0, 5, 5, 2], np.float32)
    assert Send(0.5).choose(sizes).tolist() == [1, 3, 4]  # type: ignore[union-attr]
    assert Send(0.3).choose(sizes).tolist() == [1, 3]  # type: ignore[union-attr]
    assert Send(1e-6).choose(sizes).tolist() == [1]  # type: ignore[union-attr]
    assert Send().choose(sizes) is None


@pytest.mark.parametrize(
    "support", [None, [0], [0, 0], [1, 0], [-1, 2], [3, 10], [[0, 1]], [0.0, 1.0], [0, 1, 2]], ids=str
)
def test_a_support_that_no_server_chooses_is_refused(support: Any) -> None:
    Send(0.2).check(np.array([0, 9]), 10)
    with pytest.raises(DataError):
        Send(0.2).check(None if support is None else np.array(support), 10)
    with pytest.raises(DataError):
        Send().check(np.arange(10), 10)


def test_one_percent_takes_less_than_a_three_hundredth_of_the_dense_bytes() -> None:
    layout = with_support(LARGE, Send.parse("top:1%"))
    data, _ = encode(vector(layout), layout, Send.parse("top:1%"))
    assert len(data) <= 4 * LARGE.total / 300


def test_error_feedback_loses_nothing() -> None:
    """What was sent over all rounds, and what is still kept, sum to all updates."""
    layout = with_support(LAYOUT, Send(0.2))
    feedback, total, sent = Feedback(layout), np.zeros(layout.size), np.zeros(layout.size)
    for number in range(60):
        update = vector(layout, number)
        data, residual = feedback.encode(update, Send(0.2))
        feedback = Feedback(layout, residual)
        total += update
        sent += decode(data, layout, Send(0.2))
    np.testing.assert_allclose(sent + feedback.residual, total, atol=1e-4)
    largest = max(np.abs(vector(layout, number)).max() for number in range(60))
    assert np.abs(feedback.residual).max() <= largest / 127


@pytest.mark.parametrize("text", ["", "top", "top:0%", "top:101%", "top:1", "dense%", "top:-1%", "top:1e3%"])
def test_an_unknown_way_to_send_is_an_error_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Send.parse(text)
    assert "top:1%" in error.value.hint


@pytest.mark.parametrize("send", SENDS, ids=str)
def test_changed_bytes_are_refused_or_decode_to_numbers(send: Send) -> None:
    """Also with a right checksum, as an attacker writes it; whatever is decoded has the layout's size."""
    layout = with_support(LAYOUT, send)
    data, _ = encode(vector(layout), layout, send)
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
        if len(changed) >= 20:
            struct.pack_into("<I", changed, 16, zlib.crc32(changed[20:], zlib.crc32(changed[:16])))
        try:
            assert decode(bytes(changed), layout, send).shape == (layout.size,)
        except DataError:
            refused += 1
    assert refused > 100


def test_a_flipped_bit_is_noticed() -> None:
    layout = with_support(LAYOUT, Send(0.2))
    data, _ = encode(vector(layout), layout, Send(0.2))
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(DataError):
            decode(bytes(changed), layout, Send(0.2))


def test_an_update_of_another_kind_size_or_support_is_refused() -> None:
    layout = with_support(LAYOUT, Send(0.2))
    data, _ = encode(vector(layout), layout, Send(0.2))
    decode(data, layout, Send(0.2))
    others = [
        (LAYOUT, Send()),
        (with_support(LAYOUT, Send(0.1)), Send(0.1)),
        (with_support(LARGE, Send(0.2)), Send(0.2)),
    ]
    for other, send in [*others, (with_support(LAYOUT, Send(0.2), seed=1), Send(0.2))]:
        with pytest.raises(DataError):
            decode(data, other, send)


def test_hostile_bytes_take_no_more_memory_than_an_honest_update() -> None:
    """A gigabyte of bytes is refused by its length, and stated counts allocate nothing."""
    send = Send(0.01)
    layout = with_support(LARGE, send)
    honest, _ = encode(vector(layout), layout, send)
    tracemalloc.start()
    decode(honest, layout, send)
    allowed = tracemalloc.get_traced_memory()[1]
    for data in (bytes(1 << 26), b"EFTU\x02\x01\x00\x00" + b"\xff" * 12, b"\xff" * send.bytes_of(layout)):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(DataError):
            decode(data, layout, send)
        assert tracemalloc.get_traced_memory()[1] - before <= allowed
    tracemalloc.stop()


def test_the_layout_keeps_names_and_shapes() -> None:
    tensors = {name: np.full(shape, number + 1, np.float32) for number, (name, shape) in enumerate(SHAPES)}
    assert Layout.of(tensors) == LAYOUT
    back = LAYOUT.split(LAYOUT.flatten(tensors))
    assert back.keys() == tensors.keys()
    assert all((back[name] == tensors[name]).all() for name in tensors)
    assert LAYOUT.mark != Layout((("z", (5, 3)),)).mark
    some = with_support(LAYOUT, Send(0.2))
    assert sum(map(np.count_nonzero, some.split(some.flatten(tensors)).values())) == some.size == Send(0.2).count(790)
