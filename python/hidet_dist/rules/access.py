"""Access analysis: the dims of tensors that each factor of an operator's iteration space indexes.

An operator's compute definition is walked once. Every index expression is brought into the normal form
``const + sum(coefficient * digit)``, where a *digit* is one position of the mixed radix form of an iteration variable:
reshapes index with ``/`` and ``%``, which cut a variable into digits. A digit is a *factor* of the operator (Shardy's
term); sharding an operator means assigning mesh axes to digits.

The walk also brings the definition into a canonical form. Two definitions that compute the same from the same indices
have equal canonical forms, whatever their extents. So a choice can be proven: the operator rebuilt on shards must have
the canonical form of the whole operator, with the extents that the sharded digits have on a device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hidet.ir import expr as ir
from hidet.ir.compute import ArgReduceCompute, GridCompute, ReduceCompute, ScalarInput, TensorInput
from hidet.ir.dtypes import int32
from hidet.ir.task import Task
from hidet.ir.type import DataType

from hidet_dist.spec.collectives import REDUCED_DTYPES


class UnsupportedDefinition(Exception):
    """A compute definition that the analysis does not model: the operator gets no rule."""


class _NeedSplit(Exception):
    """A ``/`` or ``%`` cuts a digit in two: the analysis restarts with this cut."""

    def __init__(self, variable: int, stride: int):
        super().__init__(variable, stride)
        self.cut = (variable, stride)


@dataclass(frozen=True, order=True)
class Digit:
    """Digit ``stride`` of an iteration variable, ``0 <= digit < extent``; a variable is sum(stride * digit).

    Variables are numbered: output dims first, then reductions in the order of the walk.
    """

    variable: int
    stride: int
    extent: int


@dataclass(frozen=True)
class IndexForm:
    """An index in normal form: ``const + sum(coefficient * digit)``, with only digits of extent above 1."""

    terms: tuple[tuple[Digit, int], ...] = ()
    const: int = 0

    @classmethod
    def of(cls, terms: Mapping[Digit, int], const: int = 0) -> IndexForm:
        """Make a form from a mapping, without zero terms."""
        return cls(tuple(sorted((d, c) for d, c in terms.items() if c and d.extent > 1)), const)

    def __add__(self, other: IndexForm) -> IndexForm:
        terms = dict(self.terms)
        for digit, coefficient in other.terms:
            terms[digit] = terms.get(digit, 0) + coefficient
        return IndexForm.of(terms, self.const + other.const)

    def scaled(self, factor: int) -> IndexForm:
        """Multiply the form by a constant."""
        return IndexForm.of({d: c * factor for d, c in self.terms}, self.const * factor)

    @property
    def digits(self) -> frozenset[Digit]:
        """The digits that the form depends on."""
        return frozenset(d for d, _ in self.terms)

    @property
    def minimum(self) -> int:
        """The least value over all digits."""
        return self.const + sum(c * (d.extent - 1) for d, c in self.terms if c < 0)

    @property
    def maximum(self) -> int:
        """The greatest value over all digits."""
        return self.const + sum(c * (d.extent - 1) for d, c in self.terms if c > 0)

    def layout(self, extent: int) -> tuple[Digit, ...] | None:
        """Return the digits, major to minor, if the form enumerates ``range(extent)`` in their mixed radix order."""
        if self.const:
            return None
        digits = []
        weight = 1
        for digit, coefficient in sorted(self.terms, key=lambda term: abs(term[1])):
            if coefficient != weight:
                return None
            digits.append(digit)
            weight *= digit.extent
        return tuple(reversed(digits)) if weight == extent else None


@dataclass
class Access:
    """One access of an input: the index of each dim (None if it depends on data), and the digits of its loop nest."""

    tensor: int
    indices: tuple[IndexForm | None, ...]
    nest: frozenset[Digit]


@dataclass
class RootReduction:
    """A reduction at the root of an output: sharding its digits leaves partial results of ``op``."""

    output: int
    op: str
    digits: frozenset[Digit]


@dataclass
class Definition:
    """The result of the walk over a definition.

    Attributes
    ----------
    accesses: every access of an input tensor.
    out_digits: for each output, the digits of each dim, major to minor.
    reductions: the root reductions.
    pinned: digits that must not be sharded, since their value, not only their range, matters.
    canonical: the definition in canonical form.
    work: (digits of the loop nest, scalar operations per iteration, those of them that are functions such as exp)
        for each part of the definition.
    """

    accesses: list[Access] = field(default_factory=list)
    out_digits: list[tuple[tuple[Digit, ...], ...]] = field(default_factory=list)
    reductions: list[RootReduction] = field(default_factory=list)
    pinned: set[Digit] = field(default_factory=set)
    canonical: Any = ()
    work: list[tuple[frozenset[Digit], int, int]] = field(default_factory=list)

    def operations(self, extents: Mapping[Digit, int]) -> int:
        """Count the scalar operations of the operator on a device with these ``extents`` of the sharded digits."""
        return sum(n * math.prod(extents.get(d, d.extent) for d in nest) for nest, n, _ in self.work)

    def functions(self, extents: Mapping[Digit, int]) -> int:
        """Count the operations that are functions such as exp, which take many instructions each."""
        return sum(n * math.prod(extents.get(d, d.extent) for d in nest) for nest, _, n in self.work if n)


# The reduce function of each kind of reduction; on booleans "and" is the minimum and "or" the maximum.
_REDUCE_OPS = {"sum": "sum", "max": "max", "min": "min", "average": "average", "product": "product"}
_BOOLEAN_REDUCE_OPS = {"and": "min", "or": "max", "max": "max", "min": "min"}
# hidet's names of functions that take many instructions.
_FUNCTION = re.compile("generic_(a?(sin|cos|tan)h?|atan2|exp(m1)?|log(2|10|1p)?|erf|pow)")
_MAX_SPLITS = 64  # limit of restarts for pathological definitions; far above any real reshape


def analyze(task: Task, sizes: Mapping[str, int] | None = None) -> Definition:
    """Analyze an operator's task, with these ``sizes`` of its symbolic dims.

    Raises UnsupportedDefinition when the definition cannot be modelled.
    """
    cuts: set[tuple[int, int]] = set()
    twins: dict[tuple[int, int], int] = {}
    for _ in range(_MAX_SPLITS):
        try:
            definition = _Walker(task, cuts, twins, sizes or {}).run()
        except _NeedSplit as need:
            if need.cut in cuts:
                break
            cuts.add(need.cut)
            continue
        if twins or len(task.outputs) == 1:
            return definition
        twins = _twins(definition)
        if not twins:
            return definition
    raise UnsupportedDefinition("its index arithmetic has no mixed radix form")


def _twins(definition: Definition) -> dict[tuple[int, int], int]:
    """Map each (output, dim) to the variable of an earlier output that indexes the same dim of an input."""
    readers: dict[tuple[int, int], list[int]] = {}
    for access in definition.accesses:
        for dim, form in enumerate(access.indices):
            if form is not None and len(form.terms) == 1 and not form.const:
                readers.setdefault((access.tensor, dim), []).append(form.terms[0][0].variable)
    twins: dict[tuple[int, int], int] = {}
    first: dict[int, int] = {}  # the digits' variables of the outputs so far
    for output, dims in enumerate(definition.out_digits):
        for dim, digits in enumerate(dims):
            variables = {digit.variable for digit in digits}
            for variable in variables - first.keys():
                together = [v for group in readers.values() if variable in group for v in group if v in first]
                if together and first[together[0]] == math.prod(d.extent for d in digits):
                    twins[output, dim] = together[0]
        first.update({d.variable: math.prod(e.extent for e in digits) for digits in dims for d in digits})
    return twins


_Env = dict[ir.Var, "IndexForm | None"]


class _Walker:
    def __init__(
        self,
        task: Task,
        cuts: set[tuple[int, int]],
        twins: Mapping[tuple[int, int], int],
        sizes: Mapping[str, int],
    ):
        self.task = task
        self.cuts = cuts
        self.twins = twins
        self.sizes = sizes
        self.definition = Definition()
        self.variables = 0
        self.inputs = {tensor: i for i, tensor in enumerate(task.inputs)}
        self.out_variables: dict[tuple[tuple[int, ...], int], int] = {}
        self.grids_counted: set[tuple[GridCompute, tuple[IndexForm | None, ...]]] = set()

    def run(self) -> Definition:
        canonical = []
        for number, output in enumerate(self.task.outputs):
            if not isinstance(output, GridCompute):
                raise UnsupportedDefinition("it has no compute definition")
            env: _Env = {}
            dims = []
            shape = tuple(map(self.extent, output.shape))
            for dim, axis in enumerate(output.axes):
                # Outputs of the same shape share their variables, so that sharding splits them alike.
                if (shape, dim) not in self.out_variables:
                    self.out_variables[shape, dim] = self.new_variable()
                digits = self.digits_of(self.twins.get((number, dim), self.out_variables[shape, dim]), shape[dim])
                env[axis] = IndexForm.of({d: d.stride for d in digits})
                dims.append(tuple(reversed([d for d in digits if d.extent > 1])))
            self.definition.out_digits.append(tuple(dims))
            nest = frozenset(d for digits in dims for d in digits)
            canonical.append((output.type.dtype.name, self.value(output.value, env, nest, root=number)))
        self.definition.canonical = tuple(canonical)
        return self.definition

    # Variables and digits

    def extent(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        if isinstance(size, ir.Constant):
            return int(size)
        known = self.known(size)
        if known is None:
            raise UnsupportedDefinition("a dim of it is symbolic")
        return known

    def known(self, e: Any) -> int | None:
        """Evaluate an index expression that is constant for the sizes of symbolic dims; None if it is not."""
        form = self.index(e, {})
        return form.const if form is not None and not form.terms else None

    def new_variable(self) -> int:
        self.variables += 1
        return self.variables - 1

    def digits_of(self, variable: int, extent: int) -> list[Digit]:
        strides = sorted({1, *(stride for v, stride in self.cuts if v == variable)})
        bounds = [*strides[1:], extent]
        if any(bound % stride for stride, bound in zip(strides, bounds, strict=True)):
            raise UnsupportedDefinition("its index arithmetic has no mixed radix form")
        return [Digit(variable, s, bound // s) for s, bound in zip(strides, bounds, strict=True)]

    # Indices

    def index(self, e: Any, env: _Env) -> IndexForm | None:
        """Compute the normal form of an index expression; None if it depends on data or is not affine."""
        if isinstance(e, int):
            return IndexForm(const=e)
        if isinstance(e, ir.Constant):
            return IndexForm(const=int(e)) if e.type.is_data_type() and e.type.is_integer() else None
        if isinstance(e, ir.SymbolVar):
            return IndexForm(const=self.sizes[e.name]) if e.name in self.sizes else None
        if isinstance(e, ir.Var):
            return env.get(e)
        if isinstance(e, ir.Cast):
            target = e.target_type
            return self.index(e.expr, env) if isinstance(target, DataType) and target.is_integer() else None
        if isinstance(e, ir.Neg):
            inner = self.index(e.a, env)
            return None if inner is None else inner.scaled(-1)
        if isinstance(e, ir.Add | ir.Sub | ir.Multiply | ir.Div | ir.FloorDiv | ir.Mod):
            a, b = self.index(e.a, env), self.index(e.b, env)
            return None if a is None or b is None else self.arithmetic(e, a, b)
        if isinstance(e, ir.IfThenElse):
            condition = self.predicate(e.cond, env)
            if condition is None:
                return None
            return self.index(e.then_expr if condition else e.else_expr, env)
        return None

    def arithmetic(self, e: ir.Expr, a: IndexForm, b: IndexForm) -> IndexForm | None:
        if isinstance(e, ir.Add):
            return a + b
        if isinstance(e, ir.Sub):
            return a + b.scaled(-1)
        if isinstance(e, ir.Multiply):
            if not a.terms:
                return b.scaled(a.const)
            return a.scaled(b.const) if not b.terms else None
        if b.terms or b.const <= 0:
            return None
        return self.divide(a, b.const, quotient=not isinstance(e, ir.Mod))

    def divide(self, a: IndexForm, divisor: int, quotient: bool) -> IndexForm | None:
        """Compute ``a / divisor`` or ``a % divisor``. A digit that belongs to both of them is cut."""
        if a.minimum < 0:
            return None  # C rounds towards zero
        high = {d: c // divisor for d, c in a.terms if c % divisor == 0}
        low = IndexForm.of({d: c for d, c in a.terms if c % divisor}, a.const % divisor)
        if low.minimum < 0:
            return None  # the low digits carry into the high ones
        if low.maximum < divisor:
            return IndexForm.of(high, a.const // divisor) if quotient else low
        for digit, coefficient in low.terms:
            cut = divisor // math.gcd(divisor, coefficient)
            if coefficient > 0 and divisor % coefficient == 0 and cut < digit.extent and digit.extent % cut == 0:
                raise _NeedSplit(digit.variable, digit.stride * cut)
        return None

    def predicate(self, e: Any, env: _Env) -> bool | None:
        """Evaluate a condition that is the same for all indices; None if it is not."""
        if isinstance(e, bool):
            return e
        if isinstance(e, ir.Constant):
            return bool(e.value)
        if isinstance(e, ir.LogicalAnd | ir.LogicalOr):
            a, b = self.predicate(e.a, env), self.predicate(e.b, env)
            decisive = isinstance(e, ir.LogicalOr)
            if a is decisive or b is decisive:
                return decisive
            return None if a is None or b is None else not decisive
        if isinstance(e, ir.LogicalNot):
            inner = self.predicate(e.a, env)
            return None if inner is None else not inner
        if isinstance(e, ir.LessThan | ir.LessEqual | ir.Equal | ir.NotEqual):
            a_form, b_form = self.index(e.a, env), self.index(e.b, env)
            if a_form is None or b_form is None:
                return None
            return _compare(e, a_form + b_form.scaled(-1))
        return None

    # Values

    def value(self, e: Any, env: _Env, nest: frozenset[Digit], root: int | None = None) -> Any:
        """Compute the canonical form of a value; record accesses, reductions, pinned digits and work.

        ``root`` is the output's number if the value is the output itself, where a reduction may be partial.
        """
        if isinstance(e, bool | int | float):
            return ("const", repr(e))
        if isinstance(e, ir.Constant):
            return ("const", str(e.type), repr(e.value))
        if isinstance(e, ir.TensorElement):
            return self.element(e, env, nest, root)
        if isinstance(e, ReduceCompute):
            return self.reduce(e, env, nest, root)
        if isinstance(e, ArgReduceCompute):
            digits = self.bind([e.axis], [e.extent], env)
            self.definition.pinned |= digits
            inner = self.value(e.value, env, nest | digits)
            self.count(nest | digits, 1)
            return ("arg", str(e.reduce_operation), e.index_dtype.name, _named(digits), inner)
        if isinstance(e, ir.Var):
            return self.variable(e, env)
        if isinstance(e, ir.Cast):
            inner = self.value(e.expr, env, nest, root if _keeps_reduction(e.target_type) else None)
            return ("cast", str(e.target_type), inner)
        if isinstance(e, ir.IfThenElse):
            condition = self.predicate(e.cond, env)
            if condition is not None:
                return self.value(e.then_expr if condition else e.else_expr, env, nest, root)
            self.count(nest, 1)
            return ("if", *(self.value(part, env, nest) for part in (e.cond, e.then_expr, e.else_expr)))
        if isinstance(e, ir.BinaryExpr):
            return self.binary(e, env, nest)
        if isinstance(e, ir.UnaryExpr):
            self.count(nest, 1)
            return (type(e).__name__, self.value(e.a, env, nest))
        if isinstance(e, ir.Call):
            name = e.func_var.name or e.func_var.hint
            self.count(nest, 1, int(_FUNCTION.fullmatch(name) is not None))
            return ("call", name, *(self.value(arg, env, nest) for arg in e.args))
        if isinstance(e, ScalarInput):
            raise UnsupportedDefinition("it has a scalar input")
        raise UnsupportedDefinition(f"its definition has a {type(e).__name__}")

    def variable(self, e: ir.Var, env: _Env) -> Any:
        """Compute the canonical form of a variable: an index of a loop, or a size that is known."""
        if isinstance(e, ir.SymbolVar) and e.name in self.sizes:
            return ("const", str(e.type), repr(self.sizes[e.name]))
        form = env.get(e)
        if form is None:
            raise UnsupportedDefinition(f"it uses the variable {e.hint or e.name}")
        self.definition.pinned |= form.digits  # the index itself is the value
        return ("index", form)

    def binary(self, e: ir.BinaryExpr, env: _Env, nest: frozenset[Digit]) -> Any:
        """Compute the canonical form of an operator of two values: arithmetic, a comparison or a condition."""
        if isinstance(e, ir.Add | ir.Sub | ir.Multiply | ir.Div | ir.FloorDiv | ir.Mod):
            form = self.index(e, env)
            if form is not None:
                # Index arithmetic as a value: only its remaining digits matter.
                self.count(nest, 1)
                self.definition.pinned |= form.digits
                # A number that sizes give, such as ``pages * 16``: where they are fixed, hidet writes a constant.
                return ("index", form) if form.terms else ("const", str(int32), repr(form.const))
        known = self.predicate(e, env) if isinstance(e, ir.Condition) else None
        if known is not None:
            return ("const", repr(known))
        self.count(nest, 1)
        if isinstance(e, ir.LessThan | ir.LessEqual | ir.Equal | ir.NotEqual):
            left, right = self.index(e.a, env), self.index(e.b, env)
            if left is not None and right is not None:
                # hidet writes either ``i - 1 < 29`` or ``i < 30``.
                difference = left + right.scaled(-1)
                self.definition.pinned |= left.digits | right.digits
                return (type(e).__name__, ("index", difference))
        return (type(e).__name__, self.value(e.a, env, nest), self.value(e.b, env, nest))

    def count(self, nest: frozenset[Digit], operations: int, functions: int = 0) -> None:
        self.definition.work.append((nest, operations, functions))

    def bind(self, axes: Iterable[ir.Var], shape: Iterable[Any], env: _Env) -> frozenset[Digit]:
        digits: set[Digit] = set()
        for axis, size in zip(axes, shape, strict=True):
            bound = self.digits_of(self.new_variable(), self.extent(size))
            env[axis] = IndexForm.of({d: d.stride for d in bound})
            digits.update(d for d in bound if d.extent > 1)
        return frozenset(digits)

    def element(self, e: ir.TensorElement, env: _Env, nest: frozenset[Digit], root: int | None) -> Any:
        forms = tuple(self.index(index, env) for index in e.indices)
        # A data-dependent index is walked as a value, to record its accesses and digits.
        data = tuple(
            None if form is not None else self.value(index, env, nest)
            for form, index in zip(forms, e.indices, strict=True)
        )
        if isinstance(e.base, TensorInput):
            number = self.inputs[e.base]
            self.definition.accesses.append(Access(number, forms, nest))
            return (
                "access",
                number,
                tuple(form if form is not None else d for form, d in zip(forms, data, strict=True)),
            )
        if isinstance(e.base, GridCompute):
            return self.intermediate(e.base, forms, env, root)
        if isinstance(e.base, ir.Constant) and e.base.is_tensor():
            # A constant table in the definition is whole on every device.
            self.definition.pinned.update(d for form in forms if form is not None for d in form.digits)
            table = ("table", str(e.base.type), np.asarray(e.base.value).tobytes())
            return (*table, tuple(form if form is not None else d for form, d in zip(forms, data, strict=True)))
        raise UnsupportedDefinition(f"it reads from a {type(e.base).__name__}")

    def intermediate(self, grid: GridCompute, forms: tuple[IndexForm | None, ...], env: _Env, root: int | None) -> Any:
        """Compute the canonical form of an element of an intermediate result."""
        if any(form is None for form in forms):
            raise UnsupportedDefinition("it indexes an intermediate result by data")
        inner = dict(env)
        inner.update(zip(grid.axes, forms, strict=True))
        read_digits = frozenset(d for form in forms if form is not None for d in form.digits)
        key = (grid, forms)
        counted = key in self.grids_counted
        self.grids_counted.add(key)
        before = len(self.definition.work)
        result = self.value(grid.value, inner, read_digits, root)
        if counted:
            del self.definition.work[before:]  # an intermediate result is computed once for all its readers
        return result

    def reduce(self, e: ReduceCompute, env: _Env, nest: frozenset[Digit], root: int | None) -> Any:
        inner_env = dict(env)
        # The extent may depend on outer indices, as in cumulative sums and adaptive pooling.
        varying = [size for size in e.shape if self.known(size) is None]
        bounds = tuple(self.value(size, env, nest) for size in varying)  # pins the digits that the extent depends on
        digits = self.bind(e.axes, [self.interval(size, env)[1] for size in e.shape], inner_env)
        op = str(e.reduce_operation)
        reduce_op = None if root is None or varying else self.reduce_op(op, root)
        if root is not None and reduce_op is not None:
            self.definition.reductions.append(RootReduction(root, reduce_op, digits))
        else:
            self.definition.pinned |= digits
        self.count(nest | digits, 1)
        body = self.value(e.value, inner_env, nest | digits)
        return ("reduce", op, e.accumulate_dtype.name, _named(digits), bounds, body)

    def interval(self, e: Any, env: _Env) -> tuple[int, int]:
        """Bound an extent by interval arithmetic: the bounds may be loose if its parts depend on each other."""
        form = self.index(e, env)
        if form is not None:
            return form.minimum, form.maximum
        if isinstance(e, ir.Add | ir.Sub | ir.Multiply | ir.Div | ir.FloorDiv):
            (a, b), (c, d) = self.interval(e.a, env), self.interval(e.b, env)
            if isinstance(e, ir.Add):
                return a + c, b + d
            if isinstance(e, ir.Sub):
                return a - d, b - c
            if isinstance(e, ir.Multiply):
                return min(a * c, a * d, b * c, b * d), max(a * c, a * d, b * c, b * d)
            if a >= 0 and c > 0:
                return a // d, b // c
        raise UnsupportedDefinition("the extent of a reduction of it is symbolic")

    def reduce_op(self, op: str, root: int) -> str | None:
        """Return the reduce operation for partial results of output ``root``; None if its dtype rules it out."""
        dtype = self.task.outputs[root].type.dtype
        if dtype.is_boolean():
            return _BOOLEAN_REDUCE_OPS.get(op)
        if dtype.name not in REDUCED_DTYPES:
            return None
        # An average of integers is rounded, so an average of averages is a different number.
        return None if op == "average" and dtype.is_integer() else _REDUCE_OPS.get(op)


def _named(digits: Iterable[Digit]) -> tuple[Digit, ...]:
    return tuple(sorted(digits))


def _keeps_reduction(target: Any) -> bool:
    """Tell whether partial results may be cast before they are reduced: to floats only, as integers wrap or round."""
    return isinstance(target, DataType) and target.is_float()


def _compare(e: ir.Expr, difference: IndexForm) -> bool | None:
    low, high = difference.minimum, difference.maximum
    if isinstance(e, ir.LessThan):
        return True if high < 0 else False if low >= 0 else None
    if isinstance(e, ir.LessEqual):
        return True if high <= 0 else False if low > 0 else None
    equal = True if low == high == 0 else False if low > 0 or high < 0 else None
    if isinstance(e, ir.NotEqual):
        return None if equal is None else not equal
    return equal


def rename(canonical: Any, extents: Mapping[Digit, int]) -> Any:
    """Rename the digits of a canonical form by position, with their extents on a device: ``extents`` if sharded.

    Digits of extent 1 vanish, as in the analysis of the local operator. The others are numbered from the minor end of
    their variable, since the stride of a digit changes when one below it is sharded.
    """
    local: dict[int, list[Digit]] = {}

    def collect(node: Any) -> None:
        if isinstance(node, Digit):
            entries = local.setdefault(node.variable, [])
            if node not in entries:
                entries.append(node)
        elif isinstance(node, IndexForm):
            for digit, _ in node.terms:
                collect(digit)
        elif isinstance(node, tuple):
            for part in node:
                collect(part)

    collect(canonical)
    names: dict[Digit, tuple[int, int, int]] = {}
    for variable, digits in local.items():
        kept = [d for d in sorted(digits) if extents.get(d, d.extent) > 1]
        names.update({d: (variable, place, extents.get(d, d.extent)) for place, d in enumerate(kept)})

    def rewrite(node: Any) -> Any:
        if isinstance(node, Digit):
            return names.get(node)
        if isinstance(node, IndexForm):
            return ("form", node.const, tuple(sorted((names[d], c) for d, c in node.terms if d in names)))
        if isinstance(node, tuple):
            return tuple(part for part in map(rewrite, node) if part is not None)
        return node

    return rewrite(canonical)
