"""What the parts of a plan cost: the search adds these figures up, whoever says them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hidet.graph import Operator

from hidet_dist.connect import Connection, Element, connect, connect_all, reduce_seconds
from hidet_dist.machine import Cluster
from hidet_dist.rules.rule import Choice
from hidet_dist.spec import ReduceFn, TensorShardSpec


class CostModel(Protocol):
    """The cost of each part of a plan, in seconds. Shapes are those of whole tensors, in elements."""

    def operator(self, op: Operator, choice: Choice) -> float:
        """The local operator, without its reduce functions."""
        ...

    def reduce(self, shape: Sequence[int], dtype: Element, partial: TensorShardSpec, fns: Sequence[ReduceFn]) -> float:
        """The reduce functions of a partial output that lies as ``partial`` says."""
        ...

    def connect(
        self, shape: Sequence[int], dtype: Element, source: TensorShardSpec, target: TensorShardSpec
    ) -> Connection:
        """The conversion of a tensor from one spec to another."""
        ...

    def conversions(
        self, shape: Sequence[int], dtype: Element, specs: Sequence[TensorShardSpec]
    ) -> tuple[tuple[float, ...], ...]:
        """The seconds of each conversion, sources by targets; as :meth:`connect` says of each pair."""
        ...


class PredictedCost:
    """Seconds as predicted for a described machine: a roofline of each operator, rings for collectives."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster

    def operator(self, op: Operator, choice: Choice) -> float:
        """The local operator, without its reduce functions."""
        moved = choice.read_bytes + choice.written_bytes
        if not moved:
            return 0.0
        return self.cluster.device.operator_seconds(choice.operations, moved, op.outputs[0].dtype.name)

    def reduce(self, shape: Sequence[int], dtype: Element, partial: TensorShardSpec, fns: Sequence[ReduceFn]) -> float:
        """The reduce functions of a partial output that lies as ``partial`` says."""
        return reduce_seconds(shape, dtype, partial, fns, self.cluster)

    def connect(
        self, shape: Sequence[int], dtype: Element, source: TensorShardSpec, target: TensorShardSpec
    ) -> Connection:
        """The conversion of a tensor from one spec to another."""
        return connect(shape, dtype, source, target, self.cluster)

    def conversions(
        self, shape: Sequence[int], dtype: Element, specs: Sequence[TensorShardSpec]
    ) -> tuple[tuple[float, ...], ...]:
        """The seconds of each conversion, sources by targets; as :meth:`connect` says of each pair."""
        return connect_all(shape, dtype, specs, specs, self.cluster)


def operator_seconds(model: CostModel, op: Operator, choice: Choice) -> tuple[float, float]:
    """Seconds of the local operator, and of its reduce functions."""
    reduce = 0.0
    for o, fns in enumerate(choice.spec.reduce_fns):
        if fns:
            y = op.outputs[o]
            shape = tuple(int(size) for size in y.shape)
            reduce += model.reduce(shape, y.dtype, choice.spec.partial_spec(o), fns)
    return model.operator(op, choice), reduce
