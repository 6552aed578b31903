"""Checkpoints of language models and of encoders: a folder of transformers, or a GGUF file of a language model.

They give a module, weights and a tokenizer. A folder is an encoder's where sentence-transformers' list of modules is in
it, which says how vectors of tokens become one of a text.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hidet.graph import Tensor

from hidet_dist.checks import shown
from hidet_dist.errors import ConfigError, TraceError
from hidet_dist.frontends.checkpoint import stored_weights
from hidet_dist.frontends.configuration import Configuration, offline
from hidet_dist.frontends.pretrained import (
    blamed_field,
    class_of,
    dtype_of,
    example_inputs_of,
    made_module,
    named_architecture,
)
from hidet_dist.frontends.quantized import weights_of_folder
from hidet_dist.llm.gguf import configuration_of, weights_of
from hidet_dist.llm.gguf_tokenizer import tokenizer_of
from hidet_dist.llm.pooling import MODULES
from hidet_dist.llm.tokenizer import CheckpointTokenizer
from hidet_dist.weights.gguf_file import GgufFile

_TRIED_TOKENS = 4  # of a call to find what is to blame for an error


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of a language model. Weights are read when shards of them are.

    Attributes
    ----------
    path: the folder or the file.
    configuration: the configuration, checked.
    is_quantized: whether weights of products may be in few bits.
    """

    path: Path
    configuration: Configuration
    is_quantized: bool
    _files: Callable[[], Mapping[str, Tensor]]
    _tokenizer: Callable[[], CheckpointTokenizer]

    @property
    def is_encoder(self) -> bool:
        """Whether it is an encoder of texts, and not a model that generates them."""
        return (self.path / MODULES).is_file()

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read the configuration of a checkpoint. Nothing is downloaded, and no code of a folder is run.

        Parameters
        ----------
        path: str or Path
            A folder as transformers writes it, with ``config.json`` and safetensors, or a GGUF file. Its weights may
            be quantized by one of the methods of :mod:`hidet_dist.frontends.quantized`.

        Raises
        ------
        ConfigError
            When there is none, or its configuration describes no model of transformers, or one that is quantized
            otherwise, or asks for code or files of other places.
        WeightsError
            When a GGUF file is malformed, or has a model of another architecture than those that are read.
        """
        path = Path(path)
        if path.is_dir():
            configuration = Configuration.of(path)
            quantization = configuration.quantization
            files = partial(weights_of_folder, path, quantization)
            return cls(
                path, configuration, quantization is not None, files, partial(CheckpointTokenizer.of_folder, path)
            )
        if not path.is_file():
            raise ConfigError(f"There is no {path}: name a folder with config.json and safetensors, or a GGUF file.")
        file = GgufFile.open(path)
        configuration = Configuration.from_fields(str(path), configuration_of(file))
        is_quantized = any(tensor.stored_precision is not None for tensor in file.tensors.values())
        return cls(path, configuration, is_quantized, partial(weights_of, file), partial(tokenizer_of, file))

    def module(
        self, dtype: str | None = None, prepare: Callable[[Any], None] | None = None
    ) -> tuple[Any, dict[str, Tensor]]:
        """Make the module of transformers, without data, and its weights by their names in its state dict.

        Parameters
        ----------
        dtype: str, optional
            ``"float32"``, ``"float16"`` or ``"bfloat16"``; by default the configuration's, or float32.
        prepare: callable, optional
            Changes the configuration object before the module is made of it.

        Raises
        ------
        ConfigError
            When the configuration makes no model of transformers of this kind, or dtype has another value.
        WeightsError
            As :func:`hidet_dist.frontends.checkpoint.stored_weights`.
        """

        with offline():
            module = module_of(self.configuration, dtype, prepare, self.is_encoder)
            files = self._files()
            if self.is_encoder and hasattr(module, "pooler") and not any("pooler." in name for name in files):
                module.pooler = None  # it follows on what is used, and not every checkpoint has it
            return module, stored_weights(module, files)

    def tokenizer(self) -> CheckpointTokenizer:
        """Make the tokenizer.

        Raises
        ------
        ConfigError, WeightsError
            When the checkpoint has none, or a malformed one.
        """
        return self._tokenizer()


def module_of(
    configuration: Configuration,
    dtype: str | None = None,
    prepare: Callable[[Any], None] | None = None,
    is_encoder: bool = False,
) -> Any:
    """Make the module of a configuration, without data, as :meth:`Checkpoint.module`. Raises ConfigError."""
    return configuration.made(lambda config: _made(config, configuration.where, dtype, prepare, is_encoder))


@contextmanager
def blaming(configuration: Configuration, is_encoder: bool = False) -> Iterator[None]:
    """Have errors of a trace name the field of the configuration that is to blame for them, if one is."""

    def make(config: Any, _: bool) -> tuple[Any, Mapping[str, Any]]:
        module = _made(config, configuration.where, None, None, is_encoder)
        return module, example_inputs_of(module, 1, _TRIED_TOKENS)

    try:
        yield
    except (ConfigError, TraceError) as error:
        with offline():
            blamed = blamed_field(configuration, make, error)
        if blamed:
            raise ConfigError(f"{blamed} {error}") from error
        raise


def _made(config: Any, where: str, dtype: str | None, prepare: Callable[[Any], None] | None, is_encoder: bool) -> Any:
    """Make the module of a configuration object, which is changed. Raises ConfigError, and what transformers raises."""
    kind = (_encoder_class if is_encoder else _causal_class)(config, where)
    if prepare is not None:
        prepare(config)
    return made_module(kind, config, dtype_of(dtype, config), False, 0)


def _encoder_class(config: Any, where: str) -> Any:
    """Return the class of an encoder, without what other tasks have behind it. Raises ConfigError."""
    try:
        return class_of(type(config)(), None)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _causal_class(config: Any, where: str) -> Any:
    """Return the class of a causal language model that a configuration is of. Raises ConfigError."""
    transformers = importlib.import_module("transformers")
    kinds = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    named = named_architecture(config)
    if named is not None:
        kind = class_of(config, named)
        if named not in kinds.values():
            raise ConfigError(f"{where}: the architecture {named} is not a causal language model.")
        return kind
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{where}: transformers has no causal language model of the type {shown(config.model_type)}.")
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
