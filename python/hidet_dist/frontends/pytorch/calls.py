"""Calls of ATen operators, and the registry of lowerings by operator name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from hidet.graph import Tensor
from hidet.ir import data_type

from hidet_dist.errors import TraceError
from hidet_dist.frontends.refusals import Refused
from hidet_dist.operators import to_dtype
from hidet_dist.operators.dtypes import wrapped
from hidet_dist.spec.extents import Extent

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
"""hidet's names of PyTorch's dtypes."""


def name_of_dtype(x: torch.Tensor, what: str) -> str:
    """Return hidet's name of a tensor's dtype. Raises TraceError, in which the tensor is called ``what``."""
    if x.dtype in DTYPES:
        return DTYPES[x.dtype]
    raise TraceError(
        f"{what} is of the dtype {str(x.dtype).removeprefix('torch.')}, which is not supported: use one of "
        f"{', '.join(DTYPES.values())}. (Quantized weights must be dequantized first.)"
    )


Lowering = Callable[..., Any]


@dataclass(frozen=True)
class ResultType:
    """The shape and dtype of an operator's output in PyTorch."""

    shape: tuple[Extent, ...]
    dtype: str


@dataclass(frozen=True)
class Call:
    """One call of an ATen operator.

    Attributes
    ----------
    name: str
        The name of the operator, such as ``aten.add.Tensor``.
    results: tuple of ResultType
        The shapes and dtypes of the outputs in PyTorch.
    fakes: tuple
        PyTorch's fake tensors for the positional arguments, from which type promotion follows.
    shared: dict
        Values that the lowerings of a graph share, such as masks made once for all layers.
    known: callable
        Returns the values of a tensor that is known while tracing; None for any other.
    """

    name: str
    results: tuple[ResultType, ...]
    fakes: tuple[Any, ...]
    shared: dict[Any, Any]
    known: Callable[[Tensor], torch.Tensor | None]

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the result of ``make``, which runs once per graph and key."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    @property
    def shape(self) -> list[Extent]:
        """The shape of the first output."""
        return list(self.results[0].shape)

    @property
    def dtype(self) -> str:
        """The dtype of the first output."""
        return self.results[0].dtype

    def common_dtype(self, *places: int) -> str:
        """Return the dtype in which PyTorch computes with these positional arguments, after type promotion."""
        fakes = [_for_promotion(self.fakes[place]) for place in places]
        return DTYPES[reduce(torch.promote_types, [torch.result_type(a, b) for a in fakes for b in fakes])]


def _for_promotion(value: Any) -> Any:
    """Replace a symbolic number by one of the same type."""
    if isinstance(value, torch.SymInt):
        return 1
    if isinstance(value, torch.SymFloat):
        return 1.0
    return value


_LOWERINGS: dict[str, Lowering] = {}
_WITH_NUMBERS: set[str] = set()


def lowers(*names: str, numbers: bool = False) -> Callable[[Lowering], Lowering]:
    """Register a function as the lowering of ATen operators, named without ``aten.``, or of others by full names.

    The function takes the :class:`Call` and the operator's arguments, by the names of the operator's schema: hidet's
    tensors, numbers, and expressions for symbolic sizes. It returns the output, or a tuple of several. With ``numbers``
    it takes numbers in place of tensors, too.
    """

    def register(lowering: Lowering) -> Lowering:
        for name in names:
            full = name if name.startswith(("transformers.", "hidet_dist.")) else f"aten.{name}"
            assert full not in _LOWERINGS, full
            _LOWERINGS[full] = lowering
            if numbers:
                _WITH_NUMBERS.add(full)
        return lowering

    return register


def plain(function: Callable[..., Any]) -> Lowering:
    """Make a lowering of a function that has the arguments of an operator."""
    return lambda call, *args, **options: function(*args, **options)


def lower_plainly(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Register functions, each with the arguments of the ATen operator of its name."""
    for name, function in functions.items():
        lowers(name)(plain(function))


def lowering_of(name: str) -> Lowering | None:
    """Return the lowering of an operator, by its full name; None if there is none."""
    return _LOWERINGS.get(name)


def takes_numbers(name: str) -> bool:
    """Whether the lowering of an operator, by its full name, takes numbers in place of tensors."""
    return name in _WITH_NUMBERS


def supported() -> list[str]:
    """List the full names of all operators with a lowering."""
    return sorted(_LOWERINGS)


def constant(value: Any, dtype: str) -> Any:
    """Convert a number to a constant of a dtype for hidet's operators."""
    kind = data_type(dtype)
    if isinstance(value, bool | int | float):
        value = bool(value) if dtype == "bool" else float(value) if kind.is_float() else wrapped(int(value), kind)
    return kind(value)


def operand(x: Any, dtype: str) -> Any:
    """Convert an operand of arithmetic: cast a tensor to ``dtype``, or make a number a constant of it."""
    return to_dtype(x, dtype) if isinstance(x, Tensor) else constant(x, dtype)


def whole_dims(dims: Any, rank: int) -> list[int]:
    """Count dims from the front; all dims for None or an empty list."""
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return list(range(rank))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return [int(dim) % rank if rank else 0 for dim in listed]


def static(value: Any, what: str) -> int:
    """Return a number that must be known while tracing, called ``what`` in errors. Raises Refused for an expression."""
    if isinstance(value, bool | int):
        return int(value)
    raise Refused(f"{what} is {value}, which must be known while the model is traced")
