"""A transformers block run through edgeft's own kernels: the same numbers, in fewer passes over memory.

Nothing is kept for the backward pass but what it needs, no gradient is computed that nobody uses, and weight gradients
are added to `.grad` where they are made.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from edgeft.engine.feed_forward import _FrugalBlock, feed_forward
from edgeft.engine.kernels import Kernels, Plan, heads
from edgeft.engine.linear import ComputeOptions, _trained, linear_specs, linears
from edgeft.engine.norm import DeferredResidual, _Sum, add_norm
from edgeft.engine.recompute import recomputed

Tensor = torch.Tensor


class _Attend(torch.autograd.Function):
    """q (A, H·d), k and v (T, G·d) as the layers gave them → (A, H·d); q and k are turned in their own memory."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, ...], plan: Plan, shape: Any, kernels: Kernels
    ) -> Tensor:
        cos_q, sin_q, cos_k, sin_k = angles
        kernels.rotate(q, cos_q, sin_q, shape.width, 1.0)
        kernels.rotate(k, cos_k, sin_k, shape.width, 1.0)
        out, lse = kernels.attend(plan, shape, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = angles, plan, shape, kernels
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        angles, plan, shape, kernels = ctx.rest
        dq, dk, dv = kernels.attend_back(plan, shape, q, k, v, out, lse, grads[0].contiguous())
        kernels.rotate(dq, angles[0], angles[1], shape.width, -1.0)
        kernels.rotate(dk, angles[2], angles[3], shape.width, -1.0)
        return dq, dk, dv, None, None, None, None


class Runner:
    """Blocks of one model over one batch."""

    def __init__(
        self, way: ComputeOptions, config: Any, tree: Any, rotary: tuple[Tensor, Tensor], threads: int
    ) -> None:
        """rotary: cosines and sines (T, d)."""
        assert way.kernels is not None
        self.way, self.kernels, self.tree, self.threads = way, way.kernels, tree, threads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape = heads(config.num_attention_heads, config.num_key_value_heads, width, width**-0.5)
        self.cos, self.sin = (t.float().contiguous() for t in rotary)
        self.plan = Plan(tree, self.shape.groups, threads)

    def block(self, block: Any, stream: DeferredResidual) -> DeferredResidual:
        """One block; what it adds last is left pending, for the next norm to add."""
        return self._after(block, *self._mixed(block, stream))

    def frugal_block(self, block: Any, stream: DeferredResidual) -> DeferredResidual:
        """As `block`, keeping the residual stream before it and no more. Going back, all is computed again but
        for down, whose input nobody needs where its weight is not trained."""
        layers = linear_specs((block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj))
        if layers is None:
            return recomputed(partial(self.block, block), stream)  # type: ignore[no-any-return]
        x = stream[0] if stream[1] is None else _Sum.apply(*stream)
        norm = block.post_attention_layernorm
        eps, anchor = float(norm.variance_epsilon), torch.empty(0, requires_grad=True)
        made: DeferredResidual = _FrugalBlock.apply(
            anchor, x, partial(self._attended, block), norm.weight, eps, layers, self.way, *_trained(layers)
        )
        return made

    def _attended(self, block: Any, x: Tensor) -> Tensor:
        """The stream after the block's first half."""
        x, mixed = self._mixed(block, (x, None))
        (out,) = linears(mixed, (block.self_attn.o_proj,), self.way)
        found: Tensor = _Sum.apply(x, out)
        return found

    def _mixed(self, block: Any, stream: DeferredResidual) -> tuple[Tensor, Tensor]:
        """The stream, and what o reads."""
        x, h = add_norm(stream, block.input_layernorm, self.kernels)
        angles = (self.cos, self.sin, self.cos, self.sin)
        return x, _Attend.apply(*self._qkv(block, h), angles, self.plan, self.shape, self.kernels)

    def last_block(self, block: Any, stream: DeferredResidual, asked: np.ndarray) -> DeferredResidual:
        """The last block, of which only the tokens `asked` are wanted: the others give keys and values alone."""
        x, h = add_norm(stream, block.input_layernorm, self.kernels)
        rows = torch.from_numpy(asked)
        q, k, v = self._qkv(block, h, h[rows])
        plan = Plan(self.tree, self.shape.groups, self.threads, asked)
        angles = (self.cos[rows], self.sin[rows], self.cos, self.sin)
        mixed = _Attend.apply(q, k, v, angles, plan, self.shape, self.kernels)
        return self._after(block, x[rows], mixed)

    def _qkv(self, block: Any, h: Tensor, asking: Tensor | None = None) -> tuple[Tensor, ...]:
        """asking: what queries are made from, where that is not all of h."""
        attention = block.self_attn
        if asking is None:
            q, k, v = linears(h, (attention.q_proj, attention.k_proj, attention.v_proj), self.way)
        else:
            (q,) = linears(asking, (attention.q_proj,), self.way)
            k, v = linears(h, (attention.k_proj, attention.v_proj), self.way)
        if hasattr(attention, "q_norm"):  # Qwen 3: a norm over each head
            q, k = self._head_norm(q, attention.q_norm), self._head_norm(k, attention.k_norm)
        return q, k, v

    def _head_norm(self, x: Tensor, module: Any) -> Tensor:
        _, y = add_norm((x.reshape(-1, self.shape.width), None), module, self.kernels)
        return y.view(x.shape)

    def _after(self, block: Any, x: Tensor, mixed: Tensor) -> DeferredResidual:
        """What follows the attention."""
        (out,) = linears(mixed, (block.self_attn.o_proj,), self.way, shared=True)
        x, h = add_norm((x, out), block.post_attention_layernorm, self.kernels)
        return x, feed_forward(h, block.mlp, self.way)


class SplitRunner(Runner):
    """Gradients pass through the tokens `kept` alone (TokenTune); the others are computed, seen, and forgotten."""

    def __init__(self, kept: np.ndarray, *rest: Any) -> None:
        super().__init__(*rest)
        others = np.setdiff1d(np.arange(len(self.tree.size)), kept)
        self.kept, self.others = torch.from_numpy(kept), torch.from_numpy(others)
        self.order = torch.argsort(torch.cat([self.kept, self.others]))  # of both, back to the tokens' own
        self.kept_plan = Plan(self.tree, self.shape.groups, self.threads, kept)
        self.other_plan = Plan(self.tree, self.shape.groups, self.threads, others) if len(others) else None

    def split(self, hidden: Tensor) -> tuple[DeferredResidual, DeferredResidual]:
        return (hidden[self.kept], None), (hidden[self.others], None)

    def both(
        self, block: Any, kept: DeferredResidual, others: DeferredResidual
    ) -> tuple[DeferredResidual, DeferredResidual]:
        """One block for both."""
        with torch.no_grad():
            y, h = add_norm(others, block.input_layernorm, self.kernels)
            q_others, k_others, v_others = self._qkv(block, h)
        x, h = add_norm(kept, block.input_layernorm, self.kernels)
        q, k_kept, v_kept = self._qkv(block, h)
        k, v = self._in_order(k_kept, k_others), self._in_order(v_kept, v_others)
        angles = (self.cos[self.kept], self.sin[self.kept], self.cos, self.sin)
        mixed = _Attend.apply(q, k, v, angles, self.kept_plan, self.shape, self.kernels)
        if self.other_plan is not None:
            with torch.no_grad():  # k has been turned already
                self.kernels.rotate(q_others, self.cos[self.others], self.sin[self.others], self.shape.width, 1.0)
                seen, _ = self.kernels.attend(self.other_plan, self.shape, q_others, k.detach(), v.detach())
                others = self._after(block, y, seen)
        return self._after(block, x, mixed), others

    def last(self, block: Any, kept: DeferredResidual, others: DeferredResidual, asked: np.ndarray) -> DeferredResidual:
        """The last block, of which only the tokens `asked`, all of them kept, are wanted."""
        with torch.no_grad():
            _, h = add_norm(others, block.input_layernorm, self.kernels)
            _, k_others, v_others = self._qkv(block, h)
        x, h = add_norm(kept, block.input_layernorm, self.kernels)
        rows = torch.from_numpy(np.searchsorted(self.kept.numpy(), asked))
        q, k_kept, v_kept = self._qkv(block, h)
        k, v = self._in_order(k_kept, k_others), self._in_order(v_kept, v_others)
        at = torch.from_numpy(asked)
        angles = (self.cos[at], self.sin[at], self.cos, self.sin)
        plan = Plan(self.tree, self.shape.groups, self.threads, asked)
        mixed = _Attend.apply(q[rows], k, v, angles, plan, self.shape, self.kernels)
        return self._after(block, x[rows], mixed)

    def _in_order(self, kept: Tensor, others: Tensor) -> Tensor:
        return torch.cat([kept, others.detach()])[self.order]
