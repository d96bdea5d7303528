"""Certificate and token of a server: made once, kept in its folder, and checked by a device before it says anything.

The join token holds the server's secret and the SHA-256 of its certificate: who has the token needs no other proof.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import secrets
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeft.errors import ConfigError, EdgeftError
from edgeft.federated.needs import missing
from edgeft.host.files import atomic_write

DAYS = 365
SECRET_BYTES, HASH_BYTES = 16, 32
REACH_S = 10.0  # to connect to the server


class UnreachableError(EdgeftError):
    """Nobody answers at the server's address: it may come back."""


@dataclass(frozen=True)
class Token:
    """What a device needs to join: (secret, SHA-256 of the certificate)."""

    secret: bytes
    fingerprint: bytes

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(self.secret + self.fingerprint).decode()

    @staticmethod
    def parse(text: str) -> Token:
        try:
            data = base64.urlsafe_b64decode(text.strip().encode("ascii"))
        except ValueError:
            data = b""
        if len(data) != SECRET_BYTES + HASH_BYTES:
            raise ConfigError("the token is not complete", "copy the join command that `edgeft federate serve` printed")
        return Token(data[:SECRET_BYTES], data[SECRET_BYTES:])


@dataclass(frozen=True)
class Identity:
    """The files of a server's certificate, its key, and the secrets of its token and of its own processes."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "certificate.pem"

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"

    @property
    def secret(self) -> Path:
        return self.folder / "token.secret"

    @property
    def internal(self) -> Path:
        return self.folder / "internal.secret"

    @property
    def token(self) -> Token:
        return Token(self.secret.read_bytes(), fingerprint(self.certificate.read_text()))


def identity(folder: Path, hosts: list[str], days: float = DAYS) -> tuple[Identity, bool]:
    """(the server's identity, whether it is new): made again once its certificate has expired or lacks a host."""
    found = Identity(folder)
    files = (found.certificate, found.key, found.secret, found.internal)
    if all(file.is_file() for file in files) and _covers(found.certificate.read_text(), hosts):
        return found, False
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    certificate, key = make_certificate(hosts, days)
    contents = (certificate, key, secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(32))
    for file, content in zip(files, contents, strict=True):
        with atomic_write(file) as out:
            Path(out.name).chmod(0o600)  # before there is anything in it
            out.write(content)
    return found, True


def make_certificate(hosts: list[str], days: float) -> tuple[bytes, bytes]:
    """(certificate, key) in PEM; signed by itself, for these names and addresses."""
    x509, ec, hashes, serialization = _cryptography()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "edgeft federation")])
    begin = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)
    end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=days)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(begin, end - datetime.timedelta(hours=1)))
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName([_alternative(x509, host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


def own_hosts(host: str = "") -> list[str]:
    """Names and addresses under which devices may reach this machine; the first is what the join command names."""
    found = [host, *_addresses(), socket.gethostname(), "localhost", "127.0.0.1"]
    return list(dict.fromkeys(name for name in found if name and name not in ("0.0.0.0", "::")))


def _addresses() -> list[str]:
    import psutil

    every = [one for addresses in psutil.net_if_addrs().values() for one in addresses if one.family == socket.AF_INET]
    return [one.address for one in every if not one.address.startswith(("127.", "169.254."))]


def fingerprint(pem: str) -> bytes:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).digest()


def pinned_certificate(host: str, port: int, token: Token) -> str:
    """The server's certificate in PEM, if it is the token's and valid today."""
    try:
        pem = ssl.get_server_certificate((host, port), timeout=REACH_S)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnreachableError(
            f"cannot reach a server at {host}:{port}: {reason.lower()}",
            "check the address, and that `edgeft federate serve` is running there",
        ) from None
    if not secrets.compare_digest(fingerprint(pem), token.fingerprint):
        raise ConfigError(
            f"the server at {host}:{port} is not the one of this token: its certificate is another",
            "copy the join command that this server printed",
        )
    end = _load(pem).not_valid_after_utc
    if end < datetime.datetime.now(datetime.timezone.utc):
        raise EdgeftError(
            f"the server's certificate expired on {end:%Y-%m-%d}",
            "start `edgeft federate serve --resume` again: it makes a new one and prints the new join command",
        )
    return pem


def check_port(host: str, port: int) -> None:
    """EdgeftError if nothing can listen there."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise EdgeftError(f"cannot listen on {host}:{port}: {reason}", "choose another one with --port") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _covers(pem: str, hosts: list[str]) -> bool:
    x509 = _cryptography()[0]
    certificate = _load(pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    known = {str(one.value) for one in names}
    return hosts[0] in known and certificate.not_valid_after_utc > datetime.datetime.now(datetime.timezone.utc)


def _load(pem: str) -> Any:
    return _cryptography()[0].load_pem_x509_certificate(pem.encode())


def _alternative(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _cryptography() -> tuple[Any, Any, Any, Any]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise missing("edgeft federate", error) from None
    return x509, ec, hashes, serialization
