"""Weights by name: symbolic tensors that a graph treats as weights, though their data is elsewhere, or nowhere yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hidet
import torch
from hidet.graph import Tensor

from hidet_dist.errors import ConfigError
from hidet_dist.weights.safetensors_file import SafetensorsFiles, StoredTensor

_MARK = "_hidet_dist_weight"


@dataclass(frozen=True, eq=False)
class InMemory:
    """The data of a whole weight, in memory."""

    data: torch.Tensor

    def read(self, region: Sequence[slice]) -> torch.Tensor:
        """The elements of ``region``, a slice with whole bounds and step 1 for each dim; contiguous."""
        return self.data[tuple(region)].contiguous()


@dataclass(frozen=True)
class Mark:
    """The mark of a weight: its name, its place if that is known, and the part of what lies there that it is.

    ``part`` is a slice with whole bounds for each dim of a weight of ``shape`` (elements); what the weight has beyond
    it is zero. ``dtype`` is that of what lies there, where the weight is of another and cast from it.
    """

    name: str
    stored: StoredTensor | InMemory | None
    shape: tuple[int, ...]
    part: tuple[slice, ...]
    dtype: str | None = None

    def __str__(self) -> str:
        bounds = [
            ":" if (own.start, own.stop) == (0, size) else f"{own.start}:{own.stop}"
            for own, size in zip(self.part, self.shape, strict=True)
        ]
        return self.name if all(bound == ":" for bound in bounds) else f"{self.name}[{', '.join(bounds)}]"


def weight(name: str, shape: Sequence[int], dtype: str = "float32", device: str = "cpu") -> Tensor:
    """A weight that is a name, a shape and a dtype, and takes no memory.

    Use it in a graph like any tensor; it need not be among the inputs given to ``hidet.trace_from``. What is computed
    from it becomes part of the graph. ``auto_parallel`` reads it from the files of ``optimization_config['weights']``,
    each rank's shard of it, when it writes the artifacts.

    Parameters
    ----------
    name: str
        Its name in the files.
    shape: sequence of int
        Its shape, in elements.
    dtype: str
        hidet's name of its dtype, which must be that of the files.
    device: str
        The device of the graph.

    Raises
    ------
    ConfigError
        When the shape has anything but positive whole numbers, or there is no such dtype.
    """
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in shape):
        raise ConfigError(f"The weight {name!r} must have a shape of positive whole numbers; got {list(shape)}.")
    try:
        tensor = hidet.symbol(list(shape), dtype, device)
    except ValueError as error:
        raise ConfigError(f"The weight {name!r} cannot have the dtype {dtype!r}: {error}") from error
    return as_weight(tensor, name)


def held_weight(name: str, data: torch.Tensor) -> Tensor:
    """A weight by its name whose data is in memory, where it stays until the artifacts are written.

    Unlike a constant of the graph, it is never computed with while a graph is made.

    Raises
    ------
    ConfigError
        When hidet has no such dtype, or a dim is 0.
    """
    dtype = str(data.dtype).removeprefix("torch.")
    tensor = weight(name, list(data.shape), dtype)
    return _mark(tensor, Mark(name, InMemory(data), tuple(data.shape), _all_of(data.shape)))


def stored_weight(stored: StoredTensor) -> Tensor:
    """A tensor in a file as a weight of its name; its data stays where it is until a shard of it is read.

    Raises
    ------
    ConfigError
        When hidet has no such dtype, or a dim is 0.
    """
    tensor = weight(stored.name, stored.shape, stored.dtype)
    return _mark(tensor, _whole(stored.name, stored, stored.shape))


def as_weight(tensor: Tensor, name: str) -> Tensor:
    """Make a symbolic tensor a weight, as :func:`weight` does; returns the tensor.

    So can the inputs of a traced graph be made weights, where a frontend makes inputs of a model's parameters.

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
    """Make every parameter of a hidet module, and of the modules in it, a weight of its name; their data is let go.

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
    """The tensors of safetensors files as weights, by name: only the files' headers are read.

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


def part_of_weight(tensor: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """The elements ``start`` to ``stop`` of dim ``dim`` of a weight, as a weight of their own."""
    mark = mark_of(tensor)
    assert mark is not None
    part = list(mark.part)
    part[dim] = slice(part[dim].start + start, part[dim].start + stop)
    shape = [stop - start if d == dim else int(size) for d, size in enumerate(tensor.shape)]
    own = hidet.symbol(shape, tensor.dtype, tensor.device)
    return _mark(own, Mark(mark.name, mark.stored, mark.shape, tuple(part), mark.dtype))


def padded_weight(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A weight with zeros behind its elements along dim ``dim``, so that there are ``size``, as a weight of its own."""
    mark = mark_of(tensor)
    assert mark is not None
    shape = [size if d == dim else int(extent) for d, extent in enumerate(tensor.shape)]
    return _mark(hidet.symbol(shape, tensor.dtype, tensor.device), mark)


def weight_as(tensor: Tensor, dtype: str) -> Tensor:
    """A weight in another dtype: what lies in the files is cast when it is read."""
    mark = mark_of(tensor)
    assert mark is not None
    own = hidet.symbol([int(size) for size in tensor.shape], dtype, tensor.device)
    return _mark(own, Mark(mark.name, mark.stored, mark.shape, mark.part, mark.dtype or tensor.dtype.name))


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a weight without data."""
    return mark_of(tensor) is not None


def names_of(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """The weights among tensors by their names, such as ``fc1.weight``, or ``qkv.weight[:, 0:64]`` for a part."""
    return {str(mark): tensor for tensor in tensors if (mark := mark_of(tensor)) is not None}


def mark_of(tensor: Tensor) -> Mark | None:
    """The mark of a weight; None for any other tensor."""
    found: Mark | None = getattr(tensor, _MARK, None)
    return found


def _mark(tensor: Tensor, mark: Mark) -> Tensor:
    setattr(tensor, _MARK, mark)
    return tensor


def _whole(name: str, stored: StoredTensor | None, shape: Sequence[int]) -> Mark:
    return Mark(name, stored, tuple(shape), _all_of(shape))


def _all_of(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)
