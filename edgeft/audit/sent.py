"""What a device would send: a gradient, or the change of the weights in a local epoch; all of it or a support's, with
or without noise.

Everything is computed in plain torch in float32: rounding is no protection that anybody may rely on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist

import torch

from edgeft.config import Recipe
from edgeft.data.forest import Forest, epoch_order
from edgeft.data.tokens import Encoded
from edgeft.engine.stack import batch_of
from edgeft.errors import ConfigError
from edgeft.methods.layer import checkpoint_tensors, trained_linears
from edgeft.plan.flops import Schedule, support_rate
from edgeft.train.build import build

Tensor = torch.Tensor
Tensors = dict[str, Tensor]  # by the parameter's name
Masks = dict[str, Tensor]  # bool: the support, the numbers that are trained and sent; empty: all
CHOOSING_ROWS = 16  # whose gradients choose directions and the support
SEND_HINT = "`dense`, or the share of the numbers that is trained and sent: `top:1%`"
DP_HINT = "`epsilon=8,delta=1e-5`, or `noise=0.1`, the deviation as a multiple of the clipping norm; `clip=1` with both"


@dataclass(frozen=True)
class Noise:
    """Clipping to a norm and Gaussian noise. With epsilon, the noise that makes one message (ε, δ)-private."""

    epsilon: float = 0.0
    delta: float = 1e-5
    clip: float = 1.0
    noise: float = 0.0  # deviation / clip; 0: from epsilon

    @staticmethod
    def parse(text: str) -> Noise:
        known = [field.name for field in fields(Noise)]
        try:
            values = {key.strip(): float(value) for key, _, value in (part.partition("=") for part in text.split(","))}
        except ValueError:
            raise ConfigError(f"`--dp {text}` has a value that is not a number", DP_HINT) from None
        unknown = values.keys() - set(known)
        if unknown or not all(math.isfinite(v) and v > 0 for v in values.values()) or values.get("delta", 0.5) >= 1:
            raise ConfigError(f"`--dp {text}` is not a valid noise", DP_HINT)
        if ("epsilon" in values) == ("noise" in values):
            raise ConfigError(f"`--dp {text}` needs epsilon or noise", DP_HINT)
        return Noise(**values)

    @property
    def multiplier(self) -> float:
        """Deviation / clip. From epsilon: the smallest that is enough for one message, by bisection over the exact
        δ(ε) of the Gaussian mechanism (Balle and Wang 2018)."""
        if self.noise:
            return self.noise
        low, high = 1e-3, 1e6
        for _ in range(100):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if _delta(self.epsilon, middle) <= self.delta else (middle, high)
        return high

    def apply(self, tensors: Tensors, seed: int) -> Tensors:
        draw = torch.Generator().manual_seed(seed)
        norm = math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))
        factor, deviation = min(1.0, self.clip / max(norm, 1e-30)), self.multiplier * self.clip
        return {name: t * factor + deviation * torch.randn(t.shape, generator=draw) for name, t in tensors.items()}


def _delta(epsilon: float, sigma: float) -> float:
    cdf = NormalDist().cdf
    tail = cdf(-1 / (2 * sigma) - epsilon * sigma)
    return cdf(1 / (2 * sigma) - epsilon * sigma) - (math.exp(min(epsilon, 700.0)) * tail if tail else 0.0)


def parse_send(text: str) -> float:
    """The share of the numbers that is trained and sent."""
    if text == "dense":
        return 1.0
    head, _, share = text.partition(":")
    try:
        value = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if head != "top" or not 0 < value <= 1:
        raise ConfigError(f"`--send {text}` is not a way to send", SEND_HINT)
    return value


def largest(tensors: Tensors, share: float) -> Masks:
    """Where the largest numbers of all tensors together are."""
    if share >= 1:
        return {}
    sizes = torch.cat([t.abs().flatten() for t in tensors.values()])
    limit = sizes.kthvalue(len(sizes) - max(1, round(share * len(sizes))) + 1).values
    return {name: t.abs() >= limit for name, t in tensors.items()}


def restricted(tensors: Tensors, support: Masks) -> Tensors:
    """To the support; the others are zero."""
    return {name: torch.where(support[name], t, 0.0) for name, t in tensors.items()} if support else tensors


class Model:
    """The model with the recipe's scheme at the beginning of a round: device and server both have it."""

    def __init__(self, recipe: Recipe, rows: Sequence[Encoded], share: float = 1.0) -> None:
        """rows: the user's, share: of the numbers that are sent. In a federation the server's rows choose directions,
        channels and support; here these rows do, which can only show more of them."""
        plain = replace(recipe.how, compile="off", products="fp32", weights="fp32", optimizer_state="fp32")
        self.recipe = replace(recipe, how=plain)
        self.stack, self.scheme, self.parameters = build(self.recipe)
        some = list(rows[:CHOOSING_ROWS])
        self.scheme.method.choose_channels(self.stack, self.scheme, lambda: self._backward(some))
        self.clear()
        self.share, self.support = share, largest(self._squares(some), share) if share < 1 else {}

    def _backward(self, rows: Sequence[Encoded]) -> None:
        """Adds the gradients of the mean loss over all targets."""
        forest, every = Forest(rows, share=self.recipe.how.tree), list(range(len(rows)))
        live = forest.live(every, self.scheme.tokens) if self.scheme.tokens else None
        for part in forest.micro_batches(every, self.recipe.how.micro_batch_tokens):
            _, batch = batch_of(forest, part, live)
            at_cut = self.stack.trunk(batch, self.scheme.cut)
            loss = self.stack.head.loss(self.stack.top(at_cut, batch, self.scheme.cut), batch.targets)
            (loss / forest.trained(every)).backward()  # type: ignore[no-untyped-call]

    def embedding_gradient(self, row: Encoded) -> Tensor:
        """Of the mean loss, at the embedding of each token: (T, d)."""
        forest = Forest([row])
        _, batch = batch_of(forest, [0])
        embedded = self.stack.embed(batch.tokens).requires_grad_()
        at_cut = self.stack.run(embedded, batch, range(self.scheme.cut))
        loss = self.stack.head.loss(self.stack.top(at_cut, batch, self.scheme.cut), batch.targets)
        (loss / forest.trained([0])).backward()  # type: ignore[no-untyped-call]
        self.clear()
        slope: Tensor = embedded.grad
        return slope

    def clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradient(self, rows: Sequence[Encoded]) -> Tensors:
        """As one step of training over these rows has it."""
        self.clear()
        self._backward(rows)
        made = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        self.clear()
        return made

    def _squares(self, rows: Sequence[Encoded]) -> Tensors:
        """Of the gradients of each row alone, summed."""
        made = {name: torch.zeros_like(p.detach()) for name, p in self.parameters.items()}
        for row in rows:
            for name, gradient in self.gradient([row]).items():
                made[name] += gradient.square()
        return made

    def epoch(self, rows: Sequence[Encoded]) -> Tensors:
        """The change of the weights in one epoch over these rows, by the recipe's optimiser at its peak rates; then
        the weights are as before."""
        train = self.recipe.train
        optimizer = self.scheme.method.optimizer(self.stack, self.parameters, self.recipe)
        optimizer.masks = self.support
        rates, factor = Schedule(len(rows), train, self.stack.width), support_rate(self.share)
        optimizer.set_rate(*(factor * rate for rate in (rates.peak, rates.bias_peak, rates.low_rank_peak)))
        order = epoch_order(Forest(rows), list(range(len(rows))), train.seed, 0, train.order == "grouped")
        stored = checkpoint_tensors(self.stack, self.parameters)
        restored = {name: tensor.detach().clone() for name, tensor in stored.items()}
        before = {name: weight.clone() for name, weight in self._weights()}
        self.clear()
        for start in range(0, len(order), train.batch_rows):
            with optimizer.last_pass(0.0):
                self._backward([rows[i] for i in order[start : start + train.batch_rows]])
            optimizer.step()
        made = {name: weight - before[name] for name, weight in self._weights()}
        with torch.no_grad():
            for name, tensor in stored.items():
                tensor.copy_(restored[name])
        return made

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Of what is trained, as it is sent: what a parameter stands for, where it only carries the gradient."""
        layers = {f"{path}.{layer.stand_in}": layer for path, layer in trained_linears(self.stack).items()}
        for name, parameter in self.parameters.items():
            yield name, layers[name].dense_weight() if name in layers else parameter.detach()
