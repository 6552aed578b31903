"""The packages form layers: each imports only layers below its own, lazy imports and imports for types included."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from graphlib import TopologicalSorter
from pathlib import Path

import hidet_dist

ROOT = Path(hidet_dist.__file__).parent

LAYERS: tuple[str, ...] = (
    # What people start and call.
    "cli",
    "llm",
    "frontends",
    "api",
    "phases",
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
    "options",
    "reshard",
    "machine",
    "weights",
    "targets",
    "transfer",
    "patterns",
    "traits",
    "native",
    "spec",
    # Helpers.
    "rewriting",
    "toolchain",
    "progress",
    "frugal",
    "highs",
    "files",
    "codec",
    "checks",
    "limits",
    "errors",
)
"""From the top down. ``hidet_dist/__init__.py`` is above all of them: it names the public calls."""

SEARCH_LAYERS: tuple[str, ...] = (
    "__main__",
    "__init__",
    # Searches, and what they give: the one that is called, and those behind it.
    "planner",
    "shares",
    "meshes",
    "family",
    "one_graph",
    "recost",
    "request",
    "result",
    "in_time",
    "propagate",
    "overlap",
    "report",
    "refine",
    # Solvers, the one that calls the others first.
    "budget",
    "pairwise",
    "ilp",
    "elimination",
    # From a graph to the problem that solvers take.
    "formulation",
    "problem",
    # Settings.
    "choice_sets",
    "options",
    "steps",
    "limits",
    "tuning",
)
"""The packages and modules of ``hidet_dist/search``, from the top down."""

SOLVERS = {"pulp", "highspy"}
SOLVERS_IN = {"highs.py", "search/ilp/solvers.py", "search/budget/master.py", "compile/cpu/layouts.py"}
"""The programs of plans and of the layouts of convolutions: nothing else imports their solvers."""


@lru_cache(None)
def every_import(path: Path) -> list[tuple[int, str, bool]]:
    """The line and the full name of everything that a file imports, and whether it is for type checkers only."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    blocks = [
        node
        for node in nodes
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    typing = {id(node) for block in blocks for part in block.body for node in ast.walk(part)}
    found = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} imports relatively"
            found += [(node.lineno, f"{node.module}.{alias.name}", id(node) in typing) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, id(node) in typing) for alias in node.names]
    return found


def imports(path: Path, typing: bool = True) -> Iterator[tuple[int, str]]:
    """The line and the full name of everything that a file imports; what is for type checkers only if ``typing``."""
    return ((line, name) for line, name, of_types in every_import(path) if typing or not of_types)


def layer_of(path: Path, root: Path = ROOT) -> str:
    """The package, or the single module, that a file below the root belongs to."""
    return path.relative_to(root).parts[0].removesuffix(".py")


def files() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def test_every_package_has_its_layer():
    assert {layer_of(path) for path in files()} == set(LAYERS)
    assert len(set(LAYERS)) == len(LAYERS)


def upward_imports(paths: Iterable[Path], root: Path, layers: Sequence[str]) -> list[str]:
    """Imports of a package below ``root`` that do not go to a lower layer of the same package."""
    package = ("hidet_dist", *root.relative_to(ROOT).parts)
    depth, wrong = len(package), []
    for path in paths:
        layer = layer_of(path, root)
        for line, name in imports(path):
            parts = name.split(".")
            head = parts[depth] if tuple(parts[:depth]) == package else layer
            if head != layer and (head not in layers or layers.index(head) <= layers.index(layer)):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    return wrong


def test_packages_import_only_the_layers_below_them():
    assert upward_imports(files(), ROOT, LAYERS) == []


def test_the_packages_of_the_search_import_only_those_below_them():
    root = ROOT / "search"
    paths = sorted(root.rglob("*.py"))
    assert {layer_of(path, root) for path in paths} == set(SEARCH_LAYERS)
    assert upward_imports(paths, root, SEARCH_LAYERS) == []


def modules() -> dict[str, Path]:
    """All modules by their names."""
    names = {path: (ROOT.name, *path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    return {".".join(name).removesuffix(".__init__"): path for path, name in names.items()}


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Within a package either; imports for type checkers alone are not counted."""
    known = modules()
    needs: dict[str, set[str]] = {}
    for module, path in known.items():
        found = {name if name in known else name.rpartition(".")[0] for _, name in imports(path, typing=False)}
        needs[module] = (found & known.keys()) - {module}
    sorter = TopologicalSorter(needs)
    sorter.prepare()  # raises CycleError, which has the modules


def test_a_solver_is_imported_where_it_is_called_and_nowhere_else():
    for path in files():
        for line, name in imports(path):
            if name.split(".")[0] in SOLVERS:
                assert path.relative_to(ROOT).as_posix() in SOLVERS_IN, f"{path}:{line} imports {name}"
