"""What the standard says of a node's outputs, by onnx's shape inference, before the node is lowered.

It refuses invalid nodes, such as one with an axis that its input lacks, and bounds what is computed while tracing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.defs
import onnx.shape_inference
from hidet.graph import Tensor

from hidet_dist.checks import shortened, shown
from hidet_dist.frontends.onnx.initializers import DTYPES, KNOWN_ELEMENTS
from hidet_dist.frontends.refusals import Invalid
from hidet_dist.limits import MOST_BYTES, MOST_DIMS
from hidet_dist.spec.extents import extents_of
from hidet_dist.weights.header import ITEMSIZE

# Operators whose windows onnx's inference counts otherwise than its reference evaluator: the latter, as PyTorch, leaves
# out those that begin in the padding at the end.
_COUNTED_OTHERWISE = ("AveragePool", "LpPool", "MaxPool")

_ELEMENT_TYPES = {name: number for number, name in DTYPES.items()}


@dataclass(frozen=True)
class Described:
    """An output by the standard: its dtype, and its shape; None for what is not known, such as a symbolic dim."""

    dtype: str | None
    shape: tuple[int | None, ...] | None

    @property
    def count(self) -> int | None:
        """The number of elements; None if it is not known."""
        sizes = self.shape or ()
        return None if self.shape is None or None in sizes else math.prod(size for size in sizes if size is not None)


def describe(proto: onnx.NodeProto, opset: int, inputs: Sequence[Any]) -> list[Described] | None:
    """Describe the outputs of a node of ONNX's operators; None if onnx cannot tell.

    Parameters
    ----------
    proto: NodeProto
        The node. Nothing is known of one with subgraphs.
    opset: int
        The version of ONNX's operators.
    inputs: sequence of Value
        The values of its inputs.

    Raises
    ------
    Invalid
        When the node is invalid for these inputs, or an output is larger than any tensor.
    """
    if any(item.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for item in proto.attribute):
        return None
    graph = onnx.GraphProto(name="node", node=[proto], output=[onnx.ValueInfoProto(name=n) for n in proto.output if n])
    graph.node[0].domain = ""
    _add_defaults(graph.node[0], opset)
    given = {name: value for name, value in zip(proto.input, inputs, strict=True) if name}
    for name, value in given.items():
        if not _put_input(graph, name, value):
            return None
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    try:
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except (onnx.shape_inference.InferenceError, RuntimeError) as error:
        raise Invalid(shortened(" ".join(str(error).split()))) from error
    found = {own.name: _described(own) for own in inferred.graph.output}
    outputs = [found[name] if name else Described(None, None) for name in proto.output]
    for own in outputs:
        check_size(own.dtype, own.shape)
    return outputs


def check_outputs(operator: str, outputs: Sequence[Any], described: Sequence[Described] | None) -> None:
    """Compare the outputs of a lowering with what the standard says of them.

    Raises
    ------
    Invalid
        When an output is of another dtype or shape, or larger than any tensor.
    """
    for number, value in enumerate(outputs):
        own = described[number] if described is not None and number < len(described) else None
        if not isinstance(value, Tensor):
            continue
        shape = [size if isinstance(size, int) else None for size in extents_of(value)]
        check_size(value.dtype.name, shape)
        if own is None or operator in _COUNTED_OTHERWISE:
            continue
        if own.dtype not in (None, value.dtype.name) or (own.shape is not None and not _agree(shape, own.shape)):
            raise Invalid(
                f"output {number} is {own.dtype}{shown(list(own.shape or ()))} by the standard, but would be "
                f"{value.dtype.name}{shown(shape)}"
            )


def check_declared(what: str, proto: onnx.ValueInfoProto, dtype: str, shape: Sequence[Any]) -> None:
    """Compare a value with what the model declares of it; a dim without a number has any size.

    Parameters
    ----------
    what: str
        What errors call the value.
    proto: ValueInfoProto
        The declaration.
    dtype, shape
        The value's dtype (hidet's name) and extents.

    Raises
    ------
    Invalid
        When they differ.
    """
    declared, kind = _described(proto), proto.type.tensor_type
    sizes = [size if isinstance(size, int) else None for size in shape]
    right = not kind.elem_type or declared.dtype == dtype
    if not right or (declared.shape is not None and not _agree(sizes, declared.shape)):
        dims = "" if declared.shape is None else ["?" if size is None else size for size in declared.shape]
        name = declared.dtype or onnx.helper.tensor_dtype_to_string(kind.elem_type)
        raise Invalid(f"{what} is declared as {name}{dims and shown(dims)}, but is {dtype}{shown(list(shape))}")


def _agree(a: Sequence[int | None], b: Sequence[int | None]) -> bool:
    """Whether two shapes may be equal; None is any size."""
    return len(a) == len(b) and all(None in (p, q) or p == q for p, q in zip(a, b, strict=True))


def check_size(dtype: str | None, shape: Sequence[Any] | None) -> None:
    """Refuse a shape with a negative dim, or of more dims or bytes than a tensor can have. Raises Invalid."""
    if shape is not None and len(shape) > MOST_DIMS:
        raise Invalid(f"a tensor would have {len(shape)} dims; at most {MOST_DIMS} are supported")
    sizes = [size for size in shape or () if isinstance(size, int)]
    if any(size < 0 for size in sizes):
        raise Invalid(f"an output would have the shape {shown(list(shape or ()))}")
    if 0 not in sizes and math.prod(sizes) * ITEMSIZE.get(dtype or "", 1) > MOST_BYTES:
        raise Invalid(f"an output would have the shape {shown(list(shape or ()))}, of more than {MOST_BYTES} bytes")


def _add_defaults(proto: onnx.NodeProto, opset: int) -> None:
    """Add the attributes that a node leaves out and that have defaults.

    Where the standard defines an operator by others, onnx's inference goes through these, and does not find them.
    """
    try:
        schema = onnx.defs.get_schema(proto.op_type, opset)
    except onnx.defs.SchemaError:
        return
    given = {item.name for item in proto.attribute}
    proto.attribute.extend(
        own.default_value for name, own in schema.attributes.items() if own.default_value.type and name not in given
    )


def _put_input(graph: onnx.GraphProto, name: str, value: Any) -> bool:
    """Add an input to a graph of one node; an array of few elements as an initializer. Returns whether it can be."""
    if isinstance(value, Tensor):
        element_type = _ELEMENT_TYPES.get(value.dtype.name)
        shape = [size if isinstance(size, int) else None for size in extents_of(value)]
    elif value.dtype == object:  # a shape with symbolic dims
        element_type, shape = onnx.TensorProto.INT64, list(value.shape)
    else:
        try:
            element_type = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
        except ValueError:
            return False
        shape = list(value.shape)
        if value.size <= KNOWN_ELEMENTS:
            graph.initializer.append(onnx.numpy_helper.from_array(value, name))
            return True
    if element_type is None:
        return False
    graph.input.append(onnx.helper.make_tensor_value_info(name, element_type, shape))
    return True


def _described(proto: onnx.ValueInfoProto) -> Described:
    kind = proto.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim)
    return Described(DTYPES.get(kind.elem_type), shape if kind.HasField("shape") else None)
