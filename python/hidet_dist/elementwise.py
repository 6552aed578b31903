"""hidet's element-wise operators: an element of the output is made of those at its place in the (broadcast) inputs."""

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
