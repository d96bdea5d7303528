"""Numbers of a GGUF header, each within the limits that a model can have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from edgeft.errors import ModelError

if TYPE_CHECKING:
    from edgeft.formats.gguf import GGUF

LARGEST = 1 << 31  # of any number in a header


def whole(gguf: GGUF, key: str, default: int | None = None, low: int = 1, high: int = LARGEST) -> int:
    """An integer of `<architecture>.<key>`."""
    value = gguf.need(key) if default is None else gguf.get(key, default)
    if type(value) is not int or not low <= value <= high:
        raise _odd(gguf, key, value)
    return value


def real(gguf: GGUF, key: str, default: float | None = None) -> float:
    """A number above 0."""
    value = gguf.need(key) if default is None else gguf.get(key, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise _odd(gguf, key, value)
    return float(value)


def _odd(gguf: GGUF, key: str, value: object) -> ModelError:
    return ModelError(
        f"{gguf.path.name} says that {gguf.arch}.{key} is {str(value)[:80]}, which is not supported",
        "download or copy it again",
    )


def read_rope(gguf: GGUF, head: int) -> dict[str, Any]:
    """transformers' rope parameters; frequency factors in the file (LLaMA 3) are applied when it is loaded."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": real(gguf, "rope.freq_base", 10000.0)}
    kind = gguf.get("rope.scaling.type", "none")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": real(gguf, "rope.scaling.factor", 1.0)}
    elif kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": real(gguf, "rope.scaling.factor", 1.0),
            "original_max_position_embeddings": whole(gguf, "rope.scaling.original_context_length"),
        }
    elif kind != "none":
        raise ModelError(f"{gguf.path.name} has the rope scaling `{str(kind)[:40]}`, which is not supported")
    if gguf.get("rope.dimension_count", head) != head:
        raise ModelError(f"{gguf.path.name} rotates only a part of each head, which is not supported")
    return rope


def plain_rotation(values: dict[str, Any]) -> bool:
    """A rotation that edgeft computes itself; others are left to transformers."""
    return values["rope_parameters"]["rope_type"] in ("default", "linear")
