"""The model as the trainer sees it: transformers' own blocks over frozen weights, an embedding and a head.

Only tensors that are trained become dense float32; everything else stays as it was stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from edgeft.arch import Architecture
from edgeft.data.forest import Forest
from edgeft.data.tree import Tree
from edgeft.engine import attention
from edgeft.engine.backend import TORCH, Backend
from edgeft.engine.block import Context, DeferredResidual, Runner, add_norm, recomputed
from edgeft.engine.linear import ComputeOptions
from edgeft.engine.packed import PackedHead

Tensor = torch.Tensor


@dataclass
class Batch:
    """Rows as one forest of T tokens."""

    tokens: Tensor  # (T,)
    positions: Tensor  # (T,) in their rows
    tree: Tree  # which token sees which, and through which gradients pass
    at: Tensor  # (n,) where a trained target is predicted
    targets: Tensor  # (n,)


def batch_of(forest: Forest, rows: Sequence[int], live: np.ndarray | None = None) -> tuple[np.ndarray, Batch]:
    """(node numbers, tensors) of the smallest forest that holds these rows; live: Forest.live, None: all of it."""
    nodes = forest.nodes(rows)
    parents = np.searchsorted(nodes, forest.parents[nodes])  # a path is whole: every parent is in `nodes`
    parents[forest.parents[nodes] < 0] = -1
    at = np.searchsorted(nodes, np.concatenate([forest.at[i] for i in rows]))
    targets = np.concatenate([forest.targets[i] for i in rows])
    return nodes, Batch(
        tokens=torch.from_numpy(forest.tokens[nodes].astype(np.int64)),
        positions=torch.from_numpy(forest.positions[nodes].astype(np.int64)),
        tree=Tree(parents, None if live is None else live[nodes]),
        at=torch.from_numpy(at.astype(np.int64)),
        targets=torch.from_numpy(targets.astype(np.int64)),
    )


@dataclass(frozen=True)
class ExecutionOptions:
    """How a stack runs. None of it changes what is computed, up to rounding."""

    backend: Backend = TORCH
    # operands of the blocks' products, where the backend runs them: fp32, bf16, or int8 where a weight is packed; the
    # head's are float32
    products: str = "fp32"
    # gradient checkpointing: none; full: only inputs of blocks are kept; selective: where no weight is trained, and
    # the backend runs the blocks, inputs and little more
    recompute: str = "none"


class Stack:
    """Embedding, blocks, last norm and head; `model` is the nn.Module that holds the blocks as `layers`."""

    def __init__(
        self, arch: Architecture, config: Any, model: nn.Module, embed: Any, head: PackedHead, source: str
    ) -> None:
        self.arch, self.config, self.model = arch, config, model
        self.embed, self.head, self.source = embed, head, source
        self.logit_scale = arch.scales(config).logits
        self.options = ExecutionOptions()
        if not isinstance(config, SimpleNamespace):
            config._attn_implementation = attention.register()
        model.eval()

    def configure(self, **changes: Any) -> None:
        """Changes some of the options; the head computes by the same backend."""
        self.options = replace(self.options, **changes)
        self.head.backend = self.options.backend

    @property
    def layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = self.model.layers  # type: ignore[assignment]
        return layers

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def width(self) -> int:
        return int(self.config.hidden_size)

    def rotary(self, positions: Tensor, kind: str = "") -> tuple[Tensor, Tensor]:
        """positions (B, T) → cosines and sines, (B, T, d) each; kind: see Architecture.rotation."""
        module, more = self.model.rotary_emb, (kind,) if kind else ()
        angles: tuple[Tensor, Tensor] = module(torch.empty(0), positions, *more)  # type: ignore[operator]
        return angles

    def run(self, hidden: Tensor, batch: Batch, blocks: range) -> Tensor:
        """Consecutive blocks over a batch, (T, d) → (T, d)."""
        if not self.options.backend.runs_blocks:
            return self._run_modules(hidden[None], batch.positions[None], batch.tree, blocks)[0]
        runner = self._runner(batch.positions, batch.tree)
        stream: DeferredResidual = (hidden, None)
        for number in blocks:
            stream = self._through(runner.block, self.layers[number], stream)
        return stream[0] if stream[1] is None else stream[0] + stream[1]

    def _run_modules(
        self, hidden: Tensor, positions: Tensor, mask: Tensor | Tree, blocks: range, cache: Any = None
    ) -> Tensor:
        """Blocks as transformers runs them: hidden (B, T, d), positions (B, T), mask (B, 1, T, S) or, for B = 1, a
        tree; cache: transformers' KV cache."""
        turns: dict[str, tuple[Tensor, Tensor]] = {}
        for number in blocks:
            kind = self.arch.rotation(self.config, number) or ""  # a block without one does not read it
            if kind not in turns:
                turns[kind] = self.rotary(positions, kind)
            seen = _within(mask, self.arch.window(self.config, number))
            keywords = {"position_embeddings": turns[kind], "attention_mask": seen, "past_key_values": cache}
            if self.options.recompute == "full" and torch.is_grad_enabled():
                from torch.utils.checkpoint import checkpoint

                hidden = checkpoint(self.layers[number], hidden, use_reentrant=False, **keywords)
            else:
                hidden = self.layers[number](hidden, **keywords)
        return hidden

    def final(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.model.norm(hidden)  # type: ignore[operator]
        return self._scaled(normed)

    def _scaled(self, normed: Tensor) -> Tensor:
        """What the head reads: the logits' scale is applied here."""
        return normed if self.logit_scale == 1 else normed * self.logit_scale

    def _runner(self, positions: Tensor, tree: Tree, context: Context | None = None) -> Runner:
        """positions: of the tokens that it runs."""
        products = self.options.products
        compute = ComputeOptions(self.options.backend, products == "bf16", products == "int8")
        return Runner(compute, self, tree, positions, context)

    def _context(self, hidden: Tensor, batch: Batch, cut: int) -> Context:
        """Runs the tokens through which no gradient passes, as in inference: only what others see of them is kept."""
        context = Context(batch.tree)
        runner = self._runner(batch.positions[context.tokens], batch.tree.context_tree())
        stream: DeferredResidual = (hidden[context.tokens], None)
        with torch.no_grad():
            for block in self.layers[cut:-1]:
                stream = runner.read_block(block, stream, context)
            runner.read_keys(self.layers[-1], stream, context)
        return context

    def _through(self, function: Callable[..., Any], block: nn.Module, stream: DeferredResidual) -> DeferredResidual:
        """One block's function; its activations are kept or computed again."""
        if self.options.recompute == "full" and _needs_gradient(block, stream):
            return recomputed(partial(function, block), stream)
        return function(block, stream)  # type: ignore[no-any-return]

    def top(self, hidden: Tensor, batch: Batch, cut: int) -> Tensor:
        """From the trunk's output, (T, d), to the normed states (n, d) at which targets are predicted.

        The last block runs beyond its keys and values for these positions only.
        """
        options = self.options
        if not options.backend.runs_blocks or cut == self.depth:
            return self.final(self.run(hidden, batch, range(cut, self.depth))[batch.at])
        queries, place = torch.unique(batch.at, return_inverse=True)  # two rows may predict at the same place
        positions, context = batch.positions, None
        if batch.tree.live is not None and torch.is_grad_enabled():
            context = self._context(hidden, batch, cut)
            hidden, positions = hidden[context.live], positions[context.live]
            queries = torch.searchsorted(context.live, queries)
        runner = self._runner(positions, batch.tree, context)
        stream: DeferredResidual = (hidden, None)
        for block in self.layers[cut:-1]:
            selective = options.recompute == "selective" and _needs_gradient(block, stream)
            stream = self._through(runner.selective_block if selective else runner.block, block, stream)
        stream = runner.last_block(self.layers[-1], stream, queries)
        normed = add_norm(stream, self.model.norm, options.backend, self.arch.final_norm.offset)[1]
        return self._scaled(normed[place])

    def trunk(self, batch: Batch, cut: int) -> Tensor:
        """The trunk's output, (T, d), without autograd; its products read what those above the cut read."""
        with torch.no_grad():
            return self.run(self.embed(batch.tokens), batch, range(cut))

    def logits(self, batch: Batch) -> Tensor:
        """(n, vocabulary) at the predicting positions; for checks."""
        with torch.no_grad():
            return self.head.logits(self.top(self.trunk(batch, 0), batch, 0))

    def generate(self, prompts: Sequence[Sequence[int]], max_new: int, stop: frozenset[int]) -> list[list[int]]:
        """Greedy answers, several rows at once, padded on the left."""
        from transformers import DynamicCache

        answers: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # similar lengths together: little padding
        for begin in range(0, len(order), 16):
            rows = order[begin : begin + 16]
            length = max(len(prompts[i]) for i in rows)
            ids = torch.zeros(len(rows), length, dtype=torch.long)
            real = torch.zeros(len(rows), length, dtype=torch.bool)
            for r, i in enumerate(rows):
                ids[r, length - len(prompts[i]) :] = torch.tensor(list(prompts[i]))
                real[r, length - len(prompts[i]) :] = True
            positions = (real.long().cumsum(1) - 1).clamp(min=0)
            seen = torch.ones(length, length, dtype=torch.bool).tril() & real[:, None, :]
            seen |= torch.eye(length, dtype=torch.bool)  # a padding position sees itself: no empty softmax
            cache, mask, done = DynamicCache(), seen[:, None], [False] * len(rows)
            with torch.no_grad():
                for _ in range(max_new):
                    hidden = self.embed(ids.flatten()).view(*ids.shape, -1)
                    hidden = self._run_modules(hidden, positions, mask, range(self.depth), cache)
                    best = self.head.logits(self.final(hidden[:, -1])).argmax(1)
                    for r, i in enumerate(rows):
                        token = int(best[r])
                        done[r] = done[r] or token in stop
                        if not done[r]:
                            answers[i].append(token)
                    if all(done):
                        break
                    real = torch.cat([real, torch.ones(len(rows), 1, dtype=torch.bool)], 1)
                    ids, positions, mask = best[:, None], positions[:, -1:] + 1, real[:, None, None, :]
        return answers

    def linear(self, block: int, tensor: str) -> nn.Module:
        return self.layers[block].get_submodule(self.arch.linears[tensor].path)


def _within(mask: Tensor | Tree, window: int) -> Tensor | Tree:
    """The same, of which each token sees only what is within the window; 0: all. In a mask (B, 1, T, S), true where a
    key is seen, the last of the S keys is the last of the T queries."""
    if isinstance(mask, Tree):
        return mask.within(window)
    if not window:
        return mask
    queries, keys = mask.shape[2:]
    return mask & torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries - window + 1)


def _needs_gradient(block: nn.Module, stream: DeferredResidual) -> bool:
    """Whether anything in this block, or below it, needs a gradient."""
    tensors = (*stream, *block.parameters())
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
