"""The nodes that loops, and the operators that recurrent layers become, counted before any of them is lowered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx
import onnx.shape_inference
from hidet.graph import Tensor

from hidet_dist.errors import WeightsError
from hidet_dist.frontends.onnx.initializers import KNOWN_ELEMENTS, ModelFile
from hidet_dist.frontends.onnx.layers import OPERATORS_OF_STEP
from hidet_dist.frontends.onnx.nodes import LoopBody
from hidet_dist.frontends.onnx.validity import STANDARD
from hidet_dist.spec.extents import extents_of

_LOOPS = ("Loop", "Scan")


def count_nodes(file: ModelFile, opset: int, inputs: Mapping[str, Tensor]) -> int:
    """Count the nodes of a model's graph with those of all iterations of loops, and of all steps of recurrent layers.

    The count is the least that is lowered: iterations count where their number is stored in the model, or inferred by
    onnx, and no condition ends the loop before. Those whose number is computed count once it is
    (:func:`body_of`).

    Parameters
    ----------
    file: ModelFile
        The model, checked.
    opset: int
        The version of ONNX's operators.
    inputs: mapping
        The inputs of the graph by name, whose dims have the sizes that users gave.
    """
    own = file.model.graph
    is_unrolled = any(_operator(node) in (*_LOOPS, *OPERATORS_OF_STEP) for node in own.node)
    return _count(own, _KnownNames(file, shapes=_shapes(file, opset, inputs) if is_unrolled else {}))


def body_of(file: ModelFile, graph: onnx.GraphProto) -> LoopBody:
    """Count the nodes of a loop's body, of which nothing around it is known."""
    outer = _KnownNames(file)
    return LoopBody(graph, _count(graph, outer), outer.within(graph).is_endless(graph))


@dataclass(frozen=True)
class _KnownNames:
    """What is known of the values of a graph before it is lowered.

    Attributes
    ----------
    file: the model.
    shapes: shapes of the model's graph, where 0 is a size that is not known.
    own: the values of this graph by name, with the data of those that it stores.
    outer: what is known in the graph around it, if it is a subgraph.
    """

    file: ModelFile
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    own: Mapping[str, onnx.TensorProto | None] = field(default_factory=dict)
    outer: _KnownNames | None = None

    def within(self, graph: onnx.GraphProto) -> _KnownNames:
        """Make the names of a subgraph."""
        own: dict[str, onnx.TensorProto | None] = {item.name: None for item in graph.input}
        own |= {name: None for node in graph.node for name in node.output}
        own |= {proto.name: proto for proto in graph.initializer}
        for node in graph.node:
            if _operator(node) == "Constant":
                own.update((node.output[0], item.t) for item in node.attribute if item.name == "value")
        return _KnownNames(self.file, self.shapes, own, self)

    def number(self, name: str) -> int:
        """Return a stored number; 0 for any other value."""
        names = self
        while name not in names.own and names.outer is not None:
            names = names.outer
        proto = names.own.get(name)
        if proto is None or math.prod(proto.dims) != 1:
            return 0
        try:
            return int(self.file.values(proto).reshape(-1)[0])
        except (WeightsError, ValueError, OverflowError):
            return 0  # it is refused where it is used

    def size(self, name: str, dim: int) -> int:
        """Return the size of a dim of a value of the model's graph; 0 if it is not known."""
        names = self
        while names.outer is not None and names.outer.outer is not None:
            if name in names.own:
                return 0
            names = names.outer
        shape = self.shapes.get(name, ())
        return shape[dim] if -len(shape) <= dim < len(shape) else 0

    def is_endless(self, body: onnx.GraphProto) -> bool:
        """Whether the body of a loop, whose names these are, never ends the loop."""
        if len(body.input) < 2 or not body.output:
            return False
        copies = {node.output[0]: node.input[0] for node in body.node if _operator(node) == "Identity"}
        name = body.output[0].name
        for _ in range(len(copies) + 1):
            if name == body.input[1].name or self.number(name):
                return True
            name = copies.get(name, "")
        return False


def _count(graph: onnx.GraphProto, outer: _KnownNames) -> int:
    names = outer.within(graph)
    return sum(_count_node(node, names) for node in graph.node)


def _count_node(node: onnx.NodeProto, names: _KnownNames) -> int:
    operator, options = _operator(node), {item.name: item for item in node.attribute}
    if operator in OPERATORS_OF_STEP and node.input:
        batch_first = "layout" in options and options["layout"].i == 1
        both = "direction" in options and options["direction"].s == b"bidirectional"
        return 1 + names.size(node.input[0], int(batch_first)) * (1 + both) * OPERATORS_OF_STEP[operator]
    if operator == "If":
        return 1 + min((_count(item.g, names) for item in node.attribute if item.HasField("g")), default=0)
    if operator in _LOOPS and "body" in options:
        body = options["body"].g
        iterations = _scanned(node, options, names) if operator == "Scan" else _iterated(node, body, names)
        return 1 + (iterations * _count(body, names) if iterations else 0)
    return 1


def _iterated(node: onnx.NodeProto, body: onnx.GraphProto, names: _KnownNames) -> int:
    """Count the iterations of a Loop; 0 if their number is not known."""
    begins = len(node.input) < 2 or not node.input[1] or names.number(node.input[1])
    if not node.input or not begins or not names.within(body).is_endless(body):
        return 0
    return max(0, names.number(node.input[0]))


def _scanned(node: onnx.NodeProto, options: Mapping[str, onnx.AttributeProto], names: _KnownNames) -> int:
    """Count the steps of a Scan; 0 if their number is not known."""
    count = options["num_scan_inputs"].i if "num_scan_inputs" in options else 0
    if not 0 < count <= len(node.input):
        return 0
    axes = options["scan_input_axes"].ints if "scan_input_axes" in options else ()
    return names.size(node.input[len(node.input) - count], axes[0] if axes else 0)


def _operator(node: onnx.NodeProto) -> str:
    """Return the operator of a node of ONNX's own; empty for another one."""
    return node.op_type if node.domain in STANDARD else ""


def _shapes(file: ModelFile, opset: int, inputs: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Infer the shapes of the values of a graph; 0 is a size that is not known."""
    own = file.model.graph
    # Subgraphs are left out, and data but what shapes are computed with: the rest lies in files.
    nodes = [node for node in own.node if not any(item.HasField("g") or item.graphs for item in node.attribute)]
    graph = onnx.GraphProto(name="shapes", node=nodes)
    for item in own.input:
        if item.name in inputs:
            shape = [size if isinstance(size, int) else None for size in extents_of(inputs[item.name])]
            kind = item.type.tensor_type.elem_type
            graph.input.append(onnx.helper.make_tensor_value_info(item.name, kind, shape))
    for proto in own.initializer:
        if 0 <= math.prod(proto.dims) <= KNOWN_ELEMENTS and proto.data_type == onnx.TensorProto.INT64:
            try:
                graph.initializer.append(onnx.numpy_helper.from_array(file.values(proto), proto.name))
                continue
            except WeightsError:
                pass  # it is refused where it is used
        graph.input.append(onnx.helper.make_tensor_value_info(proto.name, proto.data_type, proto.dims))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    try:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return {}  # nodes are checked one by one, and refused by name
    return {
        item.name: tuple(dim.dim_value for dim in item.type.tensor_type.shape.dim)
        for item in (*graph.input, *graph.value_info, *graph.output)
    }
