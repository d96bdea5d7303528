"""Recipe and Device: every knob, declared once as a dataclass field with its explanation."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
    def needs_search(self) -> bool:
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
class ExecutionConfig:
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
    how: ExecutionConfig = field(default_factory=ExecutionConfig)
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
