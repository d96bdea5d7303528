"""Hugging Face directories: loaded, written from GGUF and turned into it, against transformers and llama.cpp."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeft import arch
from edgeft.config import UpdateConfig
from edgeft.data.tree import Tree
from edgeft.engine import kernels
from edgeft.engine.load import load, load_hf
from edgeft.engine.stack import Batch, Stack
from edgeft.errors import EdgeftError, ExportError, ModelError
from edgeft.evaluate.llamacpp import LlamaFile
from edgeft.export import hf
from edgeft.export.convert import hf_to_gguf
from edgeft.export.hf import export_hf
from edgeft.export.peft import export_peft
from edgeft.formats import vocabulary
from edgeft.formats.gguf import GGUF
from edgeft.formats.safetensors import Weights
from edgeft.formats.tokenizer import GgufTokenizer, HfTokenizer, render
from edgeft.methods import scheme as schemes
from edgeft.methods.base import weight_of
from tests.support.models import random_hf, reference

TEXTS = [
    "Hello world",
    "  two  spaces\n\n\tTab 12345 1,000,000 don't I'LL",
    "Grüße, naïve café — “quotes” … ñ",
    "日本語のテキスト 中文 русский العربية",
    "😀🎉👩\u200d👩\u200d👧 \u200b\u00a0x ﬁ ½ Ⅳ e\u0301",
    "def f(x):\n    return x**2  # ok\n\n\n",
    "<|im_start|>user\nHi<|im_end|>\n",
    "",
    " ",
    " a",
    "a ",
    "x\r\ny\u3000z  ",
]
MESSAGES = [{"role": "user", "content": "Where do 12 keys hang?"}, {"role": "assistant", "content": "In the  hall."}]
IDS = [1, 4093, 198, 19556, 28, 638, 359, 346, 47, 2, 198, 504, 4052, 6920, 253, 1245, 45000, 49000, 17, 33]


def batch(ids: list[int]) -> Batch:
    n = len(ids)
    return Batch(
        torch.tensor(ids),
        torch.arange(n),
        Tree.chain(n),
        torch.arange(n - 1),
        torch.tensor(ids[1:]),
    )


def near(got: Any, want: Any) -> float:
    """Largest difference, relative to the largest value."""
    got, want = torch.as_tensor(got).double(), torch.as_tensor(want).double()
    return float((got - want).abs().max() / want.abs().max())


def logits_of(model: Any, ids: list[int] = IDS) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0, :-1]
    return logits


def in_llamacpp(path: Path, ids: list[int] = IDS) -> np.ndarray:
    with LlamaFile(path, n_ctx=64, threads=2) as file:
        return np.asarray(file.target_logits(ids, list(range(len(ids) - 1))))


# ---------------------------------------------------------------- the embedded model


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as a Hugging Face directory, float16, in two shards."""
    return export_hf(str(model), [], tmp_path_factory.mktemp("hf") / "smollm2")


@pytest.fixture(scope="module")
def tokenizer_files(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the directory above has of a tokenizer, without its weights."""
    target = tmp_path_factory.mktemp("tokenizer")
    file = GGUF.open(model)
    hf._tokenizer_files(file, arch.of_gguf(file).config(file), target)
    return target


@pytest.fixture(scope="module")
def original(model: Path) -> torch.Tensor:
    return load(model).logits(batch(IDS))


@pytest.mark.slow
def test_from_gguf_is_complete_and_sharded(folder: Path) -> None:
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", hf.INDEX} <= names
    assert not [name for name in names if name.endswith(".part")]
    shards = list(folder.glob("*.safetensors"))
    assert len(shards) == 2
    assert all(file.stat().st_size < hf.SHARD_BYTES + (1 << 20) for file in shards)


@pytest.mark.slow
def test_dense_logits_are_those_of_the_gguf_and_of_transformers(folder: Path, original: torch.Tensor) -> None:
    stack = load_hf(str(folder), "dense")
    logits = stack.logits(batch(IDS))
    assert near(logits, original) < 5e-3  # float16 against the packed file's values
    assert near(logits, logits_of(reference(folder))) < 1e-5
    assert stack.arch.name == "llama"
    assert stack.depth == 30


@pytest.mark.slow
@pytest.mark.parametrize(("frozen", "worse"), [("nf4", 0.5), ("int8", 0.05)])
def test_packed_models_read_text_nearly_as_well(folder: Path, model: Path, frozen: str, worse: float) -> None:
    """In nats per token; that the packing is transformers' own is for the small models below."""
    stack = load_hf(str(folder), frozen)
    text = (Path(__file__).parent.parent / "edgeft" / "demo" / "README.md").read_text(encoding="utf-8")
    data = batch(GgufTokenizer(model).encode(text)[:100])
    loss = [torch.nn.functional.cross_entropy(s.logits(data), data.targets).item() for s in (stack, load(model))]
    assert 0 < abs(loss[0] - loss[1]) < worse, loss
    assert all(p.dtype != torch.float32 or p.ndim == 1 for p in stack.model.parameters())  # nothing dense is left


def test_tokenizer_ids_are_llamacpps(tokenizer_files: Path, model: Path) -> None:
    ours, theirs = HfTokenizer(tokenizer_files), GgufTokenizer(model)
    assert ours.template == theirs.template
    assert ours.has_template
    for text in [*TEXTS, render(theirs, MESSAGES, False), render(theirs, MESSAGES[:1], True)]:
        assert ours.encode(text) == theirs.encode(text), text
    assert (ours.eos_text, ours.bos_text) == (theirs.eos_text, theirs.bos_text)


@pytest.mark.slow
def test_there_and_back_runs_in_llamacpp(folder: Path, model: Path, tmp_path: Path) -> None:
    back = hf_to_gguf(str(folder), tmp_path / "back.gguf")
    assert [file.name for file in tmp_path.iterdir()] == ["back.gguf"]
    # llama.cpp rounds activations to 8 bits where weights are packed, and does not where they are float16
    got, want = in_llamacpp(back), in_llamacpp(model)
    assert (got.argmax(1) == want.argmax(1)).mean() >= 0.9
    assert near(got, want) < 0.05
    assert near(load(back).logits(batch(IDS)), load_hf(str(folder), "dense").logits(batch(IDS))) < 1e-5
    before, after = GgufTokenizer(model), GgufTokenizer(back)
    for text in [*TEXTS, render(before, MESSAGES, False)]:
        assert after.encode(text) == before.encode(text), text
    assert (after.template, after.eog, after.add_bos) == (before.template, before.eog, before.add_bos)
    kept = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type", "tokenizer.ggml.pre")
    files = GGUF.open(model), GGUF.open(back)
    assert all(files[0].get_key(key) == files[1].get_key(key) for key in kept)


def grads_of(stack: Stack, trained: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    data = batch(IDS)
    with torch.no_grad():
        hidden = stack.embed(data.tokens)
    stack.head.loss(stack.top(hidden, data, 0), data.targets).backward()
    return {name: p.grad for name, p in trained.items() if p.grad is not None}


def plain_grads(model: Any, names: list[str]) -> dict[str, torch.Tensor]:
    """Plain autograd through all of transformers' model."""
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    for name in names:
        parameters[f"model.{name}"].requires_grad_(True)
    logits = model(torch.tensor([IDS])).logits[0, :-1]
    torch.nn.functional.cross_entropy(logits, torch.tensor(IDS[1:]), reduction="sum").backward()
    return {name: parameters[f"model.{name}"].grad for name in names}


@pytest.mark.slow
def test_gguf_gradients_are_plain_autograds(model: Path) -> None:
    """Against the model that transformers itself dequantises from the same file."""
    stack = load(model)
    scheme = schemes.make(UpdateConfig(blocks=[2, 20], norms=True), stack.depth, stack.arch)
    got = grads_of(stack, schemes.apply(stack, scheme, 0))
    # in float64: plain autograd in float32 is itself 1e-4 away from it here, through 30 blocks
    want = plain_grads(reference(model.parent, gguf_file=model.name).double(), list(got))
    assert len(got) == 2 * (7 + 2)
    worst = max(near(got[name], want[name]) for name in got)
    assert worst < 1e-4, worst


@pytest.mark.slow
@pytest.mark.parametrize("method", [{"method": "lora", "rank": 4, "alpha": 8.0}, {"low_rank": 4}])
def test_adapter_loads_in_peft(method: dict[str, Any], model: Path, folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    stack = load_hf(str(folder), "dense")
    update = UpdateConfig(blocks=[3, 20], tensors=["q", "v", "down"], **method)
    scheme = schemes.make(update, stack.depth, stack.arch)
    with torch.no_grad():
        for number, parameter in enumerate(schemes.apply(stack, scheme, 0).values()):
            torch.manual_seed(number)
            parameter.add_(torch.randn_like(parameter) * 0.02)  # B starts at zero, and would change nothing
    base = reference(folder)
    plain = logits_of(base)
    adapted = PeftModel.from_pretrained(base, str(export_peft(stack, scheme, str(folder), tmp_path / "adapter")))
    ours = stack.logits(batch(IDS))
    assert near(ours, plain) > 1e-3
    assert near(logits_of(adapted), ours) < 1e-5

    merged = reference(export_hf(str(folder), schemes.updated(stack, scheme), tmp_path / "merged"))
    assert near(logits_of(merged), ours) < 5e-3  # float16
    again = reference(export_hf(str(model), schemes.updated(stack, scheme), tmp_path / "again"))
    assert near(logits_of(again), ours) < 5e-3


# ---------------------------------------------------------------- small models of every kind

COMMON: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192}, "head_dim": 32}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-yarn": (
        "Qwen2",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


@pytest.fixture(scope="module")
def small(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random model of the kind named, with norms and biases that are not their usual ones and zeros."""
    made: dict[str, Path] = {}
    parent = tmp_path_factory.mktemp("small")

    def make(kind: str) -> Path:
        if kind in made:
            return made[kind]
        family, options = KINDS[kind]
        # float16 values, so that a GGUF file in float16 holds the very same ones
        path = random_hf(parent / kind, family, half=True, **{**COMMON, **options})
        made[kind] = _with_tokenizer(tokenizer_files, path)
        return made[kind]

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_agrees_with_transformers_and_llamacpp(
    small: Callable[[str], Path], kind: str, tmp_path: Path
) -> None:
    path = small(kind)
    assert (path / hf.INDEX).is_file()  # sharded
    want = logits_of(reference(path))
    dense = load_hf(str(path), "dense")
    assert near(dense.logits(batch(IDS)), want) < 1e-5
    assert dense.arch.name == {"Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}[KINDS[kind][0]]
    file = hf_to_gguf(str(path), tmp_path / "small.gguf")
    assert near(load(file).logits(batch(IDS)), want) < 1e-4
    lean = load(file, lean=True)
    lean.configure(backend=kernels.load())
    assert lean.options.backend.able(lean.config.head_dim, "silu")
    assert near(lean.logits(batch(IDS)), want) < 1e-4
    assert near(in_llamacpp(file), want) < 5e-3  # its attention cache is float16
    back = export_hf(str(file), [], tmp_path / "back")
    assert near(logits_of(reference(back)), want) < 1e-3  # norms and biases go from float32 to float16


@pytest.mark.parametrize("frozen", ["nf4", "int8", "dense"])
@pytest.mark.parametrize("kind", ["llama3", "qwen2"])
def test_gradients_are_plain_autograds(small: Callable[[str], Path], kind: str, frozen: str) -> None:
    """Trained: block 1's attention and block 0's norms; the gradient passes through every packed linear of block 1."""
    from transformers import BitsAndBytesConfig

    path = small(kind)
    if frozen == "nf4":  # transformers' own packing, and its own way back
        packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        model = reference(path, quantization_config=packing).dequantize()
    else:
        model = reference(path)
    if frozen == "int8":
        stack = load_hf(str(path), frozen)
        for number, block in enumerate(model.model.layers):
            for name, module in block.named_modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight = torch.nn.Parameter(weight_of(stack.layers[number].get_submodule(name)))
    stack = load_hf(str(path), frozen)
    assert near(stack.logits(batch(IDS)), logits_of(model)) < 1e-5
    update = UpdateConfig(blocks="all", tensors=["q", "v"], biases=True, norms=True, weights=False)
    scheme = schemes.make(update, stack.depth, stack.arch)
    got = grads_of(stack, schemes.apply(stack, scheme, 0))
    for number in range(2):  # biases that LLaMA has not stand at zero
        for linear in ("q_proj", "v_proj"):
            module = getattr(model.model.layers[number].self_attn, linear)
            if module.bias is None:
                module.bias = torch.nn.Parameter(torch.zeros(module.out_features))
    want = plain_grads(model.float(), list(got))
    assert len(got) == 2 * 2 + 2 * 2
    worst = max(near(got[name], want[name]) for name in got)
    assert worst < 1e-4, worst


def test_int8_weights_are_bitsandbytes(small: Callable[[str], Path]) -> None:
    """Close to what was packed: half a step of a row's largest value over 127."""
    stack = load_hf(str(small("qwen2")), "int8")
    weights = Weights(small("qwen2"))
    dense = weights.tensor("layers.1.mlp.up_proj.weight", (128, 64)).float()
    error = (weight_of(stack.linear(1, "up")) - dense).abs().amax(1)
    assert (error <= dense.abs().amax(1) / 127 * 0.51).all()
    assert error.max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama3", "mistral"])
def test_new_biases_reach_transformers(small: Callable[[str], Path], kind: str, tmp_path: Path) -> None:
    """LLaMA has no biases; a run that trained some exports a config that has them, from both kinds of source."""
    path = small(kind)
    single = tmp_path / "single"  # one file instead of shards
    model = reference(path, dtype=torch.float16)
    model.save_pretrained(single)
    file = hf_to_gguf(str(_with_tokenizer(path, single)), tmp_path / "small.gguf")
    for number, place in enumerate((path, single, file)):
        stack = load(str(place), "dense")
        update = UpdateConfig(blocks=[1], tensors=["k", "up"], biases=True, norms=True)
        scheme = schemes.make(update, stack.depth, stack.arch)
        with torch.no_grad():
            for parameter in schemes.apply(stack, scheme, 0).values():
                torch.manual_seed(parameter.numel())
                parameter.add_(torch.randn_like(parameter) * 0.1)
        out = export_hf(str(place), schemes.updated(stack, scheme), tmp_path / f"out{number}")
        changed = reference(out)
        assert changed.config.attention_bias
        assert changed.config.mlp_bias
        assert near(logits_of(changed), stack.logits(batch(IDS))) < 2e-3
        assert near(load_hf(str(out), "dense").logits(batch(IDS)), stack.logits(batch(IDS))) < 2e-3


def _with_tokenizer(source: Path, target: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, target / name)
    return target


def test_what_was_not_updated_keeps_its_bytes(small: Callable[[str], Path], tmp_path: Path) -> None:
    path = small("qwen2")
    changed = "layers.1.mlp.up_proj.weight"
    out = export_hf(str(path), [(changed, torch.ones(128, 64))], tmp_path / "out")
    before, after = Weights(path), Weights(out)
    assert before.places.keys() == after.places.keys()
    for name, place in before.places.items():
        same = torch.equal(before.tensor(name, place.shape), after.tensor(name, place.shape))
        assert same == (name != changed), name
    assert (after.tensor(changed, (128, 64)) == 1).all()


# ---------------------------------------------------------------- tokenizers


def _sentencepiece(tmp_path: Path) -> Path:
    """A small SentencePiece-like tokenizer as LLaMA 2 has it, by hand."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("\u2581", "he"),
        ("ll", "o"),
        ("\u2581he", "llo"),
        ("\u2581", "\u2581"),
        ("o", "w"),
    ]
    pieces += sorted({c for pair in merges for part in pair for c in part}) + [a + b for a, b in merges]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    space = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in pieces[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", **names}), encoding="utf-8"
    )
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}", encoding="utf-8")
    return tmp_path


def test_sentencepiece_there_and_back(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path / "spm"
    LlamaForCausalLM(LlamaConfig(**{**COMMON, "vocab_size": 280, "bos_token_id": 1})).save_pretrained(path)
    ours = Tokenizer.from_file(str(_sentencepiece(path) / "tokenizer.json"))  # the file is what counts, not the class
    file = hf_to_gguf(str(path), tmp_path / "spm.gguf")
    theirs = GgufTokenizer(file)
    back = HfTokenizer(export_hf(str(file), [], tmp_path / "back"))
    assert theirs.add_bos
    assert theirs.vocab_size == 280
    assert theirs.template == back.template == "{{ bos_token }}{{ messages[0]['content'] }}"
    for text in ["hello", " hello", "hello  hello", "low héllo</s>hello", "<s>hell ow", "ohe\n\tllo", "日本"]:
        want = ours.encode(text.removeprefix("<s>")).ids
        assert want[0] == 1, text
        assert theirs.encode(text) == want, text
        assert back.encode(text) == want, text


def test_pre_tokenizers_are_recognised_for_certain_only() -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    def name(steps: list[Any], **options: Any) -> str:
        tokenizer = Tokenizer(models.BPE({"a": 0}, [], **options))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return vocabulary.splitter_name(json.loads(tokenizer.to_str()))

    def split(regex: str) -> list[Any]:
        cut = pre_tokenizers.Split(Regex(regex), "isolated")
        return [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert name([gpt2]) == "gpt-2"
    assert name([pre_tokenizers.Digits(individual_digits=True), gpt2]) == "smollm"
    assert name(split(vocabulary.LLAMA3_REGEX), ignore_merges=True) == "llama-bpe"
    assert name(split(vocabulary.QWEN2_REGEX)) == "qwen2"
    assert name(split(vocabulary.TEKKEN_REGEX), ignore_merges=True) == "tekken"
    unknown: list[list[Any]] = [
        split(r"\p{L}+|\s+"),
        [pre_tokenizers.Digits(individual_digits=False), gpt2],
        [pre_tokenizers.ByteLevel(add_prefix_space=True)],
        [pre_tokenizers.Whitespace()],
        [*split(vocabulary.QWEN2_REGEX)[:1], gpt2],
    ]
    for steps in unknown:
        with pytest.raises(ExportError, match="no known name"):
            name(steps)


# ---------------------------------------------------------------- what goes wrong


def _broken(path: Path, change: Callable[[Path], object], tmp_path: Path) -> str:
    target = tmp_path / "broken"
    shutil.copytree(path, target)
    change(target)
    return str(target)


def _config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | values), encoding="utf-8")

    return change


def _cut(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:5000])


def _no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def _pickle(folder: Path) -> None:
    _no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
    "other type": (_config(model_type="gpt_neox"), "`gpt_neox`, which is not supported"),
    "own code": (_config(model_type="mine", auto_map={"AutoConfig": "mine.Config"}), "not supported"),
    "quantised": (_config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised already"),
    "rope": (_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "`dynamic`"),
    "other size": (_config(intermediate_size=96), "as config.json says"),
    "more blocks": (_config(num_hidden_layers=3, layer_types=["full_attention"] * 3), "lacks the tensor layers.2"),
    "cut": (_cut, "damaged or cut short"),
    "shard gone": (lambda f: sorted(f.glob("*.safetensors"))[0].unlink(), "cannot read"),
    "index broken": (lambda f: (f / hf.INDEX).write_text("[]"), "cannot be read"),
    "index leaves": (lambda f: (f / hf.INDEX).write_text('{"weight_map": {"a": "../b"}}'), "outside its folder"),
    "pickles": (_pickle, "only as pickles"),
    "no weights": (_no_weights, "no model.safetensors"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders(small: Callable[[str], Path], case: str, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    with pytest.raises(ModelError, match=message) as caught:
        load_hf(_broken(small("qwen2"), change, tmp_path), "dense")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c", "nothing"])
def test_missing_folders(name: str) -> None:
    with pytest.raises(ModelError, match="there is no model folder"):
        load_hf(name, "auto")


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="cannot download nobody/nothing-at-all from the hub") as caught:
        load_hf("nobody/nothing-at-all", "auto")
    assert "network" in caught.value.hint


def test_targets_are_never_overwritten(small: Callable[[str], Path], tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    with pytest.raises(ExportError, match="already exists"):
        export_hf(str(small("qwen2")), [], taken)
    assert [file.name for file in taken.iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    export_hf(str(small("qwen2")), [], tmp_path / "empty")


def test_nothing_half_written(small: Callable[[str], Path], tmp_path: Path) -> None:
    broken = [("layers.0.mlp.up_proj.weight", torch.full((128, 64), float("nan")))]
    with pytest.raises(ExportError, match="not finite"):
        export_hf(str(small("qwen2")), broken, tmp_path / "out")
    target = _broken(
        small("llama3"),
        _config(rope_parameters={**KINDS["qwen2-yarn"][1]["rope_parameters"], "beta_fast": 8}),
        tmp_path,
    )
    with pytest.raises(EdgeftError, match="beta_fast"):
        hf_to_gguf(target, tmp_path / "out.gguf")
    assert [file.name for file in tmp_path.iterdir()] == ["broken"]


def test_sparse_runs_have_no_adapter(small: Callable[[str], Path], tmp_path: Path) -> None:
    stack = load_hf(str(small("qwen2")), "dense")
    with pytest.raises(ExportError, match="only low-rank") as caught:
        export_peft(stack, schemes.make(UpdateConfig(blocks=1), 2, arch.get("qwen2")), "base", tmp_path / "out")
    assert "--format gguf" in caught.value.hint
    mixed = schemes.make(UpdateConfig(method="lora", blocks=1, norms=True), 2, arch.get("qwen2"))
    with pytest.raises(ExportError, match="norms"):
        export_peft(stack, mixed, "base", tmp_path / "out")
