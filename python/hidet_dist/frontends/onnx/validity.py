"""Checks of a whole model before it is lowered: its opsets, onnx's checker, and functions that are inlined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

import onnx
import onnx.checker
import onnx.inliner

from hidet_dist.checks import shortened
from hidet_dist.errors import TraceError
from hidet_dist.frontends.onnx.initializers import ModelFile
from hidet_dist.frontends.onnx.nodes import MICROSOFT
from hidet_dist.limits import MOST_NODES, MOST_PROTOBUF_BYTES

STANDARD = ("", "ai.onnx")
"""Names of the domain of ONNX's operators."""

_Key = tuple[str, str, str]


def opset_of(file: ModelFile) -> int:
    """Return the version of ONNX's operators in a model. Raises TraceError if there is none, or a domain has two."""
    versions: dict[str, int] = {}
    for entry in file.model.opset_import:
        domain = "" if entry.domain in STANDARD else entry.domain
        if versions.setdefault(domain, entry.version) != entry.version:
            raise TraceError(
                f"{file.path} has two versions of the domain {domain or 'ai.onnx'!r}: {versions[domain]} and "
                f"{entry.version}."
            )
    if "" not in versions or not file.model.graph.node:
        raise TraceError(f"{file.path} has no nodes of ONNX's operators.")
    return versions[""]


# Operators that ONNX Runtime's optimizer writes into ONNX's domain, with the first opset that has them, if any.
_MOVED = {"LayerNormalization": 17, "SimplifiedLayerNormalization": None}


def put_into_own_domain(file: ModelFile) -> None:
    """Move operators of ONNX Runtime, which its optimizer writes into ONNX's domain, to the domain that is its own."""
    opset, moved = opset_of(file), False
    for node in _nodes(file.model.graph.node):
        first = _MOVED.get(node.op_type, 0)
        if node.domain in STANDARD and (first is None or opset < first):
            node.domain, moved = MICROSOFT, True
    if moved and all(entry.domain != MICROSOFT for entry in file.model.opset_import):
        file.model.opset_import.append(onnx.helper.make_opsetid(MICROSOFT, 1))


def check_model(file: ModelFile) -> None:
    """Check a model as onnx's checker does, except for the data of its tensors, which is checked where it is read.

    Raises TraceError for a model that the checker refuses, such as one with a name that is defined twice.
    """
    bare = onnx.ModelProto()
    for field, value in file.model.ListFields():
        if field.name != "graph":
            _put(bare, field.name, value)
    # Before version 4 initializers were inputs as well; onnx's converter of opsets adds some that are not.
    if bare.ir_version:
        bare.ir_version = max(bare.ir_version, 4)
    for field, value in file.model.graph.ListFields():
        if field.name != "initializer":
            _put(bare.graph, field.name, value)
    bare.graph.initializer.extend(
        onnx.TensorProto(name=proto.name, data_type=proto.data_type, dims=[0]) for proto in file.model.graph.initializer
    )
    for own in (*bare.graph.input, *bare.graph.output):
        # Outputs have the types that are inferred, and some models declare none. Those of inputs are checked later.
        if not own.HasField("type"):
            own.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        if own.type.HasField("tensor_type"):
            own.type.tensor_type.shape.SetInParent()
    for node in _nodes([*bare.graph.node, *(node for function in bare.functions for node in function.node)]):
        for attribute in node.attribute:
            if attribute.t.data_location == onnx.TensorProto.EXTERNAL:  # the checker would look for it elsewhere
                attribute.t.CopyFrom(onnx.TensorProto(name=attribute.t.name, data_type=attribute.t.data_type, dims=[0]))
            for proto in attribute.g.initializer:
                if proto.data_location == onnx.TensorProto.EXTERNAL:
                    proto.CopyFrom(onnx.TensorProto(name=proto.name, data_type=proto.data_type, dims=[0]))
    if (text := next(_garbled(bare), None)) is not None:
        raise TraceError(f"{file.path} is not a valid ONNX model: the text {text!r} in it is not UTF-8.")
    try:
        onnx.checker.check_model(bare)
    except Exception as error:  # whatever the checker raises, it refuses the model
        raise TraceError(f"{file.path} is not a valid ONNX model: {_first_line(error)}") from error


def _garbled(message: Any) -> Iterator[bytes]:
    """Yield texts in a message that are not UTF-8: protobuf gives them as bytes."""
    for field, value in message.ListFields():
        values = [value] if isinstance(value, bytes | str) or hasattr(value, "ListFields") else value
        if field.type == field.TYPE_MESSAGE:
            for inner in values:
                yield from _garbled(inner)
        elif field.type == field.TYPE_STRING:
            yield from (text for text in values if isinstance(text, bytes))


def _put(message: onnx.ModelProto | onnx.GraphProto, name: str, value: object) -> None:
    """Set a field of a message to a copy of a value."""
    target = getattr(message, name)
    if hasattr(target, "extend"):
        target.extend(value)
    elif hasattr(target, "CopyFrom"):
        target.CopyFrom(value)
    else:
        setattr(message, name, value)


def inline_functions(file: ModelFile) -> None:
    """Replace calls of the model's functions by their nodes.

    Raises
    ------
    TraceError
        When a function calls itself or has the name of an operator of ONNX, or the model would have too many nodes, or
        the inliner refuses it.
    """
    for own in file.model.functions:
        if own.domain in STANDARD and onnx.defs.has(own.name, max_inclusive_version=opset_of(file)):
            raise TraceError(
                f"{file.path} has a function {own.name!r} in ONNX's own domain, which has an operator of that name: "
                "runtimes differ in which of the two they run. Give the function a domain of its own."
            )
    nodes, nbytes = _size_inlined(file)
    if nodes > MOST_NODES or nbytes > MOST_PROTOBUF_BYTES:
        raise TraceError(
            f"{file.path} has {nodes} nodes of {nbytes} bytes with all of its functions inlined; at most {MOST_NODES} "
            f"nodes of {MOST_PROTOBUF_BYTES} bytes are read."
        )
    if not file.model.functions:
        return
    try:
        file.model = onnx.inliner.inline_local_functions(file.model)
    except Exception as error:  # of several kinds, those of the inliner's parser among them
        raise TraceError(f"The functions of {file.path} cannot be inlined: {_first_line(error)}") from error


def _size_inlined(file: ModelFile) -> tuple[int, int]:
    """Count the nodes of a model with all of its functions inlined, and their bytes, without inlining them."""
    functions = {(own.domain, own.name, own.overload): own for own in file.model.functions}
    calls: dict[_Key, Counter[_Key]] = {}
    sizes: dict[_Key, tuple[int, int]] = {}

    def count(nodes: Iterable[onnx.NodeProto]) -> tuple[Counter[_Key], int, int]:
        nodes = list(nodes)
        called = Counter((node.domain, node.op_type, node.overload) for node in _nodes(nodes))
        total = called.total()
        return (
            Counter({key: n for key, n in called.items() if key in functions}),
            total,
            sum(node.ByteSize() for node in nodes),
        )

    def inlined(called: Counter[_Key], nodes: int, nbytes: int) -> tuple[int, int]:
        for key, times in called.items():
            nodes, nbytes = nodes + times * sizes[key][0], nbytes + times * sizes[key][1]
        return nodes, nbytes

    own = {key: count(function.node) for key, function in functions.items()}
    calls = {key: called for key, (called, _, _) in own.items()}
    try:
        for key in TopologicalSorter(calls).static_order():
            sizes[key] = inlined(*own[key])
    except CycleError as error:
        names = " -> ".join(name for _, name, _ in error.args[1])
        raise TraceError(f"{file.path} has functions that call each other in a circle: {names}.") from None
    return inlined(*count(file.model.graph.node))


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes, and those of their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _nodes(graph.node)


def _first_line(error: Exception) -> str:
    """Return the first line of an error of onnx that says anything, shortened."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return shortened(line)
