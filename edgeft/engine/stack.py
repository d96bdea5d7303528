"""The model as the trainer sees it: transformers' own blocks over frozen weights, an embedding and a head.

Only tensors that are trained become dense float32; everything else stays as it was stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from edgeft.arch import Architecture
from edgeft.data.tree import Tree
from edgeft.engine import attention
from edgeft.engine.batch import Batch
from edgeft.engine.block import Runner, SplitRunner
from edgeft.engine.kernels import Kernels
from edgeft.engine.linear import ComputeOptions
from edgeft.engine.norm import DeferredResidual, add_norm
from edgeft.engine.packed import PackedHead
from edgeft.engine.recompute import recomputed


class Stack:
    """Embedding, blocks, last norm and head; `model` is the nn.Module that holds the blocks as `layers`."""

    def __init__(
        self, arch: Architecture, config: Any, model: nn.Module, embed: Any, head: PackedHead, source: str
    ) -> None:
        self.arch, self.config, self.model = arch, config, model
        self.embed, self.head, self.source = embed, head, source
        self.recompute = False
        self.frugal = False  # where no weight is trained: keep little of a block, and compute most of it again
        self.prune = True  # false: also gradients that nobody uses, to see what they cost
        self.kernels: Kernels | None = None  # None: transformers' own blocks in plain torch
        self.half = False  # products of bf16 operands from the cut on, by the kernels alone: the trunk runs only once
        self.supervised_only = True  # the last block beyond its keys and values, for positions that are asked for alone
        if not isinstance(config, SimpleNamespace):
            config._attn_implementation = attention.register()
        model.eval()

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

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self.model.rotary_emb(torch.empty(0), positions)  # type: ignore[operator]
        return found

    def run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | Tree,
        start: int,
        stop: int,
        cache: Any = None,
        half: bool = False,
    ) -> torch.Tensor:
        """Blocks [start, stop): hidden (B, T, d), positions (B, T), mask (B, 1, T, S) or, for B = 1, a tree."""
        if self.kernels and isinstance(mask, Tree):
            runner = Runner(*self._running(positions[0], mask, half))
            stream: DeferredResidual = (hidden[0], None)
            for block in self.layers[start:stop]:
                stream = self._through(runner.block, block, stream)
            return (stream[0] if stream[1] is None else stream[0] + stream[1])[None]
        rotary = self.rotary(positions)
        for block in self.layers[start:stop]:
            keywords = {"attention_mask": mask, "position_embeddings": rotary, "past_key_values": cache}
            if self.recompute and torch.is_grad_enabled():
                from torch.utils.checkpoint import checkpoint

                hidden = checkpoint(block, hidden, use_reentrant=False, **keywords)
            else:
                hidden = block(hidden, **keywords)
        return hidden

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.model.norm(hidden)  # type: ignore[operator]
        return normed

    def _running(self, positions: torch.Tensor, tree: Tree, half: bool) -> tuple[Any, ...]:
        """What a Runner over these tokens is made of."""
        cos, sin = self.rotary(positions[None])
        assert self.kernels is not None
        way = ComputeOptions(self.kernels, self.prune, half)
        return way, self.config, tree, (cos[0], sin[0]), torch.get_num_threads()

    def _through(self, function: Callable[..., Any], block: nn.Module, *streams: DeferredResidual) -> Any:
        """One block's function, whose activations are kept or computed again."""
        if self.recompute and _goes_back(block, streams):
            return recomputed(partial(function, block), *streams)
        return function(block, *streams)

    def top(self, hidden: torch.Tensor, batch: Batch, cut: int) -> torch.Tensor:
        """From what the cut sees, (T, d), to the normed states (n, d) at which targets are predicted."""
        if self.kernels and self.supervised_only and cut < self.depth:
            asked, place = torch.unique(batch.at, return_inverse=True)  # two rows may ask at the same place
            if batch.kept is None:
                runner = Runner(*self._running(batch.positions, batch.tree, self.half))
                stream: DeferredResidual = (hidden, None)
                for block in self.layers[cut:-1]:
                    frugal = self.frugal and self.prune and not self.recompute and _goes_back(block, (stream,))
                    stream = self._through(runner.frugal_block if frugal else runner.block, block, stream)
                stream = runner.last_block(self.layers[-1], stream, asked.numpy())
            else:
                splitter = SplitRunner(batch.kept, *self._running(batch.positions, batch.tree, self.half))
                streams = splitter.split(hidden)
                for block in self.layers[cut:-1]:
                    streams = self._through(splitter.both, block, *streams)
                stream = splitter.last(self.layers[-1], *streams, asked.numpy())
            return add_norm(stream, self.model.norm, self.kernels)[1][place]
        out = self.run(hidden[None], batch.positions[None], batch.tree, cut, self.depth, half=self.half)
        return self.final(out[0][batch.at] if self.supervised_only else out[0])

    def trunk(self, batch: Batch, cut: int) -> torch.Tensor:
        """What the cut sees, (T, d); without autograd."""
        with torch.no_grad():
            hidden = self.embed(batch.tokens)
            return self.run(hidden[None], batch.positions[None], batch.tree, 0, cut)[0]

    def logits(self, batch: Batch) -> torch.Tensor:
        """(n, vocabulary) at the predicting positions; for checks."""
        with torch.no_grad():
            return self.head.logits(self.top(self.trunk(batch, 0), batch, 0))

    def generate(self, prompts: Sequence[Sequence[int]], max_new: int, stop: frozenset[int]) -> list[list[int]]:
        """Greedy answers, several rows at once, padded on the left."""
        from transformers import DynamicCache

        answers: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # like lengths together: little padding
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
                    hidden = self.run(hidden, positions, mask, 0, self.depth, cache)
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

    def dense_weight(self, block: int, tensor: str) -> torch.Tensor:
        """A frozen linear's weight, unpacked into memory of its own."""
        return weight_of(self.linear(block, tensor))


def _goes_back(block: nn.Module, streams: Sequence[DeferredResidual]) -> bool:
    """Is a gradient of anything in this block, or below it, wanted?"""
    given = [tensor for stream in streams for tensor in stream if tensor is not None]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*given, *block.parameters()))


def weight_of(module: nn.Module) -> torch.Tensor:
    """The dense float32 weight of any linear layer that a stack can hold."""
    if hasattr(module, "dense_weight"):  # packed, or trained in part
        dense: torch.Tensor = module.dense_weight()  # type: ignore[operator]
        return dense
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return weight.detach().float().clone()


def set_submodule(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)
