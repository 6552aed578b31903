"""The check of choices: run each on all ranks of a mesh, and compare the assembled results with the whole operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce as fold
from typing import Any

import hidet
import numpy as np
from hidet.graph import Operator, Tensor
from hidet.ir.task import Task
from hidet.ir.type import DataType

from hidet_dist.compat.quick import quick_hidet
from hidet_dist.rules.declared import definition_of
from hidet_dist.rules.local import localize
from hidet_dist.rules.lookup import row_axes
from hidet_dist.rules.padding import mask_padding
from hidet_dist.rules.rule import NO_PARTS, OfferedParts, Rule, derive
from hidet_dist.soundness.oracle import NotEvaluable, OutOfRange, evaluate, index_bounds, numpy_dtype
from hidet_dist.spec import DeviceMesh, OpShardSpec, ReduceFn, TensorShardSpec
from hidet_dist.spec.extents import part_shape
from hidet_dist.spec.parts import Split, in_lowest_terms, part_sizes

Array = np.ndarray[Any, Any]

_LISTS_OF_PARTS = 2  # that are drawn for an axis
_REDUCE: dict[str, Callable[[Array], Any]] = {
    "sum": np.add.reduce,
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
    "product": np.multiply.reduce,
    "average": lambda parts: np.mean(parts, axis=0),
}


@dataclass(frozen=True)
class Failure:
    """A choice with results other than the whole operator's, and the observed difference."""

    operator: str
    mesh: tuple[int, ...]
    spec: str
    what: str

    def __str__(self) -> str:
        return f"{self.operator} on {self.mesh} as {self.spec}: {self.what}"


@dataclass
class Checked:
    """The result of checking one operator on one mesh: the choices that were run, and those that failed."""

    choices: int
    failures: list[Failure]


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape in ints (hidet's may be constants)."""
    return tuple(int(size) for size in tensor.shape)


def random_inputs(
    op: Operator, rng: np.random.Generator, ranges: Mapping[int, tuple[float, float]] | None = None
) -> list[Array]:
    """Draw random whole inputs of an operator; inputs that index a tensor are in its range.

    ``ranges`` maps numbers of inputs on which the operator is not defined everywhere to half-open ranges of values.
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
    """Return the relative and absolute rounding error of the oracle, which computes in double precision."""
    return (0.0, 0.0) if dtype.is_integer() or dtype.is_boolean() else (1e-8, 1e-9)


def random_parts(extents: Iterable[int], mesh: DeviceMesh, rng: np.random.Generator) -> OfferedParts:
    """Draw parts of some of these extents for each mesh axis, a unit or more for each coordinate, mostly unequal."""
    pairs: dict[tuple[int, tuple[int, ...]], None] = {}
    for axis, size in enumerate(mesh.shape):
        large = sorted({extent for extent in extents if extent > size > 1})
        for units in rng.choice(large, min(len(large), _LISTS_OF_PARTS), replace=False) if large else ():
            ends = np.sort(rng.choice(np.arange(1, units), size - 1, replace=False))
            parts = in_lowest_terms([int(part) for part in np.diff([0, *ends, units])])
            if parts != mesh.shares_of(axis):
                pairs[axis, parts] = None
    return OfferedParts(tuple(pairs), (None,) * len(pairs))


@quick_hidet()
def check_operator(
    op: Operator,
    mesh: DeviceMesh,
    rng: np.random.Generator,
    ranges: Mapping[int, tuple[float, float]] | None = None,
    rule: Rule | None = None,
    offered: OfferedParts = NO_PARTS,
) -> Checked:
    """Run every choice of the operator's rule (or of another ``rule``), and compare with the whole operator.

    Axes split in the mesh's shares, and in parts that are ``offered``.

    Raises
    ------
    NotEvaluable
        When the oracle cannot evaluate the operator, so that nothing would be checked.
    """
    rule = derive(op) if rule is None else rule
    choices = rule.choices(mesh, offered)
    return check_specs(op, mesh, [choice.spec for choice in choices], random_inputs(op, rng, ranges), rule)


@quick_hidet()
def check_specs(
    op: Operator, mesh: DeviceMesh, specs: Sequence[OpShardSpec], inputs: Sequence[Array], rule: Rule | None = None
) -> Checked:
    """Run ``op`` on ``inputs`` with each of ``specs``, and compare with the whole operator.

    The padding of input shards is filled with values that would show in results: NaN, or the greatest integer.
    """
    rule = derive(op) if rule is None else rule
    expected = evaluate(definition_of(op), inputs)
    failures = []
    partials: dict[Any, list[list[Array]]] = {}
    programs: dict[Any, _DeviceProgram] = {}
    for spec in specs:
        try:
            # Choices that differ only in their reduce functions share partial results.
            local = spec.local
            key = (local.in_specs, tuple(spec.partial_spec(o) for o in range(len(op.outputs))))
            if key not in partials:
                partials[key] = _run_ranks(rule, mesh, local, inputs, programs)
            difference = _compare(op, mesh, spec, partials[key], expected)
        except (ValueError, OutOfRange) as error:
            difference = str(error)
        if difference:
            failures.append(Failure(op.name, mesh.shape, str(spec), difference))
    return Checked(len(specs), failures)


@dataclass(frozen=True)
class _DeviceProgram:
    """The program of a device: operators in order, from its shards and its coordinate to its outputs."""

    inputs: tuple[Tensor, ...]
    coordinate: Tensor
    operators: tuple[tuple[Operator, Task], ...]
    outputs: tuple[Tensor, ...]

    def run(self, shards: Sequence[Array], sizes: Mapping[str, int], coordinate: Sequence[int]) -> list[Array]:
        values: dict[Tensor, Array] = dict(zip(self.inputs, shards, strict=True))
        values[self.coordinate] = np.array(coordinate, np.int32)
        for op, task in self.operators:
            values.update(zip(op.outputs, evaluate(task, [values[x] for x in op.inputs], sizes), strict=True))
        return [values[y] for y in self.outputs]


def _local_program(rule: Rule, mesh: DeviceMesh, spec: OpShardSpec) -> _DeviceProgram:
    op = rule.op
    shards = [
        part_shape(shape_of(x), tensor_spec, mesh) for x, tensor_spec in zip(op.inputs, spec.in_specs, strict=True)
    ]
    out_shapes = [part_shape(shape_of(y), spec.partial_spec(o), mesh) for o, y in enumerate(op.outputs)]
    symbols = [hidet.symbol(list(shape), x.dtype, x.device) for x, shape in zip(op.inputs, shards, strict=True)]
    coordinate = hidet.symbol([mesh.ndim], "int32", "cpu")
    operators: list[tuple[Operator, Task]] = []
    operands = list(symbols)
    for number, dim in rule.masks(spec, mesh):
        axes, size = spec.in_specs[number].mesh_axes_per_dim[dim], shape_of(op.inputs[number])[dim]
        operands[number] = mask_padding(operands[number], dim, size, axes, mesh, lambda: coordinate)
        operators.append((operands[number].op, operands[number].op.task))
    outputs = localize(op, operands, spec.in_specs, out_shapes, mesh, lambda: coordinate)
    operators.append((outputs[0].op, definition_of(outputs[0].op)))
    return _DeviceProgram(tuple(symbols), coordinate, tuple(operators), tuple(outputs))


def _shard(whole: Array, spec: TensorShardSpec, mesh: DeviceMesh, coordinate: Sequence[int]) -> Array:
    """Cut a device's shard; its padding has values that would show in results."""
    values = whole[spec.slices(whole.shape, mesh, coordinate)]
    local = spec.local_shape(whole.shape, mesh, coordinate)
    if values.shape == local:
        return values
    kind = values.dtype.kind
    garbage: Any = True if kind == "b" else np.iinfo(values.dtype).max if kind in "iu" else np.nan
    shard = np.full(local, garbage, values.dtype)
    shard[tuple(map(slice, values.shape))] = values
    return shard


def _run_ranks(
    rule: Rule, mesh: DeviceMesh, spec: OpShardSpec, inputs: Sequence[Array], programs: dict[Any, _DeviceProgram]
) -> list[list[Array]]:
    """Compute the partial outputs of every rank; ``programs`` caches local programs by shapes."""
    op = rule.op
    partial = [spec.partial_spec(o) for o in range(len(op.outputs))]
    masks = [(i, dim, spec.in_specs[i].mesh_axes_per_dim[dim]) for i, dim in rule.masks(spec, mesh)]
    shapes = tuple(
        tuple(map(str, part_shape(shape_of(x), tensor_spec, mesh)))
        for x, tensor_spec in zip((*op.inputs, *op.outputs), (*spec.in_specs, *partial), strict=True)
    )
    kind = (shapes, row_axes(op, spec.in_specs), tuple(masks))
    names = sorted({name for one in (*spec.in_specs, *partial) for name in one.symbols(mesh)})
    if kind not in programs:
        programs[kind] = _local_program(rule, mesh, spec)
    done: dict[Any, list[Array]] = {}
    results = []
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        offsets = (
            tensor_spec.shard_offset(x.shape, mesh, coordinate)
            for x, tensor_spec in zip(inputs, spec.in_specs, strict=True)
        )
        sizes = part_sizes(names, mesh, coordinate)
        key = (*sizes.values(), *offsets)
        if key not in done:  # ranks with the same parts and shards compute the same
            shards = [
                _shard(x, tensor_spec, mesh, coordinate) for x, tensor_spec in zip(inputs, spec.in_specs, strict=True)
            ]
            done[key] = programs[kind].run(shards, sizes, coordinate)
        results.append(done[key])
    return results


def reduced(op: str, parts: Sequence[Array]) -> Array:
    """Reduce the parts of several ranks."""
    result: Array = _REDUCE[op](np.stack(parts))
    return result


def apply_reduce(mesh: DeviceMesh, fn: ReduceFn, partial: Sequence[Array]) -> list[Array]:
    """Apply a reduce function: compute every rank's result from all ranks' values."""
    results, known = [], dict[tuple[int, ...], Array]()  # the sum of a group of ranks, and so on
    for rank in range(mesh.size):
        peers = mesh.peers(rank, fn.mesh_axes)
        if peers not in known:
            known[peers] = reduced(fn.op, [partial[peer] for peer in peers])
        y = known[peers]
        if fn.dim is not None:
            begin, size = Split.of(mesh, fn.mesh_axes, fn.parts).interval(y.shape[fn.dim], mesh.coordinate(rank))
            y = y.take(range(begin, begin + size), axis=fn.dim)
        results.append(np.asarray(y).astype(partial[rank].dtype))
    return results


def _compare(
    op: Operator, mesh: DeviceMesh, spec: OpShardSpec, partials: list[list[Array]], expected_outputs: Sequence[Array]
) -> str:
    for number, y in enumerate(op.outputs):
        results = fold(
            lambda values, fn: apply_reduce(mesh, fn, values),
            spec.reduce_fns[number],
            [partial[number] for partial in partials],
        )
        rtol, atol = tolerance(y.dtype)
        for rank, shard in enumerate(results):
            spec_of_output, shape = spec.out_specs[number], shape_of(y)
            expected = expected_outputs[number][spec_of_output.slices(shape, mesh, mesh.coordinate(rank))]
            local = spec_of_output.local_shape(shape, mesh, mesh.coordinate(rank))
            if shard.shape != local:
                return f"output {number} of rank {rank} has the shape {shard.shape}, not {local}"
            got = shard[tuple(map(slice, expected.shape))]  # without padding, which may have any value
            if (got == expected).all():  # most are, and are known to be in a tenth of the time
                continue
            same = np.isclose(got, expected, rtol=rtol, atol=atol, equal_nan=True)
            if not same.all():
                return f"output {number} of rank {rank} differs at {math.prod(got.shape) - int(same.sum())} elements"
    return ""


__all__ = ["Checked", "Failure", "NotEvaluable", "check_operator", "check_specs", "random_inputs"]
