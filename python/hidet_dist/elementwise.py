"""hidet's element-wise operators: an output element depends on the (broadcast) inputs' elements at the same index."""

from __future__ import annotations

from hidet.graph.ops.arithmetic import (
    BinaryElementwiseOp,
    CompositeElementwiseOp,
    UnaryElementwiseOp,
    WhereOp,
    WhereScalarScalarOp,
    WhereScalarTensorOp,
    WhereTensorScalarOp,
)

ELEMENTWISE = (
    BinaryElementwiseOp,
    CompositeElementwiseOp,
    UnaryElementwiseOp,  # casts too
    WhereOp,
    WhereScalarScalarOp,
    WhereScalarTensorOp,
    WhereTensorScalarOp,
)
