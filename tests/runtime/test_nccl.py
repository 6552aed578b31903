"""The NCCL transport, between real processes with stand-ins for NCCL and the CUDA driver: see native/fake_*.cpp."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hidet_dist import native
from hidet_dist.errors import ConfigError
from hidet_dist.runtime.cuda import nccl
from hidet_dist.runtime.libraries import hidet_runtime

RunRanks = Callable[..., list[dict[str, Any]]]
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Ranks:
    """Runs scenarios with the stand-ins."""

    def __init__(self, run_ranks: RunRanks, stand_ins: Path, exchange: Path):
        self._run = run_ranks
        self.exchange = exchange
        self.environment = {
            nccl.LIBRARY_VARIABLE: str(stand_ins / "libnccl.so.2"),
            nccl.DRIVER_VARIABLE: str(stand_ins / "libcuda.so.1"),
            "FAKE_NCCL_DIR": str(exchange),
        }

    def __call__(self, scenario: str, world_size: int, **arguments: Any) -> list[dict[str, Any]]:
        return self._run(scenario, world_size, environment=[self.environment] * world_size, **arguments)

    def log(self, rank: int) -> list[str]:
        """A rank's calls of NCCL on communicators."""
        return (self.exchange / f"log.{rank}").read_text().splitlines()


@pytest.fixture
def ranks(run_ranks: RunRanks, stand_ins: Path, tmp_path: Path) -> Ranks:
    return Ranks(run_ranks, stand_ins, tmp_path)


def results(answers: list[dict[str, Any]]) -> list[Any]:
    for answer in answers:
        assert "error" not in answer, answer
    return [answer["result"] for answer in answers]


def assert_blamed(answer: dict[str, Any], ranks: list[int]) -> None:
    assert answer.get("error") == "CommunicationError", answer
    assert answer["ranks"] == ranks, answer
    for rank in ranks:
        assert f"rank {rank}" in answer["message"], answer


def test_every_collective_agrees_with_numpy(ranks: Ranks) -> None:
    assert all(results(ranks("cuda_collectives", 3, mesh=(3,), own_stream=False, warm=False)))


def test_collectives_of_two_axes_agree_with_numpy_and_split_communicators_once(ranks: Ranks) -> None:
    """For the same ranks there is one communicator, and all are freed."""
    assert all(results(ranks("cuda_collectives", 4, mesh=[2, 1, 2], own_stream=True, warm=True)))
    # Along the first axis the groups are ranks 0, 2 and 1, 3, along the last one 0, 1 and 2, 3. The axis of one device
    # makes no other groups, and the group of all ranks is the one that is split.
    firsts = {0: (0, 0), 1: (1, 0), 2: (0, 2), 3: (1, 2)}
    for rank, (first, last) in firsts.items():
        made = ["init 4", f"split {first}", f"split {last}"]
        assert ranks.log(rank) == [*made, *["finalize", "destroy"] * 3]


def test_a_collective_returns_before_it_is_over(ranks: Ranks) -> None:
    assert all(results(ranks("cuda_asynchronous", 2)))


def test_collectives_are_captured_into_a_graph(ranks: Ranks) -> None:
    # Each launch sums the values of ranks 0, 2 and of 1, 3 again: 4 and 6, then twice as much.
    sums = [8.0, 12.0, 8.0, 12.0]
    for rank, result in enumerate(results(ranks("cuda_graph", 4, launches=2))):
        assert result == [sums[rank], *sums, *[sums[rank]] * 4, sums[rank - 1]]


def test_collectives_that_are_only_started_run_beside_what_is_launched_and_are_captured(ranks: Ranks) -> None:
    for result in results(ranks("cuda_overlap", 2, launches=2)):
        assert result == [4, 8, 10, 20, 9, 9]


def test_a_capture_needs_what_was_started_to_be_waited_for(ranks: Ranks) -> None:
    assert results(ranks("cuda_overlap_unjoined", 2)) == [904, 904]


def test_a_group_that_was_not_warmed_up_is_not_captured(ranks: Ranks) -> None:
    for answer in ranks("cuda_capture_unprepared", 4):
        assert "group 2 has no communicator of NCCL's" in answer["message"]


@pytest.mark.parametrize(
    ("how", "when"),
    [
        ("dies", "warm"),
        ("late", "warm"),
        ("late", "cold"),
        pytest.param("dies", "warming", marks=pytest.mark.slow),
        ("late", "warming"),
    ],
)
def test_a_rank_that_does_not_come_is_named_and_the_others_abort(ranks: Ranks, how: str, when: str) -> None:
    answers = ranks("cuda_bad_rank", 4, mesh=[2, 2], how=how, who=1, when=when)
    assert answers[1]["exit"] == (-signal.SIGKILL if how == "dies" else 0)
    for rank in (0, 2, 3):
        assert_blamed(answers[rank], [1])
        if when == "warm":
            assert sorted(ranks.log(rank))[:3] == ["abort"] * 3
            assert "finalize" not in ranks.log(rank)


def test_an_exchange_of_wanted_rows_is_not_captured(ranks: Ranks) -> None:
    for answer in ranks("cuda_rows_captured", 2):
        assert "the host cannot read what a stream computes while it is captured" in answer["message"]


@pytest.mark.parametrize("how", [pytest.param("dies", marks=pytest.mark.slow), "late"])
def test_an_exchange_of_wanted_rows_that_waits_for_a_rank_names_it(ranks: Ranks, how: str) -> None:
    answers = ranks("cuda_rows_behind_a_bad_rank", 2, how=how, who=1)
    assert_blamed(answers[0], [1])


def test_an_asynchronous_error_aborts_and_is_reported(ranks: Ranks) -> None:
    # Warming up takes two operations.
    ranks.environment["FAKE_NCCL_ERROR_AT"] = "1:4"
    answers = ranks("cuda_error", 2)
    assert "remote process exited or there was a network error (the stand-in was told to fail)" in answers[1]["message"]
    for rank, answer in enumerate(answers):
        assert answer["error"] == "CommunicationError"
        assert ranks.log(rank) == ["init 2", "abort"]


def test_a_rank_that_calls_wrongly_is_named(ranks: Ranks) -> None:
    for rank, answer in enumerate(ranks("cuda_wrong_call", 2)):
        assert_blamed(answer, [1])
        assert ranks.log(rank) == ["init 2", "abort"]


def test_messages_of_a_group_do_not_wait_for_each_other(ranks: Ranks) -> None:
    assert results(ranks("cuda_grouped", 3, wrong=False)) == [[0, 2, 3], [1, 0, 3], [1, 2, 0]]


def test_a_refused_message_ends_its_group_on_all_ranks(ranks: Ranks) -> None:
    for answer in ranks("cuda_grouped", 3, wrong=True):
        assert_blamed(answer, [2])
        assert "unknown dtype 99" in answer["message"]


def test_a_library_that_is_missing_or_too_old_is_refused_with_what_to_install(ranks: Ranks) -> None:
    ranks.environment["FAKE_NCCL_VERSION"] = "21703"
    for answer in ranks("cuda_refused", 2):
        assert answer["error"] == "ConfigError"
        assert "is NCCL 2.17.3, but 2.18.0 or later is needed" in answer["message"]
        assert "pip install 'nvidia-nccl-cu12" in answer["message"]
    del ranks.environment["FAKE_NCCL_VERSION"]
    driver = ranks.environment[nccl.DRIVER_VARIABLE]
    ranks.environment[nccl.DRIVER_VARIABLE] = "libcuda.so.of-no-version"
    for answer in ranks("cuda_refused", 2):
        assert answer["error"] == "ConfigError"
        assert "is a CUDA driver installed?" in answer["message"]
    ranks.environment[nccl.LIBRARY_VARIABLE] = driver
    for answer in ranks("cuda_refused", 2):
        assert "has no function ncclGetVersion" in answer["message"]


def test_a_missing_package_is_refused_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not a file"):
        nccl.find_library({nccl.LIBRARY_VARIABLE: str(tmp_path / "libnccl.so.2")})
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "nvidia", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'nvidia-nccl-cu12>=2\.30'"):
        nccl.find_library({})
    (tmp_path / "nvidia/nccl/lib").mkdir(parents=True)
    (tmp_path / "nvidia/nccl/lib/libnccl.so.2").touch()
    assert nccl.find_library({}) == str(tmp_path / "nvidia/nccl/lib/libnccl.so.2")


def test_ranks_that_share_a_device_need_an_nccl_setting(ranks: Ranks) -> None:
    ranks.environment["FAKE_CUDA_DEVICES"] = "1"
    for answer in ranks("cuda_devices", 2):
        assert answer["error"] == "ConfigError"
        assert "ranks 0, 1 share CUDA devices" in answer["message"]
        assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in answer["message"]
    ranks.environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    assert results(ranks("cuda_devices", 2)) == [3.0, 3.0]
    ranks.environment["FAKE_NCCL_VERSION"] = "22907"
    assert "NCCL 2.30 or later" in ranks("cuda_devices", 2)[0]["message"]
    ranks.environment["FAKE_CUDA_DEVICES"] = "0"
    assert "no CUDA device" in ranks("cuda_devices", 2)[0]["message"]


_FRESH = """
from pathlib import Path
from hidet_dist import native
native.library()
maps = Path("/proc/self/maps").read_text()
assert "libhidet_dist" in maps
assert "libcuda" not in maps and "libnccl" not in maps, maps
try:
    native.cuda_device_count()
except ValueError as error:
    assert "not loaded" in str(error)
else:
    raise AssertionError("devices are counted without CUDA")
"""


def test_nothing_needs_cuda_before_a_transport_is_made() -> None:
    subprocess.run([sys.executable, "-c", _FRESH], check=True)  # this process may have loaded CUDA's libraries
    needed = subprocess.run(["readelf", "-d", str(native.library_path())], capture_output=True, text=True, check=True)
    assert "cuda" not in needed.stdout
    assert "nccl" not in needed.stdout


def test_collectives_are_put_on_the_stream_of_hidets_kernels() -> None:
    runtime = hidet_runtime()
    runtime.set_cuda_stream.argtypes = (ctypes.c_void_p,)
    uses_torch = runtime.get_use_torch_cuda_stream()
    runtime.use_torch_cuda_stream(False)
    try:
        runtime.set_cuda_stream(4096)
        assert native.StreamFunction(nccl.hidet_stream_function())() == 4096
    finally:
        runtime.set_cuda_stream(None)
        runtime.use_torch_cuda_stream(bool(uses_torch))


@pytest.mark.skipif(nccl.LIBRARY_VARIABLE not in os.environ, reason=f"{nccl.LIBRARY_VARIABLE} is not set")
def test_nccl_itself_has_what_is_used() -> None:
    library = ctypes.CDLL(nccl.find_library())
    source = (ROOT / "hidet_dist/src/nccl_library.cpp").read_text()
    names = [line.split('"')[1] for line in source.splitlines() if 'nccl.find("' in line]
    assert len(names) == 18
    for name in names:
        assert getattr(library, name)
    version = ctypes.c_int()
    assert library.ncclGetVersion(ctypes.byref(version)) == 0
    assert version.value >= 21800
