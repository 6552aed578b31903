"""The meeting of ranks, and the errors when it fails."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hidet_dist import native
from hidet_dist.errors import CommunicationError, ConfigError, RendezvousError
from hidet_dist.launch import free_port
from hidet_dist.runtime import session
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.rendezvous import Rendezvous, Settings, local_address, resolve_settings
from hidet_dist.runtime.store import StoreClient, StoreError

RunRanks = Callable[..., list[dict[str, Any]]]

ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_settings_come_from_the_environment() -> None:
    settings = resolve_settings(environment=ENVIRONMENT)
    assert (settings.rank, settings.world_size) == (1, 2)
    assert (settings.master_addr, settings.master_port) == ("10.0.0.1", 29500)
    assert not settings.agent_store


def test_an_address_that_is_given_takes_the_place_of_the_environments() -> None:
    environment = {**ENVIRONMENT, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert resolve_settings(environment=environment).agent_store
    settings = resolve_settings(master_port=1234, environment=environment)
    assert (settings.master_addr, settings.master_port, settings.agent_store) == ("10.0.0.1", 1234, False)


def test_there_is_one_rank_by_default() -> None:
    settings = resolve_settings(environment={})
    assert (settings.rank, settings.world_size, settings.master_addr) == (0, 1, "127.0.0.1")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ({"rank": 0}, ENVIRONMENT, "rank=0 contradicts RANK=1"),
        ({"world_size": 4}, ENVIRONMENT, "world_size=4 contradicts WORLD_SIZE=2"),
        ({"rank": 0}, {}, "rank is given but world_size is not"),
        ({}, {"WORLD_SIZE": "2"}, "world_size is given but rank is not"),
        ({"rank": 2, "world_size": 2}, {}, "from 0 to 1"),
        ({"rank": 0, "world_size": 0}, {}, "must be positive"),
        ({"rank": 0, "world_size": 2}, {}, "no master_port"),
        ({"rank": 0, "world_size": 2, "master_port": 70000}, {}, "not 70000"),
        ({"timeout_seconds": 0.0}, {}, "timeout_seconds must be positive"),
        ({}, {**ENVIRONMENT, "RANK": "one"}, "RANK must be an integer, not 'one'"),
    ],
)
def test_settings_that_contradict_are_refused(
    arguments: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_settings(**arguments, environment=environment)


def test_a_rank_that_never_comes_is_named(run_ranks: RunRanks) -> None:
    for answer in run_ranks("meet", 3, ranks=[0, 1], timeout=5.0):
        assert answer["error"] == "RendezvousError", answer
        assert "ranks 2 of 3 did not come" in answer["message"] or "waited for ranks 2" in answer["message"]


def test_the_time_in_which_a_process_is_stopped_does_not_count(run_ranks: RunRanks) -> None:
    (answer,) = run_ranks("answer_after_a_stop", 1, seconds=4.0)
    assert answer.get("result") is True, answer


def test_a_host_that_never_comes_is_named(run_ranks: RunRanks) -> None:
    (answer,) = run_ranks("meet", 2, ranks=[1], timeout=1.5)
    assert answer["error"] == "RendezvousError", answer
    assert "rank 0, which hosts the rendezvous store" in answer["message"]


def test_a_port_in_use_is_said(run_ranks: RunRanks) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        host, client = run_ranks("meet", 2, port=port, timeout=5.0)
    for answer in (host, client):
        assert answer["error"] == "RendezvousError", answer
        assert f"127.0.0.1:{port}" in answer["message"]
    assert "using the port" in host["message"]


def test_a_duplicate_rank_is_reported(run_ranks: RunRanks) -> None:
    answers = run_ranks("meet", 3, ranks=[0, 1, 1], timeout=5.0)
    assert any("two processes are rank 1" in answer["message"] for answer in answers)
    assert all(answer["error"] == "RendezvousError" for answer in answers)


def test_a_rank_whose_connection_breaks_is_no_rival_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is flooded closes connections that are about to be made."""
    clone, broken = StoreClient.clone, iter([StoreError("the store cannot be reached")])

    def clone_or_break(client: StoreClient) -> StoreClient:
        for error in broken:
            raise error
        return clone(client)

    monkeypatch.setattr(StoreClient, "clone", clone_or_break)
    Rendezvous(Settings(0, 1, "127.0.0.1", free_port(), timeout_seconds=30.0)).close()
    assert next(broken, None) is None


@pytest.mark.parametrize("left_seconds", [-1.0, 1e-4])
def test_a_store_that_breaks_all_connections_is_said(monkeypatch: pytest.MonkeyPatch, left_seconds: float) -> None:
    """Also where the deadline cuts the last attempt to connect short."""
    timeout_seconds, clock = 60.0, time.monotonic
    start, broken = clock(), iter(range(2))

    def break_off(_client: StoreClient) -> StoreClient:
        if next(broken, None) is None:
            now = clock()
            forward = start + timeout_seconds - left_seconds - now
            monkeypatch.setattr(time, "monotonic", lambda: clock() + forward)
        raise StoreError("the store cannot be reached: too many")

    monkeypatch.setattr(StoreClient, "clone", break_off)
    with pytest.raises(RendezvousError, match=r"rank 0.* the rendezvous store .*: too many"):
        Rendezvous(Settings(0, 1, "127.0.0.1", free_port(), timeout_seconds=timeout_seconds))


@pytest.mark.parametrize(
    ("who", "free", "needed"), [(0, 4, "14 file descriptors to host"), (1, 2, "3 file descriptors")]
)
def test_too_few_descriptors_are_said(run_ranks: RunRanks, who: int, free: int, needed: str) -> None:
    answer = run_ranks("meet_with_few_descriptors", 2, timeout=1.0, who=who, free=free)[who]
    assert answer["error"] == "RendezvousError", answer
    assert f"rank {who} needs {needed}" in answer["message"]
    assert "ulimit -n" in answer["message"]


def test_a_host_without_descriptors_tells_the_others(run_ranks: RunRanks, tmp_path: Path) -> None:
    host, other = run_ranks("meet_with_a_host_that_runs_out", 2, timeout=5.0, folder=str(tmp_path))
    assert host.get("result"), host
    assert other["error"] == "RendezvousError", other
    assert "rank 0, which hosts the rendezvous store" in other["message"]
    assert "its process has no file descriptors left" in other["message"]


def test_world_sizes_that_differ_are_said(run_ranks: RunRanks) -> None:
    answers = run_ranks("meet", 2, timeout=3.0, environment=[{}, {"WORLD_SIZE": "3"}])
    assert answers[0]["error"] == "RendezvousError"
    assert "rank 1 was launched with a world size of 3, rank 0 with 2" in answers[0]["message"]


def test_meshes_that_differ_are_said(run_ranks: RunRanks) -> None:
    answers = run_ranks("other_mesh", 4, meshes=[[4], [4], [2, 2], [4]])
    errors = [answer for answer in answers if "error" in answer]
    assert errors
    assert all(answer["error"] == "ConfigError" for answer in errors)
    assert any("(2,2)" in answer["message"] and "(4)" in answer["message"] for answer in errors)


@pytest.fixture
def no_sockets(no_launch_variables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_keywords: Any) -> None:
        raise AssertionError("opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


def test_another_world_size_than_the_meshs_is_refused_before_any_socket(no_sockets: None) -> None:
    session.init(rank=0, world_size=4, master_port=29500)
    try:
        with pytest.raises(ConfigError, match=r"mesh \(2,\) needs 2 processes, but the world size is 4"):
            session.communicator_for((2,))
        with pytest.raises(ConfigError, match="rank 1 was asked for, but this process is rank 0"):
            session.communicator_for((2, 2), rank=1)
    finally:
        session.shutdown()
    with pytest.raises(ConfigError, match=r"mesh \(2,\) needs 2 processes, but the world size is 1"):
        session.communicator_for((2,))
    assert session.current() is None


def test_one_rank_needs_no_socket(no_sockets: None) -> None:
    data = np.ones(3, dtype=np.float32)
    with session.communicator_for((1, 1), rank=0) as comm:
        comm.bind()
        assert native.all_reduce(data.ctypes.data, data.ctypes.data, 3, 0, 0, 3) == native.OK
        comm.check()
        assert comm.sequence == 1
        native.all_reduce(data.ctypes.data, data.ctypes.data, -3, 0, 0, 3)
        with pytest.raises(CommunicationError, match="negative count -3") as caught:
            comm.check()
        assert caught.value.ranks == (0,)
    with pytest.raises(CommunicationError, match="closed"):
        comm.check()
    session.shutdown()


def test_init_is_called_once(no_sockets: None) -> None:
    session.init()
    with pytest.raises(ConfigError, match="shutdown"):
        session.init()
    session.shutdown()
    session.shutdown()


def test_a_communicator_checks_its_arguments() -> None:
    with pytest.raises(ConfigError, match=r"mesh \(2, 2\) has 4 devices, but the world size is 2"):
        Communicator(0, 2, (2, 2))
    with pytest.raises(ConfigError, match="needs a rendezvous"):
        Communicator(0, 2, (2,))
    with pytest.raises(ConfigError, match="timeout_seconds"):
        Communicator(0, 1, (1,), timeout_seconds=0)


NOT_LOOPBACK = "192.0.2.1"  # of no host (RFC 5737)


@pytest.mark.parametrize(("secret", "says"), [(b"", "is missing"), (b"too short", "of 9 bytes is too short")])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_other_hosts_can_reach_needs_a_secret(rank: int, secret: bytes, says: str) -> None:
    settings = Settings(rank, 2, NOT_LOOPBACK, free_port(), secret=secret, timeout_seconds=2.0)
    with pytest.raises(ConfigError, match=f"{NOT_LOOPBACK}, which is not loopback.*{says}: set HIDET_DIST_SECRET"):
        Rendezvous(settings)


def test_under_torchrun_on_several_hosts_a_secret_is_needed_too() -> None:
    if local_address(NOT_LOOPBACK, 9).startswith("127."):
        pytest.skip("this host has loopback only")
    environment = {**ENVIRONMENT, "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "1"}
    settings = resolve_settings(environment={**environment, "MASTER_ADDR": NOT_LOOPBACK}, timeout_seconds=2.0)
    assert settings.agent_store and not settings.one_host
    with pytest.raises(ConfigError, match="set HIDET_DIST_SECRET"):
        Rendezvous(settings)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "localhost"])
def test_loopback_needs_no_secret(address: str) -> None:
    Rendezvous(Settings(0, 1, address, free_port(), timeout_seconds=5.0)).close()


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_ranks_of_one_host_listen_on_loopback_only(run_ranks: RunRanks, transport: str) -> None:
    host, other = run_ranks("listens", 2, environment=[{"HIDET_DIST_TRANSPORT": transport}] * 2)
    loopback = "0100007F"
    assert set(host["result"]) == {loopback}
    assert set(other["result"]) == (set() if transport == "auto" else {loopback})


def test_with_a_secret_ranks_meet_on_another_interface(run_ranks: RunRanks) -> None:
    address = local_address(NOT_LOOPBACK, 9)
    if address.startswith("127."):
        pytest.skip("this host has loopback only")
    extra = {"MASTER_ADDR": address, "HIDET_DIST_SECRET": "0123456789abcdef"}
    for transport in ("auto", "gloo"):
        answers = run_ranks("several", 4, environment=[{**extra, "HIDET_DIST_TRANSPORT": transport}] * 4)
        assert all("error" not in answer for answer in answers), answers


def test_secrets_that_differ_are_said(run_ranks: RunRanks) -> None:
    host, other = run_ranks("meet", 2, timeout=2.0, environment=[{}, {"HIDET_DIST_SECRET": "0123456789abcdef"}])
    assert "rank 1 and the rendezvous store" in other["message"]
    assert "HIDET_DIST_SECRET" in other["message"]
    assert "ranks 1 of 2 did not come" in host["message"]


def test_a_secret_is_not_shown() -> None:
    settings = resolve_settings(environment={**ENVIRONMENT, "HIDET_DIST_SECRET": "0123456789abcdef"})
    assert settings.secret == b"0123456789abcdef"
    assert "0123456789abcdef" not in repr(settings)
