"""Runs templates and patterns that came with a model or a suite in a small process of their own.

They are untrusted programs: an answer or an error comes within SECONDS, and the process has at most BYTES of memory,
opens no file or socket and starts no program (Windows: the time limit only).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import mmap
import os
import re
import subprocess
import sys
import threading
from datetime import datetime
from typing import IO, Any

from edgeft.host import system

SECONDS = 10.0  # for one request; an ordinary template takes less than a millisecond
BYTES = 512 << 20  # of memory, beyond what the process needs to start
OUTPUT_CHARS, OUTPUT_TIMES = 1 << 20, 16  # longest output: OUTPUT_CHARS + OUTPUT_TIMES × the length of the input
SOURCE_CHARS = 1 << 20  # of a template or pattern

# As in run/supervise.py: no module is imported from the current folder, where the user's own files are.
BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "import json; sys.path[:] = json.loads(sys.argv[1])['path']; from edgeft.host.sandbox import main; main()"
)


class Broken(Exception):
    """The source itself cannot be used: a syntax error."""


class Failed(Exception):
    """It raises an error on its input, or needs too much time or memory."""


def chat(source: str, values: dict[str, Any]) -> str:
    """A chat template, as transformers renders it."""
    return _ask(False, "chat", source, values)


def chat_as_llama_cpp(source: str, values: dict[str, Any]) -> str:
    """A chat template, as llama-cpp-python renders it."""
    return _ask(True, "peer", source, values)


def prompt(source: str, values: dict[str, Any]) -> str:
    """A jinja template in which every name must be defined."""
    return _ask(False, "prompt", source, values)


def search(pattern: str, text: str) -> str:
    """The first group of a regular expression's first match, or ""."""
    return _ask(False, "search", pattern, {"text": text})


def check(kind: str, source: str) -> None:
    """Raises Broken if a prompt or a pattern cannot be used at all."""
    _ask(False, f"check {kind}", source, {})


def _ask(peer: bool, kind: str, source: str, values: dict[str, Any]) -> str:
    if len(source) > SOURCE_CHARS:
        raise Broken(f"it is {len(source)} characters long")
    return _worker(peer).ask({"kind": kind, "source": source, "values": values, "seconds": SECONDS})


@functools.lru_cache(maxsize=2)
def _worker(peer: bool) -> _Worker:
    return _Worker(peer)


class _Worker:
    """One process, started when it is needed, and again after it ended."""

    def __init__(self, peer: bool) -> None:
        self.peer = peer
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0  # a forked child must not use its parent's
        self.lock = threading.Lock()

    def ask(self, work: dict[str, Any]) -> str:
        with self.lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                with system.time_limit(process, SECONDS) as killed:
                    _send(process.stdin, work)
                    answer = _receive(process.stdout)
            except BaseException as error:  # Ctrl-C too: the next request must not get this one's answer
                self._end()
                if isinstance(error, (OSError, ValueError)):
                    raise Failed("its process ended") from None
                raise
            if answer is None:
                code = process.wait()
                self._end()
                late = killed.is_set() or system.ended_by_alarm(code)
                raise Failed(f"it takes longer than {SECONDS:g} s" if late else "it needs too much memory")
        if "text" in answer:
            return str(answer["text"])
        raise (Broken if answer.get("broken") else Failed)(str(answer.get("error")))

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
            options = json.dumps({"path": [p for p in sys.path if p], "peer": self.peer, "bytes": BYTES})
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT, options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                **system.child_options(),
            )
            self.owner = os.getpid()
        return self.process

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(OSError):
                    if pipe:
                        pipe.close()
        self.process = None


def _send(file: IO[bytes], values: dict[str, Any]) -> None:
    data = json.dumps(values).encode()
    file.write(len(data).to_bytes(8, "little") + data)
    file.flush()


def _receive(file: IO[bytes]) -> dict[str, Any] | None:
    """None: the other process ended."""
    head = file.read(8)
    length = int.from_bytes(head, "little")
    data = file.read(length) if len(head) == 8 else b""
    return dict(json.loads(data)) if len(head) == 8 and len(data) == length else None


def main() -> None:
    """Answers requests until its parent closes the pipe or ends."""
    options = json.loads(sys.argv[1])
    source, target = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for name in ("jinja2.debug", "linecache", "random", "traceback"):  # jinja imports these late, when no file opens
        importlib.import_module(name)
    _chat_template("{{ strftime_now('%d %b %Y') }}").render()
    if options["peer"]:
        _peer("x", {"messages": [], "bos_token": "", "eos_token": ""})
    _limit(options["bytes"])
    while work := _receive(source):
        system.set_alarm(work["seconds"])
        answer = _work(work)
        system.set_alarm(0)
        _send(target, answer)


def _limit(memory: int) -> None:
    if sys.platform == "win32":
        return
    import resource

    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        memory += int(file.read().split()[0]) * mmap.PAGESIZE
    limits = {"RLIMIT_AS": memory, "RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0, "RLIMIT_NOFILE": 0}
    for name, value in limits.items():
        with contextlib.suppress(AttributeError, OSError, ValueError):  # not every system has every one
            resource.setrlimit(getattr(resource, name), (value, value))


def _work(work: dict[str, Any]) -> dict[str, Any]:
    import jinja2

    kind, source, values = work["kind"], work["source"], work["values"]
    does = {
        "chat": lambda: _chat_template(source).render(**values),
        "peer": lambda: _peer(source, values),
        "prompt": lambda: _prompt_template(source).render(**values),
        "search": lambda: _search(source, values["text"]),
        "check prompt": lambda: _prompt_template(source) and "",
        "check search": lambda: _check_search(source),
    }
    try:
        text = str(does[kind]())
        most = OUTPUT_CHARS + OUTPUT_TIMES * sum(len(m["content"]) for m in values.get("messages", []))
        if len(text) > most:
            return {"error": f"its output is {len(text)} characters long"}
        return {"text": text}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"[:400], "broken": True}
    except re.error as error:
        return {"error": str(error)[:400], "broken": True}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it is nested too deeply", "broken": kind.startswith("check")}
    except Exception as error:  # a template is a program and raises what it likes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return {"error": reason[:400], "broken": kind.startswith("check")}


@functools.lru_cache(maxsize=8)
def _chat_template(source: str) -> Any:
    """The template as transformers compiles it: same whitespace rules, same helpers, sandboxed."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} … {% endgeneration %} marks the assistant's part; here it only passes its text on."""

        tags = {"generation"}  # noqa: RUF012 - jinja declares it so

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja's own would escape HTML

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env.from_string(source)


@functools.lru_cache(maxsize=8)
def _prompt_template(source: str) -> Any:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined).from_string(source)


def _peer(source: str, values: dict[str, Any]) -> str:
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    formatter = Jinja2ChatFormatter(source, eos_token=values["eos_token"], bos_token=values["bos_token"])
    return str(formatter(messages=values["messages"]).prompt)


def _search(source: str, text: str) -> str:
    match = re.search(source, text, re.DOTALL)
    return (match.group(1) or "") if match else ""


def _check_search(source: str) -> str:
    if re.compile(source).groups < 1:
        raise ValueError("it has no group")
    return ""
