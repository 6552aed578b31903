"""A class has a name of its own in the whole package: a reader finds one definition by it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import hidet_dist

ROOT = Path(hidet_dist.__file__).parent

PERMITTED: dict[str, str] = {
    "ExpertKernelOp": "one operator, for CPUs and for CUDA: hidet names kernels after the class",
}
"""Names that several classes have, with the reason: they are the same thing in another layer or for another target."""


def test_a_name_of_a_class_has_one_meaning() -> None:
    places = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    several = {name: found for name, found in places.items() if len(found) > 1}
    unknown = {name: found for name, found in several.items() if name not in PERMITTED}
    assert not unknown, f"give each its own, more precise name, or merge them: {unknown}"
    assert several.keys() == PERMITTED.keys(), "a permitted name is no longer double"
