"""What is trained, and how: schemes, and one file for each method, in this registry."""

from __future__ import annotations

from edgeft.methods.base import Method
from edgeft.methods.lora import LORA
from edgeft.methods.qas import QAS
from edgeft.methods.sparse import SPARSE
from edgeft.methods.tinytl import TINYTL

METHODS: dict[str, Method] = {method.name: method for method in (SPARSE, LORA, TINYTL, QAS)}


def get(name: str) -> Method:
    return METHODS[name]
