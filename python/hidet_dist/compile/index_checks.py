"""Checks of inputs that hold indices: a call with an index out of range is refused before the program runs.

Indices are traced from a lookup back to inputs through operators that keep or move values: casts of integers, sums with
constants, reshapes, slices, transposes, broadcasts, concatenations and collectives that do not reduce. A value that is
in range only after a narrowing cast is refused, too. Indices that are computed otherwise are guarded in the kernel
(:mod:`hidet_dist.compile.guards`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hidet.graph import Operator, Tensor
from hidet.graph.ops.arithmetic import AddScalarOp, SubScalarOp
from hidet.graph.ops.transform import CastOp, ConcatOp, StridedSliceOp
from hidet.ir.expr import Constant, SymbolVar

from hidet_dist.artifacts.manifest import IndexCheck, Product
from hidet_dist.compile.cpu.views import View, view_of
from hidet_dist.partitioning.operators import CommunicationOp, CopyOp
from hidet_dist.partitioning.program import Program
from hidet_dist.rules.lookup import ShardedLookupOp, row_dim
from hidet_dist.spec.extents import Extent, extents_of, factors_of, same_extent, same_shape
from hidet_dist.traits import Indices, traits_of


def index_checks(program: Program) -> tuple[tuple[IndexCheck, ...], frozenset[Operator]]:
    """Derive the checks of a program's inputs, and the lookups whose indices they check completely."""
    checks: dict[IndexCheck, None] = {}
    checked: set[Operator] = set()
    numbers = {x: number for number, x in enumerate(program.graph.inputs[: len(program.inputs)])}
    for node in program.graph.nodes:
        rows = _rows(node)
        if rows is None:
            continue
        input_checks, complete = _checks(node.inputs[1], _indices(node), 0, rows, numbers)
        checks.update(dict.fromkeys(input_checks))
        if complete:
            checked.add(node)
    return tuple(checks), frozenset(checked)


def _rows(node: Operator) -> Product | None:
    """Count the rows of a lookup's table; None if the operator is not a lookup, or the count is not a product."""
    if isinstance(node, ShardedLookupOp):
        return (int(node.attrs["rows"]),)
    dim = row_dim(node)
    return None if dim is None else _product(extents_of(node.inputs[0])[dim])


def _indices(node: Operator) -> View:
    """View the indices of a lookup as their source tensor."""
    view = view_of(node.inputs[1], _keeps)
    lookup = traits_of(node).lookup
    kind = Indices(node.attrs["kind"]) if lookup is None else lookup.indices
    if kind is Indices.GATHER:
        return View(view.source, extents_of(node.outputs[0]), view.strides, view.offset)
    return view


def _keeps(op: Operator) -> bool:
    """Whether an operator keeps the values of its integer input in place, or adds a constant to them."""
    if isinstance(op, CopyOp):
        return True
    kinds = op.inputs[0].dtype, op.outputs[0].dtype
    if not all(kind.is_integer() for kind in kinds):
        return False
    if isinstance(op, CastOp):
        return True
    return isinstance(op, AddScalarOp | SubScalarOp) and _constant(op) is not None


def _constant(op: Operator) -> int | None:
    scalar = op.attrs["scalar"]
    value = scalar.value if isinstance(scalar, Constant) else scalar
    return int(value) if isinstance(value, int) else None


def _checks(
    x: Tensor, view: View, shift: int, rows: Product, numbers: Mapping[Tensor, int]
) -> tuple[list[IndexCheck], bool]:
    """Derive checks of the inputs that elements of ``view``, a view of ``x``, come from; and whether all elements do.

    ``shift`` is added to the elements of ``x`` before the lookup.
    """
    source = view.source
    between = list(_upstream(x, source))
    shift += sum(map(_added, between))
    if source in numbers:
        check = _check(view, shift, rows, numbers[source])
        return ([], False) if check is None else ([check], True)
    op = source.op
    whole = same_shape(view.shape, extents_of(x)) and not any(isinstance(each, StridedSliceOp) for each in between)
    if op is None or not _moves(op) or not whole:
        return [], False
    checks: list[IndexCheck] = []
    for y in op.inputs if isinstance(op, ConcatOp) else op.inputs[:1]:
        more, complete = _checks(y, view_of(y, _keeps), shift, rows, numbers)
        checks += more
        whole = whole and complete
    return checks, whole


def _upstream(x: Tensor, source: Tensor) -> Iterator[Operator]:
    """Yield the operators between a tensor and the source of its view."""
    while x is not source:
        assert x.op is not None
        yield x.op
        x = x.op.inputs[0]


def _added(op: Operator) -> int:
    """The constant that an operator adds to the elements of its input."""
    if not isinstance(op, AddScalarOp | SubScalarOp):
        return 0
    constant = _constant(op) or 0
    return constant if isinstance(op, AddScalarOp) else -constant


def _moves(op: Operator) -> bool:
    """Whether an operator's output has only zeros and elements of its inputs, each of these on some rank."""
    return traits_of(op).keeps_all or (isinstance(op, CommunicationOp) and not op.reduce_op)


def _check(view: View, shift: int, rows: Product, number: int) -> IndexCheck | None:
    """Make the check of an input's elements; None if their strides are not products of sizes."""
    dims = _merged([(size, step) for size, step in zip(view.shape, view.strides, strict=True) if not _is_one(size)])
    shape = tuple(_product(size) for size, _ in dims)
    strides = tuple(_product(step) for _, step in dims)
    offset = _product(view.offset)
    if offset is None or None in shape or None in strides:
        return None
    return IndexCheck(number, rows, shift, shape, strides, offset)  # type: ignore[arg-type]


def _is_one(size: Extent) -> bool:
    return isinstance(size, int) and size == 1


def _merged(dims: Sequence[tuple[Extent, Extent]]) -> list[tuple[Extent, Extent]]:
    """Merge contiguous dims, given as sizes and strides."""
    merged: list[tuple[Extent, Extent]] = []
    for size, step in dims:
        if merged and same_extent(merged[-1][1], size * step):
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    return merged


def _product(extent: Extent) -> Product | None:
    """Convert an extent to a product of numbers and symbols' names; None if it is not a product."""
    number, names = 1, []
    for factor in factors_of(extent):
        if isinstance(factor, int):
            number *= factor
        elif isinstance(factor, SymbolVar):
            names.append(factor.name)
        else:
            return None
    return (number, *sorted(names))
