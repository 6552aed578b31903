"""Lookups in a table whose rows are sharded: each device looks up its rows, and a sum combines the results.

Each row is on one device of the group; all others produce zeros for it. So the rows are a factor whose partial results
are summed. The local operator differs from the whole one: it derives its range of rows from the device's coordinate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, compute, input_like
from hidet.ir import primitives
from hidet.ir.dtypes import float32, float64
from hidet.ir.expr import Expr, cast, if_then_else, logical_and
from hidet.ir.type import DataType

from hidet_dist.rules.access import Digit
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.spec.collectives import REDUCED_DTYPES
from hidet_dist.spec.extents import part_interval
from hidet_dist.spec.parts import Parts, Split
from hidet_dist.traits import has_traits, traits_of

_ROWS = 1 << 20  # the number of the row factor, above the numbers of a definition's variables


def row_dim(op: Operator) -> int | None:
    """Return the dim of the table (input 0) that indices select from; None unless partial results can be summed."""
    lookup = traits_of(op).lookup
    if lookup is None or (dtype := op.inputs[0].dtype).is_boolean() or dtype.name not in REDUCED_DTYPES:
        return None
    return lookup.dim_of(op)


def row_factor(op: Operator) -> Digit | None:
    """Return the factor of the table's rows."""
    dim = row_dim(op)
    return None if dim is None else Digit(_ROWS, 1, int(op.inputs[0].shape[dim]))


def row_axes(op: Operator, in_specs: Sequence[TensorShardSpec]) -> tuple[int, ...]:
    """Return the mesh axes that split the rows of a lookup's table; none for any other operator."""
    dim = row_dim(op)
    return () if dim is None else in_specs[0].mesh_axes_per_dim[dim]


def missing_element(dtype: DataType) -> Expr:
    """Return the element for an index out of range: NaN, the least signed or greatest unsigned integer, or true.

    These are the fill values of JAX's ``take`` (jax.numpy.take, mode="fill").
    """
    if dtype.is_float():
        wide = dtype if dtype == float64 else float32
        return cast(primitives.sqrt(wide.constant(-1.0)), dtype)  # hidet cannot write the constant
    if dtype.is_boolean():
        return dtype.constant(True)
    return dtype.constant(dtype.iinfo().min if dtype.signedness() else dtype.iinfo().max)


class ShardedLookupTask(Task):
    """A lookup in the device's rows; zero for all other rows.

    For an index out of range, the device with the first rows produces :func:`missing_element`, and so does the sum.
    """

    def __init__(  # type: ignore[no-untyped-def]
        self,
        data,
        indices,
        coordinate,
        kind: str,
        dim: int,
        mesh_axes: Sequence[int],
        sizes: Sequence[int],
        rows: int,
        parts: Sequence[Sequence[int]] = (),
    ):
        local_rows = data.shape[dim]
        # The dims of the output that replace the selected dim of the table.
        span = len(indices.shape) if kind == "take" else 1

        def element(*out: Any) -> Any:
            place = {"take": out[dim : dim + span], "gather": out, "select": out[dim : dim + 1]}[kind]
            row = indices[list(place)]
            row = if_then_else(row < 0, row + rows, row)
            shard = coordinate[mesh_axes[0]]
            for axis, size in zip(mesh_axes[1:], sizes[1:], strict=True):
                shard = shard * size + coordinate[axis]
            begin = shard * local_rows
            if parts:
                begin, _ = part_interval(rows, parts, [coordinate[axis] for axis in mesh_axes])
            local = row - begin
            element_of_row = data[[*out[:dim], local, *out[dim + span :]]]
            dtype = data.type.dtype
            missing = if_then_else(shard == 0, missing_element(dtype), dtype.zero)
            other = if_then_else(logical_and(row >= 0, row < rows), dtype.zero, missing)
            return if_then_else(logical_and(local >= 0, local < local_rows, row < rows), element_of_row, other)

        looked_up = indices.shape if kind == "take" else [indices.shape[0 if kind == "select" else dim]]
        shape = [*data.shape[:dim], *looked_up, *data.shape[dim + 1 :]]
        attributes = _attributes(kind, dim, mesh_axes, sizes, rows, parts)
        super().__init__(
            "sharded_lookup", [data, indices, coordinate], [compute("y", shape, element)], attributes=attributes
        )


def _attributes(
    kind: str, dim: int, mesh_axes: Sequence[int], sizes: Sequence[int], rows: int, parts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return the attributes of the task and of its operator; parts are among them only if they are unequal."""
    even = {"kind": kind, "dim": dim, "mesh_axes": list(mesh_axes), "sizes": list(sizes), "rows": rows}
    return even | ({"parts": list(map(list, parts))} if parts else {})


@has_traits(kernel="lookup")
class ShardedLookupOp(Operator):
    """A lookup in the device's rows of a table of ``rows``, split by ``mesh_axes`` (major to minor) of these ``sizes``.

    The shards may be padded; ``rows`` excludes padding. ``parts`` are those of the axes, major to minor, if they are
    unequal. Negative indices count from the end of the table.
    """

    def __init__(
        self,
        data: Tensor,
        indices: Tensor,
        coordinate: Tensor,
        kind: str,
        dim: int,
        mesh_axes: Sequence[int],
        sizes: Sequence[int],
        rows: int,
        parts: Sequence[Sequence[int]] = (),
    ):
        task = ShardedLookupTask(
            input_like(data, "data"),
            input_like(indices, "indices"),
            input_like(coordinate, "coordinate"),
            kind,
            dim,
            mesh_axes,
            sizes,
            rows,
            parts,
        )
        attributes = _attributes(kind, dim, mesh_axes, sizes, rows, parts)
        super().__init__(inputs=[data, indices, coordinate], attributes=attributes, task=task)


def sharded_lookup(
    op: Operator, inputs: Sequence[Tensor], coordinate: Tensor, axes: Sequence[int], mesh: DeviceMesh, parts: Parts
) -> list[Tensor]:
    """Build the lookup ``op`` on local inputs, where ``axes`` split the rows of the table, in ``parts`` if any.

    Raises
    ------
    ValueError
        When the number of rows is symbolic: the device's rows begin at a number that is part of the operator.
    """
    dim, lookup = row_dim(op), traits_of(op).lookup
    assert dim is not None and lookup is not None
    if not isinstance(op.inputs[0].shape[dim], int):
        raise ValueError(f"{op.name} looks up rows of a symbolic number, {op.inputs[0].shape[dim]}")
    sizes = [mesh.shape[axis] for axis in axes]
    rows = int(op.inputs[0].shape[dim])
    split = Split.of(mesh, axes, parts)
    own = () if split.is_even else split.parts
    kind = lookup.indices.value
    return list(ShardedLookupOp(inputs[0], inputs[1], coordinate, kind, dim, axes, sizes, rows, own).outputs)
