"""Children that ranks fork: whatever they do, the ranks go on, and a child never acts in its parent's place."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hidet_dist.launch import free_port

from .conftest import Rank, Start, X, assert_blames, build, call_all, load_all, whole

pytestmark = pytest.mark.usefixtures("next_run_works")


def _assert_refused(child: dict[str, Any], rank: Rank, says: str) -> None:
    said = child["said"]
    assert said.get("error") == "ForkError", child
    for text in (f"belongs to process {rank.process.pid}", f"this is process {child['process']}", says):
        assert text in said["message"], child


@pytest.mark.parametrize("transport", ["auto", pytest.param("gloo", marks=pytest.mark.slow)])
def test_children_disturb_nobody(start: Start, artifacts: Path, transport: str) -> None:
    ranks = start(2, environment=[{"HIDET_DIST_TRANSPORT": transport}] * 2)
    load_all(ranks, artifacts)
    call_all(ranks)
    for rank in ranks:  # rank 0 hosts the store
        for do in ("exit", "close", "forget", "shutdown"):
            child = rank.do("fork", do=do)
            assert child["exit"] == 0, (do, child)
            assert "error" not in child["said"], (do, child)
            call_all(ranks)
        _assert_refused(rank.do("fork", do="call", inputs=[X.tolist()]), rank, "load it in the process that calls it")
        _assert_refused(rank.do("fork", do="bind"), rank, "make one in this process")
        call_all(ranks)
        assert rank.do("fork", do="bus_error")["exit"] == -signal.SIGBUS
        assert rank.do("multiprocess") == 0
        call_all(ranks)
    for rank in ranks:
        rank.dismiss()
    assert [rank.process.wait(60) for rank in ranks] == [0, 0]


def test_a_child_that_outlives_its_rank_holds_nothing_of_it(start: Start, artifacts: Path) -> None:
    """The others see the rank's connections end, and another run may have its port."""
    port = free_port()
    ranks = start(2, port=port)
    load_all(ranks, artifacts)
    call_all(ranks)
    child = ranks[0].do("fork", do="sleep", wait=False)["process"]
    try:
        ranks[0].kill()
        ranks[1].send("call", inputs=[X.tolist()])
        assert_blames(ranks[1].answer(), 0, "CommunicationError")
        again = start(2, port=port)
        load_all(again, artifacts)
        call_all(again)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_may_load_a_partition_of_its_own(start: Start, tmp_path: Path) -> None:
    """Its kernels start threads, although its parent's did before."""
    folder = build(tmp_path / "artifacts", 1, batch=4096)
    x = np.random.default_rng(0).standard_normal((4096, 8)).astype(np.float32)
    (rank,) = start(1, environment=[{"OMP_NUM_THREADS": "3"}])
    load_all([rank], folder)
    call_all([rank], x)
    assert rank.do("threads") > 1
    child = rank.do("fork", do="load", folder=str(folder), inputs=[x.tolist()])
    assert child["exit"] == 0, child
    np.testing.assert_allclose(child["said"]["result"], whole(x), atol=1e-4)
    call_all([rank], x)


def test_a_child_does_not_join_as_its_parents_rank(start: Start, artifacts: Path) -> None:
    ranks = start(2)
    load_all(ranks, artifacts)
    for rank in ranks:
        child = rank.do("fork", do="load", folder=str(artifacts), inputs=[X.tolist()])
        assert child["said"]["error"] == "RendezvousError", child
        call_all(ranks)
