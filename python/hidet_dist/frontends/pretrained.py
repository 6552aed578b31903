"""``from_transformers``: conversion of transformers models to graphs, from a folder or a configuration."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from hidet.graph import FlowGraph
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hidet_dist.checks import is_whole, shown
from hidet_dist.compat.replacing import replaced
from hidet_dist.errors import ConfigError, TraceError, UnsupportedModelError
from hidet_dist.frontends.checkpoint import stored_weights
from hidet_dist.frontends.configuration import Configuration, offline
from hidet_dist.frontends.pytorch.calls import DTYPES
from hidet_dist.frontends.pytorch.export import quiet_logs
from hidet_dist.frontends.pytorch.module import from_torch
from hidet_dist.frontends.quantized import weights_of_folder
from hidet_dist.frugal import older_objects_kept
from hidet_dist.limits import MOST_PARAMETER_BYTES, MOST_PARAMETERS, MOST_TABLE_BYTES

WEIGHTS = ("files", "random", None)
LOGITS = ("last", "all", "none")


@older_objects_kept()
def from_transformers(
    model: Any,
    *,
    weights: str | None = None,
    batch: int = 1,
    seq: int = 128,
    dtype: str | None = None,
    architecture: str | None = None,
    logits: str | None = "all",
    dynamic: Sequence[str] = (),
    example_inputs: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> FlowGraph:
    """Convert a model of the transformers library to a graph, as :func:`from_torch` converts a module.

    Parameters that the configuration ties are one weight, unless the files have two different tensors for them. An
    :class:`UnusedWeightsWarning` names tensors of the files that the model does not use.

    Parameters
    ----------
    model: str, Path or configuration
        A folder with ``config.json``, such a file, or a configuration object, which is not changed. Nothing is
        downloaded, and no code of the folder is run.
    weights: str, optional
        ``"files"`` for the weights of the folder's safetensors, which are read slice by slice when artifacts are
        written; ``"random"`` for random ones; None for none, which takes no memory and suffices to plan.
    batch, seq: int
        The number of sequences or images, and of tokens in each.
    dtype: str, optional
        ``"float32"``, ``"float16"`` or ``"bfloat16"``; by default the configuration's, or float32. Parts of the model
        that transformers keeps in float32 stay in it.
    architecture: str, optional
        The name of a model class of transformers, such as ``"LlamaForCausalLM"``; by default the configuration's.
    logits: str, optional
        The positions whose logits a causal language model returns: ``"all"``; ``"last"``, the next token's alone, as
        the first step of generating needs; ``"none"``, for the hidden states of the model below its head. None is
        ``"last"`` for causal models that can leave positions out, and ``"all"`` for other models.
    dynamic: sequence of str
        The dims to make symbolic: ``"batch"``, ``"seq"`` or both. The model is traced with at least 2 of each.
    example_inputs: mapping, optional
        The arguments of a call by name; by default those of :func:`example_inputs_of`.
    seed: int
        The seed of random weights.

    Returns
    -------
    FlowGraph
        The graph, on the CPU.

    Raises
    ------
    ConfigError
        When an argument has another value; when the folder has no configuration, or one that describes no model of
        transformers, or a quantized one, or asks for code or files of other places. The message names the field.
    WeightsError
        When the files lack a weight of the model, have it in another shape or in a dtype that cannot be cast, or have
        tensors of its layers that it does not use, as quantized checkpoints do.
    TraceError, UnsupportedModelError
        As :func:`from_torch`.
    """
    if weights not in WEIGHTS:
        raise ConfigError(f"weights must be 'files', 'random' or None; got {shown(weights)}.")
    if unknown := sorted(set(dynamic) - {"batch", "seq"}):
        raise ConfigError(f"dynamic may name 'batch' and 'seq'; got {shown(unknown)}.")
    if logits is not None and logits not in LOGITS:
        raise ConfigError(f"logits must be one of {', '.join(LOGITS)}; got {shown(logits)}.")
    for name, size in (("batch", batch), ("seq", seq)):
        if not is_whole(size, 1):
            raise ConfigError(f"{name} must be an integer of at least 1; got {shown(size)}.")
    # PyTorch takes a size of 1 for a constant.
    batch, seq = (max(size, 2) if name in dynamic else size for name, size in (("batch", batch), ("seq", seq)))
    with offline():
        configuration = Configuration.of(model)
        if weights == "files" and configuration.folder is None:
            raise ConfigError("weights='files' needs a folder with config.json and safetensors; got a configuration.")

        def make(config: Any, has_data: bool = weights == "random") -> tuple[Any, dict[str, Any]]:
            kind, fixed = with_logits(class_of(config, architecture), config, logits)
            module = made_module(kind, config, dtype_of(dtype, config), has_data, seed)
            most = _most_positions(config) if "seq" in dynamic else None
            inputs = (
                example_inputs_of(module, batch, min(seq, most or seq))
                if example_inputs is None
                else dict(example_inputs)
            )
            return module, {**inputs, **fixed}

        module, inputs = configuration.made(make, lambda config: make(config, False))
        stored = None
        if weights == "files" and configuration.folder is not None:
            stored = stored_weights(module, weights_of_folder(configuration.folder, configuration.quantization))
        elif weights is None:
            module.tie_weights()  # part of the initialization that is skipped without data
        try:
            dynamic_shapes = _dynamic_shapes(module.config, inputs, dynamic) if dynamic else None
            return from_torch(module, inputs, dynamic_shapes, stored=stored)
        except (ConfigError, TraceError) as error:
            blamed = blamed_field(configuration, make, error)
            if not blamed:
                raise
            raise ConfigError(f"{blamed} {error}") from error


def blamed_field(
    configuration: Configuration, make: Callable[[Any, bool], tuple[Any, Mapping[str, Any]]], error: Exception
) -> str:
    """Name the field that is to blame for an error of a conversion, as :meth:`Configuration.blamed`.

    ``make`` makes the module of a configuration object and its inputs, with data if so. A field is to blame if a plain
    call of the model, or else its conversion, succeeds without it.
    """
    blamed = configuration.blamed(error, lambda config: check_call(make, config))
    if not blamed and not isinstance(error, UnsupportedModelError):
        # A call without data does not show all that a conversion does, which is slower.
        blamed = configuration.blamed(error, lambda config: from_torch(*make(config, False)))
    return blamed


def check_call(make: Callable[[Any, bool], tuple[Any, Mapping[str, Any]]], config: Any) -> None:
    """Make a model and call it, with tensors that have shapes and no data. Raises whatever the model raises."""
    module, inputs = make(config, False)
    if empty := [name for name, x in module.named_parameters() if not x.numel()]:
        raise ValueError(f"the weight {empty[0]!r} has no elements")
    # PyTorch has a kernel of grouped products for bfloat16 alone, and transformers another one while it exports.
    config._experts_implementation = "eager"
    # Some models have checks of data that they leave out where PyTorch says that it is compiling.
    compiling = replaced(torch.compiler, {"_is_compiling_flag": True})
    with torch.no_grad(), quiet_logs(), FakeTensorMode(shape_env=ShapeEnv()), compiling:
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                tensors.update({name: _fake(x) for name, x in tensors.items() if x is not None})
        given = pytree.tree_map_only(torch.Tensor, _fake, inputs)
        # What depends on data stands for success: there is none.
        with suppress(DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode):
            module(**given)


def _fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def example_inputs_of(module: Any, batch: int = 1, seq: int = 128) -> dict[str, torch.Tensor]:
    """Make the arguments with which a transformers model is traced, by name: zeros, and masks that hide nothing.

    * A text model gets token ids ``[batch, seq]``; one that attends in both directions, a mask as well.
    * A model with an encoder and a decoder gets token ids for both.
    * A model of images or sound gets images or spectrograms of the sizes in its configuration, without data; one of
      images and texts, token ids as well.

    Raises
    ------
    TraceError
        For another kind of model. Give ``example_inputs`` then.
    """
    config = module.config
    main = getattr(module, "main_input_name", "input_ids")
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    vision = getattr(config, "vision_config", None)
    if vision is not None and main != "pixel_values":
        return {"input_ids": ids, "pixel_values": _images(vision, batch, module.dtype)}
    if main == "pixel_values":
        return {"pixel_values": _images(config if vision is None else vision, batch, module.dtype)}
    if main == "input_features" and hasattr(config, "num_mel_bins"):
        frames = 2 * config.max_source_positions
        features = torch.zeros(batch, config.num_mel_bins, frames, dtype=module.dtype, device="meta")
        has_decoder = config.is_encoder_decoder and hasattr(module, "get_decoder")
        return {"input_features": features, **({"decoder_input_ids": ids} if has_decoder else {})}
    if main != "input_ids":
        raise TraceError(f"{type(module).__name__} takes {main!r}: give its value in example_inputs.")
    if getattr(config, "is_encoder_decoder", False) and not type(module).__name__.endswith("EncoderModel"):
        return {"input_ids": ids, "decoder_input_ids": ids.clone()}
    name = type(module).__name__
    if getattr(config, "is_decoder", False) or name.endswith(("LMHeadModel", "ForCausalLM")) or _is_causal(module):
        return {"input_ids": ids}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _is_causal(module: torch.nn.Module) -> bool:
    return any(getattr(part, "is_causal", False) is True for part in module.modules())


def _images(config: Any, batch: int, dtype: torch.dtype) -> torch.Tensor:
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return torch.zeros(batch, getattr(config, "num_channels", 3), height, width, dtype=dtype, device="meta")


def named_architecture(config: Any) -> Any:
    """Return the architecture that a configuration names first; None if it names none. Raises ConfigError."""
    names = getattr(config, "architectures", None)
    if not isinstance(names, list | tuple | None):
        raise ConfigError(f"architectures must be a list of names of model classes; got {shown(names)}.")
    return names[0] if names else None


def class_of(config: Any, architecture: str | None) -> Any:
    """Return the model class of an architecture, or of a configuration. Raises ConfigError."""
    transformers = importlib.import_module("transformers")
    name = architecture or named_architecture(config)
    if name is None:
        mapping = transformers.MODEL_MAPPING
        if type(config) not in mapping:
            raise ConfigError(f"transformers has no model for {type(config).__name__}: name its architecture.")
        value = mapping[type(config)]
        return value[0] if isinstance(value, tuple | list) else value
    kind: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model:
        raise ConfigError(
            f"transformers has no architecture {shown(name)}: name one of its model classes, as argument or in the "
            "configuration's architectures."
        )
    if kind.config_class is not None and not isinstance(config, kind.config_class):
        raise ConfigError(
            f"The architecture {name} takes a {kind.config_class.__name__}, and the model_type {config.model_type!r} "
            f"of the configuration makes a {type(config).__name__}: name an architecture of that model."
        )
    return kind


def dtype_of(dtype: str | None, config: Any) -> torch.dtype:
    """Return the dtype of a model. Raises ConfigError for one that is not supported."""
    value = getattr(config, "dtype", None) if dtype is None else dtype
    if value is None:
        return torch.float32
    known = {name: entry for entry, name in DTYPES.items() if entry.is_floating_point}
    name = str(value).removeprefix("torch.")
    if name not in known:
        raise ConfigError(f"dtype must be one of {', '.join(sorted(known))}; got {shown(value)}.")
    return known[name]


def with_logits(kind: Any, config: Any, logits: str | None) -> tuple[Any, dict[str, Any]]:
    """Return the class that computes the wanted logits, and the arguments of its calls that say so.

    Parameters
    ----------
    kind: type
        A model class of transformers.
    config: PreTrainedConfig
        Its configuration.
    logits: str, optional
        As of :func:`from_transformers`.

    Raises
    ------
    ConfigError
        When the model is no causal one, or cannot leave positions out.
    """
    transformers = importlib.import_module("transformers")
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    is_causal = kind.__name__ in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    keeps = is_causal and "logits_to_keep" in inspect.signature(kind.forward).parameters
    if logits == "all" or (logits is None and not keeps):
        return kind, {}
    if logits == "none" and is_causal and type(config) in transformers.MODEL_MAPPING:
        return class_of(config, transformers.MODEL_MAPPING[type(config)].__name__), {}
    if logits == "none" or not keeps:
        what = "is no causal language model with a head" if logits == "none" else "cannot leave positions out"
        raise ConfigError(f"{kind.__name__} {what}: logits={logits!r} does not fit, take logits='all'.")
    return kind, {"logits_to_keep": 1}


def made_module(kind: Any, config: Any, dtype: torch.dtype, has_data: bool, seed: int) -> Any:
    """Make a module in evaluation mode, with the dtypes that transformers gives it when it loads files.

    Without data, its parameters are on the meta device, none of them tied yet. Buffers that no file has always have
    data. The configuration becomes the module's.
    """
    initialization = importlib.import_module("transformers.initialization")
    generator = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        with _Bounded(has_data), _registered(has_data), nullcontext() if has_data else initialization.no_init_weights():
            module = kind._from_config(config, dtype=dtype)
    finally:
        torch.random.set_rng_state(generator)
    kept = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept.update(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, x in module.named_buffers():
        if x.device.type == "meta":
            raise MemoryError(f"the buffer {name!r} has {x.nbytes} bytes")
        # Masks have infinite elements, frequencies of positions none.
        if x.isnan().any() or (name.endswith("inv_freq") and x.isinf().any()):
            raise ValueError(f"the buffer {name!r} has elements that are no finite numbers")
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        if kept.intersection(name.split(".")):
            x.data = x.data.float()
    return module.eval()


@contextmanager
def _registered(has_data: bool) -> Iterator[None]:
    """Count parameters, and without data move them to the meta device as soon as they are made.

    Raises
    ------
    OverflowError
        For more parameters than any model has.
    """
    register = torch.nn.Module.register_parameter
    numbers = itertools.count()

    def registered(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if next(numbers) >= MOST_PARAMETERS:
            raise OverflowError(f"more than {MOST_PARAMETERS} parameters")
        if not has_data and param is not None and param.device.type != "meta":
            param = torch.nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, param)

    with replaced(torch.nn.Module, {"register_parameter": registered}):
        yield


class _Bounded(TorchFunctionMode):
    """Refuse to make tensors from sizes alone that exceed the bounds of any model, before they take memory.

    Unless parameters have data, tensors larger than any table are on the meta device, whatever their function. Raises
    MemoryError.
    """

    FACTORIES = frozenset(
        getattr(torch, name)
        for name in ("arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros")
    )

    def __init__(self, has_data: bool):
        super().__init__()
        self.has_data = has_data

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.FACTORIES and "out" not in kwargs:
            unallocated = func(*args, **{**kwargs, "device": "meta"})
            size = unallocated.nbytes
            if size > (MOST_PARAMETER_BYTES if func is torch.empty or not self.has_data else MOST_TABLE_BYTES):
                raise MemoryError(f"a tensor of {size} bytes: {func.__name__}{shown(args)}")
            if size > MOST_TABLE_BYTES:
                return unallocated
        return func(*args, **kwargs)


def _most_positions(config: Any) -> int | None:
    """Return the number of positions that a configuration has; None if it does not say."""
    most = getattr(config, "max_position_embeddings", None)
    return most if is_whole(most, 3) else None


def _dynamic_shapes(config: Any, inputs: Mapping[str, Any], dynamic: Sequence[str]) -> dict[str, Any]:
    """Make the ``dynamic_shapes`` of :func:`from_torch`: batch is dim 0 of any tensor, seq is dim 1 of matrices.

    A sequence has at most as many tokens as the configuration has positions.
    """
    most = {"seq": _most_positions(config)}
    dims = {name: torch.export.Dim(name, max=most.get(name)) for name in dynamic}
    texts = [name for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.dim() == 2]
    shapes: dict[str, Any] = {}
    for name, x in inputs.items():
        entry: dict[int, Any] = {}
        if isinstance(x, torch.Tensor):
            if "batch" in dims:
                entry[0] = dims["batch"]
            if "seq" in dims and name in texts:
                entry[1] = dims["seq"]
        shapes[name] = entry or None
    return shapes
