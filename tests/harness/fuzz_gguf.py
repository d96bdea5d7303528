"""GGUF files for fuzz.py, edited with their structure known: records, tensors, counts, offsets."""

from __future__ import annotations

import functools
import random
import struct
from typing import Any

from fuzz_mutate import EXTREME, mutate


def _real_header() -> tuple[list[bytes], list[tuple[str, tuple[int, ...], int, int]], int]:
    """The embedded model's: (records, tensors as name, shape, type and offset, bytes of data), its vocabulary thinned
    to what makes an input quick; the data itself is a hole in the file."""
    from edgeft.formats.gguf import ARRAY, GGUF, STRING, encode_record
    from edgeft.formats.source import demo_model

    path = demo_model()
    if path is None:
        return small_header()
    gguf = GGUF.open(path)
    records = []
    for key in gguf.records:
        kind, item, count = gguf.described(key)
        if kind == ARRAY and count > 400:
            texts = [t.decode("utf-8", "replace") for t in gguf.texts(key)] if item == STRING else gguf.get_key(key)
            records.append(encode_record(key, ARRAY, texts[:400], item))
        else:
            records.append(gguf.record(key))
    start = min(t.offset for t in gguf.tensors.values())
    tensors = [(t.name, t.shape, t.type, t.offset - start) for t in gguf.tensors.values()]
    return records, tensors, gguf.data.size - start


def small_header() -> tuple[list[bytes], list[tuple[str, tuple[int, ...], int, int]], int]:
    from edgeft.formats.gguf import ARRAY, STRING, encode_record

    records = [encode_record("general.architecture", STRING, "llama")]
    numbers = {"block_count": 1, "embedding_length": 64, "attention.head_count": 2, "attention.head_count_kv": 1}
    numbers |= {"feed_forward_length": 128, "context_length": 64, "rope.dimension_count": 32}
    records += [encode_record(f"llama.{key}", 4, value) for key, value in numbers.items()]
    records.append(encode_record("llama.attention.layer_norm_rms_epsilon", 6, 1e-5))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁h", "el", "lo", "▁hello"]
    records.append(encode_record("tokenizer.ggml.model", STRING, "llama"))
    records.append(encode_record("tokenizer.ggml.tokens", ARRAY, tokens, STRING))
    records.append(encode_record("tokenizer.ggml.scores", ARRAY, [-float(i) for i in range(len(tokens))], 6))
    kinds = [2, 3, 3, *[6] * 256, *[1] * 4]
    records.append(encode_record("tokenizer.ggml.token_type", ARRAY, kinds, 5))
    records.append(encode_record("tokenizer.ggml.bos_token_id", 4, 1))
    records.append(encode_record("tokenizer.chat_template", STRING, "{{ messages[0]['content'] }}"))
    records.append(encode_record("general.alignment", 4, 32))
    shapes = {"token_embd": (64, len(tokens)), "output_norm": (64,)}
    block = {"attn_q": (64, 64), "attn_k": (64, 32), "attn_v": (64, 32), "attn_output": (64, 64), "attn_norm": (64,)}
    block |= {"ffn_gate": (64, 128), "ffn_up": (64, 128), "ffn_down": (128, 64), "ffn_norm": (64,)}
    shapes |= {f"blk.0.{name}": shape for name, shape in block.items()}
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensors.append((f"{name}.weight", shape, 0, offset))
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        offset += -(-size // 32) * 32
    return records, tensors, offset


@functools.cache
def _headers() -> list[tuple[list[bytes], list[tuple[str, tuple[int, ...], int, int]], int]]:
    return [small_header(), _real_header()]


def gguf_input(r: random.Random, small: float = 0.85, gentle: bool = False) -> tuple[bytes, int]:
    """(the head of a file, its size); the rest is zeros."""
    from edgeft.formats.gguf import SCALARS, encode_string

    records, tensors, size = _headers()[r.random() > small]
    records = list(records)
    infos: list[Any] = [[name, list(shape), kind, offset] for name, shape, kind, offset in tensors]
    counts = [len(infos), len(records)]
    for _ in range(0 if r.random() < 0.3 else r.choice((1, 1, 2, 4))):
        what, place = r.randrange(12), r.randrange(len(records))
        key = int.from_bytes(records[place][:8], "little")
        info = r.choice(infos)
        if what == 0:  # a value of another kind
            kind = r.choice((*SCALARS, 8, 9, 13, 2**32 - 1))
            records[place] = records[place][: 8 + key] + struct.pack("<I", kind) + records[place][12 + key :]
        elif what == 1:  # a value that cannot be
            raw = r.choice(EXTREME).to_bytes(8, "little")
            records[place] = (
                records[place][: 12 + key] + raw[: len(records[place]) - 12 - key] + records[place][20 + key :]
            )
        elif what == 2:  # an array's kind, or its length
            at = 12 + key + r.choice((0, 4))
            records[place] = records[place][:at] + r.choice(EXTREME).to_bytes(8, "little") + records[place][at + 8 :]
        elif what == 3:
            records.insert(r.randrange(len(records)), records[place])
            counts[1] += r.randrange(2)
        elif what == 4:
            del records[place]
            counts[1] -= r.randrange(2)
        elif what == 5:
            infos.append(list(info))
            counts[0] += r.randrange(2)
        elif what == 6:
            infos.remove(info)
            counts[0] -= r.randrange(2)
        elif what == 7 and info[1]:
            info[1][r.randrange(len(info[1]))] = r.choice((*EXTREME, 64, 576))
        elif what == 8:
            info[1] = r.choice(([], [1] * 5, [0], info[1][::-1], [2**32, 2**32], [2**33] * 4))
        elif what == 9:
            info[2] = r.choice((*range(40), 2**31, 2**32 - 1))
        elif what == 10:
            info[3] = r.choice((*EXTREME, info[3] + 32, info[3] - 32)) % 2**64
        elif what == 11:
            records[place] = mutate(records[place], r)
        if not records or not infos:
            break
    if r.random() < 0.1:
        counts[r.randrange(2)] = r.choice(EXTREME)
    head = bytearray(b"GGUF" + struct.pack("<IQQ", r.choice((2, 3, 3, 3, 3, 3)), *(count % 2**64 for count in counts)))
    for record in records:
        head += record
    for name, shape, kind, offset in infos:
        head += encode_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *(n % 2**64 for n in shape))
        head += struct.pack("<IQ", kind, offset % 2**64)
    head += bytes(-len(head) % 32)
    data = bytes(head)
    if not gentle and r.random() < 0.3:
        data = mutate(data, r)
    whole = len(data) + size
    return data, whole if r.random() < 0.9 else r.choice((0, len(data), whole - 1, whole + 1, whole // 2))
