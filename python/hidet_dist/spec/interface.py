"""The interface of a model: names and nesting of a graph's inputs and outputs.

A graph takes and returns flat lists of tensors. A model takes arguments by name, some of them nested, and returns
tuples, dicts and data classes. The structure of both is kept as plain JSON values, which artifacts can hold:

* ``{"tensor": 3}``: the tensor of that number.
* ``{"value": null}``: a value that is the same in every call (null, a truth value, a number or a text).
* ``{"list": [...]}``, ``{"tuple": [...]}``, ``{"dict": {"key": ...}}``: a list, a tuple, a dict.
* ``{"record": "BaseModelOutput", "fields": {"last_hidden_state": ...}}``: a data class or a named tuple. It is
  returned as a :class:`Record`: no class is imported because a file names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hidet_dist.errors import InputError, SpecError

Structure = dict[str, Any]

_MARK = "_hidet_dist_interface"


class Record(Mapping[str, Any]):
    """The fields of a data class: as attributes (``y.logits``), by key (``y["logits"]``) or by position (``y[0]``).

    Positions and iteration skip fields that are None, as transformers' outputs do.
    """

    def __init__(self, name: str, fields: Mapping[str, Any]):
        self.__dict__.update(fields)
        self._name = name
        self._fields = dict(fields)

    def __getitem__(self, key: Any) -> Any:
        return self._fields[key] if isinstance(key, str) else tuple(self._present().values())[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._present())

    def __len__(self) -> int:
        return len(self._present())

    def __repr__(self) -> str:
        return f"{self._name}({', '.join(f'{name}={value!r}' for name, value in self._present().items())})"

    def _present(self) -> dict[str, Any]:
        return {name: value for name, value in self._fields.items() if value is not None}


@dataclass(frozen=True)
class Interface:
    """Names and nesting of a graph's inputs and outputs.

    Attributes
    ----------
    parameters: mapping
        The structure of each argument of the model, by name, in the order of positional arguments.
    input_names, output_names: tuple of str
        The name of each input and output of the graph, such as ``input_ids`` or ``hidden_states.0``.
    result: mapping
        The structure of the model's result.
    """

    parameters: Mapping[str, Structure]
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
        values = dict(zip(self.parameters, args, strict=False))
        for name, value in kwargs.items():
            if name not in self.parameters:
                known = ", ".join(self.parameters)
                raise InputError(f"The model was not traced with an argument {name!r}; it takes {known}.")
            if name in values:
                raise InputError(f"The argument {name!r} was given twice.")
            values[name] = value
        flat: dict[int, Any] = {}
        for name, structure in self.parameters.items():
            if name not in values and any(True for _ in _tensors(structure)):
                raise InputError(f"The argument {name!r} is missing.")
            if name in values:
                _match(values[name], structure, name, flat)
        return [flat[number] for number in range(len(self.input_names))]

    def nest(self, outputs: Sequence[Any]) -> Any:
        """Convert the outputs of the graph to the result of the model."""
        return nested(self.result, outputs)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        return {
            "parameters": dict(self.parameters),
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
            if not isinstance(data[key], list) or not all(isinstance(name, str) for name in data[key]):
                raise SpecError(f"The {key} of an interface must be a list of texts.")
        inputs, outputs = tuple(data["input_names"]), tuple(data["output_names"])
        parameters = data["parameters"]
        if not isinstance(parameters, dict):
            raise SpecError("The parameters of an interface must be an object.")
        for structures, count, what in (
            (list(parameters.values()), len(inputs), "inputs"),
            ([data["result"]], len(outputs), "outputs"),
        ):
            numbers = [number for structure in structures for number in _tensors(structure)]
            if sorted(numbers) != list(range(count)):
                raise SpecError(f"The structure of the {what} of an interface must name each of the {count} once.")
        return cls(parameters, inputs, outputs, data["result"])


def attach(graph: Any, interface: Interface) -> None:
    """Attach to a graph the interface of the model that it was traced from."""
    setattr(graph, _MARK, interface)


def interface_of(graph: Any) -> Interface | None:
    """Return the interface of the model that a graph was traced from; None for a graph built otherwise."""
    interface: Interface | None = getattr(graph, _MARK, None)
    return interface


def names_of_io(graph: Any) -> dict[str, Any]:
    """Map the interface's names to inputs and outputs of the graph; empty for a graph without an interface."""
    interface = interface_of(graph)
    if interface is None:
        return {}
    names = dict(zip(interface.output_names, graph.outputs, strict=True))
    return {**names, **dict(zip(interface.input_names, graph.inputs or (), strict=True))}


def nested(structure: Structure, tensors: Sequence[Any]) -> Any:
    """Nest tensors as a structure says."""
    ((kind, value),) = [(key, value) for key, value in structure.items() if key != "fields"]
    if kind == "tensor":
        return tensors[value]
    if kind == "value":
        return value
    if kind in ("list", "tuple"):
        items = [nested(item, tensors) for item in value]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: nested(item, tensors) for key, item in value.items()}
    return Record(value, {key: nested(item, tensors) for key, item in structure["fields"].items()})


def _children(structure: Any) -> list[tuple[str, Any]]:
    """List the parts of a structure by name; none for a tensor or a value. Raises SpecError for anything else."""
    if isinstance(structure, dict):
        keys = set(structure)
        if keys in ({"tensor"}, {"value"}):
            return []
        items = structure.get("list", structure.get("tuple"))
        if keys in ({"list"}, {"tuple"}) and isinstance(items, list):
            return [(str(number), item) for number, item in enumerate(items)]
        if keys == {"dict"} and isinstance(structure["dict"], dict):
            return list(structure["dict"].items())
        if keys == {"record", "fields"} and isinstance(structure["fields"], dict):
            return list(structure["fields"].items())
    raise SpecError("A part of an interface is no tensor, value, list, tuple, dict or record.")


def _tensors(structure: Any) -> Iterator[int]:
    if isinstance(structure, dict) and isinstance(structure.get("tensor"), int):
        yield structure["tensor"]
    for _, item in _children(structure):
        yield from _tensors(item)


def _match(argument: Any, structure: Structure, what: str, flat: dict[int, Any]) -> None:
    """Match an argument with its structure, and collect its tensors by number. Raises InputError."""
    if "tensor" in structure:
        if argument is None:
            raise InputError(f"The argument {what!r} must be a tensor, as it was when the model was traced.")
        flat[structure["tensor"]] = argument
        return
    if "value" in structure:
        if argument is not structure["value"] and argument != structure["value"]:
            raise InputError(
                f"The argument {what!r} was {structure['value']!r} when the model was traced, and is part of the "
                f"program; got {argument!r}."
            )
        return
    children = _children(structure)
    try:
        find: Callable[[str], Any] = (
            (lambda key: argument[int(key)])
            if "list" in structure or "tuple" in structure
            else (lambda key: argument[key] if isinstance(argument, Mapping) else getattr(argument, key))
        )
        parts = [(find(key), item, f"{what}.{key}") for key, item in children]
        same = not ("list" in structure or "tuple" in structure) or len(argument) == len(children)
    except (KeyError, IndexError, TypeError, AttributeError):
        same = False
    if not same:
        keys = ", ".join(key for key, _ in children)
        raise InputError(f"The argument {what!r} must have the parts {keys}, as it had when the model was traced.")
    for part in parts:
        _match(*part, flat)
