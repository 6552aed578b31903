"""Lowering of an exported program to a graph of hidet's operators."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import hidet
import torch
from hidet.graph import FlowGraph, Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from hidet_dist.compat.quick import quick_hidet
from hidet_dist.errors import EmptyTensorError, MissingOperator, TraceError, UnsupportedModelError, VerificationError
from hidet_dist.frontends.dims import Dims
from hidet_dist.frontends.pytorch.calls import (
    DTYPES,
    Call,
    Lowering,
    ResultType,
    lowering_of,
    name_of_dtype,
    takes_numbers,
)
from hidet_dist.frontends.pytorch.empties import empty_tensors
from hidet_dist.frontends.pytorch.layers import LAYER, Layer, LayerWeight, is_saved
from hidet_dist.frontends.pytorch.pairs import PARTS, Pair, lowering_of_pairs
from hidet_dist.frontends.pytorch.patterns import LayerPattern, Pattern, Upstream
from hidet_dist.frontends.refusals import Invalid, Refused, reason_of
from hidet_dist.operators import promoted_dtype
from hidet_dist.operators.states import read_state, replace_state
from hidet_dist.spec.extents import extents_of, same_shape
from hidet_dist.weights.named import held_weight, weight
from hidet_dist.weights.states import held_state, is_value_of_state, state, updated_state

MOST_COMPUTED_BYTES = 2**27
"""The largest tensor that is computed from constants while tracing."""
MOST_CONSTANT_BYTES = 2**22
"""The largest such tensor that becomes a constant of the graph. A larger one, such as a mask of many positions, is
computed in the graph, which takes no memory until it runs."""


@dataclass(frozen=True, eq=False)
class _KnownValues:
    """A tensor whose values are known while tracing, and a function that adds its computation to the graph, if any."""

    value: torch.Tensor
    build: Callable[[], Tensor | None] | None = None


_MOST_SHOWN = 3  # calls that an error names

_UNFIT = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""Errors of a lowering for arguments that it does not support. VerificationError is none of these."""

_WRITTEN = {
    OutputKind.USER_INPUT_MUTATION: "argument",
    OutputKind.PARAMETER_MUTATION: "parameter",
}
"""What a program writes to, by the kind of the output that has the new values."""

_SIZE_ARITHMETIC: dict[Any, Callable[..., Any]] = {
    operator.add: lambda a, b: a + b,
    operator.sub: lambda a, b: a - b,
    operator.mul: lambda a, b: a * b,
    operator.floordiv: lambda a, b: a // b,
    operator.mod: lambda a, b: a % b,
}


@quick_hidet()
def lower(
    program: ExportedProgram,
    module: torch.nn.Module,
    dims: Dims,
    stored: Mapping[str, Tensor] | None = None,
    layers: Mapping[int, Layer] | None = None,
) -> FlowGraph:
    """Build the graph of an exported program, on the CPU.

    Parameters
    ----------
    program: ExportedProgram
        The result of :func:`hidet_dist.frontends.pytorch.export.exported` for ``module``.
    module: torch.nn.Module
        The module with the data of weights and constants; weights on the meta device have none.
    dims: Dims
        The symbolic dims.
    stored: mapping, optional
        Weights, by name in the state dict, that replace the module's.
    layers: mapping, optional
        The layers that operators of the program call, by number.

    Raises
    ------
    TraceError
        When the module writes to its arguments or parameters, or returns something other than tensors and
        constants, or no tensors.
    EmptyTensorError
        When the module computes with tensors of no elements; the message says where it makes them.
    UnsupportedModelError
        When the module calls unsupported operators; the message lists all of them, and where they are called.
    """
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        return _ProgramLowerer(program, module, dims, stored or {}, layers or {}).graph()


@dataclass
class _ProgramLowerer:
    """The lowering of one program."""

    program: ExportedProgram
    module: torch.nn.Module
    dims: Dims
    stored: Mapping[str, Tensor]
    layers: Mapping[int, Layer]
    missing: list[MissingOperator] = field(default_factory=list)
    results_by_key: dict[Any, Any] = field(default_factory=dict)
    constants: dict[_KnownValues, Tensor | None] = field(default_factory=dict)
    weights: dict[tuple[int, bool], Any] = field(default_factory=dict)
    known: dict[Tensor, torch.Tensor] = field(default_factory=dict)
    shared: dict[Any, Any] = field(default_factory=dict)
    patterns: dict[Any, Pattern] = field(default_factory=dict)
    layer_patterns: dict[Any, tuple[LayerPattern, list[Any]]] = field(default_factory=dict)
    before_layers: Upstream = field(default_factory=Upstream)  # of the last layer that has a pattern of its own
    states: dict[str, Tensor] = field(default_factory=dict)
    needed: dict[torch.fx.Graph, set[torch.fx.Node]] = field(default_factory=dict)
    constants_of_layers: dict[tuple[int, str], _KnownValues] = field(default_factory=dict)
    made: list[tuple[torch.fx.Node, list[Tensor]]] = field(default_factory=list)  # the results of each lowered node

    def graph(self) -> FlowGraph:
        """Build the graph. Raises UnsupportedModelError, and TraceError as :func:`lower` does."""
        self.refuse_writes()
        inputs, values = self.arguments()
        nodes = self.program.graph_module.graph
        outputs = [self.tensor(value) for value in self.run(nodes, values)]
        if self.missing:
            raise UnsupportedModelError(type(self.module).__name__, self.missing)
        results = [*self.results_of(outputs), *self.new_values(outputs)]
        if not results:
            raise TraceError(
                f"{type(self.module).__name__} computes nothing: it returns no tensors, and writes to no buffers. "
                "Return what is needed of a call."
            )
        graph = FlowGraph(results, inputs).update_nodes()
        self.refuse_empty(graph)
        return graph

    def refuse_empty(self, graph: FlowGraph) -> None:
        """Raise TraceError for arguments without elements, EmptyTensorError if the graph computes such tensors."""
        name = type(self.module).__name__
        for number, x in enumerate(graph.inputs):
            if 0 in extents_of(x):
                raise TraceError(
                    f"Tensor {number} of the arguments of {name} has no elements (its shape is {list(extents_of(x))}): "
                    "leave it out of the arguments."
                )
        empty = empty_tensors(graph)
        if not empty:
            return
        makers: dict[Tensor, torch.fx.Node] = {}
        for node, results in self.made:
            pending = list(results)
            while pending:
                y = pending.pop()
                if y not in makers and y.op is not None:
                    makers[y] = node
                    pending += [*y.op.inputs, *y.op.outputs]
        calls = [f"{_called(makers[y])} makes one of the shape {list(extents_of(y))}" for y in empty if y in makers]
        shown = "; ".join(list(dict.fromkeys(calls))[:_MOST_SHOWN])
        raise EmptyTensorError(
            f"{name} computes with tensors of no elements: {shown}. Leave what they are for out of the model."
        )

    def refuse_writes(self) -> None:
        """Raise TraceError if a call of the module changes tensors that it does not return."""
        written = [
            f"{_WRITTEN[spec.kind]} {spec.target!r}"
            for spec in self.program.graph_signature.output_specs
            if spec.kind in _WRITTEN
        ]
        if written:
            raise TraceError(
                f"{type(self.module).__name__} writes to its {', '.join(written)} in a call, and a call of a graph "
                "changes nothing but its results and states. Register a tensor that is to be kept from call to call as "
                "a buffer of the module, which becomes a state. Make any other such tensor an argument; write to a "
                "copy of it, as after `cache = cache.clone()`, or by an operator that is not in place, such as "
                "`index_copy` for `index_copy_`; and return what is needed after the call."
            )

    def results_of(self, outputs: Sequence[Tensor | None]) -> list[Tensor]:
        """Select the outputs of a program that are the module's results. Raises TraceError for other results."""
        results = []
        name = type(self.module).__name__
        for y, spec in zip(outputs, self.program.graph_signature.output_specs, strict=True):
            if spec.kind is not OutputKind.USER_OUTPUT or isinstance(spec.arg, ConstantArgument):
                continue
            if isinstance(y, Pair):
                raise TraceError(
                    f"{name} returns {spec.arg.name!r}, which is complex: return torch.view_as_real of it, "
                    "whose last dim has the real and the imaginary part."
                )
            if y is None:
                raise TraceError(
                    f"{name} returns {spec.arg.name!r}, which is neither a tensor nor a constant: make it a tensor."
                )
            if 0 in extents_of(y):
                raise TraceError(
                    f"{name} returns {spec.arg.name!r}, which has no elements (its shape is {list(extents_of(y))}): "
                    "leave it out of the results."
                )
            results.append(read_state(y) if is_value_of_state(y) else y)
        return results

    def new_values(self, outputs: Sequence[Any]) -> list[Tensor]:
        """Make the new values of the states that the program writes to, from its outputs."""
        new = []
        for y, spec in zip(outputs, self.program.graph_signature.output_specs, strict=True):
            if spec.kind is OutputKind.BUFFER_MUTATION:
                old = self.states[str(spec.target)]
                if isinstance(y, Pair) or y is None:
                    raise TraceError(f"The buffer {spec.target!r} is given values that are no real tensor.")
                if y is not old:
                    new.append(y if updated_state(y) is old else replace_state(old, y))
        return list(dict.fromkeys(new))

    def state(self, name: str) -> Tensor:
        """Convert a buffer that the program writes to to a state, with the buffer's values before the first call."""
        data = self.data_of(name)
        dtype = name_of_dtype(data, f"The buffer {name!r}")
        if data.device.type == "meta" or not bool(data.detach().count_nonzero()):
            return state(name, list(data.shape), dtype)
        return held_state(name, data.detach())

    def arguments(self) -> tuple[list[Tensor], dict[torch.fx.Node, Any]]:
        """Make the inputs of the graph, and the value of each placeholder."""
        inputs: list[Tensor] = []
        values: dict[torch.fx.Node, Any] = {}
        placeholders = [node for node in self.program.graph_module.graph.nodes if node.op == "placeholder"]
        written = {
            spec.target for spec in self.program.graph_signature.output_specs if spec.kind is OutputKind.BUFFER_MUTATION
        }
        for node, spec in zip(placeholders, self.program.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                fake = node.meta.get("val")
                if isinstance(fake, torch.Tensor):
                    x = hidet.symbol(self.dims.shape(fake.shape), name_of_dtype(fake, f"The input {node.name}"), "cpu")
                    inputs.append(x)
                    values[node] = x
                else:
                    values[node] = None if fake is None else self.value(fake)
            elif spec.kind is InputKind.BUFFER and spec.target in written:
                values[node] = self.states[str(spec.target)] = self.state(str(spec.target))
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                values[node] = self.weight(str(spec.target), is_saved(spec))
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                values[node] = _KnownValues(self.program.constants[spec.target])
            else:
                raise TraceError(
                    f"{type(self.module).__name__} has an argument of the unsupported kind {spec.kind.name}."
                )
        return inputs, values

    def data_of(self, name: str) -> torch.Tensor:
        """Return a parameter or a buffer of the module."""
        owner, _, attribute = name.rpartition(".")
        data = getattr(self.module.get_submodule(owner), attribute)
        assert isinstance(data, torch.Tensor)
        return data

    def weight(self, name: str, is_saved: bool) -> Any:
        """Convert a parameter or a buffer to a weight, or to a constant if it is not in the state dict."""
        data = self.data_of(name)
        is_shape = data.device.type == "meta"
        key = id(data), is_saved or is_shape
        if key not in self.weights:
            self.weights[key] = self.held(name, data, is_shape) if is_saved or is_shape else _KnownValues(data.detach())
        return self.weights[key]

    def held(self, name: str, data: torch.Tensor, is_shape: bool) -> Tensor:
        """Make the weight of a name; ``data`` has its values or only its shape."""
        dtype = name_of_dtype(data, f"The weight {name!r}")
        if name in self.stored:
            return self.stored[name]
        return weight(name, list(data.shape), dtype) if is_shape else held_weight(name, data.detach())

    def run(self, nodes: torch.fx.Graph, values: dict[torch.fx.Node, Any]) -> Sequence[Any]:
        """Lower a graph of PyTorch, with the values of its placeholders; return its results."""
        needed = self.needed.get(nodes)
        if needed is None:
            needed = self.needed[nodes] = _needed(nodes)
        for node in nodes.nodes:
            if node.op == "output":
                flat, _ = pytree.tree_flatten(self.resolve(node.args[0], values))
                return flat
            if node.op == "get_attr":
                result = _attribute(nodes.owning_module, str(node.target))
                values[node] = _KnownValues(result) if isinstance(result, torch.Tensor) else result
            elif node.op == "call_function" and node in needed:
                values[node] = self.call(node, values)
        raise AssertionError("a graph of PyTorch has no output")

    def resolve(self, argument: Any, values: Mapping[torch.fx.Node, Any]) -> Any:
        """Replace nodes in an argument by their values."""
        return torch.fx.node.map_arg(argument, lambda node: values[node])

    def call(self, node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> Any:
        """Compute or lower one node; return its results."""
        target = node.target
        args, kwargs = self.resolve((node.args, dict(node.kwargs)), values)
        if target is operator.getitem:
            result = args[0][args[1]]
            if result is None and isinstance(node.meta.get("val"), torch.Tensor):
                self.refuse(node.all_input_nodes[0], f"its result {args[1]} is not supported")
                return self.stand_in(node.meta["val"])
            return result
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self.inlined(node, args)
        if target is LAYER:
            return self.layer(*args)
        meta = node.meta.get("val")
        if isinstance(meta, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.size(node, meta, args)
        key = self.key(target, args, kwargs)
        if key is not None and key in self.results_by_key:
            return self.results_by_key[key][0]
        result = self.computed(node, meta, args, kwargs)
        if key is not None:
            self.results_by_key[key] = result, (args, kwargs)  # keeps the arguments alive, whose ids are in the key
        return result

    def size(self, node: torch.fx.Node, meta: Any, args: Sequence[Any]) -> Any:
        """Compute a number from sizes."""
        try:
            return self.value(meta)
        except ValueError as error:
            if node.target in _SIZE_ARITHMETIC:
                return _SIZE_ARITHMETIC[node.target](*args)
            self.refuse(node, str(error))
            return 1

    def value(self, meta: Any) -> Any:
        """Convert a number of PyTorch, which may be symbolic. Raises ValueError for one that hidet cannot express."""
        if isinstance(meta, torch.SymInt):
            return self.dims.extent(meta)
        if isinstance(meta, torch.SymFloat):
            return self.dims.number(meta)
        if isinstance(meta, torch.SymBool):
            constant = meta.node.maybe_as_bool()
            if constant is None:
                raise ValueError(f"the truth value {meta} depends on symbolic dims")
            return constant
        return meta

    def inlined(self, node: torch.fx.Node, args: Sequence[Any]) -> Any:
        """Lower a nested graph, such as a block without gradients, as a part of this one; return its results."""
        target = node.target
        name = target.name() if isinstance(target, torch._ops.HigherOrderOperator) else str(target)
        block = next((x for x in args if isinstance(x, torch.fx.GraphModule)), None)
        is_autocast = name == "wrap_with_autocast"
        if block is None or name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            self.refuse(node, "control flow that depends on data cannot be traced")
            return self.stand_in(node.meta.get("val"))
        if is_autocast and args[2]:
            self.refuse(node, "autocast is not supported: cast the module, or set optimization_config['precision']")
        operands = args[list(args).index(block) + 1 :]
        placeholders = [entry for entry in block.graph.nodes if entry.op == "placeholder"]
        return tuple(self.run(block.graph, dict(zip(placeholders, operands, strict=True))))

    def layer(self, tensors: Sequence[Any], number: int, place: int) -> Sequence[Any]:
        """Lower a layer in place of a call of it, or copy another call's operators; return the results' tensors."""
        layer = self.layers[number]
        nodes = layer.program.graph_module.graph
        placeholders = [node for node in nodes.nodes if node.op == "placeholder"]
        values: dict[torch.fx.Node, Any] = {
            node: self.layer_value(node, operand, tensors, number, place)
            for node, operand in zip(placeholders, layer.operands, strict=True)
        }
        given = list(values.values())
        operands = list({id(x): x for x in given if isinstance(x, Tensor)}.values())
        positions = {id(x): position for position, x in enumerate(operands)}
        key = (number, *(self.operand_key(x, positions) for x in given))
        known = self.layer_patterns.get(key)
        copied = None if known is None else known[0].copy(operands)
        if copied is not None:
            return list(copied)
        if known is None:
            made = (x for _, tensors in self.made for x in tensors)
            self.before_layers.add((*operands, *made, *self.shared_tensors()))
        whole = self.run(nodes, values)
        results = [whole[place] for place in layer.results]
        if known is None and not self.missing and not any(isinstance(x, Pair) for x in results):
            pattern = LayerPattern.of(results, operands, self.before_layers, self.shared_tensors())
            self.layer_patterns[key] = pattern, given  # whose ids are in the key
        return results

    def layer_value(
        self,
        node: torch.fx.Node,
        operand: int | LayerWeight | str | None,
        tensors: Sequence[Any],
        number: int,
        place: int,
    ) -> Any:
        """Find the value of a placeholder: an operand of the call, a weight, a constant, or one that is not used."""
        layer = self.layers[number]
        if isinstance(operand, int):
            return tensors[operand]
        if isinstance(operand, LayerWeight):
            return self.weight(f"{layer.paths[place]}.{operand.name}", operand.is_saved)
        if operand is None:
            return node.meta.get("val")
        key = number, operand
        if key not in self.constants_of_layers:
            self.constants_of_layers[key] = _KnownValues(layer.program.constants[operand])
        return self.constants_of_layers[key]

    def shared_tensors(self) -> list[Tensor]:
        """List the constants, and what lowerings share."""
        leaves = pytree.tree_leaves((self.shared, list(self.constants.values())))
        return [x for x in leaves if isinstance(x, Tensor)]

    def operand_key(self, operand: Any, positions: Mapping[int, int]) -> Any:
        """Make a key of the properties of a layer's operand on which its lowering may depend."""
        return (
            ("known", id(operand))
            if isinstance(operand, _KnownValues | Pair)
            else self.argument_key(operand, positions)
        )

    def computed(self, node: torch.fx.Node, meta: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute the results of an operator: fold it if all its operands are constant, else lower it."""
        folded = self.folded(node, meta, args, kwargs)
        return self.lowered(node, meta, args, kwargs) if folded is None else folded

    def lowered(self, node: torch.fx.Node, meta: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Lower an operator; return its results."""
        name = str(node.target)
        try:
            given, options = self.operands(args, kwargs, name)
            of_pairs = any(isinstance(x, Pair) for x in pytree.tree_leaves((given, options)))
            lowering = lowering_of_pairs(name) if of_pairs else lowering_of(name)
            if lowering is None:
                raise Refused(f"there is no lowering of it{' for complex numbers' if of_pairs else ''}")
            results = self.results(meta)
            call = Call(name, results, tuple(_fakes(node.args)), self.shared, self.known.get)
            fakes = [fake for fake in pytree.tree_leaves(meta) if isinstance(fake, torch.Tensor)]
            if of_pairs or any(fake.is_complex() for fake in fakes):
                result = lowering(call, *given, **options)
                made = [isinstance(y, Pair) for y in (result if isinstance(result, tuple) else [result])]
                if made != [fake.is_complex() for fake in fakes]:
                    raise Refused("a conversion between real and complex numbers is not supported")
            else:
                result = self.repeated(call, lowering, given, options)
        except Refused as refused:
            self.refuse(node, str(refused))
            return self.stand_in(meta)
        except Invalid as invalid:
            raise TraceError(str(invalid)) from invalid
        except _UNFIT as error:
            if self.missing:
                return self.stand_in(meta)  # a stand-in may have caused the error
            if isinstance(error, TypeError) and "hidet.ir.Expr" in str(error):  # a symbolic dim stood for a number
                self.refuse(
                    node, "it needs sizes that are known, and has symbolic ones: leave them out of dynamic_shapes"
                )
                return self.stand_in(meta)
            self.refuse(node, reason_of(error))
            return self.stand_in(meta)
        if not self.missing:
            self.check(node, result, results)
        self.made.append((node, [y for y in pytree.tree_leaves(result) if isinstance(y, Tensor)]))
        return result

    def repeated(self, call: Call, lowering: Lowering, args: Any, kwargs: Any) -> Any:
        """Run a lowering, or copy the operators of an earlier call with equal arguments, as repeated layers have."""
        leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
        tensors = list({id(x): x for x in leaves if isinstance(x, Tensor)}.values())
        positions = {id(x): position for position, x in enumerate(tensors)}
        key = (call.name, str(spec), call.results, *(self.argument_key(x, positions) for x in leaves))
        pattern = self.patterns.get(key)
        if pattern is not None:
            return pattern.copy(tensors)
        shared_before = set(self.shared)
        result = lowering(call, *args, **kwargs)
        if shared_before == set(self.shared):  # the lowering has made no new shared values
            pattern = Pattern.of(result, tensors, [x for x in pytree.tree_leaves(self.shared) if isinstance(x, Tensor)])
            if pattern is not None:
                self.patterns[key] = pattern
        return result

    def argument_key(self, leaf: Any, positions: Mapping[int, int]) -> Any:
        """Make a key of the properties of an argument on which a lowering may depend."""
        if not isinstance(leaf, Tensor):
            return type(leaf), str(leaf)
        if leaf in self.known:
            return "known", id(leaf)
        return positions[id(leaf)], leaf.dtype.name, tuple(map(str, leaf.shape)), is_value_of_state(leaf)

    def folded(self, node: torch.fx.Node, meta: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute an operator on constants with PyTorch; None if an operand is no constant, or the result is large."""
        leaves = pytree.tree_leaves((list(args), dict(kwargs)))
        if any(isinstance(x, Tensor | Pair | hidet.ir.Expr) for x in leaves):
            return None
        fakes = [fake for fake in pytree.tree_leaves(meta) if isinstance(fake, torch.Tensor)]
        for fake in fakes:
            if not all(isinstance(size, int) for size in fake.shape):
                return None
            if math.prod(fake.shape) * fake.element_size() > MOST_COMPUTED_BYTES:
                return None
        target = node.target
        assert callable(target)
        if _is_random(target, args, kwargs):
            self.refuse(node, "it returns random numbers: make them an argument of the module")
            return self.stand_in(meta)
        plain_args, plain_kwargs = pytree.tree_map_only(_KnownValues, lambda x: x.value, (args, dict(kwargs)))
        if "device" in plain_kwargs:
            plain_kwargs["device"] = "cpu"
        with torch.no_grad():
            result = target(*plain_args, **plain_kwargs)
        if isinstance(result, torch.Tensor):
            return _KnownValues(result, lambda: self.lowered(node, meta, args, kwargs))
        return pytree.tree_map_only(torch.Tensor, _KnownValues, result)

    def key(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a key that is equal for equal computations; None if arguments cannot be compared."""
        try:
            leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
            key = (target, spec, *(_identity(leaf) for leaf in leaves))
            hash(key)
        except TypeError:
            return None
        return key

    def operands(self, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> tuple[Any, Any]:
        """Convert known tensors in the arguments of an operator to hidet's tensors.

        Those without dims become numbers for lowerings that take numbers, if that changes no dtype: among tensors
        with dims they rank below these, but a float16 that stands beside integers alone makes the result float16.
        """
        tensors = pytree.tree_map_only(_KnownValues, self.tensor, (list(args), dict(kwargs)))
        if not takes_numbers(name) or any(isinstance(x, Pair) for x in tensors[0]):
            return tensors
        numbers = pytree.tree_map_only(_KnownValues, self.number, (list(args), dict(kwargs)))
        same = promoted_dtype(*_operands(numbers[0])) == promoted_dtype(*_operands(tensors[0]))
        return numbers if same else tensors

    def number(self, known: _KnownValues) -> Any:
        """Convert a known tensor without dims to a number, and any other to hidet's tensor."""
        return self.tensor(known) if known.value.dim() else known.value.item()

    def tensor(self, value: Any) -> Any:
        """Convert a value to hidet's tensor, or to a pair of two if it is complex; None for a number."""
        if not isinstance(value, _KnownValues):
            return value if isinstance(value, Tensor | Pair) else None
        if value not in self.constants:
            constant = self.constants[value] = self.constant(value)
            if isinstance(constant, Tensor):
                self.known[constant] = value.value
        return self.constants[value]

    def constant(self, known: _KnownValues) -> Any:
        """Convert a known tensor to a constant of the graph; a broadcast one, to a broadcast of a smaller constant."""
        value = known.value.detach()
        if value.is_complex():
            whole = value.resolve_conj()
            return Pair(*(self.tensor(_KnownValues(part.contiguous())) for part in (whole.real, whole.imag)))
        if not value.numel():  # hidet cannot hold it
            kind = hidet.ir.data_type(name_of_dtype(value, "A constant"))
            return hidet.ops.full(list(value.shape), kind.zero, kind)
        strides = zip(value.shape, value.stride(), strict=True)
        broadcast = [dim for dim, (size, stride) in enumerate(strides) if size > 1 and stride == 0]
        small = value[tuple(slice(0, 1) if dim in broadcast else slice(None) for dim in range(value.dim()))]
        if small.numel() * small.element_size() > MOST_CONSTANT_BYTES and known.build is not None:
            return known.build()
        constant = hidet.from_torch(small.clone(memory_format=torch.contiguous_format))
        return hidet.ops.broadcast(constant, list(value.shape)) if broadcast else constant

    def results(self, meta: Any) -> tuple[ResultType, ...]:
        """Describe the outputs of an operator. Raises Refused for dtypes and sizes that are not supported."""
        fakes = [meta] if isinstance(meta, torch.Tensor) else list(meta or ())
        described = []
        for fake in fakes:
            if not isinstance(fake, torch.Tensor):
                continue
            dtype = PARTS.get(fake.dtype, fake.dtype)
            if dtype not in DTYPES:
                raise Refused(f"tensors of {fake.dtype} are not supported")
            try:
                described.append(ResultType(tuple(self.dims.shape(fake.shape)), DTYPES[dtype]))
            except ValueError as error:
                raise Refused(str(error)) from error
        return tuple(described)

    def check(self, node: torch.fx.Node, lowered: Any, results: Sequence[ResultType]) -> None:
        """Raise VerificationError if a lowered operator has another shape or dtype than PyTorch's."""
        tensors = list(lowered) if isinstance(lowered, tuple | list) else [lowered]
        described = [
            (y, result)
            for tensor, result in zip(tensors, results, strict=False)
            for y in ([tensor.real, tensor.imaginary] if isinstance(tensor, Pair) else [tensor])
            if y is not None
        ]
        for y, result in described:
            shape, dtype = extents_of(y), y.dtype.name
            if dtype != result.dtype or not same_shape(shape, result.shape):
                raise VerificationError(
                    f"{node.target} was lowered to {dtype}{list(map(str, shape))}, but PyTorch has "
                    f"{result.dtype}{list(map(str, result.shape))}: a defect of hidet_dist."
                )

    def stand_in(self, meta: Any) -> Any:
        """Make symbols in place of unsupported results, so that lowering goes on and reports all that is missing."""
        if isinstance(meta, torch.Tensor):
            try:
                return hidet.symbol(self.dims.shape(meta.shape), DTYPES.get(meta.dtype, "float32"), "cpu")
            except ValueError:
                return hidet.symbol([1] * meta.dim(), DTYPES.get(meta.dtype, "float32"), "cpu")
        return tuple(map(self.stand_in, meta)) if isinstance(meta, tuple | list) else meta

    def refuse(self, node: torch.fx.Node, reason: str) -> None:
        """Record a call of an unsupported operator."""
        name = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else _name_of(node.target)
        self.missing.append(MissingOperator(name, reason, _module_path(node), _line(node)))


def _is_random(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether an operator returns random numbers. Dropout, by itself or in attention, does unless it is off."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = {**{argument.name: argument.default_value for argument in target._schema.arguments}, **kwargs}
    given.update(zip(names, args, strict=False))
    switches = [given[name] for name in ("train", "training", "dropout_p") if name in given]
    return not switches or any(switch is None or bool(switch) for switch in switches)


def _identity(leaf: Any) -> Any:
    """Make a key of an argument: its value if it is a constant, else its identity."""
    if isinstance(leaf, int | float | str | bool | type(None)):
        return type(leaf), leaf
    if isinstance(leaf, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return leaf
    return id(leaf)


def _name_of(target: Any) -> str:
    """Return the name of a function in a graph of PyTorch, such as ``torch.sym_max``."""
    name = getattr(target, "__name__", None)
    return f"{target.__module__.removeprefix('_')}.{name}" if name else str(target)


def _operands(args: Sequence[Any]) -> list[Any]:
    """List the tensors and numbers among positional arguments."""
    return [x for x in args if isinstance(x, Tensor | bool | int | float)]


def _fakes(args: Sequence[Any]) -> list[Any]:
    """Replace nodes in arguments by PyTorch's fake tensors."""
    return [arg.meta.get("val") if isinstance(arg, torch.fx.Node) else arg for arg in args]


def _needed(nodes: torch.fx.Graph) -> set[torch.fx.Node]:
    """Collect the nodes on which an output depends; assertions are not among them."""
    needed: set[torch.fx.Node] = set()
    pending = [node for node in nodes.nodes if node.op == "output"]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    return needed


def _attribute(owner: Any, path: str) -> Any:
    """Return an attribute by its path, such as ``layers.0.mask``."""
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


def _module_path(node: torch.fx.Node) -> str:
    """Return the path of the module that calls an operator."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("L['self'].").removeprefix("L['self']")


def _called(node: torch.fx.Node) -> str:
    """Name the operator that a node calls, and where the model calls it, as far as that is known."""
    line = _line(node)
    return " ".join(filter(None, (str(node.target), _module_path(node), line and f"({line})")))


def _line(node: torch.fx.Node) -> str:
    """Return the file and line of the module's code that calls an operator."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    frames = [line for line in lines if line.startswith("File ")]
    if not frames:
        return ""
    parts = frames[-1].split(", ")
    return f"{PurePath(parts[0].removeprefix('File ').strip(chr(34))).name}:{parts[1].removeprefix('line ')}"
