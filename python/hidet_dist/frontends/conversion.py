"""What transformers makes of a checkpoint's tensors when it loads them: experts stacked, projections joined or split.

transformers states these conversions by operations of PyTorch. Here they are applied to stand-ins of the tensors, which
record the operation: a weight becomes a recipe, by which any slice of it is read from the files.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hidet_dist.errors import WeightsError
from hidet_dist.weights.combined import Joined, Permuted, SlicedSource, Source, Stacked
from hidet_dist.weights.named import InMemory


class Recipe:
    """Stands for a tensor of PyTorch, of whose elements it knows the source.

    It takes the operations that rearrange tensors: ``stack``, ``cat``, ``chunk``, ``split``, slices by step 1, and
    permutations of dims. Others raise NotImplementedError, and its other methods are missing.
    """

    def __init__(self, source: Source, shape: Sequence[int], dtype: torch.dtype):
        self.source = source
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = torch.device("cpu")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        recorded = _RECORDED.get(getattr(function, "__name__", ""))
        if recorded is None:
            raise NotImplementedError(f"{function} of tensors of a checkpoint")
        return recorded(*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def dim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Its shape, or the extent of a dim."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    def contiguous(self) -> Recipe:
        """Itself."""
        return self

    def transpose(self, dim0: int, dim1: int) -> Recipe:
        """Swap two dims."""
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self.permute(*order)

    @property
    def T(self) -> Recipe:
        """All dims in reverse order."""
        return self.permute(*reversed(range(self.ndim)))

    @property
    def mT(self) -> Recipe:
        """The last two dims swapped."""
        return self.transpose(-1, -2)

    def t(self) -> Recipe:
        """All dims in reverse order."""
        return self.T

    def permute(self, *dims: Any) -> Recipe:
        """Put the dims in another order."""
        order = [d % self.ndim for d in (dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)]
        return Recipe(Permuted(self.source, order), [self.shape[d] for d in order], self.dtype)

    def narrow(self, dim: int, start: int, length: int) -> Recipe:
        """Take ``length`` elements along a dim, from ``start`` on."""
        dim %= self.ndim
        bounds = [slice(start, start + length) if d == dim else slice(0, size) for d, size in enumerate(self.shape)]
        shape = [length if d == dim else size for d, size in enumerate(self.shape)]
        return Recipe(SlicedSource(self.source, bounds), shape, self.dtype)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Recipe, ...]:
        """Split a dim in parts of these sizes; the last one may be smaller where one size is given."""
        extent = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, extent - start) for start in range(0, extent, sizes)]
        if sum(sizes) != extent:
            raise WeightsError(f"A dim of {extent} elements cannot be split in parts of {list(sizes)}.")
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(self.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Recipe, ...]:
        """Split a dim in this many parts."""
        return self.split(-(-self.shape[dim] // chunks), dim)

    def __getitem__(self, index: Any) -> Recipe:
        result, dim = self, 0
        for one in index if isinstance(index, tuple) else (index,):
            if one is Ellipsis:
                dim = self.ndim - (len(index) - 1 - dim)
                continue
            if not isinstance(one, slice) or one.step not in (None, 1):
                raise NotImplementedError("an index of a checkpoint's tensor that is not a slice")
            start, stop, _ = one.indices(self.shape[dim])
            result = result.narrow(dim, start, max(0, stop - start))
            dim += 1
        return result


def _stack(tensors: Sequence[Recipe], dim: int = 0) -> Recipe:
    first = _alike(tensors, None)
    dim %= first.ndim + 1
    shape = [*first.shape[:dim], len(tensors), *first.shape[dim:]]
    return Recipe(Stacked([x.source for x in tensors], dim), shape, first.dtype)


def _cat(tensors: Sequence[Recipe], dim: int = 0) -> Recipe:
    first = _alike(tensors, dim % tensors[0].ndim)
    dim %= first.ndim
    extents = [x.shape[dim] for x in tensors]
    shape = [sum(extents) if d == dim else size for d, size in enumerate(first.shape)]
    return Recipe(Joined([x.source for x in tensors], extents, dim), shape, first.dtype)


def _alike(tensors: Sequence[Recipe], but: int | None) -> Recipe:
    """Return the first of tensors that can be joined. Raises WeightsError for tensors of other shapes or dtypes."""
    first = tensors[0]
    for x in tensors:
        shapes = [[size for d, size in enumerate(one.shape) if d != but] for one in (first, x)]
        if shapes[0] != shapes[1] or x.ndim != first.ndim or x.dtype != first.dtype:
            raise WeightsError(
                f"Tensors of {first.dtype}{list(first.shape)} and {x.dtype}{list(x.shape)} cannot be joined to one "
                "weight: the files belong to another configuration."
            )
    return first


_RECORDED: dict[str, Callable[..., Any]] = {
    "stack": _stack,
    "cat": _cat,
    "concat": _cat,
    "chunk": Recipe.chunk,
    "split": Recipe.split,
    "narrow": Recipe.narrow,
    "transpose": Recipe.transpose,
    "permute": Recipe.permute,
}


class WeightConversion:
    """One conversion of transformers with the tensors that it takes: those of one weight, or of several split from it.

    Parameters
    ----------
    converter: transformers.core_model_loading.WeightConverter
        The conversion; it is copied.
    name: str
        The name in the model of the weight that it makes, or of the first of several.
    """

    def __init__(self, converter: Any, name: str):
        self.name = name
        self._converter = converter
        self._tensors: list[tuple[str, str, Recipe]] = []

    def add(self, stored: str, pattern: str, tensor: Recipe) -> None:
        """Add a tensor of the files by its name there, and the pattern of the conversion that the name matched."""
        self._tensors.append((stored, pattern, tensor))

    @property
    def stored(self) -> list[str]:
        """The names of its tensors in the files."""
        return [stored for stored, _, _ in self._tensors]

    def results(self, module: Any) -> dict[str, Recipe]:
        """Convert: the recipes of the model's weights by name.

        Operations that compute new elements are carried out at once, and their results kept in memory.

        Raises
        ------
        WeightsError
            When the tensors do not fit each other, or some are missing.
        """
        try:
            try:
                return self._convert(module, lambda tensor: tensor)
            except (NotImplementedError, AttributeError) as error:
                if isinstance(error, AttributeError) and not isinstance(error.obj, Recipe):
                    raise
                made = self._convert(module, _whole)
                return {name: _held(data) for name, data in made.items()}
        except WeightsError as error:
            raise WeightsError(f"The weight {self.name!r} cannot be made from {self._some()}: {error}") from error
        except Exception as error:  # of transformers, for files of another configuration
            raise WeightsError(
                f"transformers cannot make the weight {self.name!r} from {self._some()}: {type(error).__name__}: "
                f"{error}. The files belong to another configuration."
            ) from error

    def _convert(self, module: Any, tensor_of: Callable[[Recipe], Any]) -> dict[str, Any]:
        converter = copy.deepcopy(self._converter)
        for stored, pattern, recipe in self._tensors:
            converter.add_tensor(self.name, stored, pattern, lambda recipe=recipe: tensor_of(recipe))
        made = converter.convert(self.name, model=module, config=module.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in made.items()}

    def _some(self) -> str:
        return ", ".join(self.stored[:3]) + (", ..." if len(self._tensors) > 3 else "")


def conversions_of(module: Any) -> tuple[list[Any], list[Any]]:
    """Return the renamings and the conversions that transformers has for the files of a model."""
    loading = importlib.import_module("transformers.core_model_loading")
    known = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(module)
    renamings = [entry for entry in known if isinstance(entry, loading.WeightRenaming)]
    return renamings, [entry for entry in known if isinstance(entry, loading.WeightConverter)]


def _whole(recipe: Recipe) -> torch.Tensor:
    return recipe.source.read([slice(0, size) for size in recipe.shape])


def _held(data: torch.Tensor) -> Recipe:
    return Recipe(InMemory(data), data.shape, data.dtype)
