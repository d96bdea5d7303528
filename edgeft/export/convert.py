"""A Hugging Face directory as a GGUF file that llama.cpp runs: matrices f16, norms and biases f32.

Weights are streamed, one tensor in memory at a time; what llama.cpp would compute or tokenize differently is an error.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import LlamaFileType, TokenType

from edgeft.arch import Architecture
from edgeft.arch.check import read_config
from edgeft.errors import ExportError
from edgeft.export.gguf import check_place, place
from edgeft.formats import ggml
from edgeft.formats.gguf import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, NewTensor, encode_record
from edgeft.formats.safetensors import Weights
from edgeft.formats.source import open_tokenizer_file, resolve
from edgeft.formats.vocabulary import BYTE_LEVEL, SENTENCEPIECE, splitter_name

MERGED = {"behavior": "MergedWithPrevious", "invert": False}
SPACE = "\u2581"  # how SentencePiece writes a space


def hf_to_gguf(hf_dir: str, out: Path) -> Path:
    """Write the whole model to `out`, atomically."""
    out = Path(out)
    check_place(out)
    folder = resolve(hf_dir)
    arch, config = read_config(folder)
    weights = Weights(folder, arch.renamed)
    name = hf_dir.rstrip("/").rpartition("/")[2] or folder.resolve().name
    records = _metadata(config, arch, name) + _tokenizer(folder, int(config.vocab_size))
    place(out, records, _tensors(config, arch, weights))
    return out


def _metadata(config: Any, arch: Architecture, name: str) -> list[bytes]:
    keys: dict[str, str | int | float] = {
        "general.architecture": arch.name,
        "general.type": "model",
        "general.name": name,
        "general.file_type": int(LlamaFileType.MOSTLY_F16),
        "general.quantization_version": 2,
        **arch.header(config),
    }
    kinds = {str: STRING, int: UINT32, float: FLOAT32}
    return [encode_record(k, kinds[kind], v) for kind in kinds for k, v in keys.items() if type(v) is kind]


def rope_factors(config: Any, head: int) -> np.ndarray:
    """LLaMA 3's divisor of each rotary frequency, (head / 2,) float32."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    half = head // 2
    plain = float(config.rope_parameters["rope_theta"]) ** (-np.arange(half, dtype=np.float64) / half)
    factors: np.ndarray = plain / scaled.double().numpy()
    return factors.astype(np.float32)


def _tensors(config: Any, arch: Architecture, weights: Weights) -> list[NewTensor]:
    sizes = arch.sizes(config)
    table = (sizes.vocabulary, sizes.width)
    out = [_tensor(weights, "embed_tokens.weight", "token_embd.weight", table)]
    out.append(_tensor(weights, "norm.weight", "output_norm.weight", (sizes.width,), offset=arch.final_norm.offset))
    if not config.tie_word_embeddings:
        out.append(_tensor(weights, "lm_head.weight", "output.weight", table))
    if arch.rope(config)["rope_type"] == "llama3":
        factors = rope_factors(config, sizes.head)
        out.append(NewTensor("rope_freqs.weight", factors.shape, ggml.F32, factors.nbytes, lambda: factors))
    for name, values in arch.factors(config).items():
        vector = np.array(values, np.float32)
        out.append(NewTensor(name, vector.shape, ggml.F32, vector.nbytes, vector.copy))
    for number in range(sizes.depth):
        for tensor, linear in arch.linears.items():
            if linear.rows(sizes).start:
                continue  # of a shared tensor, which was written with its first rows
            source, target = f"layers.{number}.{linear.stored}", f"blk.{number}.{linear.gguf}"
            shape = arch.stored_shapes(sizes)[linear.gguf]
            order = arch.row_order(tensor, sizes)
            back = None if order is None else np.argsort(order)
            out.append(_tensor(weights, f"{source}.weight", f"{target}.weight", shape, back))
            if f"{source}.bias" in weights:
                if tensor not in arch.biases:
                    raise ExportError(f"llama.cpp has no place for {source}.bias in a `{arch.name}` model")
                out.append(_tensor(weights, f"{source}.bias", f"{target}.bias", shape[:1], back))
        for norm in arch.norms:
            source = f"layers.{number}.{norm.path}.weight"
            if source in weights:
                target = f"blk.{number}.{norm.gguf}.weight"
                out.append(_tensor(weights, source, target, (norm.size(sizes),), offset=norm.offset))
    return out


def _tensor(
    weights: Weights,
    source: str,
    target: str,
    shape: tuple[int, ...],
    order: np.ndarray | None = None,
    offset: float = 0.0,
) -> NewTensor:
    weights.place(source, shape)  # missing or misshapen tensors are errors before a byte is written
    kind, dtype = (ggml.F16, torch.float16) if len(shape) == 2 else (ggml.F32, torch.float32)

    def read() -> np.ndarray:
        values = weights.tensor(source, shape).to(dtype)
        if not torch.isfinite(values).all():
            raise ExportError(f"{source} holds values that do not fit into {str(dtype).removeprefix('torch.')}")
        array: np.ndarray = (values + offset if offset else values).numpy()
        return array if order is None else array[order]

    return NewTensor(target, shape[::-1], kind, math.prod(shape) * dtype.itemsize, read)


def _tokenizer(folder: Path, rows: int) -> list[bytes]:
    """The tokenizer in llama.cpp's terms; `rows` is the height of the embedding."""
    loaded = open_tokenizer_file(folder)
    source = json.loads(loaded.backend_tokenizer.to_str())
    model = source["model"]
    if model["type"] != "BPE":
        raise ExportError(f"tokenizers of type {model['type']} cannot be written to GGUF", "BPE tokenizers can")
    tokens: dict[int, tuple[str, int]] = {i: (piece, TokenType.NORMAL) for piece, i in model["vocab"].items()}
    for added in source["added_tokens"]:
        tokens[added["id"]] = (added["content"], TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED)
    if max(tokens) >= rows:
        what = f"the tokenizer has {max(tokens) + 1} tokens, and the embedding {rows} rows"
        raise ExportError(what, "resize the model's embedding to its tokenizer first")
    merges = [pair if isinstance(pair, list) else pair.split(" ", 1) for pair in model["merges"]]
    template = loaded.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    bos = loaded.bos_token_id
    if model.get("byte_fallback"):
        records = _sentencepiece(source, tokens, merges, rows, loaded.unk_token_id, "bos_token" in (template or ""))
    else:
        records = _byte_level(source, tokens, merges, rows)
    starts = bos is not None and loaded("a")["input_ids"][:1] == [bos]
    records.append(encode_record("tokenizer.ggml.add_bos_token", BOOL, starts))
    records.append(encode_record("tokenizer.ggml.add_eos_token", BOOL, False))  # the trainer never adds it to a prompt
    named = {"bos": bos, "eos": loaded.eos_token_id, "unknown": loaded.unk_token_id, "padding": loaded.pad_token_id}
    records += [
        encode_record(f"tokenizer.ggml.{k}_token_id", UINT32, int(v)) for k, v in named.items() if v is not None
    ]
    return records + ([encode_record("tokenizer.chat_template", STRING, template)] if template else [])


def _pieces(tokens: dict[int, tuple[str, int]], rows: int) -> list[bytes]:
    """One token for every row of the embedding; unknown ones are placeholders."""
    every = [tokens.get(i, (f"[PAD{i}]", TokenType.UNUSED)) for i in range(rows)]
    return [
        encode_record("tokenizer.ggml.tokens", ARRAY, [piece for piece, _ in every], STRING),
        encode_record("tokenizer.ggml.token_type", ARRAY, [kind for _, kind in every], INT32),
    ]


def _byte_level(source: Any, tokens: dict[int, tuple[str, int]], merges: list[list[str]], rows: int) -> list[bytes]:
    pre = splitter_name(source)
    records = [
        encode_record("tokenizer.ggml.model", STRING, BYTE_LEVEL),
        encode_record("tokenizer.ggml.pre", STRING, pre),
        *_pieces(tokens, rows),
    ]
    return [*records, encode_record("tokenizer.ggml.merges", ARRAY, [" ".join(pair) for pair in merges], STRING)]


def _sentencepiece(
    source: Any,
    tokens: dict[int, tuple[str, int]],
    merges: list[list[str]],
    rows: int,
    unknown: int | None,
    starts_special: bool,
) -> list[bytes]:
    """Merges become scores: llama.cpp joins the pair with the best one first, a merge of rank r has -r."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    for i, (piece, kind) in tokens.items():
        if i == unknown:
            tokens[i] = (piece, TokenType.UNKNOWN)
        elif kind == TokenType.NORMAL and len(piece) == 6 and piece.startswith("<0x"):
            tokens[i] = (piece, TokenType.BYTE)
    last = float(-len(merges))  # single characters are where merging starts: nothing is ever joined into them
    scores = [float(-ranks[tokens[i][0]]) if i in tokens and tokens[i][0] in ranks else last for i in range(rows)]
    return [
        encode_record("tokenizer.ggml.model", STRING, SENTENCEPIECE),
        encode_record("tokenizer.ggml.pre", STRING, "default"),
        *_pieces(tokens, rows),
        encode_record("tokenizer.ggml.scores", ARRAY, scores, FLOAT32),
        encode_record("tokenizer.ggml.add_space_prefix", BOOL, _space_prefix(source, starts_special)),
    ]


def _space_prefix(source: Any, starts_special: bool) -> bool:
    """Whether llama.cpp must put a space before text; it does so at the start and after every special token."""
    normalizer, pre = source.get("normalizer") or {}, source.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    kinds = [step["type"] for step in steps]
    # after the normalizer no space is left at which Gemma's tokenizer could split
    splits_nothing = pre == {"type": "Split", "pattern": {"String": " "}, **MERGED} and "Replace" in kinds
    if (not pre or splits_nothing) and kinds in (["Prepend", "Replace"], ["Replace"]):
        return "Prepend" in kinds
    if not steps and pre.get("type") == "Metaspace":
        # `first` has no counterpart: a space at the start only. After a leading special token there is none.
        spaced: bool = {"always": True, "never": False, "first": not starts_special}[pre["prepend_scheme"]]
        return spaced
    raise ExportError(
        f"this tokenizer treats spaces in an unknown way: {json.dumps([normalizer, pre])[:200]}",
        "export with --format hf and use llama.cpp's own converter",
    )
