"""Products in half precision with an odd number of columns: padded weights, results that are cut, the same answers."""

import hidet
import numpy as np
import pytest
import torch
from hidet import ops
from safetensors.torch import save_file

from hidet_dist.errors import WeightsError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.normalize.columns import pad_columns
from hidet_dist.normalize.precision import in_precision
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.simulate import simulate
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import models, shapes
from hidet_dist.view import GraphView
from hidet_dist.weights import SafetensorsFiles, check_weights, source_of

VOCABULARY = 101


def weight(*shape, dtype="float16"):
    return hidet.asarray(np.random.default_rng(sum(shape)).integers(-3, 4, shape).astype(dtype))


def products(graph):
    return [[int(x) for x in op.outputs[0].shape] for op in graph.nodes if op.name == "Matmul"]


def head():
    """A product with a bias and something behind it."""
    x, w = hidet.symbol([2, 3, 40], "float16", "cpu"), weight(40, VOCABULARY)
    return normalize(hidet.trace_from((ops.matmul(x, w) + weight(VOCABULARY)) * 2.0, [x])), w


def test_columns_are_padded_and_cut_off():
    graph, w = head()
    padded = pad_columns(graph, 1)
    assert products(graph) == [[2, 3, VOCABULARY]]
    assert products(padded.graph) == [[2, 3, 104]]
    (old, new), *rest = padded.weights.items()
    assert (old, rest) == (w, [])
    values = new.numpy()
    kept, zeros = np.split(values, [VOCABULARY], axis=1)
    np.testing.assert_array_equal(kept, w.numpy())
    assert not zeros.any()
    x = np.random.default_rng(0).integers(-3, 4, (2, 3, 40)).astype(np.float16)
    (whole,), (own,) = models.run_whole(graph, [x]), models.run_whole(padded.graph, [x])
    np.testing.assert_array_equal(own, whole)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_each_shard_has_aligned_columns(devices):
    padded = pad_columns(head()[0], devices)
    ((*_, columns),) = products(padded.graph)
    assert VOCABULARY <= columns < VOCABULARY + 8 * devices
    assert columns % (8 * devices) == 0


def test_aligned_small_float32_or_shared_weights_are_not_padded():
    x = hidet.symbol([2, 40], "float16", "cpu")
    shared = hidet.distributed.weight("shared", [40, VOCABULARY], "float16")
    given = hidet.symbol([40, VOCABULARY], "float16", "cpu")
    cases = [
        (ops.matmul(x, weight(40, 104)), [x]),
        (ops.matmul(x, weight(40, 10)), [x]),
        (ops.matmul(x, shared) + ops.sum(shared, [0]), [x]),
        (ops.matmul(x, given), [x, given]),
        (ops.matmul_nt(x, weight(VOCABULARY, 40)), [x]),
    ]
    for y, inputs in cases:
        graph = normalize(hidet.trace_from(y, inputs))
        padded = pad_columns(graph, 1)
        assert not padded.weights
        assert products(padded.graph) == products(graph)
    z = hidet.symbol([2, 40], "float32", "cpu")
    single = normalize(hidet.trace_from(ops.matmul(z, weight(40, VOCABULARY, dtype="float32")), [z]))
    assert not pad_columns(single, 1).weights


def test_it_is_not_undone_and_done_once():
    """The cut of a product's columns would otherwise be carried back to its weight."""
    padded = pad_columns(head()[0], 1)
    again = pad_columns(padded.graph, 1)
    assert again.graph is padded.graph
    assert normalize(padded.graph) is padded.graph
    plan = search(padded.graph, builtin("dgx-h100", DeviceMesh((1,)))).plan
    program = partition_graph(padded.graph, plan.stages[0])
    assert products(program.graph) == [[2, 3, 104]]


def test_a_weight_in_a_file_is_read_as_far_as_it_goes(tmp_path):
    data = torch.randn(40, VOCABULARY)
    save_file({"head": data}, tmp_path / "model.safetensors")
    x = hidet.symbol([2, 40], "float32", "cpu")
    w = hidet.distributed.weight("head", [40, VOCABULARY])
    half = in_precision(hidet.trace_from(ops.matmul(x, w), [x]), "float16")
    ((_, padded),) = pad_columns(normalize(half.graph), 2).weights.items()
    files = SafetensorsFiles.open(tmp_path / "model.safetensors")
    source = source_of(padded, files)
    for rows, columns in ((slice(0, 40), slice(0, 112)), (slice(3, 5), slice(96, 104)), (slice(0, 1), slice(104, 112))):
        whole = torch.nn.functional.pad(data.half(), [0, 112 - VOCABULARY])
        assert torch.equal(source.read([rows, columns]), whole[rows, columns])
    check_weights([padded], files)
    save_file({"head": data.T.contiguous()}, tmp_path / "other.safetensors")
    with pytest.raises(WeightsError, match="head"):
        source_of(padded, SafetensorsFiles.open(tmp_path / "other.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "pins"), [(1, {}), (2, {"head": "(R, S0)"})])
def test_a_language_model_answers_the_same(devices, pins, tmp_path):
    config = shapes.GPTConfig(1, 32, 4, VOCABULARY, 1, 8, "float32")
    graph = shapes.gpt(config)
    weights = {name: torch.from_numpy(x) for name, x in shapes.random_weights(graph).items()}
    save_file(weights, tmp_path / "gpt.safetensors")
    files = SafetensorsFiles.open(tmp_path / "gpt.safetensors")
    half = normalize(in_precision(graph, "float16").graph)
    padded = pad_columns(half, devices).graph
    inputs = [np.arange(8, dtype=np.int32)[None], np.triu(np.full((1, 1, 8, 8), -1e9, np.float32), 1)]
    answers = []
    for own, count in ((half, 1), (padded, devices)):
        view = GraphView(own)
        assert (VOCABULARY in {view.shape(w)[-1] for w in view.weights}) == (own is half)
        plan = search(own, builtin("dgx-h100", DeviceMesh((count,))), pins=pins if own is padded else {}).plan
        answers += simulate(partition_graph(own, plan.stages[0], files), inputs)
    np.testing.assert_allclose(answers[1], answers[0], atol=2e-2)
    assert answers[1].shape == (1, 8, VOCABULARY)
