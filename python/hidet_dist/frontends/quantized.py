"""Quantized checkpoints of transformers: the weights of GPTQ, AWQ and compressed-tensors, as their files have them.

Such a checkpoint has, for the weight of a linear layer, its elements in few bits, the scales of groups of them, and
their zero points, as tensors of other names and shapes. Here they become one weight of the layer's own name and shape.
What a method stores is described by its project:

* GPTQ: https://github.com/ModelCloud/GPTQModel, whose files before its version 2 have each zero point less 1;
* AWQ: https://github.com/casper-hansen/AutoAWQ, whose words have their numbers in an order of their own;
* compressed-tensors: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hidet.graph import Tensor

from hidet_dist.checks import is_whole, shown
from hidet_dist.errors import WeightsError
from hidet_dist.weights.grouped_matrix import GroupedMatrix, PackedNumbers, places_in_order
from hidet_dist.weights.named import stored_weight, weight_of, weights_from_safetensors
from hidet_dist.weights.safetensors_file import SafetensorsFiles, StoredTensor

_BITS = (4, 8)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_SCALES = ("float16", "bfloat16", "float32")


class _LayerTensors:
    """The tensors of one layer's weight, by the ends of their names. Each is taken once."""

    def __init__(self, layer: str, tensors: dict[str, StoredTensor]):
        self.layer = layer
        self._tensors = tensors

    def take(self, end: str, dtypes: tuple[str, ...] = ("int32",), dims: int = 2) -> StoredTensor:
        """Take a tensor. Raises WeightsError if there is none, or one of another dtype or number of dims."""
        if not self.has(end):
            raise WeightsError(f"The files lack {self.layer}.{end}, and have the layer's weight in few bits.")
        found = self._tensors.pop(f"{self.layer}.{end}")
        if found.dtype not in dtypes or len(found.shape) != dims:
            raise WeightsError(
                f"{found.name} is {found.dtype}{list(found.shape)}; it must have {dims} dims, of {' or '.join(dtypes)}."
            )
        return found

    def has(self, end: str) -> bool:
        """Whether there is such a tensor that was not taken."""
        return f"{self.layer}.{end}" in self._tensors

    def matrix(
        self,
        numbers: PackedNumbers,
        scales: StoredTensor,
        zeros: PackedNumbers | None,
        transposed: bool,
        zero_step: int = 0,
    ) -> GroupedMatrix:
        """Make the matrix. Raises WeightsError where the shapes of its tensors do not fit one another."""
        across = 0 if transposed else 1  # the dim with the groups
        depth, groups = numbers.shape[across], scales.shape[across]
        of_zeros = list(scales.shape) if zeros is None else list(zeros.shape)
        # What is packed is padded to whole words.
        fits = all(0 <= zero - scale < 32 for zero, scale in zip(of_zeros, scales.shape, strict=True))
        if (
            not (depth and groups)
            or depth % groups
            or numbers.shape[1 - across] != scales.shape[1 - across]
            or not fits
        ):
            raise WeightsError(
                f"{self.layer} has numbers of the shape {list(numbers.shape)}, scales of {list(scales.shape)} and zero "
                f"points of {of_zeros}, which do not fit one another."
            )
        return GroupedMatrix(numbers, scales, zeros, depth // groups, transposed, zero_step)

    def check_order(self, end: str, columns: int, group: int) -> None:
        """Refuse groups of columns that are not neighbours. Raises WeightsError."""
        if not self.has(end):
            return
        stored = self.take(end, ("int32", "int64"), 1)
        groups = stored.read([slice(0, size) for size in stored.shape])
        if not torch.equal(groups.long(), torch.arange(columns) // group):
            raise WeightsError(
                f"{stored.name} says that the groups of the weight are not of neighbouring columns (act-order), which "
                "is not supported: quantize the model with desc_act=False, or with actorder 'weight'."
            )


def problem_of(config: Any) -> str:
    """Say why the weights of a ``quantization_config`` cannot be read; an empty text if they can."""
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if not isinstance(method, str) or method not in _METHODS:
        named = f"method {shown(method)}" if method is not None else "method that it describes"
        return f"the {named} is not supported"
    return next(_METHODS[method].problems(config), "")


def weights_of_folder(folder: Path, config: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Make weights from the safetensors files of a folder, by name, as its ``quantization_config`` says, if it has one.

    They are float32 where they are computed from few bits. Nothing is read but headers, and what says which columns are
    of a group.

    Raises
    ------
    WeightsError
        When a file is missing or malformed, or has tensors that are not those of the method.
    """
    if config is None:
        return weights_from_safetensors(folder)
    method = _METHODS[config["quant_method"]]
    pending = dict(SafetensorsFiles.open(folder).tensors)
    weights = {}
    for name in [name for name in pending if name.endswith(f".{method.mark}")]:
        layer = name.removesuffix(f".{method.mark}")
        matrix = method.make(_LayerTensors(layer, pending), config)
        if f"{layer}.weight" in pending:
            raise WeightsError(f"The files have both {name} and {layer}.weight.")
        weights[f"{layer}.weight"] = weight_of(f"{layer}.weight", matrix, matrix.shape, "float32")
    return weights | {name: stored_weight(tensor) for name, tensor in pending.items()}


def _problems_of_gptq(config: Mapping[str, Any]) -> Iterator[str]:
    if not is_whole(config.get("bits")) or config["bits"] not in _BITS:
        yield f"bits is {shown(config.get('bits'))}, and {_either(_BITS)} are read"
    if config.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        yield f"checkpoint_format is {shown(config['checkpoint_format'])}, and gptq or gptq_v2 are read"
    if config.get("pack_dtype", "int32") != "int32":
        yield f"pack_dtype is {shown(config['pack_dtype'])}, and int32 is read"
    if config.get("dynamic"):
        yield "dynamic gives layers other bits, which is not supported"


def _gptq(parts: _LayerTensors, config: Mapping[str, Any]) -> GroupedMatrix:
    bits = config["bits"]
    places = places_in_order(bits)
    numbers = PackedNumbers(parts.take("qweight"), 0, bits, places)
    zeros = PackedNumbers(parts.take("qzeros"), 1, bits, places)
    step = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    matrix = parts.matrix(numbers, parts.take("scales", _SCALES), zeros, True, step)
    parts.check_order("g_idx", matrix.shape[1], matrix.group)
    return matrix


def _problems_of_awq(config: Mapping[str, Any]) -> Iterator[str]:
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        yield f"bits is {shown(bits)}, and 4 are read"
    if str(config.get("version", "gemm")).lower() != "gemm":
        yield f"version is {shown(config['version'])}, and gemm is read"


def _awq(parts: _LayerTensors, config: Mapping[str, Any]) -> GroupedMatrix:
    numbers, zeros = (PackedNumbers(parts.take(end), 1, 4, _AWQ_PLACES) for end in ("qweight", "qzeros"))
    return parts.matrix(numbers, parts.take("scales", _SCALES), zeros, True)


def _problems_of_compressed(config: Mapping[str, Any]) -> Iterator[str]:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(one, Mapping) for one in groups.values()):
        yield f"config_groups is {shown(groups)}, and must be an object of objects"
        return
    for name, group in groups.items():
        where, weights = f"config_groups[{shown(name)}]", group.get("weights")
        packing = group.get("format") or config.get("format")
        if packing != "pack-quantized":
            yield f"{where}.format is {shown(packing)}, and pack-quantized is read"
        if not isinstance(weights, Mapping):
            yield f"{where}.weights is {shown(weights)}, and must be an object"
            return
        if weights.get("num_bits") not in _BITS or weights.get("type", "int") != "int":
            yield f"{where} has weights of {shown(weights.get('type', 'int'))} of {shown(weights.get('num_bits'))} bits"
        if weights.get("strategy") not in ("group", "channel"):
            yield f"{where}.weights.strategy is {shown(weights.get('strategy'))}, and group and channel are read"
        for rounded in ("input_activations", "output_activations"):
            if group.get(rounded) is not None:
                yield f"{where} has {rounded}, and only weights may be quantized"
    if config.get("kv_cache_scheme") is not None:
        yield "kv_cache_scheme asks for quantized keys and values, which is not supported"
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        yield f"sparsity_config has the format {shown(sparsity['format'])}, and dense is read"
    transforms = config.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        yield "transform_config has transforms of activations, which are not supported"


def _compressed(parts: _LayerTensors, config: Mapping[str, Any]) -> GroupedMatrix:
    words = parts.take("weight_packed")
    whole = parts.take("weight_shape", ("int64", "int32"), 1)
    rows, columns = whole.read([slice(0, whole.shape[0])]).tolist() if whole.shape == (2,) else (0, 0)
    bits = next((bits for bits in _BITS if (rows, columns) == (words.shape[0], words.shape[1] * 32 // bits)), None)
    if bits is None:
        raise WeightsError(
            f"{words.name} has the shape {list(words.shape)}, and {whole.name} is {[rows, columns]}: those are not "
            f"numbers of {_either(_BITS)} bits."
        )
    places = places_in_order(bits)
    zeros = None
    if parts.has("weight_zero_point"):
        zeros = PackedNumbers(parts.take("weight_zero_point"), 0, bits, places)
    matrix = parts.matrix(PackedNumbers(words, 1, bits, places), parts.take("weight_scale", _SCALES), zeros, False)
    parts.check_order("weight_g_idx", columns, matrix.group)
    return matrix


def _either(numbers: tuple[int, ...]) -> str:
    return " or ".join(map(str, numbers))


@dataclass(frozen=True)
class _Method:
    """A method of quantization.

    Attributes
    ----------
    problems: says what of a configuration cannot be read.
    mark: the end of the names of tensors by which weights are found.
    make: makes a matrix of a layer's tensors.
    """

    problems: Callable[[Mapping[str, Any]], Iterator[str]]
    mark: str
    make: Callable[[_LayerTensors, Mapping[str, Any]], GroupedMatrix]


_METHODS = {
    "gptq": _Method(_problems_of_gptq, "qweight", _gptq),
    "awq": _Method(_problems_of_awq, "qweight", _awq),
    "compressed-tensors": _Method(_problems_of_compressed, "weight_packed", _compressed),
}
