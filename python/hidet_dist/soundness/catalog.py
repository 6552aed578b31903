"""The catalog of operator classes, hidet's and those added to it, with the origin of each one's rule.

``python -m hidet_dist.soundness.catalog`` prints it, with a sample rule of each class.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import hidet
import numpy as np
from hidet.graph import Operator

from hidet_dist import operators
from hidet_dist.rules.declared import DECLARED, REPLICATED, UNIMPORTABLE
from hidet_dist.rules.rule import derive

DERIVED, BY_HAND, REPLICATE_ONLY, NONE = "derived", "declared by hand", "replicate-only", "in none"
SAMPLES = 25  # the number of random instances tried in search of one with a factor to shard


@dataclass(frozen=True)
class Entry:
    """An operator class: its group, the reason for the group if it needs one, and the rule of a sample."""

    name: str
    group: str
    reason: str
    sample: str = ""
    rule: str = ""


@lru_cache(maxsize=1)
def operator_classes() -> tuple[str, ...]:
    """List the full names of all operator classes that can be in a graph, read from their sources.

    Sources are read rather than modules imported, since some modules cannot be imported without a GPU. A class with
    derived classes that hidet never instantiates is an abstract base, and is excluded.
    """
    bases: dict[str, set[str]] = {}
    called: set[str] = set()
    for package, path in _sources():
        root = Path(package.__file__ or "").parent
        module = ".".join([package.__name__, *path.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[f"{module}.{node.name}"] = {_name(base) for base in node.bases}
            elif isinstance(node, ast.Call):
                called.add(_name(node.func))
    operators: set[str] = set()
    known = {Operator.__name__}
    while True:
        more = {name for name, parents in bases.items() if parents & known} - operators
        if not more:
            break
        operators |= more
        known |= {_last(name) for name in more}
    parents = set().union(*(bases[name] for name in operators))
    return tuple(sorted(name for name in operators if _last(name) in called or _last(name) not in parents))


def _sources() -> Iterator[tuple[ModuleType, Path]]:
    """Yield the source files that define operators of graphs, each with its package."""
    for package in (hidet, operators):
        yield from ((package, path) for path in sorted(Path(package.__file__ or "").parent.rglob("*.py")))


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def full_name(cls: type[Operator]) -> str:
    """Return the full name of a class, as in :func:`operator_classes`."""
    return f"{cls.__module__}.{cls.__qualname__}"


def replicate_only() -> dict[str, str]:
    """Map the full name of each replicate-only operator class to the reason."""
    reasons = {full_name(cls): reason for cls, reason in REPLICATED.items()}
    for name in operator_classes():
        if name.rpartition(".")[0] in UNIMPORTABLE:
            reasons[name] = UNIMPORTABLE[name.rpartition(".")[0]]
    return reasons


def catalog() -> Iterator[Entry]:
    """Yield the entry of every operator class. A class without a rule and without a reason is in the group NONE."""
    from hidet_dist.soundness.instances import MAKERS

    with_makers = {full_name(cls): cls for cls in MAKERS}
    by_hand = {full_name(cls): declaration.reason for cls, declaration in DECLARED.items()}
    replicated = replicate_only()
    for name in operator_classes():
        if name in replicated:
            yield Entry(name, REPLICATE_ONLY, replicated[name])
            continue
        sample = _sample(with_makers[name]) if name in with_makers else None
        if sample is None:
            yield Entry(name, NONE, "")
            continue
        group = BY_HAND if name in by_hand else DERIVED
        yield Entry(name, group, by_hand.get(name, ""), *sample)


def _sample(cls: type[Operator]) -> tuple[str, str] | None:
    """Find a random instance of the class with a factor to shard; return it and its rule, or None."""
    from hidet_dist.soundness.instances import instance

    for seed in range(SAMPLES):
        op = instance(cls, np.random.default_rng(seed)).op
        rule = derive(op)
        if any(digit.extent > 1 for digit in rule.factors):
            shapes = ", ".join(f"{x.dtype.name}{[int(size) for size in x.shape]}" for x in op.inputs)
            return shapes, rule.notation()
    return None


def main() -> int:
    """Print the table and the counts; the exit status is 1 when a class is in no group."""
    entries = list(catalog())
    for group in (DERIVED, BY_HAND, REPLICATE_ONLY, NONE):
        members = [entry for entry in entries if entry.group == group]
        if members:
            print(f"\n{group} ({len(members)})")
        for entry in members:
            print(f"  {entry.name.removeprefix('hidet.graph.ops.')}")
            if entry.reason:
                print(f"      because {entry.reason}")
            if entry.rule:
                print(f"      of {entry.sample or 'nothing'}: {entry.rule}")
    counts = Counter(entry.group for entry in entries)
    print(f"\n{len(entries)} operator classes: " + ", ".join(f"{count} {group}" for group, count in counts.items()))
    return 1 if counts[NONE] else 0


if __name__ == "__main__":
    raise SystemExit(main())
