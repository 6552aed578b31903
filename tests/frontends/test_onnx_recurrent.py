"""Variants of ONNX's recurrent layers, sharded, beside the equations of the standard."""

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
from hidet_dist.rules.rule import RuleTable
from hidet_dist.soundness.plans import check_stage, evaluate_graph, random_stage
from hidet_dist.spec import DeviceMesh
from hidet_dist.view import GraphView

STEPS, BATCH, INPUTS, SIZE = 4, 2, 3, 4
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FUNCTIONS = {
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Tanh": np.tanh,
    "Relu": lambda x: np.maximum(x, 0),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Softplus": lambda x: np.log1p(np.exp(x)),
}
DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


def weights_of(operator: str, directions: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = GATES[operator] * SIZE
    shapes = {"w": (rows, INPUTS), "r": (rows, SIZE), "b": (2 * rows,)}
    shapes |= {"p": (3 * SIZE,)} if operator == "LSTM" else {}
    return {name: rng.standard_normal((directions, *shape)).astype(np.float32) for name, shape in shapes.items()}


def saved(path: Path, operator: str, weights: dict[str, np.ndarray], **attributes: Any) -> Path:
    inputs = ["x", "w", "r", "b", "", "", "", "p"] if "p" in weights else ["x", "w", "r", "b"]
    graph = helper.make_graph(
        [helper.make_node(operator, inputs, ["y"], hidden_size=SIZE, **attributes)],
        "recurrent",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [STEPS, BATCH, INPUTS])],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)]), path)
    return path


def expected(
    operator: str,
    x: np.ndarray,
    weights: dict[str, np.ndarray],
    clip: float = np.inf,
    input_forget: int = 0,
    linear_before_reset: int = 0,
    activations: list[str] | None = None,
) -> np.ndarray:
    """The equations of the standard, for one direction. As in ONNX Runtime, the clip is not for the LSTM's h(C)."""
    f, g, *more = (FUNCTIONS[name] for name in (activations or DEFAULTS[operator]) * 2)
    rows = GATES[operator] * SIZE
    weight, recurrence, (own, back) = weights["w"], weights["r"], np.split(weights["b"], 2)
    hidden, cell, outputs = np.zeros((BATCH, SIZE)), np.zeros((BATCH, SIZE)), []
    for step in x:
        entered, returned = step @ weight.T + own, hidden @ recurrence.T + back
        if operator == "RNN":
            hidden = f(np.clip(entered + returned, -clip, clip))
        elif operator == "GRU":
            z, r = np.split(f(np.clip((entered + returned)[:, : 2 * SIZE], -clip, clip)), 2, 1)
            of_state = r * returned[:, 2 * SIZE :]
            if not linear_before_reset:
                of_state = (r * hidden) @ recurrence[2 * SIZE :].T + back[2 * SIZE :]
            n = g(np.clip(entered[:, 2 * SIZE :] + of_state, -clip, clip))
            hidden = (1 - z) * n + z * hidden
        else:
            i, o, forget, new = np.split(entered + returned, GATES[operator], 1)
            peep = np.split(weights["p"], 3) if "p" in weights else np.zeros((3, SIZE))
            i = f(np.clip(i + peep[0] * cell, -clip, clip))
            forget = 1 - i if input_forget else f(np.clip(forget + peep[2] * cell, -clip, clip))
            cell = forget * cell + i * g(np.clip(new, -clip, clip))
            hidden = f(np.clip(o + peep[1] * cell, -clip, clip)) * more[0](cell)
        outputs.append(hidden)
    assert rows == weight.shape[0]
    return np.stack(outputs)


def computed(path: Path, x: np.ndarray) -> np.ndarray:
    """The output, of which random plans on two ranks compute the same."""
    graph = normalize(hidet_dist.from_onnx(path))
    view, mesh, rng = GraphView(graph), DeviceMesh((2,)), np.random.default_rng(0)
    inputs = [x.astype(np.float64)]
    whole = evaluate_graph(graph, inputs)
    table = RuleTable(mesh)
    for _ in range(2):
        assert check_stage(graph, random_stage(view, mesh, table, rng), inputs, whole, table) == ""
    return whole[0]


@pytest.mark.parametrize(
    ("operator", "options"),
    [
        ("LSTM", {}),
        ("LSTM", {"clip": 0.3, "input_forget": 1}),
        ("LSTM", {"clip": 0.5, "activations": ["Softsign", "Softplus", "Relu"]}),
        ("GRU", {"clip": 0.3}),
        ("GRU", {"clip": 0.3, "linear_before_reset": 1, "activations": ["Softsign", "Tanh"]}),
        ("RNN", {"clip": 0.3, "activations": ["Softsign"]}),
    ],
)
def test_variants_follow_the_standard(tmp_path: Path, operator: str, options: dict[str, Any]) -> None:
    weights = weights_of(operator)
    x = np.random.default_rng(1).standard_normal((STEPS, BATCH, INPUTS)).astype(np.float32)
    path = saved(tmp_path / "model.onnx", operator, weights, **options)
    want = expected(operator, x, {name: value[0].astype(np.float64) for name, value in weights.items()}, **options)
    np.testing.assert_allclose(computed(path, x)[:, 0], want, rtol=1e-5, atol=1e-6)


def test_each_direction_has_its_own_variant(tmp_path: Path) -> None:
    weights = weights_of("LSTM", 2)
    x = np.random.default_rng(1).standard_normal((STEPS, BATCH, INPUTS)).astype(np.float32)
    names = [["Sigmoid", "Tanh", "Tanh"], ["Softsign", "Relu", "Tanh"]]
    path = saved(
        tmp_path / "model.onnx", "LSTM", weights, direction="bidirectional", activations=names[0] + names[1], clip=0.4
    )
    y = computed(path, x)
    for direction, order in enumerate((1, -1)):
        own = {name: value[direction].astype(np.float64) for name, value in weights.items()}
        want = expected("LSTM", x[::order], own, clip=0.4, activations=names[direction])[::order]
        np.testing.assert_allclose(y[:, direction], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"clip": -1.0}, TraceError, "the clip of a recurrent layer is a magnitude, not -1.0"),
        ({"activations": ["Sigmoid"]}, TraceError, "a recurrent layer with 3 activations has 1"),
        ({"activations": ["Affine", "Tanh", "Tanh"]}, UnsupportedModelError, "with the activations .'Affine'"),
    ],
)
def test_a_variant_that_is_no_layer_is_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    path = saved(tmp_path / "model.onnx", "LSTM", weights_of("LSTM"), **options)
    with pytest.raises(error, match=says):
        hidet_dist.from_onnx(path)
