"""The tuned model as a Hugging Face directory: config, safetensors and tokenizer.

Memory stays at about one shard, whatever the model's size; the folder takes its name only when it is complete.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import TokenType

from edgeft.arch import Architecture, Linear, Sizes, of_gguf
from edgeft.arch.check import read_config
from edgeft.engine.load import matrix_and_bias, norm_weight, packed, vector
from edgeft.engine.packed import Packed
from edgeft.errors import ExportError
from edgeft.export.convert import SPACE, rope_factors
from edgeft.formats.gguf import GGUF
from edgeft.formats.safetensors import DTYPES, Weights
from edgeft.formats.source import INDEX, is_gguf, resolve
from edgeft.formats.tokenizer import GgufTokenizer
from edgeft.formats.vocabulary import BYTE_LEVEL, SAME_SPLITTERS, SENTENCEPIECE, SPLITTERS
from edgeft.host.files import sync_folder, wrap_os_errors

SHARD_BYTES = 256 << 20  # tensors collected before they are written; saving takes as much again
CHUNK_ROWS = 8192  # rows of a large matrix unpacked at a time
WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
Updates = Iterable[tuple[str, torch.Tensor]]


def export_hf(source: str, updates: Updates, out: Path) -> Path:
    """`source` (a GGUF file, Hugging Face directory or hub id) with `updates` put in, as a new directory.

    `updates` go by transformers' names without `model.`, dense, rows in transformers' order. From GGUF all is float16;
    from Hugging Face every tensor keeps its type, and all that was not updated its bytes.
    """
    with new_folder(Path(out)) as folder:
        if is_gguf(source):
            _from_gguf(Path(source), updates, folder)
        else:
            _from_hf(source, updates, folder)
    return Path(out)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill; at the end it is renamed to `out`, or removed if something went wrong."""
    if (out.exists() and not out.is_dir()) or (out.is_dir() and any(out.iterdir())):
        raise ExportError(f"{out} already exists", "choose a new folder with -o, or remove this one first")
    temporary = out.with_name(out.name + ".part")
    try:
        with wrap_os_errors(out):
            if temporary.exists():  # left by a power failure
                shutil.rmtree(temporary)
            temporary.mkdir(parents=True)
        with wrap_os_errors(out):
            yield temporary
            for file in temporary.iterdir():
                with file.open("rb+") as stream:
                    os.fsync(stream.fileno())
            if out.exists():
                out.rmdir()  # empty, see above
            temporary.rename(out)
            sync_folder(out.parent)
    except BaseException:
        with suppress(OSError):
            shutil.rmtree(temporary)
        raise


def _checked(name: str, values: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(values).all():
        raise ExportError(f"{name} is not finite in {values.dtype}", "training diverged, or the base did")
    return values


def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """One safetensors file; a full disk is an OSError, as everywhere else."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = errno.ENOSPC if f"os error {errno.ENOSPC}" in str(error) else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error


class Shards:
    """safetensors files of bounded size, and the index of their tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pending: dict[str, torch.Tensor] = {}
        self.map: dict[str, str] = {}
        self.files: list[str] = []
        self.bytes = 0

    def add(self, name: str, values: torch.Tensor) -> None:
        size = sum(t.nbytes for t in self.pending.values())
        if self.pending and size + values.nbytes > SHARD_BYTES:
            self.flush()
        self.pending[name] = _checked(name, values).contiguous()
        self.bytes += values.nbytes

    def flush(self) -> None:
        if self.pending:
            file = f"{len(self.files)}.part"
            save(self.pending, self.folder / file)
            self.map |= dict.fromkeys(self.pending, file)
            self.files.append(file)
            self.pending = {}

    def close(self) -> None:
        """Rename the files to what transformers reads."""
        self.flush()
        count = len(self.files)
        if count == 1:
            (self.folder / self.files[0]).rename(self.folder / "model.safetensors")
            return
        names = {old: f"model-{n:05d}-of-{count:05d}.safetensors" for n, old in enumerate(self.files, 1)}
        for old, new in names.items():
            (self.folder / old).rename(self.folder / new)
        _write_index(self.folder, self.bytes, {name: names[old] for name, old in self.map.items()})


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_index(folder: Path, size: int, files: dict[str, str]) -> None:
    _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))})


def _from_gguf(source: Path, updates: Updates, folder: Path) -> None:
    gguf = GGUF.open(source)
    arch = of_gguf(gguf)
    config = arch.config(gguf)
    sizes = arch.sizes(config)
    _tokenizer_files(gguf, config, folder)  # before the weights: it fails sooner
    shards = Shards(folder)
    done: set[str] = set()

    def stored(number: str, linear: Linear) -> torch.Tensor:
        return packed(gguf, f"blk.{number}.{linear.gguf}.weight").copy()

    for name, values in _whole_tensors(updates, arch, sizes, stored):
        shards.add(f"model.{name}", values.half())
        done.add(name)
    for number in range(sizes.depth):
        for tensor, linear in arch.linears.items():
            name = f"layers.{number}.{linear.stored}"
            if linear.shared:
                matrix, bias = packed(gguf, f"blk.{number}.{linear.gguf}.weight"), None
                if linear.rows(sizes).start:
                    continue  # written with its first rows
            else:
                matrix, bias = matrix_and_bias(gguf, number, tensor, arch, sizes)
            if f"{name}.weight" not in done:
                shards.add(f"model.{name}.weight", _half(matrix))
            if bias is not None and f"{name}.bias" not in done:
                done.add(f"{name}.bias")
                shards.add(f"model.{name}.bias", bias.half())
        for norm in arch.norms:
            weight = norm_weight(gguf, f"blk.{number}.", norm)
            if weight is not None and f"layers.{number}.{norm.path}.weight" not in done:
                shards.add(f"model.layers.{number}.{norm.path}.weight", weight.half())
    last = norm_weight(gguf, "", arch.final_norm)
    assert last is not None  # checked with the header
    shards.add("model.norm.weight", last.half())
    shards.add("model.embed_tokens.weight", _half(packed(gguf, "token_embd.weight")))
    if "output.weight" in gguf.tensors:
        shards.add("lm_head.weight", _half(packed(gguf, "output.weight")))
    flags, missing = arch.missing_biases(done, sizes.depth)
    config.update(flags)
    for name in missing:
        rows = gguf.tensors[arch.gguf_name(name)[0].removesuffix("bias") + "weight"].shape[1]
        shards.add(f"model.{name}", torch.zeros(rows, dtype=torch.float16))
    shards.close()
    _save_config(gguf, arch, config, folder)


def _whole_tensors(
    updates: Updates, arch: Architecture, sizes: Sizes, stored: Callable[[str, Linear], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same updates; those of linears that share a tensor as one, with its other rows. stored: what it was before,
    by block and linear."""
    whole: dict[str, torch.Tensor] = {}  # one at a time: updates come block by block
    for name, values in updates:
        number = name.split(".")[1]
        shared = {f"layers.{number}.{one.path}.weight": one for one in arch.linears.values() if one.shared}
        linear = shared.get(name)
        target = "" if linear is None else f"layers.{number}.{linear.stored}.weight"
        if whole and target not in whole:
            yield whole.popitem()
        if linear is None:
            yield name, values
            continue
        if not whole:
            whole[target] = stored(number, linear).float()
        whole[target][linear.rows(sizes)] = values.detach().float()
    yield from whole.items()


def _half(matrix: Packed) -> torch.Tensor:
    out = torch.empty(matrix.rows, matrix.cols, dtype=torch.float16)
    for start in range(0, matrix.rows, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, matrix.rows)
        out[start:stop] = matrix.part(start, stop).dense()
    return out


def _save_config(gguf: GGUF, arch: Architecture, config: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    factors = vector(gguf, "rope_freqs.weight")
    if factors is not None:
        # the file holds each frequency's divisor; LLaMA 3 to 3.3 all come from these three numbers
        config.rope_parameters = {
            **config.rope_parameters,
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if not np.allclose(rope_factors(config, arch.sizes(config).head), factors.numpy(), rtol=1e-3):
            raise ExportError(f"{gguf.path.name} scales its rotary frequencies in an unknown way", "use --format gguf")
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # the file has it as float32
    config.architectures = [arch.model_class]
    config.dtype = "float16"
    config.pad_token_id = gguf.get_key("tokenizer.ggml.padding_token_id")
    config.save_pretrained(str(folder))
    GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(str(folder))


def _tokenizer_files(gguf: GGUF, config: Any, folder: Path) -> None:
    """tokenizer.json, built from the file's keys so that its ids are llama.cpp's.

    (transformers' own reading of GGUF tokenizers knows no tokenizer.ggml.pre, and loses BOS and the space before text.)
    """
    from tokenizers import AddedToken, Tokenizer, processors

    kind = gguf.get_key("tokenizer.ggml.model")
    tokens, types = gguf.get_key("tokenizer.ggml.tokens", []), gguf.get_key("tokenizer.ggml.token_type", [])
    types = types or [TokenType.NORMAL] * len(tokens)
    while types and types[-1] == TokenType.UNUSED:  # placeholders for rows of the embedding that have no token
        types.pop()
    tokens = tokens[: len(types)]
    made: Tokenizer
    if kind == BYTE_LEVEL:
        made = _byte_level(gguf, tokens)
    elif kind == SENTENCEPIECE:
        made = _sentencepiece(gguf, tokens, types)
    else:
        raise ExportError(f"tokenizers of kind `{kind}` cannot be written for Hugging Face", "use --format gguf")
    pairs = list(zip(tokens, types, strict=True))
    special = [text for text, kind in pairs if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    own = [text for text, kind in pairs if kind == TokenType.USER_DEFINED]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in own])
    read = GgufTokenizer(gguf.path)
    if read.add_bos:
        bos = tokens[read.bos]
        made.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, read.bos)]
        )
    made.save(str(folder / "tokenizer.json"))
    _tokenizer_settings(gguf, read, tokens, config.max_position_embeddings, folder)


def _tokenizer_settings(gguf: GGUF, read: GgufTokenizer, tokens: list[str], longest: int, folder: Path) -> None:
    named = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = gguf.get_key(f"tokenizer.ggml.{key}_token_id")
        if token is not None and 0 <= token < len(tokens):
            named[f"{role}_token"] = tokens[token]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # tokenizer.json as it is, in every version of transformers
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": read.add_bos,
        **named,
    }
    if read.has_template:
        settings["chat_template"] = read.template
    _write_json(folder / "tokenizer_config.json", settings)


def _byte_level(gguf: GGUF, tokens: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = gguf.get_key("tokenizer.ggml.pre", "")
    splitter = SPLITTERS.get(SAME_SPLITTERS.get(pre, pre))
    if splitter is None:
        hint = f"known: {', '.join(SPLITTERS)}; use --format gguf"
        raise ExportError(f"how `{pre}` splits text is not known for Hugging Face", hint)
    # a piece may begin with a space, hence the search from 1
    cuts = [(merge, merge.index(" ", 1)) for merge in gguf.get_key("tokenizer.ggml.merges", [])]
    merges = [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]
    vocabulary = {text: number for number, text in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitter.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitter.digits else []
    if splitter.regex:
        steps.append(pre_tokenizers.Split(Regex(splitter.regex), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splitter.regex))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(gguf: GGUF, tokens: list[str], types: list[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = gguf.get_key("tokenizer.ggml.scores", [])
    if len(scores) < len(tokens):
        raise ExportError(f"{gguf.path.name} has no scores for its tokens", "use --format gguf")
    vocabulary = {text: number for number, text in enumerate(tokens)}
    merges = []
    for number, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind not in (TokenType.NORMAL, TokenType.USER_DEFINED):
            continue
        for cut in range(1, len(text)):
            left, right = vocabulary.get(text[:cut]), vocabulary.get(text[cut:])
            if left is not None and right is not None:
                merges.append((-scores[number], number, left, right))
    merges.sort()  # the pair that makes the piece with the best score is joined first
    unknown = gguf.get_key("tokenizer.ggml.unknown_token_id", 0)
    pairs = [(tokens[left], tokens[right]) for _, _, left, right in merges]
    made = Tokenizer(models.BPE(vocabulary, pairs, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    prefix = bool(gguf.get_key("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", SPACE)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace] if prefix else [replace])
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return made


def _from_hf(source: str, updates: Updates, folder: Path) -> None:
    origin = resolve(source)
    arch, config = read_config(origin)
    weights = Weights(origin, arch.renamed)
    for file in origin.iterdir():
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(WEIGHT_ENDINGS):
            shutil.copyfile(file, folder / file.name)
    for file in weights.files:
        shutil.copyfile(file, folder / file.name)
    new: dict[str, torch.Tensor] = {}
    sizes = arch.sizes(config)

    def stored(number: str, linear: Linear) -> torch.Tensor:
        name = f"layers.{number}.{linear.stored}.weight"
        return weights.tensor(name, arch.stored_shapes(sizes)[linear.gguf])

    for name, values in _whole_tensors(updates, arch, sizes, stored):
        place = weights.places.get(name)
        if place is None and name.endswith(".bias"):  # a bias that the base does not have
            new[name] = values.to(DTYPES[weights.places[name.removesuffix("bias") + "weight"].dtype][0])
            continue
        place = weights.place(name, tuple(values.shape))
        cast = _checked(name, values.detach().to(DTYPES[place.dtype][0])).contiguous()
        with (folder / place.file.name).open("r+b") as stream:
            stream.seek(place.offset)
            stream.write(cast.view(torch.uint8).numpy().tobytes())
    if new:
        _add_biases(weights, arch, config.num_hidden_layers, new, folder)


def _add_biases(weights: Weights, arch: Architecture, depth: int, new: dict[str, torch.Tensor], folder: Path) -> None:
    """Biases that the base does not have: a shard of their own, and a config that declares them."""
    present = {name for name in weights.places if name.endswith(".bias")}
    flags, missing = arch.missing_biases(present | set(new), depth)
    for name in missing:
        place = weights.places[name.removesuffix("bias") + "weight"]
        new[name] = torch.zeros(place.shape[0], dtype=DTYPES[place.dtype][0])
    values = json.loads((folder / "config.json").read_text("utf-8"))
    if values["model_type"] != arch.model_types[0]:  # the same blocks (Mistral), under a type that can have biases
        values |= {"model_type": arch.model_types[0], "architectures": [arch.model_class]}
    _write_json(folder / "config.json", values | flags)

    files = [file.name for file in weights.files]
    if files == ["model.safetensors"]:  # transformers would look no further than a file of this name
        files = ["model-00001-of-00002.safetensors"]
        (folder / "model.safetensors").rename(folder / files[0])
        extra = "model-00002-of-00002.safetensors"
    else:
        extra = "model-biases.safetensors"
    named = {weights.prefix + name: _checked(name, tensor) for name, tensor in new.items()}
    save(named, folder / extra)
    old = {name: files[0] if len(files) == 1 else place.file.name for name, place in weights.stored.items()}
    total = sum(place.nbytes for place in weights.stored.values()) + sum(t.nbytes for t in named.values())
    _write_index(folder, total, old | dict.fromkeys(named, extra))
