"""Recipe and Device: every knob, declared once as a dataclass field with its explanation.

Reading is strict: an unknown key, a wrong type or an impossible value is a ConfigError that names the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from edgeft.errors import ConfigError

MAX_YAML_BYTES = 256 << 10  # read in some seconds even on a slow board
TENSORS = ("q", "k", "v", "o", "gate", "up", "down")
CHANNELS = (1.0, 0.5, 0.25, 0.125)


def knob(
    default: Any,
    about: str,
    *,
    choices: tuple[Any, ...] = (),
    low: float | None = None,
    high: float | None = None,
    check: Callable[[Any], Any] | None = None,
) -> Any:
    """A dataclass field with its explanation and its limits (both ends included); check: raises ValueError."""
    metadata = {"about": about, "choices": choices, "low": low, "high": high, "check": check}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelConfig:
    path: str | None = knob(None, "GGUF file, Hugging Face directory or hub id; none = the embedded model")
    frozen: str = knob(
        "auto",
        "how frozen weights sit in memory; auto: a GGUF file's own packing, nf4 for Hugging Face weights",
        choices=("auto", "dense", "nf4", "int8"),
    )


@dataclass
class DataConfig:
    path: str | None = knob(None, "file, folder or hub id with the rows; none = the embedded handbook")
    heldout: str | None = knob(None, "file with held-out rows; none = found beside the data, or split off by hash")
    heldout_share: float = knob(0.1, "share of the rows split off when no held-out file is given", low=0.0, high=0.9)
    heldout_rows: int = knob(200, "at most so many held-out rows are used for validation", low=1)
    rows: int | None = knob(None, "use only the first so many training rows", low=1)
    max_tokens: int = knob(384, "longest row in tokens; the context is cut, never the answer", low=16, high=131072)
    system: str | None = knob(None, "system message; none = what the model's template says")


@dataclass
class PartConfig:
    """One entry of `update.parts`."""

    blocks: Any = knob(None, "as update.blocks")
    tensors: list[str] = knob(list(TENSORS), "linear tensors of these blocks", choices=TENSORS)
    channels: float = knob(
        1.0, "as update.channels; 0: their weights stay as they are, for biases alone", choices=(0.0, *CHANNELS)
    )
    biases: bool = knob(False, "add and train biases of these tensors")
    norms: bool = knob(False, "train the RMSNorm weights of these blocks")


@dataclass
class UpdateConfig:
    method: str = knob(
        "sparse",
        "sparse: the chosen tensors themselves; lora: PEFT adapters on them; tinytl: lite residual branches beside "
        "them; qas: the chosen tensors, as int8 with a scale for each row",
        choices=("sparse", "lora", "tinytl", "qas"),
    )
    blocks: Any = knob(
        "10%-67%",
        "6 = top six; '11-19'; [3, 7]; '10%-67%' of the depth; 'all'; 'auto': blocks, tensors, channels and biases "
        "found from some of the rows before training, at no more cost than '10%-67%' has; that itself, where training "
        "is shorter than the search",
    )
    tensors: list[str] = knob(list(TENSORS), "linear tensors of these blocks", choices=TENSORS)
    channels: float = knob(
        1.0, "share of each weight's input channels that is trained; no gradient of the others", choices=CHANNELS
    )
    choose: str = knob(
        "gradient",
        "which channels: gradient: those with the largest gradients, by a backward pass over a few rows before "
        "training; weight: with the largest weights; first: the first ones",
        choices=("gradient", "weight", "first"),
    )
    parts: list[PartConfig] = knob(
        [],
        "a list of {blocks, tensors, channels, biases, norms}, in place of the single ones above and below; a later "
        "entry counts where two name the same tensor of a block",
    )
    biases: bool = knob(
        False, "add and train biases of the chosen tensors, where the architecture has a place for them"
    )
    norms: bool = knob(False, "train the RMSNorm weights of these blocks")
    weights: bool = knob(True, "train the weights of the chosen tensors (false: only biases and norms)")
    rank: int = knob(16, "rank of LoRA's adapters and of lite branches", low=1, high=1024)
    alpha: float = knob(32.0, "their scale: alpha / rank", low=0.0)
    qas: bool = knob(
        True, "int8 weights move as float32 ones would, whatever their scales; false only shows what that does"
    )
    rounding: str = knob(
        "stochastic",
        "of int8 weights: stochastic is right on average; carry: what is cut off is added to the next step, a byte "
        "more for each weight; none: they are float32 in truth, to see what rounding does",
        choices=("stochastic", "carry", "nearest", "none"),
    )
    cycle_blocks: int = knob(0, "train so many neighbouring blocks at a time; 0 = all at once", low=0)
    cycle_steps: int = knob(10, "after so many steps it is the turn of other blocks", low=1)

    @property
    def unknown(self) -> bool:
        """What is trained has still to be found."""
        return bool(self.blocks == "auto") and not self.parts


@dataclass
class TrainConfig:
    epochs: float = knob(3.0, "passes over the training rows", low=0.0)
    steps: int | None = knob(None, "stop after so many optimiser steps, whatever epochs says", low=1)
    batch_rows: int = knob(16, "rows per optimiser step", low=1)
    lr: float = knob(2e-4, "peak learning rate", low=0.0)
    lr_width: int = knob(
        0, "the model width that lr was found at: other widths get lr × lr_width / width; 0 = lr as is", low=0
    )
    bias_lr: float = knob(
        0.0, "peak learning rate of biases and norms, whatever the model's width; 0 = that of the weights", low=0.0
    )
    warmup: float = knob(0.05, "share of the steps with rising learning rate", low=0.0, high=1.0)
    final_lr: float = knob(0.05, "learning rate at the end, as a share of the peak", low=0.0, high=1.0)
    optimizer: str = knob("adamw", "adamw, or sgd with momentum", choices=("adamw", "sgd"))
    momentum: float = knob(0.9, "of sgd", low=0.0, high=0.9999)
    weight_decay: float = knob(0.0, "weight decay, decoupled in AdamW", low=0.0)
    beta1: float = knob(0.9, "AdamW", low=0.0, high=0.9999)  # at 1 its bias correction divides by zero
    beta2: float = knob(0.99, "AdamW", low=0.0, high=0.9999)
    clip: float = knob(1.0, "largest norm of the whole gradient; 0 = no clipping", low=0.0)
    seed: int = knob(0, "order of the rows and blocks, adapters' start, rounding", low=0)
    order: str = knob(
        "grouped",
        "grouped: rows that share a long prefix stand in the same step; shuffled: every row on its own",
        choices=("grouped", "shuffled"),
    )
    token_share: float = knob(
        1.0, "share of the positions that gradients pass through, trained ones always (TokenTune)", low=0.0, high=1.0
    )
    validations: int = knob(
        4, "held-out loss is taken so many times in a run; the best checkpoint is kept", low=1, high=10000
    )


@dataclass
class HowConfig:
    """How the same result is reached on this device; nothing here changes what is learned."""

    micro_batch_tokens: int = knob(1024, "tokens per forward and backward pass", low=16)
    recompute: bool = knob(False, "gradient checkpointing: keep block inputs only, recompute the rest")
    threads: int = knob(0, "compute threads; 0 = all cores", low=0)
    products: str = knob(
        "auto",
        "operands of the kernels' matrix products; auto: bf16 where the processor has instructions for it, else fp32",
        choices=("auto", "fp32", "bf16"),
    )
    nice: int = knob(
        10, "how far the stages stand back for other programs, at the processor and the disk; 0 = not", low=0, high=19
    )
    trunk: str = knob(
        "cache", "blocks below the cut: run once and cache their output, or run every time", choices=("cache", "rerun")
    )
    trunk_dtype: str = knob("fp16", "precision of the trunk cache", choices=("fp16", "fp32", "int8"))
    trunk_place: str = knob(
        "shared",
        "where the trunk cache lies: shared between runs in the user's cache folder, or in the run folder",
        choices=("shared", "run"),
    )
    trunk_cache_bytes: int = knob(20 << 30, "the shared trunk cache's limit: the least recently used goes", low=0)
    trunk_order: str = knob(
        "rows",
        "rows: all trunk blocks for a few rows at a time; blocks: one block for all rows, its weights alone in memory",
        choices=("rows", "blocks"),
    )
    spare_memory: bool = knob(
        False,
        "give memory back as soon as it is not used: pages of mapped weights after every product, freed buffers at "
        "once; a little slower",
    )
    tree: bool = knob(True, "compute shared prefixes of rows once")
    supervised_only: bool = knob(
        True, "head, and the last block beyond its keys and values, for trained positions alone"
    )
    prune: bool = knob(True, "compute no gradient that nobody uses; false only shows what that saves")
    compile: str = knob(
        "auto",
        "own C++ kernels, compiled once for this processor; auto: where the run is long enough to pay for it",
        choices=("auto", "on", "off"),
    )
    optimizer_state: str = knob(
        "fp32",
        "AdamW's moments: 8, 4 or 2 bytes a trained number; in fewer bits they are rounded by chance, right on average",
        choices=("fp32", "bf16", "8bit"),
    )
    step_in_place: bool = knob(
        False,
        "update a tensor as soon as its gradient is there, and free it; clipped by the norm of the step before; where "
        "a gradient below turns out to be no number, that update stays",
    )
    checkpoint_s: float = knob(
        120.0, "seconds between checkpoints; more where writing one takes over 2 % of that; 0 = every step", low=0.0
    )
    keep_checkpoints: int = knob(
        2, "newest checkpoints kept beside the best; with 1 there is none to go back to if it gets damaged", low=1
    )
    keep_data: bool = knob(
        True, "keep the rows' tokens and the trunk cache after the run; false: take them away when it is complete"
    )


def windows(text: str) -> list[tuple[int, int]]:
    """`22:00-07:00` → [(1320, 420)], in minutes of the day; several stand between commas."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d{1,2}):(\d\d)\s*-\s*(\d{1,2}):(\d\d)", part)
        if not match:
            raise ValueError(f"`{part}` is no window of time")
        h0, m0, h1, m1 = map(int, match.groups())
        begin, end = 60 * h0 + m0, 60 * h1 + m1
        if max(m0, m1) > 59 or begin >= 24 * 60 or end > 24 * 60 or begin == end:
            raise ValueError(f"`{part}` is no window of time")
        found.append((begin, end))
    return found


@dataclass
class GovernorConfig:
    """When a run pauses to spare its machine; nothing here changes what is learned."""

    target_celsius: float = knob(75.0, "it is slowed down so that the processor settles here; 0 = not", low=0.0)
    limit_celsius: float = knob(82.0, "at this temperature it pauses; 0 = never", low=0.0)
    hysteresis_celsius: float = knob(8.0, "after such a pause it goes on so far below the limit", low=1.0)
    sensors: list[str] = knob([], "thermometers that count, by the names of `edgeft doctor`; none = the processor's")
    battery_percent: int = knob(
        30, "while a battery is drained, go on only above this charge; 100 = only on mains; 0 = always", low=0, high=100
    )
    schedule: str = knob(
        "", "times of day to work in: `22:00-07:00`, several with commas; nothing = always", check=windows
    )


@dataclass
class ExportConfig:
    type: str = knob("auto", "type of updated tensors; auto: q8_0, or their own where that is wider; keep: their own")


@dataclass
class EvalConfig:
    rows: int = knob(200, "at most so many held-out rows are scored", low=1)
    max_new_tokens: int = knob(32, "longest answer in tokens", low=1)
    unpack: bool = knob(
        True,
        "weights in types that llama.cpp multiplies slowly (Q4_1, Q5_1, Q3_K, IQ…) are scored from a float16 copy in "
        "memory, where a quarter of the free memory holds it",
    )


@dataclass
class Recipe:
    name: str = knob("", "the recipe's name")
    about: str = knob("", "one line on what it is for")
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    how: HowConfig = field(default_factory=HowConfig)
    governor: GovernorConfig = field(default_factory=GovernorConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


@dataclass
class Device:
    name: str = knob("", "the profile's name")
    about: str = knob("", "one line on the machine")
    ram_bytes: int = knob(0, "memory of the machine", low=0)
    budget_bytes: int = knob(0, "memory that a run may use", low=0)
    cores: int = knob(1, "compute cores", low=1)
    gemm_gflops: float = knob(0.0, "fp32 matrix product rate, for time estimates; 0 = unknown", low=0.0)
    how: dict[str, Any] = field(default_factory=dict, metadata={"about": "overrides of the recipe's `how`"})
    governor: dict[str, Any] = field(default_factory=dict, metadata={"about": "when a run pauses on this machine"})


# ---------------------------------------------------------------- strict reading


def _suggest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean `{close[0]}`?" if close else f"known: {', '.join(known)}"


def _shown(value: Any) -> str:
    """A value as it stands in a message, cut short."""
    return reprlib.repr(value)


def _type_name(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_type_name(h) for h in typing.get_args(hint))
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "nothing"}
    return {list: "a list", dict: "a table of keys", **words}[typing.get_origin(hint) or hint]


def _coerce(value: Any, hint: Any, key: str, meta: dict[str, Any]) -> Any:
    if hint is Any:
        return value
    bad = ConfigError(f"`{key}` must be {_type_name(hint)}, not {_shown(value)}", f"{key}: {meta.get('about', '')}")
    if isinstance(hint, types.UnionType):
        if value is None or value == "none":  # the explanations say "none = …"
            return None
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    if typing.get_origin(hint) is list:
        if isinstance(value, str):  # --set update.tensors=q,v
            value = [part.strip() for part in value.strip("[]").split(",") if part.strip()]
        if not isinstance(value, list):
            raise bad
        item_type = typing.get_args(hint)[0]
        if dataclasses.is_dataclass(item_type):
            return [build(typing.cast(type, item_type), item, f"{key}.{n}") for n, item in enumerate(value)]
        return [_coerce(item, item_type, key, meta) for item in value]
    if typing.get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise bad
        return value
    if hint is float and isinstance(value, (str, int)) and not isinstance(value, bool):  # YAML 1.1 reads 2e-4 as text
        try:
            value = float(value)
        except (ValueError, OverflowError):
            raise bad from None
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)) or (hint is int and abs(value) >> 63):
        raise bad
    if meta.get("choices") and value not in meta["choices"]:
        known = [str(c) for c in meta["choices"]]
        raise ConfigError(f"`{key}` cannot be {_shown(value)}", _suggest(str(value), known))
    low, high = meta.get("low"), meta.get("high")
    if (low is not None and value < low) or (high is not None and value > high):
        limits = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
        raise ConfigError(f"`{key}` is {value}, and must be {limits}", f"{key}: {meta.get('about', '')}")
    if check := meta.get("check"):
        try:
            check(value)
        except ValueError as error:
            raise ConfigError(f"`{key}`: {error}", f"{key}: {meta.get('about', '')}") from None
    return value


def build(cls: type[Any], values: Any, where: str = "", base: Any = None) -> Any:
    """A dataclass from nested dictionaries, over `base` (or the defaults), refusing what it does not know."""
    if not isinstance(values, dict):
        raise ConfigError(f"`{where or cls.__name__.lower()}` must be a table of keys, not {_shown(values)}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    result = cls() if base is None else dataclasses.replace(base)
    for name, value in values.items():
        if name not in fields:
            word = name[:80] if isinstance(name, str) else _shown(name)
            raise ConfigError(
                f"unknown key `{where}.{word}`" if where else f"unknown key `{word}`", _suggest(word, list(fields))
            )
        key = f"{where}.{name}" if where else name
        if dataclasses.is_dataclass(hints[name]):
            made = build(typing.cast(type, hints[name]), value, key, getattr(result, name))
        else:
            made = _coerce(value, hints[name], key, dict(fields[name].metadata))
        setattr(result, name, made)
    return result


class _Loader(yaml.SafeLoader):
    """YAML without the second of two equal keys silently winning, and without aliases: a few lines of those make a
    document that holds itself, or is larger than any memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not read", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"`{key.value}` is there twice", key.start_mark)
            seen.add(str(key.value))
        return typing.cast(dict[Any, Any], super().construct_mapping(node, deep))


def _short(construct: Any) -> Any:
    """Numbers of thousands of digits are refused: Python does not even write them out."""

    def checked(loader: _Loader, node: yaml.ScalarNode) -> Any:
        if len(str(node.value)) > 1000:
            raise yaml.constructor.ConstructorError(None, None, "a number of too many digits", node.start_mark)
        return construct(loader, node)

    return checked


_Loader.add_constructor("tag:yaml.org,2002:int", _short(_Loader.construct_yaml_int))
_Loader.add_constructor("tag:yaml.org,2002:float", _short(_Loader.construct_yaml_float))


def _parse(text: str) -> Any:
    """One YAML document; whatever is wrong with it is a YAMLError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, OverflowError, RecursionError) as error:  # 2024-13-45 looks like a date; [[[[… goes too deep
        raise yaml.YAMLError(str(error)) from None
    except (AttributeError, LookupError, TypeError):  # what PyYAML raises for !!timestamp x, !!bool x, !!set x
        raise yaml.YAMLError("a tag (!!…) on what it does not fit") from None


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():  # a pipe would wait for ever
            raise ConfigError(f"{path} is no regular file", "recipes are YAML files")
        with path.open("rb") as file:
            raw = file.read(MAX_YAML_BYTES + 1)
        if len(raw) > MAX_YAML_BYTES:
            raise ConfigError(f"{path} has more than {MAX_YAML_BYTES >> 10} KiB", "recipes are short YAML files")
        text = raw.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", "recipes are YAML files") from None
    try:
        values = _parse(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{path}{line}: not valid YAML ({problem})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no table of keys", "a recipe looks like `train: {epochs: 3}`")
    return values


# ---------------------------------------------------------------- sizes

UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": (1000 if ending == "b" else 1024) ** power
    for power, letter in enumerate("kmgt", 1)
    for ending in ("ib", "b", "i", "")
}
TIMES = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}  # seconds


def parse_size(text: str, option: str = "--memory") -> int:
    """`1500MiB`, `1.5GiB`, `6GB`, `2G` (binary, as in ulimit and systemd) → bytes."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].lower() not in UNITS:
        raise ConfigError(f"`{option} {_shown(text)}` is no size", "for example 1500MiB, 1.5GiB or 6GB")
    found = int(float(match[1]) * UNITS[match[2].lower()])
    if not 1 << 20 <= found < 1 << 60:
        raise ConfigError(f"`{option} {text}` is {found} bytes", "for example 1500MiB, 1.5GiB or 6GB")
    return found


def parse_time(text: str, option: str, least: float = 1.0) -> float:
    """`90s`, `30min`, `1.5h` → seconds."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([A-Za-z]+)", text.strip())
    found = float(match[1]) * TIMES.get(match[2].lower(), math.nan) if match else math.nan
    if not least <= found:
        raise ConfigError(f"`{option} {_shown(text)}` is no time", "for example 90s, 30min or 1.5h")
    return found


# ---------------------------------------------------------------- where files lie


def place(path: str | Path) -> Path:
    """A path with `~` opened up, where that names a user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def exists(path: str | Path) -> bool:
    """Whether there is a file or folder; what cannot be a name, like one of 300 letters, names none."""
    try:
        return place(path).exists()
    except (OSError, ValueError):
        return False


# ---------------------------------------------------------------- where recipes live


def shipped(folder: str) -> Path:
    """`recipes` or `eval`: inside the installed package, or at the top of a checkout."""
    inside = Path(__file__).parent / "_shipped" / folder
    return inside if inside.is_dir() else Path(__file__).parent.parent / folder


def names(kind: str) -> list[str]:
    """Names of the shipped recipes or devices."""
    folder = shipped("recipes") / ("devices" if kind == "device" else "")
    return sorted(p.stem for p in folder.glob("*.yaml"))


def _find(kind: str, name: str) -> Path:
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = place(name)
        if not path.is_file():
            raise ConfigError(f"there is no {kind} file {name}", f"`edgeft {kind}s` lists the shipped ones")
        return path
    known = names(kind)
    if name not in known:
        raise ConfigError(f"unknown {kind} `{name}`", _suggest(name, known + (["auto"] if kind == "device" else [])))
    return shipped("recipes") / ("devices" if kind == "device" else "") / f"{name}.yaml"


def load_recipe(name: str) -> Recipe:
    path = _find("recipe", name)
    values = read_yaml(path)
    values.setdefault("name", path.stem)
    return typing.cast(Recipe, build(Recipe, values))


def load_device(name: str) -> Device:
    """A shipped or own profile; `auto` is this machine."""
    if name == "auto":
        from edgeft.device import this_machine

        return this_machine()
    path = _find("device", name)
    values = read_yaml(path)
    values.setdefault("name", path.stem)
    device = typing.cast(Device, build(Device, values))
    build(HowConfig, device.how, "how")  # a profile may say how, never what
    check_heat(build(GovernorConfig, device.governor, "governor"))
    if not 0 < device.budget_bytes <= device.ram_bytes:
        raise ConfigError(
            f"`budget_bytes` of `{device.name}` is {device.budget_bytes}, and its `ram_bytes` {device.ram_bytes}",
            "a profile says how much memory there is, and how much of it a run may use",
        )
    return device


def check_heat(governor: GovernorConfig) -> None:
    """A limit at or below the target would be reached all the time."""
    target, limit = governor.target_celsius, governor.limit_celsius
    if target and limit and limit <= target:
        raise ConfigError(
            f"`governor.limit_celsius` is {limit:g}, and `governor.target_celsius` {target:g}",
            "the limit is where it pauses: some degrees above the target where it settles",
        )


def apply_sets(recipe: Recipe, sets: list[str]) -> Recipe:
    """`--set train.lr=2e-4`: one knob each, read as YAML."""
    for item in sets:
        key, sign, text = item.partition("=")
        if not sign or not key:
            raise ConfigError(f"`--set {item}` is not key=value", "for example `--set train.epochs=2`")
        nested: Any = _set_value(key, text)
        for part in reversed(key.strip().split(".")):
            nested = {part: nested}
        recipe = typing.cast(Recipe, build(Recipe, nested, base=_copy(recipe)))
    check_heat(recipe.governor)
    return recipe


def _set_value(key: str, text: str) -> Any:
    try:
        value = _parse(text) if text else ""
    except yaml.YAMLError:
        return text
    hint: Any = Recipe
    for part in key.strip().split("."):
        hint = typing.get_type_hints(hint).get(part) if dataclasses.is_dataclass(hint) else None
    wants_text = hint is str or str in typing.get_args(hint)
    if wants_text and typing.get_origin(hint) is not list and not isinstance(value, str):
        # Text that YAML takes for something else: `Answer: yes`, 007, no, 2024-01-01, #5
        return None if text.strip() in ("null", "~") else text
    return value


def _copy(recipe: Recipe) -> Recipe:
    return typing.cast(Recipe, build(Recipe, dataclasses.asdict(recipe)))


def resolve(recipe: str, device: str, sets: list[str]) -> tuple[Recipe, Device]:
    """Recipe file, then the device's `how` and `governor`, then `--set`: later ones win."""
    chosen = load_recipe(recipe)
    profile = load_device(device)
    use_profile(chosen, profile)
    return apply_sets(chosen, sets), profile


def use_profile(recipe: Recipe, profile: Device) -> None:
    recipe.how = build(HowConfig, profile.how, "how", recipe.how)
    recipe.governor = build(GovernorConfig, profile.governor, "governor", recipe.governor)


class _Dumper(yaml.SafeDumper):
    """YAML whose text comes back as it was: unquoted, the line breaks of Unicode would be read as \\n."""


def _quote(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    rare = any(mark in text for mark in "\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if rare else None)


_Dumper.add_representer(str, _quote)


def dump(recipe: Recipe) -> str:
    return yaml.dump(dataclasses.asdict(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def scalar(value: Any) -> str:
    """One value as it stands in a recipe file."""
    text = yaml.dump(value, Dumper=_Dumper, allow_unicode=True, default_flow_style=True, width=10000)
    return text.removesuffix("...\n").strip()


def what(recipe: Recipe) -> dict[str, Any]:
    """The part of a recipe that decides what is learned; two runs that differ here are different runs."""
    values = dataclasses.asdict(recipe)
    return {key: values[key] for key in ("model", "data", "update", "train")}
