"""Requests of ``hidet-dist plan`` and ``build``, which are checked before any large package is imported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hidet_dist.cli.quantities import parse_bytes, parse_dims, parse_mesh, parse_shares
from hidet_dist.errors import ConfigError, SpecError
from hidet_dist.machine import builtin, load_machine
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.pipeline import OBJECTIVES

DTYPES = ("float32", "float16", "bfloat16")
BATCH, SEQ = 1, 128
_FORMS = "name a transformers folder, its config.json, or a .onnx file"


@dataclass(frozen=True)
class PlanRequest:
    """The options that ``plan`` and ``build`` share, as the user wrote them."""

    model: Path
    mesh: str
    machine: str | None = None
    dtype: str | None = None
    budget: str | None = None
    batch: int | None = None
    seq: int | None = None
    dims: tuple[str, ...] = ()
    objective: str | None = None
    stages: int | None = None
    micro_batches: int | None = None
    time_limit: float | None = None
    shares: str | None = None

    def check(self) -> None:
        """Refuse invalid options and models that cannot be read, within milliseconds. Raises ConfigError."""
        self._check_machine()
        if self.budget is not None:
            parse_bytes(self.budget)
        counts = ("batch", "seq", "stages", "micro_batches")
        for option, value in ((f"--{name.replace('_', '-')}", getattr(self, name)) for name in counts):
            if value is not None and value < 1:
                raise ConfigError(f"{option} must be 1 or more; got {value}.")
        self._check_pipeline()
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}.")
        if self.time_limit is not None and not (0 < self.time_limit < math.inf):
            raise ConfigError(f"--time-limit must be seconds above 0; got {self.time_limit:g}.")
        dims = parse_dims(self.dims)
        self._check_model(dims)

    def _check_machine(self) -> None:
        try:
            mesh = DeviceMesh(tuple(parse_mesh(self.mesh)))
        except SpecError as error:
            raise ConfigError(f"--mesh {self.mesh} describes no mesh: {error}") from error
        self._check_shares(mesh)
        if self.machine is not None:
            load_machine(self.machine, mesh) if self.machine.endswith(".json") else builtin(self.machine, mesh)

    def _check_shares(self, mesh: DeviceMesh) -> None:
        shares = {} if self.shares is None else parse_shares(self.shares)
        if not isinstance(shares, dict):
            return
        for name in shares:
            if name not in mesh.axis_names:
                raise ConfigError(f"--shares names the axis {name}; the mesh has {', '.join(mesh.axis_names)}.")
        try:
            DeviceMesh(mesh.shape, mesh.axis_names, tuple(tuple(shares.get(name, ())) for name in mesh.axis_names))
        except SpecError as error:
            raise ConfigError(f"--shares {self.shares} does not fit: {error}") from error

    def _check_pipeline(self) -> None:
        if self.objective is None:
            for name in ("stages", "micro_batches"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"--{name.replace('_', '-')} is for pipelines: give an --objective as well.")
        elif self.objective not in OBJECTIVES:
            raise ConfigError(f"--objective must be one of {', '.join(OBJECTIVES)}; got {self.objective!r}.")

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
            for name in ("batch", "seq", "dtype"):
                if getattr(self, name) is not None:
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
        distributed: dict[str, Any] = {"mesh_shape": parse_mesh(self.mesh)}
        if self.machine is not None:
            distributed["machine"] = self.machine
        if self.shares is not None:
            distributed["shares"] = parse_shares(self.shares)
        optimization: dict[str, Any] = {}
        if self.budget is not None:
            optimization["mem_budget"] = parse_bytes(self.budget)
        for name in ("objective", "stages", "micro_batches"):
            if getattr(self, name) is not None:
                optimization[name] = getattr(self, name)
        if self.time_limit is not None:
            optimization["solver_time_limit_seconds"] = self.time_limit
        return distributed, optimization

    def origin(self) -> dict[str, str]:
        """Return the options as text, by name, to be saved in a report."""
        values = {**asdict(self), "dims": ",".join(self.dims) or None}
        return {name: str(value) for name, value in values.items() if value is not None}

    @classmethod
    def of_origin(cls, origin: Mapping[str, str]) -> PlanRequest:
        """Make the request from the result of :meth:`origin`. Raises ConfigError for anything else."""
        parsers: dict[str, Any] = {
            "model": Path,
            "batch": int,
            "seq": int,
            "stages": int,
            "micro_batches": int,
            "time_limit": float,
            "dims": lambda text: tuple(text.split(",")),
        }
        try:
            return cls(**{name: parsers.get(name, str)(value) for name, value in origin.items()})
        except (TypeError, ValueError) as error:
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
