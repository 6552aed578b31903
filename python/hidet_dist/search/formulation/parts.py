"""Unequal parts that a search chooses from, besides those of pins.

They are near-even parts of attention heads that an axis does not divide, and of the groups of weights of few bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hidet.graph.ops.transform import ReshapeOp

from hidet_dist.errors import ConfigError
from hidet_dist.rules.rule import NO_PARTS, OfferedParts, RuleTable
from hidet_dist.search import tuning
from hidet_dist.search.formulation.pins import Pins
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.parts import Parts
from hidet_dist.spec.parts import near_even as near_even_parts
from hidet_dist.view import GraphView
from hidet_dist.weights.storage import storage_of


def heads_of(views: Iterable[GraphView], rules: RuleTable | None = None) -> dict[int, frozenset[int]]:
    """Map numbers of heads to the extents of which they are the major digit, by one reshape or several.

    Numbers of heads are the extents of the major digits into which a reshape of the graphs splits a dim. A dim of 4096
    that is reshaped to 32 heads of 128, and 32 to 8 groups of 4, has both 32 and 8 as major digits. Rules are shared
    with the table ``rules``.
    """
    table = RuleTable(DeviceMesh((1,)), rules)
    reshapes = [table.rule(op) for view in views for op in view.operators if isinstance(op, ReshapeOp)]
    dims = {dim for rule in reshapes for layout in (*rule.in_layouts, *rule.out_layouts) for dim in layout if dim}
    split = {(math.prod(digit.extent for digit in digits), digits[0].extent) for digits in dims if len(digits) > 1}
    result: dict[int, frozenset[int]] = {}
    for heads in sorted({major for _, major in split}):
        extents = {heads}
        while more := {whole for whole, major in split if major in extents} - extents:
            extents |= more
        result[heads] = frozenset(extents)
    return result


@dataclass(frozen=True)
class GroupedRows:
    """The rows of stored matrices of one depth.

    Attributes
    ----------
    unit: the rows that are whole groups of all of the matrices.
    exact: whether some of them are held as their file has them, so that their groups cannot be split.
    """

    unit: int
    exact: bool


def grouped_rows(views: Iterable[GraphView]) -> dict[int, GroupedRows]:
    """Map the depths of weights of few bits that are multiples of their groups to these groups."""
    result: dict[int, GroupedRows] = {}
    for view in views:
        for name in view.weights:
            storage = storage_of(view.tensors[name])
            if storage is None or not storage.group:
                continue
            depth = view.shape(name)[storage.depth_dim]
            known = result.get(depth, GroupedRows(1, False))
            result[depth] = GroupedRows(math.lcm(known.unit, storage.group), known.exact or storage.exact)
    return {depth: rows for depth, rows in result.items() if depth % rows.unit == 0}


def offered_parts(
    graphs: Sequence[Pins],
    rules: RuleTable | None,
    allowed: bool,
    near_even: bool,
    more: Parts = (),
) -> OfferedParts:
    """Select the unequal parts from which plans may choose, besides the mesh's shares.

    If ``near_even`` ones are wanted, an axis whose devices do not divide a number of heads may split the heads so that
    the parts differ by one head at most. So may it split the rows of weights of few bits, in groups, for the results of
    one device. Other dims are padded there instead, by at most one element a device. Parts of pins are offered for all
    dims but symbolic ones, which are split equally only. If parts are not ``allowed``, there are none.

    Parameters
    ----------
    graphs: the pins of each graph, with its view and the mesh. Graphs that share weights and states are offered the
        parts of all of them, since what they share is split alike in all graphs.
    rules: a table, for any mesh, with which rules are shared.
    more: parts of axes besides those of the pins, as of pins of other graphs.

    Raises
    ------
    ConfigError
        For pins with parts where there are none.
    """
    given = {pair for pins in graphs for pin in pins.all for pattern in pin.patterns for pair in pattern.parts}
    given.update(more)
    if not allowed:
        if given:
            raise ConfigError(
                "Pins have parts of the mesh's axes, such as S0[2,1], which are not offered for this target."
            )
        return NO_PARTS
    found: dict[tuple[int, tuple[int, ...]], frozenset[int] | None] = {}
    mesh = graphs[0].mesh
    if near_even and not mesh.shares and mesh.size > 1:
        views = [pins.view for pins in graphs]
        heads, rows = heads_of(views, rules), grouped_rows(views)
        of_heads = {extent for extents in heads.values() for extent in extents}
        others = {depth: own for depth, own in rows.items() if depth not in of_heads}
        for axis, size in enumerate(mesh.shape):
            found.update(_heads_along(axis, size, mesh.size // size, heads))
            for pair, depths in _groups_along(axis, size, mesh.size // size, others).items():
                found[pair] = depths | (found.get(pair) or frozenset())
    found.update(dict.fromkeys(sorted(given)))
    return OfferedParts(tuple(found), tuple(found.values()))


def _heads_along(
    axis: int, size: int, others: int, heads: Mapping[int, frozenset[int]]
) -> dict[tuple[int, tuple[int, ...]], frozenset[int] | None]:
    """List near-even parts of heads along an axis: of all heads, and of those left when all other axes split them."""
    found: dict[tuple[int, tuple[int, ...]], frozenset[int] | None] = {}
    for (number, extents), divisor in itertools.product(heads.items(), dict.fromkeys((1, others))):
        units, rest = divmod(number, divisor)
        if not rest and units > size and units % size and len(found) < tuning.MOST_NEAR_EVEN:
            found[axis, near_even_parts(units, size)] = extents
    return found


def _groups_along(
    axis: int, size: int, others: int, depths: Mapping[int, GroupedRows]
) -> dict[tuple[int, tuple[int, ...]], frozenset[int]]:
    """List near-even parts of groups of rows along an axis: of all, and of those left when all other axes split them.

    Rows that an axis divides are split evenly, if groups may be split.
    """
    found: dict[tuple[int, tuple[int, ...]], frozenset[int]] = {}
    for (depth, rows), divisor in itertools.product(depths.items(), dict.fromkeys((1, others))):
        units, rest = divmod(depth // rows.unit, divisor)
        if rest or units <= size or units % size == 0 or not (rows.exact or depth % (size * divisor)):
            continue
        pair = axis, near_even_parts(units, size)
        if pair in found or len(found) < tuning.MOST_NEAR_EVEN:
            found[pair] = found.get(pair, frozenset()) | {depth}
    return found
