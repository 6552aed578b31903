"""What a build does while kernels compile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest
from hidet import ops

from hidet_dist.compile import compile_program
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import Program, partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh


@pytest.fixture
def empty_cache(tmp_path: Path) -> Iterator[None]:
    """A cache that no other test has put kernels in."""
    with hidet.option.context():
        hidet.option.cache_dir(str(tmp_path))
        yield


@pytest.fixture(scope="module")
def program() -> Program:
    x = hidet.symbol([4, 6], "float32", "cpu")
    y = ops.softmax(x @ hidet.asarray(np.ones((6, 8), np.float32)), 1)
    graph = normalize(hidet.trace_from(y, [x]))
    return partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])


@pytest.mark.usefixtures("empty_cache")
def test_weights_are_written_once_the_first_kernel_is_done(program: Program) -> None:
    events: list[Any] = []
    compiled = compile_program(program, advance=lambda: events.append("kernel"), meanwhile=events.append)
    kernels = len(compiled.kernels)
    assert kernels > 1
    layout = compiled.weight_layouts["w0"]
    assert events == ["kernel", {"w0": layout}, *["kernel"] * (kernels - 1)]
    # Now the cache has all kernels.
    events.clear()
    compile_program(program, advance=lambda: events.append("kernel"), meanwhile=events.append)
    assert events == [*["kernel"] * kernels, {"w0": layout}]


def test_an_error_of_the_writing_is_not_taken_for_one_of_a_compiler(program: Program) -> None:
    def fail(_: object) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match=r"^the disk is full$"):
        compile_program(program, meanwhile=fail)
