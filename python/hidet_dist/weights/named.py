"""Weights by name: symbolic tensors that a graph treats as weights; their data is elsewhere, or does not exist yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import hidet
import torch
from hidet.graph import Tensor

from hidet_dist.errors import ConfigError, WeightsError
from hidet_dist.weights.combined import Source
from hidet_dist.weights.safetensors_file import SafetensorsFiles, StoredTensor

_MARK = "_hidet_dist_weight"

CASTABLE = ("float64", "float32", "float16", "bfloat16")
"""The dtypes among which weights are cast."""


@dataclass(frozen=True, eq=False)
class InMemory:
    """The data of a whole weight, in memory."""

    data: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.data.shape)

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """Read the elements of ``region``, a slice with integer bounds and step 1 for each dim; contiguous."""
        return self.data[tuple(region)].contiguous()


@dataclass(frozen=True)
class Mark:
    """The mark of a weight: its name, the source of its data if known, and the part of it that the weight is.

    ``part`` is a slice with integer bounds for each dim of a stored tensor of ``shape`` (elements), with a step where
    it is not 1; the weight is zero beyond it. ``dtype`` is the stored dtype if the weight has another one, to which it
    is cast. ``ending`` follows the name in the label of a weight that is another form of the one of this name.
    """

    name: str
    stored: Source | None
    shape: tuple[int, ...]
    part: tuple[slice, ...]
    dtype: str | None = None
    ending: str = ""

    def __str__(self) -> str:
        bounds = [
            ":"
            if (kept.start, kept.stop, kept.step) == (0, size, None)
            else ":".join(str(bound) for bound in (kept.start, kept.stop, kept.step) if bound is not None)
            for kept, size in zip(self.part, self.shape, strict=True)
        ]
        part = "" if all(bound == ":" for bound in bounds) else f"[{', '.join(bounds)}]"
        return f"{self.name}{part}{self.ending}"


def weight(name: str, shape: Sequence[int], dtype: str = "float32", device: str = "cpu") -> Tensor:
    """Make a weight from a name, a shape and a dtype; it takes no memory.

    Use it in a graph like any tensor; it need not be among the inputs of ``hidet.trace_from``. Computation on it
    becomes part of the graph. When ``auto_parallel`` writes the artifacts, it reads each rank's shard of the weight
    from the files of ``optimization_config['weights']``.

    Parameters
    ----------
    name: str
        Its name in the files.
    shape: sequence of int
        Its shape, in elements.
    dtype: str
        hidet's name of its dtype, which must be the dtype in the files.
    device: str
        The device of the graph.

    Raises
    ------
    ConfigError
        When the shape has anything but positive whole numbers, or hidet has no such dtype.
    """
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in shape):
        raise ConfigError(f"The weight {name!r} must have a shape of positive whole numbers; got {list(shape)}.")
    try:
        tensor = hidet.symbol(list(shape), dtype, device)
    except ValueError as error:
        raise ConfigError(f"The weight {name!r} cannot have the dtype {dtype!r}: {error}") from error
    return as_weight(tensor, name)


def held_weight(name: str, data: torch.Tensor) -> Tensor:
    """Make a weight by name from data in memory, which stays there until the artifacts are written.

    Unlike a constant of the graph, it is never used in computations while a graph is traced.

    Raises
    ------
    ConfigError
        When hidet has no such dtype, or a dim is 0.
    """
    dtype = str(data.dtype).removeprefix("torch.")
    tensor = weight(name, list(data.shape), dtype)
    return _mark(tensor, Mark(name, InMemory(data), tuple(data.shape), _all_of(data.shape)))


def stored_weight(stored: StoredTensor) -> Tensor:
    """Make a weight from a tensor in a file, with its name; its data is not read until a shard of it is.

    Raises
    ------
    ConfigError
        When hidet has no such dtype, or a dim is 0.
    """
    return weight_of(stored.name, stored, stored.shape, stored.dtype)


def weight_of(name: str, data: Source, shape: Sequence[int], dtype: str) -> Tensor:
    """Make a weight by name from data that is read when a shard of it is.

    Parameters
    ----------
    name: str
        Its name.
    data: Source
        Where its elements are.
    shape: sequence of int
        Its shape, in elements.
    dtype: str
        hidet's name of the dtype of the elements that are read.

    Raises
    ------
    ConfigError
        When hidet has no such dtype, or a dim is 0.
    """
    return _mark(weight(name, list(shape), dtype), _whole(name, data, shape))


def as_weight(tensor: Tensor, name: str) -> Tensor:
    """Mark a symbolic tensor as a weight, like those of :func:`weight`; return the tensor.

    This turns inputs of a traced graph into weights, for front ends that turn a model's parameters into inputs.

    Raises
    ------
    ConfigError
        When the tensor is computed by an operator, has data already, or has symbolic dims, or the name is empty.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"A weight's name must be a text that is not empty; got {name!r}.")
    if not isinstance(tensor, Tensor) or tensor.storage is not None or tensor.trace is not None:
        raise ConfigError(f"Only a symbolic tensor that nothing computes can be the weight {name!r}; got {tensor!r}.")
    if not all(isinstance(size, int) for size in tensor.shape):
        raise ConfigError(f"The weight {name!r} must have a fixed shape; got {list(map(str, tensor.shape))}.")
    return _mark(tensor, _whole(name, None, tensor.shape))


def as_weights(module: hidet.nn.Module, prefix: str = "") -> None:
    """Replace each parameter of a hidet module and its submodules by a weight of its name; the data is released.

    The names are those of ``module.named_parameters()``, such as ``layers.0.attn.weight``, with ``prefix`` before them.
    """
    for name, parameter in module._parameters.items():
        if parameter is not None:
            shape = [int(size) for size in parameter.shape]
            module._parameters[name] = weight(prefix + name, shape, parameter.dtype.name, str(parameter.device))
    for name, child in module._submodules.items():
        if child is not None:
            as_weights(child, f"{prefix}{name}.")


def weights_from_safetensors(files: str | Path | Sequence[str | Path], device: str = "cpu") -> dict[str, Tensor]:
    """Make weights from the tensors of safetensors files, by name; only the headers are read.

    Parameters
    ----------
    files: path or sequence of paths
        Safetensors files, an index (``model.safetensors.index.json``), or a folder with either.
    device: str
        The device of the graph.

    Raises
    ------
    WeightsError
        When a file is missing or malformed, or two files have a tensor of the same name.
    """
    return {
        name: _mark(weight(name, stored.shape, stored.dtype, device), _whole(name, stored, stored.shape))
        for name, stored in SafetensorsFiles.open(files).tensors.items()
    }


def part_of_weight(tensor: Tensor, dim: int, start: int, stop: int, step: int = 1) -> Tensor:
    """Make a weight from every ``step``-th of the elements ``start`` to ``stop`` of dim ``dim`` of a weight."""
    mark = mark_of(tensor)
    assert mark is not None
    part = list(mark.part)
    own, count = part[dim].step or 1, len(range(start, stop, step))
    first = part[dim].start + own * start
    part[dim] = slice(first, first + own * step * (count - 1) + 1, own * step if own * step > 1 else None)
    shape = [count if d == dim else int(size) for d, size in enumerate(tensor.shape)]
    result = hidet.symbol(shape, tensor.dtype, tensor.device)
    return _mark(result, replace(mark, part=tuple(part)))


def padded_weight(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Make a weight of ``size`` elements along dim ``dim`` from a weight, with zeros after its elements."""
    mark = mark_of(tensor)
    assert mark is not None
    shape = [size if d == dim else int(extent) for d, extent in enumerate(tensor.shape)]
    return _mark(hidet.symbol(shape, tensor.dtype, tensor.device), mark)


def weight_as(tensor: Tensor, dtype: str) -> Tensor:
    """Make a weight in another dtype of floating point from a weight; stored data is cast when it is read.

    Raises
    ------
    WeightsError
        When one of the two dtypes is another: integers, and floats of 8 bits, are values only together with the scales
        of their quantization.
    """
    mark = mark_of(tensor)
    assert mark is not None
    if not {tensor.dtype.name, dtype} <= set(CASTABLE):
        raise WeightsError(
            f"The weight {mark.name!r} is stored as {tensor.dtype.name}, and the model has it as {dtype}. Only "
            f"{', '.join(CASTABLE)} are cast to one another: a quantized file must be dequantized first."
        )
    result = hidet.symbol([int(size) for size in tensor.shape], dtype, tensor.device)
    return _mark(result, replace(mark, dtype=mark.dtype or tensor.dtype.name))


def copy_of(tensor: Tensor, ending: str = "") -> Tensor:
    """Make another tensor of the same weight, by name or with the same data. ``ending`` is put behind its label."""
    mark = mark_of(tensor)
    if mark is None:
        return Tensor(tensor.shape, tensor.dtype, tensor.device, tensor.storage, tensor.layout)
    result = hidet.symbol([int(size) for size in tensor.shape], tensor.dtype, tensor.device)
    return _mark(result, replace(mark, ending=mark.ending + ending))


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a weight without data."""
    return mark_of(tensor) is not None


def names_of(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """Map the names of weights, such as ``fc1.weight``, or ``qkv.weight[:, 0:64]`` for a part, to the tensors."""
    return {str(mark): tensor for tensor in tensors if (mark := mark_of(tensor)) is not None}


def mark_of(tensor: Tensor) -> Mark | None:
    """Return the mark of a weight; None for any other tensor."""
    mark: Mark | None = getattr(tensor, _MARK, None)
    return mark


def _mark(tensor: Tensor, mark: Mark) -> Tensor:
    setattr(tensor, _MARK, mark)
    return tensor


def _whole(name: str, stored: Source | None, shape: Sequence[int]) -> Mark:
    return Mark(name, stored, tuple(shape), _all_of(shape))


def _all_of(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)
