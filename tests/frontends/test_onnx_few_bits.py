"""ONNX's products by matrices of few bits, beside what their blocks mean; the bits stay as the file has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import hidet_dist
from hidet_dist.errors import TraceError, UnsupportedModelError
from hidet_dist.normalize import normalize
from hidet_dist.simulate import simulate
from hidet_dist.soundness.plans import evaluate_graph

TOKENS = 3


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers [..., count] as bytes, the first number of a byte in its lowest bits."""
    if bits == 8:
        return numbers.astype(np.uint8)
    numbers = np.concatenate([numbers, np.zeros((*numbers.shape[:-1], numbers.shape[-1] % 2), numbers.dtype)], -1)
    return (numbers[..., ::2] | numbers[..., 1::2] << 4).astype(np.uint8)


def model_of(
    rows: int, columns: int, bits: int = 4, block: int = 16, zeros: bool = False, dtype: str = "float32", **more: Any
) -> tuple[onnx.ModelProto, np.ndarray, np.ndarray]:
    """A model of one product with a bias, its matrix and the bias."""
    rng = np.random.default_rng(0)
    blocks = -(-columns // block)
    numbers = rng.integers(0, 2**bits, (rows, blocks, block))
    points = rng.integers(0, 2**bits, (rows, blocks)) if zeros else np.full((rows, blocks), 2 ** (bits - 1))
    scales = (rng.random((rows, blocks)) / 2**bits).astype(np.float16)
    tensors = {
        "matrix": packed(numbers, bits),
        "scales": scales.reshape(-1).astype(dtype),
        "zeros": packed(points, bits).reshape(-1),
        "bias": rng.standard_normal(rows).astype(dtype),
    }
    inputs = ["x", "matrix", "scales", "zeros" if zeros else "", "", "bias"]
    attributes = {"N": rows, "K": columns, "bits": bits, "block_size": block, **more}
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [helper.make_node("MatMulNBits", inputs, ["y"], domain="com.microsoft", **attributes)],
        "few_bits",
        [helper.make_tensor_value_info("x", kind, [TOKENS, columns])],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(value, name) for name, value in tensors.items() if name in inputs],
    )
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    values = ((numbers - points[..., None]) * scales.astype(np.float64)[..., None]).reshape(rows, -1)[:, :columns]
    return helper.make_model(graph, opset_imports=domains), values, tensors["bias"]


@pytest.mark.parametrize(
    "case",
    [
        {"rows": 64, "columns": 96},
        {"rows": 64, "columns": 96, "zeros": True},
        {"rows": 64, "columns": 80, "block": 32, "zeros": True},  # the last block is half empty
        {"rows": 64, "columns": 96, "bits": 8},
        {"rows": 48, "columns": 64, "bits": 8, "zeros": True, "block": 32},
        {"rows": 8, "columns": 32, "zeros": True},  # so small that its elements are known
        {"rows": 64, "columns": 96, "dtype": "float16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("external", [False, True])
def test_products_are_those_of_the_blocks(tmp_path: Path, case: dict[str, Any], external: bool) -> None:
    model, matrix, bias = model_of(**case)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=external, location="data", size_threshold=0)
    x = np.random.default_rng(1).standard_normal((TOKENS, case["columns"]))
    graph = normalize(hidet_dist.from_onnx(tmp_path / "model.onnx"))
    (found,) = evaluate_graph(graph, [x])
    tolerance = 1e-3 if case.get("dtype") == "float16" else 1e-5
    np.testing.assert_allclose(found, x @ matrix.T + bias, rtol=tolerance, atol=tolerance)


def test_the_bits_of_the_file_are_kept(tmp_path: Path) -> None:
    rows, columns = 64, 96
    model, matrix, bias = model_of(rows, columns, block=32, zeros=True)
    onnx.save(model, tmp_path / "model.onnx")
    graph = hidet_dist.from_onnx(tmp_path / "model.onnx")
    options = {"weights": {"precision": "stored"}}
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {**options, "pins": {"matrix": "(S0, R)"}})
    # Half the elements, of 4 bits and with scales and minimums, not of 4 bytes.
    assert plan.stages[0].weight_bytes_of(0) < rows * columns // 2
    program = hidet_dist.partition(graph, plan)
    x = np.random.default_rng(1).standard_normal((TOKENS, columns)).astype(np.float32)
    np.testing.assert_allclose(simulate(program, [x])[0], x @ matrix.T + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"bits": 2}, UnsupportedModelError, "a matrix of 2 bits is not supported"),
        ({"K": 48}, TraceError, "must have that of"),
        ({"N": 0}, TraceError, "is 0 by 96, in blocks of 16"),
    ],
)
def test_a_matrix_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, int], error: type[Exception], says: str
) -> None:
    model, *_ = model_of(64, 96)
    for attribute in model.graph.node[0].attribute:
        attribute.i = changes.get(attribute.name, attribute.i)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(error, match=says):
        hidet_dist.from_onnx(tmp_path / "model.onnx")
