"""A Hugging Face directory as a GGUF file that llama.cpp runs: matrices f16, norms and biases f32.

Weights are streamed, one tensor in memory at a time; what llama.cpp would compute or tokenize differently is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeft.errors import ExportError
from edgeft.formats import ggml
from edgeft.formats.gguf import ARRAY, STRING, NewTensor, encode_record

if TYPE_CHECKING:
    from edgeft.formats.safetensors import Weights

UINT32, INT32, FLOAT32, BOOL = 4, 5, 6, 7  # GGUF value types
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # GGUF token types
SPACE = "\u2581"  # how SentencePiece writes a space

LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_REGEX = LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_REGEX = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Splitter:
    """How text is split before byte-pair merging, by one of llama.cpp's names (tokenizer.ggml.pre)."""

    regex: str = ""  # "": GPT-2's own
    digits: bool = False  # digits are split off one by one first
    ignore_merges: bool = False  # a whole word in the vocabulary is taken as it is


SPLITTERS = {
    "gpt-2": Splitter(),
    "smollm": Splitter(digits=True),
    "llama-bpe": Splitter(LLAMA3_REGEX, ignore_merges=True),
    "qwen2": Splitter(QWEN2_REGEX),
    "tekken": Splitter(TEKKEN_REGEX, ignore_merges=True),
}
# other names under which llama.cpp does the same
SAME_SPLITTERS = {
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell"), "smollm"),
    **dict.fromkeys(("llama3", "llama-v3"), "llama-bpe"),
    "deepseek-r1-qwen": "qwen2",
}


def hf_to_gguf(hf_dir: str, out: Path) -> Path:
    """Writes the whole model to `out`, under another name until it is complete."""
    from edgeft.export.gguf import check_place, place

    out = Path(out)
    check_place(out)
    records, tensors = records_and_tensors(hf_dir)
    place(out, records, tensors)
    return out


def records_and_tensors(hf_dir: str) -> tuple[list[bytes], list[NewTensor]]:
    """All that edgeft.model.gguf.write needs; the tensors' data is read when its turn comes."""
    from edgeft.arch.config import MODEL_TYPES, read_config
    from edgeft.formats.hub import resolve
    from edgeft.formats.safetensors import Weights

    folder = resolve(hf_dir)
    config, weights = read_config(folder), Weights(folder)
    arch = MODEL_TYPES[config.model_type]
    name = hf_dir.rstrip("/").rpartition("/")[2] or folder.resolve().name
    records = _metadata(config, arch, name) + _tokenizer(folder, int(config.vocab_size))
    return records, _tensors(config, arch, weights)


# ---------------------------------------------------------------- metadata


def _text(key: str, value: str) -> bytes:
    return encode_record(key, STRING, value)


def _metadata(config: Any, arch: str, name: str) -> list[bytes]:
    head_dim = head_size(config)
    integers = {
        "general.file_type": 1,  # mostly f16
        "general.quantization_version": 2,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads or config.num_attention_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.vocab_size": config.vocab_size,
    }
    floats = {
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
    }
    texts = {"general.architecture": arch, "general.type": "model", "general.name": name}
    rope = config.rope_parameters
    if rope["rope_type"] in ("linear", "yarn"):
        texts[f"{arch}.rope.scaling.type"] = rope["rope_type"]
        floats[f"{arch}.rope.scaling.factor"] = rope["factor"]
    if rope["rope_type"] == "yarn":
        usual = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "mscale": None, "mscale_all_dim": None}
        odd = [key for key, value in usual.items() if rope.get(key) not in (None, value)]
        if odd or rope.get("attention_factor") is not None:
            raise ExportError(
                f"llama.cpp does not read this model's yarn scaling: {', '.join(odd or ['attention_factor'])}"
            )
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        integers[f"{arch}.rope.scaling.original_context_length"] = original
    return [
        *(_text(key, value) for key, value in texts.items()),
        *(encode_record(key, UINT32, int(value)) for key, value in integers.items()),
        *(encode_record(key, FLOAT32, float(value)) for key, value in floats.items()),
    ]


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_factors(config: Any) -> np.ndarray:
    """LLaMA 3's divisor of each rotary frequency, (head_dim / 2,) float32."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    half = head_size(config) // 2
    plain = float(config.rope_parameters["rope_theta"]) ** (-np.arange(half, dtype=np.float64) / half)
    factors: np.ndarray = plain / scaled.double().numpy()
    return factors.astype(np.float32)


# ---------------------------------------------------------------- tensors


def _tensors(config: Any, arch: str, weights: Weights) -> list[NewTensor]:
    from edgeft.arch.header import BIASES, LINEARS, NORMS
    from edgeft.engine.load_gguf import head_order

    width, vocabulary, head_dim = config.hidden_size, config.vocab_size, head_size(config)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads or config.num_attention_heads}
    sizes = {
        "q": (heads["q"] * head_dim, width),
        "k": (heads["k"] * head_dim, width),
        "v": (heads["k"] * head_dim, width),
    }
    sizes |= {"o": (width, heads["q"] * head_dim), "down": (width, config.intermediate_size)}
    sizes |= {"gate": (config.intermediate_size, width), "up": (config.intermediate_size, width)}
    # llama.cpp rotates neighbouring rows in this architecture, transformers the two halves of a head
    orders = {t: np.argsort(head_order(n, n * head_dim)) for t, n in heads.items()} if arch == "llama" else {}

    out = [_tensor(weights, "embed_tokens.weight", "token_embd.weight", (vocabulary, width))]
    out.append(_tensor(weights, "norm.weight", "output_norm.weight", (width,)))
    if not config.tie_word_embeddings:
        out.append(_tensor(weights, "lm_head.weight", "output.weight", (vocabulary, width)))
    if config.rope_parameters["rope_type"] == "llama3":
        factors = rope_factors(config)
        out.append(NewTensor("rope_freqs.weight", factors.shape, ggml.F32, factors.nbytes, lambda: factors))
    for number in range(config.num_hidden_layers):
        for tensor, (path, short) in LINEARS.items():
            source, target = f"layers.{number}.{path}", f"blk.{number}.{short}"
            out.append(_tensor(weights, f"{source}.weight", f"{target}.weight", sizes[tensor], orders.get(tensor)))
            if f"{source}.bias" in weights:
                if tensor not in BIASES[arch]:
                    raise ExportError(f"llama.cpp has no place for {source}.bias in a `{arch}` model")
                out.append(_tensor(weights, f"{source}.bias", f"{target}.bias", sizes[tensor][:1], orders.get(tensor)))
        for path, short in NORMS.items():
            if f"layers.{number}.{path}.weight" in weights:
                shape = (head_dim,) if path.startswith("self_attn") else (width,)
                out.append(_tensor(weights, f"layers.{number}.{path}.weight", f"blk.{number}.{short}.weight", shape))
    return out


def _tensor(
    weights: Weights, source: str, target: str, shape: tuple[int, ...], order: np.ndarray | None = None
) -> NewTensor:
    weights.place(source, shape)  # missing or misshapen tensors are found before a byte is written
    kind, dtype = (ggml.F16, np.float16) if len(shape) == 2 else (ggml.F32, np.float32)
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return NewTensor(target, shape[::-1], kind, nbytes, _reader(weights, source, shape, dtype, order))


def _reader(
    weights: Weights, source: str, shape: tuple[int, ...], dtype: Any, order: np.ndarray | None
) -> Callable[[], np.ndarray]:
    import torch

    def read() -> np.ndarray:
        values = weights.tensor(source, shape)
        values = values.half() if dtype is np.float16 else values.float()
        if not torch.isfinite(values).all():
            raise ExportError(f"{source} holds values that do not fit into {np.dtype(dtype).name}")
        array: np.ndarray = values.numpy()
        return array if order is None else array[order]

    return read


# ---------------------------------------------------------------- tokenizer


def _tokenizer(folder: Path, rows: int) -> list[bytes]:
    """The tokenizer in llama.cpp's terms; `rows` is the height of the embedding."""
    from edgeft.formats.hub import open_tokenizer_file

    loaded = open_tokenizer_file(folder)
    source = json.loads(loaded.backend_tokenizer.to_str())
    model = source["model"]
    if model["type"] != "BPE":
        raise ExportError(f"tokenizers of type {model['type']} cannot be written to GGUF", "BPE tokenizers can")
    tokens: dict[int, tuple[str, int]] = {i: (piece, NORMAL) for piece, i in model["vocab"].items()}
    for added in source["added_tokens"]:
        tokens[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
    if max(tokens) >= rows:
        raise ExportError(
            f"the tokenizer has {max(tokens) + 1} tokens, and the embedding {rows} rows",
            "resize the model's embedding to its tokenizer first",
        )
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
    return records + ([_text("tokenizer.chat_template", template)] if template else [])


def _pieces(tokens: dict[int, tuple[str, int]], rows: int) -> list[bytes]:
    """Every row of the embedding has a token, those that the tokenizer does not know a placeholder."""
    every = [tokens.get(i, (f"[PAD{i}]", UNUSED)) for i in range(rows)]
    return [
        encode_record("tokenizer.ggml.tokens", ARRAY, [piece for piece, _ in every], STRING),
        encode_record("tokenizer.ggml.token_type", ARRAY, [kind for _, kind in every], INT32),
    ]


def _byte_level(source: Any, tokens: dict[int, tuple[str, int]], merges: list[list[str]], rows: int) -> list[bytes]:
    pre = splitter_name(source)
    records = [_text("tokenizer.ggml.model", "gpt2"), _text("tokenizer.ggml.pre", pre), *_pieces(tokens, rows)]
    return [*records, encode_record("tokenizer.ggml.merges", ARRAY, [" ".join(pair) for pair in merges], STRING)]


def splitter_name(source: Any) -> str:
    """llama.cpp's name of a tokenizer.json's pre-tokenizer; only what is the same for certain."""
    found = _splitter(source)
    for name, splitter in SPLITTERS.items():
        if splitter == found:
            return name
    raise ExportError(
        f"this tokenizer splits text in a way that llama.cpp has no certain name for: "
        f"{json.dumps([source['normalizer'], source['pre_tokenizer']])[:240]}",
        f"known: {', '.join(SPLITTERS)}; export with --format hf and use llama.cpp's own converter",
    )


def _splitter(source: Any) -> Splitter | None:
    normalizer, pre = source["normalizer"], source["pre_tokenizer"] or {}
    *steps, last = pre.get("pretokenizers", [pre])
    # Qwen's NFC is the one normalizer that llama.cpp is known to leave out; text is nearly always NFC already
    if normalizer is not None and normalizer["type"] != "NFC":
        return None
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    regex, digits = "", False
    for step in steps:
        if step["type"] == "Split" and not regex and "Regex" in step["pattern"]:
            regex = step["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n")
        elif step["type"] == "Digits" and step["individual_digits"] and not regex:
            digits = True
        else:
            return None
    if bool(regex) == last.get("use_regex", True):  # split twice, or not at all
        return None
    return Splitter(regex, digits, bool(source["model"].get("ignore_merges", False)))


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
            tokens[i] = (piece, UNKNOWN)
        elif kind == NORMAL and len(piece) == 6 and piece.startswith("<0x"):
            tokens[i] = (piece, BYTE)
    last = float(-len(merges))  # single characters are where merging starts: nothing is ever joined into them
    scores = [float(-ranks[tokens[i][0]]) if i in tokens and tokens[i][0] in ranks else last for i in range(rows)]
    return [
        _text("tokenizer.ggml.model", "llama"),
        _text("tokenizer.ggml.pre", "default"),
        *_pieces(tokens, rows),
        encode_record("tokenizer.ggml.scores", ARRAY, scores, FLOAT32),
        encode_record("tokenizer.ggml.add_space_prefix", BOOL, _space_prefix(source, starts_special)),
    ]


def _space_prefix(source: Any, starts_special: bool) -> bool:
    """Whether llama.cpp must put a space before text; it does so at the start and after every special token."""
    normalizer, pre = source.get("normalizer") or {}, source.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    kinds = [step["type"] for step in steps]
    if not pre and kinds in (["Prepend", "Replace"], ["Replace"]):
        return "Prepend" in kinds
    if not steps and pre.get("type") == "Metaspace":
        # `first` has no counterpart: a space at the start only. After a leading special token there is none.
        spaced: bool = {"always": True, "never": False, "first": not starts_special}[pre["prepend_scheme"]]
        return spaced
    raise ExportError(
        f"this tokenizer treats spaces in an unknown way: {json.dumps([normalizer, pre])[:200]}",
        "export with --format hf and use llama.cpp's own converter",
    )
