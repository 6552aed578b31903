"""The graph and the machine that most tests of the search plan for."""

from __future__ import annotations

from collections.abc import Callable

import hidet
import pytest

from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.normalize import normalize
from hidet_dist.spec import DeviceMesh

BATCH, HIDDEN, INNER = 8, 64, 256


@pytest.fixture
def mlp() -> hidet.FlowGraph:
    """Linear -> GELU -> Linear, 8 x 64 -> 256 -> 64, without biases: operators 0, 1, 2 and weights w0, w1."""
    x = hidet.symbol([BATCH, HIDDEN], "float32", "cpu")
    up = hidet.randn([HIDDEN, INNER], device="cpu")
    down = hidet.randn([INNER, HIDDEN], device="cpu")
    return normalize(hidet.trace_from(hidet.ops.matmul(hidet.ops.gelu(hidet.ops.matmul(x, up)), down), [x]))


@pytest.fixture
def toy() -> Callable[..., Cluster]:
    """A machine with a mesh of any shape, whose launches cost nothing, so that closed forms have few terms."""

    def make(mesh: tuple[int, ...] = (2,), latency: float = 1e-6) -> Cluster:
        device = Device("toy", {"default": 1e12}, 1e11, 2**40, 0.0)
        return Cluster(DeviceMesh(mesh), (Link(latency, 1e9),) * len(mesh), device)

    return make
