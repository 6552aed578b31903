"""Values that follow from no argument and no weight, such as those of a mask of positions, while a module is exported.

``torch.export`` knows shapes and no values. For it the size of `mask.nonzero()` depends on data, and `if mask.any()`
cannot be decided, although the mask may be made of positions alone. Here, what a module makes of numbers is computed
beside the export, and sizes and numbers that depend on nothing else are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

MOST_ELEMENTS = 2**20
"""The elements of the largest tensor whose values are kept."""

_MAKERS = frozenset({torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros})
"""Functions that make tensors of numbers."""
_ALIKE = {
    **dict.fromkeys((torch.ones_like, torch.Tensor.new_ones), 1),
    **dict.fromkeys((torch.zeros_like, torch.Tensor.new_zeros), 0),
}
"""What functions fill tensors with that have the shape or the dtype of another one."""
_NUMBERS = frozenset(
    {
        *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__int__),
        *(torch.Tensor.__float__, torch.Tensor.__index__, torch.equal, torch.Tensor.equal),
    }
)
"""Functions that return numbers of a tensor."""
_SIZED = frozenset({torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere, torch.unique})
"""Functions whose results have sizes that depend on values."""
_UNKNOWN = ("rand", "normal", "bernoulli", "multinomial", "dropout", "uniform", "exponential", "poisson", "empty")
"""What the names of functions have whose results do not follow from their arguments."""
_UNCOUNTED = ("_foreach", "__set__")
"""How the names of functions begin that change their first argument, which PyTorch does not count."""


class KnownValues(TorchFunctionMode):
    """Keeps the values of tensors that are made of numbers alone, and answers what depends on them.

    A tensor that is changed in place by what is not known is not known any more, nor are its views: PyTorch counts the
    changes of a tensor together with those of its views, and those of its value are as many only if all are known.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: Any = WeakIdKeyDictionary()
        self._changes: Any = WeakIdKeyDictionary()  # how many more changes a tensor has had than its value

    def _note(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """Note the value of a tensor."""
        self._values[x], self._changes[x] = value, x._version - value._version

    def _is_known(self, x: torch.Tensor) -> bool:
        """Whether the value of a tensor is known, and is still its value."""
        return x in self._values and x._version - self._values[x]._version == self._changes[x]

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        leaves = pytree.tree_leaves((args, options))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        is_counted = not getattr(function, "__name__", "").startswith(_UNCOUNTED)
        is_known = is_counted and all(map(self._is_known, tensors)) and (bool(tensors) or function in _MAKERS)
        if not is_known or any(isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in leaves):
            result = self._of_unknown(function, args, options)
            if not is_counted:
                self._forget(x for x in pytree.tree_leaves(args[:1]) if isinstance(x, torch.Tensor))
            return result
        if function in _NUMBERS or function in _SIZED or (function is torch.where and len(leaves) == 1):
            return pytree.tree_map_only(torch.Tensor, self._constant, self._value_of(function, args, options))
        result = function(*args, **options)
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        if made or not all(map(self._is_known, tensors)):
            self._keep(made, function, args, options)
        return result

    def _of_unknown(self, function: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Call a function of values that are not known; what it makes is known where it depends on shapes alone."""
        with_positions = self._with_known_indices(function, args)
        if function is torch.Tensor.__setitem__ and with_positions is not args and _is_empty(with_positions[1]):
            return None  # nothing is written
        result = function(*with_positions, **options)
        if function in _ALIKE and all(isinstance(size, int) for size in result.shape):
            self._keep([result], torch.full, (result.shape, _ALIKE[function]), {"dtype": result.dtype})
        return result

    def _keep(self, made: list[torch.Tensor], function: Any, args: Any, options: Any) -> None:
        """Compute the values of tensors that a function has made or changed, if that can be done."""
        name = getattr(function, "__name__", "")
        if any(part in name for part in _UNKNOWN) or any(x.numel() > MOST_ELEMENTS for x in made):
            return
        if any(x.is_inference() for x in made):
            return  # their changes are not counted
        try:
            value = self._value_of(function, args, options)
        except Exception:  # what can be traced and not be computed, such as on another device, is not known
            return
        values = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
        for x, own in zip(made, values, strict=True):
            if x.shape == own.shape and x.dtype == own.dtype:
                self._note(x, own)

    def _value_of(self, function: Any, args: Any, options: Any) -> Any:
        """Call a function with the values of its arguments."""
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            given, named = pytree.tree_map_only(torch.Tensor, self._values.__getitem__, (args, options))
            return function(*given, **named)

    def _constant(self, value: torch.Tensor) -> torch.Tensor:
        """Make a constant of the program that is exported."""
        constant = torch.tensor(value.tolist(), dtype=value.dtype).reshape(value.shape)
        self._note(constant, value)
        return constant

    def _with_known_indices(self, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace a known mask among the indices of ``x[mask]``, read or written, by positions where it is true."""
        if function not in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            return args
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        changed: list[Any] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype is torch.bool and self._is_known(index) and index.dim():
                changed += map(self._constant, self._value_of(torch.where, (index,), {}))
            else:
                changed.append(index)
        return (args[0], tuple(changed), *args[2:]) if len(changed) != len(indices) or indices is not args[1] else args

    def _forget(self, changed: Iterable[torch.Tensor]) -> None:
        """Forget the values of tensors, and of their views."""
        for x in changed:
            own = self._values.pop(x, None)
            for other, value in list(self._values.items()):
                if own is not None and own.untyped_storage()._cdata == value.untyped_storage()._cdata:
                    del self._values[other]


def _is_empty(indices: Iterable[Any]) -> bool:
    """Whether indices select nothing."""
    return any(isinstance(index, torch.Tensor) and not index.numel() for index in indices)
