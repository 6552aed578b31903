"""Subgraphs that are built once, and copied for other tensors."""

from __future__ import annotations

import hidet
from hidet import ops
from hidet.graph import Tensor

from hidet_dist.rewriting import Repeated


def symbol(*shape: int) -> Tensor:
    return hidet.symbol(list(shape), "float32", "cpu")


def test_tensors_of_the_same_kind_get_copies_of_one_subgraph() -> None:
    repeated = Repeated()
    built: list[Tensor] = []

    def subgraph(x: Tensor) -> list[Tensor]:
        def build() -> list[Tensor]:
            built.append(x)
            return [ops.exp(ops.relu(x))]

        return repeated("key", [x], build)

    x, y, wide = symbol(2, 3), symbol(2, 3), symbol(2, 4)
    (first,), (second,), (other,) = subgraph(x), subgraph(y), subgraph(wide)
    assert [id(each) for each in built] == [id(x), id(wide)]
    assert second is not first and second.shape == first.shape and other.shape == wide.shape
    assert second.op.task is first.op.task
    assert second.op.inputs[0].op.inputs[0] is y
    (itself,) = repeated("other key", [x], lambda: [x])
    assert itself is x


def test_the_same_tensor_twice_is_another_kind() -> None:
    repeated = Repeated()
    x, y = symbol(2), symbol(2)
    (square,) = repeated("sum", [x, x], lambda: [ops.square(x)])
    (total,) = repeated("sum", [x, y], lambda: [x + y])
    assert square.op.name != total.op.name


def test_a_subgraph_that_reads_other_tensors_is_built_each_time() -> None:
    repeated = Repeated()
    x, y = ops.relu(symbol(2)), ops.relu(symbol(2))
    for given in (x, y):
        (made,) = repeated("before", [given], lambda given=given: [ops.exp(given.op.inputs[0])])
        assert made.op.inputs[0] is given.op.inputs[0]


def test_no_subgraph_is_remembered_too() -> None:
    repeated = Repeated()
    assert repeated("none", [symbol(2)], list) == []
    assert repeated("none", [symbol(2)], lambda: [symbol(2)]) == []
