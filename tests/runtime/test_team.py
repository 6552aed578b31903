"""The number of threads of steps: all while they have the cores, and fewer beside others' work."""

import itertools
import subprocess
import sys

import pytest

from hidet_dist.runtime.team import ProcessorUse, Team


class Machine:
    """Cores that other processes want, or not, and a team that runs on them."""

    def __init__(self, threads: int, tells: bool = True):
        self.seconds = self.used = 0.0
        self.queued = {1: 5.0} if tells else {}
        self.counts: list[int] = []
        self.team = Team(
            threads, self.counts.append, lambda: ProcessorUse(self.used, dict(self.queued)), lambda: self.seconds
        )

    def run(self, seconds: float, cores: float, queued: float = 0.0) -> None:
        """Make a run of so many seconds, on so many cores, for so much of which threads queue."""
        begin = self.team.begin()
        self.seconds += seconds
        self.used += seconds * cores
        self.queued = {thread: since + seconds * queued for thread, since in self.queued.items()}
        self.team.end(begin)


def test_all_threads_stay_where_they_have_the_cores():
    machine = Machine(4)
    for _ in range(100):
        machine.run(0.05, cores=3.9, queued=0.1)
    assert machine.counts == []


def test_beside_others_there_are_as_many_as_cores():
    machine = Machine(8)
    for _ in range(3):
        machine.run(0.1, cores=5.2, queued=2.0)
    assert machine.counts == [5]
    for _ in range(3):
        machine.run(0.1, cores=4.9, queued=0.1)
    assert machine.team.count == 5
    for _ in range(3):
        machine.run(0.1, cores=5.4, queued=0.9)
    assert machine.team.count == 4  # at least one less


def test_one_thread_is_left_where_there_is_hardly_a_core():
    machine = Machine(2)
    machine.run(0.5, cores=0.2, queued=1.0)
    assert machine.team.count == 1


def test_all_are_tried_again_ever_more_rarely_while_the_cores_are_wanted():
    machine = Machine(2)
    tried: list[float] = []
    while machine.seconds < 200:
        before = len(machine.counts)
        machine.run(0.3, cores=1.0, queued=0.9)
        if machine.counts[before:][:1] == [2]:
            tried.append(machine.seconds)
    pauses = [after - before for before, after in itertools.pairwise(tried)]
    assert pauses == pytest.approx([2, 4, 8, 16, *[32] * (len(pauses) - 4)], abs=0.8)
    assert len(pauses) > 6


def test_all_come_back_when_the_others_end():
    machine = Machine(2)
    for _ in range(200):
        machine.run(0.3, cores=1.0, queued=0.9)
    for _ in range(200):
        machine.run(0.3, cores=1.9, queued=0.05)
    assert machine.team.count == 2
    # A next one that comes and goes takes a second, and not as long as those before.
    machine.run(0.3, cores=1.0, queued=0.9)
    assert machine.team.count == 1
    machine.run(1.1, cores=1.0)
    machine.run(0.3, cores=1.9)
    assert machine.team.count == 2


def test_time_between_runs_does_not_count():
    machine = Machine(2)
    for _ in range(10):
        machine.run(0.05, cores=1.0, queued=0.9)
        machine.seconds += 0.9
    assert machine.counts[0] == 1


@pytest.mark.parametrize(("threads", "tells"), [(1, True), (2, False)])
def test_nothing_is_cut_from_one_thread_or_where_the_system_does_not_tell(threads, tells):
    machine = Machine(threads, tells)
    for _ in range(20):
        machine.run(0.3, cores=0.1, queued=0.9)
    assert machine.counts == []


def test_a_thread_of_this_process_has_queued_for_some_time():
    usage = ProcessorUse.now()
    assert usage.seconds > 0
    assert all(seconds >= 0 for seconds in usage.queued.values())
    assert ProcessorUse.now().queued_since(usage) >= 0


_PROGRAM = """
import ctypes, sys
from hidet_dist.runtime.team import Team, ProcessorUse

library = ctypes.CDLL(sys.argv[1])
wanted = ProcessorUse(0.0, {1: 0.0})
team = Team.of_this_thread()
assert library.several() == 3
team._usage = lambda: wanted
begin = team.begin()
wanted = ProcessorUse(1.0, {1: 1e9})
team.end(begin - 1.0)
assert library.several() == 1
team._until = 0.0
team.begin()
assert library.several() == 3
"""


def test_kernels_run_on_the_threads_of_the_team(tmp_path):
    source, library = tmp_path / "several.c", tmp_path / "several.so"
    source.write_text(
        "int several(void) {\n  int n = 0;\n  #pragma omp parallel reduction(+:n)\n  n += 1;\n  return n;\n}\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-fopenmp", str(source), "-o", str(library)], check=True)
    environment = {"OMP_NUM_THREADS": "3", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", _PROGRAM, str(library)], check=True, timeout=120, env=environment)
