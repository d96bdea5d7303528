"""What a device sends to a federation's server, in clear: a relay with the server's own certificate and key."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


class Relay:
    """Listens on this machine, and passes everything on to the server; `sent` is what devices said.

    One thread: a TLS connection that one thread reads and another one writes loses data now and then.
    """

    def __init__(self, certificate: Path, key: Path, server: tuple[str, int]) -> None:
        self.server, self.sent = server, list[bytearray]()
        self._inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._inside.load_cert_chain(certificate, key)
        self._outside = ssl.create_default_context(cafile=str(certificate))
        self._loop = asyncio.new_event_loop()
        listening = asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._inside)
        self._listener = self._loop.run_until_complete(listening)
        self.port = int(self._listener.sockets[0].getsockname()[1])
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _serve(self, device: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        record = bytearray()
        try:
            server, on = await asyncio.open_connection(*self.server, ssl=self._outside)
        except OSError:
            back.close()
            return
        self.sent.append(record)
        await asyncio.gather(self._pump(device, on, record), self._pump(server, back, None))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, record: bytearray | None) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if record is not None:
                    record += data
                target.write(data)
                await target.drain()
        target.close()

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
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._listener.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.1))
        self._loop.close()
