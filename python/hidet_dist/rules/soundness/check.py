"""Each choice of an operator run on every rank of a mesh, and put together again, against the whole operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce as fold
from typing import Any

import hidet
import numpy as np
from hidet.graph import Operator, Tensor
from hidet.ir.task import Task
from hidet.ir.type import DataType

from hidet_dist.rules.declared import definition_of
from hidet_dist.rules.local import localize
from hidet_dist.rules.lookup import row_axes
from hidet_dist.rules.rule import Rule, derive
from hidet_dist.rules.soundness.oracle import NotEvaluable, OutOfRange, evaluate, index_bounds, numpy_dtype
from hidet_dist.spec import DeviceMesh, OpShardSpec, ReduceFn, TensorShardSpec

Array = np.ndarray[Any, Any]

_REDUCE: dict[str, Callable[[Array], Any]] = {
    "sum": np.add.reduce,
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
    "product": np.multiply.reduce,
    "average": lambda parts: np.mean(parts, axis=0),
}


@dataclass(frozen=True)
class Failure:
    """A choice that does not compute what the whole operator does, and how that shows."""

    operator: str
    mesh: tuple[int, ...]
    spec: str
    what: str

    def __str__(self) -> str:
        return f"{self.operator} on {self.mesh} as {self.spec}: {self.what}"


@dataclass
class Checked:
    """What came of checking one operator on one mesh: the choices that were run, and those that failed."""

    choices: int
    failures: list[Failure]


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape in ints (hidet's may be constants)."""
    return tuple(int(size) for size in tensor.shape)


def random_inputs(
    op: Operator, rng: np.random.Generator, ranges: Mapping[int, tuple[float, float]] | None = None
) -> list[Array]:
    """Random whole inputs of an operator; those that index a tensor are in its range.

    ``ranges`` gives the half-open range of an input's values by its number, where the operator is not defined for all.
    """
    bounds = index_bounds(definition_of(op))
    inputs = []
    for number, x in enumerate(op.inputs):
        dtype, shape = x.dtype, shape_of(x)
        low, high = (ranges or {}).get(number, (-4.0, 5.0))
        if number in bounds and number not in (ranges or {}):
            low, high = 0, bounds[number]
        target = numpy_dtype(dtype)
        value: Any
        if dtype.is_boolean():
            value = rng.integers(0, 2, shape)
        elif dtype.is_integer():
            value = rng.integers(0 if dtype.name.startswith("u") else int(low), int(high), shape)
        elif dtype.is_complex():
            value = rng.uniform(low, high, shape) + 1j * rng.uniform(low, high, shape)
        else:
            value = rng.uniform(low, high, shape)
        inputs.append(np.asarray(value).astype(target))
    return inputs


def tolerance(dtype: DataType) -> tuple[float, float]:
    """Relative and absolute difference that rounding may make in the oracle, which works in double precision."""
    return (0.0, 0.0) if dtype.is_integer() or dtype.is_boolean() else (1e-8, 1e-9)


def check_operator(
    op: Operator,
    mesh: DeviceMesh,
    rng: np.random.Generator,
    ranges: Mapping[int, tuple[float, float]] | None = None,
    rule: Rule | None = None,
) -> Checked:
    """Run every choice of the operator's rule (or of ``rule``, to check another) on the mesh against the whole.

    Raises
    ------
    NotEvaluable
        When the oracle cannot evaluate the operator, so that nothing would be checked.
    """
    rule = derive(op) if rule is None else rule
    choices = rule.choices(mesh)
    return check_specs(op, mesh, [choice.spec for choice in choices], random_inputs(op, rng, ranges))


def check_specs(op: Operator, mesh: DeviceMesh, specs: Sequence[OpShardSpec], inputs: Sequence[Array]) -> Checked:
    """Run ``op`` as each of ``specs`` says on ``inputs`` against the whole operator."""
    whole = evaluate(definition_of(op), inputs)
    failures = []
    partials: dict[Any, list[list[Array]]] = {}
    tasks: dict[Any, Task] = {}
    for spec in specs:
        try:
            # Choices that differ only in how they reduce share their partial results.
            key = (spec.in_specs, tuple(spec.partial_spec(o) for o in range(len(op.outputs))))
            if key not in partials:
                partials[key] = _run_ranks(op, mesh, *key, inputs, tasks)
            what = _compare(op, mesh, spec, partials[key], whole)
        except (ValueError, OutOfRange) as error:
            what = str(error)
        if what:
            failures.append(Failure(op.name, mesh.shape, str(spec), what))
    return Checked(len(specs), failures)


def _run_ranks(
    op: Operator,
    mesh: DeviceMesh,
    in_specs: Sequence[TensorShardSpec],
    out_specs: Sequence[TensorShardSpec],
    inputs: Sequence[Array],
    tasks: dict[Any, Task],
) -> list[list[Array]]:
    """The local outputs of every rank; ``tasks`` keeps the local definitions by the shapes that they are for."""
    local_shapes = [spec.local_shape(shape_of(x), mesh) for x, spec in zip(op.inputs, in_specs, strict=True)]
    out_shapes = [spec.local_shape(shape_of(y), mesh) for y, spec in zip(op.outputs, out_specs, strict=True)]
    rows = row_axes(op, in_specs)
    shapes = (tuple(local_shapes), tuple(out_shapes), rows)
    if shapes not in tasks:
        symbols = [
            hidet.symbol(list(shape), x.dtype, x.device) for x, shape in zip(op.inputs, local_shapes, strict=True)
        ]
        coordinate = hidet.symbol([mesh.ndim], "int32", "cpu")
        local = localize(op, symbols, in_specs, out_shapes, mesh, lambda: coordinate)[0].op
        tasks[shapes] = definition_of(local)
    done: dict[Any, list[Array]] = {}
    results = []
    for rank in range(mesh.size):
        cuts = tuple(
            spec.slices(shape_of(x), mesh, mesh.coordinate(rank)) for x, spec in zip(op.inputs, in_specs, strict=True)
        )
        key = tuple((s.start, s.stop) for cut in cuts for s in cut)
        if key not in done:  # ranks with the same shards compute the same
            own = [np.array(mesh.coordinate(rank), np.int32)] if rows else []
            shards = [x[cut] for x, cut in zip(inputs, cuts, strict=True)]
            done[key] = evaluate(tasks[shapes], [*shards, *own])
        results.append(done[key])
    return results


def apply_reduce(mesh: DeviceMesh, fn: ReduceFn, partial: Sequence[Array]) -> list[Array]:
    """The results of a reduce function on every rank, from every rank's value before it."""
    results = []
    for rank in range(mesh.size):
        peers = mesh.peers(rank, fn.mesh_axes)
        y = _REDUCE[fn.op](np.stack([partial[peer] for peer in peers]))
        if fn.dim is not None:
            y = np.split(y, len(peers), axis=fn.dim)[peers.index(rank)]
        results.append(np.asarray(y).astype(partial[rank].dtype))
    return results


def _compare(
    op: Operator, mesh: DeviceMesh, spec: OpShardSpec, partials: list[list[Array]], whole: Sequence[Array]
) -> str:
    for number, y in enumerate(op.outputs):
        own = fold(
            lambda values, fn: apply_reduce(mesh, fn, values),
            spec.reduce_fns[number],
            [partial[number] for partial in partials],
        )
        rtol, atol = tolerance(y.dtype)
        for rank, got in enumerate(own):
            expected = whole[number][spec.out_specs[number].slices(shape_of(y), mesh, mesh.coordinate(rank))]
            if got.shape != expected.shape:
                return f"output {number} of rank {rank} has the shape {got.shape}, not {expected.shape}"
            same = np.isclose(got, expected, rtol=rtol, atol=atol, equal_nan=True)
            if not same.all():
                return f"output {number} of rank {rank} differs at {math.prod(got.shape) - int(same.sum())} elements"
    return ""


__all__ = ["Checked", "Failure", "NotEvaluable", "check_operator", "check_specs", "random_inputs"]
