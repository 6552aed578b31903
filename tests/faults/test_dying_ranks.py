"""Ranks that are killed or stop, at every stage of serving; the others say which one, in time."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest

from hidet_dist.launch import free_port

from .conftest import SHORT_SECONDS, TIMEOUT_SECONDS, Start, X, assert_blames, await_loaded, call_all, load_all, whole

pytestmark = pytest.mark.usefixtures("next_run_works")

ENDED = "the process of group rank"
BOTH = pytest.mark.parametrize("victim", [0, 1])  # rank 0 hosts the store that the ranks meet in
RANK_0 = pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])  # quickly that one alone


@RANK_0
def test_killed_before_a_collective(start: Start, artifacts: Path, victim: int) -> None:
    ranks = start(2)
    load_all(ranks, artifacts)
    call_all(ranks)
    ranks[victim].kill()
    survivor = ranks[1 - victim]
    survivor.send("call", inputs=[X.tolist()])
    assert_blames(survivor.answer(), victim, "CommunicationError", ENDED)
    survivor.send("call", inputs=[X.tolist()])  # what has failed stays failed, at once
    assert_blames(survivor.answer(), victim, "CommunicationError")


@BOTH
def test_killed_within_a_collective(start: Start, artifacts: Path, victim: int) -> None:
    """The victim waits in it already, and the survivor has yet to come."""
    ranks = start(2)
    load_all(ranks, artifacts)
    call_all(ranks)
    ranks[victim].send("call", inputs=[X.tolist()])
    time.sleep(0.5)
    ranks[victim].kill()
    survivor = ranks[1 - victim]
    survivor.send("call", inputs=[X.tolist()])
    answer = survivor.answer()
    if "error" not in answer:  # it had given all that was wanted of it
        survivor.send("call", inputs=[X.tolist()])
        answer = survivor.answer()
    assert_blames(answer, victim, "CommunicationError", ENDED)


@RANK_0
def test_killed_while_another_waits_for_it(start: Start, artifacts: Path, victim: int) -> None:
    ranks = start(2)
    load_all(ranks, artifacts)
    survivor = ranks[1 - victim]
    survivor.send("call", inputs=[X.tolist()])
    time.sleep(0.5)
    ranks[victim].kill()
    says = "stopped responding" if victim else "hosts the rendezvous store, cannot be reached"
    assert_blames(survivor.answer(), victim, "CommunicationError", says)


@BOTH
def test_killed_before_it_loads(start: Start, artifacts: Path, victim: int) -> None:
    ranks = start(2)
    survivor = ranks[1 - victim]
    survivor.send("load", folder=str(artifacts), timeout_seconds=SHORT_SECONDS)
    ranks[victim].kill()
    says = "did not come within 5 s" if victim else "did not answer within 5 s"
    assert_blames(survivor.answer(), victim, "RendezvousError", says)


@RANK_0
def test_killed_while_it_loads(start: Start, artifacts: Path, victim: int) -> None:
    """The ranks have met, and the other one has loaded its part."""
    port = free_port()
    ranks = start(2, port)
    ranks[victim].do("stall")
    for rank in ranks:
        rank.send("load", folder=str(artifacts), timeout_seconds=TIMEOUT_SECONDS)
    await_loaded(port, 1 - victim)
    ranks[victim].kill()
    says = "is gone" if victim else "hosts"
    assert_blames(ranks[1 - victim].answer(), victim, "RendezvousError", says)


@BOTH
def test_slower_to_load_than_the_others_wait(start: Start, artifacts: Path, victim: int) -> None:
    ranks = start(2)
    ranks[victim].do("stall")
    for rank in ranks:
        rank.send("load", folder=str(artifacts), timeout_seconds=SHORT_SECONDS)
    assert_blames(ranks[1 - victim].answer(), victim, "RendezvousError", "timed out")
    ranks[victim].kill()


@BOTH
def test_stopped_beyond_the_time_out(start: Start, artifacts: Path, victim: int) -> None:
    ranks = start(2)
    load_all(ranks, artifacts, timeout=SHORT_SECONDS)
    call_all(ranks)
    ranks[victim].kill(signal.SIGSTOP)
    survivor = ranks[1 - victim]
    survivor.send("call", inputs=[X.tolist()])
    says = f"timed out after 5 s, waiting for group rank {victim}"
    assert_blames(survivor.answer(), victim, "CommunicationError", says)
    ranks[victim].kill(signal.SIGCONT)
    ranks[victim].send("call", inputs=[X.tolist()])
    answer = ranks[victim].answer()
    assert answer["error"] == "CommunicationError", answer  # it has missed it, and knows


def test_stopped_for_less_than_the_time_out(start: Start, artifacts: Path) -> None:
    ranks = start(2)
    load_all(ranks, artifacts)
    ranks[1].kill(signal.SIGSTOP)
    ranks[0].send("call", inputs=[X.tolist()])
    time.sleep(1.0)
    ranks[1].kill(signal.SIGCONT)
    ranks[1].send("call", inputs=[X.tolist()])
    assert all("error" not in rank.answer() for rank in ranks)


@BOTH
def test_stopped_together_beyond_the_time_out(start: Start, artifacts: Path, victim: int) -> None:
    """As a machine that is suspended: the rank that waits goes on first, and none is to blame."""
    ranks = start(2)
    load_all(ranks, artifacts, timeout=SHORT_SECONDS)
    call_all(ranks)
    waiting = ranks[1 - victim]
    waiting.send("call", inputs=[X.tolist()])
    time.sleep(0.5)
    for rank in ranks:
        rank.kill(signal.SIGSTOP)
    time.sleep(2 * SHORT_SECONDS)
    waiting.kill(signal.SIGCONT)
    time.sleep(0.5)
    ranks[victim].kill(signal.SIGCONT)
    ranks[victim].send("call", inputs=[X.tolist()])
    for rank in ranks:
        answer = rank.answer()
        assert "error" not in answer, answer
        np.testing.assert_allclose(answer["result"], whole(X), atol=1e-4)
    call_all(ranks)
