"""ONNX files beyond bounds are refused before they are parsed; the data of initializers is not read with the model."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import hidet_dist
from hidet_dist.errors import TraceError, WeightsError
from hidet_dist.frontends.onnx import layers, wire
from hidet_dist.limits import MOST_NODES, MOST_ONNX_ENTRIES, MOST_ONNX_FIELDS, MOST_ONNX_NAME_BYTES
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.weights.named import mark_of

GRAPH, INITIALIZER, NODE, ATTRIBUTE, INTS, DIMS, NAME, RAW_DATA = 7, 5, 1, 5, 8, 1, 8, 9  # fields of onnx.proto
INT32_DATA, NAME_OF_ATTRIBUTE, VALUE_OF_ATTRIBUTE = 5, 1, 5
TENSOR = TensorProto(name="w", data_type=TensorProto.FLOAT).SerializeToString()


def number(value: int) -> bytes:
    rest, last = value >> 7, value & 0x7F
    return bytes([last | 0x80]) + number(rest) if rest else bytes([last])


def field(own: int, value: bytes) -> bytes:
    return number(own << 3 | 2) + number(len(value)) + value


def small(*inputs: str) -> onnx.ModelProto:
    """``y = x``, plus other values."""
    graph = helper.make_graph(
        [helper.make_node("Sum", ["x", *inputs], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [onnx.ValueInfoProto(name="y")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def with_graph(more: bytes, *inputs: str) -> bytes:
    """A model whose graph has more fields: a message that is given in two parts is both of them together."""
    return small(*inputs).SerializeToString() + field(GRAPH, more)


BEYOND: dict[str, tuple[Callable[[], bytes], str]] = {
    "nodes": (lambda: with_graph(field(NODE, b"") * (MOST_NODES + 1)), "more than 65536 nodes"),
    "initializers": (lambda: with_graph(field(INITIALIZER, b"") * MOST_ONNX_ENTRIES), "entries in lists"),
    "fields of a model": (lambda: field(200, b"") * (MOST_ONNX_ENTRIES + 1), "entries in lists"),
    "a list of numbers": (
        lambda: with_graph(field(NODE, field(ATTRIBUTE, field(INTS, bytes(MOST_ONNX_FIELDS))))),
        "or 4194304 fields",
    ),
    "a name": (lambda: with_graph(field(NODE, field(3, bytes(MOST_ONNX_NAME_BYTES + 1)))), "a name in it has 65537"),
    "number 0": (lambda: bytes(100), "the number 0"),
}


@pytest.mark.parametrize("name", list(BEYOND))
def test_files_beyond_bounds_are_refused(tmp_path: Path, name: str) -> None:
    made, message = BEYOND[name]
    (tmp_path / "model.onnx").write_bytes(made())
    with pytest.raises(TraceError, match=message):
        hidet_dist.from_onnx(tmp_path / "model.onnx")


def test_messages_in_messages_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = with_graph(field(NODE, field(ATTRIBUTE, b"") * 500) + field(INITIALIZER, TENSOR * 100))
    (tmp_path / "model.onnx").write_bytes(many)
    monkeypatch.setattr(wire, "MOST_ONNX_MESSAGES", 400)
    with pytest.raises(TraceError, match="more than 400 messages"):
        hidet_dist.from_onnx(tmp_path / "model.onnx")
    monkeypatch.setattr(wire, "MOST_ONNX_FIELDS", 150)
    with pytest.raises(TraceError, match="initializers have more than 150 fields"):
        hidet_dist.from_onnx(tmp_path / "model.onnx")


def test_errors_have_no_long_texts_of_a_model(tmp_path: Path) -> None:
    own, long = small(), "m" * 1_000_000
    own.graph.node[0].CopyFrom(helper.make_node("Resize", ["x", "", "s"], ["y"], mode=long))
    own.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 2, 2]))
    own.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "s"))
    (tmp_path / "model.onnx").write_bytes(own.SerializeToString())
    with pytest.raises(TraceError) as refused:
        hidet_dist.from_onnx(tmp_path / "model.onnx")
    assert "Resize" in str(refused.value)
    assert len(str(refused.value)) < 3000


def test_the_data_of_initializers_is_not_read_with_a_model(tmp_path: Path) -> None:
    """It would take twice the memory of the file, which has a hole here."""
    path, elements = tmp_path / "model.onnx", 2**26
    head = TENSOR + number(DIMS << 3) + number(elements) + number(RAW_DATA << 3 | 2) + number(4 * elements)
    head = number(INITIALIZER << 3 | 2) + number(len(head) + 4 * elements) + head
    own = small("w").SerializeToString() + number(GRAPH << 3 | 2) + number(len(head) + 4 * elements) + head
    last = np.array([1, 2], np.float32)
    with path.open("wb") as file:
        file.write(own)
        file.seek(4 * elements - last.nbytes, 1)
        file.write(last.tobytes())
    tracemalloc.start()
    try:
        graph = hidet_dist.from_onnx(path)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()
    (weight,) = [mark for x in graph.nodes[0].inputs if (mark := mark_of(x)) is not None]
    assert weight.stored is not None
    np.testing.assert_array_equal(weight.stored.read([slice(elements - 3, elements)]).numpy(), [0, *last])


def test_data_is_what_protocol_buffers_make_of_a_file(tmp_path: Path) -> None:
    """Of data that is given twice the last counts; graphs in several parts are one; names may be of any order."""
    data = [np.arange(n, n + 2000, dtype=np.float32) for n in (0, 7)]
    twice = TENSOR + number(DIMS << 3) + number(2000) + b"".join(field(RAW_DATA, x.tobytes()) for x in data)
    late = field(RAW_DATA, data[0].tobytes()) + number(DIMS << 3) + number(2000) + TENSOR + field(NAME, b"v")
    scalar = field(RAW_DATA, np.float32(3).tobytes()) + TENSOR + field(NAME, b"u")
    own = with_graph(field(INITIALIZER, twice), "w", "v", "u") + field(GRAPH, field(INITIALIZER, late))
    (tmp_path / "model.onnx").write_bytes(own + field(GRAPH, field(INITIALIZER, scalar)))
    (y,) = evaluate_graph(hidet_dist.from_onnx(tmp_path / "model.onnx"), [np.ones(1)])
    np.testing.assert_array_equal(y, data[0] + data[1] + 4)
    parsed = onnx.load(tmp_path / "model.onnx")
    for tensor, want in zip(parsed.graph.initializer, [data[1], data[0], 3], strict=True):
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), want)


def test_data_of_another_length_is_refused(tmp_path: Path) -> None:
    tensor = TENSOR + number(DIMS << 3) + number(2000) + field(RAW_DATA, bytes(100))
    (tmp_path / "model.onnx").write_bytes(with_graph(field(INITIALIZER, tensor), "w"))
    with pytest.raises(WeightsError, match=r"'w' .* has 8000 bytes, not 100"):
        hidet_dist.from_onnx(tmp_path / "model.onnx")


def test_steps_of_all_recurrent_layers_are_counted_before_any_is_lowered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {name: np.zeros((1, 4, 1), np.float32) for name in "wr"}
    nodes = []
    for layer in range(9):
        nodes.append(helper.make_node("LSTM", [f"x{layer}", "w", "r"], [f"h{layer}"], hidden_size=1))
        nodes.append(helper.make_node("Squeeze", [f"h{layer}", "one"], [f"x{layer + 1}"]))
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, ["steps", 1, 1])],
        [onnx.ValueInfoProto(name="x9")],
        [onnx.numpy_helper.from_array(value, name) for name, value in {**weights, "one": np.array([1])}.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "model.onnx")
    assert hidet_dist.from_onnx(tmp_path / "model.onnx", {"steps": 2}).outputs[0].shape == (2, 1, 1)
    monkeypatch.setattr(layers, "lstm", None)
    with pytest.raises(TraceError, match="recurrent layers with more than"):
        hidet_dist.from_onnx(tmp_path / "model.onnx", {"steps": 400})


@pytest.mark.parametrize("place", ["initializer", "constant"])
def test_more_numbers_than_elements_are_refused_before_they_are_parsed(tmp_path: Path, place: str) -> None:
    tensor = TENSOR + number(DIMS << 3) + number(1000) + field(INT32_DATA, bytes(2**20))
    node = field(ATTRIBUTE, field(NAME_OF_ATTRIBUTE, b"value") + field(VALUE_OF_ATTRIBUTE, tensor))
    more = field(INITIALIZER, tensor) if place == "initializer" else field(NODE, node)
    (tmp_path / "model.onnx").write_bytes(with_graph(more))
    with pytest.raises(TraceError, match=r"its tensor 'w' has 1048576 numbers, and the shape \[1000\]"):
        hidet_dist.from_onnx(tmp_path / "model.onnx")


def test_numbers_of_varying_length_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 16 and 8 bits are such numbers where they are no raw data."""
    tensor = helper.make_tensor("w", TensorProto.FLOAT16, [1500], np.arange(1500) / 4)
    tensor.data_type = TensorProto.INT32
    own = with_graph(field(INITIALIZER, tensor.SerializeToString()))
    (tmp_path / "model.onnx").write_bytes(own)
    hidet_dist.from_onnx(tmp_path / "model.onnx")
    monkeypatch.setattr(wire, "MOST_ONNX_NUMBERS", 1499)
    with pytest.raises(TraceError, match="more than 1499 numbers"):
        hidet_dist.from_onnx(tmp_path / "model.onnx")
