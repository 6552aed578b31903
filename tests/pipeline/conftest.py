"""A small graph with a branch, a lookup-free mask and two outputs, and its stages."""

from __future__ import annotations

from typing import Any

import hidet
import numpy as np
import pytest

BATCH = 8
RNG = np.random.default_rng(0)
X, M = (RNG.uniform(-1, 1, shape).astype(np.float32) for shape in ((BATCH, 6, 8), (1, 1, 8)))
W = [RNG.uniform(-1, 1, (8, 8)).astype(np.float32) for _ in range(3)]

STAGES: list[dict[str, Any]] = [
    {"operators": [0, 3], "mesh_shape": [2], "pins": {"w0": "(R, S0)"}},
    {"operators": [3, 5], "mesh_shape": [1]},
    {"operators": [5, 8], "mesh_shape": [3]},
]
"""Matmul, relu and scaling; matmul and exp; matmul, a sum with the first stage's result, and tanh."""


def traced() -> hidet.FlowGraph:
    """y = tanh(h2 @ w2 + h1), h2 = exp(h1 @ w1), h1 = relu(x @ w0) * m; h2 is an output as well."""
    x, m = hidet.symbol(list(X.shape), "float32", "cpu"), hidet.symbol(list(M.shape), "float32", "cpu")
    w0, w1, w2 = map(hidet.asarray, W)
    h1 = hidet.ops.relu(hidet.ops.matmul(x, w0)) * m
    h2 = hidet.ops.exp(hidet.ops.matmul(h1, w1))
    return hidet.trace_from([hidet.ops.tanh(hidet.ops.matmul(h2, w2) + h1), h2], [x, m])


def expected(x: np.ndarray = X, m: np.ndarray = M) -> list[np.ndarray]:
    """The outputs of the whole graph."""
    h1 = np.maximum(x @ W[0], 0) * m
    h2 = np.exp(h1 @ W[1])
    return [np.tanh(h2 @ W[2] + h1), h2]


@pytest.fixture(scope="session")
def graph() -> hidet.FlowGraph:
    return traced()
