#!/usr/bin/env python
"""Prints the figures of the package's layout, each with its bar and the places that count."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).parents[1]
sys.path.insert(0, str(TOP))

from tests.test_layers import cycles  # noqa: E402

PACKAGE = TOP / "edgeft"
NAMES = ("method", "arch")  # compared only inside methods/ and arch/

# figure: the largest value that is allowed
BARS = {
    "modules in no folder": 4,
    "import cycles": 0,
    "files over 500 lines": 2,
    "functions over 50 lines": 0,
    "functions with more than 6 parameters": 10,
    "comparisons with a method or architecture elsewhere": 0,
    # 20,173 when the layout was done; then low rank, bf16 weights, products, nodes, ten architectures, audit, federated
    "lines of Python": 28_400,
    "README lines": 150,
    "README words": 1_500,
}


def sources() -> dict[str, str]:
    return {str(f.relative_to(PACKAGE)): f.read_text(encoding="utf-8") for f in sorted(PACKAGE.rglob("*.py"))}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}:{node.lineno} {node.name}", node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    args = function.args
    named = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")])


def comparisons() -> Iterator[str]:
    """`x.method == "lora"`, `arch != "llama"`, `method in ("lora", …)`."""
    for name, text in sources().items():
        if name.split("/")[0] in ("methods", "arch"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare):
                sides = [ast.unparse(side).split(".")[-1] for side in (node.left, *node.comparators)]
                if any(side in NAMES for side in sides) and not any(side == "None" for side in sides):
                    yield f"{name}:{node.lineno} {ast.unparse(node)}"


def figures() -> dict[str, list[str] | int]:
    """A count, or the places that make it up."""
    files = sources()
    readme = (TOP / "README.md").read_text(encoding="utf-8")
    return {
        "modules in no folder": [name for name in files if "/" not in name and not name.startswith("__")],
        "import cycles": cycles(),
        "files over 500 lines": [name for name, text in files.items() if len(text.splitlines()) > 500],
        "functions over 50 lines": [n for n, f in functions() if (f.end_lineno or 0) - f.lineno + 1 > 50],
        "functions with more than 6 parameters": [name for name, f in functions() if parameters(f) > 6],
        "comparisons with a method or architecture elsewhere": list(comparisons()),
        "lines of Python": sum(len(text.splitlines()) for text in files.values()),
        "README lines": len(readme.splitlines()),
        "README words": len(readme.split()),
    }


if __name__ == "__main__":
    for figure, value in figures().items():
        count = value if isinstance(value, int) else len(value)
        print(f"{figure}: {count} (at most {BARS[figure]})")
        for place in [] if isinstance(value, int) else value:
            print(f"    {place}")
