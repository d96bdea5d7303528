"""`edgeft federate` over Flower: who gets in, what is refused, what leaves a device, and a federation of processes."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import numpy as np
import pytest

from edgeft.config import Recipe
from edgeft.errors import ConfigError, EdgeftError
from edgeft.federated import flower, join, net
from edgeft.federated.join import Membership
from edgeft.federated.net import Identity, Token
from edgeft.federated.server import ServerState, run_rounds
from edgeft.federated.state import DeviceState
from edgeft.federated.task import PROTOCOL, Terms, shared_part
from edgeft.federated.update import decode
from edgeft.run.folder import Run
from edgeft.run.progress import Progress
from tests.conftest import Edgeft
from tests.support.runs import Lines
from tests.support.wire import Relay

MAX_BYTES = 10_000
TERMS = Terms("f00", "0" * 64, "tiny.gguf", 2, 1, shared_part(Recipe()), "top:1%")


def installed() -> bool:
    try:
        flower.require()
    except ConfigError:
        return False
    return True


needs_flower = pytest.mark.skipif(not installed(), reason="Flower is not installed: pip install '.[federated]'")
without_flower = pytest.mark.skipif(installed(), reason="Flower is installed")


@without_flower
@pytest.mark.parametrize(
    "command", [("serve",), ("join", "localhost:9", "--data", "x", "--token", "x")], ids=["serve", "join"]
)
def test_without_flower_the_hint_names_the_extra(edgeft: Edgeft, command: tuple[str, ...]) -> None:
    result = edgeft("federate", *command)
    assert result.returncode == ConfigError.exit_code
    assert "flwr, which is not installed" in result.stderr
    assert "edgeft[federated]" in result.stderr


# ---------------------------------------------------------------- tokens and certificates


@pytest.mark.parametrize("text", ["", "x", "ä" * 64, "A" * 63, "A" * 68])
def test_a_token_that_is_not_complete_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not complete"):
        Token.parse(text)


def test_a_token_comes_back() -> None:
    token = Token(os.urandom(16), os.urandom(32))
    assert Token.parse(str(token)) == token


@pytest.mark.parametrize("text", ["", "host", "host:", ":9", "host:0", "host:70000", "host:x"])
def test_an_address_without_a_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        join.parse_address(text)
    assert join.parse_address("[::1]:9092") == ("::1", 9092)


@pytest.mark.parametrize("name", ["", "a b", "x/y", "a" * 65, "a\nb"])
def test_a_name_that_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="not usable"):
        join.check_name(name)


@contextlib.contextmanager
def tls_server(own: Identity) -> Iterator[int]:
    """A port that shows this certificate, and nothing more."""
    relay = Relay(own.certificate, own.key, ("127.0.0.1", 9))
    try:
        yield relay.port
    finally:
        relay.close()


@needs_flower
def test_an_identity_is_made_once_and_its_files_are_private(tmp_path: Path) -> None:
    own, new = net.identity(tmp_path / "net", ["127.0.0.1", "localhost"])
    assert new
    token = str(own.token)
    assert net.identity(tmp_path / "net", ["127.0.0.1"]) == (own, False)
    assert str(own.token) == token
    for file in (own.key, own.secret, own.internal):
        assert file.stat().st_mode & 0o077 == 0
    assert net.identity(tmp_path / "net", ["example.org"])[1]  # devices are to use another name


@needs_flower
def test_the_certificate_must_be_that_of_the_token(tmp_path: Path) -> None:
    own, _ = net.identity(tmp_path / "net", ["127.0.0.1"])
    other, _ = net.identity(tmp_path / "other", ["127.0.0.1"])
    with tls_server(own) as port:
        assert net.fingerprint(net.pinned_certificate("127.0.0.1", port, own.token)) == own.token.fingerprint
        with pytest.raises(ConfigError, match="certificate is another") as error:
            net.pinned_certificate("127.0.0.1", port, other.token)
        assert error.value.hint


@needs_flower
def test_an_expired_certificate_is_refused_and_made_again_by_the_server(tmp_path: Path) -> None:
    own, _ = net.identity(tmp_path / "net", ["127.0.0.1"], days=-1)
    with tls_server(own) as port, pytest.raises(EdgeftError, match="expired on 20") as error:
        net.pinned_certificate("127.0.0.1", port, own.token)
    assert "--resume" in error.value.hint
    assert net.identity(tmp_path / "net", ["127.0.0.1"])[1]


def test_nobody_at_the_address_is_a_line_and_a_hint() -> None:
    with pytest.raises(EdgeftError, match=r"cannot reach a server at 127\.0\.0\.1:") as error:
        net.pinned_certificate("127.0.0.1", net.free_port(), Token(bytes(16), bytes(32)))
    assert "federate serve" in error.value.hint


@needs_flower
def test_a_port_in_use_is_a_line_and_a_hint(edgeft: Edgeft, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = edgeft("federate", "serve", "--host", "127.0.0.1", "--port", port, "--out", tmp_path / "fed")
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: address already in use" in result.stderr
    assert "--port" in result.stderr
    assert not (tmp_path / "fed").exists()


# ---------------------------------------------------------------- a SuperLink


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Identity, int]]:
    """(grid, identity, port) of a SuperLink without a model."""
    own, _ = net.identity(tmp_path_factory.mktemp("link") / "net", ["127.0.0.1"])
    port = net.free_port()
    with flower.SuperLink(own, "127.0.0.1", port, TERMS, MAX_BYTES).grid() as grid:
        yield grid, own, port


def post(own: Identity, port: int, path: str, body: bytes) -> int:
    context = ssl.create_default_context(cafile=str(own.certificate))
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
    try:
        return int(opener.open(f"https://127.0.0.1:{port}{path}", body, timeout=20).status)
    except urllib.error.HTTPError as error:
        return error.code


@needs_flower
@pytest.mark.slow
def test_the_token_lets_a_device_in_and_nothing_else_does(
    link: tuple[Any, Identity, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, own, port = link
    assert Membership(tmp_path / "a", "127.0.0.1", port, own.token, "kitchen-pi").join() == TERMS
    assert Membership(tmp_path / "a", "127.0.0.1", port, own.token, "kitchen-pi").join() == TERMS  # comes back
    with pytest.raises(ConfigError, match="has the name `kitchen-pi`"):
        Membership(tmp_path / "b", "127.0.0.1", port, own.token, "kitchen-pi").join()
    wrong = Token(bytes(16), own.token.fingerprint)
    with pytest.raises(ConfigError, match="refused the token") as refused:
        Membership(tmp_path / "c", "127.0.0.1", port, wrong, "cellar").join()
    assert refused.value.hint
    with pytest.raises(EdgeftError, match="cannot join localhost") as other:  # a name that the certificate lacks
        Membership(tmp_path / "d", "localhost", port, own.token, "cellar").join()
    assert "--name" in other.value.hint
    monkeypatch.setattr(join, "PROTOCOL", 99)
    with pytest.raises(EdgeftError, match="the server runs edgeft") as version:
        Membership(tmp_path / "e", "127.0.0.1", port, own.token, "cellar").join()
    assert "same version" in version.value.hint


@needs_flower
@pytest.mark.slow
def test_what_no_device_needs_is_closed(link: tuple[Any, Identity, int]) -> None:
    _, own, port = link
    for path in ("/docs", "/openapi.json", "/v1/control/start-run", "/v1/control/register-node", "/", "/edgeft"):
        assert post(own, port, path, b"x") == 404
    assert post(own, port, "/v1/fleet/push-object", bytes(MAX_BYTES + (2 << 20))) == 413
    assert post(own, port, "/v1/runtime/acquire-task", b"") >= 400
    assert post(own, port, "/v1/fleet/register-node", b"") >= 400
    for body in (b"", b"[]", b"{}", b'{"secret": 1}', os.urandom(200), b'{"secret":"","name":[],"public_key":""}'):
        assert post(own, port, "/edgeft/join", body) in (400, 401)
    named = {"secret": base64.b64encode(own.token.secret).decode(), "public_key": "", "protocol": PROTOCOL}
    for name in ("", "x" * 65, "a\n", 7):
        assert post(own, port, "/edgeft/join", json.dumps({**named, "name": name}).encode()) == 400


@contextlib.contextmanager
def bare_device(own: Identity, port: int, folder: Path, name: str) -> Iterator[Any]:
    """Flower's connection of a SuperNode, for whatever a device might send."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supernode.fleet_http_connection import http_request_response

    member = Membership(folder, "127.0.0.1", port, own.token, name)
    member.join()
    key: Any = load_ssh_private_key(member.key.read_bytes(), None)
    pem = own.certificate.read_bytes()
    with http_request_response(f"127.0.0.1:{port}", False, pem, (key, key.public_key()), 0, 5.0) as connection:
        yield connection


@needs_flower
@pytest.mark.slow
def test_a_device_that_is_silent_or_sends_another_kind_is_named(
    link: tuple[Any, Identity, int], tmp_path: Path
) -> None:
    """One sends nothing, one a message of another kind; both are replies with an error."""
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
    from flwr.supercore.inflatable.inflatable_utils import push_objects

    grid, own, port = link
    fleet = flower.FlowerFleet(grid, Progress(), wait_s=30.0, round_s=8.0)
    with bare_device(own, port, tmp_path / "a", "silent"), bare_device(own, port, tmp_path / "b", "odd") as odd:
        assert fleet.wait_for(2) >= 2
        _, receive, send, _, _, _, push_object, _ = odd

        def answer() -> None:
            while (received := receive()) is None:
                time.sleep(0.2)
            asked, _ = received
            reply = Message(RecordDict({"secrets": ConfigRecord({"rows": "all of them"})}), reply_to=asked)
            reply.metadata.__dict__["_message_id"] = reply.object_id
            wanted, session = send(reply, get_object_tree(reply), 0.0)
            push_objects(
                get_all_nested_objects(reply),
                lambda number, content: push_object(asked.metadata.run_id, session, number, content),
                object_ids_to_push=wanted,
            )

        worker = Thread(target=answer)
        worker.start()
        replies = {reply.name: reply for reply in fleet.ask(lambda name: name.encode())}
        worker.join()
    assert replies["odd"].error == "a message of another kind"
    assert replies["silent"].error == "no update within 8 s"
    assert not any(reply.update for reply in replies.values())


@needs_flower
@pytest.mark.slow
def test_a_superlink_that_ends_in_a_round_is_a_line_and_a_hint(tmp_path: Path) -> None:
    """Flower would try for ever to reach it; the state of the last complete round is kept."""
    own, _ = net.identity(tmp_path / "net", ["127.0.0.1"])
    port = net.free_port()
    run = Run(tmp_path / "run", Recipe())
    run.path.mkdir()
    state = ServerState(replace(TERMS, send="dense"), "mean", {}, {"a": np.zeros(3, np.float32)})
    state.save(run)
    kept = ServerState.file(run).read_bytes()
    link = flower.SuperLink(own, "127.0.0.1", port, state.terms, MAX_BYTES)
    silent = bare_device(own, port, tmp_path / "a", "silent")

    def lead() -> None:
        with link.grid() as grid:
            silent.__enter__()  # its end would be told to the SuperLink
            fleet = flower.FlowerFleet(grid, Progress(), wait_s=30.0, round_s=60.0)
            Timer(2.0, link.process.kill).start()
            run_rounds(run, state, fleet, Progress())

    began = time.monotonic()
    with pytest.raises(EdgeftError, match="SuperLink ended with code -9") as error:
        lead()
    assert time.monotonic() - began < 45
    assert "edgeft federate serve --resume" in error.value.hint
    assert str(link.log) in error.value.hint
    assert ServerState.file(run).read_bytes() == kept


@needs_flower
@pytest.mark.slow
def test_no_devices_within_the_time_is_a_line_and_a_hint(link: tuple[Any, Identity, int], tmp_path: Path) -> None:
    lines = Lines()
    state = ServerState(replace(TERMS, min_clients=9), "mean", {}, {"a": np.zeros(3, np.float32)})
    fleet = flower.FlowerFleet(link[0], lines, wait_s=1.0, round_s=1.0)
    with pytest.raises(EdgeftError, match="of at least 9 devices are there") as error:
        run_rounds(Run(tmp_path, Recipe()), state, fleet, lines)
    assert "edgeft federate serve --resume" in error.value.hint
    assert any("of 9 are there" in line for line in lines.lines)


# ---------------------------------------------------------------- processes

SETS = (
    *("update.blocks=[2]", "update.tensors=v,o", "train.batch_rows=2", "data.max_tokens=256", "how.compile=off"),
    *("how.threads=1", "export.type=f16", "data.rows=12"),
)


class Processes:
    """`edgeft federate serve` and `join` as a user starts them, in a folder."""

    def __init__(self, folder: Path, model: Path, rows: Path) -> None:
        self.folder, self.model, self.port = folder, model, net.free_port()
        self.running: list[subprocess.Popen[bytes]] = []
        lines = (rows / "train.jsonl").read_text("utf-8").splitlines(keepends=True)
        for number in range(2):
            (folder / f"device-{number}.jsonl").write_text("".join(lines[number::2]), "utf-8")
        (folder / "device.yaml").write_text("ram_bytes: 4294967296\nbudget_bytes: 4294967296\ncores: 1\n")

    def start(self, log: str, *args: object) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as out:
            command = [sys.executable, "-m", "edgeft", "federate", *map(str, args)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            self.running.append(subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=out, env=environment))
        return self.running[-1]

    def serve(self, rounds: int, clients: int, *more: object) -> subprocess.Popen[bytes]:
        place = ("--out", "fed", "--host", "127.0.0.1", "--port", self.port, "--device", "device.yaml")
        if (self.folder / "fed" / "terms.json").exists():
            return self.start("serve.log", "serve", *place, "--resume", *more)
        sets = [part for one in SETS for part in ("--set", one)]
        plan = ("--model", self.model, "--rounds", rounds, "--min-clients", clients, "--send", "top:5%")
        return self.start("serve.log", "serve", *place, *plan, *sets, *more)

    def token(self) -> str:
        self.until(lambda: "--token" in self.text("serve.log"))
        found = re.findall(r"--token (\S+)", self.text("serve.log"))
        return str(found[-1])

    def join(self, number: int, port: int = 0) -> subprocess.Popen[bytes]:
        name = f"device-{number}"
        args = (f"127.0.0.1:{port or self.port}", "--token", self.token(), "--data", f"{name}.jsonl", "--name", name)
        sets = ("--set", "how.compile=off", "--set", "how.threads=1", "--away", "10min")
        return self.start(f"{name}.log", "join", *args, "--model", self.model, "--device", "device.yaml", *sets)

    def text(self, log: str) -> str:
        file = self.folder / log
        return file.read_text(errors="replace") if file.exists() else ""

    def until(self, true: Any, seconds: float = 900.0) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, f"{self.text('serve.log')[-3000:]}\n{self.text('device-0.log')[-2000:]}"
            time.sleep(0.2)

    def state(self) -> ServerState | None:
        return ServerState.load(Run(self.folder / "fed", Recipe()))

    def close(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def processes(tmp_path: Path, tiny: Path, data: Path) -> Iterator[Processes]:
    made = Processes(tmp_path, tiny, data)
    yield made
    made.close()


@needs_flower
@pytest.mark.slow
def test_nothing_but_the_update_and_its_rows_leaves_a_device(processes: Processes) -> None:
    """Every request of a device, read in clear: one round, one message with one array of bytes and one number."""
    server = processes.serve(1, 1, "--wait", "15min")
    processes.token()
    own = Identity(processes.folder / "fed" / "net")
    relay = Relay(own.certificate, own.key, ("127.0.0.1", processes.port))
    device = processes.join(0, relay.port)
    processes.until(lambda: server.poll() is not None and device.poll() is not None)
    assert [server.returncode, device.returncode] == [0, 0], processes.text("device-0.log")
    state = DeviceState.load(Run(processes.folder / "runs" / "fed-device-0", Recipe()))
    assert state is not None
    requests = list(relay.requests())
    known = {"/edgeft/join", *(f"/v1/fleet/{name}" for name in PLAIN), *(f"/v1/fleet/{name}" for name in CARRIERS)}
    assert {path for path, _ in requests} <= known
    for path, body in requests:
        if path == "/edgeft/join":
            assert json.loads(body).keys() == {"secret", "name", "public_key", "protocol", "version"}
        elif path.rpartition("/")[2] in PLAIN:
            assert len(body) <= 600  # numbers, hashes and the device's public key
    payloads = [payload for path, body in requests if path.endswith("push-object") for payload in carried(body)]
    assert payloads.count(state.update) == 1
    numbers = json.dumps({"rows": state.rows})
    assert sorted(map(str, payloads)) == sorted(map(str, [state.update, numbers]))
    layout = processes.state().layout  # type: ignore[union-attr]
    assert layout.size == math.ceil(0.05 * layout.total)
    assert decode(state.update, layout, TERMS.sends.parse("top:5%")).any()
    everything = b"".join(bytes(record) for record in relay.sent)
    for line in (processes.folder / "device-0.jsonl").read_text("utf-8").splitlines():
        words = " ".join(json.loads(line).values()).split()
        for start in range(len(words) - 1):
            assert " ".join(words[start : start + 2]).encode() not in everything
    assert (processes.folder / "fed" / "model.gguf").is_file()
    assert Run.open(processes.folder / "runs" / "fed-device-0").best.is_file()


# Of the Fleet API. PLAIN: who asks, for what; CARRIERS: messages and what is in them.
PLAIN = (
    *("activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "get-run", "get-fab"),
    *("pull-object", "confirm-message-received"),
)
CARRIERS = ("push-messages", "push-object")


def carried(body: bytes) -> list[Any]:
    """What an object of Flower's carries: the bytes of an array, or the numbers of a record as JSON."""
    from flwr.app import MetricRecord
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.proto.message_pb2 import PushObjectRequest
    from flwr.supercore.inflatable.inflatable_object import get_object_type_from_object_content

    content = PushObjectRequest.FromString(body).object_content
    kind = get_object_type_from_object_content(content)
    if kind == "ArrayChunk":
        return [bytes(ArrayChunk.inflate(content, None).data)]
    if kind == "MetricRecord":
        values = dict(MetricRecord.inflate(content, None))
        return [json.dumps(values)] if values else []
    assert kind in ("Message", "RecordDict", "ArrayRecord", "Array"), kind
    assert len(content) < 1500  # names, hashes and metadata
    return []


@needs_flower
@pytest.mark.slow
def test_server_and_devices_that_are_killed_end_as_if_they_had_not_been(processes: Processes) -> None:
    """kill -9: the server once a round is complete, a device in the middle of it; each is started again."""
    server = processes.serve(2, 2, "--wait", "15min", "--round-time", "15min")
    devices = [processes.join(0), processes.join(1)]
    processes.until(lambda: (processes.state() or TERMS).__dict__.get("round", 0) >= 1)
    for process in (server, devices[1]):
        process.send_signal(signal.SIGKILL)
        process.wait()
    reached = processes.state()
    assert reached is not None
    again = processes.serve(2, 2, "--wait", "15min", "--round-time", "15min")
    devices[1] = processes.join(1)
    processes.until(lambda: again.poll() is not None and all(one.poll() is not None for one in devices))
    assert [again.returncode, *(one.returncode for one in devices)] == [0, 0, 0], processes.text("device-1.log")
    state = processes.state()
    assert state is not None
    assert state.round == 2
    assert state.history[: reached.round] == reached.history
    assert asdict(state.terms) == asdict(reached.terms)
    assert "looking for it" in processes.text("device-0.log")
