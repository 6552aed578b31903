"""An all-reduce is split into a reduce-scatter and an all-gather where what lies between pays for it, and only there.

Between the two, norms and residuals work on shards of the tokens (Korthikanti et al., arXiv:2205.05198, section 4.2).
On rings the two cost what the all-reduce does, so that only what else changes decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import hidet
import pytest
from hidet import ops
from hidet.graph import Operator

from hidet_dist.errors import InfeasibleError
from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.normalize import normalize
from hidet_dist.search import SearchResult, search
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.spec import DeviceMesh, OpShardSpec
from hidet_dist.view import GraphView
from hidet_dist.weights import weight

WAYS, BLOCKS, TOKENS, HIDDEN, INNER = 4, 2, 512, 256, 1024
BANDWIDTH = 1e11  # of memory, bytes/s
LATENCY, LINK = 1e-6, 1e10


def cluster(bandwidth: float = BANDWIDTH) -> Cluster:
    device = Device("toy", {"default": 1e13}, bandwidth, 2**40, 0.0)
    return Cluster(DeviceMesh((WAYS,)), (Link(LATENCY, LINK),), device)


def blocks(shape: Sequence[int], inner_size: int = INNER) -> hidet.FlowGraph:
    """Norm, linear, ReLU, linear and the residual around them, twice."""
    x = y = hidet.symbol(list(shape), "float32", "cpu")
    for number in range(BLOCKS):
        inner = ops.matmul(ops.layer_norm(y), weight(f"up{number}", [HIDDEN, inner_size], "float32"))
        y = y + ops.matmul(ops.relu(inner), weight(f"down{number}", [inner_size, HIDDEN], "float32"))
    return normalize(hidet.trace_from(y, [x]))


def megatron(graph: hidet.FlowGraph) -> dict[str, str]:
    """Weights by columns, then by rows, and used as they lie: tensor parallelism, of the reductions nothing said."""
    pins = {}
    for number in range(BLOCKS):
        pins |= {f"up{number}": "(R, S0)", f"down{number}": "(S0, R)"}
        pins |= {f"op:Matmul#{2 * number}": "?, (R, S0) -> ?", f"op:Matmul#{2 * number + 1}": "?, (S0, R) -> ?"}
    return pins


def no_scatter(op: Operator, spec: OpShardSpec) -> bool:
    return not any(fn.kind == "reduce_scatter" for fns in spec.reduce_fns for fn in fns)


def both(graph: hidet.FlowGraph, machine: Cluster) -> tuple[SearchResult, SearchResult]:
    """The best plan, and the best of those that do not scatter."""
    pins = megatron(graph)
    return search(graph, machine, pins=pins, solver_gap=0.0), search(
        graph, machine, pins=pins, solver_gap=0.0, allow=no_scatter
    )


def test_the_tokens_are_split_between_the_products_where_it_pays_in_time() -> None:
    found, reduced = both(blocks([TOKENS, HIDDEN]), cluster())
    assert reduced.plan.collectives() == {"all_reduce": BLOCKS}
    assert found.plan.collectives() == {"all_gather": BLOCKS, "reduce_scatter": BLOCKS}
    activation = TOKENS * HIDDEN * 4
    # Communication takes as long either way: 2 (n-1)(a + b/(n w)) a block.
    ring = (WAYS - 1) * (LATENCY + activation / (WAYS * LINK))
    for plan in (found.plan, reduced.plan):
        computed = sum(op.compute_seconds for op in plan.stages[0].operators)
        slices = activation / WAYS * 2 / BANDWIDTH if plan is found.plan else 0.0
        assert plan.seconds - computed - slices == pytest.approx(BLOCKS * 2 * ring, rel=1e-9)
    # Residuals (two tensors read, one written) and every norm but that of the input, which comes whole, are on shards;
    # the first residual's other term is cut from the input.
    passes = BLOCKS * 3 + (BLOCKS - 1) * 2
    saved = (1 - 1 / WAYS) * passes * activation / BANDWIDTH - 2 * activation / WAYS / BANDWIDTH
    assert reduced.plan.seconds - found.plan.seconds == pytest.approx(saved, rel=1e-9)
    second = [op for op in found.plan.stages[0].operators if op.operator == "Normalize"][1]
    assert str(second.spec) == "(S0, R) -> (S0, R)"


def test_tokens_that_are_not_contiguous_stay_whole() -> None:
    """Three sequences are not split over four; the tokens of each would have to be packed and unpacked."""
    found, reduced = both(blocks([3, TOKENS, HIDDEN]), cluster())
    # Each copy reads and writes the tensor: four passes, against 3/4 of the five of a residual and a norm.
    assert found.plan.collectives() == {"all_reduce": BLOCKS}
    assert found.plan.seconds == reduced.plan.seconds


def test_an_odd_number_of_tokens_is_left_whole() -> None:
    found, reduced = both(blocks([TOKENS + 1, HIDDEN]), cluster())
    assert found.plan.collectives() == {"all_reduce": BLOCKS}
    assert found.plan.seconds == reduced.plan.seconds


def test_the_tokens_are_split_where_only_that_fits() -> None:
    """With memory so fast that norms and residuals cost next to nothing, the budget decides."""
    graph, machine = blocks([TOKENS, HIDDEN], HIDDEN), cluster(bandwidth=1e30)
    view, pins = GraphView(graph), megatron(graph)
    reduced = search(graph, machine, pins=pins, allow=no_scatter).plan
    needed = max(live_bytes(view, reduced.stages[0]))
    with pytest.raises(InfeasibleError) as error:
        search(graph, machine, mem_budget=1, pins=pins, allow=no_scatter)
    budget = error.value.least_budget - 1
    # A whole partial sum and a whole result are held at once when one becomes the other.
    assert budget < needed
    found = search(graph, machine, mem_budget=budget, pins=pins).plan
    assert found.collectives()["reduce_scatter"] >= 1
    assert max(live_bytes(view, found.stages[0])) <= budget
    # The arithmetic of norms and residuals, on shards, is less.
    assert reduced.seconds * (1 - 1e-3) < found.seconds <= reduced.seconds
