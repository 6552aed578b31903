"""The textual form of a sharded graph: one line per operator, with local shapes and collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.ir.expr import Expr
from hidet.ir.type import DataType

from hidet_dist.partitioning.collective_op import CollectiveOp
from hidet_dist.partitioning.operators import SplitOrder
from hidet_dist.spec.parts import Split, axes_text


def graph_lines(graph: FlowGraph, names: Mapping[Tensor, str], states: Sequence[str] = ()) -> list[str]:
    """Write the operators of a graph in execution order, the new values of states, and the line of its outputs.

    ``names`` are those of the graph's inputs. Results are called ``v0, v1, ...`` in order, so that equal graphs have
    equal text. Attributes that are false, zero or empty are left out. The last outputs are the new values of
    ``states``.
    """
    names = dict(names)
    lines = []
    for op in graph.nodes:
        inputs = [names.get(x) or f"{_type(x)} constant" for x in op.inputs]
        for y in op.outputs:
            names[y] = f"v{len(names) - len(graph.inputs)}"
        results = ", ".join(f"{names[y]}: {_type(y)}" for y in op.outputs)
        lines.append(f"{results} = {_name(op)}({', '.join([*inputs, *_attributes(op)])})")
    outputs = [names.get(y) or f"{_type(y)} constant" for y in graph.outputs]
    count = len(outputs) - len(states)
    lines += [f"{state} = {new}" for state, new in zip(states, outputs[count:], strict=True)]
    return [*lines, f"return {', '.join(outputs[:count])}"]


def _type(x: Tensor) -> str:
    return f"{x.dtype.name}[{', '.join(map(str, x.shape))}]"


def _name(op: Operator) -> str:
    return op.kind if isinstance(op, CollectiveOp) and not op.only_starts else str(op.name)


def _attributes(op: Operator) -> list[str]:
    if isinstance(op, CollectiveOp):
        return [*filter(None, [op.reduce_op]), f"axes={''.join(map(str, op.mesh_axes))}"]
    # An expression has no truth value.
    given = {name: value for name, value in op.attrs.items() if isinstance(value, Expr) or value}
    return [f"{name}={_value(value)}" for name, value in given.items() if _is_plain(value)]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Expr | DataType | SplitOrder | Split)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Split):
        return axes_text(value.mesh_axes, tuple(zip(value.mesh_axes, value.parts, strict=True)))
    if isinstance(value, SplitOrder):
        return "".join(map(str, value.mesh_axes))
    return str(value)
