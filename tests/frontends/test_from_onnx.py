"""ONNX models as graphs, beside ONNX's reference evaluator and PyTorch."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hidet.ir.expr import SymbolVar
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import hidet_dist
from hidet_dist.errors import ConfigError, TraceError, UnsupportedModelError, WeightsError
from hidet_dist.frontends.load import load_model
from hidet_dist.soundness.plans import evaluate_graph, evaluate_program
from hidet_dist.spec.interface import interface_of
from hidet_dist.weights import is_weight, names_of, source_of

RNG = np.random.default_rng(0)
KINDS = {
    "float32": onnx.TensorProto.FLOAT,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "int64": onnx.TensorProto.INT64,
    "bool": onnx.TensorProto.BOOL,
}


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def made(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, Any],
    outputs: list[str],
    initializers: dict[str, np.ndarray] | None = None,
    opset: int = 18,
) -> onnx.ModelProto:
    """A model; an input is an array, or a pair of its dtype and its shape, which may have named dims."""
    described = {
        name: value if isinstance(value, tuple) else (value.dtype.name, value.shape) for name, value in inputs.items()
    }
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, KINDS[kind], shape) for name, (kind, shape) in described.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in (initializers or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def run(path: Path, inputs: dict[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    graph = hidet_dist.from_onnx(path, **options)
    interface = interface_of(graph)
    assert interface is not None
    assert list(interface.input_names) == list(inputs)
    wide = [value.astype(np.float64) if value.dtype.kind == "f" else value for value in inputs.values()]
    for own, placeholder in zip(wide, graph.inputs, strict=True):
        assert len(own.shape) == len(placeholder.shape)
    results: dict[str, np.ndarray] = interface.nest(evaluate_graph(graph, wide))
    return results


def check(tmp_path: Path, model: onnx.ModelProto, inputs: dict[str, np.ndarray], **options: Any) -> None:
    """The graph computes what ONNX's reference evaluator does."""
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    found = run(path, inputs, **options)
    for name, want in zip(found, ReferenceEvaluator(model).run(None, inputs), strict=True):
        assert found[name].shape == np.shape(want)
        np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-5)


def test_weights_stay_in_the_file_of_the_model(tmp_path):
    weight, bias = floats(6, 4), floats(4)
    model = made(
        [helper.make_node("MatMul", ["x", "w"], ["t"]), helper.make_node("Add", ["t", "b"], ["y"])],
        {"x": ("float32", [3, 6])},
        ["y"],
        {"w": weight, "b": bias},
    )
    x = floats(3, 6)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    graph = hidet_dist.from_onnx(path)
    named = names_of({x for op in graph.nodes for x in op.inputs})
    assert set(named) == {"w", "b"}
    for name, want in (("w", weight), ("b", bias)):
        source = source_of(named[name])
        assert named[name].storage is None
        region = [slice(1, size) for size in want.shape]
        np.testing.assert_array_equal(source.read(region).numpy(), want[tuple(region)])
    text = path.read_bytes()
    path.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
    with pytest.raises(WeightsError, match="has changed"):
        source_of(named["w"]).read([slice(0, 6), slice(0, 4)])
    path.write_bytes(text)
    assert x.shape == (3, 6)


def external(tmp_path: Path) -> tuple[Path, np.ndarray]:
    weight = floats(40, 30)
    model = made([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": ("float32", [2, 40])}, ["y"], {"w": weight})
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path, weight


def test_external_data_is_read_in_place(tmp_path):
    path, weight = external(tmp_path)
    graph = hidet_dist.from_onnx(path)
    (own,) = (x for op in graph.nodes for x in op.inputs if is_weight(x))
    part = source_of(own).read([slice(3, 5), slice(0, 30)])
    np.testing.assert_array_equal(part.numpy(), weight[3:5])


@pytest.mark.parametrize("place", ["raw", "numbers", "external"])
def test_bfloat16_is_read_wherever_it_is(tmp_path, place):
    bfloat16 = helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)
    known = {"w": floats(6, 4).astype(bfloat16), "half": np.array(0.5, bfloat16)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["t"]), helper.make_node("Mul", ["t", "half"], ["y"])]
    model = made(nodes, {"x": ("bfloat16", [2, 6])}, ["y"], known)
    if place == "numbers":
        del model.graph.initializer[:]
        model.graph.initializer.extend(
            helper.make_tensor(name, onnx.TensorProto.BFLOAT16, value.shape, value.astype(np.float32).reshape(-1))
            for name, value in known.items()
        )
    options = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    onnx.save(model, tmp_path / "model.onnx", **(options if place == "external" else {}))
    x = floats(2, 6)
    found = run(tmp_path / "model.onnx", {"x": x})["y"]
    np.testing.assert_allclose(found, x.astype(np.float64) @ known["w"].astype(np.float64) * 0.5)


@pytest.mark.parametrize("how", ["Constant", "folded"])
def test_known_bfloat16_of_several_elements(tmp_path, how):
    """Small tensors of a model's Constant nodes are known while it is traced, and so is what is computed of them."""
    bfloat16 = helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)
    row = floats(6).astype(bfloat16)
    nodes = [helper.make_node("Constant", [], ["row"], value=numpy_helper.from_array(row))]
    if how == "folded":
        nodes.append(helper.make_node("Concat", ["row"], ["joined"], axis=0))
    nodes.append(helper.make_node("Add", ["x", "joined" if how == "folded" else "row"], ["y"]))
    onnx.save(made(nodes, {"x": ("bfloat16", [2, 6])}, ["y"]), tmp_path / "model.onnx")
    x = floats(2, 6)
    want = x.astype(np.float64) + row.astype(np.float64)
    np.testing.assert_allclose(run(tmp_path / "model.onnx", {"x": x})["y"], want)
    graph = hidet_dist.from_onnx(tmp_path / "model.onnx")
    program = hidet_dist.partition(graph, hidet_dist.make_plan(graph, {"mesh_shape": [1]}))
    np.testing.assert_allclose(evaluate_program(program, [x.astype(np.float64)])[0][0], want)


def changed(path: Path, key: str, value: str) -> None:
    model = onnx.load(path, load_external_data=False)
    entries = model.graph.initializer[0].external_data
    for entry in list(entries):
        if entry.key == key:
            entries.remove(entry)
    entries.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("location", "../weights.bin", "not a file in or below"),
        ("location", "/etc/passwd", "not a file in or below"),
        ("location", ".", "not a file in or below"),
        ("location", "missing.bin", "cannot be read"),
        ("offset", "4000", "but the model names"),
        ("offset", "-4", "but the model names"),
        ("length", "12", "but the model names"),
        ("offset", "much", "not a number"),
    ],
)
def test_external_data_that_is_not_where_it_should_be_is_refused(tmp_path, key, value, message):
    path, _ = external(tmp_path)
    changed(path, key, value)
    with pytest.raises(WeightsError, match=message):
        hidet_dist.from_onnx(path)


def test_external_data_that_is_placed_twice_is_refused(tmp_path):
    path, _ = external(tmp_path)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data.add(key="location", value="other.bin")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(WeightsError, match="names the 'location' of its data twice"):
        hidet_dist.from_onnx(path)


@pytest.mark.parametrize("kind", ["file", "folder", "hard"])
def test_external_data_behind_a_link_is_refused(tmp_path, kind):
    path, _ = external(tmp_path)
    (tmp_path / "outside").mkdir()
    elsewhere = (tmp_path / "weights.bin").rename(tmp_path / "outside" / "weights.bin")
    folder = tmp_path / "model"
    folder.mkdir()
    path = path.rename(folder / "model.onnx")
    if kind == "folder":
        (folder / "data").symlink_to(elsewhere.parent)
        changed(path, "location", "data/weights.bin")
    elif kind == "file":
        (folder / "weights.bin").symlink_to(elsewhere)
    else:
        (folder / "weights.bin").hardlink_to(elsewhere)
    with pytest.raises(WeightsError, match="link"):
        hidet_dist.from_onnx(path)


def test_external_data_of_a_constant_lies_beside_the_model(tmp_path, monkeypatch):
    weight = floats(40, 30)
    sizes = numpy_helper.from_array(np.array([30, 2]), "sizes")
    nodes = [
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(weight)),
        helper.make_node("Constant", [], ["sizes"], value=sizes),
        helper.make_node("MatMul", ["x", "w"], ["t"]),
        helper.make_node("Reshape", ["t", "sizes"], ["y"]),
    ]
    model = made(nodes, {"x": ("float32", [2, 40])}, ["y"])
    folder = tmp_path / "model" / "data"
    folder.mkdir(parents=True)
    (folder / "w.bin").write_bytes(weight.tobytes())
    (folder / "sizes.bin").write_bytes(np.array([30, 2]).tobytes())
    for node, name in zip(model.graph.node, ("w", "sizes"), strict=False):
        tensor = node.attribute[0].t
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=f"data/{name}.bin")
    (folder.parent / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "w.bin").write_bytes(bytes(weight.nbytes))  # of the same name in the current folder
    monkeypatch.chdir(tmp_path)
    x = floats(2, 40)
    found = run(folder.parent / "model.onnx", {"x": x})["y"]
    np.testing.assert_allclose(found, (x.astype(np.float64) @ weight).reshape(30, 2), rtol=1e-5)


def test_a_file_that_is_too_large_for_a_model_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "model.onnx").open("wb") as file:
        file.truncate(2**36)
    with pytest.raises(TraceError, match=f"it has {2**36} bytes"):
        hidet_dist.from_onnx(tmp_path / "model.onnx")


def test_a_model_is_built_and_served(tmp_path):
    weight, bias = floats(8, 6), floats(6)
    model = made(
        [helper.make_node("Gemm", ["x", "w", "b"], ["t"]), helper.make_node("Relu", ["t"], ["y"])],
        {"x": ("float32", [4, 8])},
        ["y"],
        {"w": weight, "b": bias},
    )
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    hidet_dist.auto_parallel(hidet_dist.from_onnx(path), {"mesh_shape": [1]}, {}, tmp_path / "built")
    x = floats(4, 8)
    with hidet_dist.load_partition(tmp_path / "built", 0) as served:
        found = served(x)
    found = next(iter(found.values())) if isinstance(found, dict) else found
    np.testing.assert_allclose(found, np.maximum(x @ weight + bias, 0), rtol=1e-5, atol=1e-5)


def test_named_dims_are_symbolic_unless_they_are_given(tmp_path):
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["batch"]),
        helper.make_node("Unsqueeze", ["batch", "axis"], ["b"]),
        helper.make_node("Concat", ["b", "rest"], ["to"], axis=0),
        helper.make_node("Reshape", ["x", "to"], ["y"]),
    ]
    known = {"zero": np.array(0), "axis": np.array([0]), "rest": np.array([6, 2])}
    model = made(nodes, {"x": ("float32", ["batch size", 3, 4])}, ["y"], known)
    x = floats(5, 3, 4)
    check(tmp_path, model, {"x": x})
    graph = hidet_dist.from_onnx(tmp_path / "model.onnx")
    assert isinstance(graph.inputs[0].shape[0], SymbolVar)
    assert graph.inputs[0].shape[0].name == "batch_size"
    check(tmp_path, model, {"x": x}, dims={"batch size": 5})
    assert hidet_dist.from_onnx(tmp_path / "model.onnx", {"batch size": 5}).outputs[0].shape == (5, 6, 2)
    assert hidet_dist.from_onnx(tmp_path / "model.onnx", {"batch_size": 5}).outputs[0].shape == (5, 6, 2)
    with pytest.raises(ConfigError, match="no dim 'seq'; it has batch size"):
        hidet_dist.from_onnx(tmp_path / "model.onnx", {"seq": 5})
    for size in (0, -1, 2.0, True, "5"):
        with pytest.raises(ConfigError, match="'batch size' must be a whole number"):
            hidet_dist.from_onnx(tmp_path / "model.onnx", {"batch size": size})


def test_dims_without_a_name_are_called_by_their_input(tmp_path):
    model = made([helper.make_node("Relu", ["x"], ["y"])], {"x": ("float32", [None, 3])}, ["y"])
    onnx.save(model, tmp_path / "model.onnx")
    assert hidet_dist.from_onnx(tmp_path / "model.onnx").inputs[0].shape[0].name == "x_0"
    assert hidet_dist.from_onnx(tmp_path / "model.onnx", {"x_0": 4}).inputs[0].shape == (4, 3)
    with pytest.raises(ConfigError, match="--dim x_0=1"):
        load_model(tmp_path / "model.onnx")
    assert load_model(tmp_path / "model.onnx", dims={"x_0": 4}).inputs[0].shape == (4, 3)


def test_all_that_is_not_supported_is_refused_at_once(tmp_path):
    nodes = [
        helper.make_node("NonZero", ["x"], ["n"], name="first"),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("Unique", ["x"], ["u"]),
        helper.make_node("Reshape", ["x", "u"], ["q"], name="by_data"),
        helper.make_node("MaxPool", ["x"], ["y", "places"], kernel_shape=[2, 2]),
    ]
    onnx.save(made(nodes, {"x": ("float32", [1, 1, 4, 4])}, ["y"]), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError) as error:
        hidet_dist.from_onnx(tmp_path / "model.onnx")
    found = {(call.operator, call.module) for call in error.value.missing}
    assert found == {("onnx.NonZero", "node 0 first"), ("onnx.Unique", "node 2"), ("onnx.MaxPool", "node 4")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.graph.node[0].input.__setitem__(0, "nothing"), "topologically sorted"),
        (lambda m: m.opset_import[0].__setattr__("version", 6), "opset 6"),
        (lambda m: m.opset_import[0].__setattr__("version", 99), "opset 99"),
        (lambda m: m.graph.ClearField("output"), "no outputs"),
        (lambda m: m.graph.input[0].type.tensor_type.ClearField("shape"), "number of dims"),
        (lambda m: m.graph.input[0].type.tensor_type.__setattr__("elem_type", 99), "element type 99"),
        (lambda m: m.graph.input[0].type.tensor_type.shape.dim[1].__setattr__("dim_value", 5), "Node 0"),
        (lambda m: m.graph.node[0].output.__setitem__(0, "z"), "not an output of any node"),
    ],
)
def test_malformed_models_are_refused(tmp_path, change, message):
    model = made(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": ("float32", [2, 6])}, ["y"], {"w": floats(6, 4)}
    )
    change(model)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(TraceError, match=message):
        hidet_dist.from_onnx(tmp_path / "model.onnx")


@pytest.mark.parametrize("data", [b"", b"\x00\x01\x02", b"not a model", b"\x3a\xff\xff\xff\xff\x0f"], ids=repr)
def test_files_that_are_no_models_are_refused(tmp_path, data):
    (tmp_path / "model.onnx").write_bytes(data)
    with pytest.raises(TraceError):
        hidet_dist.from_onnx(tmp_path / "model.onnx")
    with pytest.raises(TraceError, match="cannot be read"):
        hidet_dist.from_onnx(tmp_path / "missing.onnx")


def test_branches_of_a_known_condition(tmp_path):
    def branch(name: str, operator: str) -> onnx.GraphProto:
        node = helper.make_node(operator, ["x"], [f"{name}_out"])
        return helper.make_graph([node], name, [], [onnx.ValueInfoProto(name=f"{name}_out")])

    nodes = [
        helper.make_node("Size", ["s"], ["count"]),
        helper.make_node("Equal", ["count", "two"], ["flat"]),
        helper.make_node("If", ["flat"], ["y"], then_branch=branch("then", "Neg"), else_branch=branch("else", "Exp")),
    ]
    nodes.insert(0, helper.make_node("Shape", ["x"], ["s"]))
    model = made(nodes, {"x": ("float32", [2, 3])}, ["y"], {"two": np.array(2)})
    check(tmp_path, model, {"x": floats(2, 3)})


def test_subgraphs_beside_each_other_may_use_the_same_names(tmp_path):
    weights = [floats(4, 4), floats(4, 4)]

    def branch(weight: np.ndarray, operator: str) -> onnx.GraphProto:
        nodes = [helper.make_node("MatMul", ["x", "w"], ["t"]), helper.make_node(operator, ["t"], ["out"])]
        initializers = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array([1]), "unused")]
        return helper.make_graph(nodes, "branch", [], [onnx.ValueInfoProto(name="out")], initializers)

    nodes = [
        helper.make_node(
            "If", ["yes"], ["a"], then_branch=branch(weights[0], "Neg"), else_branch=branch(weights[1], "Exp")
        ),
        helper.make_node(
            "If", ["no"], ["b"], then_branch=branch(weights[0], "Neg"), else_branch=branch(weights[1], "Exp")
        ),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Mul", ["c", "w_1"], ["y"]),
    ]
    known = {"yes": np.array([[True]]), "no": np.array([False]), "w_1": floats(3, 4)}
    model = made(nodes, {"x": ("float32", [3, 4])}, ["y"], known)
    check(tmp_path, model, {"x": floats(3, 4)})
    graph = hidet_dist.from_onnx(tmp_path / "model.onnx")
    assert set(names_of({x for op in graph.nodes for x in op.inputs})) == {"w", "w_2", "w_1"}


@pytest.mark.parametrize(
    "equation", ["ij,ij->ij", "ij,kj->ik", "bhid,bhjd->bhij", "bijd,bjhd->bihd", "ij,k->i", "ij,jk,kl->il", "ijk->ki"]
)
def test_products_over_named_dims(tmp_path, equation):
    sizes = {"i": 2, "j": 3, "k": 4, "l": 2, "b": 5, "h": 2, "d": 3}
    terms = equation.partition("->")[0].split(",")
    inputs = {f"x{n}": floats(*(sizes[letter] for letter in term)) for n, term in enumerate(terms)}
    node = helper.make_node("Einsum", list(inputs), ["y"], equation=equation)
    check(tmp_path, made([node], inputs, ["y"]), inputs)


def test_a_shape_that_may_be_zero_is_not_taken_for_another(tmp_path):
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Sub", ["s", "one"], ["before"]),
        helper.make_node("Equal", ["before", "zero"], ["is_one"]),
        helper.make_node("Where", ["is_one", "one", "s"], ["to"]),
        helper.make_node("Reshape", ["x", "to"], ["y"]),
    ]
    model = made(nodes, {"x": ("float32", ["n"])}, ["y"], {"one": np.array([1]), "zero": np.array([0])})
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match="give the size in dims"):
        hidet_dist.from_onnx(tmp_path / "model.onnx")
    check(tmp_path, model, {"x": floats(3)}, dims={"n": 3})


@pytest.mark.parametrize("operator", ["LSTM", "GRU", "GRU before"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_recurrent_layers(tmp_path, operator, direction):
    directions, inputs, size, gates = 1 + (direction == "bidirectional"), 3, 4, 4 if operator == "LSTM" else 3
    options: dict[str, Any] = {"hidden_size": size, "direction": direction}
    if operator == "GRU":
        options["linear_before_reset"] = 1
    outputs = ["y", "h", "c"] if operator == "LSTM" else ["y", "h"]
    known = {
        "w": floats(directions, gates * size, inputs),
        "r": floats(directions, gates * size, size),
        "b": floats(directions, 2 * gates * size),
    }
    names = ["x", "w", "r", "b", "", "first"]
    nodes = [helper.make_node(operator.split()[0], names, outputs, **options)]
    x, first = floats(5, 2, inputs), floats(directions, 2, size)
    model = made(nodes, {"x": x, "first": first}, outputs, known, 14)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    found = run(path, {"x": x, "first": first})
    peer = torch.nn.LSTM if operator == "LSTM" else torch.nn.GRU
    order = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2]}[operator.split()[0]]

    def rows(values: np.ndarray) -> torch.Tensor:
        parts = values.reshape(gates, size, *values.shape[1:])[order]
        return torch.from_numpy(parts.reshape(values.shape))

    if operator == "GRU before":
        if direction == "forward":  # PyTorch has only the other one, and the reference evaluator only one direction
            want = ReferenceEvaluator(model).run(None, {"x": x, "first": first})
            np.testing.assert_allclose(found["y"], want[0], atol=1e-5)
        return
    states = []
    pieces = []
    for number in range(directions):
        layer = peer(inputs, size)
        layer.load_state_dict(
            {
                "weight_ih_l0": rows(known["w"][number]),
                "weight_hh_l0": rows(known["r"][number]),
                "bias_ih_l0": rows(known["b"][number][: gates * size]),
                "bias_hh_l0": rows(known["b"][number][gates * size :]),
            }
        )
        backwards = direction == "reverse" or number == 1
        given = torch.from_numpy(x[::-1].copy() if backwards else x)
        start = torch.from_numpy(first[number : number + 1])
        with torch.no_grad():
            y, last = layer(given, (start, torch.zeros_like(start)) if operator == "LSTM" else start)
        pieces.append(y.numpy()[::-1] if backwards else y.numpy())
        states.append(last[0].numpy() if operator == "LSTM" else last.numpy())
    np.testing.assert_allclose(found["y"], np.stack(pieces, 1), atol=1e-5)
    np.testing.assert_allclose(found["h"], np.concatenate(states, 0), atol=1e-5)


def exported(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], path: Path, opset: int) -> None:
    torch.onnx.export(module.eval(), inputs, str(path), opset_version=opset, dynamo=True, verbose=False)


class Images(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, 2, 1, groups=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.Hardswish(),
            torch.nn.Conv2d(8, 8, 3, 1, "same", groups=8),
            torch.nn.GroupNorm(2, 8),
            torch.nn.SiLU(),
            torch.nn.MaxPool2d(2, 2, 0, ceil_mode=True),
            torch.nn.ConvTranspose2d(8, 4, 2, 2),
            torch.nn.Upsample(scale_factor=2, mode="bilinear"),
            torch.nn.AdaptiveAvgPool2d((None, 1)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).flatten(1)


class Sequences(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.head = torch.nn.Linear(16, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layer(self.table(ids))
        scores = self.head(hidden)
        return scores, torch.topk(scores, 2).indices


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("kind", ["images", "sequences"])
def test_what_pytorch_exports(tmp_path, kind, opset):
    torch.manual_seed(0)
    module = Images() if kind == "images" else Sequences()
    x = torch.randn(2, 3, 14, 14) if kind == "images" else torch.randint(0, 11, (2, 5))
    path = tmp_path / "model.onnx"
    exported(module, (x,), path, opset)
    with torch.no_grad():
        wanted = module(x)
    name = hidet_dist.from_onnx(path)
    interface = interface_of(name)
    assert interface is not None
    found = list(run(path, {interface.input_names[0]: x.numpy()}).values())
    for own, want in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        np.testing.assert_allclose(own, want.numpy(), rtol=1e-3, atol=2e-5)
    weights = names_of({x for op in name.nodes for x in op.inputs})
    tied = "head.weight" if kind == "sequences" else "layers.7.weight"
    assert tied in {own.partition("[")[0] for own in weights}


@pytest.mark.parametrize("operator", ["ConstantOfShape", "Range", "Tile", "Expand"])
def test_values_too_large_to_compute_while_tracing_are_not(tmp_path, operator):
    many = np.array([2**45])
    inputs = {
        "ConstantOfShape": [many],
        "Range": [np.array(0), many[0], np.array(1)],
        "Tile": [np.array([1.0], np.float32), many],
        "Expand": [np.array([1.0], np.float32), many],
    }[operator]
    names = [f"i{number}" for number in range(len(inputs))]
    nodes = [helper.make_node(operator, names, ["t"]), helper.make_node("Shape", ["t"], ["s"])]
    nodes.append(helper.make_node("Add", ["x", "s"], ["y"]))
    model = made(nodes, {"x": ("int64", [1])}, ["y"], dict(zip(names, map(np.asarray, inputs), strict=True)))
    onnx.save(model, tmp_path / "model.onnx")
    if operator == "Range":
        with pytest.raises(UnsupportedModelError, match="a range from 0"):
            hidet_dist.from_onnx(tmp_path / "model.onnx")
    else:
        assert hidet_dist.from_onnx(tmp_path / "model.onnx").outputs[0].shape == (1,)


def test_the_package_that_reads_onnx_is_asked_for_by_name(monkeypatch):
    package = importlib.import_module("hidet_dist.frontends.onnx")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "onnx", None)
        with pytest.raises(ConfigError, match=r"pip install 'hidet_dist\[onnx\]'"):
            importlib.reload(package)
    importlib.reload(package)
