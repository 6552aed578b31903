"""The library that launches a graph: which buffers it gives to kernels, what it says about itself, and its errors."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path

import hidet
import pytest
from hidet.graph import FlowGraph, Tensor

from hidet_dist.compile.blocks import BlockOp, blocks_in_place
from hidet_dist.compile.launcher import Workspace, build_launcher

Kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2)
Kernel2 = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)
WORKSPACE = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    with hidet.option.context():
        hidet.option.cache_dir(str(tmp_path))
        yield tmp_path


def symbol(*shape: object) -> Tensor:
    return hidet.symbol(list(shape), "float32", "cpu")


class Launcher:
    """A launcher whose kernels record their arguments."""

    def __init__(self, graph: FlowGraph, inputs: list[Tensor], weights: list[Tensor], **sizes: int):
        self.calls: list[tuple[int, ...]] = []
        kernels = []
        for node in graph.nodes:
            kind = {2: Kernel, 3: Kernel2}[len(node.inputs) + len(node.outputs)]
            kernels.append(kind(lambda *addresses: self.calls.append(addresses)))
        self._kept = kernels
        table = [ctypes.cast(kernel, ctypes.c_void_p).value for kernel in kernels]
        self.table = (ctypes.c_void_p * len(table))(*table)
        workspace = Workspace(graph, inputs, weights, sizes)
        self.library = ctypes.CDLL(str(build_launcher(graph, workspace, list(range(len(kernels))), "")))
        self.library.hidet_init(len(weights), (ctypes.c_void_p * len(weights))(*range(7000, 7000 + len(weights))))
        self.library.hidet_set_workspace(0, ctypes.c_void_p(WORKSPACE))

    def launch(self, *addresses: int) -> list[tuple[int, ...]]:
        """Launch the graph; return the arguments of each kernel."""
        self.calls.clear()
        self.library.hidet_launch(*map(ctypes.c_void_p, addresses), self.table)
        return list(self.calls)

    def workspace(self) -> list[int]:
        sizes = (ctypes.c_int64 * 3)()
        self.library.hidet_get_workspace_size(sizes)
        return list(sizes)


def test_kernels_get_inputs_weights_outputs_and_places_in_the_workspace():
    x, w = symbol(32), symbol(32)
    graph = hidet.trace_from(hidet.ops.exp(hidet.ops.relu(x + w)), [x, w])
    launcher = Launcher(graph, [x], [w])
    assert launcher.launch(100, 200) == [
        (100, 7000, WORKSPACE),
        (WORKSPACE, WORKSPACE + 128),
        (WORKSPACE + 128, 200),
    ]
    assert launcher.workspace() == [256, 0, 0]
    assert graph.inputs == [x, w]


def test_a_buffer_with_two_names_is_kept_until_its_last_reader():
    """relu -> reshape, read by two: what is computed between the readers must not overwrite it."""
    x = symbol(8, 8)
    view = hidet.ops.reshape(hidet.ops.relu(x), [64])
    first = hidet.ops.exp(view)
    graph = hidet.trace_from([hidet.ops.tanh(hidet.ops.exp(first)) + view], [x])
    calls = Launcher(graph, [x], []).launch(100, 200)
    place = calls[0][-1]
    readers = [number for number, call in enumerate(calls) if place in call[:-1]]
    writers = [number for number, call in enumerate(calls) if call[-1] == place and number > 1]
    assert len(readers) >= 3
    assert all(writer > readers[-1] for writer in writers)


def test_an_output_that_renames_a_buffer_is_computed_in_place():
    x = symbol(8, 8)
    graph = hidet.trace_from(hidet.ops.reshape(hidet.ops.relu(x), [64]), [x])
    launcher = Launcher(graph, [x], [])
    assert launcher.launch(100, 200) == [(100, 200), (200, 200)]
    assert launcher.workspace() == [0, 0, 0]


def test_sizes_follow_symbolic_dims_between_calls():
    x = symbol("rows", 32)
    graph = hidet.trace_from(hidet.ops.exp(hidet.ops.relu(x)), [x])
    launcher = Launcher(graph, [x], [], rows=2)
    dims = (ctypes.c_int32 * 2)()
    for rows in (2, 5, 2):
        hidet.ffi.runtime_api.set_symbol_value("rows", rows)
        assert launcher.workspace() == [rows * 128, 0, 0]
        launcher.library.hidet_get_output_shape(0, dims)
        assert list(dims) == [rows, 32]


def test_it_returns_its_description_and_is_built_once(cache: Path):
    x = symbol(3)
    graph = hidet.trace_from(hidet.ops.relu(x), [x])
    said = json.dumps({"empty": {}, "text": 'a"\\ \n{}??/' * 1000})
    workspace = Workspace(graph, [x], [])
    path = build_launcher(graph, workspace, [0], said)
    library, text = ctypes.CDLL(str(path)), ctypes.c_char_p()
    library.hidet_describe(ctypes.byref(text))
    assert text.value == said.encode()
    before = path.stat()
    assert build_launcher(graph, workspace, [0], said) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert build_launcher(graph, workspace, [0], "other") != path


def test_a_slice_that_is_a_block_of_memory_is_read_in_place():
    x, w = symbol(3, 4, 8), symbol(2, 8)
    whole = hidet.ops.relu(x)
    inner = hidet.ops.exp(whole[1:2, 2:4])  # 64 bytes into the second of three
    outer = hidet.ops.tanh(w[1:2])  # an input
    apart = hidet.ops.exp(whole[:, 1:2])  # no block
    output = whole[2:3]  # an output: a copy
    graph = blocks_in_place(hidet.trace_from([inner, outer, apart, output, hidet.ops.exp(whole)], [x, w]))
    blocks = [node for node in graph.nodes if isinstance(node, BlockOp)]
    assert sorted(node.start_bytes for node in blocks) == [32, 192]
    calls = Launcher(graph, [x, w], []).launch(100, 200, 301, 302, 303, 304, 305)
    assert (WORKSPACE + 192, 301) in calls
    assert (232, 302) in calls
    assert (WORKSPACE, 304) in calls


def test_a_block_that_wide_reads_cannot_start_at_is_copied():
    x = symbol(4, 6)  # rows of 24 bytes
    graph = hidet.trace_from([hidet.ops.exp(x[row : row + 1]) for row in range(4)], [x])
    for alignment, starts in ((1, [0, 24, 48, 72]), (16, [0, 48])):
        blocks = [node for node in blocks_in_place(graph, alignment).nodes if isinstance(node, BlockOp)]
        assert sorted(node.start_bytes for node in blocks) == starts


def test_a_block_of_a_block_starts_behind_both_starts():
    x = symbol(4, 4, 8)
    block = hidet.ops.reshape(x[2:4], [2, 32])
    graph = blocks_in_place(hidet.trace_from([hidet.ops.exp(block[1:2]), hidet.ops.tanh(block)], [x]))
    calls = Launcher(graph, [x], []).launch(1000, 201, 202)
    assert (1000 + 3 * 128, 201) in calls
    assert (1000 + 2 * 128, 202) in calls
