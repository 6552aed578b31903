"""Requests of ``hidet-dist plan`` and ``build``, which are checked before any large package is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hidet_dist.errors import ConfigError, SpecError
from hidet_dist.machine import builtin, load_machine
from hidet_dist.options.option import COUNT, Flag, Option, one_of, option, options_of, or_none
from hidet_dist.options.planning import OPTIMIZATION, DistributedOptions, StageOptions
from hidet_dist.options.texts import parse_dims, parse_dynamic
from hidet_dist.spec import DeviceMesh

LOGITS = ("last", "all", "none")
DTYPES = ("float32", "float16", "bfloat16")
BATCH, SEQ = 1, 128
_SEPARATOR = ";"  # of what is given repeatedly, in a plan's record of its origin: specs have commas
_FORMS = "name a transformers folder, its config.json, or a .onnx file"


@dataclass(frozen=True)
class ModelOptions:
    """How a model is traced."""

    dtype: str | None = option(
        None,
        "str, optional",
        "The dtype of the model.",
        or_none(one_of(DTYPES)),
        flag=Flag("float32, float16 or bfloat16; by default the configuration's."),
    )
    batch: int | None = option(
        None,
        "int, optional",
        "Sequences or images in a call.",
        or_none(COUNT),
        flag=Flag(f"Sequences or images in a call; {BATCH} by default.", int),
    )
    seq: int | None = option(
        None,
        "int, optional",
        "Tokens in a sequence.",
        or_none(COUNT),
        flag=Flag(f"Tokens in a sequence; {SEQ} by default.", int),
    )
    architecture: str | None = option(
        None,
        "str, optional",
        "The class of transformers that makes the model.",
        flag=Flag("The model's class in transformers, such as BertModel; by default the configuration's."),
    )
    logits: str | None = option(
        None,
        "str, optional",
        "The positions whose logits a causal model returns.",
        or_none(one_of(LOGITS)),
        flag=Flag(
            "The positions whose logits a causal model returns: last, all, or none for its hidden states; last by "
            "default, which is what the next token needs."
        ),
    )
    dynamic: Mapping[str, int] = option(
        dict,
        "dict of int",
        "The symbolic dims of a model of transformers, and a number that divides all sizes of each.",
        flag=Flag(
            "A dim of any size, batch or seq, planned for that of --batch or --seq; batch:8 for multiples of 8, which "
            "may be split; repeatable.",
            list,
            read=parse_dynamic,
            metavar="D[:N]",
        ),
    )
    dims: Mapping[str, int] = option(
        dict,
        "dict of int",
        "The sizes of named dims of a .onnx file.",
        flag=Flag(
            "The size of a named dim of a .onnx file, such as batch=8; repeatable.",
            list,
            spelled="--dim",
            read=parse_dims,
            metavar="D=N",
        ),
    )


@dataclass(frozen=True)
class FlagRow:
    """An option with a flag: its class, its name there, and what is known of it."""

    kind: type
    name: str
    option: Option
    flag: Flag

    @property
    def spelled(self) -> str:
        """The flag as it is written, such as ``--time-limit``."""
        return self.flag.spelled or f"--{(self.flag.name or self.name).replace('_', '-')}"

    def value(self, text: Any) -> Any:
        """Make the option's value of what the user writes, and check it. Raises ConfigError."""
        value = text if self.flag.read is None else self.flag.read(text)
        for check in (self.flag.check, self.option.check):
            if check is not None:
                check(self.spelled, value)
        return value


FLAGS: Mapping[str, FlagRow] = {
    one.flag.name or name: FlagRow(kind, name, one, one.flag)
    for kind in (DistributedOptions, ModelOptions, *OPTIMIZATION)
    for name, one in options_of(kind).items()
    if one.flag is not None
}
"""The options with flags, by their names in a plan's record of its origin."""


@dataclass(frozen=True)
class PlanRequest:
    """The options that ``plan`` and ``build`` share, as the user wrote them.

    Attributes
    ----------
    model: the model's folder or file.
    given: what the user wrote, by the name of each of :data:`FLAGS` that was given.
    """

    model: Path
    given: Mapping[str, Any]

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of an option by the name of its flag, or a default if it is not given."""
        return FLAGS[name].value(self.given[name]) if name in self.given else default

    def check(self) -> None:
        """Refuse invalid options and models that cannot be read, within milliseconds. Raises ConfigError."""
        self._check_machine()
        self._check_pipeline()
        for name in self.given:
            value, row = self.value(name), FLAGS[name]
            if row.option.read is not None:
                row.option.read(row.spelled, value)
        self._check_model(self.value("dims", {}))

    def _check_machine(self) -> None:
        try:
            mesh = DeviceMesh(tuple(self.value("mesh", ())))
        except SpecError as error:
            raise ConfigError(f"--mesh {self.given.get('mesh')} describes no mesh: {error}") from error
        self._check_shares(mesh)
        machine = self.value("machine")
        if machine is not None:
            load_machine(machine, mesh) if machine.endswith(".json") else builtin(machine, mesh)

    def _check_shares(self, mesh: DeviceMesh) -> None:
        shares = self.value("shares", {})
        if not isinstance(shares, dict):
            return
        for name in shares:
            if name not in mesh.axis_names:
                raise ConfigError(f"--shares names the axis {name}; the mesh has {', '.join(mesh.axis_names)}.")
        try:
            DeviceMesh(mesh.shape, mesh.axis_names, tuple(tuple(shares.get(name, ())) for name in mesh.axis_names))
        except SpecError as error:
            raise ConfigError(f"--shares {self.given['shares']} does not fit: {error}") from error

    def _check_pipeline(self) -> None:
        for name, row in FLAGS.items():
            if row.kind is StageOptions and name in self.given and "objective" not in self.given:
                raise ConfigError(f"{row.spelled} is for pipelines: give an --objective as well.")

    def _check_model(self, dims: Mapping[str, int]) -> None:
        model, suffix = self.model, self.model.suffix
        if not model.exists():
            raise ConfigError(f"There is no model at {model}: {_FORMS}.")
        if suffix == ".pt2":
            raise ConfigError(
                f"{model} is not read, since torch.export.load runs code from such a file. If you trust it, load it in "
                "a Python program, and give the result to hidet_dist.from_torch."
            )
        if suffix == ".onnx":
            for name in ("batch", "seq", "dtype", "dynamic", "architecture", "logits"):
                if name in self.given:
                    raise ConfigError(f"--{name} is for models of transformers; a .onnx file takes --dim name=size.")
            _require("onnx", "onnx", model)
        elif model.is_dir() or suffix == ".json":
            if dims:
                raise ConfigError("--dim is for .onnx files; a model of transformers takes --batch and --seq.")
            if model.is_dir() and not (model / "config.json").is_file():
                raise ConfigError(f"{model} has no config.json: {_FORMS}.")
            _require("transformers", "demo", model)
        else:
            raise ConfigError(f"{model} is of no known form: {_FORMS}.")

    def check_weights(self, random: bool) -> None:
        """Refuse a folder without weights, and random weights for a model that has weights. Raises ConfigError."""
        if self.model.suffix == ".onnx":
            if random:
                raise ConfigError(f"{self.model} has weights; --random-weights is for models of transformers.")
            return
        folder = self.model if self.model.is_dir() else self.model.parent
        if not random and not any(folder.glob("*.safetensors")):
            raise ConfigError(f"{folder} has no safetensors files; --random-weights builds with random weights.")

    def configurations(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the distributed and the optimization configuration."""
        distributed, optimization = (
            {row.name: self.value(name) for name, row in FLAGS.items() if name in self.given and row.kind in kinds}
            for kinds in ((DistributedOptions,), OPTIMIZATION)
        )
        if dynamic := self.value("dynamic", {}):
            optimization["symbols"] = {
                name: {"expected": expected, "multiple_of": dynamic[name]}
                for name, expected in (("batch", self.value("batch", BATCH)), ("seq", self.value("seq", SEQ)))
                if name in dynamic
            }
        return distributed, optimization

    def origin(self) -> dict[str, str]:
        """Return the options as text, by name, to be saved in a report."""
        texts = {
            name: _SEPARATOR.join(text) if FLAGS[name].flag.kind is list else str(text)
            for name, text in self._ordered()
        }
        return {"model": str(self.model), **texts}

    def _ordered(self) -> list[tuple[str, Any]]:
        return [(name, self.given[name]) for name in FLAGS if name in self.given]

    @classmethod
    def of_origin(cls, origin: Mapping[str, str]) -> PlanRequest:
        """Make the request from the result of :meth:`origin`. Raises ConfigError for anything else."""
        try:
            given = {
                name: text.split(_SEPARATOR) if FLAGS[name].flag.kind is list else FLAGS[name].flag.kind(text)
                for name, text in origin.items()
                if name != "model"
            }
            return cls(Path(origin["model"]), {"mesh": origin["mesh"], **given})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "The report lacks the options of its plan; --live takes plans of `hidet-dist plan --out` without an "
                "--objective."
            ) from error

    @property
    def title(self) -> str:
        """The name of the model's folder or file."""
        path = self.model.parent if self.model.name == "config.json" else self.model
        return path.resolve().name


def check_destination(path: Path | None) -> None:
    """Refuse the path of a file that cannot be written, before work starts. Raises ConfigError."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        reason = "it is a folder" if path.is_dir() else "its folder is missing"
        raise ConfigError(f"{path} cannot be written: {reason}. Name a file in an existing folder.")


def _require(package: str, extra: str, model: Path) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"{model} cannot be read without the package {package}: pip install 'hidet_dist[{extra}]'.")
