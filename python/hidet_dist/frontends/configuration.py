"""Configurations of transformers models, which are data from outside: reading, checks, and what errors say of them.

A configuration cannot have code run, ask a question, or reach for the network: see :func:`offline`.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import math
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hidet_dist.checks import shown
from hidet_dist.compat.replacing import replaced
from hidet_dist.errors import ConfigError, HidetDistError
from hidet_dist.files import parse_json, read_text
from hidet_dist.frontends.blame import fields_to_blame, one_line
from hidet_dist.frontends.configured_numbers import problem_of_number
from hidet_dist.frontends.quantized import problem_of
from hidet_dist.limits import (
    MOST_CONFIGURATION_BYTES,
    MOST_CONFIGURATION_DEPTH,
    MOST_CONFIGURATION_VALUES,
    MOST_ENTRIES,
    MOST_LAYERS,
)

Made = TypeVar("Made")

_COUNTS = (
    (re.compile(r"(layer|depth|block|stage|level)s?$"), MOST_LAYERS),
    (re.compile(r"(label|expert|head)s?$"), MOST_ENTRIES),
)
"""The names of numbers of things that transformers makes one by one, or lists, and the bounds of these numbers."""
_ELSEWHERE = re.compile(r"(hf[-_]hub|local-dir):")
"""The beginning of names with which timm, which makes backbones, loads models from the hub or from any folder."""
_QUANTIZATION = "quantization_config"
_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Keep transformers from the hub, and from asking whether to run code of a model's folder, while the block runs.

    Its settings are those of the process, so that one thread at a time may enter.
    """
    hub = importlib.import_module("huggingface_hub.constants")
    code = importlib.import_module("transformers.dynamic_module_utils")
    with _ONE_AT_A_TIME, replaced(hub, {"HF_HUB_OFFLINE": True}), replaced(code, {"TIME_OUT_REMOTE_CODE": 0}):
        yield


@dataclass(frozen=True)
class Configuration:
    """A configuration.

    Attributes
    ----------
    where: the file, or the class of the object, for errors.
    fields: the fields that differ from the defaults of its class, by name.
    folder: the folder of the file.
    given: the object, if it is from no file.
    quantization: how the weights in the folder are quantized, which the model does not know of; see
        :mod:`hidet_dist.frontends.quantized`.
    """

    where: str
    fields: Mapping[str, Any]
    folder: Path | None = None
    given: Any = None
    quantization: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, model: Any) -> Configuration:
        """Read the configuration of a folder or file, or take an object of transformers.

        Raises
        ------
        ConfigError
            When there is no such file, or a field asks for something that is never done, such as running code from the
            folder or access to the network.
        """
        if isinstance(model, str | Path):
            path = Path(model)
            file = path / "config.json" if path.is_dir() else path
            if not file.is_file():
                raise ConfigError(f"There is no {file}: name a folder with the config.json of a model, or such a file.")
            fields = _read(file)
            quantization = fields.get(_QUANTIZATION)
            if quantization is not None and not problem_of(quantization):
                del fields[_QUANTIZATION]
            else:
                quantization = None
            result = cls(str(file), fields, file.parent, quantization=quantization)
            _check_type(result.fields, result.where)
        elif hasattr(model, "model_type") and hasattr(model, "to_diff_dict"):
            where = type(model).__name__
            try:
                result = cls(where, {"model_type": model.model_type, **model.to_diff_dict()}, given=model)
            except Exception as error:  # whatever a changed object raises
                raise ConfigError(f"{where} cannot be read: {one_line(error)}") from error
        else:
            raise ConfigError(
                f"from_transformers takes a folder, a file or a configuration of transformers; got {shown(model)}."
            )
        _check(result.fields, result.where)
        return result

    @classmethod
    def from_fields(cls, where: str, fields: Mapping[str, Any]) -> Configuration:
        """Check the fields of a configuration, such as those in the metadata of a file ``where``.

        Raises
        ------
        ConfigError
            As :meth:`of`.
        """
        result = cls(where, dict(fields))
        _check_type(result.fields, where)
        _check(result.fields, where)
        return result

    def made(self, make: Callable[[Any], Made], trial: Callable[[Any], object] | None = None) -> Made:
        """Return ``make`` of the configuration object.

        Parameters
        ----------
        make: callable
            Makes something of a configuration object, which it may change.
        trial: callable, optional
            Does the same with less work, to find the field that is to blame for an error.

        Raises
        ------
        ConfigError
            When transformers raises any error; the message names the field that is to blame, if it is one.
        """
        try:
            return make(self._object(self.fields))
        except HidetDistError:
            raise
        except Exception as error:  # transformers raises whatever a value of another type leads to
            said = one_line(error)
            blamed = self._blamed(said, trial or make, said) or f"{self.where} describes no model:"
            raise ConfigError(f"{blamed} transformers says {said}") from error

    def blamed(self, error: Exception, trial: Callable[[Any], object]) -> str:
        """Name the field that is to blame for an error, as the beginning of a sentence; empty if none alone is.

        Sizes that it contradicts are named with it.

        Parameters
        ----------
        error: Exception
            An error in what was made of the configuration object.
        trial: callable
            Does what led to it with a configuration object, which it may change. If it raises nothing, no field is to
            blame.
        """
        try:
            trial(self._object(self.fields))
        except Exception as tried:  # as that of the error, or of another kind
            return self._blamed(one_line(error), trial, one_line(tried))
        return ""

    def _blamed(self, said: str, trial: Callable[[Any], object], tried: str) -> str:
        """Name the fields to blame for an error that is said to be so, and is ``tried`` in a trial of all fields."""
        found = fields_to_blame(self.fields, lambda fields: trial(self._object(fields)), said, tried)
        named = ", ".join(f"{_shown_path('.'.join(path))} is {shown(value)}" for path, value in found)
        return f"{self.where}: {named}, and" if found else ""

    def _object(self, fields: Mapping[str, Any]) -> Any:
        """Make the configuration object, with these fields."""
        if self.given is not None and fields is self.fields:
            return copy.deepcopy(self.given)
        config = importlib.import_module("transformers").AutoConfig
        if fields is self.fields and self.folder is not None and self.quantization is None:
            return config.from_pretrained(self.where, local_files_only=True, trust_remote_code=False)
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "config.json"
            file.write_text(json.dumps(fields, default=str))
            return config.from_pretrained(file, local_files_only=True, trust_remote_code=False)


def _shown_path(path: str) -> str:
    """Show the names of a field on one line; they are text from outside, too."""
    return shown(path)[1:-1]


def _read(file: Path) -> dict[str, Any]:
    """Read a configuration file. Raises ConfigError."""
    try:
        fields = parse_json(read_text(file, MOST_CONFIGURATION_BYTES), MOST_CONFIGURATION_VALUES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a configuration that can be read: {error}.") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} is not a configuration: it must be a JSON object; got {shown(fields)}.")
    return fields


def _check_type(fields: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a ``model_type`` that transformers does not know."""
    kind = fields.get("model_type", "")
    if "model_type" not in fields or (
        isinstance(kind, str) and kind in importlib.import_module("transformers").CONFIG_MAPPING
    ):
        return
    own = " The code of its own that it names, as auto_map, is never run." if "auto_map" in fields else ""
    raise ConfigError(f"{where}: model_type is {shown(kind)}, which transformers does not know.{own}")


def _check(fields: Mapping[str, Any], where: str) -> None:
    """Refuse what is never done for a configuration, and what would take no end of memory, before transformers sees it.

    Raises
    ------
    ConfigError
        When it describes a quantized checkpoint; names files, code or kernels of another place; has numbers that no
        model computes with; or counts more layers, labels and the like than any model has.
    """
    for path, value in _all_fields(fields):
        if path.count(".") >= MOST_CONFIGURATION_DEPTH:
            raise ConfigError(f"{where} has objects and lists within more than {MOST_CONFIGURATION_DEPTH} others.")
        name = path.rpartition(".")[2]
        if _is_quantization(name, value):
            problem = _quantization(value)
        else:
            problem = _elsewhere(name, value) or _wrong_number(path, value)
        if problem:
            raise ConfigError(f"{where}: {_shown_path(path)} is {shown(value)}, which {problem}.")


def _wrong_number(path: str, value: Any) -> str:
    """Say what is wrong with a number; empty if nothing is."""
    if isinstance(value, float) and math.isnan(value):
        return "is no number that a model computes with"
    wrong = problem_of_number(path.split("."), value)
    if wrong or not isinstance(value, int):
        return wrong
    name = path.rpartition(".")[2]
    return next((f"is more than {most}" for names, most in _COUNTS if value > most and names.search(name)), "")


def _elsewhere(name: str, value: Any) -> str:
    """Say what a field would fetch from another place; empty if nothing."""
    if name == "use_pretrained_backbone" and value:
        return "would load a backbone's weights from another place: set it to false"
    if isinstance(value, str) and (_ELSEWHERE.match(value) or (name == "backbone" and "/" in value)):
        return "names a model of another place: give the configuration of that part instead"
    if name.endswith(("attn_implementation", "experts_implementation")) and any("/" in x for x in _texts(value)):
        return "names code of another place: leave it out"
    if name == "configuration_files":
        return "names other configurations, which are not read: name the file of one"
    return ""


def _texts(value: Any) -> list[str]:
    """List a text, or the texts of an object."""
    return [x for x in (value.values() if isinstance(value, Mapping) else [value]) if isinstance(x, str)]


def _is_quantization(name: str, value: Any) -> bool:
    if name == "quantization":
        return isinstance(value, Mapping) and "bits" in value
    return name in (_QUANTIZATION, "compression_config") and value is not None


def _quantization(value: Any) -> str:
    said = problem_of(value) or "only that of a folder's whole model is read"
    return (
        f"is a quantized checkpoint's, and {said}: use the checkpoint that it was made from, or dequantize it and save "
        "it without this field"
    )


def _all_fields(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each field and entry of a list, those within others after these."""
    pending: list[tuple[str, Any]] = [("", fields)]
    for path, value in pending:
        if path:
            yield path, value
        if isinstance(value, Mapping | list | tuple):
            entries = value.items() if isinstance(value, Mapping) else enumerate(value)
            pending += [(f"{path}.{name}" if path else str(name), part) for name, part in entries]
