"""Weights of a transformers model from the files of a checkpoint: by name, with the ties that the files allow."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hidet.graph import Tensor

from hidet_dist.errors import UnusedWeightsWarning, WeightsError
from hidet_dist.frontends.conversion import Recipe, WeightConversion, conversions_of
from hidet_dist.frontends.pytorch.calls import name_of_dtype
from hidet_dist.weights.named import weight_as, weight_of
from hidet_dist.weights.sources import same_elements, source_of

_NAMED = 3  # tensors that a message names


def stored_weights(module: Any, files: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tie a model's parameters as its configuration and the files say, and map its state dict to weights of the files.

    Names in the files may be those of earlier versions of transformers, and have the prefix of the base model or lack
    it. Two parameters that the configuration ties are one if the files have one of them, or both with the same
    elements; else they are two, as for transformers. A buffer that the files lack stays as the module has it.

    Parameters
    ----------
    module: transformers.PreTrainedModel
        The model, nothing of it tied yet. Its parameters may be on the meta device.
    files: mapping
        The weights of the files by name, as of :func:`hidet_dist.weights.named.weights_from_safetensors`.

    Returns
    -------
    dict
        A weight for each parameter and persistent buffer by name; the same one for parameters that are tied.

    Raises
    ------
    WeightsError
        When the files lack a parameter, have a weight in another shape, or in a dtype that cannot be cast; when they
        have two different tensors for one parameter, or tensors of one of the model's layers that it does not use.

    Warns
    -----
    UnusedWeightsWarning
        When the files have other tensors that the model does not use.
    """
    state = module.state_dict(keep_vars=True)
    renamings, converters = conversions_of(module)
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    weights: dict[str, Tensor] = {}
    conversions: dict[str, WeightConversion] = {}
    unused = []
    for key in _keys_of(module, state, files, renamings, converters):
        if key.name not in state or (key.pattern is None and key.name in weights):
            unused.append(key)
        elif key.pattern is None:
            weights[key.name] = _converted(key.name, files[key.stored], state[key.name])
        else:
            conversion = conversions.setdefault(key.name, WeightConversion(converter_of[key.pattern], key.name))
            conversion.add(key.stored, key.pattern, _recipe(key.name, files[key.stored], state[key.name]))
    for conversion in conversions.values():
        for name, recipe in conversion.results(module).items():
            if name not in state or name in weights:
                unused += [_Key(stored, name, None) for stored in conversion.stored]
            else:
                made = weight_of(name, recipe.source, recipe.shape, str(recipe.dtype).removeprefix("torch."))
                weights[name] = _converted(name, made, state[name])
    _tie(module, weights)
    _check_unused(module, unused, _missing(module, weights))
    return _by_parameter(module, weights)


@dataclass(frozen=True)
class _Key:
    """The name of a tensor in the files and in the model, and the pattern of the conversion that takes it, if one does.

    A conversion makes other tensors from it: ``name`` is that of the first.
    """

    stored: str
    name: str
    pattern: str | None


def _keys_of(
    module: Any, names: Mapping[str, Any], files: Iterable[str], renamings: list[Any], converters: list[Any]
) -> list[_Key]:
    """Rename the tensors of files as transformers does, which knows the names that models had in earlier versions."""
    loading = importlib.import_module("transformers.core_model_loading")
    keys = []
    for stored in sorted(files, key=loading.dot_natural_key):  # the order in which some renamings depend on one another
        rename = partial(
            loading.rename_source_key, stored, base_model_prefix=module.base_model_prefix, meta_state_dict=names
        )
        name, pattern = rename(renamings, converters)
        if name not in names and stored in names:
            name, pattern = rename([], [])
        keys.append(_Key(stored, name, pattern))
    return keys


def _recipe(name: str, stored: Tensor, x: torch.Tensor) -> Recipe:
    """Make a stand-in for a stored tensor, cast to the dtype of the model's tensor that is made from it."""
    weight = _cast(name, stored, x)
    return Recipe(source_of(weight), [int(size) for size in weight.shape], x.dtype)


def _cast(name: str, stored: Tensor, x: torch.Tensor) -> Tensor:
    """Cast a weight to the dtype of the model's tensor. Raises WeightsError."""
    dtype = name_of_dtype(x, f"The weight {name!r}")
    return stored if stored.dtype.name == dtype else weight_as(stored, dtype)


def _converted(name: str, stored: Tensor, x: torch.Tensor) -> Tensor:
    """Cast a weight to the dtype of the model's tensor, whose shape it must have. Raises WeightsError."""
    weight = _cast(name, stored, x)
    if list(weight.shape) != list(x.shape):
        raise WeightsError(
            f"The files have the weight {name!r} in the shape {list(map(int, weight.shape))}, and the model in "
            f"{list(x.shape)}: the files belong to another configuration."
        )
    return weight


def _tie(module: Any, weights: Mapping[str, Tensor]) -> None:
    """Tie the parameters of which the files do not have two different tensors, as transformers does."""
    missing = {name for name, _ in module.named_parameters(remove_duplicate=False) if name not in weights}
    for target, source in module.get_expanded_tied_weights_keys(all_submodels=True).items():
        if target in weights and source in weights and same_elements(weights[target], weights[source]):
            missing.add(target)  # so that it is tied: transformers does not compare parameters without data
    module.tie_weights(missing_keys=missing)


def _missing(module: Any, weights: Mapping[str, Tensor]) -> list[str]:
    """List the parameters that the files have by no name."""
    there = {id(x) for name, x in module.named_parameters(remove_duplicate=False) if name in weights}
    return [name for name, x in module.named_parameters() if id(x) not in there]


def _by_parameter(module: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map each name of a parameter to the weight of the parameter. Raises WeightsError if there are two of them."""
    first: dict[int, str] = {}
    result = dict(weights)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, x in parameters.items():
        if name in weights:
            known = first.setdefault(id(x), name)
            if known != name and not same_elements(weights[known], weights[name]):
                raise WeightsError(
                    f"{type(module).__name__} has {known!r} and {name!r} as one weight, and the files have two "
                    "different tensors of these names: the files belong to another configuration."
                )
    for name, x in parameters.items():
        result[name] = weights[first[id(x)]]
    return result


def _check_unused(module: Any, unused: list[_Key], missing: list[str]) -> None:
    """Report what the model lacks and what it leaves over: raise WeightsError, or warn if the model is still right."""
    buffers = {name for name, _ in module.named_buffers()}
    patterns = module._keys_to_ignore_on_load_unexpected or ()
    # Positions and frequencies were parts of state dicts in earlier versions of transformers.
    harmless = re.compile("|".join((*sorted(patterns), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")))
    left = [key for key in unused if key.name not in buffers and not harmless.search(key.name)]
    kind = type(module).__name__
    if missing:
        raise WeightsError(
            f"The files lack {len(missing)} weights of {kind}, such as {_some(missing)}."
            + (f" They have {len(left)} tensors that it does not use, such as {_some(_stored(left))}." if left else "")
            + _OTHER
        )
    layers = {name for name, part in module.named_modules() if part._parameters}
    if inside := [key for key in left if key.name.rpartition(".")[0] in layers]:
        raise WeightsError(
            f"The files have {len(inside)} tensors of layers of {kind} that it does not use, such as "
            f"{_some(_stored(inside))}: its results would not be those of the files. They are of a quantized model, "
            "which must be dequantized first, or of another configuration."
        )
    if left:
        warnings.warn(
            f"{kind} does not use {len(left)} tensors of the files, such as {_some(_stored(left))}.",
            UnusedWeightsWarning,
            stacklevel=2,
        )


_OTHER = " Give the architecture that the files are of; quantized files must be dequantized first."


def _stored(keys: Iterable[_Key]) -> list[str]:
    return [key.stored for key in keys]


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED])
