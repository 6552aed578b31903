"""Nodes of ONNX models, and the registry of lowerings by operator name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hidet.graph import Tensor

from hidet_dist.frontends.refusals import Invalid, Refused
from hidet_dist.operators.dtypes import Operand
from hidet_dist.spec.extents import Extent, extents_of

Value = Any
"""A tensor of the graph, an array of values known while tracing, or None for an optional value that is not given.

An array of the dtype object has sizes, some of which are expressions of symbolic dims.
"""

Lowering = Callable[["Node"], Any]


MOST_ELEMENTS = 2**20
"""The most elements of a value that is computed while tracing. A larger one is computed in the graph, or refused."""


@dataclass(frozen=True)
class LoopBody:
    """The body of a loop.

    Attributes
    ----------
    graph: GraphProto
        The body itself.
    nodes: int
        The nodes of an iteration, with those of loops within it as far as their iterations are known.
    endless: bool
        Whether it never ends the loop: the condition that it returns is the one that it gets, or true.
    """

    graph: Any
    nodes: int
    endless: bool


@dataclass(frozen=True)
class Node:
    """One node of a model.

    Attributes
    ----------
    operator: str
        The operator's type, such as ``Conv``.
    opset: int
        The version of ONNX's operators in the model.
    inputs: sequence of Value
        The values of the inputs.
    attributes: mapping
        The attributes as Python values; tensors are arrays.
    outputs: sequence of str
        The names of the outputs; empty for an unused one.
    like: Tensor
        A tensor of the graph, on whose device constants are made.
    lower_subgraph: callable
        Lowers a subgraph, given the values of its inputs; returns the values of its outputs.
    weight_values: callable
        Returns the values of a weight of the model; None for any other tensor.
    unroll: callable
        Counts operators that the node becomes beyond a few, before they are made. Raises TraceError for too many.
    body_of: callable
        Tells what is known of a subgraph that is the body of a loop.
    constant_of: callable
        Makes a constant of the graph of an array; the same one for the same array.
    expect: callable
        Raises TraceError if so many nodes, which are about to be lowered, are too many.
    """

    operator: str
    opset: int
    inputs: Sequence[Value]
    attributes: Mapping[str, Any]
    outputs: Sequence[str]
    like: Tensor
    lower_subgraph: Callable[[Any, Sequence[Value]], list[Value]]
    weight_values: Callable[[Tensor], np.ndarray | None]
    unroll: Callable[[int], None]
    body_of: Callable[[Any], LoopBody]
    constant_of: Callable[[np.ndarray], Tensor]
    expect: Callable[[int], None]

    def value(self, position: int) -> Value:
        """Return an input; None if it is missing."""
        return self.inputs[position] if position < len(self.inputs) else None

    def tensor(self, position: int) -> Tensor:
        """Return an input as a tensor of the graph. Raises Refused if it is missing."""
        value = self.value(position)
        if value is None:
            raise Refused(f"input {position} is missing")
        return self.as_tensor(value)

    def optional(self, position: int) -> Tensor | None:
        """Return an input as a tensor of the graph; None if it is missing."""
        return None if self.value(position) is None else self.tensor(position)

    def as_tensor(self, value: Value) -> Tensor:
        """Convert a value to a tensor of the graph. Raises Refused for a shape with symbolic dims."""
        if isinstance(value, Tensor):
            return value
        if value.dtype == object:
            raise Refused("a shape with symbolic dims is used as data")
        return self.constant_of(value)

    def operand(self, position: int) -> Operand:
        """Return an input of an element-wise operator: a number if it is known to be one, else a tensor."""
        value = self.value(position)
        if isinstance(value, np.ndarray) and value.dtype != object and _is_single(value.shape):
            number: Operand = value.item()
            return number
        return self.tensor(position)

    def known(self, position: int, what: str) -> np.ndarray:
        """Return the known values of an input, called ``what`` in errors.

        Raises
        ------
        Refused
            When they depend on the model's inputs.
        """
        value = self.value(position)
        if isinstance(value, Tensor):
            value = self.weight_values(value)
        if not isinstance(value, np.ndarray):
            raise Refused(f"{what} depend on the model's inputs, and must be known while it is traced")
        return value

    def known_if(self, position: int) -> np.ndarray | None:
        """Return the values of an input; None if they depend on the model's inputs, or are too many to be known."""
        try:
            value = self.known(position, "")
        except Refused:
            return None
        return None if value.dtype == object else value

    def scalar(self, position: int, what: str, any_rank: bool = False) -> np.generic:
        """Return the only value of an input that is known.

        Raises Refused as :meth:`known`, and Invalid as :func:`check_single`.
        """
        values = self.known(position, what)
        if values.dtype == object:
            raise Refused(f"{what} depends on a symbolic dim: give its size in dims")
        check_single(values, what, any_rank)
        number: np.generic = values.reshape(-1)[0]
        return number

    def integers(self, position: int, name: str) -> list[int] | None:
        """Return integers from an input, or from the attribute that older opsets have; None if neither is given."""
        if self.value(position) is not None:
            return [int(n) for n in self.known(position, name).reshape(-1)]
        numbers = self.attributes.get(name)
        return None if numbers is None else [int(n) for n in numbers]

    def axis(self, rank: int, default: int, name: str = "axis") -> int:
        """Return an attribute that is a dim of a tensor with ``rank`` dims, counted from 0. Raises Invalid."""
        return dim_of(self.get(name, default), rank)

    def get(self, name: str, default: Any) -> Any:
        """Return an attribute, or ``default`` if it is not given."""
        return self.attributes.get(name, default)

    def text(self, name: str, default: str) -> str:
        """Return an attribute as text."""
        value = self.get(name, default)
        return value.decode() if isinstance(value, bytes) else str(value)


def dim_of(axis: int, rank: int) -> int:
    """Return a dim of a tensor, of which negative ones are counted from the end. Raises Invalid for one it lacks."""
    if not -rank <= axis < rank:
        raise Invalid(f"the axis {axis} is not one of a tensor with {rank} dims")
    return axis % rank


def dims_of(axes: Sequence[int], rank: int) -> list[int]:
    """Return dims of a tensor as :func:`dim_of` does. Raises Invalid for one that it lacks, or that is named twice."""
    dims = [dim_of(axis, rank) for axis in axes]
    if len(set(dims)) < len(dims):
        raise Invalid(f"the axes {list(axes)} of a tensor with {rank} dims name one twice")
    return dims


def check_single(value: Value, what: str, any_rank: bool = False) -> None:
    """Check that a tensor or an array is one number, of no dim or one, or with ``any_rank`` of any. Raises Invalid."""
    shape = extents_of(value) if isinstance(value, Tensor) else tuple(value.shape)
    if not _is_single(shape, any_rank):
        raise Invalid(f"{what} must be one number; the input has the shape {list(shape)}")


def _is_single(shape: Sequence[Extent], any_rank: bool = False) -> bool:
    return all(isinstance(extent, int) and extent == 1 for extent in shape) and (any_rank or len(shape) <= 1)


def bounded(count: int, what: str, most: int = MOST_ELEMENTS) -> int:
    """Return a number of things that are made while tracing. Raises Refused if they are more than ``most``."""
    if count > most:
        raise Refused(f"{what} would be {count}; at most {most} are made while tracing")
    return count


ONNX, MICROSOFT = "", "com.microsoft"
"""The domain of ONNX's operators, and that of the operators that ONNX Runtime's tools write."""

_LOWERINGS: dict[tuple[str, str], Lowering] = {}


def lowers(*operators: str, domains: Sequence[str] = (ONNX,)) -> Callable[[Lowering], Lowering]:
    """Register a function as the lowering of operators. It returns the output, or a tuple of several."""

    def register(lowering: Lowering) -> Lowering:
        for domain, operator in itertools.product(domains, operators):
            assert (domain, operator) not in _LOWERINGS, operator
            _LOWERINGS[domain, operator] = lowering
        return lowering

    return register


def lowering_of(operator: str, domain: str = ONNX) -> Lowering | None:
    """Return the lowering of an operator; None if there is none."""
    return _LOWERINGS.get((domain, operator))


def supported(domain: str = ONNX) -> list[str]:
    """List all operators of a domain with a lowering."""
    return sorted(operator for own, operator in _LOWERINGS if own == domain)


def norm_order(node: Node) -> int:
    """Return the order of a norm, the attribute ``p``. Raises Invalid if it is less than 1."""
    order = int(node.get("p", 2))
    if order < 1:
        raise Invalid(f"p is {order}, the order of a norm: it must be 1 or more")
    return order


def rank_of(x: Tensor) -> int:
    """Count the dims of a tensor."""
    return len(x.shape)


def static(x: Tensor, dim: int, what: str) -> int:
    """Return the size of a dim, called ``what`` in errors. Raises Refused for a symbolic one."""
    size = extents_of(x)[dim]
    if not isinstance(size, int):
        raise Refused(f"{what} is {size}, which must be known while the model is traced: give it in dims")
    return size
