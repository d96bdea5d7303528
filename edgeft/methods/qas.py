"""`qas`: W = s W̄ with W̄ in int8 and a scale for each row, trained by quantisation-aware scaling (int8.py).

W̄ is the only copy of the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgeft.methods.base import Method, Traits, Update, weight_of

if TYPE_CHECKING:
    import torch

    from edgeft.config import Recipe
    from edgeft.engine.backend import Backend
    from edgeft.engine.optimizer import Optimizer
    from edgeft.engine.stack import Stack
    from edgeft.methods.scheme import Scheme


class Qas(Method):
    name = "qas"
    about = "the chosen tensors, as int8 with a scale for each row"
    optimizer_states = ("fp32", "8bit")
    base_note = ", int8"  # rounded before the first step
    weight_bytes = 1
    traits = Traits(replaces_base=True)

    def momentum_bytes(self, state: str) -> int:
        return 1 if state == "8bit" else 4

    def build(self, module: Any, scheme: Scheme, update: Update, seed: int, name: str) -> torch.nn.Module:
        import torch

        from edgeft.methods.int8 import LARGEST
        from edgeft.methods.layer import TrainedLinear, stand_in

        layer = TrainedLinear(self, module)
        dense = weight_of(module)
        scales = dense.abs().amax(1).clamp_(min=1e-12).div_(LARGEST)
        layer.register_buffer("codes", dense.div_(scales[:, None]).round_().to(torch.int8))  # W̄ (O, I)
        layer.register_buffer("scales", scales)  # s (O,)
        layer.weight = stand_in(layer)
        layer.stand_in = "weight"
        return layer

    def operand(self, layer: Any, backend: Backend, bf16: bool) -> torch.Tensor:
        """In the buffer that the next weight overwrites."""
        import torch

        dtype = torch.bfloat16 if bf16 else torch.float32
        out = backend.memory.weights.take(layer.out_features, layer.in_features, dtype)
        if bf16:
            return torch.mul(layer.codes, layer.scales[:, None], out=out)  # rounded once
        return out.copy_(layer.codes).mul_(layer.scales[:, None])  # eight times as fast

    def dense_weight(self, layer: Any) -> torch.Tensor:
        weight: torch.Tensor = layer.codes * layer.scales[:, None]
        return weight

    def optimizer(self, stack: Stack, parameters: dict[str, torch.nn.Parameter], recipe: Recipe) -> Optimizer:
        from edgeft.methods.int8 import Int8Optimizer
        from edgeft.methods.layer import trained_linears

        layers = {f"{path}.weight": layer for path, layer in trained_linears(stack).items()}
        return Int8Optimizer(parameters, layers, recipe, stack.options.backend)


QAS = Qas()
