"""The operators that recurrent layers become, of a whole model, before any layer is lowered."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx
import onnx.shape_inference
from hidet.graph import Tensor

from hidet_dist.errors import WeightsError
from hidet_dist.frontends.onnx.initializers import KNOWN_ELEMENTS, ModelFile
from hidet_dist.frontends.onnx.layers import OPERATORS_OF_STEP
from hidet_dist.frontends.onnx.validity import STANDARD
from hidet_dist.spec.extents import extents_of


def operators_unrolled(file: ModelFile, opset: int, inputs: Mapping[str, Tensor]) -> int:
    """Count the operators of all steps of the recurrent layers of a model's graph, as far as onnx infers their lengths.

    Those of subgraphs are not among them, nor those whose lengths depend on data: they are counted as they are lowered.

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
    layers = [node for node in own.node if node.domain in STANDARD and node.op_type in OPERATORS_OF_STEP]
    if not layers:
        return 0
    shapes = _shapes(file, opset, inputs)
    total = 0
    for node in layers:
        options = {item.name: item for item in node.attribute}
        batch_first = "layout" in options and options["layout"].i == 1
        both = "direction" in options and options["direction"].s == b"bidirectional"
        shape = shapes.get(node.input[0], ()) if node.input else ()
        length = shape[batch_first] if len(shape) > batch_first else 0
        total += length * (1 + both) * OPERATORS_OF_STEP[node.op_type]
    return total


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
