"""The lowering of hidet's definitions to terms, with resolved indices of all reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hidet.ir import expr as ir
from hidet.ir.compute import ArgReduceCompute, GridCompute, ReduceCompute, TensorInput, TensorNode
from hidet.ir.dtypes import boolean, int32
from hidet.ir.expr import Constant, Expr, SymbolVar, Var
from hidet.ir.tools import TypeInfer, collect_free_vars, simplify
from hidet.ir.type import DataType

from hidet_dist.compile.cpu.kernels.index import ONE, Axis, Index, Opaque, Size
from hidet_dist.compile.cpu.kernels.terms import (
    SHORT_FLOATS,
    TYPES,
    And,
    ArgReduction,
    Compare,
    Conditional,
    Convert,
    Extent,
    Function,
    Infix,
    KernelBuffer,
    Literal,
    Load,
    Not,
    Or,
    Prefix,
    Reduction,
    Round,
    Term,
    Test,
    Value,
    axes_of,
    conjuncts,
)
from hidet_dist.spec.extents import factors_of

# Functions that are costly to compute twice, with their C++ name for each floating type.
COSTLY = {"exp", "log", "tanh", "erf", "sin", "cos", "pow", "tan", "expm1", "log1p", "asin", "acos", "atan", "sinh"}
OWN_FUNCTIONS = {"exp", "log", "tanh", "erf", "rsqrt", "sqrt", "abs", "floor", "ceil", "trunc", "max", "min"}
POWERS = {2.0: "hd::square", 3.0: "hd::cube", 0.5: "hd::sqrt", -0.5: "hd::rsqrt"}
LOGISTIC = "hd::logistic"
TIMES_LOGISTIC = "hd::times_logistic"
"""The functions that compute a logistic function, and a product by one, in fewer steps than their parts."""
_LIBM = {"mod": "fmod"} | dict.fromkeys(["sin", "cos", "tan", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh"])
_LIBM |= dict.fromkeys(["atanh", "exp2", "expm1", "log2", "log10", "log1p", "round", "fma", "pow", "atan2"])
_TESTS = ("isnan", "isinf", "isfinite")
_INFIX: dict[type, str] = {
    ir.Add: "+",
    ir.Sub: "-",
    ir.Multiply: "*",
    ir.Div: "/",
    ir.FloorDiv: "/",
    ir.Mod: "%",
    ir.BitwiseAnd: "&",
    ir.BitwiseOr: "|",
    ir.BitwiseXor: "^",
    ir.LeftShift: "<<",
    ir.RightShift: ">>",
}
_COMPARISONS: dict[type, str] = {ir.LessThan: "<", ir.LessEqual: "<=", ir.Equal: "==", ir.NotEqual: "!="}


def logistic_argument(e: Any) -> Any:
    """Return ``x`` of ``1 / (1 + exp(-x))``, whose sum may have any order; None for any other expression."""
    if not (isinstance(e, ir.Div) and _is_one(e.a) and isinstance(e.b, ir.Add)):
        return None
    power = e.b.b if _is_one(e.b.a) else e.b.a if _is_one(e.b.b) else None
    if not (isinstance(power, ir.Call) and len(power.args) == 1 and isinstance(power.args[0], ir.Neg)):
        return None
    name = power.func_var.name or power.func_var.hint
    return power.args[0].a if name.removeprefix("generic_") == "exp" else None


def logistic_product(e: Any) -> tuple[Any, Any] | None:
    """Return ``a`` and ``x`` of ``a * (1 / (1 + exp(-x)))``, in any order; None for any other expression."""
    if isinstance(e, ir.Multiply):
        for a, b in ((e.a, e.b), (e.b, e.a)):
            argument = logistic_argument(b)
            if argument is not None:
                return a, argument
    return None


def _is_one(e: Any) -> bool:
    return isinstance(e, Constant) and e.value == 1


class UnsupportedComputationError(Exception):
    """A definition that these kernels do not support; hidet's kernel is used."""


class Types(TypeInfer):
    """Infers and caches the types of expressions; unlike hidet, without inferring the shapes of tensors."""

    def visit_TensorElement(self, e: Any) -> Any:
        """Return the type of the expression that defines the elements."""
        return self(e.base.value) if isinstance(e.base, GridCompute) else super().visit_TensorElement(e)


def shape_of(node: TensorNode) -> list[Any]:
    """Return a tensor's extents, without inferring the types of its definition as hidet does."""
    extents = node._shape if isinstance(node, GridCompute) else node.shape
    return [extent if isinstance(extent, int | Constant) else simplify(extent) for extent in extents]


@dataclass
class Lowering:
    """Lowers definitions to terms.

    ``buffers`` are the tensors that are read from memory rather than computed in place. ``splits`` has the strides at
    which a dim is split; its key is the definition, -1 or 0 for a reduction, and the dim. ``symbols`` collects the
    variables of sizes, by name. ``types`` infers and caches the types of expressions.
    """

    buffers: Mapping[TensorNode, KernelBuffer]
    splits: Mapping[Any, Sequence[Size]]
    symbols: dict[str, Expr]
    types: Types = field(default_factory=Types)
    origin: dict[Axis, Any] = field(default_factory=dict)
    _known: dict[Any, Term] = field(default_factory=dict)
    _ranges: dict[Axis, tuple[int, int]] = field(default_factory=dict)  # of axes, in the branch that is lowered

    def size(self, extent: Any) -> Size:
        """Convert an extent to a product; an extent that is not a product becomes a new variable.

        Raises UnsupportedComputationError for one that depends on an index, such as a cumulative sum's.
        """
        total = ONE
        for factor in factors_of(int(extent) if isinstance(extent, Constant) else extent):
            total = total * (Size(factor) if isinstance(factor, int) else Size(1, (self._symbol(factor),)))
        return total

    def _symbol(self, expression: Expr) -> str:
        text = str(expression)
        if not all(isinstance(variable, SymbolVar) for variable in collect_free_vars(expression)):
            raise UnsupportedComputationError(f"an extent of {text}, which is not the same for all elements")
        for name, known in self.symbols.items():
            if str(known) == text:
                return name
        name = f"n{len(self.symbols)}"
        self.symbols[name] = expression
        return name

    def axis(self, key: Any, extent: Any) -> tuple[Index, list[Axis]]:
        """Return the loops of a dim of a definition, and the dim's index in terms of them."""
        axes = [Axis(self.size(extent))]
        for stride in self.splits.get(key, ()):
            axes = self._split(axes, stride)
        index = Index()
        step = ONE
        for axis in reversed(axes):
            index = index + Index.of(axis).times(step)
            self.origin[axis] = (key, step)
            step = step * axis.extent
        return index, axes

    @staticmethod
    def _split(axes: list[Axis], stride: Size) -> list[Axis]:
        """Split axes so that one of them has the step ``stride``."""
        result: list[Axis] = []
        below = ONE
        for axis in reversed(axes):
            inner = stride.per(below)
            if inner not in (None, ONE) and axis.extent.per(inner) not in (None, ONE):
                outer, rest = axis.split(inner)
                result = [outer, rest, *result]
            else:
                result = [axis, *result]
            below = below * axis.extent
        return result

    # Indices

    def index(self, e: Any, scope: Mapping[Var, Index]) -> Index:
        """Convert an integer expression to an index; parts that are not linear become opaque."""
        linear = self._linear(e, scope)
        if linear is not None:
            return linear
        term = self.term(e, scope)
        return Index.of(Opaque(term, axes_of(term)))

    def _linear(self, e: Any, scope: Mapping[Var, Index]) -> Index | None:
        if isinstance(e, int):
            return Index.of(e)
        if isinstance(e, Constant):
            return Index.of(int(e.value)) if e.type.is_integer() else None
        if isinstance(e, SymbolVar):
            return Index.of(self.size(e))
        if isinstance(e, Var):
            return scope.get(e)
        if isinstance(e, ir.Cast) and e.target_type.is_integer() and e.target_type.nbytes >= 4:
            return self._linear(e.expr, scope)
        if isinstance(e, ir.Add | ir.Sub | ir.Multiply):
            a, b = self._part(e.a, scope), self._part(e.b, scope)
            if a is None or b is None:
                return None
            return a + b if isinstance(e, ir.Add) else a - b if isinstance(e, ir.Sub) else a.product(b)
        if isinstance(e, ir.Div | ir.FloorDiv | ir.Mod):
            a = self._part(e.a, scope)
            size = self._size_of(e.b)
            if a is None or size is None:
                return None
            ranges = {axis: self._ranges[axis] for axis in a.axes & self._ranges.keys()}
            both = a.divided_within(size, ranges) if ranges else None
            both = both or a.divided(size)
            return None if both is None else both[isinstance(e, ir.Mod)]
        return None

    def _part(self, e: Any, scope: Mapping[Var, Index]) -> Index | None:
        """Convert a part of a linear expression; an integer that is read from memory becomes opaque."""
        linear = self._linear(e, scope)
        if linear is None and isinstance(e, Expr) and not isinstance(e, Constant):
            kind = self.types(e)
            if isinstance(kind, DataType) and kind.is_integer() and kind.nbytes >= 4:
                term = self.term(e, scope)
                return Index.of(Opaque(term, axes_of(term)))
        return linear

    def _size_of(self, e: Any) -> Size | None:
        if isinstance(e, int | Constant):
            return Size(int(e)) if int(e) > 0 else None
        linear = self._linear(e, {})
        if linear is None or len(linear.terms) != 1:
            return None
        ((atom, symbols), value) = next(iter(linear.terms.items()))
        return Size(value, symbols) if atom is None and value > 0 else None

    # Values

    def term(self, e: Any, scope: Mapping[Var, Index]) -> Term:
        """Convert an expression to a term."""
        if isinstance(e, ir.TensorElement):
            return self._element(e, scope)
        if isinstance(e, Constant):
            return _literal(e)
        if isinstance(e, Var | int):
            index = self._linear(e, scope)
            if index is None:
                raise UnsupportedComputationError(f"the variable {e}")
            return Value(index, TYPES[e.type.name] if isinstance(e, Var) else "int32_t")
        dtype = self._dtype(e)
        if isinstance(e, ReduceCompute):
            return self._reduction(e, scope)
        if isinstance(e, ArgReduceCompute):
            return self._arg_reduction(e, scope)
        if isinstance(e, ir.Cast):
            return self._cast(e, scope)
        if isinstance(e, ir.IfThenElse):
            return self._conditional(e, dtype, scope)
        if isinstance(e, ir.LogicalAnd | ir.LogicalOr):
            kind = And if isinstance(e, ir.LogicalAnd) else Or
            return kind(self.term(e.a, scope), self.term(e.b, scope))
        if isinstance(e, ir.LogicalNot):
            return Not(self.term(e.a, scope))
        if type(e) in _COMPARISONS:
            return self._comparison(e, scope)
        if isinstance(e, ir.Neg | ir.BitwiseNot):
            operator = "-" if isinstance(e, ir.Neg) else "~"
            return Prefix(operator, self.term(e.a, scope), _narrowed(dtype))
        logistic = self._logistic(e, scope) if dtype.name == "float32" else None
        if logistic is not None:
            return logistic
        if type(e) in _INFIX:
            return self._arithmetic(e, dtype, scope)
        if isinstance(e, ir.Call):
            name = e.func_var.name or e.func_var.hint
            return self._call(name.removeprefix("generic_"), list(e.args), dtype, scope)
        raise UnsupportedComputationError(type(e).__name__)

    def _conditional(self, e: Any, dtype: DataType, scope: Mapping[Var, Index]) -> Term:
        condition = self.term(e.cond, scope)
        branches = []
        for x, holds in ((e.then_expr, True), (e.else_expr, False)):
            with self._where(condition, holds):
                branches.append(self._as(self.term(x, scope), self._dtype(x), dtype))
        return Conditional(condition, *branches)

    def _comparison(self, e: Any, scope: Mapping[Var, Index]) -> Term:
        if _is_index(e.a) and _is_index(e.b):
            return Compare(_COMPARISONS[type(e)], self.index(e.a, scope), self.index(e.b, scope))
        a, b = self._promoted([e.a, e.b], scope)
        return Infix(_COMPARISONS[type(e)], a, b)

    def _arithmetic(self, e: Any, dtype: DataType, scope: Mapping[Var, Index]) -> Term:
        """Lower an operator of two numbers; of indices to an index, where it is linear."""
        if _is_index(e):
            index = self._linear(e, scope)
            if index is not None:
                return Value(index, TYPES[dtype.name])
        if isinstance(e, ir.Mod) and dtype.is_float():
            return self._call("mod", [e.a, e.b], dtype, scope)
        a, b = (self._as(self.term(x, scope), self._dtype(x), dtype) for x in (e.a, e.b))
        return Infix(_INFIX[type(e)], a, b, _narrowed(dtype))

    def _logistic(self, e: Any, scope: Mapping[Var, Index]) -> Term | None:
        """Lower a logistic function of float32, or a product by one; None for any other expression."""
        argument, product = logistic_argument(e), logistic_product(e)
        if argument is not None:
            return Function(LOGISTIC, (self.term(argument, scope),), None, True)
        if product is not None and all(self._dtype(x).name == "float32" for x in product):
            return Function(TIMES_LOGISTIC, tuple(self.term(x, scope) for x in product), None, True)
        return None

    @contextmanager
    def _where(self, condition: Term, holds: bool) -> Iterator[None]:
        """Lower what is computed where a condition holds, or does not: axes that it bounds run over a part alone."""
        before = dict(self._ranges)
        for each in conjuncts(condition) if holds else [condition]:
            bound = each.bound(holds) if isinstance(each, Compare) else None
            if bound is not None:
                axis, first, end = bound
                low, high = self._ranges.get(axis, (first, end))
                self._ranges[axis] = (max(first, low), min(end, high))
        empty = any(first >= end for first, end in self._ranges.values())
        if empty:  # the branch is never computed
            self._ranges = before
        yield
        self._ranges = before

    def _promoted(self, arguments: Sequence[Any], scope: Mapping[Var, Index]) -> list[Term]:
        kinds = [self._dtype(x) for x in arguments]
        common = self._dtype(ir.Add(arguments[0], arguments[1]))
        return [self._as(self.term(x, scope), kind, common) for x, kind in zip(arguments, kinds, strict=True)]

    @staticmethod
    def _as(term: Term, source: DataType, target: DataType) -> Term:
        """Convert a term if its C++ type differs. Half-precision values are computed as float."""
        have, want = _computed(source), _computed(target)
        return term if have == want else Convert(want, term)

    def _cast(self, e: Any, scope: Mapping[Var, Index]) -> Term:
        source, target = self._dtype(e.expr), self._dtype(e)
        term = self._as(self.term(e.expr, scope), source, target)
        if target.name in SHORT_FLOATS and source.name != target.name:
            return Round(target.name, term)
        return term

    def _call(self, name: str, arguments: list[Any], dtype: DataType, scope: Mapping[Var, Index]) -> Term:
        if name == "pow" and isinstance(arguments[1], Constant) and dtype.is_float():
            power = float(arguments[1].value)
            if power in POWERS:
                base = self._as(self.term(arguments[0], scope), self._dtype(arguments[0]), dtype)
                return Function(POWERS[power], (base,))
        if name in _TESTS:
            kind = self._dtype(arguments[0])
            if not kind.is_float():
                raise UnsupportedComputationError(f"{name} of {kind.name}")
            return Test(name, self.term(arguments[0], scope))
        if name in OWN_FUNCTIONS:
            function = f"hd::{name}"
        elif name in _LIBM:
            function = f"::{_LIBM[name] or name}{'' if dtype.name == 'float64' else 'f'}"
        else:
            raise UnsupportedComputationError(f"the function {name}")
        if not dtype.is_float() and name not in ("max", "min", "abs"):
            raise UnsupportedComputationError(f"{name} of {dtype.name}")
        terms = tuple(self._as(self.term(x, scope), self._dtype(x), dtype) for x in arguments)
        if name in ("max", "min"):
            function += f"<{_computed(dtype)}>"
        costly = name in COSTLY
        return Function(function, terms, None if costly else _narrowed(dtype), costly)

    def _element(self, e: Any, scope: Mapping[Var, Index]) -> Term:
        if not isinstance(e.base, TensorNode):
            raise UnsupportedComputationError(f"an element of {type(e.base).__name__}")
        indices = tuple(self.index(i, scope) for i in e.indices)
        if e.base in self.buffers:
            buffer = self.buffers[e.base]
            return Load(buffer, self.decomposed(e.base, indices))
        if not isinstance(e.base, GridCompute):
            raise UnsupportedComputationError(f"the tensor {e.base.name}")
        ranges = frozenset(self._ranges.items())
        key = (id(e.base), tuple(frozenset(index.terms.items()) for index in indices), ranges)
        if key not in self._known:
            self._known[key] = self.term(e.base.value, dict(zip(e.base.axes, indices, strict=True)))
        return self._known[key]

    def decomposed(self, node: TensorNode, indices: tuple[Index, ...]) -> tuple[Index, ...]:
        """Convert indices into a tensor to indices into its buffer, whose dims may be split."""
        result: list[Index] = []
        for dim, index in enumerate(indices):
            digits: list[Index] = []
            rest = index
            extent = shape_of(node)[dim] if not isinstance(node, TensorInput) else None
            key = (id(node), -1, dim)
            if extent is not None and key in self.splits:
                _, axes = self.axis(key, extent)
                for axis in reversed(axes[1:]):
                    both = rest.divided(axis.extent)
                    if both is None:
                        raise UnsupportedComputationError("an index into a split dim that is not linear")
                    digits.insert(0, both[1])
                    rest = both[0]
            result += [rest, *digits]
        return tuple(result)

    def _dtype(self, e: Any) -> DataType:
        kind = self.types(e) if isinstance(e, Expr) else None
        if isinstance(e, int):
            return int32
        if kind is not None and not isinstance(kind, DataType) and kind is bool:
            return boolean
        if not isinstance(kind, DataType) or kind.name not in TYPES:
            raise UnsupportedComputationError(f"a value of type {kind}")
        return kind

    def _reduction(self, e: Any, scope: Mapping[Var, Index]) -> Term:
        kind = self._dtype(e.value)
        name = str(e.reduce_operation)
        operations = {"sum": "Sum", "average": "Sum", "product": "Product", "max": "Max", "min": "Min"}
        ctype = _computed(kind)
        if name in ("and", "or"):
            operation = name.capitalize()
            ctype = "bool"
        elif name in operations and ctype != "bool":
            operation = f"{operations[name]}<{ctype}>"
        else:
            raise UnsupportedComputationError(f"the reduction {name} of {kind.name}")
        inner = dict(scope)
        axes: list[Axis] = []
        for dim, (axis, extent) in enumerate(zip(e.axes, e.shape, strict=True)):
            index, split = self.axis((id(e), 0, dim), extent)
            inner[axis] = index
            axes += split
        term: Term = Reduction(operation, ctype, tuple(axes), self.term(e.value, inner))
        if name == "average":
            count = ONE
            for extent in e.shape:
                count = count * self.size(extent)
            term = Infix("/", term, Extent(count, ctype))
        return term

    def _arg_reduction(self, e: Any, scope: Mapping[Var, Index]) -> Term:
        index, axes = self.axis((id(e), 0, 0), e.extent)
        value = self.term(e.value, {**scope, e.axis: index})
        operator = "<" if str(e.reduce_operation) == "min" else ">"
        return ArgReduction(operator, _computed(self._dtype(e.value)), tuple(axes), index, value)


def _computed(dtype: DataType) -> str:
    return "float" if dtype.name in SHORT_FLOATS else TYPES[dtype.name]


def _is_index(e: Any) -> bool:
    """Whether an expression consists only of loop variables and numbers."""
    if isinstance(e, int):
        return True
    if isinstance(e, Constant):
        return bool(e.type.is_integer())
    if isinstance(e, Var):
        return bool(e.type.is_integer())
    if isinstance(e, ir.Cast):
        return bool(e.target_type.is_integer()) and e.target_type.nbytes >= 4 and _is_index(e.expr)
    if isinstance(e, ir.Add | ir.Sub | ir.Multiply | ir.Div | ir.FloorDiv | ir.Mod):
        return _is_index(e.a) and _is_index(e.b)
    return False


def _narrowed(dtype: DataType) -> str | None:
    """Return the C++ type of a short integer; C++ computes in int, and PyTorch wraps results to the type's width."""
    return TYPES[dtype.name] if dtype.is_integer() and dtype.nbytes < 4 else None


def _literal(e: Constant) -> Literal:
    if not e.is_scalar() or e.type.name not in TYPES:
        raise UnsupportedComputationError(f"a constant of type {e.type}")
    if e.type.name == "bool":
        return Literal("bool", bool(e.value))
    return Literal(e.type.name, float(e.value) if e.type.is_float() else int(e.value))
