"""Products by experts for GPUs: the products that they become compute the same."""

from __future__ import annotations

import hidet
import numpy as np
import pytest
from hidet import ops

from hidet_dist import operators
from hidet_dist.compile.cuda.experts import define_experts
from hidet_dist.operators.experts import ExpertProductOp
from hidet_dist.soundness.plans import evaluate_graph


@pytest.mark.parametrize("transposed", [False, True])
def test_the_products_of_all_experts_are_those_of_the_chosen_ones(transposed: bool) -> None:
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        x = hidet.symbol([5, 6], "float32", "cpu")
        chosen, scales = hidet.symbol([5, 2], "int32", "cpu"), hidet.symbol([5, 2], "float32", "cpu")
        up = hidet.symbol([4, 7, 6] if transposed else [4, 6, 7], "float32", "cpu")
        down = hidet.symbol([4, 3, 7] if transposed else [4, 7, 3], "float32", "cpu")
        y = ops.silu(operators.expert_product(x, up, chosen, transposed=transposed))
        y = operators.expert_product(y, down, chosen, scales, transposed=transposed)
    graph = hidet.trace_from(y, [x, chosen, scales, up, down])
    defined = define_experts(graph)
    assert not any(isinstance(op, ExpertProductOp) for op in defined.nodes)
    rng = np.random.default_rng(0)
    choices = np.array([[0, 3], [3, 1], [-1, 0], [4, 3], [1, 0]], np.int32)  # the third one never, and some of none
    given = [rng.standard_normal([int(n) for n in one.shape]) for one in (x, scales, up, down)]
    given[0][1, 2] = np.inf  # must not reach other tokens
    arrays = [given[0], choices, *given[1:]]
    for got, want in zip(evaluate_graph(defined, arrays), evaluate_graph(graph, arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)
