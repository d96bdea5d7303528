"""`sparse`: the chosen tensors themselves, whole or some of their input channels, in float32.

Channels that are not trained stay as they were stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from edgeft.methods.base import Method, channel_count, weight_of

if TYPE_CHECKING:
    import torch

    from edgeft.engine.stack import Stack
    from edgeft.methods.scheme import Scheme


class Sparse(Method):
    name = "sparse"
    about = "the chosen tensors themselves"
    partial = True
    replaces_base = True
    dense = True

    def validate(self, scheme: Scheme) -> None:
        """Biases and norms alone are enough."""

    def build(self, module: Any, scheme: Scheme, share: float, seed: int, name: str) -> torch.nn.Module:
        import torch

        from edgeft.methods.layer import TrainedLinear

        if share >= 1:
            linear = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            linear.weight = torch.nn.Parameter(weight_of(module))
            linear.bias = module.bias
            return linear
        columns = _first_channels(module, channel_count(share, module.in_features), scheme.choose)
        layer = TrainedLinear(self, module)
        layer.base = module
        layer.register_buffer("columns", columns)  # (C,) ascending
        layer.part = torch.nn.Parameter(weight_of(module)[:, columns])  # (O, C)
        return layer

    def dense_weight(self, layer: Any) -> torch.Tensor:
        return weight_of(layer.base).index_copy_(1, layer.columns, layer.part.detach())

    def choose_channels(self, stack: Stack, scheme: Scheme, backward: Callable[[], None]) -> bool:
        """Those with the largest gradients; only before anything is trained."""
        import torch

        from edgeft.methods.layer import trained_linears

        layers: list[Any] = list(trained_linears(stack).values())
        if scheme.choose != "gradient" or not layers:
            return False
        for layer in layers:
            layer.observe()
        backward()
        with torch.no_grad():
            for layer in layers:
                columns = largest(layer.gradient_sizes, len(layer.columns))
                layer.columns.copy_(columns)
                layer.part.copy_(weight_of(layer.base)[:, columns])
                layer.gradient_sizes = None
        return True


def largest(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest, ascending; of equal ones the first."""
    return sizes.argsort(descending=True, stable=True)[:count].sort().values


def _first_channels(base: Any, count: int, choose: str) -> torch.Tensor:
    """Until gradients are known: the largest columns of the weight, or the first ones."""
    import torch

    return largest(weight_of(base).square_().sum(0), count) if choose == "weight" else torch.arange(count)


SPARSE = Sparse()
