"""A device in Flower: joins a server with its token, runs a SuperNode, and answers its tasks with installed code alone.

Flower would run the app that the server names, in code the server sends. Here the device itself takes the tasks from
its SuperNode and runs this package: a server can ask for rounds, and for nothing else.
"""

from __future__ import annotations

import base64
import json
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgeft import __version__
from edgeft.errors import ConfigError, EdgeftError, StoppedError
from edgeft.federated import flower, net
from edgeft.federated.device import Device
from edgeft.federated.net import Token
from edgeft.federated.superlink import MAX_JOIN_BYTES
from edgeft.federated.task import PROTOCOL, Terms, other_version
from edgeft.host.files import atomic_write
from edgeft.host.system import die_with_parent
from edgeft.run.progress import Progress

TASK_POLL_S = 0.5
AWAY_S = 5.0  # between two attempts to reach a server that went away
SUPERNODE_S = 10.0  # for which the SuperNode itself tries; then `take_part` joins again
NAME = re.compile(r"[\w.-]{1,64}")


def parse_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"`{text}` is not HOST:PORT", "for example 192.168.1.5:9092")
    return host.strip("[]"), int(port)


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ConfigError(f"`--name {name}` is not usable", "up to 64 letters, digits, dots, hyphens and underscores")
    return name


class Membership:
    """A device's key, and the server's certificate, in a folder of their own."""

    def __init__(self, folder: Path, host: str, port: int, token: Token, name: str) -> None:
        self.folder, self.host, self.port, self.token, self.name = folder, host, port, token, name
        self.certificate, self.key = folder / "server.pem", folder / "device.key"
        self.secret = folder / "internal.secret"

    def join(self) -> Terms:
        """The server's terms; the server knows this device's key from then on."""
        pem = net.pinned_certificate(self.host, self.port, self.token)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_write(self.certificate) as file:
            file.write(pem.encode())
        asked = {
            "secret": base64.b64encode(self.token.secret).decode(),
            "name": self.name,
            "public_key": base64.b64encode(self._public_key()).decode(),
            "protocol": PROTOCOL,
            "version": __version__,
        }
        return Terms.read(self._post(json.dumps(asked).encode()).get("terms"))

    def _post(self, body: bytes) -> dict[str, Any]:
        host = f"[{self.host}]" if ":" in self.host else self.host
        request = urllib.request.Request(f"https://{host}:{self.port}/edgeft/join", body, method="POST")
        context = ssl.create_default_context(cafile=str(self.certificate))
        opener = urllib.request.build_opener(  # no proxy: the certificate is this server's
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        try:
            with opener.open(request, timeout=net.REACH_S) as answer:
                status, data = answer.status, answer.read(MAX_JOIN_BYTES)
        except urllib.error.HTTPError as error:
            status, data = error.code, error.read(MAX_JOIN_BYTES)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            what = f"cannot join {self.host}:{self.port}: {str(reason).lower()}"
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise EdgeftError(what, "give the server this name with `edgeft federate serve --name`") from None
            raise net.UnreachableError(what, "check that `edgeft federate serve` is running there") from None
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise EdgeftError(f"{self.host}:{self.port} is no server of edgeft (status {status})", "check the address")
        if status == 401:
            raise ConfigError("the server refused the token", "copy the join command that this server printed")
        if status == 409:
            raise ConfigError(f"another device has the name `{self.name}`", "choose another one with --name")
        if status == 426:
            raise other_version(found.get("version"), found.get("protocol"))
        if status != 200:
            raise EdgeftError(f"the server refused to let this device in: {found.get('error')}", "check --name")
        return found

    def _public_key(self) -> bytes:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        if not self.key.is_file():
            made = ec.generate_private_key(ec.SECP384R1())
            form = serialization.PrivateFormat.OpenSSH
            with atomic_write(self.key) as file:
                file.write(made.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
            self.key.chmod(0o600)
        key = serialization.load_ssh_private_key(self.key.read_bytes(), None)
        return bytes(
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )

    @contextmanager
    def supernode(self) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
        """(Flower's SuperNode, the address of its Runtime API on this machine)."""
        import secrets

        with atomic_write(self.secret) as file:
            file.write(secrets.token_bytes(32))
        self.secret.chmod(0o600)
        port = net.free_port()
        host = f"[{self.host}]" if ":" in self.host else self.host
        args = [
            *("--superlink", f"{host}:{self.port}", "--root-certificates", str(self.certificate)),
            *("--auth-supernode-private-key", str(self.key), "--isolation", "process"),
            *("--max-wait-time", str(SUPERNODE_S)),
            *("--host", "127.0.0.1", "--port", str(port), "--superexec-auth-secret-file", str(self.secret)),
        ]
        log = self.folder / "supernode.log"
        process = flower.start_process("edgeft.federated.join", log, args=args)
        try:
            yield process, f"127.0.0.1:{port}"
        finally:
            flower.stop_process(process)


def main() -> None:
    """The SuperNode's process. argv[1]: {args, parent} as JSON."""
    given = json.loads(sys.argv[1])
    die_with_parent(given["parent"])
    from flwr.supernode.cli import flower_supernode

    sys.argv = ["flower-supernode", *given["args"]]
    try:
        flower_supernode()
    finally:
        os._exit(1)  # its thread that serves the Runtime API would go on


def client_app(device: Device, progress: Progress) -> Any:
    """Flower's ClientApp: a task to an update. What goes wrong is sent as a number: its text may hold the user's."""
    from flwr.app import Error, Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def train(message: Any, context: Any) -> Any:
        try:
            reply = device.answer(flower.unpack(message.content)[0])
        except EdgeftError as error:
            if error.exit_code == StoppedError.exit_code:
                raise
            progress.line(f"this round is not sent: {error.message}" + (f" ({error.hint})" if error.hint else ""))
            return Message(Error(code=error.exit_code, reason=f"exit code {error.exit_code}"), reply_to=message)
        progress.line(f"sent {len(reply.update):,} bytes and the number of rows, {reply.rows}")
        return Message(flower.pack(reply.update, rows=reply.rows), reply_to=message)

    def end(message: Any, context: Any) -> Any:
        device.finish(flower.unpack(message.content)[0])
        return Message(flower.pack(b""), reply_to=message)

    app.train()(train)
    app.query()(end)
    return app


def answer_tasks(process: subprocess.Popen[bytes], address: str, secret: bytes, app: Any, device: Device) -> bool:
    """Takes tasks from the SuperNode until the server ends the federation (True) or the SuperNode ends (False)."""
    from flwr.supercore.constant import TaskType

    client = flower.runtime_client(address, None, secret, "SuperExec")
    try:
        while process.poll() is None:
            token = flower.acquire(client, TaskType.CLIENT_APP)
            if not token:
                time.sleep(TASK_POLL_S)
                continue
            _answer(address, token, app)
            if device.finished:
                time.sleep(2.0)  # the SuperNode brings the answer to the server
                return True
        return False
    finally:
        client.close()


def _answer(address: str, token: str, app: Any) -> None:
    from flwr.common.constant import SubStatus
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

    interceptors = [RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), RuntimeTokenHttpInterceptor(token)]
    client = RuntimeHttpClient.from_server_address(address, True, None, interceptors)
    beats = HeartbeatSender(make_task_heartbeat_fn_http(client))
    beats.start()
    try:
        message, context, _, _ = pull_task_input(client)  # the last is the server's app: it is not looked at
        push_message(client, app(message, context), context)
        push_task_output(client, context, SubStatus.COMPLETED, "")
    finally:
        beats.stop()
        client.close()


def take_part(membership: Membership, device: Device, progress: Progress, away_s: float) -> None:
    """Until the server ends the federation; away_s: how long to look for a server that went away."""
    app = client_app(device, progress)
    while True:
        with membership.supernode() as (process, address):
            if answer_tasks(process, address, membership.secret.read_bytes(), app, device):
                return
        progress.line("the server went away; looking for it")
        if join_when_there(membership, away_s) != device.terms:
            raise ConfigError("the server has another federation now", "join it with the new command")


def join_when_there(membership: Membership, away_s: float) -> Terms:
    """Joins as soon as the server can be reached; after so many seconds its error is raised."""
    deadline = time.monotonic() + away_s
    while True:
        try:
            return membership.join()
        except net.UnreachableError:
            if time.monotonic() > deadline:
                raise
        time.sleep(AWAY_S)
