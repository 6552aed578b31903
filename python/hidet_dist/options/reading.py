"""Values of options as users give them in Python: specs, symbolic dims, and paths of files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hidet_dist.checks import is_list, is_whole, shown
from hidet_dist.errors import ConfigError, SpecError
from hidet_dist.options.option import Check, one_of, or_none, refuse_unknown
from hidet_dist.spec import TensorShardSpec
from hidet_dist.spec.symbols import SymbolSize
from hidet_dist.weights.panels import FEW_BITS, GROUPS, PRECISIONS, STORED, StoredPrecision

_INT32_MAX = 2**31 - 1  # hidet's runtime holds the sizes of symbolic dims as int32


def read_specs(what: str, given: Any) -> tuple[TensorShardSpec | None, ...] | None:
    """Read a list with one spec (or its text, or None) a tensor. Raises ConfigError."""
    if given is None:
        return None
    if not is_list(given):
        raise ConfigError(f"{what} must be a list with one spec (or None) a tensor; got {shown(given)}.")
    specs: list[TensorShardSpec | None] = []
    for spec in given:
        if spec is None or isinstance(spec, TensorShardSpec):
            specs.append(spec)
        elif isinstance(spec, str):
            try:
                specs.append(TensorShardSpec.parse(spec))
            except SpecError as error:
                raise ConfigError(f"{what}: {error}") from error
        else:
            raise ConfigError(f"{what} has {shown(spec)}; write a spec as '(S0, R)'.")
    return tuple(specs)


_SIZES = {"multiple_of": 1, "most": None, "least": 1}  # what a declaration may leave out, with what it means then


def read_symbols(what: str, given: Any) -> dict[str, SymbolSize]:
    """Read the declaration of each symbolic dim, by its name. Raises ConfigError."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what} must be a dict such as {{'batch': 16}}; got {shown(given)}.")
    symbols = {}
    for name, value in given.items():
        own = f"{what}[{shown(name)}]"
        if not isinstance(name, str):
            raise ConfigError(f"{what} has the key {shown(name)}; the keys are names of dims.")
        if isinstance(value, SymbolSize):
            declared: Mapping[str, Any] = asdict(value)
        else:
            declared = value if isinstance(value, Mapping) else {"expected": value}
        refuse_unknown(own, declared, ("expected", *_SIZES))
        if "expected" not in declared:
            raise ConfigError(f"{own} lacks 'expected', the size that costs are predicted for; got {shown(declared)}.")
        size = SymbolSize(declared["expected"], *(declared.get(key, default) for key, default in _SIZES.items()))
        for key, number in asdict(size).items():
            if (key, number) != ("most", None) and not is_whole(number, 1, _INT32_MAX):
                raise ConfigError(f"{own}: {key!r} must be a whole number from 1 to 2**31 - 1; got {shown(number)}.")
        size.check(own)
        symbols[name] = size
    return symbols


def _are_paths(value: Any) -> bool:
    paths = value if is_list(value) else [value]
    return bool(paths) and all(isinstance(path, str | Path) and path and "\0" not in str(path) for path in paths)


_PATHS = Check(_are_paths, "the path of a safetensors file, an index or a folder, or a list of paths")


@dataclass(frozen=True)
class WeightsOption:
    """What a user says of weights: the files of their data, and the lower precision in which they are stored."""

    files: str | Path | Sequence[str | Path] | None = None
    precision: StoredPrecision | None = None


def read_weights(what: str, given: Any) -> WeightsOption:
    """Read the files of weights, or a dict of them and of the precision that is stored. Raises ConfigError."""
    if given is None or isinstance(given, WeightsOption):
        return given or WeightsOption()
    if not isinstance(given, Mapping):
        _PATHS(what, given)
        return WeightsOption(given)
    refuse_unknown(what, given, ("files", "precision", "group"))
    files, name, group = given.get("files"), given.get("precision"), given.get("group")
    or_none(_PATHS)(f"{what}['files']", files)
    or_none(one_of((*PRECISIONS, STORED)))(f"{what}['precision']", name)
    or_none(one_of(GROUPS))(f"{what}['group']", group)
    if group is not None and name not in FEW_BITS:
        few = ", ".join(name for name in PRECISIONS if name in FEW_BITS)
        raise ConfigError(f"{what}['group'] is for the precisions {few}; the precision is {shown(name)}.")
    return WeightsOption(files, None if name is None else StoredPrecision(name, group or GROUPS[0]))
