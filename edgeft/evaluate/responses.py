"""Responses of a model, stored by row: of a base model in the user's cache, for all runs; of others in the run folder.

A row's key is a hash of its tokens, and an answer is stored as tokens. A damaged file counts as an empty one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from edgeft.errors import RunError
from edgeft.evaluate.request import Request, Response
from edgeft.host import cache
from edgeft.host.files import atomic_write, read_json

MAX_ROWS = 20_000  # of one file: about 6 MB; the oldest are dropped
MAX_BYTES = 64 << 20  # of all base models; the least recently used are deleted


class StoredResponses:
    """In one file; without a file, in memory."""

    def __init__(self, file: Path | None, max_new: int, again: bool = False) -> None:
        """again: responses that are there already are computed again."""
        self.file, self.max_new = file, max_new
        self.rows: dict[str, Any] = {} if again else self._read()

    def get(self, request: Request) -> Response | None:
        return _response(self.rows.get(self._key(request)), request)

    def add(self, requests: Sequence[Request], responses: Sequence[Response]) -> None:
        pairs = zip(requests, responses, strict=True)
        new = {self._key(request): list(astuple(response)) for request, response in pairs}
        self.rows |= new
        self._write(new)

    def _key(self, request: Request) -> str:
        return hashlib.sha256(json.dumps([astuple(request), self.max_new]).encode()).hexdigest()[:24]

    def _read(self) -> dict[str, Any]:
        rows = (read_json(self.file) or {}).get("rows") if self.file else None
        return rows if isinstance(rows, dict) else {}

    def _write(self, new: dict[str, Any]) -> int:
        """Adds rows to the file, to which others may have been added since; how many it has."""
        if self.file is None:
            return 0
        rows = dict(list((self._read() | new).items())[-MAX_ROWS:])
        with atomic_write(self.file) as file:
            file.write(json.dumps({"rows": rows}, separators=(",", ":")).encode())
        return len(rows)


class SharedResponses(StoredResponses):
    """Of a base model, in an entry of the user's cache. Without the cache, scoring is only slower."""

    def __init__(self, root: Path, key: str, max_new: int, again: bool = False) -> None:
        self.entry = cache.Entry(root / key)
        self.model, self.run = "", Path()  # for `edgeft cache`, and to delete it with the last run that uses it
        super().__init__(self.entry.path / "responses.json", max_new, again)

    def used_by(self, run: Path, model: str) -> SharedResponses:
        self.run, self.model = run, model
        with contextlib.suppress(OSError, RunError):
            if self.rows:
                os.utime(self.entry.lock_file)
                cache.add_user(self.entry, run)
        return self

    def _write(self, new: dict[str, Any]) -> int:
        count, root = 0, self.entry.path.parent
        with contextlib.suppress(OSError, RunError):
            with cache.changing(root), contextlib.closing(self.entry) as entry:
                entry.acquire(lambda: False, lambda: False, lambda: None)
                count = super()._write(new)
                entry.write_note({**entry.note, "model": self.model, "rows": count})
                cache.make_room(root, entry, entry.bytes(), MAX_BYTES)
            cache.add_user(self.entry, self.run)
        return count


def _response(stored: Any, request: Request) -> Response | None:
    """None if it is missing or damaged."""
    try:
        prompt_nll, option_nll, option_greedy, output = stored
        response = Response(
            float(prompt_nll), [float(nll) for nll in option_nll], [bool(one) for one in option_greedy], list(output)
        )
    except (TypeError, ValueError):
        return None
    fits = len(response.option_nll) == len(response.option_greedy) == len(request.options)
    fits = fits and all(isinstance(token, int) and token >= 0 for token in response.output)
    return response if fits and all(map(math.isfinite, (response.prompt_nll, *response.option_nll))) else None
