"""The launches that the cost model predicts are the kernels of the program that is built. nvcc is never called."""

from functools import partial

import hidet
import numpy as np
import pytest
from hidet import ops

from hidet_dist.compile import optimize_program
from hidet_dist.compile.cuda.target import CudaTarget
from hidet_dist.cost.model import PredictedCost
from hidet_dist.machine import builtin
from hidet_dist.machine.gpu import GPUS
from hidet_dist.normalize import normalize
from hidet_dist.normalize.precision import in_precision
from hidet_dist.overlap.planned import PlannedTasks
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.soundness.graphs import PATTERNS
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import shapes
from hidet_dist.view import GraphView

from .conftest import minilm

pytestmark = pytest.mark.usefixtures("no_compiler")

H100 = CudaTarget(GPUS["H100-SXM5-80GB"])


def launches(graph, ranks=1, **options):
    """The predicted launches of a plan, and the launches of its program; both count collectives."""
    normal, _ = H100.prepare(normalize(graph), ranks)
    cluster = builtin("dgx-h100", DeviceMesh((ranks,)))
    stage = search(normal, cluster, **options).plan.stages[0]
    view = GraphView(normal)
    tasks, _, _ = PlannedTasks(view, cluster, PredictedCost(cluster).fused(view)).of(stage)
    predicted = sum(task.seconds > 0 for task in tasks)
    nodes = optimize_program(partition_graph(normal, stage, target=H100), H100).nodes
    return predicted, sum(not node.share_map for node in nodes)


def x(*shape):
    return hidet.symbol(list(shape), "float32", "cpu")


def w(*shape):
    return hidet.randn(list(shape))


def softmax():
    a = x(64, 256)
    return hidet.trace_from(ops.softmax(a * 0.5 + w(256), 1), [a])


def layer_norm():
    a = x(64, 256)
    return hidet.trace_from(ops.layer_norm(a) * w(256) + w(256), [a])


def rms_norm():
    a = x(64, 256)
    return hidet.trace_from(a * ops.rsqrt(ops.mean(a * a, -1, keep_dim=True) + 1e-5) * w(256), [a])


def mlp(activation):
    a = x(64, 256)
    hidden = activation(a @ w(256, 512) + w(512))
    return hidet.trace_from(hidden @ w(512, 256) + a, [a])


def gated_mlp():
    a = x(64, 256)
    return hidet.trace_from((ops.silu(a @ w(256, 512)) * (a @ w(256, 512))) @ w(512, 256) + a, [a])


def attention(precision="float32"):
    """A block of attention; its queries are rotated, and its keys and values serve two heads each."""
    graph = shapes.llama(shapes.LlamaConfig(1, 256, 4, 2, 512, 512, 1, 64, "float32"))
    return graph if precision == "float32" else in_precision(graph, precision).graph


def gpt(precision="float32"):
    graph = shapes.gpt(shapes.GPTConfig(1, 256, 4, 512, 1, 64, "float32"))
    return graph if precision == "float32" else in_precision(graph, precision).graph


GRAPHS = {
    "softmax": (softmax, 1),
    "layer norm": (layer_norm, 1),
    "rms norm": (rms_norm, 1),
    "gelu": (partial(mlp, ops.gelu), 2),
    "silu": (partial(mlp, ops.silu), 2),
    "gated": (gated_mlp, 2),
    "llama": (attention, 11),
    "convolutions": (partial(PATTERNS["convolutions"], np.random.default_rng(0)), 6),
}
SLOW = {
    "minilm": (minilm, 12),
    "llama half": (partial(attention, "float16"), 12),
    "gpt": (gpt, 10),
    "gpt half": (partial(gpt, "float16"), 10),
    **{
        name: (partial(PATTERNS[name], np.random.default_rng(0)), kernels)
        for name, kernels in {"attention": 6, "gated_decoder": 9, "experts": 5, "fused_projection": 2}.items()
    },
}


@pytest.mark.parametrize(
    ("graph", "kernels"),
    [
        *(pytest.param(*case, id=name) for name, case in GRAPHS.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
    ],
)
def test_the_predicted_launches_are_the_kernels_of_the_program(graph, kernels):
    assert launches(graph()) == (kernels, kernels)


MEGATRON = {"w0": "(R, S0)", "op:0": "?, (R, S0) -> ?", "op:3": "?, (S0, R) -> ?"}


def test_an_all_reduce_and_what_it_splits_off_are_launches_too():
    """Two products, the all-reduce, and the sum that would have been part of the second product."""
    assert launches(mlp(ops.gelu), 2, pins=MEGATRON) == (4, 4)


APART = {
    "op:0": "(R, S0) -> (R, R)",
    "op:1": "(R, S0), (R, R) -> (R, S0)",
    "op:2": "(R, S0) -> (R, S0)",
    "op:3": "(R, S0) -> (R, R)",
    "op:4": "(R, S0), (R, R) -> (R, S0)",
}


def test_a_softmax_of_sharded_rows_is_predicted_apart():
    """Its maximum, its exponentials, their sum and the quotient are kernels, with collectives between them."""
    a = x(64, 256)
    graph = hidet.trace_from(ops.softmax(a, 1), [a])
    # Besides, the maxima of the ranks are reduced, the input is cut, and the output is gathered and put together.
    assert launches(graph, 2, pins=APART) == (10, 10)
