"""Views, whose definitions in hidet are zeros, and empty parts of concatenations: what normal graphs have instead."""

import hidet
import numpy as np
import pytest
from hidet import ops
from hidet.graph.ops.transform import ConcatOp, ViewOp

from hidet_dist.errors import ConfigError
from hidet_dist.normalize import normalize
from hidet_dist.rules.access import analyze
from hidet_dist.testing import models


def names(graph):
    return [type(op).__name__ for op in graph.nodes]


def test_views_read_their_input():
    x = hidet.symbol([2, 6], "int8", "cpu")
    views = hidet.trace_from([x.view(shape=[3, 4]), x.view(dtype="uint8"), x.view("uint8", [12])], [x])
    assert not analyze(views.nodes[0].task).accesses, "hidet defines views now: drop normalize/views.py"
    graph = normalize(views)
    assert not any(isinstance(op, ViewOp) for op in graph.nodes)
    given = np.arange(-6, 6, dtype=np.int8).reshape(2, 6)
    reshaped, unsigned, both = models.run_whole(graph, [given])
    np.testing.assert_array_equal(reshaped, given.reshape(3, 4))
    np.testing.assert_array_equal(unsigned, given.view(np.uint8))
    np.testing.assert_array_equal(both, given.view(np.uint8).reshape(12))


@pytest.mark.parametrize("dtypes", [("float32", "float16"), ("int8", "bool"), ("int32", "float32")])
def test_views_as_dtypes_with_other_bits_are_refused(dtypes):
    x = hidet.symbol([2, 4], dtypes[0], "cpu")
    with pytest.raises(ConfigError, match=f"reads {dtypes[0]} data of the shape .* as {dtypes[1]}"):
        normalize(hidet.trace_from(x.view(dtypes[1]), [x]))


def test_empty_parts_of_concatenations_are_left_out():
    x = hidet.symbol([2, 3], "float32", "cpu")
    empty = hidet.empty([0, 3])
    graph = normalize(hidet.trace_from(ops.concat([empty, x, empty, x], 0), [x]))
    assert [[int(n) for n in y.shape] for y in graph.nodes[0].inputs] == [[2, 3], [2, 3]]
    alone = normalize(hidet.trace_from(ops.relu(ops.concat([empty, x], 0)), [x]))
    assert names(alone) == ["ReluOp"]
    x = hidet.symbol([0, 3], "float32", "cpu")
    nothing = normalize(hidet.trace_from(ops.concat([x, x], 0), [x]))
    assert isinstance(nothing.nodes[0], ConcatOp)


def test_a_graph_without_outputs_is_refused():
    with pytest.raises(ConfigError, match="no outputs"):
        normalize(hidet.FlowGraph([], [hidet.symbol([3], "float32", "cpu")]))
