"""The rewrite of views, which hidet 0.6.1 defines as zeros, to operators whose definitions are true.

``hidet.ops.view`` gives the bytes of a tensor another shape or dtype. Its kernel shares memory and computes nothing, so
hidet left its definition empty; anything derived from the definition, such as a fused kernel, would be zeros.
"""

from __future__ import annotations

from collections.abc import Mapping

from hidet.graph import FlowGraph, Operator, Tensor, ops
from hidet.graph.ops.transform import ViewOp
from hidet.ir.type import DataType

from hidet_dist.errors import ConfigError
from hidet_dist.rewriting import rewrite

_INTEGERS = ({"int8"}, {"int16"}, {"int32"}, {"int64"})


def define_views(graph: FlowGraph) -> FlowGraph:
    """Replace each view by a reshape, after a cast where the dtype changes; return ``graph`` itself if there is none.

    Raises
    ------
    ConfigError
        When a view reads data as a dtype in which it has other values than any cast gives.
    """

    def defined(op: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
        if not isinstance(op, ViewOp):
            return None
        (x,), (y,) = op.inputs, op.outputs
        if not _same_bits(x.dtype, y.dtype):
            raise ConfigError(
                f"An operator view of the graph reads {x.dtype.name} data of the shape {list(x.shape)} as "
                f"{y.dtype.name}, which hidet does not define: give the graph the {y.dtype.name} tensor as an input, "
                "or use a cast."
            )
        x = replaced.get(x, x)
        return ops.reshape(x if x.dtype == y.dtype else ops.cast(x, y.dtype), list(y.shape))

    return rewrite(graph, defined)


def _same_bits(x: DataType, y: DataType) -> bool:
    """Whether a cast from one dtype to the other keeps all bits: integers of one size do, in two's complement."""
    return bool(x == y) or {x.name.removeprefix("u"), y.name.removeprefix("u")} in _INTEGERS
