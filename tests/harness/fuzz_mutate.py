"""Edits of bytes for fuzz.py: the same random generator always makes the same edits."""

from __future__ import annotations

import random

EXTREME = (0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def mutate(data: bytes, r: random.Random, words: tuple[bytes, ...] = ()) -> bytes:
    """A few edits: bits, bytes, lengths set to extreme values, pieces cut, doubled, moved, words put in."""
    out = bytearray(data)
    for _ in range(r.choice((1, 1, 1, 2, 3, 8))):
        at = r.randrange(len(out) + 1)
        end = min(len(out), at + r.choice((1, 2, 4, 8, 32, 256)))
        what = r.randrange(9 if words else 7)
        if what == 0 and at < len(out):
            out[at] ^= 1 << r.randrange(8)
        elif what == 1:
            out[at:end] = r.randbytes(end - at)
        elif what == 2:
            size = r.choice((1, 2, 4, 8))
            out[at : at + size] = (r.choice(EXTREME) % 2 ** (8 * size)).to_bytes(size, "little")
        elif what == 3:
            del out[at : end if r.random() < 0.7 else None]
        elif what == 4:
            out[at:at] = out[at:end] * r.choice((1, 2, 50, 1000))
        elif what == 5:
            out[at:end] = out[(other := r.randrange(len(out) + 1)) : other + end - at]
        elif what == 6:
            out[at:at] = bytes([r.randrange(256)]) * r.choice((1, 3, 100, 5000))
        elif what >= 7:
            out[at : at if r.random() < 0.5 else end] = r.choice(words) * r.choice((1, 1, 1, 3, 500))
    return bytes(out)


YAML_WORDS: tuple[bytes, ...] = (
    *(b"&a ", b"*a", b"<<: ", b"!!python/object:os.system ", b"!!binary ", b"!!set ", b"- ", b"[", b"{", b"? "),
    *(b": ", b"\n", b"  ", b"|\n", b">\n", b"0x", b"1:", b"1e999", b".nan", b".inf", b"~", b"---\n", b"'", b'"'),
    *(b"2024-13-45", b"train: ", b"how: ", b"update: {blocks: ", b"999999999999999999999", b"\x00", b"\xff"),
)

JSON_WORDS: tuple[bytes, ...] = (
    *(b"[", b"{", b'"', b"\\u0000", b"\\ud800", b"NaN", b"1e999999", b"-Infinity", b"9" * 5000, b"null", b"\n"),
    *(b"true", b"[]", b"{}", b'"":', b'{"a":', b"\xff", b"\xef\xbb\xbf", b",", b":", b'"text"', b'"messages"'),
)

CSV_WORDS: tuple[bytes, ...] = (
    *(b'"', b'""', b",", b";", b"\t", b"|", b"\n", b"\r", b"\r\n", b"\x00", b"\xff"),
    *(b"\xef\xbb\xbf", b"question"),
)

JINJA_WORDS: tuple[bytes, ...] = (
    *(b"{{", b"}}", b"{%", b"%}", b"{% for a in range(999) %}", b"{% endfor %}", b"**", b"9", b"*", b"~"),
    *(b"|list", b"|tojson", b"messages", b".__class__", b"namespace(", b"{% set x = ", b"|center(99999999)"),
    *(b"[", b"(", b"'"),
)
