"""A block of the model run through a backend: the same numbers as transformers', in fewer passes over memory.

Only what the backward pass needs is kept, and no gradient is computed that nothing uses.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from edgeft.data.tree import Tree
from edgeft.engine.attention import AttentionPlan, Heads
from edgeft.engine.backend import Backend
from edgeft.engine.feed_forward import SelectiveSpec, feed_forward, selective_block
from edgeft.engine.linear import ComputeOptions, linear_specs, linears
from edgeft.engine.norm import DeferredResidual, add, add_norm
from edgeft.engine.recompute import recomputed

Tensor = torch.Tensor


class _Attend(torch.autograd.Function):
    """q (A, H·d), k and v (T, G·d) as the layers gave them → (A, H·d); q and k are rotated in place."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, ...], plan: AttentionPlan, backend: Backend
    ) -> Tensor:
        cos_q, sin_q, cos_k, sin_k = angles
        backend.rotate(q, cos_q, sin_q, plan.heads.width, 1.0)
        backend.rotate(k, cos_k, sin_k, plan.heads.width, 1.0)
        out, more = backend.attend(plan, q, k, v)
        ctx.save_for_backward(q, k, v, out, more)
        ctx.rest = angles, plan, backend
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        angles, plan, backend = ctx.rest
        dq, dk, dv = backend.attend_back(plan, ctx.saved_tensors, grads[0].contiguous())
        backend.rotate(dq, angles[0], angles[1], plan.heads.width, -1.0)
        backend.rotate(dk, angles[2], angles[3], plan.heads.width, -1.0)
        return dq, dk, dv, None, None, None


class Runner:
    """Blocks of one model over one batch."""

    def __init__(self, compute: ComputeOptions, config: Any, tree: Tree, rotary: tuple[Tensor, Tensor]) -> None:
        """rotary: cosines and sines (T, d)."""
        self.compute, self.backend, self.tree = compute, compute.backend, tree
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.heads = Heads(config.num_attention_heads, config.num_key_value_heads, width, width**-0.5)
        self.cos, self.sin = (t.float().contiguous() for t in rotary)
        self.plan = self.backend.attention_plan(tree, self.heads)

    def block(self, block: Any, stream: DeferredResidual) -> DeferredResidual:
        """One block; its last sum is deferred to the next norm."""
        return self._after(block, *self._mixed(block, stream))

    def selective_block(self, block: Any, stream: DeferredResidual) -> DeferredResidual:
        """As `block`, but only the residual stream before it is kept. The backward pass computes all again except down,
        whose input nothing needs where its weight is not trained."""
        layers = linear_specs((block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj))
        if layers is None:
            return recomputed(partial(self.block, block), stream)  # type: ignore[no-any-return]
        x = stream[0] if stream[1] is None else add(stream[0], stream[1], self.backend)
        norm = block.post_attention_layernorm
        spec = SelectiveSpec(partial(self._attended, block), float(norm.variance_epsilon), layers, self.compute)
        return selective_block(x, norm.weight, spec)

    def _attended(self, block: Any, x: Tensor) -> Tensor:
        """The residual stream after attention."""
        x, mixed = self._mixed(block, (x, None))
        (out,) = linears(mixed, (block.self_attn.o_proj,), self.compute)
        return add(x, out, self.backend)

    def _mixed(self, block: Any, stream: DeferredResidual) -> tuple[Tensor, Tensor]:
        """(the residual stream, the input of o)."""
        x, h = add_norm(stream, block.input_layernorm, self.backend)
        q, k, v = self._qkv(block, h)
        return x, self._attend(q, k, v, self.plan)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, queries: Tensor | None = None) -> Tensor:
        """queries: the tokens of q, if not all."""
        turns = (self.cos, self.sin) if queries is None else (self.cos[queries], self.sin[queries])
        mixed: Tensor = _Attend.apply(q, k, v, (*turns, self.cos, self.sin), plan, self.backend)
        return mixed

    def last_block(self, block: Any, stream: DeferredResidual, queries: Tensor) -> DeferredResidual:
        """The last block, of which only these tokens are needed: of the others, only keys and values."""
        x, h = add_norm(stream, block.input_layernorm, self.backend)
        q, k, v = self._qkv(block, h, h[queries])
        plan = self.backend.attention_plan(self.tree, self.heads, queries)
        return self._after(block, x[queries], self._attend(q, k, v, plan, queries))

    def _qkv(self, block: Any, h: Tensor, asking: Tensor | None = None) -> tuple[Tensor, ...]:
        """asking: the input of q, if that is not all of h."""
        attention = block.self_attn
        if asking is None:
            q, k, v = linears(h, (attention.q_proj, attention.k_proj, attention.v_proj), self.compute)
        else:
            (q,) = linears(asking, (attention.q_proj,), self.compute)
            k, v = linears(h, (attention.k_proj, attention.v_proj), self.compute)
        if hasattr(attention, "q_norm"):  # Qwen 3: a norm over each head
            q, k = self._head_norm(q, attention.q_norm), self._head_norm(k, attention.k_norm)
        return q, k, v

    def _head_norm(self, x: Tensor, module: Any) -> Tensor:
        _, y = add_norm((x.reshape(-1, self.heads.width), None), module, self.backend)
        return y.view(x.shape)

    def _after(self, block: Any, x: Tensor, mixed: Tensor) -> DeferredResidual:
        """What follows the attention."""
        (out,) = linears(mixed, (block.self_attn.o_proj,), self.compute, shared=True)
        x, h = add_norm((x, out), block.post_attention_layernorm, self.backend)
        return x, feed_forward(h, block.mlp, self.compute)


class SplitRunner(Runner):
    """Gradients pass through the tokens `kept` alone (TokenTune); the others only give keys and values."""

    def __init__(self, kept: np.ndarray, *rest: Any) -> None:
        super().__init__(*rest)
        others = np.setdiff1d(np.arange(len(self.tree.size)), kept)
        self.kept, self.others = torch.from_numpy(kept), torch.from_numpy(others)
        self.order = torch.argsort(torch.cat([self.kept, self.others]))  # from both to the tokens' own order
        self.kept_plan, self.other_plan = (
            self.backend.attention_plan(self.tree, self.heads, tokens) if len(tokens) else None
            for tokens in (self.kept, self.others)
        )

    def split(self, hidden: Tensor) -> tuple[DeferredResidual, DeferredResidual]:
        return (hidden[self.kept], None), (hidden[self.others], None)

    def both(
        self, block: Any, kept: DeferredResidual, others: DeferredResidual
    ) -> tuple[DeferredResidual, DeferredResidual]:
        """One block for both."""
        with torch.no_grad():
            y, h = add_norm(others, block.input_layernorm, self.backend)
            q_others, k_others, v_others = self._qkv(block, h)
        x, h = add_norm(kept, block.input_layernorm, self.backend)
        q, k_kept, v_kept = self._qkv(block, h)
        k, v = self._in_order(k_kept, k_others), self._in_order(v_kept, v_others)
        assert self.kept_plan is not None
        mixed = self._attend(q, k, v, self.kept_plan, self.kept)
        if self.other_plan is not None:
            with torch.no_grad():  # k is already rotated
                self.backend.rotate(q_others, self.cos[self.others], self.sin[self.others], self.heads.width, 1.0)
                seen, _ = self.backend.attend(self.other_plan, q_others, k.detach(), v.detach())
                others = self._after(block, y, seen)
        return self._after(block, x, mixed), others

    def last(self, block: Any, kept: DeferredResidual, others: DeferredResidual, queries: Tensor) -> DeferredResidual:
        """The last block, of which only these tokens, all of them kept, are needed."""
        with torch.no_grad():
            _, h = add_norm(others, block.input_layernorm, self.backend)
            _, k_others, v_others = self._qkv(block, h)
        x, h = add_norm(kept, block.input_layernorm, self.backend)
        rows = torch.searchsorted(self.kept, queries)
        q, k_kept, v_kept = self._qkv(block, h)
        k, v = self._in_order(k_kept, k_others), self._in_order(v_kept, v_others)
        plan = self.backend.attention_plan(self.tree, self.heads, queries)
        return self._after(block, x[rows], self._attend(q[rows], k, v, plan, queries))

    def _in_order(self, kept: Tensor, others: Tensor) -> Tensor:
        return torch.cat([kept, others.detach()])[self.order]
