"""The two consoles, and how a line or JSON is printed.

Text from files and users is escaped: it cannot change the style.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def one_line(text: str) -> str:
    return escape(" ".join(text.split()))


def print_line(text: str) -> None:
    """As it is: no style, no line break added."""
    out.print(text, soft_wrap=True, markup=False)


def print_json(values: Any) -> None:
    sys.stdout.write(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
