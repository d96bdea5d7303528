"""What `edgeft[federated]` brings: Flower and Opacus, imported where they are used."""

from __future__ import annotations

from edgeft.errors import ConfigError


def missing(what: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"`{what}` needs {(error.name or 'a package').split('.')[0]}, which is not installed",
        "pip install 'edgeft[federated]' (Python 3.11 or later)",
    )
