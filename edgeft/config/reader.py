"""Strict YAML, and the list of knobs, both read from the dataclasses that declare them.

An unknown key, a wrong type or an impossible value is a ConfigError that names the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import reprlib
import types
import typing
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from edgeft.config.schema import Device, Recipe
from edgeft.errors import ConfigError, ConfigWarning


@dataclass(frozen=True)
class Removed:
    """A key that earlier versions knew."""

    kept: Any  # the value that asks for what always happens now; every other asks for something that is gone
    now: str  # what always happens now


# Accepted and ignored with a warning for this version.
REMOVED = {
    "how.prune": Removed(True, "gradients that nothing uses are never computed"),
    "how.supervised_only": Removed(True, "the head and the last block run at trained positions only"),
    "train.token_share": Removed(1, "gradients pass through all positions"),
    "update.qas": Removed(True, "int8 weights are always updated with quantisation-aware scaling"),
    "update.rounding": Removed("stochastic", "int8 weights are always stochastically rounded"),
}

MAX_YAML_BYTES = 256 << 10  # takes a few seconds to parse even on a slow board


def suggest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean `{close[0]}`?" if close else f"known: {', '.join(known)}"


def shown(value: Any) -> str:
    """A value for a message, truncated."""
    return reprlib.repr(value)


def type_name(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(type_name(h) for h in typing.get_args(hint))
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "nothing"}
    return {list: "a list", dict: "a table of keys", **words}[typing.get_origin(hint) or hint]


def _coerce(value: Any, hint: Any, key: str, meta: dict[str, Any]) -> Any:
    if hint is Any:
        return _checked(value, key, meta)
    about = f"{key}: {meta.get('about', '')}"
    bad = ConfigError(f"`{key}` must be {type_name(hint)}, not {shown(value)}", about)
    if isinstance(hint, types.UnionType):
        if value is None or value == "none":  # the explanations say "none = …"
            return None
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    if typing.get_origin(hint) is list:
        if isinstance(value, str):  # --set update.tensors=q,v
            value = [part.strip() for part in value.strip("[]").split(",") if part.strip()]
        if not isinstance(value, list):
            raise bad
        item_type = typing.get_args(hint)[0]
        if dataclasses.is_dataclass(item_type):
            return [build(typing.cast(type, item_type), item, f"{key}.{n}") for n, item in enumerate(value)]
        return [_coerce(item, item_type, key, meta) for item in value]
    if typing.get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise bad
        return value
    if hint is float and isinstance(value, (str, int)) and not isinstance(value, bool):  # YAML 1.1 reads 2e-4 as text
        try:
            value = float(value)
        except (ValueError, OverflowError):
            raise bad from None
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)) or (hint is int and abs(value) >> 63):
        raise bad
    if meta.get("choices") and value not in meta["choices"]:
        raise ConfigError(f"`{key}` cannot be {shown(value)}", suggest(str(value), [str(c) for c in meta["choices"]]))
    low, high = meta.get("low"), meta.get("high")
    if (low is not None and value < low) or (high is not None and value > high):
        limits = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
        raise ConfigError(f"`{key}` is {value}; it must be {limits}", about)
    return _checked(value, key, meta)


def _checked(value: Any, key: str, meta: dict[str, Any]) -> Any:
    if check := meta.get("check"):
        try:
            check(value)
        except ValueError as error:
            raise ConfigError(f"`{key}`: {error}", f"{key}: {meta.get('about', '')}") from None
    return value


def build(cls: type[Any], values: Any, where: str = "", base: Any = None, recorded: bool = False) -> Any:
    """A dataclass from nested dictionaries, over `base` (or the defaults); unknown keys are refused.

    recorded: the values are those of an earlier run; removed keys are dropped without a warning.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"`{where or cls.__name__.lower()}` must be a table of keys, not {shown(values)}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    start = cls() if base is None else base
    made: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{where}.{name}" if where else name
        if isinstance(key, str) and _is_removed(key, value, recorded):
            continue
        if name not in fields:
            word = name[:80] if isinstance(name, str) else shown(name)
            raise ConfigError(f"unknown key `{where + '.' if where else ''}{word}`", suggest(word, list(fields)))
        if dataclasses.is_dataclass(hints[name]):
            made[name] = build(typing.cast(type, hints[name]), value, key, getattr(start, name), recorded)
        else:
            made[name] = _coerce(value, hints[name], key, dict(fields[name].metadata))
    return dataclasses.replace(start, **made)


def _is_removed(key: str, value: Any, recorded: bool) -> bool:
    """Whether to ignore the key; ConfigError where its value asks for something that is gone."""
    removed = REMOVED.get(key)
    if removed is None:
        return False
    if not recorded:
        if value != removed.kept:
            raise ConfigError(f"`{key}` can no longer be {shown(value)}: {removed.now}", f"leave out `{key}`")
        warnings.warn(f"`{key}` is ignored, it is no longer a knob: {removed.now}", ConfigWarning, stacklevel=2)
    return True


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which the second would silently win, and aliases: a few lines of those make a
    document that contains itself or exceeds any memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not supported", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key `{key.value}`", key.start_mark)
            seen.add(str(key.value))
        return typing.cast(dict[Any, Any], super().construct_mapping(node, deep))


def _short(construct: Any) -> Any:
    """Refuses numbers of thousands of digits, which Python cannot print."""

    def checked(loader: _Loader, node: yaml.ScalarNode) -> Any:
        if len(str(node.value)) > 1000:
            raise yaml.constructor.ConstructorError(None, None, "a number with too many digits", node.start_mark)
        return construct(loader, node)

    return checked


_Loader.add_constructor("tag:yaml.org,2002:int", _short(_Loader.construct_yaml_int))
_Loader.add_constructor("tag:yaml.org,2002:float", _short(_Loader.construct_yaml_float))


def parse(text: str) -> Any:
    """One YAML document; every defect is a YAMLError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, OverflowError, RecursionError) as error:  # 2024-13-45 looks like a date; [[[[… goes too deep
        raise yaml.YAMLError(str(error)) from None
    except (AttributeError, LookupError, TypeError):  # PyYAML raises these for !!timestamp x, !!bool x, !!set x
        raise yaml.YAMLError("a tag (!!…) that does not match its value") from None


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():  # reading a pipe would block
            raise ConfigError(f"{path} is not a regular file", "recipes are YAML files")
        with path.open("rb") as file:
            raw = file.read(MAX_YAML_BYTES + 1)
        if len(raw) > MAX_YAML_BYTES:
            raise ConfigError(f"{path} has more than {MAX_YAML_BYTES >> 10} KiB", "recipes are short YAML files")
        text = raw.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", "recipes are YAML files") from None
    try:
        values = parse(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{path}{line}: not valid YAML ({problem})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a table of keys", "a recipe looks like `train: {epochs: 3}`")
    return values


class _Dumper(yaml.SafeDumper):
    """Quotes text with Unicode line breaks, which would otherwise be read back as \\n."""


def _quote(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    rare = any(mark in text for mark in "\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if rare else None)


_Dumper.add_representer(str, _quote)


def dump(recipe: Recipe) -> str:
    return yaml.dump(dataclasses.asdict(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def scalar(value: Any) -> str:
    """One value as written in a recipe file."""
    text = yaml.dump(value, Dumper=_Dumper, allow_unicode=True, default_flow_style=True, width=10000)
    return text.removesuffix("...\n").strip()


@dataclass(frozen=True)
class Knob:
    key: str  # as `--set` takes it
    file: str  # recipe or device
    type: str
    default: Any
    choices: list[Any]  # empty: no fixed choices
    low: float | None  # limits, both included
    high: float | None
    about: str

    @property
    def limits(self) -> str:
        if self.choices:
            return "one of " + ", ".join(map(scalar, self.choices))
        if self.high is not None:
            return f"from {self.low:.12g} to {self.high:.12g}"
        return "" if self.low is None else f"at least {self.low:.12g}"


def knobs(word: str = "") -> list[Knob]:
    """Those with `word` in their key, explanation or kind of file, upper and lower case alike."""
    every = [*_knobs_of(Recipe, "recipe"), *_knobs_of(Device, "device")]
    matching = [knob for knob in every if word.lower() in f"{knob.key}\n{knob.about}\n{knob.file}".lower()]
    if not matching:
        hint = suggest(word, sorted({part for knob in every for part in (knob.key, knob.key.rpartition(".")[2])}))
        hint = hint if hint.startswith("did") else "`edgeft knobs` lists all of them"
        raise ConfigError(f"no knob has `{word}` in its key or explanation", hint)
    return matching


def _knobs_of(cls: type[Any], file: str, prefix: str = "") -> Iterator[Knob]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _knobs_of(typing.cast(type, hint), file, f"{key}.")
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        limits: dict[str, Any] = {name: field.metadata.get(name) for name in ("low", "high", "about")}
        kind = "any" if hint is Any else type_name(hint)
        yield Knob(key, file, kind, default, list(field.metadata.get("choices", ())), **limits)
        for item in typing.get_args(hint):  # update.parts: a list of tables
            if dataclasses.is_dataclass(item):
                yield from _knobs_of(typing.cast(type, item), file, f"{key}[].")
