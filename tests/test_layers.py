"""The packages form layers: each imports only layers below its own, lazy imports and imports for types included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hidet_dist

ROOT = Path(hidet_dist.__file__).parent

LAYERS: tuple[str, ...] = (
    # What people start and call.
    "cli",
    "frontends",
    "api",
    "config",
    # What measures and checks the layers below.
    "calibration",
    "simulate",
    "soundness",
    "testing",
    # From a graph to artifacts, the last step first.
    "export",
    "report",
    "pipeline",
    "search",
    "compile",
    "overlap",
    "partitioning",
    "cost",
    "symbolic",
    "view",
    "normalize",
    "rules",
    "operators",
    "compat",
    # What starts serving processes, and what they import.
    "launch",
    "runtime",
    "artifacts",
    # Data classes and closed forms.
    "reshard",
    "machine",
    "explain",
    "weights",
    "transfer",
    "patterns",
    "spec",
    # Helpers.
    "elementwise",
    "renaming",
    "rewriting",
    "toolchain",
    "progress",
    "frugal",
    "files",
    "checks",
    "limits",
    "errors",
)
"""From the top down. ``hidet_dist/__init__.py`` is above all of them: it names the public calls."""

SOLVERS = {"pulp", "highspy"}
SOLVERS_IN = {"search/ilp.py", "search/master.py"}
"""The integer and the linear program: nothing else imports their solvers."""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the full name of everything that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} imports relatively"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def layer_of(path: Path) -> str:
    """The package, or the single module, that a file below the root belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def files() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def test_every_package_has_its_layer():
    assert {layer_of(path) for path in files()} == set(LAYERS)
    assert len(set(LAYERS)) == len(LAYERS)


def test_packages_import_only_the_layers_below_them():
    wrong = []
    for path in files():
        layer = layer_of(path)
        for line, name in imports(path):
            parts = name.split(".")
            if parts[0] != "hidet_dist" or parts[1:2] == [layer]:
                continue
            if parts[1] not in LAYERS or LAYERS.index(parts[1]) <= LAYERS.index(layer):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []


def test_a_solver_is_imported_where_it_is_called_and_nowhere_else():
    for path in files():
        for line, name in imports(path):
            if name.split(".")[0] in SOLVERS:
                assert path.relative_to(ROOT).as_posix() in SOLVERS_IN, f"{path}:{line} imports {name}"
