"""A float32 graph in half precision: what changes, what must not, and that the answer is nearly the same."""

from collections import Counter

import hidet
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hidet_dist.normalize.precision import in_precision
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.testing import models
from hidet_dist.weights import SafetensorsFiles, source_of


def dtypes(graph, name):
    return Counter(node.outputs[0].dtype.name for node in graph.nodes if node.name == name)


def attention():
    """Softmax of masked scores, mixed; of the last row everything is masked."""
    rng = np.random.default_rng(0)
    q, k, v = (hidet.asarray(rng.standard_normal((8, 8)).astype(np.float32)) for _ in range(3))
    x = hidet.symbol([4, 8], "float32", "cpu")
    mask = hidet.symbol([4, 4], "float32", "cpu")
    scores = (x @ q) @ hidet.ops.transpose(x @ k, [1, 0]) + (1.0 - mask) * -1e9
    y = hidet.ops.softmax(scores, -1) @ (x @ v)
    inputs = [rng.standard_normal((4, 8)).astype(np.float32), np.tri(4, dtype=np.float32)]
    inputs[1][3] = 0
    return hidet.trace_from(y, [x, mask]), inputs


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [pytest.param("float16", 1e-2, marks=pytest.mark.slow), ("bfloat16", 8e-2)]
)
def test_the_answer_is_nearly_the_same(dtype, tolerance):
    graph, inputs = attention()
    half = in_precision(graph, dtype).graph
    assert dtypes(half, "Matmul") == {dtype: 5}
    assert {node.outputs[0].dtype.name for node in half.nodes if node.name in ("Exp", "ReduceSum")} == {"float32"}
    assert [x.dtype.name for x in (*half.inputs, *half.outputs)] == ["float32"] * 3
    (result,), (whole,) = models.run_whole(half, inputs), evaluate_graph(graph, inputs)
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result, whole, atol=tolerance * np.abs(whole).max())


def test_the_graph_itself_is_left_alone():
    graph, _ = attention()
    before = [(node.name, [str(x.signature()) for x in (*node.inputs, *node.outputs)]) for node in graph.nodes]
    in_precision(graph, "float16")
    graph.update_nodes()
    assert [(n.name, [str(x.signature()) for x in (*n.inputs, *n.outputs)]) for n in graph.nodes] == before


def test_angles_of_positions_stay_exact():
    """A product of positions and frequencies: positions above 2048 are no numbers of float16."""
    graph, _ = models.llama(1)
    half = in_precision(graph, "float16").graph
    assert dtypes(graph, "Matmul")["float32"] - 1 == dtypes(half, "Matmul")["float16"]
    assert dtypes(half, "Matmul")["float32"] == 1
    assert set(dtypes(half, "Cos")) == set(dtypes(half, "Sin")) == {"float32"}


def test_weights_are_kept_in_half_precision_within_its_range():
    x = hidet.symbol([2, 3], "float32", "cpu")
    w = hidet.asarray(np.array([[1.0, 1e9], [-1e9, np.inf], [0.1, 0.0]], np.float32))
    half = in_precision(hidet.trace_from(x @ w, [x]), "float16")
    kept = half.weights[w].torch()
    limit = torch.finfo(torch.float16).max
    assert kept.dtype == torch.float16
    assert kept.tolist() == [[1.0, limit], [-limit, float("inf")], [float(np.float16(0.1)), 0.0]]


def test_named_weights_are_cast_as_they_are_read(tmp_path):
    save_file({"w": torch.arange(6.0).reshape(3, 2) * 1e5}, tmp_path / "w.safetensors")
    x = hidet.symbol([2, 3], "float32", "cpu")
    w = hidet.distributed.weight("w", [3, 2])
    half = in_precision(hidet.trace_from(x @ w, [x]), "bfloat16")
    kept = half.weights[w]
    assert kept.dtype.name == "bfloat16"
    source = source_of(kept, SafetensorsFiles.open(tmp_path / "w.safetensors"))
    read = source.read([slice(1, 3), slice(0, 1)])
    assert read.dtype == torch.bfloat16
    assert torch.equal(read, (torch.tensor([[2.0], [4.0]]) * 1e5).to(torch.bfloat16))


def test_scalars_beyond_the_dtype_are_used_in_float32():
    x = hidet.symbol([2, 2], "float32", "cpu")
    w = hidet.randn([2, 2])
    for scalar, dtype in ((3.0, "float16"), (1e-9, "float32"), (1e6, "float32")):
        half = in_precision(hidet.trace_from(x @ w + scalar, [x]), "float16").graph
        assert dtypes(half, "AddScalar") == {dtype: 1}


def test_scales_of_norms_are_not_cast_in_every_run():
    """A vector that is read in both dtypes is kept in half precision all the same."""
    x = hidet.symbol([4, 8], "float32", "cpu")
    scale, bias = (hidet.distributed.weight(name, [8]) for name in ("scale", "bias"))
    y = hidet.ops.layer_norm(x @ hidet.randn([8, 8])) * scale + bias
    graph = hidet.trace_from(y @ hidet.randn([8, 8]) + bias, [x])
    half = in_precision(graph, "float16")
    assert scale not in half.weights
    assert half.weights[bias].dtype.name == "float16"
    read = {x for node in half.graph.nodes if node.name == "Cast" for x in node.inputs if len(x.shape) == 1}
    assert read == {half.weights[bias]}
