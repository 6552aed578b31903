"""``from_onnx``: conversion of an ONNX file to a graph."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import onnx
from hidet.graph import FlowGraph, Tensor
from onnx.reference import ReferenceEvaluator

from hidet_dist.checks import is_whole, shortened, shown
from hidet_dist.compat.quick import quick_hidet
from hidet_dist.errors import ConfigError, HidetDistError, MissingOperator, TraceError, UnsupportedModelError
from hidet_dist.frontends.onnx import (  # noqa: F401  # they register lowerings
    arithmetic,
    arrangement,
    attention,
    few_bits,
    fused,
    grouped_attention,
    layers,
    quantization,
)
from hidet_dist.frontends.onnx.initializers import KNOWN_ELEMENTS, ModelFile, dtype_name
from hidet_dist.frontends.onnx.nodes import MOST_ELEMENTS, ONNX, LoopBody, Node, Value, lowering_of
from hidet_dist.frontends.onnx.standard import Described, check_declared, check_outputs, describe
from hidet_dist.frontends.onnx.symbolic_shapes import evaluate_shapes
from hidet_dist.frontends.onnx.unrolled import body_of, count_nodes
from hidet_dist.frontends.onnx.validity import STANDARD, check_model, inline_functions, opset_of, put_into_own_domain
from hidet_dist.frontends.refusals import Invalid, Refused, reason_of
from hidet_dist.limits import MOST_DIMS, MOST_KNOWN_ELEMENTS, MOST_NODES, MOST_OPERANDS
from hidet_dist.operators.dtypes import constant, counted_constants
from hidet_dist.spec.extents import extents_of
from hidet_dist.spec.interface import Interface, attach

OLDEST_OPSET, NEWEST_OPSET = 7, 25
# Operators that are computed while tracing where their inputs are known: those that models compute shapes, indices and
# masks with. Their work is about that of reading the inputs and writing the outputs, which are bounded.
_FOLDED = frozenset(
    [
        *arithmetic.ELEMENTWISE,
        *("ArgMax", "ArgMin", "Cast", "CastLike", "Clip", "Compress", "Concat", "CumSum", "Div", "Expand", "Flatten"),
        *("Gather", "GatherElements", "GatherND", "IsInf", "MatMul", "Max", "Mean", "Min", "Mod", "NonZero", "OneHot"),
        *("Pad", "Pow", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape"),
        *("ScatterElements", "ScatterND", "Size", "Slice", "Split", "Squeeze", "Sum", "Tile", "TopK", "Transpose"),
        *("Trilu", "Unique", "Unsqueeze", "Where"),
    ]
)
# Operators with vectors of one or two numbers for each dim of a result: onnx's shape inference does not see long ones.
_BY_DIMS = frozenset(["ConstantOfShape", "Expand", "Pad", "Reshape", "Resize", "Slice", "Squeeze", "Tile", "Unsqueeze"])
_NO_LARGER = ("Compress", "NonZero", "Unique")  # folded operators whose outputs' sizes depend on data, but are bounded


@quick_hidet()
def from_onnx(path: str | Path, dims: Mapping[str, int] | None = None) -> FlowGraph:
    """Convert an ONNX model to a graph for :func:`auto_parallel`, :func:`make_plan` and the other calls.

    Parameters
    ----------
    path: path
        The model file, of opset 7 to 25, also quantized or optimized by ONNX Runtime's tools. Its initializers become
        weights of the same names. A subgraph's initializer whose name another weight already has gets a number after
        the name. The weights' data stays in the model file, or in the files of its external data, until their shards
        are read.
    dims: mapping, optional
        Sizes of named dims (``dim_param``), such as ``{"batch_size": 1}``. A dim without a name is called by its input
        and its position, such as ``ids_0``. All other dims are symbolic: declare their expected sizes in
        ``optimization_config["symbols"]``. Characters that symbols cannot have are written as ``_`` there, and may be
        here.

    Returns
    -------
    FlowGraph
        The graph, on the CPU. Its inputs and outputs have the model's names; a call returns a dict.

    Raises
    ------
    ConfigError
        When ``dims`` names a dim that the model lacks, or a size below 1.
    TraceError
        When the file is not an ONNX model, is invalid by onnx's checker or shape inference, or has another opset; when
        it has a tensor that is larger than any can be, or functions that call each other without end.
    UnsupportedModelError
        When the model has unsupported operators; the message lists all of them, with their nodes.
    WeightsError
        When the data of an initializer is not where the model says, or is not in or below the model's folder: links
        are refused.
    """
    file, opset = _checked(Path(path))
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        return _ModelLowerer(file, opset, dict(dims or {})).graph()


def _checked(path: Path) -> tuple[ModelFile, int]:
    """Read a file, check its model, and inline its functions; return it and its opset."""
    file = ModelFile(path)
    opset = opset_of(file)
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise TraceError(
            f"{path} is of opset {opset}; from_onnx reads {OLDEST_OPSET} to {NEWEST_OPSET}. Export it again, or "
            "convert it with onnx.version_converter."
        )
    put_into_own_domain(file)
    check_model(file)
    inline_functions(file)
    return file, opset


class _Unsupported:
    """The output of an unsupported node. Nodes that depend on it are neither lowered nor reported."""


_UNSUPPORTED = _Unsupported()


@dataclass(frozen=True)
class _Scope:
    """The names that the nodes of a graph or a subgraph can refer to."""

    values: dict[str, Any]
    initializers: dict[str, onnx.TensorProto]

    def of_subgraph(self, initializers: Mapping[str, onnx.TensorProto]) -> _Scope:
        """Make the scope of a subgraph. Raises Invalid where its initializers have names of outer values."""
        taken = [name for name in initializers if name in self.values or name in self.initializers]
        if taken:  # which of the two it is differs among runtimes
            raise Invalid(f"a subgraph has an initializer {taken[0]!r}, and a value around it has that name, too")
        return _Scope(dict(self.values), {**self.initializers, **initializers})


class _ModelLowerer:
    """The lowering of one model."""

    def __init__(self, file: ModelFile, opset: int, dims: dict[str, int]):
        self.file = file
        self.dims = dims
        self.missing: list[MissingOperator] = []
        self.lowered = 0  # nodes, those of each iteration of a loop and of each step of a recurrent layer among them
        self.known = 0  # elements that nodes have read and written to compute values
        self.made = 0  # elements of constants
        self.constants: dict[int, tuple[np.ndarray, Tensor]] = {}  # by the id of the array, which they keep alive
        self.bodies: dict[int, LoopBody] = {}  # of loops
        # A weight belongs to an initializer, not to its name: sibling subgraphs may use a name twice.
        self.weights: dict[int, Tensor] = {}
        self.initializer_of: dict[Tensor, onnx.TensorProto] = {}
        self.outermost = self._initializers(file.model.graph)
        self.weight_names = set(self.outermost)
        self.opset = opset
        self.like = hidet.symbol([1], "float32", "cpu")

    def graph(self) -> FlowGraph:
        """Build the graph. Raises the errors of :func:`from_onnx`."""
        model = self.file.model.graph
        scope = _Scope({}, self.outermost)
        for item in model.input:
            if (proto := scope.initializers.get(item.name)) is not None:  # an input with a default, which is its value
                self._check_declared("input", item, dtype_name(proto.data_type), proto.dims)
        declared = [item for item in model.input if item.name not in scope.initializers]
        self._check_dims(declared)
        scope.values.update((item.name, self._input(item)) for item in declared)
        inputs = dict(scope.values)
        self._check_count(count_nodes(self.file, self.opset, inputs))
        with counted_constants(self._count_made):
            self._lower(model, scope)
        if self.missing:
            raise UnsupportedModelError(str(self.file.path), self.missing)
        outputs: dict[str, Tensor] = {}
        for item in model.output:
            if item.name in outputs:
                raise TraceError(f"{self.file.path} lists the output {item.name!r} twice.")
            outputs[item.name] = self._output(item, scope)
        if not outputs:
            raise TraceError(f"{self.file.path} has no outputs.")
        graph = hidet.trace_from(list(outputs.values()), list(inputs.values()))
        names: Any = tuple((name, {"tensor": number}) for number, name in enumerate(inputs))
        results = [[name, {"tensor": number}] for number, name in enumerate(outputs)]
        attach(graph, Interface(names, tuple(inputs), tuple(outputs), {"dict": results}))
        return graph

    def _initializers(self, model: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
        """Map the names of a graph's initializers to them. Raises TraceError for sparse ones."""
        if model.sparse_initializer:
            raise TraceError(f"{self.file.path} has sparse initializers, which are not supported.")
        return {proto.name: proto for proto in model.initializer}

    def _check_dims(self, inputs: Iterable[onnx.ValueInfoProto]) -> None:
        """Refuse sizes below 1, and sizes of dims that no input has. Raises ConfigError."""
        for name, size in self.dims.items():
            if not is_whole(size, 1):
                raise ConfigError(
                    f"The size of the dim {shown(name)} must be a whole number from 1; got {shown(size)}."
                )
        named = [_dim_name(proto, number) for proto in inputs for number in _symbolic_dims(proto)]
        if unknown := sorted(set(self.dims) - {*named, *map(_symbol, named)}):
            known = ", ".join(dict.fromkeys(named)) or "none without a size"
            raise ConfigError(f"The model has no dim {shown(unknown[0])}; it has {known}.")

    def _input(self, proto: onnx.ValueInfoProto) -> Tensor:
        kind = proto.type.tensor_type
        if not proto.type.HasField("tensor_type") or not kind.HasField("shape"):
            raise TraceError(
                f"The input {proto.name!r} of {self.file.path} is not a tensor with a known number of dims."
            )
        if len(kind.shape.dim) > MOST_DIMS:
            raise TraceError(
                f"The input {proto.name!r} of {self.file.path} has {len(kind.shape.dim)} dims; at most {MOST_DIMS} are "
                "supported."
            )
        shape: list[int | str] = []
        for number, dim in enumerate(kind.shape.dim):
            if dim.HasField("dim_value"):
                if dim.dim_value < 1:
                    raise TraceError(f"Dim {number} of the input {proto.name!r} has {dim.dim_value} elements.")
                shape.append(dim.dim_value)
                continue
            name = _dim_name(proto, number)
            symbol = _symbol(name)
            shape.append(self.dims.get(name, self.dims.get(symbol, symbol)))
        return hidet.symbol(shape, dtype_name(kind.elem_type), "cpu")

    def _output(self, proto: onnx.ValueInfoProto, scope: _Scope) -> Tensor:
        value = self._value(proto.name, scope)
        if not isinstance(value, Tensor):
            raise TraceError(
                f"The output {proto.name!r} of {self.file.path} does not depend on the inputs: it is the same in every "
                "call."
            )
        extents = extents_of(value)
        self._check_declared("output", proto, value.dtype.name, extents)
        if any(isinstance(size, int) and size == 0 for size in extents):
            raise TraceError(
                f"The output {proto.name!r} of {self.file.path} has no elements (its shape is {list(extents)}): leave "
                "it out of the model."
            )
        return value

    def _check_declared(self, kind: str, proto: onnx.ValueInfoProto, dtype: str, shape: Sequence[Any]) -> None:
        """Refuse an input or an output that is not as the model declares it. Raises TraceError."""
        try:
            check_declared(f"the {kind} {proto.name!r}", proto, dtype, shape)
        except Invalid as error:
            raise TraceError(f"{self.file.path} is invalid: {error}.") from error

    def _value(self, name: str, scope: _Scope) -> Value:
        """Return the value of a name: a node's output, an input of the model, or an initializer. Raises TraceError."""
        if name in scope.values:
            return scope.values[name]
        proto = scope.initializers.get(name)
        if proto is None:
            raise TraceError(f"{self.file.path} uses the value {name!r}, which no earlier node computes.")
        return self._stored(name, proto, self.outermost.get(name) is proto)

    def _stored(self, name: str, proto: onnx.TensorProto, is_outermost: bool) -> Value:
        """Return a tensor whose data the model has: its values if they are few and of a kind to be known, or a weight.

        ``is_outermost`` is whether it is an initializer of the model's graph, whose name belongs to it.
        """
        count = math.prod(proto.dims)
        if count == 0 or (count <= KNOWN_ELEMENTS and (_integral(proto) or count == 1)):
            return self.file.values(proto)
        if id(proto) not in self.weights:
            weight = self.file.weight(proto, name if is_outermost else self._free_name(name))
            self.weights[id(proto)] = weight
            self.initializer_of[weight] = proto  # keeps the initializer alive, whose id is the key above
        return self.weights[id(proto)]

    def _free_name(self, name: str) -> str:
        """Return a name that no other weight has: that of an initializer, with a number if it is taken."""
        candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(1)))
        free = next(candidate for candidate in candidates if candidate not in self.weight_names)
        self.weight_names.add(free)
        return free

    def _weight_values(self, x: Tensor) -> np.ndarray | None:
        """Read the values of a weight; None for any other tensor. Raises Refused for a weight that is too large."""
        return self._few_values(self.initializer_of[x]) if x in self.initializer_of else None

    def _few_values(self, proto: onnx.TensorProto) -> np.ndarray:
        """Read the values of a tensor that must be known. Raises Refused if they are too many."""
        if (count := math.prod(proto.dims)) > MOST_ELEMENTS:
            raise Refused(f"{proto.name or 'a tensor'} has {count} elements; at most {MOST_ELEMENTS} can be known")
        return self.file.values(proto)

    def _lower(self, model: onnx.GraphProto, scope: _Scope) -> None:
        """Lower the nodes of a graph in order, and add their outputs to the scope."""
        for number, proto in enumerate(model.node):
            self._lower_node(number, proto, scope)

    def _lower_node(self, number: int, proto: onnx.NodeProto, scope: _Scope) -> None:
        self._count(1)
        outputs: Iterable[Any] = itertools.repeat(_UNSUPPORTED)
        try:
            outputs = self._outputs(proto, scope)
        except (Refused, NotImplementedError) as error:
            self._refuse(number, proto, str(error) or "it is not implemented")
        except Invalid as error:
            raise TraceError(
                f"Node {number} ({proto.op_type} {proto.name!r}) of {self.file.path} is invalid: {error}."
            ) from error
        except HidetDistError:
            raise
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            # An operator noticed that the model, or a shape in it, is malformed.
            raise TraceError(
                f"Node {number} ({proto.op_type} {proto.name!r}) of {self.file.path} cannot be lowered: "
                + reason_of(error)
            ) from error
        for name, value in zip(proto.output, outputs, strict=False):
            if name:
                scope.values[name] = value

    def _count(self, nodes: int) -> None:
        """Count nodes that are lowered, and steps of recurrent layers. Raises TraceError for too many."""
        self.lowered += nodes
        self._check_count(self.lowered)

    def _expect(self, nodes: int) -> None:
        """Raise TraceError if nodes are too many together with those that were lowered."""
        self._check_count(self.lowered + nodes)

    def _body(self, graph: onnx.GraphProto) -> LoopBody:
        """Return what is known of the body of a loop."""
        if id(graph) not in self.bodies:
            self.bodies[id(graph)] = body_of(self.file, graph)  # keeps the graph alive, whose id is the key
        return self.bodies[id(graph)]

    def _check_count(self, nodes: int) -> None:
        if nodes > MOST_NODES:
            raise TraceError(
                f"{self.file.path} has loops or recurrent layers with more than {MOST_NODES} nodes in all of their "
                "steps: give them shorter sequences."
            )

    def _count_known(self, elements: int) -> None:
        """Count elements of values that are computed while tracing. Raises TraceError for too many."""
        self.known += elements
        if self.known > MOST_KNOWN_ELEMENTS:
            raise TraceError(
                f"{self.file.path} computes values that do not depend on its inputs from more than "
                f"{MOST_KNOWN_ELEMENTS} elements: store them as initializers, or simplify the model."
            )

    def _count_made(self, elements: int) -> None:
        """Count elements of constants that lowerings make. Raises TraceError for too many."""
        self.made += elements
        if self.made > MOST_KNOWN_ELEMENTS:
            raise TraceError(
                f"{self.file.path} has operators that need constants of more than {MOST_KNOWN_ELEMENTS} elements "
                "together, such as positions and the weights of interpolations: simplify the model."
            )

    def _constant(self, value: np.ndarray) -> Tensor:
        """Make a constant of the graph; the same one for the same array."""
        if id(value) not in self.constants:
            self.constants[id(value)] = value, constant(value, value.dtype.name, self.like)
        return self.constants[id(value)][1]

    def _refuse(self, number: int, proto: onnx.NodeProto, reason: str) -> None:
        domain = proto.domain if proto.domain not in STANDARD else "onnx"
        self.missing.append(
            MissingOperator(
                f"{domain}.{proto.op_type}",
                shortened(reason),
                f"node {number}" + (f" {proto.name}" if proto.name else ""),
            )
        )

    def _outputs(self, proto: onnx.NodeProto, scope: _Scope) -> Iterable[Any]:
        """Compute or lower a node; return its outputs. Raises Refused for unsupported nodes."""
        lowering = lowering_of(proto.op_type, ONNX if proto.domain in STANDARD else proto.domain)
        if lowering is None:
            raise Refused("it has no lowering")
        if (most := max(len(proto.input), len(proto.output))) > MOST_OPERANDS:
            raise Refused(f"it has {most} inputs or outputs; at most {MOST_OPERANDS} are read")
        inputs = [self._value(name, scope) if name else None for name in proto.input]
        if any(value is _UNSUPPORTED for value in inputs):
            return itertools.repeat(_UNSUPPORTED)
        if proto.op_type in _BY_DIMS:
            _check_vectors(inputs[proto.op_type != "ConstantOfShape" :])
        if proto.op_type == "Constant" and (tensor := _external_value(proto)) is not None:
            return [self._stored(proto.output[0], tensor, False)]
        described = describe(proto, self.opset, inputs) if proto.domain in STANDARD else None
        attributes = {item.name: self._attribute(item) for item in proto.attribute}
        folded = self._folded(proto, inputs, attributes, described)
        if folded is not None:
            return folded
        node = Node(
            proto.op_type,
            self.opset,
            inputs,
            attributes,
            list(proto.output),
            self.like,
            lambda body, values: self._lower_subgraph(body, values, scope),
            self._weight_values,
            self._count,
            self._body,
            self._constant,
            self._expect,
        )
        outputs = lowering(node)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self._count_known(sum(value.size for value in outputs if isinstance(value, np.ndarray)))
        check_outputs(proto.op_type, outputs, described)
        return outputs

    def _lower_subgraph(self, model: onnx.GraphProto, inputs: Sequence[Value], outer: _Scope) -> list[Value]:
        """Lower the nodes of a subgraph, given the values of its inputs; return the values of its outputs."""
        scope = outer.of_subgraph(self._initializers(model))
        scope.values.update((item.name, value) for item, value in zip(model.input, inputs, strict=True))
        self._lower(model, scope)
        return [self._value(item.name, scope) for item in model.output]

    def _attribute(self, proto: onnx.AttributeProto) -> Any:
        """Convert an attribute to a Python value; a tensor becomes an array."""
        value = onnx.helper.get_attribute_value(proto)
        if isinstance(value, onnx.TensorProto):
            is_external = value.data_location == onnx.TensorProto.EXTERNAL
            return self._few_values(value) if is_external else self.file.values(value)
        return list(value) if proto.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS) else value

    def _folded(
        self,
        proto: onnx.NodeProto,
        inputs: list[Value],
        attributes: Mapping[str, Any],
        described: Sequence[Described] | None,
    ) -> list[Any] | None:
        """Compute a node's outputs if all its inputs are known; None if they are not, or if outputs are too large.

        Shapes with symbolic dims are computed as expressions, all else by ONNX's reference evaluator.
        """
        present = [value for value in inputs if value is not None]
        if not _is_known(proto, present):
            return None
        counts = [own.count for own in described or ()] or [None]
        if any(count > MOST_ELEMENTS for count in counts if count is not None):
            return None
        if any(value.dtype == object for value in present):
            return evaluate_shapes(proto.op_type, inputs, attributes)
        if None in counts and proto.op_type not in _NO_LARGER:
            return None
        products = present[0].shape[-1] if proto.op_type == "MatMul" and present[0].ndim else 1
        self._count_known(sum(value.size for value in present) + products * sum(count or 0 for count in counts))
        return self._evaluated(proto, present)

    def _evaluated(self, proto: onnx.NodeProto, present: Sequence[np.ndarray]) -> list[Any] | None:
        """Compute a node's outputs by ONNX's reference evaluator; None where that cannot."""
        names = [name for name in proto.input if name]
        feed = dict(zip(names, present, strict=True))
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
            return None  # the evaluator lacks parts of the standard, such as GatherElements of one row
        return [np.asarray(next(results)) if name else None for name in proto.output]


def _is_known(proto: onnx.NodeProto, present: Sequence[Any]) -> bool:
    """Tell whether a node is one that may be computed now, and its inputs are known and small enough for that."""
    if not present or not all(isinstance(value, np.ndarray) for value in present):
        return False
    if proto.op_type not in _FOLDED or proto.domain not in STANDARD:
        return False
    return sum(value.size for value in present) <= MOST_ELEMENTS


def _check_vectors(values: Sequence[Value]) -> None:
    """Refuse vectors of numbers for more dims than a tensor has. Raises Invalid."""
    longest = max((value.size if isinstance(value, np.ndarray) else _elements(value) for value in values), default=0)
    if longest > 2 * MOST_DIMS:
        raise Invalid(
            f"an input has {longest} numbers for the dims of a tensor, of which there are at most {MOST_DIMS}"
        )


def _elements(value: Tensor | None) -> int:
    """Count the elements of a vector of the graph; 0 for any other value."""
    extents = () if value is None else extents_of(value)
    return extents[0] if len(extents) == 1 and isinstance(extents[0], int) else 0


def _integral(proto: onnx.TensorProto) -> bool:
    """Whether an initializer has integers or truth values, as shapes, indices and axes do."""
    return proto.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL)


def _symbolic_dims(proto: onnx.ValueInfoProto) -> list[int]:
    """List the dims of an input that have no size."""
    return [n for n, dim in enumerate(proto.type.tensor_type.shape.dim) if not dim.HasField("dim_value")]


def _dim_name(proto: onnx.ValueInfoProto, number: int) -> str:
    """Return the model's name of a dim of an input, or one made from the input's name."""
    return proto.type.tensor_type.shape.dim[number].dim_param or f"{proto.name}_{number}"


def _symbol(name: str) -> str:
    """Return the name of the symbolic dim for a dim of a model."""
    return re.sub(r"\W", "_", name)


def _external_value(proto: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the tensor of a Constant whose data lies in another file; None for any other Constant."""
    tensors = [item.t for item in proto.attribute if item.name == "value"]
    external = [tensor for tensor in tensors if tensor.data_location == onnx.TensorProto.EXTERNAL]
    return external[0] if external else None
