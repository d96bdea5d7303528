"""The import rule of the package: layers point one way, inside functions too, and no module is in a cycle."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

from edgeft.arch import ARCHITECTURES

PACKAGE = Path(__file__).parents[1] / "edgeft"

# A room imports only from rooms above it in this list.
LAYERS = (
    *("errors", "config", "host", "run", "formats", "data", "arch", "engine", "methods", "plan"),
    *("train", "search", "evaluate", "export", "audit", "report", "ui", "pipeline", "federated", "cli"),
)
FREE = ("__init__", "__main__", "demo")  # the package itself, and the embedded rows


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@lru_cache(maxsize=1)
def imports() -> dict[str, set[str]]:
    """Modules of the package, and those that each imports anywhere in its code; those for types alone do not count."""
    files = {module_of(file): file for file in PACKAGE.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for module, file in files.items():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        typing_only = {
            node
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        names = set()
        for node in ast.walk(tree):
            if node in typing_only:
                continue
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "edgeft":
                every = [f"{node.module}.{alias.name}" for alias in node.names]
                names |= {name if name in files else node.module for name in every}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names if alias.name in files}
        found[module] = names - {module}
    return found


def room(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def test_every_room_has_its_place() -> None:
    assert {room(module) for module in imports()} <= {*LAYERS, *FREE}


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} → {target}"
        for module, targets in sorted(imports().items())
        for target in sorted(targets)
        if {room(module), room(target)} <= set(LAYERS) and LAYERS.index(room(target)) > LAYERS.index(room(module))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_test_imports_another_test() -> None:
    wrong = [
        f"{file.name} → {name}"
        for file in sorted(Path(__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in imported(node)
        if name.split(".")[-1].startswith("test_") or ".test_" in name
    ]
    assert not wrong, "\n".join(wrong)


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def cycles() -> list[str]:
    graph, done, cycles = imports(), set[str](), []

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            cycles.append(" → ".join((*path[path.index(module) :], module)))
        elif module not in done:
            for target in sorted(graph.get(module, ())):
                visit(target, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
    return cycles


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert not cycles(), "\n".join(cycles())


def test_no_method_is_compared_outside_methods() -> None:
    """A method is one file: neither a comparison of `method`, nor a method's name, stands anywhere else."""
    from edgeft.methods import METHODS

    wrong = []
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name in ("methods", "data") or file == PACKAGE / "config" / "schema.py":
            continue  # in data, `qas` is a key of SQuAD's files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            compared = any(getattr(side, "attr", getattr(side, "id", "")) == "method" for side in sides)
            if compared or (isinstance(node, ast.Constant) and node.value in METHODS):
                wrong.append(f"{file.relative_to(PACKAGE.parent)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


# Files that name tokenizers, some of which have the names of architectures.
TOKENIZER_NAMES = ("formats/vocabulary.py",)


def test_no_architecture_is_named_outside_arch() -> None:
    names = {name for family in ARCHITECTURES for name in (family.name, *family.model_types, family.config_class)}
    named = [
        f"{file.relative_to(PACKAGE)}:{node.lineno} {node.value!r}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.parent.name != "arch" and not str(file).endswith(TOKENIZER_NAMES)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not named, "\n".join(named)


# Where ctypes is allowed: platform code, file formats, the backend; llama.cpp's own Python interface is ctypes.
FOREIGN = ("edgeft.host.", "edgeft.formats.", "edgeft.engine.kernels", "edgeft.evaluate.llamacpp")


def test_only_a_backend_knows_addresses_and_vectors() -> None:
    """ctypes, data_ptr() and the lanes of a vector: a backend for other hardware replaces one file."""
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        module = module_of(file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            word = node.attr if isinstance(node, ast.Attribute) else ""
            if "ctypes" in names and not module.startswith(FOREIGN):
                wrong.append(f"{module} imports ctypes")
            if word in ("data_ptr", "lanes") and module != "edgeft.engine.kernels":
                wrong.append(f"{module} uses .{word}")
    assert not wrong, "\n".join(wrong)
