"""Names and nesting of a model's arguments and results, kept beside the flat inputs and outputs of its graph.

A graph takes and gives flat lists of tensors. A model takes arguments by name, some of them nested, and gives tuples,
dicts and data classes. The structure of both is kept as plain JSON values, which artifacts hold:

* ``{"tensor": 3}``: the tensor of that number.
* ``{"value": null}``: a value that is the same in every call (null, a truth value, a number or a text).
* ``{"list": [...]}``, ``{"tuple": [...]}``, ``{"dict": [["key", ...], ...]}``: what they say.
* ``{"record": "BaseModelOutput", "fields": [["last_hidden_state", ...], ...]}``: a data class or a named tuple; it is
  given back as a :class:`Record`, for nothing is imported on the word of a file.

Parts with names are pairs in a list, for their order counts, and the keys of a JSON object have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hidet_dist.checks import is_list, is_whole, shown
from hidet_dist.errors import InputError, SpecError

Structure = dict[str, Any]

_MARK = "_hidet_dist_interface"
_MOST_DEPTH = 64  # of a structure: models nest a few levels, and Python's stack has an end
_SCALARS = (bool, int, float, str, type(None))


class Record(Mapping[str, Any]):
    """The fields of a data class, by name: as attributes (``y.logits``), keys (``y["logits"]``) or places (``y[0]``).

    Fields that are None are left out of places and of iteration, as transformers' outputs leave them out.
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


@dataclass(frozen=True)
class Interface:
    """Names and nesting of a graph's inputs and outputs.

    Attributes
    ----------
    parameters: tuple of pairs
        The name and structure of each argument of the model, in the order in which they may be given by place.
    input_names, output_names: tuple of str
        The name of each input and output of the graph, such as ``input_ids`` or ``hidden_states.0``.
    result: mapping
        The structure of what the model gives back.
    """

    parameters: tuple[tuple[str, Structure], ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    result: Structure

    def flatten(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The inputs of the graph, from the arguments of the model.

        Raises
        ------
        InputError
            When an argument is missing or unknown, or is nested otherwise or has another constant than in the traced
            call.
        """
        if len(args) > len(self.parameters):
            raise InputError(f"The model takes {len(self.parameters)} arguments; {len(args)} were given by place.")
        parameters = dict(self.parameters)
        given = dict(zip(parameters, args, strict=False))
        for name, value in kwargs.items():
            if name not in parameters:
                known = ", ".join(parameters)
                raise InputError(f"The model was not traced with an argument {name!r}; it takes {known}.")
            if name in given:
                raise InputError(f"The argument {name!r} was given twice.")
            given[name] = value
        flat: dict[int, Any] = {}
        for name, structure in self.parameters:
            if name not in given and any(True for _ in _tensors(structure)):
                raise InputError(f"The argument {name!r} is missing.")
            if name in given:
                _match(given[name], structure, name, flat)
        return [flat[number] for number in range(len(self.input_names))]

    def nest(self, outputs: Sequence[Any]) -> Any:
        """What the model gives back, from the outputs of the graph."""
        return nested(self.result, outputs)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "parameters": [list(pair) for pair in self.parameters],
            "input_names": list(self.input_names),
            "output_names": list(self.output_names),
            "result": self.result,
        }

    @classmethod
    def from_json(cls, data: Any) -> Interface:
        """The inverse of :meth:`to_json`. Raises SpecError."""
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
    """Let a graph know the interface of the model that it was traced from."""
    setattr(graph, _MARK, interface)


def interface_of(graph: Any) -> Interface | None:
    """The interface of the model that a graph was traced from; None for a graph that was made by hand."""
    found: Interface | None = getattr(graph, _MARK, None)
    return found


def names_of_io(graph: Any) -> dict[str, Any]:
    """The inputs and outputs of a graph by the names that its interface gives them; none of a graph without one."""
    interface = interface_of(graph)
    if interface is None:
        return {}
    names = dict(zip(interface.output_names, graph.outputs, strict=True))
    return {**names, **dict(zip(interface.input_names, graph.inputs or (), strict=True))}


def nested(structure: Structure, tensors: Sequence[Any]) -> Any:
    """Tensors in the places that a structure gives them."""
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
    return Record(value, {key: nested(item, tensors) for key, item in structure["fields"]})


def _children(structure: Any) -> list[tuple[str, Any]]:
    """The parts of a structure by their names; none for a tensor or a value. Raises SpecError where it is malformed."""
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
    if keys == {"record", "fields"} and isinstance(structure["record"], str) and _are_named(structure["fields"]):
        return [(key, item) for key, item in structure["fields"]]
    raise SpecError(f"{shown(structure)} is no tensor, value, list, tuple, dict or record with fields.")


def _are_named(parts: Any) -> bool:
    """Whether a value is a list of pairs, each a name and a part; no name twice."""
    if not is_list(parts) or not all(is_list(pair) and len(pair) == 2 and isinstance(pair[0], str) for pair in parts):
        return False
    return len({pair[0] for pair in parts}) == len(parts)


def _tensors(structure: Any, depth: int = 0) -> Iterator[int]:
    """Yield the numbers of the tensors in a structure. Raises SpecError where it is malformed."""
    if depth > _MOST_DEPTH:
        raise SpecError(f"it is nested more than {_MOST_DEPTH} deep.")
    children = _children(structure)
    if "tensor" in structure:
        yield structure["tensor"]
    for _, item in children:
        yield from _tensors(item, depth + 1)


def _numbers(structure: Any, what: str) -> list[int]:
    """The numbers of the tensors in a structure. Raises SpecError, naming it as ``what``, where it is malformed."""
    try:
        return list(_tensors(structure))
    except SpecError as error:
        raise SpecError(f"The {what} of an interface is malformed: {error}") from error


def _match(given: Any, structure: Structure, what: str, flat: dict[int, Any]) -> None:
    """Find the tensors of a structure in what was given for it. Raises InputError where the two differ."""
    if "tensor" in structure:
        if given is None:
            raise InputError(f"The argument {what!r} must be a tensor, as it was when the model was traced.")
        flat[structure["tensor"]] = given
    elif "value" in structure:
        if not isinstance(given, _SCALARS) or given != structure["value"]:
            raise InputError(
                f"The argument {what!r} was {structure['value']!r} when the model was traced, and is part of the "
                f"program; got {shown(given)}."
            )
    else:
        children = _children(structure)
        parts = _parts(given, "list" in structure or "tuple" in structure)
        names = [name for name, _ in children]
        # A mapping has these keys and no others; of an object, the attributes that count are these.
        if parts is None:
            parts = {name: getattr(given, name) for name in names if hasattr(given, name)}
        if sorted(parts) != sorted(names):
            raise InputError(
                f"The argument {what!r} must have the parts {', '.join(names) or 'none'}, as it had when the model was "
                f"traced; got {shown(given)}."
            )
        for name, item in children:
            _match(parts[name], item, f"{what}.{name}", flat)


def _parts(given: Any, is_sequence: bool) -> dict[str, Any] | None:
    """The parts of a sequence or mapping by their names, none where it is not what was traced; None for an object."""
    if is_sequence:
        return {str(number): part for number, part in enumerate(given)} if isinstance(given, list | tuple) else {}
    return {str(key): part for key, part in given.items()} if isinstance(given, Mapping) else None
