"""``from_onnx``: an ONNX file as a graph."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import onnx
import onnx.inliner
from hidet.graph import FlowGraph, Tensor
from onnx.reference import ReferenceEvaluator

from hidet_dist.errors import ConfigError, HidetDistError, MissingOperator, TraceError, UnsupportedModelError
from hidet_dist.frontends.onnx import arithmetic, arrangement, layers  # noqa: F401  # they register lowerings
from hidet_dist.frontends.onnx.initializers import KNOWN_ELEMENTS, ModelFile, dtype_name
from hidet_dist.frontends.onnx.nodes import MOST_ELEMENTS, Node, Refused, Value, lowering_of
from hidet_dist.frontends.onnx.symbolic_shapes import evaluate_shapes
from hidet_dist.spec.interface import Interface, attach

OLDEST_OPSET, NEWEST_OPSET = 13, 21
_STANDARD = ("", "ai.onnx")
_GROWS = ("Expand", "Tile")


def from_onnx(path: str | Path, dims: Mapping[str, int] | None = None) -> FlowGraph:
    """Trace an ONNX model to a graph for :func:`auto_parallel`, :func:`make_plan` and the other calls.

    Parameters
    ----------
    path: path
        The model, of opset 13 to 21. Its initializers become weights by name; their data stays in the model's file, or
        in the files beside it with external data, until its shards are read.
    dims: mapping, optional
        Sizes of named dims (``dim_param``), such as ``{"batch_size": 1}``. All others are symbolic dims, and their
        expected sizes are declared in ``optimization_config["symbols"]``.

    Returns
    -------
    The graph, on the CPU. Its inputs and outputs have the model's names; a call returns a dict.

    Raises
    ------
    TraceError
        When the file is not an ONNX model, is malformed, or has another opset.
    UnsupportedModelError
        When there are unsupported operators; it names all of them, with their nodes.
    WeightsError
        When the data of an initializer is not at the place that the model names.
    """
    file = ModelFile(Path(path))
    _check_opset(file)
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        return _Lowerer(file, dict(dims or {})).graph()


def _check_opset(file: ModelFile) -> None:
    versions = {entry.domain: entry.version for entry in file.model.opset_import}
    version = next((versions[domain] for domain in _STANDARD if domain in versions), None)
    if version is None or not file.model.graph.node:
        raise TraceError(f"{file.path} has no nodes of ONNX's operators.")
    if not OLDEST_OPSET <= version <= NEWEST_OPSET:
        raise TraceError(
            f"{file.path} is of opset {version}; from_onnx reads {OLDEST_OPSET} to {NEWEST_OPSET}. Export it again, or "
            "convert it with onnx.version_converter."
        )
    if file.model.functions:
        file.model = onnx.inliner.inline_local_functions(file.model)


class _Missing:
    """The output of an unsupported node: nodes that depend on it are not lowered, and not reported."""


_MISSING = _Missing()


class _Lowerer:
    def __init__(self, file: ModelFile, dims: dict[str, int]):
        self.file = file
        self.dims = dims
        self.missing: list[MissingOperator] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.weights: dict[str, Tensor] = {}
        self.opset = max(entry.version for entry in file.model.opset_import if entry.domain in _STANDARD)
        self.like = hidet.symbol([1], "float32", "cpu")

    def graph(self) -> FlowGraph:
        model = self.file.model.graph
        values: dict[str, Any] = {}
        self._declare(model)
        inputs = {item.name: self._input(item) for item in model.input if item.name not in self.initializers}
        if unknown := set(self.dims) - set(_named_dims(model)):
            raise ConfigError(
                f"The model has no dim {min(unknown)!r}; it has {', '.join(_named_dims(model)) or 'none with a name'}."
            )
        values.update(inputs)
        self._lower(model, values)
        if self.missing:
            raise UnsupportedModelError(str(self.file.path), self.missing)
        outputs = {item.name: self._output(item.name, values) for item in model.output}
        if not outputs:
            raise TraceError(f"{self.file.path} has no outputs.")
        graph = hidet.trace_from(list(outputs.values()), list(inputs.values()))
        names: Any = tuple((name, {"tensor": number}) for number, name in enumerate(inputs))
        results = [[name, {"tensor": number}] for number, name in enumerate(outputs)]
        attach(graph, Interface(names, tuple(inputs), tuple(outputs), {"dict": results}))
        return graph

    def _declare(self, model: onnx.GraphProto) -> None:
        if model.sparse_initializer:
            raise TraceError(f"{self.file.path} has sparse initializers, which are not supported.")
        for proto in model.initializer:
            self.initializers[proto.name] = proto

    def _input(self, proto: onnx.ValueInfoProto) -> Tensor:
        kind = proto.type.tensor_type
        if not proto.type.HasField("tensor_type") or not kind.HasField("shape"):
            raise TraceError(
                f"The input {proto.name!r} of {self.file.path} is not a tensor with a known number of dims."
            )
        shape: list[int | str] = []
        for number, dim in enumerate(kind.shape.dim):
            if dim.HasField("dim_value"):
                if dim.dim_value < 1:
                    raise TraceError(f"Dim {number} of the input {proto.name!r} has {dim.dim_value} elements.")
                shape.append(dim.dim_value)
                continue
            name = dim.dim_param or f"{proto.name}_{number}"
            shape.append(self.dims.get(name, re.sub(r"\W", "_", name)))
        return hidet.symbol(shape, dtype_name(kind.elem_type), "cpu")

    def _output(self, name: str, values: Mapping[str, Any]) -> Tensor:
        value = self._value(name, values)
        if isinstance(value, Tensor):
            return value
        raise TraceError(
            f"The output {name!r} of {self.file.path} does not depend on the inputs: it is the same in every call."
        )

    def _value(self, name: str, values: Mapping[str, Any]) -> Value:
        """Return the value of a name: a node's output, an input of the model, or an initializer."""
        if name in values:
            return values[name]
        proto = self.initializers.get(name)
        if proto is None:
            raise TraceError(f"{self.file.path} uses the value {name!r}, which no earlier node computes.")
        count = math.prod(proto.dims)
        if count == 0 or (count <= KNOWN_ELEMENTS and (_integral(proto) or count == 1)):
            return self.file.values(proto)
        if name not in self.weights:
            self.weights[name] = self.file.weight(proto)
        return self.weights[name]

    def _stored(self, x: Tensor) -> np.ndarray | None:
        """Read the values of a weight; None for any other tensor."""
        name = next((name for name, item in self.weights.items() if item is x), None)
        return None if name is None else self.file.values(self.initializers[name])

    def _lower(self, model: onnx.GraphProto, values: dict[str, Any]) -> None:
        for number, proto in enumerate(model.node):
            self._node(number, proto, values)

    def _node(self, number: int, proto: onnx.NodeProto, values: dict[str, Any]) -> None:
        outputs: Iterable[Any] = itertools.repeat(_MISSING)
        try:
            outputs = self._outputs(proto, values)
        except (Refused, NotImplementedError) as error:
            self._refuse(number, proto, str(error) or "it is not implemented")
        except HidetDistError:
            raise
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            # An operator noticed that the model, or a shape in it, is malformed.
            raise TraceError(
                f"Node {number} ({proto.op_type} {proto.name!r}) of {self.file.path} cannot be lowered: "
                f"{type(error).__name__}: {error}"
            ) from error
        for name, value in zip(proto.output, outputs, strict=False):
            if name:
                values[name] = value

    def _refuse(self, number: int, proto: onnx.NodeProto, reason: str) -> None:
        domain = proto.domain if proto.domain not in _STANDARD else "onnx"
        self.missing.append(
            MissingOperator(
                f"{domain}.{proto.op_type}", reason, f"node {number}" + (f" {proto.name}" if proto.name else "")
            )
        )

    def _outputs(self, proto: onnx.NodeProto, values: dict[str, Any]) -> Iterable[Any]:
        lowering = lowering_of(proto.op_type) if proto.domain in _STANDARD else None
        if lowering is None:
            raise Refused("it has no lowering")
        inputs = [self._value(name, values) if name else None for name in proto.input]
        if any(value is _MISSING for value in inputs):
            return itertools.repeat(_MISSING)
        attributes = {item.name: _attribute(item) for item in proto.attribute}
        known = self._folded(proto, inputs)
        if known is not None:
            return known
        node = Node(
            proto.op_type,
            self.opset,
            inputs,
            attributes,
            list(proto.output),
            self.like,
            lambda branch: self._branch(branch, values),
            self._stored,
        )
        outputs = lowering(node)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def _branch(self, model: onnx.GraphProto, outer: Mapping[str, Any]) -> list[Value]:
        values = dict(outer)
        self._declare(model)
        self._lower(model, values)
        return [self._value(item.name, values) for item in model.output]

    def _folded(self, proto: onnx.NodeProto, inputs: list[Value]) -> list[Any] | None:
        """Compute a node's outputs if all its inputs are known; None if they are not.

        ONNX's reference evaluator computes them; for shapes with symbolic dims, arithmetic on expressions.
        """
        there = [value for value in inputs if value is not None]
        if not there or not all(isinstance(value, np.ndarray) for value in there):
            return None
        if proto.op_type in ("If", "Constant", "ConstantOfShape", "Range", "Shape"):
            return None
        if any(value.dtype == object for value in there):
            return evaluate_shapes(proto.op_type, inputs, {item.name: _attribute(item) for item in proto.attribute})
        if sum(value.size for value in there) > MOST_ELEMENTS:
            return None
        if proto.op_type in _GROWS and there[0].size * math.prod(map(int, there[1].reshape(-1))) > MOST_ELEMENTS:
            return None
        names = [name for name in proto.input if name]
        feed = dict(zip(names, there, strict=True))
        single = onnx.helper.make_graph(
            [proto],
            "folded",
            [
                onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
                for name, value in feed.items()
            ],
            [onnx.ValueInfoProto(name=name) for name in proto.output if name],
        )
        model = onnx.helper.make_model(single, opset_imports=[onnx.helper.make_opsetid("", self.opset)])
        try:
            results = iter(ReferenceEvaluator(model).run(None, feed))
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            return None  # it does not support all of the standard, such as GatherElements of one row
        return [np.asarray(next(results)) if name else None for name in proto.output]


def _integral(proto: onnx.TensorProto) -> bool:
    return proto.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL)


def _named_dims(model: onnx.GraphProto) -> list[str]:
    dims = (dim for item in model.input for dim in item.type.tensor_type.shape.dim)
    return list(dict.fromkeys(dim.dim_param for dim in dims if dim.dim_param))


def _attribute(proto: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(proto)
    if isinstance(value, onnx.TensorProto):
        return np.array(onnx.numpy_helper.to_array(value))
    return list(value) if proto.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS) else value
