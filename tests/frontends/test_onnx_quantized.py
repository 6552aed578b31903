"""Quantized ONNX models, sharded in the simulator, beside ONNX's reference evaluator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import hidet_dist
from hidet_dist.errors import InfeasibleError
from hidet_dist.simulate import simulate
from hidet_dist.soundness.plans import evaluate_program

RNG = np.random.default_rng(0)


def integers(dtype: str, *shape: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max + 1, shape).astype(dtype)


def model(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], shape: list[int]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "quantized",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


def check(path: Path, own: onnx.ModelProto, x: np.ndarray, atol: float, compiled: bool) -> None:
    """Two ranks, neither of which may hold all weights, compute what the reference evaluator does."""
    onnx.save(own, path)
    graph = hidet_dist.from_onnx(path)
    with pytest.raises(InfeasibleError) as refused:
        hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"mem_budget": 1})
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"mem_budget": refused.value.least_budget})
    assert any(weight.spec.mesh_axes for weight in plan.stages[0].weights)
    (want,) = ReferenceEvaluator(own).run(None, {"x": x})
    program = hidet_dist.partition(graph, plan)
    (output,) = plan.stages[0].outputs
    for rank, (y,) in enumerate(evaluate_program(program, [x.astype(np.float64)])):
        piece = output.spec.slices(output.shape, program.mesh, program.mesh.coordinate(rank))
        np.testing.assert_allclose(y, want[piece], atol=atol, rtol=1e-5)
    if compiled:
        (got,) = simulate(program, [x])
        np.testing.assert_allclose(got, want, atol=atol, rtol=1e-5)
    assert np.std(want) > 10 * atol


def test_dynamic_quantization(tmp_path):
    weights = {
        "w": integers("int8", 64, 96),
        "w_scale": np.abs(RNG.standard_normal(96)).astype(np.float32) / 64,
        "w_zero": np.zeros(96, np.int8),
    }
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "zero", "w_zero"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["float"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["scale", "w_scale"], ["both"]),
        helper.make_node("Mul", ["float", "both"], ["y"]),
    ]
    x = RNG.standard_normal((4, 64)).astype(np.float32)
    check(tmp_path / "model.onnx", model(nodes, weights, [4, 64]), x, 1e-3, compiled=True)


def test_static_quantization(tmp_path):
    weights = {
        "x_scale": np.array(0.0173, np.float32),
        "x_zero": np.array(117, np.uint8),
        "w": integers("int8", 16, 8, 3, 3),
        "w_scale": RNG.uniform(0.001, 0.01, 16).astype(np.float32),
        "w_zero": np.zeros(16, np.int8),
        "bias": RNG.integers(-3000, 3000, 16).astype(np.int32),
        "z_scale": np.array(0.05, np.float32),
        "z_zero": np.array(3, np.uint8),
        "v": integers("int8", 16, 32),
        "v_scale": np.array(0.003, np.float32),
        "v_zero": np.array(-2, np.int8),
        "axes": np.array([2, 3]),
        "u": integers("int8", 32, 16),
        "u_scale": RNG.uniform(0.001, 0.01, [4, 16]).astype(np.float32),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["q"]),
        helper.make_node(
            "QLinearConv",
            ["q", "x_scale", "x_zero", "w", "w_scale", "w_zero", "z_scale", "z_zero", "bias"],
            ["conv"],
            pads=[0, 1, 1, 0],
            strides=[2, 1],
        ),
        helper.make_node("DequantizeLinear", ["conv", "z_scale", "z_zero"], ["image"]),
        helper.make_node("ReduceMean", ["image", "axes"], ["mean"], keepdims=0),
        helper.make_node("QuantizeLinear", ["mean", "x_scale", "x_zero"], ["row"]),
        helper.make_node(
            "QLinearMatMul", ["row", "x_scale", "x_zero", "v", "v_scale", "v_zero", "z_scale", "z_zero"], ["product"]
        ),
        helper.make_node("DequantizeLinear", ["product", "z_scale", "z_zero"], ["hidden"]),
        helper.make_node("DequantizeLinear", ["u", "u_scale"], ["wide"], axis=0, block_size=8),
        helper.make_node("MatMul", ["hidden", "wide"], ["y"]),
    ]
    x = RNG.standard_normal((2, 8, 7, 6)).astype(np.float32)
    check(tmp_path / "model.onnx", model(nodes, weights, [2, 8, 7, 6]), x, 1e-3, compiled=False)
