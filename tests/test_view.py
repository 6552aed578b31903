"""Graphs that are refused as soon as they are viewed, before anything is planned."""

import hidet
import pytest
from hidet import ops

import hidet_dist
from hidet_dist.errors import ConfigError


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_tensors_are_refused(dtype):
    x = hidet.symbol([4, 4], dtype, "cpu")
    for y in (ops.real(x), ops.conj(x)):
        with pytest.raises(ConfigError, match=f"x0 of the graph has the dtype {dtype}, which artifacts"):
            hidet_dist.make_plan(hidet.trace_from(y, [x]), {"mesh_shape": [2]})


def test_tensors_of_too_many_dims_are_refused():
    x = hidet.symbol([1] * 65, "float32", "cpu")
    with pytest.raises(ConfigError, match="has 65 dims; at most 64"):
        hidet_dist.make_plan(hidet.trace_from(ops.relu(x), [x]), {"mesh_shape": [2]})


def test_empty_tensors_are_refused():
    x = hidet.symbol([0, 4], "float32", "cpu")
    with pytest.raises(ConfigError, match="with a dim of size 0"):
        hidet_dist.make_plan(hidet.trace_from(ops.relu(x), [x]), {"mesh_shape": [2]})
