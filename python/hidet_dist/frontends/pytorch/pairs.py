"""Lowerings of operators on complex numbers, which hidet lacks: pairs of a real and an imaginary part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hidet.graph import Tensor
from torch.utils import _pytree as pytree

from hidet_dist.frontends.pytorch.calls import Call, Lowering, lowering_of, lowers
from hidet_dist.frontends.refusals import Refused
from hidet_dist.operators import elementwise, shaping
from hidet_dist.operators.shaping import expanded

PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
"""The dtypes of the parts of complex numbers."""


@dataclass(frozen=True, eq=False)
class Pair:
    """A complex tensor: its real and its imaginary part, of the same shape and dtype."""

    real: Any
    imaginary: Any


@lowers("view_as_complex.default")
def _view_as_complex(call: Call, x: Tensor) -> Pair:
    last = len(x.shape) - 1
    return Pair(shaping.select(x, last, 0), shaping.select(x, last, 1))


@lowers("view_as_real.default")
def _view_as_real(call: Call, x: Pair) -> Tensor:
    return shaping.stack([x.real, x.imaginary], len(x.real.shape))


@lowers("complex.default")
def _complex(call: Call, real: Tensor, imag: Tensor) -> Pair:
    return Pair(*(expanded(part, call.shape) for part in (real, imag)))


@lowers("polar.default")
def _polar(call: Call, abs: Tensor, angle: Tensor) -> Pair:
    return Pair(elementwise.mul(abs, elementwise.cos(angle)), elementwise.mul(abs, elementwise.sin(angle)))


@lowers("real.default")
def _real(call: Call, x: Pair | Tensor) -> Tensor:
    return x.real if isinstance(x, Pair) else x


@lowers("imag.default")
def _imaginary(call: Call, x: Pair) -> Tensor:
    part: Tensor = x.imaginary
    return part


def _conjugated(call: Call, x: Pair) -> Pair:
    return Pair(x.real, elementwise.neg(x.imaginary))


def _negated(call: Call, x: Pair) -> Pair:
    return Pair(elementwise.neg(x.real), elementwise.neg(x.imaginary))


def _absolute(call: Call, x: Pair) -> Tensor:
    return elementwise.sqrt(elementwise.add(elementwise.square(x.real), elementwise.square(x.imaginary)))


def _angle(call: Call, x: Pair) -> Tensor:
    return elementwise.atan2(x.imaginary, x.real)


def _exponential(call: Call, x: Pair) -> Pair:
    return _polar(call, elementwise.exp(x.real), x.imaginary)


def _as_pair(x: Any) -> Pair:
    return x if isinstance(x, Pair) else Pair(x.real, x.imag) if isinstance(x, complex) else Pair(x, None)


def _product(call: Call, x: Any, y: Any) -> Pair:
    a, b = _as_pair(x), _as_pair(y)
    a, b = (b, a) if a.imaginary is None else (a, b)
    if b.imaginary is None:
        return Pair(elementwise.mul(a.real, b.real), elementwise.mul(a.imaginary, b.real))
    mul = elementwise.mul
    return Pair(
        elementwise.sub(mul(a.real, b.real), mul(a.imaginary, b.imaginary)),
        elementwise.add(mul(a.real, b.imaginary), mul(a.imaginary, b.real)),
    )


def _quotient(call: Call, x: Any, y: Any) -> Pair:
    if isinstance(y, Pair | complex):
        raise Refused("a division by complex numbers is not supported")
    return Pair(elementwise.div(x.real, y), elementwise.div(x.imaginary, y))


def _combined(combine: Callable[..., Tensor]) -> Lowering:
    """Add or subtract; one operand may be real."""

    def lowering(call: Call, x: Any, y: Any, *, alpha: Any = 1) -> Pair:
        if alpha != 1:
            raise Refused("alpha beside complex numbers is not supported")
        a, b = (Pair(p.real, 0.0 if p.imaginary is None else p.imaginary) for p in map(_as_pair, (x, y)))
        parts = combine(a.real, b.real), combine(a.imaginary, b.imaginary)
        return Pair(*(expanded(part, call.shape) for part in parts))

    return lowering


_ARITHMETIC: dict[str, Lowering] = {
    **dict.fromkeys(("_conj.default", "conj_physical.default", "conj.default"), _conjugated),
    "neg.default": _negated,
    "abs.default": _absolute,
    "angle.default": _angle,
    "exp.default": _exponential,
    **dict.fromkeys(("mul.Tensor", "mul.Scalar"), _product),
    **dict.fromkeys(("div.Tensor", "div.Scalar"), _quotient),
    **dict.fromkeys(("add.Tensor", "add.Scalar"), _combined(elementwise.add)),
    **dict.fromkeys(("sub.Tensor", "sub.Scalar"), _combined(elementwise.sub)),
}
"""Lowerings of operators that have another one for real numbers, if any operand is complex."""

_OF_PARTS = frozenset(
    (
        *("view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int"),
        *("squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default", "permute.default", "transpose.int"),
        *("t.default", "movedim.int", "expand.default", "slice.Tensor", "select.int", "narrow.default"),
        *("split.Tensor", "split_with_sizes.default", "chunk.default", "unbind.int", "cat.default", "stack.default"),
        *("clone.default", "contiguous.default", "alias.default", "detach.default", "lift_fresh_copy.default"),
        *("resolve_conj.default", "_to_copy.default", "to.device", "to.dtype", "to.dtype_layout"),
        *("index_select.default", "index.Tensor", "repeat.default", "repeat_interleave.self_int", "flip.default"),
        *("sum.default", "sum.dim_IntList", "mean.default", "mean.dim"),
    )
)
"""Operators that do with each part what they do with real numbers: those that move elements, and sums."""

_OF_LISTS = ("aten.cat.default", "aten.stack.default")


def lowering_of_pairs(name: str) -> Lowering | None:
    """Return the lowering of an operator with complex operands, by its full name; None if there is none."""
    short = name.removeprefix("aten.")
    if short in _ARITHMETIC:
        return _ARITHMETIC[short]
    own = lowering_of(name)
    return _of_parts(own) if own is not None and short in _OF_PARTS else own if _is_of_pairs(own) else None


def _is_of_pairs(lowering: Lowering | None) -> bool:
    return lowering in (_view_as_real, _real, _imaginary)


def _of_parts(lowering: Lowering) -> Lowering:
    def of_pairs(call: Call, *args: Any, **options: Any) -> Any:
        if call.name in _OF_LISTS and not all(isinstance(x, Pair) for x in args[0]):
            raise Refused("real and complex numbers in one list are not supported")

        def of(part: str) -> Any:
            mapped = pytree.tree_map_only(Pair, lambda x: getattr(x, part), (list(args), options))
            return lowering(call, *mapped[0], **mapped[1])

        real, imaginary = of("real"), of("imaginary")
        if isinstance(real, tuple | list):
            return tuple(map(Pair, real, imaginary))
        return Pair(real, imaginary)

    return of_pairs
