"""Epilogues of products, computed while the product is written: biases, activations, residuals, normalizations.

A product is computed tile by tile (see ``hidet_dist/kernels/tiles.h``), and a tile is written out while it is in the
cache. The elementwise operators after a product become part of the loop that writes it, so they cost no further pass
over memory. The loop is hidet IR, built from the operators' definitions.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.utils import TensorInput, input_like
from hidet.ir.compute import GridCompute
from hidet.ir.expr import Cast, Constant, Expr, TensorElement, Var, cast, constant, tensor_element
from hidet.ir.functors import IRRewriter
from hidet.ir.tools import rewrite, simplify
from hidet.ir.type import DataType

from hidet_dist.compile.cpu.tiled import Epilogue, NotInOrder, TiledOp, follows, identity_epilogue, store_of, wide
from hidet_dist.rewriting import Uses, copy_operator, only_user, uses_of
from hidet_dist.spec.extents import extents_of, same_shape
from hidet_dist.traits import Moves, traits_of

_MOST_STEPS = 24  # operators in one loop; more would not stay in registers


class _Chain:
    """A product and the operators after it that its loop computes, of those that no other loop has ``absorbed``."""

    def __init__(self, product: TiledOp, uses: Uses, absorbed: Set[Operator]):
        self.product = product
        self.uses = uses
        self.absorbed = absorbed
        self.inputs: dict[Tensor, TensorInput] = {}
        self.inside: list[Operator] = []
        self.shape = extents_of(product.outputs[0])
        self.start(product.outputs[0])

    def start(self, first: Tensor) -> None:
        """Start with the product itself, or with a reshape of it."""
        self.last = first
        self.shape = extents_of(first)
        self.row_dims = self.product.row_dims + len(self.shape) - len(self.product.outputs[0].shape)
        self.epilogue = identity_epilogue(len(self.shape), first.dtype)
        self.values: dict[Tensor, Expr] = {first: self.epilogue.value}

    @property
    def user(self) -> Operator | None:
        """The operator that reads the loop's result, if there is exactly one, and no other loop computes it."""
        user = only_user(self.last, self.uses)
        return None if user in self.absorbed else user

    def key(self) -> Hashable:
        """Return a key that is equal for chains of the same tasks, connected alike: their operators are equal."""
        number = {y: place for place, y in enumerate(self.product.outputs)}
        tasks: list[Hashable] = [self.product.task]
        for op in self.inside:
            tasks.append((op.task, *(number.setdefault(x, len(number)) for x in op.inputs)))
            tasks.append(tuple(number.setdefault(y, len(number)) for y in op.outputs))
        return (*tasks, *(number[x] for x in self.inputs), number[self.last])

    def reshape(self, op: Operator) -> bool:
        """Absorb a reshape of the product that keeps its rows; return whether it did."""
        if traits_of(op).moves is not Moves.RESHAPE or self.product.reshaped(extents_of(op.outputs[0])) is None:
            return False
        self.start(op.outputs[0])
        self.inside.append(op)
        return True

    def add(self, op: Operator) -> bool:
        """Absorb the only user of the last tensor into the loop, if possible; return whether it did."""
        y = op.outputs[0]
        if len(op.outputs) != 1 or not traits_of(op).elementwise or len(self.epilogue.steps) == _MOST_STEPS:
            return False
        if not same_shape(extents_of(y), self.shape):
            return False
        inputs, inside = dict(self.inputs), list(self.inside)
        try:
            expr = simplify(self.element(y, self.epilogue.axes, {op}))
            step = Var(f"step{len(self.epilogue.steps)}", wide(y.dtype))
            epilogue = Epilogue(
                self.epilogue.axes,
                self.epilogue.value,
                tuple(self.inputs.values()),
                (*self.epilogue.steps, (step, expr)),
                y.dtype.name,
            )
            store_of(self.shape, self.row_dims, epilogue)
        except NotInOrder:
            self.inputs, self.inside = inputs, inside
            return False
        self.epilogue, self.last = epilogue, y
        self.values[y] = step
        self.inside.append(op)
        return True

    def element(self, x: Tensor, indices: Sequence[Expr], within: set[Operator]) -> Expr:
        """Build the expression of a tensor's element at these indices, from definitions of operators in the loop."""
        if x in self.values:
            if not follows([simplify(index) for index in indices], self.epilogue.axes, extents_of(x)):
                raise NotInOrder
            return self.values[x]
        op = x.op
        if op is None or (op not in within and not self.is_small(x)):
            if x not in self.inputs:
                self.inputs[x] = input_like(x, f"other{len(self.inputs)}")
            element = tensor_element(self.inputs[x], list(indices))
            return element if wide(x.dtype) == x.dtype else cast(element, wide(x.dtype))
        if op not in within:
            self.inside.append(op)
        grid = op.task.outputs[0]
        if not isinstance(grid, GridCompute):
            raise NotInOrder
        value = rewrite(grid.value, dict(zip(grid.axes, indices, strict=True)))
        sources = dict(zip(op.task.inputs, op.inputs, strict=True))

        class Sources(IRRewriter):
            def visit_TensorElement(rewriter, e: TensorElement) -> Expr:
                if e.base not in sources:
                    raise NotInOrder
                at = [simplify(rewriter.visit(index)) for index in e.indices]
                return self.element(sources[e.base], at, within)

            def visit_Constant(rewriter, e: Constant) -> Constant:
                return constant(e.value, wide(e.type)) if isinstance(e.type, DataType) else e

            def visit_Cast(rewriter, e: Cast) -> Expr:
                rounded = cast(rewriter.visit(e.expr), e.target_type)
                return rounded if wide(e.target_type) == e.target_type else cast(rounded, wide(e.target_type))

        return Sources().visit(value)

    def is_small(self, x: Tensor) -> bool:
        """Whether a tensor has one number per row and is read only by this loop: computing it there is cheap.

        If another loop computes it, that loop would have to remain, and read everything before it as before.
        """
        op = x.op
        if op is None or op in self.absorbed or len(op.outputs) != 1 or len(self.uses[x]) != 1:
            return False
        traits = traits_of(op)
        if not traits.elementwise and traits.moves is not Moves.RESHAPE:
            return False
        inner = len(self.shape) - self.row_dims
        return all(isinstance(size, int) and size == 1 for size in extents_of(x)[-inner:])


def fuse_epilogues(graph: FlowGraph) -> FlowGraph:
    """Move the elementwise operators after each product into the product's loop.

    An operator moves if it is the only reader of the product, and each of its other inputs has the output's layout or
    is broadcast along whole rows or columns.
    """
    uses = uses_of(graph)
    absorbed: set[Operator] = set()
    chains: dict[Operator, _Chain] = {}  # by the last operator
    for op in graph.nodes:
        if not isinstance(op, TiledOp) or op.attrs["epilogue"] is not None:
            continue
        chain = _Chain(op, uses, absorbed)
        while chain.user is not None:
            if not chain.add(chain.user) and (chain.epilogue.steps or not chain.reshape(chain.user)):
                break
        if chain.epilogue.steps:
            absorbed.update((op, *chain.inside))
            chains[chain.inside[-1]] = chain
    return _rebuilt(graph, absorbed, chains)


def _rebuilt(graph: FlowGraph, absorbed: set[Operator], chains: dict[Operator, _Chain]) -> FlowGraph:
    if not chains:
        return graph
    new: dict[Tensor, Tensor] = {}
    known: dict[Hashable, Operator] = {}  # equal chains of equal layers have copies of one operator
    for op in graph.nodes:
        if op in chains:
            chain = chains[op]
            product = chain.product
            inputs = [new.get(x, x) for x in (*product.inputs, *chain.inputs)]
            key = chain.key()
            if key in known:
                new[chain.last] = copy_operator(known[key], inputs)[0]
                continue
            attributes = {**product.attrs, "epilogue": chain.epilogue, **(product.reshaped(chain.shape) or {})}
            new[chain.last] = type(product)(*inputs, **attributes).outputs[0]
            known[key] = new[chain.last].op
        elif op not in absorbed and any(x in new for x in op.inputs):
            new.update(zip(op.outputs, copy_operator(op, [new.get(x, x) for x in op.inputs]), strict=True))
    result = FlowGraph([new.get(y, y) for y in graph.outputs], graph.inputs)
    result.update_nodes()
    return result
