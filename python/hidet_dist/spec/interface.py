"""The interface of a model: names and nesting of a graph's inputs and outputs.

A graph takes and returns flat lists of tensors. A model takes arguments by name, some of them nested, and returns
tuples, dicts and data classes. The structure of both is kept as plain JSON values, which artifacts hold:

* ``{"tensor": 3}``: the tensor of that number.
* ``{"value": null}``: a value that is the same in every call (null, a truth value, a number or a text).
* ``{"list": [...]}``, ``{"tuple": [...]}``, ``{"dict": [["key", ...], ...]}``: a list, a tuple, a dict.
* ``{"record": "BaseModelOutput", "fields": [["last_hidden_state", ...], ...]}``: a data class. It is returned as a
  :class:`Record`: no class is imported because a file names it.
* ``{"named_tuple": "max", "fields": [["values", ...], ...]}``: a named tuple, returned as a :class:`NamedParts`.

Named parts are pairs in a list, because their order matters, and JSON objects are unordered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hidet_dist.checks import is_list, is_whole, shown
from hidet_dist.errors import InputError, SpecError

Structure = dict[str, Any]

_MARK = "_hidet_dist_interface"
_MOST_DEPTH = 64  # levels of a structure: models have few, and recursion in Python is limited
_SCALARS = (bool, int, float, str, type(None))


class Record(Mapping[str, Any]):
    """The fields of a data class: as attributes (``y.logits``), by key (``y["logits"]``) or by position (``y[0]``).

    Positions and iteration skip fields that are None, as transformers' outputs do.
    """

    def __init__(self, name: str, fields: Mapping[str, Any]):
        self.__dict__.update({key: value for key, value in fields.items() if not key.startswith("_")})
        self.__name, self.__fields = name, dict(fields)

    def __getitem__(self, key: Any) -> Any:
        return self.__fields[key] if isinstance(key, str) else tuple(self.__present().values())[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.__present())

    def __len__(self) -> int:
        return len(self.__present())

    def __repr__(self) -> str:
        return f"{self.__name}({', '.join(f'{name}={value!r}' for name, value in self.__present().items())})"

    def __present(self) -> dict[str, Any]:
        return {name: value for name, value in self.__fields.items() if value is not None}


class NamedParts(tuple[Any, ...]):
    """The parts of a named tuple: by position (``values, indices = y``), as attributes (``y.values``) or by key."""

    def __new__(cls, name: str, fields: Mapping[str, Any]) -> NamedParts:
        """Make a tuple of the values of ``fields``."""
        return super().__new__(cls, fields.values())

    def __init__(self, name: str, fields: Mapping[str, Any]):
        self.__dict__.update({key: value for key, value in fields.items() if not key.startswith("_")})
        self.__name, self.__fields = name, tuple(fields)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self.__fields.index(key) if isinstance(key, str) else key)

    def __repr__(self) -> str:
        parts = (f"{name}={value!r}" for name, value in zip(self.__fields, self, strict=True))
        return f"{self.__name}({', '.join(parts)})"


@dataclass(frozen=True)
class Interface:
    """Names and nesting of a graph's inputs and outputs.

    Attributes
    ----------
    parameters: tuple of pairs
        The name and structure of each argument of the model, in the order of positional arguments.
    input_names, output_names: tuple of str
        The name of each input and output of the graph, such as ``input_ids`` or ``hidden_states.0``.
    result: mapping
        The structure of the model's result.
    """

    parameters: tuple[tuple[str, Structure], ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    result: Structure

    def flatten(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Convert the arguments of the model to the inputs of the graph.

        Raises
        ------
        InputError
            When an argument is missing or unknown, or differs in nesting or in a constant value from the traced
            call.
        """
        if len(args) > len(self.parameters):
            raise InputError(f"The model takes {len(self.parameters)} arguments; {len(args)} were given by position.")
        parameters = dict(self.parameters)
        values = dict(zip(parameters, args, strict=False))
        for name, value in kwargs.items():
            if name not in parameters:
                known = ", ".join(parameters)
                raise InputError(f"The model was not traced with an argument {name!r}; it takes {known}.")
            if name in values:
                raise InputError(f"The argument {name!r} was given twice.")
            values[name] = value
        flat: dict[int, Any] = {}
        for name, structure in self.parameters:
            if name not in values and any(True for _ in _tensors(structure)):
                raise InputError(f"The argument {name!r} is missing.")
            if name in values:
                _match(values[name], structure, name, flat)
        return [flat[number] for number in range(len(self.input_names))]

    def nest(self, outputs: Sequence[Any]) -> Any:
        """Convert the outputs of the graph to the result of the model."""
        return nested(self.result, outputs)

    def to_plain(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        return {
            "parameters": [list(pair) for pair in self.parameters],
            "input_names": list(self.input_names),
            "output_names": list(self.output_names),
            "result": self.result,
        }

    @classmethod
    def from_plain(cls, data: Any) -> Interface:
        """Read the JSON values that :meth:`to_plain` makes. Raises SpecError for others."""
        if not isinstance(data, dict) or set(data) != {"parameters", "input_names", "output_names", "result"}:
            raise SpecError("An interface must have parameters, input_names, output_names and result.")
        for key in ("input_names", "output_names"):
            names = data[key]
            if not is_list(names) or not all(isinstance(name, str) for name in names):
                raise SpecError(f"The {key} of an interface must be a list of texts; got {shown(names)}.")
        parameters = data["parameters"]
        if not _are_named(parameters):
            raise SpecError(f"The parameters of an interface must be pairs of distinct names; got {shown(parameters)}.")
        inputs, outputs = tuple(data["input_names"]), tuple(data["output_names"])
        for key, structures, names_key, count in (
            ("parameters", [(f"parameters[{name!r}]", part) for name, part in parameters], "input_names", len(inputs)),
            ("result", [("result", data["result"])], "output_names", len(outputs)),
        ):
            numbers = [number for what, part in structures for number in _numbers(part, what)]
            if sorted(numbers) != list(range(count)):
                raise SpecError(
                    f"The {key} of an interface must have each of the {count} tensors of {names_key} once; got "
                    f"{numbers} in {shown(data[key])}."
                )
        return cls(tuple((name, part) for name, part in parameters), inputs, outputs, data["result"])


def attach(graph: Any, interface: Interface) -> None:
    """Attach to a graph the interface of the model that it was traced from."""
    setattr(graph, _MARK, interface)


def interface_of(graph: Any) -> Interface | None:
    """Return the interface of the model that a graph was traced from; None for any other graph."""
    interface: Interface | None = getattr(graph, _MARK, None)
    return interface


def names_of_io(graph: Any) -> dict[str, Any]:
    """Map the interface's names to inputs and outputs of the graph; empty for a graph without an interface."""
    interface = interface_of(graph)
    if interface is None:
        return {}
    # New values of states follow the results.
    names = dict(zip(interface.output_names, graph.outputs, strict=False))
    return {**names, **dict(zip(interface.input_names, graph.inputs or (), strict=True))}


def nested(structure: Structure, tensors: Sequence[Any]) -> Any:
    """Nest tensors in a structure."""
    ((kind, value),) = [(key, value) for key, value in structure.items() if key != "fields"]
    if kind == "tensor":
        return tensors[value]
    if kind == "value":
        return value
    if kind in ("list", "tuple"):
        items = [nested(item, tensors) for item in value]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: nested(item, tensors) for key, item in value}
    kinds = {"record": Record, "named_tuple": NamedParts}
    return kinds[kind](value, {key: nested(item, tensors) for key, item in structure["fields"]})


def _children(structure: Any) -> list[tuple[str, Any]]:
    """List the parts of a structure by name; none for a tensor or a value. Raises SpecError for anything else."""
    keys = set(structure) if isinstance(structure, dict) else set()
    if keys == {"tensor"} and is_whole(structure["tensor"], 0):
        return []
    if keys == {"value"} and isinstance(structure["value"], _SCALARS):
        return []
    for kind in ("list", "tuple"):
        if keys == {kind} and is_list(structure[kind]):
            return [(str(number), item) for number, item in enumerate(structure[kind])]
    if keys == {"dict"} and _are_named(structure["dict"]):
        return [(key, item) for key, item in structure["dict"]]
    for kind in ("record", "named_tuple"):
        if keys == {kind, "fields"} and isinstance(structure[kind], str) and _are_named(structure["fields"]):
            return [(key, item) for key, item in structure["fields"]]
    raise SpecError(
        f"{shown(structure)} is not a tensor, value, list, tuple, dict, or a record or named tuple with fields."
    )


def _are_named(parts: Any) -> bool:
    """Tell whether a value is a list of pairs of a name and a part, with distinct names."""
    if not is_list(parts) or not all(is_list(pair) and len(pair) == 2 and isinstance(pair[0], str) for pair in parts):
        return False
    return len({pair[0] for pair in parts}) == len(parts)


def _tensors(structure: Any, depth: int = 0) -> Iterator[int]:
    """Yield the numbers of the tensors in a structure. Raises SpecError if it is malformed."""
    if depth > _MOST_DEPTH:
        raise SpecError(f"it is nested more than {_MOST_DEPTH} deep.")
    children = _children(structure)
    if "tensor" in structure:
        yield structure["tensor"]
    for _, item in children:
        yield from _tensors(item, depth + 1)


def _numbers(structure: Any, what: str) -> list[int]:
    """List the numbers of the tensors in a structure. Raises SpecError, naming it as ``what``, if it is malformed."""
    try:
        return list(_tensors(structure))
    except SpecError as error:
        raise SpecError(f"The {what} of an interface is malformed: {error}") from error


def _match(argument: Any, structure: Structure, what: str, flat: dict[int, Any]) -> None:
    """Match an argument with its structure, and collect its tensors by number. Raises InputError."""
    if "tensor" in structure:
        if argument is None:
            raise InputError(f"The argument {what!r} must be a tensor, as it was when the model was traced.")
        flat[structure["tensor"]] = argument
    elif "value" in structure:
        if not isinstance(argument, _SCALARS) or argument != structure["value"]:
            raise InputError(
                f"The argument {what!r} was {structure['value']!r} when the model was traced, and is part of the "
                f"program; got {shown(argument)}."
            )
    else:
        children = _children(structure)
        parts = _parts(argument, "list" in structure or "tuple" in structure)
        names = [name for name, _ in children]
        # A mapping must have exactly these keys; of an object, only these attributes are read.
        if parts is None:
            parts = {name: getattr(argument, name) for name in names if hasattr(argument, name)}
        if sorted(parts) != sorted(names):
            raise InputError(
                f"The argument {what!r} must have the parts {', '.join(names) or 'none'}, as it had when the model was "
                f"traced; got {shown(argument)}."
            )
        for name, item in children:
            _match(parts[name], item, f"{what}.{name}", flat)


def _parts(argument: Any, is_sequence: bool) -> dict[str, Any] | None:
    """Map an argument's parts by name; empty if it is not the traced kind of sequence, None for an object."""
    if is_sequence:
        return {str(number): part for number, part in enumerate(argument)} if isinstance(argument, list | tuple) else {}
    return {str(key): part for key, part in argument.items()} if isinstance(argument, Mapping) else None
