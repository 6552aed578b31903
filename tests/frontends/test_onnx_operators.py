"""Operators of ONNX by opset, loops and branches, beside ONNX's reference evaluator or the standard's formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from tests.frontends.test_from_onnx import check, floats, made, run

import hidet_dist
from hidet_dist.errors import TraceError, UnsupportedModelError

X = floats(2, 3, 4, 5)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


SPECIAL = np.array([np.nan, np.inf, -np.inf, -0.0, 1.5, -2.5], np.float32)


@pytest.mark.parametrize(
    ("opset", "operator", "inputs", "weights", "attributes", "outputs"),
    [
        (9, "Slice", [X], [], {"starts": [1, -4], "ends": [9, -1], "axes": [0, 3]}, 1),
        (10, "Slice", [X], [ints(1), ints(9), ints(3), ints(2)], {}, 1),
        (9, "Clip", [X], [], {"min": -0.5, "max": 0.25}, 1),
        (10, "Pad", [X[0, 0]], [], {"pads": [1, 0, 0, 2], "value": 1.5}, 1),
        (9, "TopK", [X], [], {"k": 2, "axis": 2}, 2),
        (10, "TopK", [X], [ints(2)], {"axis": 3}, 2),
        (11, "Squeeze", [X[:1]], [], {"axes": [0]}, 1),
        (11, "Unsqueeze", [X], [], {"axes": [0, 4]}, 1),
        (11, "Split", [X], [], {"axis": 3, "split": [2, 3]}, 2),
        (12, "ReduceSum", [X], [], {"axes": [1, 2], "keepdims": 0}, 1),
        (9, "Dropout", [X], [], {"ratio": 0.5}, 1),
        (9, "Upsample", [X], [np.array([1, 1, 2, 3], np.float32)], {"mode": "nearest"}, 1),
        (12, "Einsum", [X[0, :, :3, :3]], [], {"equation": "iji"}, 1),
        (12, "Einsum", [X[0], floats(5, 2)], [], {"equation": "...ij,jk"}, 1),
        (12, "GatherND", [X, ints(2, 0, -1, 1).reshape(2, 2, 1)], [], {"batch_dims": 1}, 1),
        (13, "ArgMax", [np.round(X)], [], {"axis": 2, "select_last_index": 1}, 1),
        (13, "Hardmax", [np.round(X)], [], {"axis": 2}, 1),
        (13, "LRN", [X[:, :2]], [], {"size": 3, "alpha": 0.3, "bias": 1.5}, 1),
        (21, "MeanVarianceNormalization", [X], [], {}, 1),
        (13, "Shrink", [X], [], {"lambd": 0.4, "bias": 0.1}, 1),
        (18, "ScatterND", [X[0, 0], ints(1, -1, 1).reshape(3, 1), floats(3, 5)], [], {"reduction": "max"}, 1),
        (18, "ScatterElements", [X[0, 0], ints(1, 3, 3, 0).reshape(2, 2), floats(2, 2)], [], {"reduction": "min"}, 1),
        (18, "Resize", [X, np.zeros(0, np.float32)], [], {"mode": "cubic", "antialias": 1}, 1),
        (20, "GridSample", [X, floats(2, 3, 2, 2)], [], {"mode": "cubic", "padding_mode": "reflection"}, 1),
        (22, "LpPool", [X], [], {"kernel_shape": [2, 2], "strides": [2, 1], "pads": [1, 0, 0, 1], "p": 3}, 1),
        (22, "AveragePool", [X], [], {"kernel_shape": [2, 2], "dilations": [2, 1], "pads": [1, 0, 0, 1]}, 1),
        (22, "RNN", [X[0]], [floats(1, 6, 5), floats(1, 6, 6), floats(1, 12)], {"hidden_size": 6, "layout": 1}, 2),
        (24, "Swish", [X], [], {"alpha": 1.5}, 1),
        (13, "Sign", [SPECIAL], [], {}, 1),
        (22, "ThresholdedRelu", [SPECIAL], [], {"alpha": -1.0}, 1),
        (13, "Pow", [SPECIAL], [np.array(np.nan, np.float32)], {}, 1),
        (13, "Pow", [SPECIAL], [np.array(np.inf, np.float32)], {}, 1),
        (13, "Pow", [np.array([3, -2, 10])], [np.array([39, 63, 18])], {}, 1),
        (13, "Pow", [np.array([4, 9, 2**40])], [np.array([0.5, 1.5, 0.5], np.float32)], {}, 1),
        (13, "Pow", [np.array([4, 9, 2**40])], [np.array(0.5, np.float32)], {}, 1),
        (18, "Trilu", [X], [np.array(2**40)], {"upper": 1}, 1),
        (18, "Trilu", [X], [np.array(-(2**62))], {"upper": 0}, 1),
        (18, "ReduceMean", [ints(7, -2, -9, 1, 2, 2).reshape(2, 3)], [ints(1)], {"keepdims": 0}, 1),
        (18, "ReduceL1", [ints(7, -2, -9, 1, 2, 2).reshape(2, 3)], [ints(1)], {}, 1),
        (18, "ReduceL2", [ints(7, -2, -9, 1, 2, 2).reshape(2, 3)], [ints(1)], {}, 1),
        (13, "Concat", [X[0, 0]], [np.zeros((0, 5), np.float32)], {"axis": 0}, 1),
        (24, "TensorScatter", [X, floats(2, 3, 2, 5), ints(3, 1)], [], {"mode": "circular"}, 1),
    ],
)
def test_operators(tmp_path, opset, operator, inputs, weights, attributes, outputs):
    if operator == "Resize":  # its second input is a region that is not given
        inputs, weights, places = inputs[:1], [np.array([1, 1, 0.6, 1.3], np.float32)], ["x0", "", "w0"]
    else:
        places = [*(f"x{n}" for n in range(len(inputs))), *(f"w{n}" for n in range(len(weights)))]
    if operator == "RNN":
        places.insert(4, "")
    node = helper.make_node(operator, places, [f"y{n}" for n in range(outputs)], **attributes)
    known = {f"w{n}": value for n, value in enumerate(weights)}
    given = {f"x{n}": value for n, value in enumerate(inputs)}
    check(tmp_path, made([node], given, [f"y{n}" for n in range(outputs)], known, opset=opset), given)


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax", "Hardmax"])
def test_dims_from_the_axis_on_are_one_before_opset_13(tmp_path, operator):
    path = tmp_path / "model.onnx"
    onnx.save(made([helper.make_node(operator, ["x"], ["y"])], {"x": X}, ["y"], opset=11), path)
    rows = X.reshape(2, -1).astype(np.float64)
    soft = np.exp(rows) / np.exp(rows).sum(1, keepdims=True)
    hard = np.arange(rows.shape[1]) == rows.argmax(1)[:, None]
    want = {"Softmax": soft, "LogSoftmax": np.log(soft), "Hardmax": hard}[operator].reshape(X.shape)
    np.testing.assert_allclose(run(path, {"x": X})["y"], want, atol=1e-9)


def test_a_reason_that_is_a_sentence_is_told_as_it_is(tmp_path):
    path = tmp_path / "model.onnx"
    node = helper.make_node("Pow", ["x", "power"], ["y"])
    onnx.save(made([node], {"x": ints(2, 3)}, ["y"], {"power": np.array(-1)}), path)
    with pytest.raises(TraceError, match=r"cannot be lowered: Integers have no power -1: convert the base"):
        hidet_dist.from_onnx(path)


def body(nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[str]) -> onnx.GraphProto:
    declared = [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in inputs]
    return helper.make_graph(nodes, "body", declared, [onnx.ValueInfoProto(name=name) for name in outputs])


FLOAT, INT, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL


def test_loops_of_known_length(tmp_path):
    step = body(
        [
            helper.make_node("Identity", ["yes"], ["on"]),
            helper.make_node("Cast", ["i"], ["number"], to=FLOAT),
            helper.make_node("Add", ["total", "number"], ["more"]),
            helper.make_node("Mul", ["more", "x"], ["out"]),
            helper.make_node("Identity", ["out"], ["scanned"]),
        ],
        [("i", INT, []), ("yes", BOOL, []), ("total", FLOAT, [2, 3])],
        ["on", "out", "scanned"],
    )
    x = floats(2, 3)
    node = helper.make_node("Loop", ["count", "going", "x"], ["last", "all"], body=step)
    path = tmp_path / "model.onnx"
    onnx.save(made([node], {"x": x}, ["last", "all"], {"count": np.array(3), "going": np.array(True)}), path)
    steps = [x * x]
    for number in (1, 2):
        steps.append((steps[-1] + number) * x)
    found = run(path, {"x": x})
    np.testing.assert_allclose(found["last"], steps[-1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["all"], np.stack(steps), rtol=1e-5, atol=1e-5)


def test_scans(tmp_path):
    step = body(
        [
            helper.make_node("Add", ["sum", "slice"], ["next"]),
            helper.make_node("Identity", ["next"], ["scanned"]),
        ],
        [("sum", FLOAT, [3]), ("slice", FLOAT, [3])],
        ["next", "scanned"],
    )
    inputs = {"first": floats(3), "x": floats(4, 3)}
    for direction in (0, 1):
        node = helper.make_node(
            "Scan", ["first", "x"], ["last", "all"], body=step, num_scan_inputs=1, scan_input_directions=[direction]
        )
        path = tmp_path / "model.onnx"
        onnx.save(made([node], inputs, ["last", "all"]), path)
        rows = inputs["x"][::-1] if direction else inputs["x"]
        want = inputs["first"] + np.cumsum(rows, 0)
        found = run(path, inputs)
        np.testing.assert_allclose(found["all"], want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found["last"], want[-1], rtol=1e-5, atol=1e-5)


def test_branches_on_data(tmp_path):
    def branches(other: list[onnx.NodeProto], shape: list[int]) -> onnx.ModelProto:
        then = body([helper.make_node("Neg", ["x"], ["a"])], [], ["a"])
        node = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=body(other, [], ["b"]))
        return made([node], {"c": ("bool", shape), "x": ("float32", [2, 3])}, ["y"])

    x = floats(2, 3)
    for condition in (np.array(False), np.array([[True]])):
        model = branches([helper.make_node("Exp", ["x"], ["b"])], list(condition.shape))
        check(tmp_path, model, {"c": condition, "x": x})
    path = tmp_path / "other.onnx"
    onnx.save(branches([helper.make_node("Transpose", ["x"], ["b"])], []), path)
    with pytest.raises(UnsupportedModelError, match="branches of an If on data"):
        hidet_dist.from_onnx(path)
