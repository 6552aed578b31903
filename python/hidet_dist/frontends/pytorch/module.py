"""``from_torch``: conversion of a PyTorch module to a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from hidet.graph import FlowGraph, Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from hidet_dist.errors import EmptyTensorError, TraceError, UnsupportedModelError
from hidet_dist.frontends.dims import Dims
from hidet_dist.frontends.pytorch import (  # noqa: F401  # they register lowerings
    elementwise,
    experts,
    indexing,
    norms,
    pairs,
    products,
    recurrent,
    reductions,
    row_attention,
    shapes,
    windows,
)
from hidet_dist.frontends.pytorch.export import Exported, ExportedModule, argument_names, exported, functional
from hidet_dist.frontends.pytorch.lower import lower
from hidet_dist.frontends.pytorch.size_conditions import UnmetConditionError, narrowed_sizes
from hidet_dist.frontends.pytorch.size_limits import size_limits
from hidet_dist.frugal import older_objects_kept
from hidet_dist.spec.interface import Interface, Structure, attach
from hidet_dist.spec.symbols import limit_sizes


@older_objects_kept()
def from_torch(
    module: torch.nn.Module | ExportedProgram,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    *,
    stored: Mapping[str, Tensor] | None = None,
) -> FlowGraph:
    """Convert a PyTorch module to a graph for :func:`auto_parallel`, :func:`make_plan` and the other calls.

    Parameters
    ----------
    module: torch.nn.Module or torch.export.ExportedProgram
        A module in evaluation mode, or a program that ``torch.export.export`` made of one. Parameters and persistent
        buffers become weights with their names in the state dict; tied ones are one weight. Those on the meta device
        have a shape and no data: such a graph can be planned, and built with ``optimization_config["weights"]``. A
        buffer that a call writes to becomes a state, with the buffer's values before the first call. Other buffers
        become constants.
    example_inputs: tuple, mapping or tensor
        The arguments of one call: positional ones in a tuple, keyword arguments in a mapping, or a single tensor. Only
        shapes and dtypes of tensors matter, so they may be on the meta device. Other values (None, numbers, truth
        values) become part of the graph. Not for an exported program.
    dynamic_shapes: optional
        The symbolic dims, as ``torch.export.export`` takes them, such as
        ``{"input_ids": {0: torch.export.Dim("batch")}}``. A symbolic dim has the name of its ``Dim``. Declare its
        expected size in ``optimization_config["symbols"]``. Not for an exported program.
    stored: mapping, optional
        Weights by name, such as those of :func:`weights_from_safetensors`, that replace the module's.

    Returns
    -------
    FlowGraph
        The graph, on the CPU. :func:`hidet_dist.spec.interface.interface_of` gives the names and the nesting of the
        module's arguments and results.

    Raises
    ------
    TraceError
        When the module is in training mode, writes to its arguments or parameters, or ``torch.export`` cannot
        trace it.
    EmptyTensorError
        When the module computes with tensors of no elements; the message says where it makes them.
    UnsupportedModelError
        When the module calls unsupported operators; the message lists all of them, and where they are called.
    """
    if isinstance(module, ExportedProgram):
        return _of_exported(module, example_inputs, dynamic_shapes, stored)
    if not isinstance(module, torch.nn.Module):
        raise TraceError(f"from_torch takes a torch.nn.Module or an ExportedProgram; got a {type(module).__name__}.")
    args, kwargs = _arguments(example_inputs)
    found = exported(module, args, kwargs, dynamic_shapes)
    names = _names_of_dims(found.program, dynamic_shapes)
    try:
        graph = lower(found.program, module, Dims(names), stored, found.layers)
    except (UnsupportedModelError, EmptyTensorError):
        # Trace again with stack traces, to name the lines of code in the error.
        found = exported(module, args, kwargs, dynamic_shapes, lines=True)
        names = _names_of_dims(found.program, dynamic_shapes)
        graph = lower(found.program, module, Dims(names), stored)
    program = found.program
    attach(graph, _interface(program, argument_names(module, len(args)), args, kwargs))
    limit_sizes(graph, size_limits(graph, found, names, _declared_least(dynamic_shapes)))
    return graph


def _declared_least(dynamic_shapes: Any) -> dict[str, int]:
    """Map the names of the dims of ``dynamic_shapes`` to the least sizes that they declare."""
    specs = pytree.tree_leaves(dynamic_shapes, is_leaf=_is_dims)
    return {
        dim.__name__: int(dim.min)
        for spec in specs
        for dim in _each_dim(spec)
        if hasattr(dim, "__name__") and isinstance(getattr(dim, "min", None), int)
    }


def _of_exported(
    given: ExportedProgram, example_inputs: Any, dynamic_shapes: Any, stored: Mapping[str, Tensor] | None
) -> FlowGraph:
    """Convert an exported program to a graph whose arguments are those of the export."""
    if example_inputs is not None or dynamic_shapes is not None:
        raise TraceError("An ExportedProgram has its inputs and dims: leave example_inputs and dynamic_shapes out.")
    try:
        sizes = narrowed_sizes(given)
    except UnmetConditionError as error:
        raise TraceError(f"The ExportedProgram cannot be a graph for all sizes: {error}.") from error
    program = functional(given)
    graph = lower(program, ExportedModule(given), Dims({}), stored)
    placeholders = program.graph.find_nodes(op="placeholder")
    leaves = [
        _Constant(spec.arg.value) if isinstance(spec.arg, ConstantArgument) else _TENSOR
        for _, spec in zip(placeholders, program.graph_signature.input_specs, strict=True)
        if spec.kind is InputKind.USER_INPUT
    ]
    in_spec = program.call_spec.in_spec
    assert in_spec is not None
    args, kwargs = pytree.tree_unflatten(leaves, in_spec)
    signature = given.module_call_graph[0].signature
    known = signature.forward_arg_names if signature is not None else None
    names = list(known or ())[: len(args)] or [f"input_{number}" for number in range(len(args))]
    attach(graph, _interface(program, names, args, kwargs))
    limit_sizes(graph, size_limits(graph, Exported(program, sizes=sizes)))
    return graph


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split example inputs into positional and keyword arguments. Raises TraceError."""
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    raise TraceError(
        "example_inputs must be a tuple of arguments, a mapping of arguments by name, or a tensor; got a "
        f"{type(example_inputs).__name__}."
    )


def _names_of_dims(program: ExportedProgram, dynamic_shapes: Any) -> dict[str, str]:
    """Map the symbols of a program's shapes to the user's names."""
    if dynamic_shapes is None:
        return {}
    names_of_tensors = [
        [getattr(dim, "__name__", None) for dim in _each_dim(spec)]
        for spec in pytree.tree_leaves(dynamic_shapes, is_leaf=_is_dims)
    ]
    placeholders = program.graph.find_nodes(op="placeholder")
    fakes = [
        node.meta.get("val")
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True)
        if spec.kind is InputKind.USER_INPUT
    ]
    names: dict[str, str] = {}
    for fake, dims in zip(fakes, names_of_tensors, strict=False):
        if not isinstance(fake, torch.Tensor):
            continue
        sizes: Sequence[Any] = fake.shape
        for size, name in zip(sizes, dims, strict=False):
            if isinstance(size, torch.SymInt) and name is not None and size.node.expr.is_Symbol:
                names.setdefault(str(size.node.expr), name)
    return names


def _is_dims(spec: Any) -> bool:
    """Whether a part of ``dynamic_shapes`` describes one tensor."""
    if spec is None:
        return True
    if isinstance(spec, dict):
        return all(isinstance(dim, int) for dim in spec)
    return isinstance(spec, tuple | list) and not any(isinstance(part, dict | tuple | list) for part in spec)


def _each_dim(spec: Any) -> list[Any]:
    """List the entries of ``dynamic_shapes`` for the dims of one tensor."""
    if spec is None:
        return []
    if isinstance(spec, dict):
        return [spec.get(dim) for dim in range(max(spec, default=-1) + 1)]
    return list(spec)


def _interface(
    program: ExportedProgram, positional: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Interface:
    """Describe the arguments and results of a program; ``positional`` are the names of ``args``."""
    names = [*positional, *kwargs]
    counter = iter(range(2**31))
    parameters = tuple(
        (name, structure_of(value, counter)) for name, value in zip(names, (*args, *kwargs.values()), strict=True)
    )
    inputs = [name for parameter, structure in parameters for name in _tensor_names(parameter, structure)]
    leaves = [
        _Constant(spec.arg.value) if isinstance(spec.arg, ConstantArgument) else _TENSOR
        for spec in program.graph_signature.output_specs
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    result = structure_of(pytree.tree_unflatten(leaves, out_spec), iter(range(2**31)))
    outputs = list(_tensor_names("", result))
    return Interface(parameters, tuple(inputs), tuple(name or "output" for name in outputs), result)


@dataclasses.dataclass(frozen=True)
class _Constant:
    """An argument or a result that is no tensor."""

    value: Any


_TENSOR = torch.empty(0)


def structure_of(value: Any, numbers: Iterator[int]) -> Structure:
    """Describe the nesting of a value; its tensors are numbered in the order in which PyTorch flattens it.

    Raises
    ------
    TraceError
        For types other than tensors, numbers, text, None, and containers of these.
    """
    if isinstance(value, torch.Tensor):
        return {"tensor": next(numbers)}
    if isinstance(value, _Constant):
        return {"value": value.value}
    if isinstance(value, Mapping):
        fields = _named(value.items(), numbers)
        plain = type(value) is dict or type(value).__name__ == "OrderedDict"
        return {"dict": fields} if plain else {"record": type(value).__name__, "fields": fields}
    if isinstance(value, tuple) and (names := _names_of_fields(value)):
        return {"named_tuple": type(value).__name__, "fields": _named(zip(names, value, strict=True), numbers)}
    if isinstance(value, tuple | list):
        return {"tuple" if isinstance(value, tuple) else "list": [structure_of(part, numbers) for part in value]}
    if dataclasses.is_dataclass(value):
        pairs = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {"record": type(value).__name__, "fields": _named(pairs, numbers)}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TraceError(f"A {type(value).__name__} among the arguments or results of a module is not supported.")


def _names_of_fields(value: tuple[Any, ...]) -> Sequence[str]:
    """The names of the parts of a named tuple, or of a structure sequence such as the result of ``torch.max(x, 0)``."""
    if hasattr(value, "n_sequence_fields"):
        names: tuple[str, ...] = getattr(type(value), "__match_args__")  # noqa: B009  mypy does not know it
        return names
    return tuple(getattr(value, "_fields", ()))


def _named(parts: Iterable[tuple[Any, Any]], numbers: Iterator[int]) -> list[list[Any]]:
    """Describe the parts of a value that have names."""
    return [[str(key), structure_of(part, numbers)] for key, part in parts]


def _tensor_names(name: str, structure: Structure) -> Iterator[str]:
    """Yield the path of each tensor in a structure, such as ``cache.0.key``."""
    if "tensor" in structure:
        yield name
        return
    for kind in ("list", "tuple"):
        for number, part in enumerate(structure.get(kind, ())):
            yield from _tensor_names(f"{name}.{number}" if name else f"output.{number}", part)
    for key, part in (*structure.get("dict", ()), *structure.get("fields", ())):
        yield from _tensor_names(f"{name}.{key}" if name else key, part)
