"""Machines that train one model together: which of them this one is, and how they find each other.

The environment states it, in torchrun's names: torchrun and `accelerate launch` set it, and `--nodes` does for the
processes that it starts.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass

import psutil

from edgeft.errors import ConfigError

PORT = 29500
HINT = "name every machine once, in the same order on all of them: --nodes 192.168.1.10,192.168.1.11"


@dataclass(frozen=True)
class Place:
    rank: int = 0
    count: int = 1
    same_machine: bool = False  # as a node before it

    @property
    def suffix(self) -> str:
        """Of the run folder: nodes of one machine have their own."""
        return f"-node{self.rank}" if self.same_machine else ""


def place() -> Place:
    """Of this process among the nodes."""
    values = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if not values["WORLD_SIZE"]:
        return Place()
    try:
        rank, count, local = (int(value or 0) for value in values.values())
    except ValueError:
        rank, count, local = 0, 0, 0
    if not 0 <= rank < count:
        stated = ", ".join(f"{name}={value}" for name, value in values.items() if value)
        raise ConfigError(f"the environment names no node: {stated}", "unset WORLD_SIZE to train on this machine alone")
    return Place(rank, count, local > 0)


def address() -> str:
    """Where the nodes meet."""
    return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', PORT)}"


def use_nodes(text: str) -> None:
    """`--nodes`: host or address of every machine, the first also with a port; this one is found among them."""
    hosts = [host.strip() for host in text.split(",") if host.strip()]
    match = re.fullmatch(r"([^:]+|\[.+\])(?::(\d{1,5}))?", hosts[0]) if hosts else None
    if match is None or len(hosts) < 2 or len(set(hosts)) < len(hosts):
        raise ConfigError(f"`--nodes {text}` does not name several machines", HINT)
    hosts[0], port = match[1], int(match[2] or PORT)
    addresses = [_resolve(host) for host in hosts]
    local = _local_addresses()
    mine = [rank for rank, address in enumerate(addresses) if address in local]
    if len(mine) != 1:
        what = "none of them is this machine" if not mine else "several of them are this machine"
        raise ConfigError(f"`--nodes {text}`: {what} ({', '.join(sorted(local))})", HINT)
    rank = mine[0]
    if addresses[rank].startswith("127."):
        raise ConfigError(f"{hosts[rank]} is {addresses[rank]}, which other machines cannot reach", HINT)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0",
        "MASTER_ADDR": addresses[0], "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": local[addresses[rank]],  # else gloo takes what the host's own name resolves to
    }  # fmt: skip


def _resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        raise ConfigError(f"`--nodes`: {host} has no address", HINT) from None


def _local_addresses() -> dict[str, str]:
    """Address → network interface."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    every = psutil.net_if_addrs().items()
    return {one.address.split("%")[0]: name for name, found in every for one in found if one.family in kinds}
