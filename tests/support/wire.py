"""What a device sends to a federation's server, in clear: a relay with the server's own certificate and key."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


class Relay:
    """Listens on this machine, and passes everything on to the server; `sent` is what devices said."""

    def __init__(self, certificate: Path, key: Path, server: tuple[str, int]) -> None:
        self.server, self.sent = server, list[bytearray]()
        self._inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._inside.load_cert_chain(certificate, key)
        self._outside = ssl.create_default_context(cafile=str(certificate))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with suppress(OSError):
            device = self._inside.wrap_socket(plain, server_side=True)
            raw = socket.create_connection(self.server)
            server = self._outside.wrap_socket(raw, server_hostname=self.server[0])
            record = bytearray()
            self.sent.append(record)
            back = threading.Thread(target=self._pump, args=(server, device, None), daemon=True)
            back.start()
            self._pump(device, server, record)

    def _pump(self, source: socket.socket, target: socket.socket, record: bytearray | None) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if record is not None:
                    record += data
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.close()

    def requests(self) -> Iterator[tuple[str, bytes]]:
        """(path, body) of each HTTP request."""
        for record in self.sent:
            data = bytes(record)
            while data:
                head, _, data = data.partition(b"\r\n\r\n")
                lines = head.split(b"\r\n")
                sizes = [line.split(b":")[1] for line in lines if line.lower().startswith(b"content-length:")]
                size = int(sizes[0]) if sizes else 0
                yield lines[0].split()[1].decode(), data[:size]
                data = data[size:]

    def close(self) -> None:
        self._listener.close()
