"""Guards in operators' definitions: no index from memory reads outside a tensor, and no integer division traps.

hidet's lookups read at any index, and its integer divisions are C's. On the CPU a wrong token id may then kill the
process, and on a GPU its context. Guarded definitions have defined results:

* Indices that are checked before a program runs (see :mod:`hidet_dist.compile.index_checks`) are clamped, in case the
  input's memory changes between the check and the lookup.
* A lookup at any other index out of range yields NaN, the least signed or the greatest unsigned integer, as JAX's
  ``take`` does (jax.numpy.take, mode="fill").
* A quotient or remainder by 0 is 0, as NumPy's; the least integer by -1 is itself, with the remainder 0.

Operators with handwritten kernels in hidet ignore their definitions, and are left unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.opaque import OpaqueOperator
from hidet.ir.compute import GridCompute, TensorInput, TensorNode
from hidet.ir.dtypes import int32, int64
from hidet.ir.expr import (
    Call,
    Constant,
    Div,
    Expr,
    FloorDiv,
    Mod,
    TensorElement,
    cast,
    equal,
    if_then_else,
    is_constant,
    logical_and,
    tensor_element,
)
from hidet.ir.functors import IRRewriter
from hidet.ir.task import Task
from hidet.ir.tools import TypeInfer, collect
from hidet.ir.type import DataType, data_type

from hidet_dist.partitioning.program import Program
from hidet_dist.rewriting import copy_operator, rewrite
from hidet_dist.rules.lookup import ShardedLookupOp, missing_element


def guard_graph(program: Program, checked: Collection[Operator]) -> FlowGraph:
    """Guard the operators of a program's graph; return the graph itself if none needs a guard.

    ``checked`` are the operators whose indices are all checked before the program runs.
    """
    trusted = program.coordinate
    known: dict[Any, GuardedOp | None] = {}  # equal layers share tasks

    def make(node: Operator, made: Mapping[Tensor, Tensor]) -> Tensor | None:
        if len(node.outputs) != 1 or not _follows_definition(node):
            return None
        ours = {parameter for x, parameter in zip(node.inputs, node.task.inputs, strict=True) if x is trusted}
        inputs = [made.get(x, x) for x in node.inputs]
        key = type(node), node.task, frozenset(ours), node in checked
        if key not in known:
            outputs = _guarded(node.task.outputs, ours, node in checked)
            known[key] = None if outputs is None else GuardedOp(*inputs, guarded=node, outputs=outputs)
        guarded = known[key]
        return None if guarded is None else copy_operator(guarded, inputs)[0]

    return rewrite(program.graph, make)


class GuardedOp(Operator):
    """An operator with a guarded definition.

    Parameters
    ----------
    inputs: Tensor
        The operator's inputs.
    guarded: Operator
        The operator.
    outputs: list of TensorNode
        Its guarded definition, in terms of the inputs of its task.
    """

    def __init__(self, *inputs: Tensor, guarded: Operator, outputs: list[TensorNode]):
        task = guarded.task
        unguarded = Task(
            f"guarded_{task.name}",
            task.inputs,
            outputs,
            inverse_map=task.inverse_map,
            attributes=task.attrs,
            share_map=task.share_map,
        )
        unguarded.assertions = task.assertions
        super().__init__(inputs=list(inputs), attributes={"guarded": guarded, "outputs": outputs}, task=unguarded)
        self.name = guarded.name


def _follows_definition(node: Operator) -> bool:
    """Whether the kernels of an operator are generated from its definition."""
    task = node.task
    if isinstance(node, OpaqueOperator | ShardedLookupOp) or task.attrs.get("is_opaque"):
        return False  # a sharded lookup is defined for all indices
    return type(task).implement_cpu is Task.implement_cpu and type(task).implement_cuda is Task.implement_cuda


def _guarded(outputs: list[TensorNode], trusted: set[TensorInput], checked: bool) -> list[TensorNode] | None:
    """Guard a definition; None if it needs no guard."""
    if not any(isinstance(y, GridCompute) for y in outputs):
        return None
    rewriter = _Guard(trusted, checked)
    guarded = [rewriter(y) for y in outputs]
    return guarded if rewriter.guards else None


class _Guard(IRRewriter):
    """Guards the lookups and divisions in a definition; ``guards`` counts them."""

    def __init__(self, trusted: set[TensorInput], checked: bool):
        super().__init__()
        self.trusted = trusted
        self.checked = checked
        self.guards = 0
        self.types = TypeInfer()

    def visit_GridCompute(self, node: GridCompute) -> GridCompute:
        """Rewrite the definition of a tensor, without inferring its type again as hidet does."""
        value = self(node.value)
        return node if value is node.value else GridCompute(node.name, node._shape, node.axes, value, node.layout)

    def visit_TensorElement(self, e: TensorElement) -> Expr:
        """Guard an element whose indices are read from memory: clamp them, or read it only if they are in range."""
        element = super().visit_TensorElement(e)
        if not isinstance(e.base, TensorNode) or not any(map(self.is_read, e.indices)):
            return element
        indices = list(element.indices)
        inside: list[Expr] = []
        for dim, extent in enumerate(e.base.shape):
            if self.is_read(e.indices[dim]):
                self.guards += 1
                index, kind = self.signed(indices[dim])
                zero = kind.constant(0)
                indices[dim] = index
                if self.checked:
                    last = kind.constant(int(extent) - 1) if is_constant(extent) else cast(extent - 1, kind)
                    indices[dim] = if_then_else(index < zero, zero, if_then_else(index < extent, index, last))
                inside += [index >= zero, index < extent]
        read = tensor_element(element.base, indices)
        if self.checked:
            return read
        return if_then_else(logical_and(*inside), read, missing_element(self.types(e)))

    def visit_Div(self, e: Div) -> Expr:
        """A quotient."""
        return self.quotient(e, super().visit_Div(e))

    def visit_FloorDiv(self, e: FloorDiv) -> Expr:
        """A quotient."""
        return self.quotient(e, super().visit_FloorDiv(e))

    def visit_Mod(self, e: Mod) -> Expr:
        """A remainder."""
        return self.quotient(e, super().visit_Mod(e))

    def visit_Call(self, e: Call) -> Expr:
        """Rewrite a call: hidet's function for remainders of integers does not exist for all targets."""
        name = str(e.func_var.name or e.func_var.hint).removeprefix("generic_")
        kind = self.types(e) if name == "mod" else None
        if isinstance(kind, DataType) and kind.is_integer():
            self.guards += 1
            return self.visit_Mod(Mod(*e.args))
        return super().visit_Call(e)

    def quotient(self, e: Div | FloorDiv | Mod, plain: Any) -> Expr:
        """Guard a quotient or remainder: ``plain`` where it is defined."""
        known = e.b if isinstance(e.b, int) else e.b.value if isinstance(e.b, Constant) and e.b.is_scalar() else None
        if known not in (None, 0, -1) or (known is None and not self.is_read(e.b)):
            return plain
        kind = self.types(e)
        if not isinstance(kind, DataType) or not kind.is_integer():
            return plain
        self.guards += 1
        zero = kind.constant(0)
        result = plain
        if kind.signedness():
            # The negative of the least integer overflows: defined for unsigned integers, not for signed ones.
            wrapping = data_type(f"u{kind.name}")
            negative = zero if isinstance(e, Mod) else cast(wrapping.constant(0) - cast(plain.a, wrapping), kind)
            result = if_then_else(equal(plain.b, -1), negative, plain)
        return if_then_else(equal(plain.b, 0), zero, result)

    def is_read(self, value: Any) -> bool:
        """Whether a value depends on elements of tensors other than the trusted ones."""
        return isinstance(value, Expr) and any(x.base not in self.trusted for x in collect(value, TensorElement))

    def signed(self, index: Expr) -> tuple[Expr, DataType]:
        """Convert an index to a signed integer of 32 bits or more; return it and its type."""
        kind = self.types(index)
        if kind not in (int32, int64):
            kind = int64 if kind.nbytes >= int32.nbytes else int32
            index = cast(index, kind)
        return index, kind
