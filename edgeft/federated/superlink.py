"""The SuperLink process: Flower's own, behind a guard, with one more address at which devices join.

Its Control API, which has no authentication in Flower's free edition, answers nobody; Fleet and Runtime API need a
node's key and a task's token. What Flower calls the app, its bundle, holds names only: no code goes to a device.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import secrets
import sys
import zipfile
from pathlib import Path
from typing import Any

from edgeft import __version__
from edgeft.federated.net import Identity
from edgeft.federated.task import PROTOCOL
from edgeft.host.system import die_with_parent

OPEN = ("/v1/fleet/", "/v1/runtime/", "/edgeft/join")
MAX_JOIN_BYTES = 1 << 16
MAX_NAME = 64
SLACK_BYTES = 1 << 20  # of a request, beside what it carries
PYPROJECT = """
[project]
name = "edgeft"
version = "1.0.0"
[tool.flwr.app]
publisher = "edgeft"
[tool.flwr.app.components]
serverapp = "edgeft.federated.flower:server_app"
clientapp = "edgeft.federated.join:client_app"
[tool.flwr.app.config]
"""


def bundle() -> bytes:
    """The app bundle (FAB) that Flower wants for a run; devices run their own installed edgeft."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(zipfile.ZipInfo("pyproject.toml"), PYPROJECT)
    return out.getvalue()


class Guard:
    """Refuses what no device and no server process needs, and bodies larger than any update."""

    def __init__(self, app: Any, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sizes = [value for name, value in scope["headers"] if name == b"content-length"]
        own = scope["path"].startswith("/v1/runtime/")  # this machine's own process: it carries the model
        large = not sizes or not sizes[0].isdigit() or int(sizes[0]) > self.max_bytes
        status = 404 if not scope["path"].startswith(OPEN) else 413 if large and not own else 0
        if not status:
            await self.app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def join_handler(linkstate: Any, secret: bytes, terms: dict[str, Any]) -> Any:
    """POST /edgeft/join: a device with the token gets the terms, and its key is a node's from then on."""
    from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
    from starlette.responses import JSONResponse

    names: dict[str, bytes] = {}

    async def join(request: Any) -> Any:
        try:
            asked = json.loads(await request.body())
            given, name = base64.b64decode(asked["secret"]), asked["name"]
            key, protocol = base64.b64decode(asked["public_key"]), asked["protocol"]
        except (ValueError, KeyError, TypeError):
            return JSONResponse({"error": "not a request to join"}, 400)
        if not secrets.compare_digest(given, secret):
            return JSONResponse({"error": "wrong token"}, 401)
        if protocol != PROTOCOL:
            return JSONResponse({"version": __version__, "protocol": PROTOCOL}, 426)
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            return JSONResponse({"error": "not a usable name"}, 400)
        if names.setdefault(name, key) != key:
            return JSONResponse({"error": "the name is taken"}, 409)
        if linkstate.get_node_id_by_public_key(key) is None:
            linkstate.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0, name=name)
        return JSONResponse({"terms": terms})

    return join


def start_run(linkstate: Any) -> None:
    """The one run of this SuperLink; the server's own process takes its task."""
    from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.fab_pb2 import Fab
    from flwr.supercore.auth.typing import AccountInfo
    from flwr.superlink.servicer.control import control_handlers

    content = bundle()
    request = StartRunRequest(fab=Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content))
    account = AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)
    control_handlers.start_run(request, account, linkstate, None)


def make_app(own: Identity, host: str, port: int, terms: dict[str, Any]) -> Any:
    """Flower's SuperLink as an application, with its one run and the address to join at."""
    from flwr.common.constant import ISOLATION_MODE_PROCESS, TRANSPORT_TYPE_GRPC_RERE
    from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from flwr.superlink.config_loader import SuperLinkLifespanConfig
    from flwr.superlink.main import create_app

    certificate, key = own.certificate.read_bytes(), own.key.read_bytes()
    config = SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host=host,
        port=port,
        insecure=False,
        certificates=(certificate, certificate, key),
        superexec_auth_secret=own.internal.read_bytes(),
        authn_plugin=NoOpControlAuthnPlugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=True,
        fleet_api_type=TRANSPORT_TYPE_GRPC_RERE,
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=str(own.certificate),
        ssl_certfile=str(own.certificate),
        ssl_keyfile=str(own.key),
        database=FLWR_IN_MEMORY_DB_NAME,  # devices join again after a restart; the federation's state is the server's
        isolation=ISOLATION_MODE_PROCESS,
        runtime_dependency_install=False,
    )
    app = create_app(config, SuperLinkLifespan)
    linkstate = app.state.linkstate_factory.state()
    app.router.add_route("/edgeft/join", join_handler(linkstate, own.secret.read_bytes(), terms), ["POST"])
    start_run(linkstate)
    return app


def main() -> None:
    """argv[1]: {folder, host, port, parent, terms, max_bytes} as JSON."""
    given = json.loads(sys.argv[1])
    die_with_parent(given["parent"])
    import uvicorn

    own = Identity(Path(given["folder"]))
    app = make_app(own, given["host"], given["port"], given["terms"])
    app.add_middleware(Guard, max_bytes=max(MAX_JOIN_BYTES, given["max_bytes"] + SLACK_BYTES))
    where = {"host": given["host"], "port": given["port"]}
    key, certificate = str(own.key), str(own.certificate)
    uvicorn.run(app, **where, log_level="warning", workers=1, ssl_keyfile=key, ssl_certfile=certificate)
