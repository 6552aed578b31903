"""A FlowGraph seen as numbered operators and named tensors, which is what the search and the partition work on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import hidet
from hidet.graph import FlowGraph, Operator

from hidet_dist.errors import ConfigError
from hidet_dist.normalize import normalize
from hidet_dist.weights.named import is_weight


@dataclass(frozen=True)
class Use:
    """A tensor consumed: as input ``position`` of operator ``operator``, or as graph output where operator is None."""

    operator: int | None
    position: int


class GraphView:
    """The tensors of a graph in normal form (``hidet_dist.normalize``) by name, and who makes and who uses them.

    Inputs are named ``x0, x1, ...``, weights (constants, and tensors that were made weights, in the order of their
    first use) ``w0, w1, ...``, and output o of operator i ``t{i}.{o}``.

    Raises
    ------
    ConfigError
        When the graph has symbolic dims, which need a fixed shape for now.
    """

    def __init__(self, graph: FlowGraph):
        graph = normalize(graph)
        graph.update_nodes()
        self.graph = graph
        self.operators: list[Operator] = list(graph.nodes)
        self.names: dict[hidet.Tensor, str] = {}
        self.tensors: dict[str, hidet.Tensor] = {}
        self.inputs: list[str] = []
        self.weights: list[str] = []
        for x in graph.inputs or []:
            if not is_weight(x):
                self.inputs.append(self._add(x, f"x{len(self.inputs)}"))
        for op, node in enumerate(self.operators):
            for x in node.inputs:
                self._add_weight(x)
            for number, y in enumerate(node.outputs):
                self._add(y, f"t{op}.{number}")
        for y in graph.outputs:
            self._add_weight(y)
        self.outputs: list[str] = [self.names[y] for y in graph.outputs]
        for name, tensor in self.tensors.items():
            if not all(isinstance(size, int) for size in tensor.shape):
                raise ConfigError(
                    f"The tensor {name} has the symbolic shape {list(map(str, tensor.shape))}. Trace the graph with "
                    "fixed sizes; symbolic dims cannot be partitioned."
                )

    def _add(self, tensor: hidet.Tensor, name: str) -> str:
        if tensor in self.names:
            return self.names[tensor]
        self.names[tensor] = name
        self.tensors[name] = tensor
        return name

    def _add_weight(self, tensor: hidet.Tensor) -> None:
        if tensor not in self.names:
            self.weights.append(self._add(tensor, f"w{len(self.weights)}"))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, in elements."""
        return tuple(int(size) for size in self.tensors[name].shape)

    def itemsize(self, name: str) -> int:
        """Bytes of one element of a tensor."""
        return int(self.tensors[name].dtype.nbytes)

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor."""
        size = self.itemsize(name)
        for extent in self.shape(name):
            size *= extent
        return size

    def uses(self) -> Iterator[tuple[str, Use]]:
        """Every use of a tensor, in execution order, graph outputs last."""
        for op, node in enumerate(self.operators):
            for position, x in enumerate(node.inputs):
                yield self.names[x], Use(op, position)
        for position, name in enumerate(self.outputs):
            yield name, Use(None, position)

    def fingerprint(self) -> str:
        """A name for the graph's structure (not its weights' values): a plan fits graphs of the same fingerprint."""
        lines = [f"{name} {self.tensors[name].dtype.name} {self.shape(name)}" for name in (*self.inputs, *self.weights)]
        for op, node in enumerate(self.operators):
            ins = " ".join(self.names[x] for x in node.inputs)
            outs = " ".join(f"{y.dtype.name}{list(y.shape)}" for y in node.outputs)
            lines.append(f"{op} {type(node).__name__} {ins} -> {outs}")
        lines.append(" ".join(self.outputs))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
