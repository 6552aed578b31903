"""Weights by name: symbolic tensors that a graph treats as weights, though their data is elsewhere, or nowhere yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hidet
from hidet.graph import Tensor

from hidet_dist.errors import ConfigError
from hidet_dist.weights.safetensors_file import SafetensorsFiles, StoredTensor

_MARK = "_hidet_dist_weight"


@dataclass(frozen=True)
class _Mark:
    name: str
    stored: StoredTensor | None


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
    return _mark(tensor, _Mark(name, None))


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
        name: _mark(weight(name, stored.shape, stored.dtype, device), _Mark(name, stored))
        for name, stored in SafetensorsFiles.open(files).tensors.items()
    }


def weight_name(tensor: Tensor) -> str | None:
    """The name of a weight without data; None for any other tensor."""
    mark = _mark_of(tensor)
    return None if mark is None else mark.name


def stored_tensor(tensor: Tensor) -> StoredTensor | None:
    """Where a weight of :func:`weights_from_safetensors` lies; None for any other tensor."""
    mark = _mark_of(tensor)
    return None if mark is None else mark.stored


def _mark(tensor: Tensor, mark: _Mark) -> Tensor:
    setattr(tensor, _MARK, mark)
    return tensor


def _mark_of(tensor: Any) -> _Mark | None:
    found: _Mark | None = getattr(tensor, _MARK, None)
    return found
