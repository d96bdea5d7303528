"""What the server asks for: the terms, the same in all rounds, and the tensors that a round starts from.

A device refuses terms of another version and another base model before it computes anything.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from edgeft import __version__, config
from edgeft.config import Recipe
from edgeft.errors import ConfigError, DataError, EdgeftError, ModelError
from edgeft.federated import blob
from edgeft.federated.privacy import Privacy
from edgeft.federated.update import Indices, Layout, Send

PROTOCOL = 2
FIXED, TRAINED = "fixed:", "trained:"  # before the names of a task's arrays
SUPPORT = "support"  # the name of another


def other_version(version: Any, protocol: Any) -> EdgeftError:
    return EdgeftError(
        f"the server runs edgeft {str(version)[:40]} (protocol {str(protocol)[:9]}), this device {__version__}",
        "install the same version of edgeft on both",
    )


@dataclass(frozen=True)
class Terms:
    """What the server decides for a whole federation."""

    federation: str  # a random name: a device keeps its state for one federation
    model: str  # hash of the base model's weights
    model_name: str  # for messages
    rounds: int
    min_clients: int
    recipe: dict[str, Any]  # what of the recipe the devices use: see SHARED
    send: str = "dense"
    privacy: dict[str, float] | None = None
    version: str = __version__
    protocol: int = PROTOCOL

    @staticmethod
    def read(values: Any) -> Terms:
        """EdgeftError for another version, DataError for anything else that is not understood."""
        protocol, version = (values.get(key) if isinstance(values, dict) else None for key in ("protocol", "version"))
        if protocol != PROTOCOL:
            raise other_version(version, protocol)
        try:
            terms = Terms(**values)
            terms.checked()
        except (TypeError, ValueError, AttributeError, ConfigError) as error:
            raise DataError(f"the server's terms are not understood: {error}") from None
        return terms

    def checked(self) -> None:
        if not (self.rounds >= 1 and self.min_clients >= 1 and self.recipe.keys() <= SHARED.keys()):
            raise ValueError("rounds, clients or recipe")
        shared_recipe(self, Recipe())
        _ = self.sends, self.noise

    @cached_property
    def sends(self) -> Send:
        return Send.parse(self.send)

    @cached_property
    def noise(self) -> Privacy | None:
        return Privacy(**self.privacy) if self.privacy else None

    def check_model(self, model_id: str, name: str) -> None:
        if model_id != self.model:
            raise ModelError(
                f"{name} is not the base model of this federation ({self.model_name})",
                "give the same file with --model: its weights must be the same to the last bit",
            )


# The parts of a recipe that the server decides; all else, like threads and pauses, is the device's.
SHARED: dict[str, tuple[str, ...]] = {
    "model": ("frozen",),
    "data": ("max_tokens", "system"),
    "update": (),  # (): all of it
    "train": (),
}


def shared_part(recipe: Recipe) -> dict[str, Any]:
    values = asdict(recipe)
    return {part: {key: values[part][key] for key in keys or values[part]} for part, keys in SHARED.items()}


def shared_recipe(terms: Terms, own: Recipe) -> Recipe:
    """The device's recipe under the server's terms: all its rows are trained on, none is held out."""
    recipe: Recipe = config.build(Recipe, terms.recipe, base=own)
    return replace(recipe, name="federated", data=replace(recipe.data, heldout_share=0.0))


def pack_model(fixed: blob.Arrays, trained: blob.Arrays, support: Indices | None) -> blob.Arrays:
    """In one set of arrays."""
    arrays = {FIXED + name: array for name, array in fixed.items()}
    arrays |= {TRAINED + name: array for name, array in trained.items()}
    return arrays if support is None else {**arrays, SUPPORT: support}


@dataclass(frozen=True)
class Task:
    """One round for one device; the final one is the model that came of all rounds, with nothing to do."""

    terms: Terms
    round: int  # from 0
    fixed: blob.Arrays  # what training reads and does not change, like the directions of low-rank updates
    trained: blob.Arrays
    support: Indices | None = None  # the numbers of `trained` that are trained and sent; None: all
    accepted: int = -1  # last round whose update of this device has reached the model
    final: bool = False

    def pack(self) -> bytes:
        arrays = pack_model(self.fixed, self.trained, self.support)
        header = {"terms": asdict(self.terms), "round": self.round, "accepted": self.accepted, "final": self.final}
        return blob.pack(header, arrays)

    @staticmethod
    def unpack(data: bytes) -> Task:
        header, arrays = blob.unpack(data)
        terms, number, accepted = Terms.read(header.get("terms")), header.get("round"), header.get("accepted")
        final = header.get("final") is True
        if type(number) is not int or type(accepted) is not int or not 0 <= number < terms.rounds + final:
            raise DataError("the task has no round")
        fixed, trained = blob.part(arrays, FIXED), blob.part(arrays, TRAINED)
        if not trained or any(array.dtype != np.float32 for array in trained.values()):
            raise DataError("the task has no float32 tensors to train")
        if not all(np.isfinite(array).all() for array in (*fixed.values(), *trained.values())):
            raise DataError("the task's tensors have numbers that are NaN or infinite")
        support = arrays.get(SUPPORT)
        terms.sends.check(support, Layout.of(trained).total)
        return Task(terms, number, fixed, trained, support, accepted, final)

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.trained, self.support)

    @cached_property
    def digest(self) -> str:
        """The same for the same work: a device that has done it sends the same bytes again."""
        return hashlib.sha256(replace(self, accepted=-1).pack()).hexdigest()
