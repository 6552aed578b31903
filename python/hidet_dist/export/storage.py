"""The storage of programs that share weights and states: one name for each of them in all programs."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

from hidet_dist.compile import CompiledProgram
from hidet_dist.errors import PlanError
from hidet_dist.partitioning import Program
from hidet_dist.spec import TensorPlan
from hidet_dist.weights import StoredLayout


def share_storage(programs: Sequence[Program], keys: Sequence[Mapping[str, Hashable]]) -> list[Program]:
    """Rename what programs hold, so that weights and states that are the same have the same name, and others do not.

    Parameters
    ----------
    programs: sequence of Program
        The programs of one stage, on one mesh.
    keys: sequence of mappings
        For each program, a key of each of its weights and states, by name. What has equal keys is the same.

    Raises
    ------
    PlanError
        When a weight or a state has different specs, shapes or dtypes in two programs: it is stored once.
    """
    known: dict[Hashable, TensorPlan] = {}
    fresh = {kind: itertools.count() for kind in "ws"}
    result = []
    for program, of_program in zip(programs, keys, strict=True):
        renamed: dict[str, str] = {}
        for kind, what, held in _held(program):
            key = of_program[held.name]
            if key in known and known[key].name in renamed.values():
                key = key, held.name  # a program that holds equal weights twice
            if key not in known:
                known[key] = replace(held, name=f"{kind}{next(fresh[kind])}")
            stored = known[key]
            if (stored.spec, stored.shape, stored.dtype) != (held.spec, held.shape, held.dtype):
                raise PlanError(
                    f"The {what} {held.label or held.name} is {held.dtype}{list(held.shape)} in {held.spec} in one "
                    f"program, and {stored.dtype}{list(stored.shape)} in {stored.spec} in another. Programs share "
                    "their weights and states: plan them together."
                )
            renamed[held.name] = stored.name
        result.append(_renamed(program, renamed))
    return result


def _held(program: Program) -> Iterator[tuple[str, str, TensorPlan]]:
    """List what a rank holds for a program: the first letter of its name, the word for it, and the tensor."""
    yield from (("w", "weight", weight) for weight in program.weights)
    yield from (("s", "state", state) for state in program.states)


def _renamed(program: Program, names: Mapping[str, str]) -> Program:
    return replace(
        program,
        weights=tuple(replace(weight, name=names[weight.name]) for weight in program.weights),
        sources={names[name]: source for name, source in program.sources.items()},
        weight_placeholders={names[name]: x for name, x in program.weight_placeholders.items()},
        states=tuple(replace(state, name=names[state.name]) for state in program.states),
        state_placeholders={names[name]: x for name, x in program.state_placeholders.items()},
        new_values=tuple(names[name] for name in program.new_values),
        initial={names[name]: source for name, source in program.initial.items()},
    )


def weight_bytes(programs: Sequence[Program], rank: int) -> int:
    """Compute the bytes of weights that a rank of a stage stores for programs, whose shared weights have one name."""
    return _bytes({weight.name: weight for program in programs for weight in program.weights}, programs, rank)


def different_layouts(programs: Sequence[CompiledProgram]) -> set[str]:
    """List the weights that programs over one storage would read in different layouts."""
    known: dict[str, StoredLayout] = {}
    return {
        name
        for program in programs
        for name, layout in program.weight_layouts.items()
        if known.setdefault(name, layout) != layout
    }


def held_bytes(programs: Sequence[Program], rank: int) -> int:
    """Compute the bytes of weights and states that a rank of a stage holds for programs, with one name for each."""
    return _bytes({one.name: one for program in programs for *_, one in _held(program)}, programs, rank)


def _bytes(held: Mapping[str, TensorPlan], programs: Sequence[Program], rank: int) -> int:
    mesh = programs[0].mesh
    return sum(one.local_nbytes(mesh, mesh.coordinate(rank)) for one in held.values())
