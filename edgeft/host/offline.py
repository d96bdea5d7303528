"""Whether this program and the processes that it starts may use the network.

Once offline, it stays offline; the libraries' own switches are set before they are imported.
"""

from __future__ import annotations

import os
import socket
import sys
from urllib.parse import urlsplit

from edgeft import config

QUIET = ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK", "DISABLE_TELEMETRY")
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")
HINT = "fetch it once without --offline, or give a file or folder"


def quiet() -> None:
    """Switches the libraries' telemetry off."""
    for name in QUIET:
        os.environ.setdefault(name, "1")


def disable_network() -> None:
    """No hub access from now on, in this process and in those that it starts."""
    quiet()
    os.environ.update(dict.fromkeys(OFFLINE, "1"))
    for module, name in (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE")):
        if module in sys.modules:  # it read the environment when it was imported
            setattr(sys.modules[module], name, True)


def disable_network_if(asked: bool, *sources: str | None) -> None:
    """If asked to, and always if every source is a local file or folder."""
    if asked or all(source is None or config.exists(source) for source in sources):
        disable_network()


def on() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def go_offline_if_unreachable() -> None:
    """Without a network the hub client retries for half a minute; offline, it uses its cache at once."""
    if on():
        return
    from huggingface_hub import constants

    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return  # the proxy resolves names
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = True
