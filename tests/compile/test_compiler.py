"""g++ where it finds neither a path nor room for its files."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import hidet
import pytest

from hidet_dist.compile import compile_program
from hidet_dist.errors import CompileError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import Program, partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh


@pytest.fixture
def program(tmp_path) -> Iterator[Program]:
    """A program of one kernel that is not compiled yet."""
    with hidet.option.context():
        hidet.option.cache_dir(str(tmp_path))
        x = hidet.symbol([3, 5], "float32", "cpu")
        graph = normalize(hidet.trace_from(hidet.ops.exp(x), [x]))
        yield partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])


def test_programs_are_compiled_without_an_environment(program, monkeypatch):
    monkeypatch.delenv("PATH")
    assert compile_program(program).launcher.exists()


def test_a_full_disk_is_an_error_of_one_reason(program):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, limits[1]))
    try:
        with pytest.raises(
            CompileError, match=r"A kernel does not compile: .*File (size limit exceeded|too large)"
        ) as error:
            compile_program(program)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(str(error.value)) < 1000
