"""ONNX models that are invalid, or whose values would not fit any memory: refused before anything is computed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import hidet_dist
from hidet_dist.errors import ConfigError, TraceError, UnsupportedModelError, WeightsError
from hidet_dist.frontends.onnx import nodes as onnx_nodes
from hidet_dist.soundness.plans import evaluate_graph

MATRIX = {"x": (2, 3)}
IMAGE = {"x": (1, 1, 2, 2)}


def node(operator: str, inputs: str = "x", outputs: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(","), outputs.split(","), **attributes)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[int | str]],
    known: dict[str, Any] | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Sequence[tuple[str, int]] = (("", 18),),
    element_type: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(name, element_type, shape) for name, shape in inputs.items()],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (known or {}).items()],
    )
    imports = [helper.make_opsetid(domain, version) for domain, version in domains]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions))


def read(tmp_path: Path, own: onnx.ModelProto) -> Any:
    (tmp_path / "model.onnx").write_bytes(own.SerializeToString())
    return hidet_dist.from_onnx(tmp_path / "model.onnx")


def scales(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def if_on(condition: Any, shape: Sequence[int] = ()) -> onnx.ModelProto:
    """A branch by a condition that is known, or by an input of this shape."""
    branches = {
        f"{name}_branch": helper.make_graph([node(operator, "x", name)], name, [], [onnx.ValueInfoProto(name=name)])
        for name, operator in (("then", "Neg"), ("else", "Exp"))
    }
    own = model([node("If", "c", **branches)], MATRIX, {} if condition is None else {"c": condition})
    if condition is None:
        own.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, shape))
    return own


def hiding() -> onnx.ModelProto:
    """A branch with an initializer of a name that the model uses for another one."""
    own = if_on(False)
    own.graph.node[0].attribute[0].g.initializer.append(numpy_helper.from_array(scales(3), "k"))
    own.graph.initializer.append(numpy_helper.from_array(scales(7), "k"))
    return own


INVALID: dict[str, tuple[onnx.ModelProto, str]] = {
    "perm out of range": (model([node("Transpose", perm=[0, 2])], MATRIX), "perm"),
    "perm repeated": (model([node("Transpose", perm=[0, 0])], MATRIX), "repeated"),
    "perm too short": (model([node("Transpose", perm=[0])], MATRIX), "by the standard"),
    "softmax": (model([node("Softmax", axis=5)], MATRIX), "axis"),
    "concat": (model([node("Concat", "x,x", axis=5)], MATRIX), "axis"),
    "gather": (model([node("Gather", "x,i", axis=5)], MATRIX, {"i": [0, 1]}), "axis"),
    "index": (model([node("Gather", "x,i")], MATRIX, {"i": 7}), "the index 7"),
    "indices": (model([node("Gather", "x,i")], MATRIX, {"i": [0, -3]}), "the index -3"),
    "gather elements": (model([node("GatherElements", "x,i", axis=5)], MATRIX, {"i": [[0]]}), "axis 5"),
    "layer norm": (model([node("LayerNormalization", "x,w", axis=4)], MATRIX, {"w": scales(1, 1, 1)}), "axis 4"),
    "running sum": (model([node("CumSum", "x,a")], MATRIX, {"a": 6}), "axis 6"),
    "norm": (model([node("LpNormalization", axis=-3)], MATRIX), "axis -3"),
    "reduction": (model([node("ReduceSum", "x,a")], MATRIX, {"a": [6]}), "axis"),
    "squeeze": (model([node("Squeeze", "x,a")], MATRIX, {"a": [1]}), "must be 1"),
    "unsqueeze": (model([node("Unsqueeze", "x,a")], MATRIX, {"a": [9]}), "axis"),
    "slice": (model([node("Slice", "x,a,b,c")], MATRIX, {"a": [0], "b": [1], "c": [7]}), "axis"),
    "negative count": (model([node("TopK", "x,k", "y,i")], MATRIX, {"k": [-1]}), "-1"),
    "large count": (model([node("TopK", "x,k", "y,i")], MATRIX, {"k": [9]}), "less than"),
    "negative repeats": (model([node("Tile", "x,r")], MATRIX, {"r": [-1, -1]}), "negative"),
    "negative parts": (model([node("Split", "x,s", "y,z")], {"x": (4, 3)}, {"s": [-1, 5]}), "-1"),
    "negative size": (model([node("Expand", "x,r")], {"x": (1,)}, {"r": [-3]}), "-3"),
    "negative scale": (model([node("Resize", "x,,s")], IMAGE, {"s": scales(1, 1, -2, 1)}), "scales"),
    "no scale": (model([node("Resize", "x,,s")], IMAGE, {"s": scales(1, 1, np.nan, 1)}), "scales"),
    "too many inputs": (model([node("Add", "x,x,x")], MATRIX), "input size 3"),
    "a name twice": (model([node("Relu"), node("Abs")], MATRIX), "SSA"),
    "an input twice": (model([node("Relu", "x", "x"), node("Abs")], MATRIX), "SSA"),
    "two versions": (model([node("Relu")], MATRIX, domains=[("", 18), ("", 17)]), "two versions"),
    "two names": (model([node("Relu")], MATRIX, domains=[("", 18), ("ai.onnx", 17)]), "two versions"),
    "two dtypes": (model([node("Add", "x,i")], MATRIX, {"i": [1]}), "inconsistent type"),
    "an unknown attribute": (model([node("Relu", to=1)], MATRIX), "attribute"),
    "group norm": (model([node("InstanceNormalization", "x,w,w")], IMAGE, {"w": scales(*[0] * 7)}), "by the standard"),
    "gather of coordinates": (model([node("GatherND", "x,i")], MATRIX, {"i": [1, 3]}), "the index 3"),
    "scatter of coordinates": (model([node("ScatterND", "x,i,x")], MATRIX, {"i": [[0], [-3]]}), "the index -3"),
    "scatter": (model([node("ScatterElements", "x,i,x", axis=1)], MATRIX, {"i": [[0, 1, 3]] * 2}), "the index 3"),
    "scales along an axis": (
        model([node("QuantizeLinear", "x,s", axis=-4)], {"x": (2, 3, 4)}, {"s": scales(*[1] * 4)}, domains=[("", 20)]),
        "axis -4",
    ),
    "blocks": (
        model(
            [node("QuantizeLinear", "x,s", axis=1, block_size=2)], MATRIX, {"s": np.ones((2, 3), "f")}, (), [("", 21)]
        ),
        r"the shape \[2, 2\]",
    ),
    "parts": (model([node("Split", "x", "y,z", num_outputs=3)], MATRIX), "3 parts has 2 outputs"),
    "bounds": (model([node("Clip", "x,a")], MATRIX, {"a": scales(0, 1, 2)}), "one number"),
    "an axis of two dims": (model([node("CumSum", "x,a")], MATRIX, {"a": [[1]]}), r"one number.*\[1, 1\]"),
    "conditions": (if_on([True, False]), "one number"),
    "conditions on data": (if_on(None, (2,)), "one number"),
    "a reduced axis twice": (model([node("ReduceSum", "x,a")], MATRIX, {"a": [1, -1]}), "twice"),
    "a squeezed axis twice": (model([node("Squeeze", "x,a")], {"x": (1, 2)}, {"a": [0, 0]}), "twice"),
    "groups": (model([node("Conv", "x,w", group=0)], IMAGE, {"w": np.ones((1, 1, 1, 1), "f")}), "group"),
    "a name within and around": (hiding(), "an initializer 'k'"),
    "a function for an operator": (
        model(
            [node("Relu")],
            MATRIX,
            functions=[
                helper.make_function("", "Relu", ["a"], ["b"], [node("Neg", "a", "b")], [helper.make_opsetid("", 18)])
            ],
        ),
        "a function 'Relu' in ONNX's own domain",
    ),
    "celu": (model([node("Celu", alpha=0.0)], MATRIX), "alpha is 0"),
    "order of a norm": (model([node("LpPool", p=0, kernel_shape=[2, 2])], IMAGE), "p is 0"),
    "order of all": (model([node("GlobalLpPool", p=0)], IMAGE), "p is 0"),
    "order of vectors": (model([node("LpNormalization", p=3)], MATRIX), "p is 3: it must be 1 or 2"),
    "depth": (model([node("DepthToSpace", blocksize=2)], {"x": (1, 6, 2, 2)}), "the depth of the input is 6"),
    "width": (model([node("SpaceToDepth", blocksize=2)], {"x": (1, 1, 2, 3)}), "the width of the input is 3"),
    "no elements": (model([node("Tile", "x,r")], MATRIX, {"r": [0, 1]}), "no elements"),
    "dims": (model([node("Reshape", "x,r")], {"x": (2,)}, {"r": [2] + [1] * 100}), "101 dims; at most 64"),
    "numbers of dims": (model([node("Reshape", "x,r")], {"x": (2,)}, {"r": [2] + [1] * 9999}), "10000 numbers for"),
    "dims of an input": (model([node("Relu")], {"x": (1,) * 10000}), "10000 dims; at most 64"),
    # What would not fit any memory.
    "input": (model([node("Relu")], {"x": (2**40, 2**40)}), "more than"),
    "product": (model([node("MatMul", "x,z")], {"x": (2**40, 1), "z": (1, 2**40)}), "more than"),
    "expand": (model([node("Expand", "x,r")], {"x": (1,)}, {"r": [2**40, 2**40]}), "more than"),
    "padding": (model([node("Pad", "x,p")], {"x": (3,)}, {"p": [0, 2**62]}), "more than"),
    "tile": (model([node("Tile", "x,r")], {"x": (3,)}, {"r": [2**62]}), "overflow"),
    "reshape": (model([node("Reshape", "x,r")], {"x": (2,)}, {"r": [2**62, 4]}), "overflow"),
    "nearest": (model([node("Resize", "x,,s")], IMAGE, {"s": scales(1, 1, 1e9, 1)}), "2000000000"),
    "linear": (model([node("Resize", "x,,s", mode="linear")], IMAGE, {"s": scales(1, 1, 1e38, 1)}), "coordinates"),
    "repeated edge": (model([node("Pad", "x,p", mode="edge")], {"x": (3,)}, {"p": [0, 2**40]}), "at most"),
    "known edge": (
        model([node("Pad", "c,p", "t", mode="edge"), node("Add", "x,t")], {"x": (1,)}, {"c": [1.0], "p": [0, 2**40]}),
        "at most",
    ),
    "classes": (
        model([node("OneHot", "x,d,v")], {"x": (2,)}, {"d": 2**40, "v": scales(0, 1)}, element_type=TensorProto.INT64),
        str(2**40),
    ),
    "backwards": (
        model([node("Slice", "x,a,b,c,d")], {"x": (2**40,)}, {"a": [-1], "b": [-(2**62)], "c": [0], "d": [-3]}),
        "indices",
    ),
    "sequence": (
        model(
            [node("LSTM", "x,w,r", hidden_size=1)], {"x": (2**30, 1, 1)}, dict.fromkeys("wr", np.zeros((1, 4, 1), "f"))
        ),
        "steps",
    ),
}


@pytest.mark.parametrize("name", list(INVALID))
def test_invalid_nodes_and_values_without_bounds_are_refused(tmp_path, name):
    own, message = INVALID[name]
    with pytest.raises(TraceError, match=message):
        read(tmp_path, own)


def declared(element_type: int, shape: Sequence[int | str] | None) -> onnx.ModelProto:
    own = model([node("Neg")], MATRIX)
    own.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", element_type, shape))
    return own


@pytest.mark.parametrize(
    ("element_type", "shape", "message"),
    [
        (TensorProto.INT64, None, "'y' is declared as int64, but is float32"),
        (TensorProto.STRING, None, "'y' is declared as .*STRING, but is float32"),
        (TensorProto.FLOAT, [2], r"'y' is declared as float32\[2\], but is float32\[2, 3\]"),
        (TensorProto.FLOAT, ["n", 4], r"'y' is declared as float32\['\?', 4\]"),
        (TensorProto.FLOAT, [2, 3], ""),
        (TensorProto.FLOAT, ["n", 3], ""),
        (TensorProto.UNDEFINED, None, ""),
    ],
)
def test_outputs_are_what_the_model_declares(tmp_path, element_type, shape, message):
    if not message:
        assert read(tmp_path, declared(element_type, shape)).outputs[0].shape == (2, 3)
        return
    with pytest.raises(TraceError, match=message):
        read(tmp_path, declared(element_type, shape))


def test_names_and_data_are_given_once(tmp_path):
    own = declared(TensorProto.FLOAT, [2, 3])
    own.graph.output.append(own.graph.output[0])
    with pytest.raises(TraceError, match="the output 'y' twice"):
        read(tmp_path, own)
    own = model([node("Add", "x,w")], MATRIX, {"w": scales(1, 2, 3)})
    own.graph.initializer[0].float_data.extend([1, 2, 3])
    with pytest.raises(WeightsError, match=r"'w' of .* in several fields: float_data, raw_data"):
        read(tmp_path, own)
    own = model([node("Add", "x,w")], MATRIX, {"w": scales(1, 2, 3)})
    own.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [1]))
    with pytest.raises(TraceError, match="the input 'w' is declared as"):
        read(tmp_path, own)


@pytest.mark.parametrize(
    ("operator", "names", "shapes"),
    [
        ("Add", "x,z", [["n", 3], ["m", 3]]),
        ("Where", "c,x,z", [["n", 3], ["m", 3]]),
        ("Less", "x,z", [["n", 3], [4, 3]]),
        ("MatMul", "x,z", [[3, "n"], ["m", 3]]),
        ("MatMul", "x,z", [["n", 3, 3], ["m", 3, 3]]),
        ("Concat", "x,z", [["n", 3], ["m", 3]]),
        ("LayerNormalization", "x,z", [[3, "n"], ["m"]]),
        ("GatherElements", "x,i", [["n", 3], ["m", 3]]),
    ],
)
def test_dims_of_two_names_are_not_taken_to_be_equal(tmp_path, operator, names, shapes):
    attributes = {"axis": 1} if operator in ("Concat", "GatherElements") else {}
    nodes = [
        node("Cast", "z", "i", to=TensorProto.INT64),
        node("Greater", "x,x", "c"),
        node(operator, names, **attributes),
    ]
    own = model(nodes, dict(zip("xz", shapes, strict=True)))
    symbols = {name: {"expected": 4} for shape in shapes for name in shape if isinstance(name, str)}
    with pytest.raises((TraceError, ConfigError), match=r"equal one name, or numbers|must be equal or known"):
        hidet_dist.make_plan(read(tmp_path, own), {"mesh_shape": [1]}, {"symbols": symbols})


# Of known values: each would have terabytes, or take forever, if it were computed while the model is read.
GROWING = {
    "Pad": ([node("Pad", "c,p", "t")], {"c": [1], "p": [0, 2**40]}),
    "Tile": ([node("Tile", "c,r", "t")], {"c": [1], "r": [2**40]}),
    "Add": ([node("Add", "a,b", "t")], {"a": np.ones((1000, 1, 1000), int), "b": np.ones((1000, 1), int)}),
    "MatMul": ([node("MatMul", "a,b", "t")], {"a": np.ones((1024, 1), int), "b": np.ones((1, 1025), int)}),
    "Einsum": ([node("Einsum", "a,a,a,a,a,a,a", "t", equation="a,b,c,d,e,f,g->abcd")], {"a": np.ones(1000, int)}),
    "Gather": ([node("Gather", "a,i", "t")], {"a": np.ones((2, 1000), int), "i": np.zeros((40, 40), int)}),
    "Concat": (
        [node("Concat", f"t{n},t{n}", f"t{n + 1}" if n < 40 else "t", axis=0) for n in range(41)],
        {"t0": np.ones(1000, int)},
    ),
}


@pytest.mark.parametrize("name", list(GROWING))
def test_known_values_that_grow_are_not_computed_while_a_model_is_read(tmp_path, name):
    nodes, known = GROWING[name]
    nodes = [*nodes, node("Shape", "t", "s"), node("ReduceProd", "s", "n", keepdims=0), node("Add", "x,n")]
    graph = read(tmp_path, model(nodes, {"x": (1,)}, known, element_type=TensorProto.INT64))
    assert graph.outputs[0].shape == (1,)


def test_many_inputs_of_a_node_are_joined_step_by_step_or_refused(tmp_path):
    many, x = 300, np.arange(2.0)
    graph = read(tmp_path, model([helper.make_node("Concat", ["x"] * many, ["y"], axis=0)], {"x": (2,)}))
    np.testing.assert_array_equal(evaluate_graph(graph, [x])[0], np.tile(x, many))
    assert max(len(operator.inputs) for operator in graph.nodes) < many / 2
    with pytest.raises(UnsupportedModelError, match="5000 inputs or outputs; at most"):
        read(tmp_path, model([helper.make_node("Concat", ["x"] * 5000, ["y"], axis=0)], {"x": (2,)}))


@pytest.mark.parametrize("operator", ["Add", "Mul"])
def test_sizes_that_double_in_each_step_are_refused(tmp_path, operator):
    nodes = [node("Shape", "x", "t0"), *(node(operator, f"t{n},t{n}", f"t{n + 1}") for n in range(60))]
    with pytest.raises(UnsupportedModelError, match="an expression of more than"):
        read(tmp_path, model([*nodes, node("Expand", "x,t60")], {"x": ("n",)}))


def test_a_mask_of_many_tokens_is_computed_in_the_graph(tmp_path):
    tokens = 2**22
    heads = {"num_heads": 1, "unidirectional": 1}
    own = model(
        [node("MultiHeadAttention", "x,x,x", domain="com.microsoft", **heads)],
        {"x": (1, tokens, 8)},
        domains=[("", 18), ("com.microsoft", 1)],
    )
    assert read(tmp_path, own).outputs[0].shape == (1, tokens, 8)


def functions(count: int, last: onnx.NodeProto) -> list[onnx.FunctionProto]:
    """Functions, each of which calls the next one twice."""
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    bodies = [
        [node(f"f{n + 1}", "x", "t", domain="own"), node(f"f{n + 1}", "t", "y", domain="own")] for n in range(count - 1)
    ]
    return [
        helper.make_function("own", f"f{n}", ["x"], ["y"], body, imports) for n, body in enumerate([*bodies, [last]])
    ]


def test_functions_are_inlined_within_bounds(tmp_path):
    def calling(own: Sequence[onnx.FunctionProto]) -> onnx.ModelProto:
        return model([node("f0", domain="own")], MATRIX, functions=own, domains=[("", 18), ("own", 1)])

    graph = read(tmp_path, calling(functions(4, node("Neg"))))
    x = np.ones((2, 3))
    np.testing.assert_array_equal(evaluate_graph(graph, [x])[0], x)  # eight times
    with pytest.raises(TraceError, match="functions inlined; at most"):
        read(tmp_path, calling(functions(40, node("Neg"))))
    with pytest.raises(TraceError, match=r"[Cc]ycle|circle"):
        read(tmp_path, calling(functions(3, node("f0", domain="own"))))
    with pytest.raises(UnsupportedModelError, match=r"own\.missing"):
        read(tmp_path, calling(functions(2, node("missing", domain="own"))))


def test_loops_in_loops_are_lowered_within_bounds(tmp_path, monkeypatch):
    def loop(depth: int) -> onnx.NodeProto:
        """A loop with other loops in it; the names of each body have its depth."""
        number, going, value = (f"{name}{depth}" for name in ("number", "going", "value"))
        inner = loop(depth - 1) if depth > 1 else node("Neg", value, "out1")
        body = helper.make_graph(
            [node("Identity", going, f"again{depth}"), inner],
            f"body{depth}",
            [
                helper.make_tensor_value_info(number, TensorProto.INT64, []),
                helper.make_tensor_value_info(going, TensorProto.BOOL, []),
                helper.make_tensor_value_info(value, TensorProto.FLOAT, [1]),
            ],
            [
                helper.make_tensor_value_info(f"again{depth}", TensorProto.BOOL, []),
                helper.make_tensor_value_info(f"out{depth}", TensorProto.FLOAT, [1]),
            ],
        )
        return node("Loop", f"count,yes,{'x' if depth == 3 else f'value{depth + 1}'}", f"out{depth + 1}", body=body)

    outer = loop(3)
    outer.output[0] = "y"
    own = model([outer], {"x": (1,)}, {"count": 20, "yes": True})
    monkeypatch.setattr("hidet_dist.frontends.onnx.model.MOST_NODES", 1000)
    with pytest.raises(TraceError, match="more than 1000 nodes"):
        read(tmp_path, own)
    own.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array(2), "count"))
    x = np.ones(1)
    np.testing.assert_array_equal(evaluate_graph(read(tmp_path, own), [x])[0], x)  # negated eight times


def loop_body(value: str, *nodes: onnx.NodeProto, going: str = "going") -> onnx.GraphProto:
    """A loop's body: the condition of the next iteration is ``going``, the value ``out`` is computed of ``value``."""
    return helper.make_graph(
        list(nodes),
        "body",
        [
            helper.make_tensor_value_info("number", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info(value, TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info(going, TensorProto.BOOL, []),
            helper.make_tensor_value_info("out", TensorProto.FLOAT, [1]),
        ],
    )


def negations(count: int, begin: str) -> list[onnx.NodeProto]:
    names = [begin, *(f"negated{number}" for number in range(1, count)), "out"]
    return [node("Neg", a, b) for a, b in itertools.pairwise(names)]


def scanning(count: int) -> onnx.NodeProto:
    body = helper.make_graph(
        negations(count, "row"),
        "body",
        [helper.make_tensor_value_info("row", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1])],
    )
    return node("Scan", "x", body=body, num_scan_inputs=1)


LONG_LOOPS: dict[str, tuple[Sequence[onnx.NodeProto], tuple[int, ...]]] = {
    "a stored number of iterations": (
        [node("Loop", "count,yes,x", body=loop_body("value", *negations(100, "value")))],
        (1,),
    ),
    "a computed number of iterations": (
        [
            node("Add", "count,count", "twice"),
            node("Loop", "twice,yes,x", body=loop_body("value", *negations(60, "value"))),
        ],
        (1,),
    ),
    "a loop in a branch of a known condition": (
        [
            node(
                "If",
                "yes",
                then_branch=helper.make_graph(
                    [node("Loop", "count,,x", "w", body=loop_body("value", *negations(100, "value")))],
                    "then",
                    [],
                    [helper.make_tensor_value_info("w", TensorProto.FLOAT, [1])],
                ),
                else_branch=helper.make_graph(
                    [node("Identity", "x", "v")],
                    "else",
                    [],
                    [helper.make_tensor_value_info("v", TensorProto.FLOAT, [1])],
                ),
            )
        ],
        (1,),
    ),
    "a condition that is always true": (
        [
            node(
                "Loop",
                "count,yes,x",
                body=loop_body(
                    "value",
                    helper.make_node("Constant", [], ["again"], value=numpy_helper.from_array(np.array(True))),
                    *negations(100, "value"),
                    going="again",
                ),
            )
        ],
        (1,),
    ),
    "a scan": ([scanning(100)], (20, 1)),
}


@pytest.mark.parametrize("kind", LONG_LOOPS)
def test_iterations_are_counted_before_any_is_lowered(tmp_path, monkeypatch, kind: str):
    nodes, shape = LONG_LOOPS[kind]
    lowered: list[str] = []

    def lowering_of(operator: str, domain: str) -> Any:
        lowered.append(operator)
        return onnx_nodes.lowering_of(operator, domain)

    own = model(nodes, {"x": shape}, {"count": 20, "yes": True})
    monkeypatch.setattr("hidet_dist.frontends.onnx.model.lowering_of", lowering_of)
    assert len(read(tmp_path, own).inputs) == 1
    assert lowered.count("Neg") >= 2000
    monkeypatch.setattr("hidet_dist.frontends.onnx.model.MOST_NODES", 1900)
    lowered.clear()
    with pytest.raises(TraceError, match="more than 1900 nodes in all of their steps"):
        read(tmp_path, own)
    assert "Neg" not in lowered


def test_a_loop_that_ends_by_a_known_condition_may_have_any_number_of_iterations(tmp_path):
    body = loop_body("value", node("Less", "number,last", "again"), node("Neg", "value", "out"), going="again")
    own = model([node("Loop", "count,yes,x", body=body)], {"x": (1,)}, {"count": 2**62, "yes": True, "last": 2})
    x = np.ones(1)
    np.testing.assert_array_equal(evaluate_graph(read(tmp_path, own), [x])[0], -x)  # negated three times


def test_a_loop_of_more_iterations_than_are_lowered_is_refused_at_once(tmp_path, monkeypatch):
    own = model(
        [node("Loop", "count,yes,x", body=loop_body("value", node("Neg", "value", "out")))],
        {"x": (1,)},
        {"count": 1025, "yes": True},
    )
    monkeypatch.setattr("hidet_dist.frontends.onnx.model._ModelLowerer._lower_subgraph", None)
    with pytest.raises(UnsupportedModelError, match="a loop of 1025 iterations is not supported"):
        read(tmp_path, own)


def test_values_that_are_computed_while_tracing_are_bounded(tmp_path, monkeypatch):
    """A loop of small nodes could compute a thousand large products, and keep their results."""
    square = node("Expand", "one,shape", "square")
    products = [node("MatMul", "square,square", f"product{number}") for number in range(10)]
    own = model([square, *products, node("Add", "x,product9")], {"x": (50, 50)}, {"one": scales(1), "shape": [50, 50]})
    x = np.zeros((50, 50))
    np.testing.assert_array_equal(evaluate_graph(read(tmp_path, own), [x])[0], x + 50)
    monkeypatch.setattr("hidet_dist.frontends.onnx.model.MOST_KNOWN_ELEMENTS", 9 * 50**3)
    with pytest.raises(TraceError, match="computes values that do not depend on its inputs from more than"):
        read(tmp_path, own)


def test_constants_that_operators_become_are_bounded_together(tmp_path, monkeypatch):
    """A node of some bytes becomes the numbers of all places of a dim."""
    places, count = 100, 6
    names = ["x", *(f"x{number}" for number in range(1, count)), "y"]
    own = model([node("Hardmax", a, b) for a, b in itertools.pairwise(names)], {"x": (2, places)})
    monkeypatch.setattr("hidet_dist.frontends.onnx.model.MOST_KNOWN_ELEMENTS", count * places)
    assert len(read(tmp_path, own).inputs) == 1
    monkeypatch.setattr("hidet_dist.frontends.onnx.model.MOST_KNOWN_ELEMENTS", count * places - 1)
    with pytest.raises(TraceError, match=f"need constants of more than {count * places - 1} elements together"):
        read(tmp_path, own)


def test_an_array_is_one_constant_however_many_nodes_read_it(tmp_path):
    sums = [node("Add", f"x{number or ''},big", f"x{number + 1}") for number in range(8)]
    own = model(
        [node("Expand", "one,shape", "big"), *sums, node("Neg", "x8")],
        {"x": (4, 8)},
        {"one": scales(1), "shape": [4, 8]},
    )
    graph = read(tmp_path, own)
    constants = {id(x) for op in graph.nodes for x in op.inputs if x.storage is not None}
    assert len(constants) == 1
