"""The threads of a rank: what the environment says, or a share of the host's cores."""

import os
import subprocess
import sys

import pytest

from hidet_dist.runtime.threads import wait_briefly


@pytest.fixture
def environment(monkeypatch):
    variables: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return variables


@pytest.mark.parametrize(("ranks", "threads"), [("2", "4"), ("3", "2"), ("16", "1"), ("1", None), (None, None)])
def test_the_ranks_of_a_host_share_its_cores(environment, ranks, threads):
    if ranks is not None:
        environment["LOCAL_WORLD_SIZE"] = ranks
    wait_briefly()
    assert environment.get("OMP_NUM_THREADS") == threads
    assert int(environment["GOMP_SPINCOUNT"]) > 0


def test_values_that_are_set_stay(environment):
    environment.update(LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="7", GOMP_SPINCOUNT="5")
    wait_briefly()
    assert (environment["OMP_NUM_THREADS"], environment["GOMP_SPINCOUNT"]) == ("7", "5")


def test_a_policy_of_waiting_that_is_set_stays(environment):
    environment["OMP_WAIT_POLICY"] = "passive"
    wait_briefly()
    assert "GOMP_SPINCOUNT" not in environment


_PROGRAM = """
import ctypes, os, sys, time
from hidet_dist.runtime.threads import end_threads

library = ctypes.CDLL(sys.argv[1])
before = len(os.listdir("/proc/self/task"))
for _ in range(2):
    assert library.several() == 3
    assert len(os.listdir("/proc/self/task")) == before + 2
    end_threads()
    limit = time.monotonic() + 60
    while len(os.listdir("/proc/self/task")) > before:
        assert time.monotonic() < limit
        time.sleep(0.01)
"""


def test_threads_of_kernels_end_and_start_again(tmp_path):
    source, library = tmp_path / "several.c", tmp_path / "several.so"
    source.write_text(
        "int several(void) {\n  int n = 0;\n  #pragma omp parallel num_threads(3) reduction(+:n)\n  n += 1;\n"
        "  return n;\n}\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-fopenmp", str(source), "-o", str(library)], check=True)
    subprocess.run([sys.executable, "-c", _PROGRAM, str(library)], check=True, timeout=120)
