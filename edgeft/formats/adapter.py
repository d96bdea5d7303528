"""A LoRA adapter as a GGUF file: what was learned beside a base file that many can share.

Names are llama.cpp's: NAME.lora_a (r, inputs) and NAME.lora_b (outputs, r) for each changed matrix NAME.
"""

from __future__ import annotations

from pathlib import Path

from edgeft.errors import ModelError
from edgeft.formats.gguf import GGUF
from edgeft.formats.source import demo_model, is_gguf

KIND, ALPHA = "adapter.type", "adapter.lora.alpha"
BASE_KEY = "edgeft.base"
BASE = "base.gguf"  # beside an adapter whose base model is a Hugging Face folder
PARTS = (".lora_a", ".lora_b")
TYPE = PARTS[0][1:-2]  # of the adapter, as in these names


def is_adapter(path: str | Path) -> bool:
    """A GGUF file that needs a base file beside it."""
    return is_gguf(path) and Path(path).is_file() and GGUF.open(path).get_key("general.type") == "adapter"


def named_base(path: str | Path) -> Path | None:
    """The base model that a file of edgeft names, if it is in the same folder or is the embedded one."""
    name = str(GGUF.open(path).get_key(BASE_KEY))
    candidates = [one for one in (Path(path).with_name(Path(name).name), demo_model()) if one is not None]
    return next((one for one in candidates if one.name == name and one.is_file()), None)


def check_adapter(path: str | Path, base: str | Path) -> None:
    """An adapter that may be handed to llama.cpp with this base: it may abort on one that is damaged."""
    adapter, model = GGUF.open(path), GGUF.open(base)
    if adapter.get_key("general.type") != "adapter" or adapter.get_key(KIND) != TYPE:
        raise ModelError(f"{path} is not a LoRA adapter", "give a file that `edgeft export --format gguf-lora` wrote")
    kind, wanted = (str(file.get_key("general.architecture")) for file in (adapter, model))
    if kind != wanted:
        what = f"{path} is an adapter for `{kind}` models, and {model.path.name} is of `{wanted}`"
        raise ModelError(what, "name the base model it was trained on with --base")
    for name in adapter.tensors:
        target, part = name[: -len(PARTS[0])], name[-len(PARTS[0]) :]
        shapes = [adapter.tensors[target + one].shape for one in PARTS if target + one in adapter.tensors]
        whole = model.tensors.get(target)
        fits = part in PARTS and whole is not None and len(shapes) == 2 and len(shapes[0]) == len(shapes[1]) == 2
        if not (fits and whole and (shapes[0][0], shapes[1][1]) == whole.shape and shapes[0][1] == shapes[1][0]):
            raise ModelError(f"{name} of {path} does not fit {model.path.name}", "name its base model with --base")
