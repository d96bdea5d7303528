"""A method: how it builds its layers, what it saves, how it merges at export, what it costs.

No torch at import: the planner asks the same objects. What needs torch imports it late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from edgeft.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from edgeft.config import Recipe
    from edgeft.engine.backend import Backend
    from edgeft.engine.optimizer import Optimizer
    from edgeft.engine.stack import Stack
    from edgeft.methods.scheme import Scheme


class Update(NamedTuple):
    """What is trained of one weight."""

    share: float = 1.0  # of its input channels, themselves
    rank: int = 0  # above 0: a low-rank matrix beside it instead


@dataclass(frozen=True)
class Traits:
    """What an update costs beyond its numbers."""

    frugal: bool = False  # no gradient reads the layer's whole input: most of a block can be recomputed from little
    selective: bool = False  # and always is: the method is for little memory
    replaces_base: bool = False  # the packed weight is never read again
    dense: bool = False  # and is a float32 matrix, which no product has to unpack
    float32_inputs: bool = False  # what it keeps of an input is float32, also with bf16 products


class Method:
    """The defaults are those of a method that trains a small matrix beside each frozen weight, or replaces it."""

    name: str
    about: str  # as in the explanation of `update.method`

    # What it can do
    partial = False  # trains a share of a tensor's input channels; a search looks for these
    ranked = False  # `update.rank` sets its size
    uses_peft = False  # its layers are PEFT's: transformers' blocks are needed, and an adapter can be exported
    bf16_weights = False  # has `how.weights: bf16`
    optimizer_states: tuple[str, ...] = ("fp32", "bf16", "8bit")
    base_note = ""  # added to the key of the held-out loss before training, where that is not the base model's

    # What it costs
    weight_bytes = 4  # of a trained number
    traits = Traits()

    def traits_of(self, update: Update) -> Traits:
        return self.traits

    def validate(self, scheme: Scheme) -> None:
        if not scheme.updates:
            raise ConfigError(f"`update.method: {self.name}` needs update.weights and update.tensors")
        if not self.partial and any(update.rank and not self.ranked for update in scheme.updates.values()):
            raise ConfigError(f"`update.low_rank` does not go with `update.method: {self.name}`", "use `sparse`")
        if not self.partial and min(update.share for update in scheme.updates.values()) < 1:
            raise ConfigError(
                f"`update.method: {self.name}` trains all input channels of a tensor",
                "use `--set update.channels=1`, or `--set update.method=sparse`",
            )

    def trained_sizes(self, update: Update, rows: int, cols: int) -> list[int]:
        """Numbers in each trained tensor."""
        return [rows * channel_count(update.share, cols)]

    def update_flops(self, update: Update, rows: int, cols: int) -> float:
        """Per token: what training adds to the frozen layer's products."""
        return 2.0 * rows * channel_count(update.share, cols)

    def kept_width(self, update: Update, cols: int) -> int:
        """Numbers per token of the layer's input that its backward pass reads."""
        return channel_count(update.share, cols)

    def kept_by_torch(self, update: Update, width: int) -> int:
        """Numbers per token and layer that plain torch keeps besides."""
        return 0

    def momentum_bytes(self, state: str) -> int:
        """Of a trained number, that SGD keeps."""
        return 4

    def build(self, module: Any, scheme: Scheme, update: Update, seed: int, name: str) -> torch.nn.Module:
        """The layer that takes the frozen one's place, mostly a TrainedLinear. `name` is its path in the model."""
        raise NotImplementedError

    def inject(self, stack: Stack, scheme: Scheme, seed: int) -> None:
        """For a method that changes the whole stack at once, after `build`."""

    def operand(self, layer: Any, backend: Backend, bf16: bool) -> torch.Tensor:
        """A TrainedLinear's weight as a product reads it, if it has no base."""
        raise NotImplementedError

    def dense_weight(self, layer: Any) -> torch.Tensor:
        """The merged float32 weight of a TrainedLinear, in memory of its own."""
        raise NotImplementedError

    def low_rank(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(A (r, I), B (O, r)) of a layer whose weight is its base's + B A; None: it is not of that form."""
        return None

    def choose_channels(self, stack: Stack, scheme: Scheme, backward: Callable[[], None]) -> bool:
        """Before the first step. `backward` runs over a few rows; False: nothing to choose."""
        return False

    def optimizer(self, stack: Stack, parameters: dict[str, torch.nn.Parameter], recipe: Recipe) -> Optimizer:
        from edgeft.engine import optimizer

        return optimizer.make(parameters, recipe.train, recipe.how, stack.options.backend)


def weight_of(module: Any) -> torch.Tensor:
    """The dense float32 weight of any linear layer that a stack can hold, in memory of its own."""
    if hasattr(module, "dense_weight"):  # packed, or trained in part
        return module.dense_weight()  # type: ignore[no-any-return]
    return module.weight.detach().float().clone()  # type: ignore[no-any-return]


def channel_count(share: float, inputs: int) -> int:
    """Input channels that are trained: whole groups of 32, as packed weights have, where any fit."""
    if share >= 1:
        return inputs
    count = max(1, round(share * inputs))
    return min(inputs, (count + 16) // 32 * 32) or count
