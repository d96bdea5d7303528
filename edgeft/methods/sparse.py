"""`sparse`: of each chosen tensor all input channels, some of them, or a low-rank update beside it.

Channels are trained in float32; those that are not trained stay as they were stored. Whole tensors may be bf16 with
stochastic rounding. A low-rank update is
y = x Wᵀ + b + (x Aᵀ) Bᵀ with W packed and A fixed: the r input directions in which the gradient is largest, found once
before training. Only B is trained, so only x Aᵀ, r numbers a token, is kept for the backward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from edgeft.methods.base import Method, Traits, Update, channel_count, weight_of

if TYPE_CHECKING:
    import torch

    from edgeft.config import Recipe
    from edgeft.engine.backend import Backend
    from edgeft.engine.optimizer import Optimizer
    from edgeft.engine.stack import Stack
    from edgeft.methods.scheme import Scheme

OUTPUT_TOKENS = 64  # on which the size of a layer's output is measured
OVERSAMPLED = 2  # random directions of the gradient's sketch, as a multiple of the rank


class Sparse(Method):
    name = "sparse"
    about = "the chosen tensors themselves, or low-rank updates of them"
    partial = bf16_weights = True
    traits = Traits(replaces_base=True, dense=True)
    low_rank_traits = Traits(frugal=True, float32_inputs=True)

    def traits_of(self, update: Update) -> Traits:
        return self.low_rank_traits if update.rank else self.traits

    def validate(self, scheme: Scheme) -> None:
        """Biases and norms alone are enough."""

    def trained_sizes(self, update: Update, rows: int, cols: int) -> list[int]:
        return [update.rank * rows] if update.rank else super().trained_sizes(update, rows, cols)

    def update_flops(self, update: Update, rows: int, cols: int) -> float:
        """Without the gradient of A, which is fixed."""
        return update.rank * (6.0 * rows + 4.0 * cols) if update.rank else super().update_flops(update, rows, cols)

    def kept_width(self, update: Update, cols: int) -> int:
        return update.rank or super().kept_width(update, cols)

    def build(self, module: Any, scheme: Scheme, update: Update, seed: int, name: str) -> torch.nn.Module:
        import torch

        from edgeft.methods.layer import TrainedLinear, stand_in

        if update.rank:
            layer: Any = TrainedLinear(self, module)
            layer.base, layer.scale = module, 1.0
            layer.register_buffer("down", _random_directions(update.rank, layer.in_features, seed, name))  # A (r, I)
            layer.up = torch.nn.Parameter(torch.zeros(layer.out_features, update.rank))  # B (O, r)
            return layer  # type: ignore[no-any-return]
        if update.share >= 1 and scheme.bf16_weights:
            layer = TrainedLinear(self, module)
            layer.register_buffer("stored", weight_of(module).bfloat16())
            layer.weight = stand_in(layer)
            layer.stand_in = "weight"
            return layer  # type: ignore[no-any-return]
        if update.share >= 1:
            from edgeft.engine.linear import empty_linear

            linear = empty_linear(module.in_features, module.out_features)
            linear.weight = torch.nn.Parameter(weight_of(module))
            linear.bias = module.bias
            return linear
        columns = _first_channels(module, channel_count(update.share, module.in_features), scheme.choose)
        layer = TrainedLinear(self, module)
        layer.base = module
        layer.register_buffer("columns", columns)  # (C,) ascending
        layer.part = torch.nn.Parameter(weight_of(module)[:, columns])  # (O, C)
        return layer  # type: ignore[no-any-return]

    def operand(self, layer: Any, backend: Backend, bf16: bool) -> torch.Tensor:
        return layer.stored  # type: ignore[no-any-return]

    def optimizer(self, stack: Stack, parameters: dict[str, torch.nn.Parameter], recipe: Recipe) -> Optimizer:
        from edgeft.methods.layer import trained_linears

        made = super().optimizer(stack, parameters, recipe)
        layers = {path: layer for path, layer in trained_linears(stack).items() if layer.stand_in}
        made.bf16_weights = {f"{path}.{layer.stand_in}": layer.stored for path, layer in layers.items()}  # type: ignore[misc]
        return made

    def dense_weight(self, layer: Any) -> torch.Tensor:
        if layer.stand_in:
            return layer.stored.float()  # type: ignore[no-any-return]
        if hasattr(layer, "up"):
            return weight_of(layer.base).addmm_(layer.up.detach(), layer.down)
        return weight_of(layer.base).index_copy_(1, layer.columns, layer.part.detach())

    def low_rank(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        return (layer.down, layer.up.detach()) if hasattr(layer, "up") else None

    def choose_channels(self, stack: Stack, scheme: Scheme, backward: Callable[[], None]) -> bool:
        """Those with the largest gradients, or the directions in which they are; only before anything is trained."""
        import torch

        from edgeft.methods.layer import trained_linears

        layers: list[Any] = [layer for layer in trained_linears(stack).values() if not layer.stand_in]
        if not scheme.chooses or not layers:
            return False
        observers = [_Sketch(layer) if hasattr(layer, "up") else _Squares(layer) for layer in layers]
        for layer, observer in zip(layers, observers, strict=True):
            layer.observer = observer.add
        backward()
        with torch.no_grad():
            for layer, observer in zip(layers, observers, strict=True):
                layer.observer = None
                observer.choose()
        return True


class _Squares:
    """Squares of the weight gradient, summed by input channel."""

    def __init__(self, layer: Any) -> None:
        import torch

        self.layer, self.total = layer, torch.zeros(layer.in_features)

    def add(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        self.total += (dy.T @ x).float().square_().sum(0)

    def choose(self) -> None:
        columns = largest(self.total, len(self.layer.columns))
        self.layer.columns.copy_(columns)
        self.layer.part.copy_(weight_of(self.layer.base)[:, columns])


class _Sketch:
    """The weight gradient G = dyᵀ x (O, I) seen through random outputs, Ωᵀ G (k, I): its rows span nearly the same
    input directions as G's largest singular vectors, and G itself never exists."""

    def __init__(self, layer: Any) -> None:
        import torch

        self.layer, count = layer, OVERSAMPLED * len(layer.down)
        draw = torch.Generator().manual_seed(layer.out_features)
        self.omega = torch.randn(layer.out_features, count, generator=draw)  # (O, k)
        self.total = torch.zeros(count, layer.in_features)
        self.squares = torch.zeros(layer.in_features)  # of inputs, summed over tokens
        self.tokens, self.output = 0, 0.0  # output: root mean square of y in the first pass

    def add(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        self.total += ((dy @ self.omega.to(dy.dtype)).T @ x).float()
        x = x[dy.any(1)].float()  # not the context, nor the rows that pad a product
        self.squares += x.square().sum(0)
        self.tokens += len(x)
        if not self.output:
            some = x[:: max(1, len(x) // OUTPUT_TOKENS)]
            self.output = float((some @ weight_of(self.layer.base).T).square().mean().sqrt())

    def choose(self) -> None:
        """x Aᵀ has about unit variance and is multiplied with the layer's output size: a step of Adam then changes the
        output by about √r · rate of itself, in every layer and model. Directions count by the roots of their singular
        values, of the first 1: what is mostly noise must not move as far as what carries the gradient."""
        import torch

        if not torch.isfinite(self.total).all():
            return  # random ones stay; a step with such gradients is skipped, too
        count, mean = len(self.layer.down), self.squares / max(1, self.tokens)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # small, and the same bits for any number of threads
        total = self.total.double()
        squares, left = torch.linalg.eigh(total @ total.T)  # (k, k); ascending
        sizes = squares.flip(0)[:count].clamp(min=1e-30).sqrt().float()[:, None]
        rows = torch.nn.functional.normalize((left.flip(1)[:, :count].T @ total).float())
        rows /= (rows.square() @ mean).sqrt().clamp_(min=1e-6)[:, None]
        self.layer.down.copy_(rows * (sizes / sizes[0]).sqrt() * self.output)
        torch.set_num_threads(threads)


def largest(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest, ascending; of equal ones the first."""
    return sizes.argsort(descending=True, stable=True)[:count].sort().values


def _first_channels(base: Any, count: int, choose: str) -> torch.Tensor:
    """Until gradients are known: the largest columns of the weight, or the first ones."""
    import torch

    return largest(weight_of(base).square_().sum(0), count) if choose == "weight" else torch.arange(count)


def _random_directions(rank: int, inputs: int, seed: int, name: str) -> torch.Tensor:
    """(r, I), each of length 1: until gradients are known, or where nothing is chosen by them."""
    import torch

    draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.nn.functional.normalize(torch.randn(rank, inputs, generator=draw))


SPARSE = Sparse()
