"""Nodes of ONNX models, and the registry of lowerings by operator name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hidet.graph import Tensor

from hidet_dist.operators.dtypes import Operand, constant
from hidet_dist.spec.extents import extents_of

Value = Any
"""A tensor of the graph, an array whose values are known while tracing, or None for a missing optional value.

An array of kind object holds a shape with symbolic dims.
"""

Lowering = Callable[["Node"], Any]


class Refused(Exception):
    """An operator, or a use of it, that is not supported; the message has the reason."""


MOST_ELEMENTS = 2**20
"""The most elements of a value that is computed while tracing; larger ones become part of the graph, or are refused."""


@dataclass(frozen=True)
class Node:
    """One node of a model.

    Attributes
    ----------
    operator: str
        Its type, such as ``Conv``.
    opset: int
        The version of ONNX's operators in the model.
    inputs: sequence of Value
    attributes: mapping
        Its attributes as Python values; tensors are arrays.
    outputs: sequence of str
        The names of its outputs; empty for an unused one.
    like: Tensor
        A tensor of the graph, on whose device constants are made.
    run: callable
        Returns the values of a subgraph's outputs.
    stored: callable
        Returns the values of a weight of the model; None for any other tensor.
    """

    operator: str
    opset: int
    inputs: Sequence[Value]
    attributes: Mapping[str, Any]
    outputs: Sequence[str]
    like: Tensor
    run: Callable[[Any], list[Value]]
    stored: Callable[[Tensor], np.ndarray | None]

    def value(self, place: int) -> Value:
        """Return an input; None if it is missing."""
        return self.inputs[place] if place < len(self.inputs) else None

    def tensor(self, place: int) -> Tensor:
        """Return an input as a tensor of the graph. Raises Refused if it is missing."""
        value = self.value(place)
        if value is None:
            raise Refused(f"input {place} is missing")
        return self.as_tensor(value)

    def optional(self, place: int) -> Tensor | None:
        """Return an input as a tensor of the graph; None if it is missing."""
        return None if self.value(place) is None else self.tensor(place)

    def as_tensor(self, value: Value) -> Tensor:
        """Convert a value to a tensor of the graph."""
        if isinstance(value, Tensor):
            return value
        if value.dtype == object:
            raise Refused("a shape with symbolic dims is used as data")
        return constant(value, value.dtype.name, self.like)

    def operand(self, place: int) -> Operand:
        """Return an input of an element-wise operator: a number if it is known to be one, else a tensor."""
        value = self.value(place)
        if isinstance(value, np.ndarray) and value.size == 1 and value.dtype != object and value.ndim <= 1:
            number: Operand = value.item()
            return number
        return self.tensor(place)

    def known(self, place: int, what: str) -> np.ndarray:
        """Return the known values of an input. Raises Refused if they depend on the model's inputs."""
        value = self.value(place)
        if isinstance(value, Tensor):
            value = self.stored(value)
        if not isinstance(value, np.ndarray):
            raise Refused(f"{what} depend on the model's inputs, and must be known while it is traced")
        return value

    def integers(self, place: int, name: str) -> list[int] | None:
        """Return integers that are an input in newer opsets and were an attribute before; None if they are missing."""
        if self.value(place) is not None:
            return [int(n) for n in self.known(place, name).reshape(-1)]
        numbers = self.attributes.get(name)
        return None if numbers is None else [int(n) for n in numbers]

    def get(self, name: str, default: Any) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)


_LOWERINGS: dict[str, Lowering] = {}


def lowers(*operators: str) -> Callable[[Lowering], Lowering]:
    """Register a function as the lowering of operators. It returns the output, or a tuple of several."""

    def register(lowering: Lowering) -> Lowering:
        for operator in operators:
            assert operator not in _LOWERINGS, operator
            _LOWERINGS[operator] = lowering
        return lowering

    return register


def lowering_of(operator: str) -> Lowering | None:
    """Return the lowering of an operator; None if there is none."""
    return _LOWERINGS.get(operator)


def supported() -> list[str]:
    """List all operators with a lowering."""
    return sorted(_LOWERINGS)


def rank_of(x: Tensor) -> int:
    """The number of dims."""
    return len(x.shape)


def static(x: Tensor, dim: int, what: str) -> int:
    """Return a size that must be known. Raises Refused for a symbolic one."""
    size = extents_of(x)[dim]
    if not isinstance(size, int):
        raise Refused(f"{what} is {size}, which must be known while the model is traced: give it in dims")
    return size
