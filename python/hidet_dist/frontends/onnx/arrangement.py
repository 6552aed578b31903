"""Lowerings of operators on shapes and indices: reshaping, slicing, lookups, padding, and constants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from hidet import ops
from hidet.graph import Tensor

from hidet_dist import operators
from hidet_dist.checks import shown
from hidet_dist.frontends.onnx.nodes import (
    MOST_ELEMENTS,
    Node,
    Value,
    bounded,
    check_single,
    dim_of,
    dims_of,
    lowers,
    rank_of,
    static,
)
from hidet_dist.frontends.refusals import Invalid, Refused
from hidet_dist.operators import elementwise, indexing, shaping
from hidet_dist.operators.dtypes import to_dtype
from hidet_dist.spec.extents import Extent, extents_of, same_shape


def _shape_value(extents: Sequence[Extent]) -> np.ndarray:
    """Convert a shape to an array, of the dtype object if it has symbolic dims."""
    if all(isinstance(size, int) for size in extents):
        return np.array(extents, np.int64)
    value = np.empty(len(extents), object)
    value[:] = extents
    return value


def _extents(values: np.ndarray) -> list[Any]:
    """Convert an array of sizes to a list."""
    return [int(n) if isinstance(n, int | np.integer) else n for n in values.reshape(-1)]


@lowers("Shape")
def _shape(node: Node) -> np.ndarray:
    value = node.value(0)
    extents = extents_of(value) if isinstance(value, Tensor) else value.shape
    return _shape_value(list(extents)[slice(node.get("start", 0), node.get("end", None))])


@lowers("Size")
def _size(node: Node) -> np.ndarray:
    x = node.tensor(0)
    return np.array(int(np.prod([static(x, dim, "a dim") for dim in range(rank_of(x))])), np.int64)


@lowers("Reshape")
def _reshape(node: Node) -> Tensor:
    x, requested = node.tensor(0), _extents(node.known(1, "the sizes of Reshape"))
    if not node.get("allowzero", 0):
        extents = extents_of(x)
        requested = [extents[dim] if isinstance(n, int) and n == 0 else n for dim, n in enumerate(requested)]
    return ops.reshape(x, requested)


@lowers("Flatten")
def _flatten(node: Node) -> Tensor:
    x, axis = node.tensor(0), node.get("axis", 1)
    extents = extents_of(x)
    axis = axis + len(extents) if axis < 0 else axis
    head: Any = 1
    for size in extents[:axis]:
        head = head * size
    return ops.reshape(x, [head, -1])


@lowers("Squeeze")
def _squeeze(node: Node) -> Tensor:
    x, axes = node.tensor(0), node.integers(1, "axes")
    extents = extents_of(x)
    if axes is None:
        axes = [d for d, n in enumerate(extents) if isinstance(n, int) and n == 1]
    return ops.squeeze(x, sorted(dims_of(axes, len(extents))))


@lowers("Unsqueeze")
def _unsqueeze(node: Node) -> Tensor:
    x, axes = node.tensor(0), node.integers(1, "axes") or []
    return ops.unsqueeze(x, sorted(d % (rank_of(x) + len(axes)) for d in axes))


@lowers("Transpose")
def _transpose(node: Node) -> Tensor:
    x = node.tensor(0)
    order = [int(d) for d in node.get("perm", range(rank_of(x) - 1, -1, -1))]
    if order == sorted(order):
        return x
    return ops.transpose(x, order) if len(order) == 2 else ops.permute_dims(x, order)


@lowers("Concat")
def _concat(node: Node) -> Tensor:
    tensors = [node.tensor(n) for n in range(len(node.inputs))]
    axis = node.axis(rank_of(tensors[0]), 0)
    tensors = [x for x in tensors if extents_of(x)[axis] != 0]
    return shaping.concat(tensors, axis)


@lowers("Split")
def _split(node: Node) -> tuple[Tensor, ...]:
    x, sizes = node.tensor(0), node.integers(1, "split")
    axis = node.axis(rank_of(x), 0)
    count = len(node.outputs)
    if node.get("num_outputs", count) != count:
        raise Invalid(f"a split into {node.get('num_outputs', count)} parts has {count} outputs")
    size = static(x, axis, "the dim that is split")
    if sizes is None:
        largest = -(-size // count)
        sizes = [min(largest, size - largest * part) for part in range(count)]
    if sum(sizes) != size or min(sizes) < 1:
        raise Refused(f"a dim of {size} is split into {shown(sizes)}")
    ends = np.cumsum(sizes)
    return tuple(
        ops.strided_slice(x, [int(end - size)], [int(end)], [axis]) for size, end in zip(sizes, ends, strict=True)
    )


@lowers("Slice")
def _slice(node: Node) -> Tensor:
    x = node.tensor(0)
    starts, ends = node.integers(1, "starts"), node.integers(2, "ends")
    assert starts is not None and ends is not None
    axes = node.integers(3, "axes") or list(range(len(starts)))
    steps = node.integers(4, "steps") or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        x = _sliced(x, start, end, dim_of(axis, rank_of(x)), step)
    return x


def _sliced(x: Tensor, start: int, end: int, dim: int, step: int) -> Tensor:
    """Slice a dim. Ends from 2**31 - 1 stand for the end of the dim. Raises Refused."""
    size = extents_of(x)[dim]
    if not isinstance(size, int):
        if step != 1 or start < 0 or end < 0:
            raise Refused(f"a slice [{start}:{end}:{step}] of a dim of {size} elements: give the size in dims")
        if start == 0 and end >= 2**31 - 1:
            return x
        return ops.strided_slice(x, [start], [size if end >= 2**31 - 1 else end], [dim])
    indices = range(*slice(start, end, step).indices(size))
    if not indices:
        raise Refused(f"a slice [{start}:{end}:{step}] of {size} elements is empty")
    if len(indices) == size and step == 1:
        return x
    if step > 0:
        return ops.strided_slice(x, [indices[0]], [indices[-1] + 1], [dim], [step])
    if len(indices) == size and step == -1:
        return shaping.flip(x, dim)
    bounded(len(indices), "the indices of a slice in reverse")
    return shaping.take_along(x, list(indices), dim)


@lowers("Expand")
def _expand(node: Node) -> Tensor:
    x, requested = node.tensor(0), _extents(node.known(1, "the sizes of Expand"))
    extents: list[Any] = list(extents_of(x))
    rank = max(len(extents), len(requested))
    extents, requested = [1] * (rank - len(extents)) + extents, [1] * (rank - len(requested)) + requested
    common = [a if isinstance(b, int) and b == 1 else b for a, b in zip(extents, requested, strict=True)]
    return ops.broadcast(x, common)


@lowers("Tile")
def _tile(node: Node) -> Tensor:
    return shaping.repeat(node.tensor(0), _extents(node.known(1, "the repeats of Tile")))


@lowers("Pad")
def _pad(node: Node) -> Tensor:
    x, pads = node.tensor(0), node.integers(1, "pads") or []
    rank = rank_of(x)
    axes = dims_of(node.integers(3, "axes") or list(range(rank)), rank)
    modes = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    mode = node.text("mode", "constant")
    if mode not in modes:
        raise Refused(f"the padding mode {mode!r} is not supported")
    value: Any = node.get("value", 0)
    if node.value(2) is not None:
        value = node.scalar(2, "the elements of the padding").item()
    before, after = [0] * rank, [0] * rank
    for n, dim in enumerate(axes):
        before[dim], after[dim] = pads[n], pads[n + len(axes)]
    flat = [n for dim in reversed(range(rank)) for n in (before[dim], after[dim])]
    return shaping.pad(x, flat, modes[mode], value)


# Lookups


def _check_indices(indices: np.ndarray | None, size: Extent) -> None:
    """Refuse known indices that a dim of ``size`` elements lacks. Raises Invalid."""
    if indices is not None and isinstance(size, int):
        outside = indices[(indices < -size) | (indices >= size)]
        if outside.size:
            raise Invalid(f"the index {outside.reshape(-1)[0]} is not one of a dim of {size} elements")


@lowers("Gather")
def _gather(node: Node) -> Tensor:
    x = node.tensor(0)
    axis = node.axis(rank_of(x), 0)
    indices = node.value(1)
    _check_indices(node.known_if(1), extents_of(x)[axis])
    if isinstance(indices, np.ndarray) and indices.size == 1 and isinstance(extents_of(x)[axis], int):
        # A single known index is a slice, which can be sharded in more ways than a lookup.
        index = int(indices.reshape(-1)[0]) % static(x, axis, "a dim")
        part = ops.strided_slice(x, [index], [index + 1], [axis])
        extents = list(extents_of(part))
        return ops.reshape(part, [*extents[:axis], *indices.shape, *extents[axis + 1 :]])
    return ops.take(x, node.tensor(1), axis)


@lowers("GatherElements")
def _gather_elements(node: Node) -> Tensor:
    x = node.tensor(0)
    axis = node.axis(rank_of(x), 0)
    _check_indices(node.known_if(1), extents_of(x)[axis])
    return indexing.gather(x, axis, node.tensor(1))


def _coordinates(node: Node, x: Tensor, batch: int = 0) -> list[Tensor]:
    """Split the last dim of the indices of a node into index tensors for the dims of ``x`` from ``batch`` on.

    Raises Invalid for known indices that a dim lacks.
    """
    index, known = node.tensor(1), node.known_if(1)
    count, last = static(index, -1, "the number of coordinates"), rank_of(index) - 1
    for n in range(count):
        _check_indices(None if known is None else known[..., n], extents_of(x)[batch + n])
    return [ops.squeeze(ops.strided_slice(index, [n], [n + 1], [last]), [last]) for n in range(count)]


@lowers("GatherND")
def _gather_nd(node: Node) -> Tensor:
    x, batch = node.tensor(0), int(node.get("batch_dims", 0))
    coordinates, rank = _coordinates(node, x, batch), rank_of(node.tensor(1)) - 1
    for dim in reversed(range(batch)):
        size = static(x, dim, "a batch dim of GatherND")
        places = np.arange(size, dtype=np.int64).reshape([-1 if d == dim else 1 for d in range(rank)])
        coordinates.insert(0, node.as_tensor(places))
    return indexing.index(x, coordinates)


_COMBINED = {"none": "replace", "add": "sum", "mul": "prod", "max": "max", "min": "min"}


@lowers("ScatterND")
def _scatter_nd(node: Node) -> Tensor:
    reduction = node.text("reduction", "none")
    if reduction not in _COMBINED:
        raise Refused(f"ScatterND with the reduction {reduction!r} is not supported")
    x = node.tensor(0)
    return indexing.index_reduce(x, _coordinates(node, x), node.tensor(2), _COMBINED[reduction])


@lowers("TensorScatter")
def _tensor_scatter(node: Node) -> Tensor:
    cache, update = node.tensor(0), node.tensor(1)
    axis, rank = node.get("axis", -2) % rank_of(cache), rank_of(cache)
    size, steps = static(cache, axis, "the length of a cache"), static(update, axis, "the length of an update")
    batch = static(cache, 0, "the batch")
    if axis == 0:
        raise Refused("a TensorScatter along the batch is not supported")
    places = node.as_tensor(np.arange(steps, dtype=np.int64).reshape(1, -1))
    if node.value(2) is not None:
        places = elementwise.add(places, ops.reshape(to_dtype(node.tensor(2), "int64"), [batch, 1]))
    else:
        places = ops.broadcast(places, [batch, steps])
    if node.text("mode", "linear") == "circular":
        places = elementwise.remainder(places, size)
    aligned = ops.reshape(places, [batch if d == 0 else steps if d == axis else 1 for d in range(rank)])
    return indexing.scatter(cache, axis, ops.broadcast(aligned, list(extents_of(update))), update)


@lowers("Scatter", "ScatterElements")
def _scatter_elements(node: Node) -> Tensor:
    x, index, updates = (node.tensor(n) for n in range(3))
    axis = node.axis(rank_of(x), 0)
    size = static(x, axis, "the dim that is scattered along")
    _check_indices(node.known_if(1), size)
    index = elementwise.where(elementwise.lt(index, 0), elementwise.add(index, size), index)
    reductions = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    reduction = node.text("reduction", "none")
    if reduction == "none":
        return indexing.scatter(x, axis, index, updates)
    if reduction not in reductions:
        raise Refused(f"ScatterElements with the reduction {reduction!r} is not supported")
    return indexing.scatter_reduce(x, axis, index, updates, reductions[reduction])


@lowers("OneHot")
def _one_hot(node: Node) -> Tensor:
    x, depth = node.tensor(0), bounded(int(node.scalar(1, "the depth of OneHot")), "the classes of OneHot")
    off, on = (v.item() for v in node.known(2, "the values of OneHot"))
    dtype = node.known(2, "the values of OneHot").dtype.name
    axis = node.get("axis", -1)
    axis = axis + rank_of(x) + 1 if axis < 0 else axis
    x = elementwise.where(elementwise.lt(x, 0), elementwise.add(x, depth), x)
    classes = np.arange(depth).reshape([depth, *[1] * (rank_of(x) - axis)])
    hot = elementwise.eq(ops.unsqueeze(x, axis), node.as_tensor(classes.astype(x.dtype.name)))
    return to_dtype(elementwise.where(hot, on, off), dtype)


@lowers("Trilu")
def _trilu(node: Node) -> Tensor:
    offset = 0 if node.value(1) is None else int(node.scalar(1, "the diagonal of Trilu"))
    return (operators.triu if node.get("upper", 1) else operators.tril)(node.tensor(0), offset)


def _check_blocks(x: Tensor, dim: int, size: int, what: str) -> None:
    """Raise Invalid if a dim of a fixed size is no whole number of blocks."""
    extent = extents_of(x)[dim]
    if isinstance(extent, int) and extent % size:
        raise Invalid(f"{what} of the input is {extent}, which {size} does not divide")


@lowers("DepthToSpace")
def _depth_to_space(node: Node) -> Tensor:
    x, r = node.tensor(0), int(node.get("blocksize", 1))
    _check_blocks(x, 1, r * r, "the depth")
    if node.text("mode", "DCR") == "CRD":
        return operators.pixel_shuffle(x, r)
    batch, channels, height, width = extents_of(x)
    split = ops.reshape(x, [batch, r, r, channels // (r * r), height, width])
    return ops.reshape(ops.permute_dims(split, [0, 3, 4, 1, 5, 2]), [batch, channels // (r * r), height * r, width * r])


@lowers("SpaceToDepth")
def _space_to_depth(node: Node) -> Tensor:
    x, r = node.tensor(0), int(node.get("blocksize", 1))
    _check_blocks(x, 2, r, "the height")
    _check_blocks(x, 3, r, "the width")
    if node.text("mode", "DCR") != "DCR":
        return operators.pixel_unshuffle(x, r)
    batch, channels, height, width = extents_of(x)
    split = ops.reshape(x, [batch, channels, height // r, r, width // r, r])
    return ops.reshape(ops.permute_dims(split, [0, 3, 5, 1, 2, 4]), [batch, channels * r * r, height // r, width // r])


# Constants and branches


@lowers("Constant")
def _constant(node: Node) -> np.ndarray:
    for name, dtype in (("value_float", np.float32), ("value_floats", np.float32), ("value_int", np.int64)):
        if name in node.attributes:
            return np.array(node.attributes[name], dtype)
    if "value_ints" in node.attributes:
        return np.array(node.attributes["value_ints"], np.int64)
    if "value" not in node.attributes:
        raise Refused("a constant of text, or with sparse values, is not supported")
    value: np.ndarray = node.attributes["value"]
    return value


@lowers("ConstantOfShape")
def _constant_of_shape(node: Node) -> Value:
    sizes = _extents(node.known(0, "the sizes of ConstantOfShape"))
    value = np.asarray(node.get("value", np.zeros(1, np.float32)))
    if all(isinstance(n, int) for n in sizes) and math.prod(sizes) <= MOST_ELEMENTS:
        return np.full(sizes, value.item(), value.dtype)
    return ops.full(sizes, value.item(), value.dtype.name, node.like.device)


@lowers("Range")
def _range(node: Node) -> np.ndarray:
    start, limit, delta = (node.scalar(n, "a bound of Range") for n in range(3))
    if delta == 0 or not abs((float(limit) - float(start)) / float(delta)) <= MOST_ELEMENTS:
        raise Refused(f"a range from {start} to {limit} by {delta} is not supported")
    values: np.ndarray = np.arange(start.item(), limit.item(), delta.item()).astype(start.dtype)
    return values


@lowers("If")
def _if(node: Node) -> tuple[Value, ...]:
    condition, what = node.value(0), "the condition of an If"
    if isinstance(condition, np.ndarray):
        chosen = bool(node.scalar(0, what, any_rank=True))
        branch = node.attributes["then_branch" if chosen else "else_branch"]
        return tuple(node.lower_subgraph(branch, []))
    check_single(condition, what, any_rank=True)
    # Both branches are computed, and one result is chosen.
    results = [node.lower_subgraph(node.attributes[name], []) for name in ("then_branch", "else_branch")]
    return tuple(_chosen(node, condition, then, other) for then, other in zip(*results, strict=True))


def _chosen(node: Node, condition: Tensor, then: Value, other: Value) -> Value:
    """One of two values by a condition that depends on data. Raises Refused unless they have one shape and dtype."""
    if unsupported := [value for value in (then, other) if not isinstance(value, Tensor | np.ndarray)]:
        return unsupported[0]  # which is reported elsewhere
    a, b = node.as_tensor(then), node.as_tensor(other)
    if a.dtype != b.dtype or not same_shape(extents_of(a), extents_of(b)):
        raise Refused(
            f"the branches of an If on data give {a.dtype.name}{list(extents_of(a))} and "
            f"{b.dtype.name}{list(extents_of(b))}, which must be equal"
        )
    return elementwise.where(ops.reshape(condition, [1] * rank_of(a)), a, b)


MOST_ITERATIONS = 1024
"""The most iterations of a loop, each of which is lowered by itself."""


def _check_iterations(count: int) -> None:
    if count > MOST_ITERATIONS:
        raise Refused(f"a loop of {count} iterations is not supported: at most {MOST_ITERATIONS} are")


def _stacked(node: Node, slices: Sequence[Value], axis: int) -> Value:
    """Stack what the iterations of a loop give. Raises Refused where there is none."""
    if not slices:
        raise Refused("a loop without iterations gives an output of no elements")
    if unsupported := [value for value in slices if not isinstance(value, Tensor | np.ndarray)]:
        return unsupported[0]  # which is reported elsewhere
    return shaping.stack([node.as_tensor(value) for value in slices], axis)


@lowers("Loop")
def _loop(node: Node) -> tuple[Value, ...]:
    body = node.attributes["body"]
    count, going = node.value(0), node.value(1)
    if count is None:
        raise Refused("a loop without a number of iterations is not supported")
    iterations = int(node.scalar(0, "the iterations of a loop"))
    carried = list(node.inputs[2:])
    scanned: list[list[Value]] = [[] for _ in range(len(node.outputs) - len(carried))]
    going = np.array(True if going is None else node.scalar(1, "the condition of a loop"))
    own = node.body_of(body)
    number = 0
    while number < iterations and bool(going.reshape(-1)[0]):
        number += 1
        _check_iterations(iterations if own.endless else number)
        node.expect(own.nodes * (iterations + 1 - number if own.endless else 1))
        going, *values = node.lower_subgraph(body, [np.array(number - 1, np.int64), going, *carried])
        if isinstance(going, Tensor):
            raise Refused("a loop that ends by a condition on data is not supported")
        if not isinstance(going, np.ndarray):
            return (going,) * len(node.outputs)  # unsupported, which is reported elsewhere
        carried, rest = values[: len(carried)], values[len(carried) :]
        for slices, value in zip(scanned, rest, strict=False):
            slices.append(value)
    return (
        *carried,
        *(
            _stacked(node, s, 0) if name else None
            for s, name in zip(scanned, node.outputs[len(carried) :], strict=True)
        ),
    )


@lowers("Scan")
def _scan(node: Node) -> tuple[Value, ...]:
    if node.opset < 9:
        raise Refused("Scan of opset 8 is not supported")
    body, count = node.attributes["body"], int(node.attributes["num_scan_inputs"])
    states, sequences = list(node.inputs[: len(node.inputs) - count]), [node.as_tensor(x) for x in node.inputs[-count:]]
    ways = node.get("scan_input_directions", [0] * count)
    axes = [
        dim_of(axis, rank_of(x)) for axis, x in zip(node.get("scan_input_axes", [0] * count), sequences, strict=True)
    ]
    steps = static(sequences[0], axes[0], "the length of a sequence of Scan")
    _check_iterations(steps)
    node.expect(node.body_of(body).nodes * steps)
    outputs = len(node.outputs) - len(states)
    scanned: list[list[Value]] = [[] for _ in range(outputs)]
    for step in range(steps):
        places = [steps - 1 - step if back else step for back in ways]
        slices = [shaping.select(x, axis, at) for x, axis, at in zip(sequences, axes, places, strict=True)]
        values = node.lower_subgraph(body, [*states, *slices])
        states, rest = values[: len(states)], values[len(states) :]
        for place, value in enumerate(rest):
            scanned[place].append(value)
    back, along = (node.get(name, [0] * outputs) for name in ("scan_output_directions", "scan_output_axes"))
    results = []
    for own, reverse, axis in zip(scanned, back, along, strict=True):
        rank = len(own[0].shape) + 1 if isinstance(own[0], Tensor | np.ndarray) else 1
        results.append(_stacked(node, own[::-1] if reverse else own, dim_of(axis, rank)))
    return (*states, *results)
