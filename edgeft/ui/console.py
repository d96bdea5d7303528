"""The two consoles, and how lines, JSON, errors and warnings are printed; a bug keeps its traceback.

Text from files and users is escaped: it cannot change the style.
"""

from __future__ import annotations

import contextlib
import errno
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from edgeft.errors import ConfigError, ConfigWarning, EdgeftError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def one_line(text: str) -> str:
    return escape(" ".join(text.split()))


def print_line(text: str) -> None:
    """As it is: no style, no line break added."""
    out.print(text, soft_wrap=True, markup=False)


def print_json(values: Any) -> None:
    sys.stdout.write(json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def show(values: Any, as_json: bool, draw: Callable[[Console, Any], None]) -> None:
    """The result of a command: as JSON, or drawn."""
    if as_json:
        print_json(values)
    else:
        draw(out, values)


def print_error(message: str, hint: str = "") -> None:
    err.print(f"[bold red]error:[/] {one_line(message)}", soft_wrap=True)
    if hint:
        err.print(f"[bold]hint:[/] {one_line(hint)}", soft_wrap=True)


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Prints errors and warnings for users; exits with the error's code."""
    try:
        with config_warnings():
            yield
    except EdgeftError as error:
        print_error(error.message, error.hint)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        err.print("stopped")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise typer.Exit(0) from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print_error("a file name in the command is too long", "check for a name that is doubled or quoted wrongly")
        raise typer.Exit(ConfigError.exit_code) from None


@contextlib.contextmanager
def config_warnings() -> Iterator[None]:
    """A ConfigWarning is one line on stderr, once; other warnings are as Python prints them."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", ConfigWarning)
        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, ConfigWarning):
                err.print(f"[bold yellow]warning:[/] {one_line(str(message))}", soft_wrap=True)
            else:
                show_other(message, category, *where, **more)

        warnings.showwarning = show
        yield
