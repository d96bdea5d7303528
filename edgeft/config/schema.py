"""Recipe and Device: every knob, declared once as a dataclass field with its explanation.

`edgeft knobs`, `--set`, the YAML reader and its error messages all read these declarations.
"""

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


BY_SIZE = "by size"  # of the model: see methods/scheme.py


def gradient_tokens(value: Any) -> None:
    if value != BY_SIZE and not (type(value) is int and 0 <= value < 1 << 20):
        raise ValueError(f"`{value}` is no number of tokens")


@dataclass(frozen=True)
class ModelConfig:
    path: str | None = knob(None, "GGUF file, Hugging Face directory or hub id; none = the embedded model")
    frozen: str = knob(
        "auto",
        "format of frozen weights in memory; auto: the GGUF file's own types, nf4 for Hugging Face weights",
        choices=("auto", "dense", "nf4", "int8"),
    )


@dataclass(frozen=True)
class DataConfig:
    path: str | None = knob(None, "file, folder or hub id with the rows; none = the embedded handbook")
    heldout: str | None = knob(None, "file with held-out rows; none = detected beside the data, or split off by hash")
    heldout_share: float = knob(0.1, "share of the rows to hold out when there is no held-out file", low=0.0, high=0.9)
    heldout_rows: int = knob(200, "maximum number of held-out rows used for validation", low=1)
    rows: int | None = knob(None, "use only this many training rows, from the first", low=1)
    max_tokens: int = knob(384, "tokens of a row; the context is truncated, never the answer", low=16, high=131072)
    system: str | None = knob(None, "system message; none = the chat template's own")


@dataclass(frozen=True)
class PartConfig:
    """One entry of `update.parts`."""

    blocks: Any = knob(None, "as update.blocks")
    tensors: list[str] = knob(list(TENSORS), "linear tensors of these blocks", choices=TENSORS)
    channels: float = knob(
        1.0, "as update.channels; 0: the weights stay frozen, only biases are trained", choices=(0.0, *CHANNELS)
    )
    biases: bool = knob(False, "add and train biases of these tensors")
    norms: bool = knob(False, "train the RMSNorm weights of these blocks")
    low_rank: int = knob(0, "as update.low_rank", low=0, high=1024)


@dataclass(frozen=True)
class UpdateConfig:
    method: str = knob(
        "sparse",
        "sparse: the chosen tensors themselves, or low-rank updates of them; lora: PEFT adapters on them; tinytl: lite "
        "residual branches beside them; qas: the chosen tensors, as int8 with a scale for each row",
        choices=("sparse", "lora", "tinytl", "qas"),
    )
    blocks: Any = knob(
        "10%-67%",
        "6 = top six; '11-19'; [3, 7]; '10%-67%' of the depth; 'all'; 'by size': '10%-100%', or '37%-100%' of a model "
        "with 500 M weights or more in its blocks; 'auto': blocks, tensors, channels and biases "
        "are searched on a sample of the rows before training, at no more memory and time than '10%-67%' needs; if "
        "training is shorter than the search, '10%-67%' is used",
    )
    tensors: list[str] = knob(list(TENSORS), "linear tensors of these blocks", choices=TENSORS)
    channels: float = knob(
        1.0, "share of each weight's input channels to train; no gradient is computed for the others", choices=CHANNELS
    )
    choose: str = knob(
        "gradient",
        "which channels to train: gradient: those with the largest gradients in a backward pass over a few rows; "
        "weight: those with the largest weights; first: the first ones",
        choices=("gradient", "weight", "first"),
    )
    tokens: Any = knob(
        0,
        "tokens before a row's first trained one through which gradients pass; those before them are only read, as in "
        "inference; 0 = all; 'by size': all, or 8 in a model with 500 M weights or more in its blocks",
        check=gradient_tokens,
    )
    low_rank: int = knob(
        0,
        "sparse: train an update of this rank beside each weight, which stays packed, along the input directions with "
        "the largest gradients; 0 = train the weight's own channels",
        low=0,
        high=1024,
    )
    parts: list[PartConfig] = knob(
        [],
        "a list of {blocks, tensors, channels, low_rank, biases, norms} that replaces the keys of the same names; if "
        "two entries name the same tensor of a block, the later one wins",
    )
    biases: bool = knob(False, "add and train biases of the chosen tensors, where the architecture supports them")
    norms: bool = knob(False, "train the RMSNorm weights of these blocks")
    weights: bool = knob(True, "train the weights of the chosen tensors (false: only biases and norms)")
    rank: int = knob(16, "rank of LoRA's adapters and of lite branches", low=1, high=1024)
    alpha: float = knob(32.0, "their scale: alpha / rank", low=0.0)
    cycle_blocks: int = knob(0, "number of neighbouring blocks trained at a time; 0 = all at once", low=0)
    cycle_steps: int = knob(10, "optimiser steps before the next blocks are trained", low=1)

    @property
    def needs_search(self) -> bool:
        """The search has not yet run."""
        return bool(self.blocks == "auto") and not self.parts


@dataclass(frozen=True)
class TrainConfig:
    epochs: float = knob(3.0, "passes over the training rows", low=0.0)
    steps: int | None = knob(None, "stop after this many optimiser steps, regardless of epochs; none = no limit", low=1)
    batch_rows: int = knob(16, "rows per optimiser step", low=1)
    lr: float = knob(2e-4, "peak learning rate", low=0.0)
    lr_width: int = knob(
        0,
        "model width that rates were tuned for: other widths use lr × lr_width / width; 0 = unscaled",
        low=0,
    )
    bias_lr: float = knob(
        0.0, "peak learning rate of biases and norms, not scaled by width; 0 = the same as the weights", low=0.0
    )
    low_rank_lr: float = knob(0.0, "peak learning rate of low-rank updates; 0 = the same as the weights", low=0.0)
    lr_loss: float = knob(
        0.0,
        "held-out loss before training above which low_rank_lr grows with the square of that loss, up to 4 times; "
        "0 = never",
        low=0.0,
    )
    warmup: float = knob(0.05, "share of the steps in which the learning rate rises linearly", low=0.0, high=1.0)
    final_lr: float = knob(0.05, "final learning rate, as a share of the peak", low=0.0, high=1.0)
    optimizer: str = knob("adamw", "adamw, or sgd with momentum", choices=("adamw", "sgd"))
    momentum: float = knob(0.9, "momentum of sgd", low=0.0, high=0.9999)
    weight_decay: float = knob(0.0, "weight decay, decoupled in AdamW", low=0.0)
    # at 1 AdamW's bias correction divides by zero
    beta1: float = knob(0.9, "AdamW's decay of the first moment", low=0.0, high=0.9999)
    beta2: float = knob(0.99, "AdamW's decay of the second moment", low=0.0, high=0.9999)
    average: float = knob(
        0.0,
        "decay of a moving average of the weights over the steps, which is validated and exported in their place; "
        "0 = none",
        low=0.0,
        high=0.9999,
    )
    clip: float = knob(1.0, "maximum norm of the whole gradient; 0 = no clipping", low=0.0)
    seed: int = knob(0, "seed of the order of rows and blocks, adapter initialisation and stochastic rounding", low=0)
    order: str = knob(
        "grouped",
        "grouped: rows with a long shared prefix are in one step; shuffled: each row on its own",
        choices=("grouped", "shuffled"),
    )
    validations: int = knob(4, "held-out loss evaluations in a run; the best checkpoint is kept", low=1, high=10000)
    validation_share: float = knob(
        0.1,
        "work of all held-out loss evaluations, as a share of training's: the first held-out rows that stay within it, "
        "at least 32, are used; 0 = all of them",
        low=0.0,
    )


@dataclass(frozen=True)
class ExecutionConfig:
    """How a run executes on this device; nothing here changes what is learned."""

    micro_batch_tokens: int = knob(1024, "tokens per forward and backward pass", low=16)
    recompute: bool = knob(
        False,
        "gradient checkpointing: keep block inputs only, recompute the rest (all but down, where no gradient "
        "reads whole inputs)",
    )
    threads: int = knob(0, "compute threads; 0 = all cores", low=0)
    products: str = knob(
        "auto",
        "operand type of the kernels' GEMMs; int8: of those with packed weights, gradients included; auto: bf16 where "
        "the processor has instructions for it, else int8 where it has those, else fp32",
        choices=("auto", "fp32", "bf16", "int8"),
    )
    nice: int = knob(
        10, "niceness of the stages: CPU and disk priority below other programs; 0 = normal", low=0, high=19
    )
    trunk: str = knob(
        "cache", "blocks below the cut: run once and cache their output, or rerun", choices=("cache", "rerun")
    )
    trunk_dtype: str = knob("fp16", "precision of the trunk cache", choices=("fp16", "fp32", "int8"))
    trunk_place: str = knob(
        "shared",
        "the trunk cache is in the user's cache folder, for all runs, or in the run's",
        choices=("shared", "run"),
    )
    trunk_cache_bytes: int = knob(
        20 << 30, "size limit of the shared trunk cache; least recently used entries are deleted first", low=0
    )
    trunk_order: str = knob(
        "rows", "rows: all trunk blocks for a few rows; blocks: one block for all rows", choices=("rows", "blocks")
    )
    spare_memory: bool = knob(
        False, "release memory at once: pages of mapped weights after every GEMM, freed buffers; a little slower"
    )
    tree: bool = knob(True, "compute shared prefixes of rows once")
    compile: str = knob(
        "auto",
        "edgeft's C++ kernels, compiled once for this processor; auto: if the run is long enough to pay for it",
        choices=("auto", "on", "off"),
    )
    optimizer_state: str = knob(
        "fp32",
        "AdamW's moments: 8, 4 or 2 bytes per trained parameter; below fp32 they are stochastically rounded (unbiased)",
        choices=("fp32", "bf16", "8bit"),
    )
    weights: str = knob(
        "fp32",
        "whole tensors that are trained themselves: float32, or bf16 with stochastic rounding (unbiased) at every step",
        choices=("fp32", "bf16"),
    )
    step_in_place: bool = knob(
        False,
        "update a tensor as soon as its gradient is computed, then free the gradient; clipped by the norm of the "
        "previous step; the update stays if a later gradient of the same step is NaN or infinite",
    )
    checkpoint_s: float = knob(
        120.0,
        "seconds between checkpoints; longer if writing one takes over 2 % of that, or if all of them would write over "
        "a tenth of the disk; 0 = every step",
        low=0.0,
    )
    keep_checkpoints: int = knob(
        1,
        "complete checkpoints beside the one being written, the best among them; with 1, a run killed in a write "
        "resumes from the best",
        low=1,
    )
    keep_data: bool = knob(
        True, "keep the rows' tokens and the trunk cache after the run; false: delete them when it is complete"
    )


def windows(text: str) -> list[tuple[int, int]]:
    """`22:00-07:00` → [(1320, 420)], in minutes of the day; several are separated by commas."""
    spans = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d{1,2}):(\d\d)\s*-\s*(\d{1,2}):(\d\d)", part)
        if not match:
            raise ValueError(f"`{part}` is not a time span")
        h0, m0, h1, m1 = map(int, match.groups())
        begin, end = 60 * h0 + m0, 60 * h1 + m1
        if max(m0, m1) > 59 or begin >= 24 * 60 or end > 24 * 60 or begin == end:
            raise ValueError(f"`{part}` is not a time span")
        spans.append((begin, end))
    return spans


@dataclass(frozen=True)
class GovernorConfig:
    """When a run pauses: heat, battery, time of day; nothing here changes what is learned."""

    target_celsius: float = knob(75.0, "short pauses keep the processor at this temperature; 0 = off", low=0.0)
    limit_celsius: float = knob(82.0, "pause at this temperature; 0 = never", low=0.0)
    hysteresis_celsius: float = knob(8.0, "resume when this far below the limit", low=1.0)
    sensors: list[str] = knob([], "temperature sensors to read, named as in `edgeft doctor`; [] = the processor's")
    battery_percent: int = knob(
        30, "on battery, run above this charge; 100 = only on mains; 0 = always", low=0, high=100
    )
    schedule: str = knob(
        "", "times of day to run in: `22:00-07:00`, several separated by commas; empty = always", check=windows
    )


@dataclass(frozen=True)
class ExportConfig:
    type: str = knob(
        "auto",
        "type of updated tensors; keep: their own, rounded for the training rows' inputs; auto: their own where that "
        "costs at most 2 % of the held-out loss and the blocks have less than 500 M weights, or where it is 8 bits or "
        "wider, else q8_0",
    )


@dataclass(frozen=True)
class EvalConfig:
    rows: int = knob(200, "maximum number of held-out rows to score", low=1)
    max_new_tokens: int = knob(32, "maximum tokens of an answer", low=1)
    time_share: float = knob(
        0.25,
        "time limit of a run's last stage, as a share of its training time (search, trunk and training); it also ends "
        "once the difference is clear; 0 = all rows are scored",
        low=0.0,
        high=100.0,
    )
    unpack: bool = knob(
        True,
        "score weights in types that llama.cpp multiplies slowly (Q4_1, Q5_1, Q3_K, IQ…) from a float16 copy, if it "
        "fits into a quarter of the free memory",
    )


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Device:
    name: str = knob("", "the profile's name")
    about: str = knob("", "one line on the machine")
    ram_bytes: int = knob(0, "memory of the machine", low=0)
    budget_bytes: int = knob(0, "memory that a run may use", low=0)
    cores: int = knob(1, "compute cores", low=1)
    gemm_gflops: float = knob(0.0, "fp32 GEMM rate, for time estimates; 0 = unknown", low=0.0)
    products: str = knob(
        "fp32", "fastest operands of GEMMs that its processor has instructions for", choices=("fp32", "bf16", "int8")
    )
    how: dict[str, Any] = field(default_factory=dict, metadata={"about": "overrides of the recipe's `how`"})
    governor: dict[str, Any] = field(default_factory=dict, metadata={"about": "when a run pauses on this machine"})
