"""A pool of processes that run artifacts on request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hidet
import numpy as np
import pytest
import torch

import hidet_dist
from hidet_dist.testing.rank_pool import RankPool

WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = hidet.symbol([2, 4])
    graph = hidet.trace_from(hidet.ops.matmul(x, hidet.from_torch(torch.from_numpy(WEIGHT))))
    folder = tmp_path_factory.mktemp("pool") / "artifacts"
    hidet_dist.auto_parallel(
        graph, {"mesh_shape": [2]}, {"input_specs": ["(S0, R)"], "output_specs": ["(S0, R)"]}, folder
    )
    return folder


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, seconds=300.0) as pool:
        yield pool


def test_each_request_is_computed_by_all_ranks(artifacts: Path, pool: RankPool):
    for factor in (1.0, 2.0):
        shards = [np.full((1, 4), factor * (rank + 1), np.float32) for rank in range(2)]
        outputs = pool.run(artifacts, [[shard] for shard in shards])
        for shard, (own,) in zip(shards, outputs, strict=True):
            np.testing.assert_allclose(own, shard @ WEIGHT)


def test_a_failed_request_names_the_ranks_and_their_error_and_the_next_one_is_computed(
    artifacts: Path, pool: RankPool, tmp_path: Path
):
    shards = [[np.ones((1, 4), np.float32)]] * 2
    with pytest.raises(RuntimeError, match=r"rank 0: ArtifactError: .*rank 1: "):
        pool.run(tmp_path / "none", shards)
    np.testing.assert_allclose(pool.run(artifacts, shards)[1][0], np.ones((1, 4)) @ WEIGHT)
