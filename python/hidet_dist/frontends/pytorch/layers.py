"""Layers that a module has several times: one of each kind is exported, and the others become calls of it.

PyTorch takes as long for each layer of a model as for the first one. Here the first call of a layer is traced as it is.
Each call of an equal layer, with equal arguments, becomes one operator, whose operands are the tensors that the layer
is called with. One layer of each kind is then exported by itself, and lowered with the weights of the layer that is
called, in place of each such operator: the graph has the operators that it would have otherwise. Meanwhile the layers
that are not traced show no weights, since PyTorch takes its time for each weight in each of its passes.

Layers are equal that have the same classes, attributes, and shapes of weights in all of their parts. Integers may
differ, as the numbers of layers do: while the first layer is traced, an object stands for such an integer that cannot
be used. If a layer uses it, layers with different integers are different. A layer is not repeated whose calls have
other effects than their results, or return a part of their arguments.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind
from torch.utils import _pytree as pytree

FEWEST = 3
"""Equal layers from which on one of them is exported by itself."""

_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""The attributes that PyTorch gives to each module."""
_HOOKS = tuple(sorted(name for name in _OF_TORCH if name.endswith("_hooks")))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@torch.library.custom_op("hidet_dist::layer", mutates_args=())
def call_of_layer(tensors: list[torch.Tensor], number: int, place: int) -> list[torch.Tensor]:
    """Call a layer that is exported by itself.

    Parameters
    ----------
    tensors: list of torch.Tensor
        The tensors among the arguments.
    number: int
        The number of the call in :class:`Layers`.
    place: int
        The place of the layer that is called among those that are equal.

    Returns
    -------
    list of torch.Tensor
        The tensors among the layer's results.
    """
    raise NotImplementedError("A call of a layer is lowered, and not run.")


@call_of_layer.register_fake
def _results_of_call(tensors: list[torch.Tensor], number: int, place: int) -> list[torch.Tensor]:
    results, device = _active[-1].calls[number].results, tensors[0].device
    return [torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=device) for y in results]


LAYER = torch.ops.hidet_dist.layer.default
"""The operator of a call of a layer in an exported program."""

_active: list[Layers] = []


class CannotRepeatError(Exception):
    """A layer cannot be exported by itself."""


class _Unknown:
    """Stands for an integer that differs between equal layers. Whatever uses it ends the export."""

    def __init__(self, name: str, used: set[str]):
        object.__setattr__(self, "_known", (name, used))

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what asks for its type gets that of an integer
        return int

    def _refuse(self, *_: Any) -> Any:
        name, used = object.__getattribute__(self, "_known")
        used.add(name)
        raise CannotRepeatError(f"the layer uses its attribute {name!r}")

    def __getattr__(self, name: str) -> Any:
        return self._refuse()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __bool__ = __index__ = __int__ = __float__ = __str__ = __repr__ = __format__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _refuse
    __neg__ = __pos__ = __abs__ = __invert__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __divmod__ = __rdivmod__ = __round__ = _refuse
    __trunc__ = __floor__ = __ceil__ = __copy__ = __deepcopy__ = __reduce__ = __reduce_ex__ = _refuse


@dataclass(eq=False)
class _EqualLayers:
    """Equal layers.

    Attributes
    ----------
    layers: their paths in the module, and the layers.
    differing: the integers that differ between them: the path of a part, and the attribute's name.
    are_apart: whether no other part of the module has a weight of one of them.
    """

    layers: dict[str, torch.nn.Module]
    differing: list[tuple[str, str]]
    are_apart: bool

    @contextlib.contextmanager
    def without_differences(self, layer: torch.nn.Module, used: set[str]) -> Iterator[None]:
        """Replace the integers of a layer that differ from others by objects that cannot be used, for a while."""
        before = [(vars(layer.get_submodule(path)), name) for path, name in self.differing]
        values = [attributes[name] for attributes, name in before]
        try:
            for attributes, name in before:
                attributes[name] = _Unknown(name, used)
            yield
        finally:
            for (attributes, name), value in zip(before, values, strict=True):
                attributes[name] = value


@dataclass
class _LayerCall:
    """The first call of a layer, after which equal ones are modelled.

    Attributes
    ----------
    group, layer: the layer that is called, and those that are equal.
    arguments: positional and keyword arguments, with tensors on the meta device.
    results: the tensors among the results, on the meta device.
    result: the results, with the numbers of tensors in place of tensors; None if the call cannot be repeated.
    repetitions: the number of calls that became operators.
    """

    group: _EqualLayers
    layer: torch.nn.Module
    arguments: Any
    results: list[torch.Tensor]
    result: Any
    repetitions: int = 0


def is_saved(spec: InputSpec) -> bool:
    """Whether a parameter or a buffer of an exported program is in the module's state dict."""
    return spec.persistent is not False  # None for parameters


@dataclass(frozen=True)
class LayerWeight:
    """A parameter or a buffer of a layer: its name in the layer, and whether it is in the state dict."""

    name: str
    is_saved: bool


@dataclass(frozen=True)
class Layer:
    """A layer that is exported by itself, to be lowered in place of its calls.

    Attributes
    ----------
    program: the program; its placeholders are the layer's weights, arguments and constants.
    operands: for each placeholder, the number of the call's operand, a weight, the name of a constant, or None.
    results: the positions of the tensors among the outputs.
    paths: of the layers that calls name by their places in it.
    """

    program: ExportedProgram
    operands: tuple[int | LayerWeight | str | None, ...]
    results: tuple[int, ...]
    paths: tuple[str, ...]


@dataclass
class Findings:
    """What attempts to export a module have shown of its layers, for the next one.

    Attributes
    ----------
    used: the names of integer attributes that layers use, so that layers are different where these differ.
    traced: the paths of layers that are traced, beside the first one of equal ones.
    """

    used: set[str] = field(default_factory=set)
    traced: set[str] = field(default_factory=set)

    @property
    def count(self) -> int:
        """Their number, which only grows."""
        return len(self.used) + len(self.traced)


class Layers:
    """The layers of a module that is exported, and their calls.

    Parameters
    ----------
    module: torch.nn.Module
        The module. Only the entries of its lists of modules are looked at.
    findings: Findings
        What earlier attempts have shown, to which this one adds.
    """

    def __init__(self, module: torch.nn.Module, findings: Findings):
        self.findings = findings
        self._module = module
        self._is_called = False
        self._known_before = findings.count
        self.groups = _groups(module, frozenset(findings.used))
        self.calls: list[_LayerCall] = []
        self._by_signature: dict[Any, int] = {}
        self._own = {x.untyped_storage()._cdata for x in (*module.parameters(), *module.buffers())}

    @property
    def must_be_tried_again(self) -> bool:
        """Whether a layer has used an integer that differs between equal ones, or was to be traced without weights."""
        return self.findings.count > self._known_before

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Have calls of the module's layers become operators while the block runs, and hide weights of layers."""
        _active.append(self)
        hidden: list[tuple[dict[str, Any], str, Any]] = []
        hooks = [
            self._module.register_forward_pre_hook(self._enter),
            self._module.register_forward_hook(self._leave, always_call=True),
        ]
        try:
            for group in self.groups:
                for place, (path, layer) in enumerate(group.layers.items()):
                    vars(layer)["forward"] = _Forward(self, group, place, layer)
                    if not self._is_traced(group, place, path):
                        for part in layer.modules():
                            hidden += [(vars(part), name, vars(part)[name]) for name in ("_parameters", "_buffers")]
            for attributes, name, tensors in hidden:
                attributes[name] = _HiddenTensors(self, tensors)
            yield
        finally:
            _active.pop()
            for hook in hooks:
                hook.remove()
            for attributes, name, tensors in hidden:
                attributes[name] = tensors
            for group in self.groups:
                for layer in group.layers.values():
                    vars(layer).pop("forward", None)

    def _enter(self, *_: Any) -> None:
        self._is_called = True

    def _leave(self, *_: Any) -> None:
        self._is_called = False

    def refuse_read(self) -> None:
        """Note that layers must show their weights, and end the export, if the module is what reads them."""
        if self._is_called:
            self.findings.traced.update(path for group in self.groups for path in group.layers)
            raise CannotRepeatError("the module reads weights of its layers")

    def _is_traced(self, group: _EqualLayers, place: int, path: str) -> bool:
        """Whether a layer keeps its weights, so that a call of it can be traced."""
        return not group.are_apart or place == 0 or path in self.findings.traced

    def _trace(
        self, group: _EqualLayers, place: int, layer: torch.nn.Module, args: Any, kwargs: Any, is_rare: bool
    ) -> Any:
        """Trace a call; where the layer has no weights, note it and end the export.

        All of its kind are noted, too, unless such calls are rare: each further attempt takes as long as this one.
        """
        paths = list(group.layers)
        if self._is_traced(group, place, paths[place]):
            return type(layer).forward(layer, *args, **kwargs)
        noted = self.findings.traced
        noted.update(paths[place : place + 1] if is_rare and noted.isdisjoint(paths) else paths)
        raise CannotRepeatError("the layer is called with other arguments than those before it")

    def call(self, group: _EqualLayers, place: int, layer: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a layer, the one at a ``place`` among equal ones, while its module is exported."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        signature = _signature(leaves)
        if signature is None:
            return self._trace(group, place, layer, args, kwargs, is_rare=False)
        number = self._by_signature.setdefault((id(group), str(structure), signature), len(self.calls))
        if number == len(self.calls):
            with group.without_differences(layer, self.findings.used):
                result = self._trace(group, place, layer, args, kwargs, is_rare=True)
            results, numbered = _numbered(result, leaves)
            arguments = pytree.tree_map_only(torch.Tensor, _meta, (args, kwargs))
            self.calls.append(_LayerCall(group, layer, arguments, results, numbered))
            return result
        known = self.calls[number]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if known.layer is layer or known.result is None or not tensors:
            return self._trace(group, place, layer, args, kwargs, is_rare=False)
        known.repetitions += 1
        results = call_of_layer(tensors, number, place)
        return pytree.tree_map_only(_Number, lambda place: results[place.number], known.result)

    def programs(self, export: Callable[[torch.nn.Module, Any, Any], ExportedProgram]) -> dict[int, Layer]:
        """Export the layers that have calls, each by itself; ``export`` takes a module and its arguments.

        Raises
        ------
        CannotRepeatError
            When a layer's calls have effects beside their results, or depend on more than arguments and weights.
        """
        found = {}
        for number, call in enumerate(self.calls):
            if call.repetitions:
                args, kwargs = call.arguments
                with call.group.without_differences(call.layer, self.findings.used):
                    program = export(call.layer, args, kwargs)
                found[number] = self._layer(call, program)
        return found

    def _layer(self, call: _LayerCall, program: ExportedProgram) -> Layer:
        """Describe the program of a layer. Raises CannotRepeatError."""
        signature = program.graph_signature
        leaves = pytree.tree_leaves(call.arguments)
        names = {name for name, _ in _weights(call.layer)}
        arguments = iter(range(sum(isinstance(leaf, torch.Tensor) for leaf in leaves)))
        operands: list[int | LayerWeight | str | None] = []
        for spec in signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                operands.append(None if isinstance(spec.arg, ConstantArgument) else next(arguments))
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target in names:
                operands.append(LayerWeight(spec.target, is_saved(spec)))
            elif spec.kind is InputKind.CONSTANT_TENSOR and self._is_constant(program.constants[str(spec.target)]):
                operands.append(str(spec.target))
            else:
                raise CannotRepeatError(f"the layer reads {spec.target!r}, which is no part of it")
        if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
            raise CannotRepeatError("the layer writes to tensors")
        places = [
            place for place, spec in enumerate(signature.output_specs) if not isinstance(spec.arg, ConstantArgument)
        ]
        (output,) = (node for node in program.graph_module.graph.nodes if node.op == "output")
        if next(arguments, None) is not None or len(places) != len(call.results):
            raise CannotRepeatError("the layer has other arguments or results by itself")
        if any(_is_part_of_argument(output.args[0][place]) for place in places):
            raise CannotRepeatError("the layer returns a part of its arguments")
        return Layer(program, tuple(operands), tuple(places), tuple(call.group.layers))

    def _is_constant(self, x: Any) -> bool:
        """Whether a tensor that a layer's program holds is a constant, and no weight of another part."""
        if not isinstance(x, torch.Tensor) or x.untyped_storage()._cdata in self._own:
            return False
        return not x.numel() or bool(x.untyped_storage().nbytes())


class _HiddenTensors(dict[str, Any]):
    """The parameters or buffers of a part of a layer that shows none, as for PyTorch, which lists them for its passes.

    A module that reads them in its call must not find that there are none.
    """

    def __init__(self, layers: Layers, hidden: Mapping[str, Any]):
        super().__init__()
        self._layers, self._names = layers, frozenset(hidden)

    def __contains__(self, name: object) -> bool:
        if name in self._names:
            self._layers.refuse_read()
        return False

    def _refuse(self) -> None:
        if self._names:
            self._layers.refuse_read()

    def __getitem__(self, name: str) -> Any:
        self._refuse()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._refuse()
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self._refuse()
        return super().__iter__()

    def __len__(self) -> int:
        self._refuse()
        return super().__len__()

    def keys(self) -> Any:
        self._refuse()
        return super().keys()

    def values(self) -> Any:
        self._refuse()
        return super().values()

    def items(self) -> Any:
        self._refuse()
        return super().items()


class _Forward:
    """The ``forward`` of a layer while its module is exported."""

    def __init__(self, layers: Layers, group: _EqualLayers, place: int, layer: torch.nn.Module):
        self._layers, self._group, self._place, self._layer = layers, group, place, layer
        self.__wrapped__ = type(layer).forward.__get__(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._layers.call(self._group, self._place, self._layer, args, kwargs)


@dataclass(frozen=True)
class _Number:
    """Stands for a tensor among results."""

    number: int


def _weights(layer: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List the parameters and buffers of a layer, with all of their names."""
    return [*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False)]


def _meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="meta")


def _signature(leaves: Sequence[Any]) -> Any:
    """Make a key of arguments that is equal for calls that a layer cannot tell apart; None where that is not known."""
    key = []
    for leaf in leaves:
        if type(leaf) in _PLAIN:
            key.append((type(leaf), leaf))
        elif isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
            if not all(type(size) is int for size in leaf.shape):
                return None
            key.append((torch.Tensor, (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)))
        else:
            return None
    return tuple(key)


def _numbered(result: Any, arguments: Sequence[Any]) -> tuple[list[torch.Tensor], Any]:
    """Collect the tensors of a result on the meta device, and number them in it; no result if it cannot be repeated."""
    leaves, structure = pytree.tree_flatten(result)
    given = {id(leaf) for leaf in arguments}
    tensors: list[torch.Tensor] = []
    numbered: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in given or leaf.device.type != "cpu":
                return [], None
            numbered.append(_Number(len(tensors)))
            tensors.append(_meta(leaf))
        elif type(leaf) in _PLAIN:
            numbered.append(leaf)
        else:
            return [], None
    return (tensors, pytree.tree_unflatten(numbered, structure)) if tensors else ([], None)


def _is_part_of_argument(node: Any) -> bool:
    """Whether a result in a program is an argument, or a view of one."""
    while isinstance(node, torch.fx.Node):
        if node.op == "placeholder":
            return True
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return False
        if not any(y.alias_info is not None for y in target._schema.returns):
            return False
        node = node.args[0]
    return False


def _groups(module: torch.nn.Module, used: frozenset[str]) -> list[_EqualLayers]:
    """Group the equal entries of a module's lists, those of inner lists left out."""
    layers: dict[str, torch.nn.Module] = {}
    integers: dict[str, dict[tuple[str, str], int]] = {}
    known: dict[Any, list[str]] = {}
    seen: set[int] = set()
    for path, layer in _entries(module):
        described = _described(layer, used)
        if described is not None and "forward" not in vars(layer) and id(layer) not in seen:
            key, integers[path] = described
            layers[path] = layer
            seen.add(id(layer))
            known.setdefault(key, []).append(path)
    uses = Counter(id(x) for _, x in _weights(module))
    groups = []
    for paths in known.values():
        if len(paths) >= FEWEST:
            of_layers = [integers[path] for path in paths]
            differing = [place for place in of_layers[0] if len({one[place] for one in of_layers}) > 1]
            members = {path: layers[path] for path in paths}
            groups.append(_EqualLayers(members, differing, all(_is_apart(layer, uses) for layer in members.values())))
    return groups


def _is_apart(layer: torch.nn.Module, uses: Mapping[int, int]) -> bool:
    """Whether a layer has each of its weights as often as the whole module has."""
    return all(uses[number] == count for number, count in Counter(id(x) for _, x in _weights(layer)).items())


def _entries(module: torch.nn.Module, path: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the entries of the outermost lists in a module, with their paths."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.ModuleList):
            yield from ((f"{path}{name}.{number}", entry) for number, entry in enumerate(child))
        else:
            yield from _entries(child, f"{path}{name}.")


def _described(layer: torch.nn.Module, used: frozenset[str]) -> tuple[Any, dict[tuple[str, str], int]] | None:
    """Describe a layer by a key that is equal for equal ones, and its integers by path and name.

    None for a layer with hooks in it.
    """
    key: list[Any] = []
    integers: dict[tuple[str, str], int] = {}
    numbers: dict[int, int] = {}  # of parts and weights, in the order in which they are met: tied ones have one
    for path, part in layer.named_modules(remove_duplicate=False):
        attributes = vars(part)
        if path and any(attributes[name] for name in _HOOKS):
            return None
        own = []
        for name, value in sorted(attributes.items()):
            if name in _OF_TORCH:
                continue
            if type(value) is int and name not in used:
                integers[path, name] = value
                own.append((name, int))
            else:
                own.append((name, _comparable(value)))
        tensors = [
            (name, None if x is None else (numbers.setdefault(id(x), len(numbers)), type(x), *_meta_key(x)))
            for named in (part._parameters, part._buffers)
            for name, x in named.items()
        ]
        number = numbers.setdefault(id(part), len(numbers))
        kept = tuple(sorted(part._non_persistent_buffers_set))
        key.append((path, number, type(part), part.training, tuple(own), tuple(tensors), kept))
    return tuple(key), integers


def _meta_key(x: torch.Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.dtype, x.device.type


def _comparable(value: Any) -> Any:
    """Make a key of an attribute that is equal for equal values: those of other types are equal to themselves alone."""
    if type(value) in _PLAIN:
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), tuple(map(_comparable, value))
    if type(value) is dict:
        items: Mapping[Any, Any] = value
        return dict, tuple((_comparable(key), _comparable(entry)) for key, entry in items.items())
    return id(value)
