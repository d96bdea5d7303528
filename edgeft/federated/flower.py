"""The server in Flower: a SuperLink as a process, and the devices that it knows as a Fleet.

Flower's telemetry and its question for updates are off. Tasks and updates are its messages; whatever fails on the way
is a reply with an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgeft.errors import EdgeftError
from edgeft.federated import net
from edgeft.federated.needs import missing
from edgeft.federated.server import Reply
from edgeft.federated.task import Terms
from edgeft.host import system
from edgeft.run.progress import Progress

# Flower reads them when it is imported. No proxy: a certificate is that of the server itself.
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "NO_PROXY": "*", "no_proxy": "*"}
BOOT = (
    "import sys, json; job = json.loads(sys.argv[1]); sys.path[:] = job['path']; "
    "import importlib; importlib.import_module(job['module']).main()"
)
START_S = 120.0  # for a process of Flower's to answer
POLL_S = 0.5
BLOB = "blob"  # the one array of a task, and of an update
TRAIN, END = "train", "query"  # types of messages


def require() -> None:
    """ConfigError with the extra's name if Flower is not installed; its messages are not this command's."""
    import logging

    os.environ.update(QUIET)
    try:
        import flwr.app  # noqa: F401
    except ImportError as error:
        raise missing("edgeft federate", error) from None
    logging.getLogger("flwr").setLevel(logging.ERROR)


def start_process(module: str, log: Path, **given: Any) -> subprocess.Popen[bytes]:
    """`main` of a module in a process that ends with this one; what it prints goes to the file."""
    job = {"path": [path for path in sys.path if path], "module": module, "parent": os.getpid(), **given}
    home = {"FLWR_HOME": str(log.parent / "flower")}
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(job), module],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, **QUIET, **home},
            **system.child_options([], None),
        )  # fmt: skip


def stop_process(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def pack(data: bytes, **numbers: int) -> Any:
    """A message's content: bytes, and numbers beside them."""
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

    array = Array(dtype="uint8", shape=(len(data),), stype="edgeft", data=data)
    return RecordDict({BLOB: ArrayRecord({BLOB: array}), "numbers": MetricRecord(numbers)})


def unpack(content: Any) -> tuple[bytes, dict[str, Any]]:
    """EdgeftError for a message that `pack` did not make."""
    try:
        return bytes(content[BLOB][BLOB].data), dict(content["numbers"])
    except (KeyError, TypeError, AttributeError):
        raise EdgeftError("a message of another kind") from None


class SuperLink:
    """The process, and the way in for the server: Flower's Grid."""

    def __init__(self, identity: net.Identity, host: str, port: int, terms: Terms, max_bytes: int) -> None:
        self.identity = identity
        self.address = f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"  # for this machine
        self.log = identity.folder / "superlink.log"
        given = {"folder": str(identity.folder), "host": host, "port": port, "terms": asdict(terms)}
        self.process = start_process("edgeft.federated.superlink", self.log, max_bytes=max_bytes, **given)

    @contextlib.contextmanager
    def grid(self) -> Iterator[Any]:
        """Once the SuperLink answers; it ends with the context. EdgeftError as soon as it has ended by itself."""
        import httpx

        try:
            certificate = self.identity.certificate.read_bytes()
            token = self._task(certificate)
            from flwr.common.serde import run_from_proto
            from flwr.proto.runtime_pb2 import PullTaskInputRequest
            from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
            from flwr.supercore.task_identity import TaskIdentity
            from flwr.superlink.grid import HttpGrid

            grid = HttpGrid(self.address, False, certificate, token=token)
            retry, give_up = grid._retry_invoker, grid._retry_invoker.should_giveup
            retry.should_giveup = lambda error: self.process.poll() is not None or give_up(error)  # else it never does
            client = grid._runtime_client
            task = client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
            TaskIdentity.node_id = task.context.node_id
            grid.set_run(run_from_proto(task.run))
            beats = HeartbeatSender(make_task_heartbeat_fn_http(client))
            beats.start()
            try:
                yield grid
            except httpx.HTTPError as error:
                code = self.process.poll()
                what = f"does not answer: {error}" if code is None else f"ended with code {code}"
                raise EdgeftError(
                    f"Flower's SuperLink {what}; complete rounds are kept",
                    f"continue with `edgeft federate serve --resume`; the SuperLink's messages are in {self.log}",
                ) from None
            finally:
                beats.stop()
                grid.close()
        finally:
            stop_process(self.process)

    def _task(self, certificate: bytes) -> str:
        """The token of the run's server task."""
        from flwr.supercore.constant import TaskType

        secret = self.identity.internal.read_bytes()
        client = runtime_client(self.address, certificate, secret, "flwr-serverapp")
        deadline = time.monotonic() + START_S
        while not (token := acquire(client, TaskType.SERVER_APP)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise EdgeftError("Flower's SuperLink did not start", f"its messages are in {self.log}")
            time.sleep(POLL_S)
        client.close()
        return token


def runtime_client(address: str, certificate: bytes | None, secret: bytes, name: str) -> Any:
    """A client of a SuperLink's or SuperNode's Runtime API that may take tasks. certificate: None: without TLS."""
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={"/flwr.proto.Runtime/AcquireTask"})
    interceptors = [RuntimeVersionHttpInterceptor(component_name=name), signed]
    return RuntimeHttpClient.from_server_address(address, certificate is None, certificate, interceptors)


def acquire(client: Any, kind: str) -> str:
    """The token of a waiting task; empty if there is none, or nobody answers."""
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest

    try:
        found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
    except httpx.TransportError:
        return ""
    return str(found.token) if found.HasField("task") else ""


class FlowerFleet:
    """The devices of a SuperLink that are online."""

    def __init__(self, grid: Any, progress: Progress, wait_s: float, round_s: float) -> None:
        """wait_s: for enough devices; round_s: for a device's update."""
        self.grid, self.progress, self.wait_s, self.round_s = grid, progress, wait_s, round_s

    def nodes(self) -> dict[str, Any]:
        return {node.name: node for node in self.grid.get_nodes() if node.status == "online"}

    def wait_for(self, count: int) -> int:
        deadline, said = time.monotonic() + self.wait_s, -1
        while True:
            there = len(self.nodes())
            if there >= count or time.monotonic() > deadline:
                return there
            if there != said:
                self.progress.line(f"waiting for devices: {there} of {count} are there")
                said = there
            time.sleep(POLL_S)

    def ask(self, task_of: Callable[[str], bytes]) -> Iterator[Reply]:
        """A device that was away and came back meanwhile is asked again; one that is gone is not waited for."""
        deadline = time.monotonic() + self.round_s
        asked: dict[str, tuple[str, str]] = {}  # name → (message, when the device came)
        answered: set[str] = set()
        while True:
            there = self.nodes()
            for name, node in there.items():
                late = answered and name not in asked  # it takes part in the next round
                if not late and name not in answered and asked.get(name, ("", ""))[1] != node.last_activated_at:
                    asked[name] = self._push(node.node_id, task_of(name), TRAIN), node.last_activated_at
            waiting = {message: name for name, (message, _) in asked.items() if name not in answered}
            for message in self.grid.pull_messages(list(waiting)):
                name = waiting[message.metadata.reply_to_message_id]
                answered.add(name)
                yield self._reply(name, message)
            missing, over = asked.keys() - answered, time.monotonic() > deadline
            if over or not missing or (answered and not missing & there.keys()):
                break
            time.sleep(POLL_S)
        why = f"no update within {self.round_s:.0f} s" if over else "it went away before it sent an update"
        for name in sorted(missing):
            yield Reply(name, error=why)

    def finish(self, data: bytes, wait_s: float = 60.0) -> None:
        """Sends every device that is there the model, and that there is nothing more to do."""
        messages = [self._push(node.node_id, data, END) for node in self.nodes().values()]
        deadline = time.monotonic() + wait_s
        while messages and time.monotonic() < deadline:
            got = {message.metadata.reply_to_message_id for message in self.grid.pull_messages(messages)}
            messages = [message for message in messages if message not in got]
            time.sleep(POLL_S)

    def _push(self, node_id: int, data: bytes, kind: str) -> str:
        from flwr.app import Message

        (message_id,) = self.grid.push_messages([Message(pack(data), node_id, kind, ttl=2 * self.round_s + 60.0)])
        return str(message_id)

    def _reply(self, name: str, message: Any) -> Reply:
        if message.has_error():
            return Reply(name, error=f"no update ({message.error.reason or message.error.code})")
        try:
            data, numbers = unpack(message.content)
        except EdgeftError as error:
            return Reply(name, error=error.message)
        rows = numbers.get("rows")
        return Reply(name, data, rows if type(rows) is int else 0)
