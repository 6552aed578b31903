"""The manifest of an artifact folder, and the check of the folder against it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hidet_dist.artifacts import coherence
from hidet_dist.errors import ArtifactError
from hidet_dist.files import parse_json, read_text, write_text
from hidet_dist.limits import MOST_MANIFEST_BYTES
from hidet_dist.spec.pipeline import Pipeline
from hidet_dist.spec.symbols import LocalSymbol, SymbolPlan

FORMAT = 9
NAME = "manifest.json"
COORDINATE = "coordinate"
"""The name, in a stage's data, of the coordinate of a rank in the stage's mesh: int32, an element a mesh axis."""


@dataclass(frozen=True)
class TensorSignature:
    """An input or output of the local program: dtype name, local shape (elements), whole shape, spec as text.

    A symbolic dim of an input stands there by its name, one of an output as it is written.
    """

    dtype: str
    shape: tuple[int | str, ...]
    whole_shape: tuple[int | str, ...]
    spec: str

    @property
    def is_symbolic(self) -> bool:
        """Whether the shape depends on symbolic dims."""
        return any(isinstance(extent, str) for extent in self.shape)


@dataclass(frozen=True)
class Launch:
    """One kernel's turn in the program: the kernel's number, dtypes and shapes of what it writes, as text.

    ``communication`` says what it communicates; it is empty for a kernel that only computes.
    """

    kernel: int
    output: str
    communication: str


Product = tuple[int | str, ...]
"""A product of numbers and of the sizes of local symbols, by name."""


@dataclass(frozen=True)
class IndexCheck:
    """Elements of an input that are indices, each of which must be from ``-rows`` to ``rows - 1``.

    They are a strided view of the input, whose shape, strides and offset are in elements. ``shift`` is what the program
    adds to them before it looks them up.
    """

    input: int
    rows: Product
    shift: int
    shape: tuple[Product, ...]
    strides: tuple[Product, ...]
    offset: Product


@dataclass(frozen=True)
class StageManifest:
    """One stage: folder, mesh, signatures, the kernels' names, and the order in which the launcher takes its data.

    ``launches`` are the kernels' turns, in the order of execution; ``libraries`` what the kernels need besides the
    runtimes of hidet and hidet_dist. ``symbols`` are the symbolic dims, ``local_symbols`` those that the program knows.
    ``candidates`` is, for each kernel, how many candidates its library has (``hidet_launch_0`` and so on), and
    ``cublas`` whether the last of them calls cuBLAS.
    ``workspace_bytes`` is the room that activations take by kind of memory (``cpu``, ``cuda``), or None where that
    depends on symbolic dims; ``weight_bytes`` what one rank's weights take. ``cuda_graph`` says whether the program
    is run as a CUDA graph. ``index_checks`` are what a call's inputs are checked for before it runs.
    """

    folder: str
    mesh_shape: tuple[int, ...]
    mesh_axis_names: tuple[str, ...]
    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    kernels: tuple[str, ...]
    data: tuple[str, ...]
    constants: tuple[str, ...]
    launches: tuple[Launch, ...]
    libraries: tuple[str, ...]
    symbols: tuple[SymbolPlan, ...] = ()
    local_symbols: tuple[LocalSymbol, ...] = ()
    candidates: tuple[int, ...] = ()
    workspace_bytes: Mapping[str, int] | None = None
    weight_bytes: int = 0
    cuda_graph: bool = False
    cublas: tuple[bool, ...] = ()
    index_checks: tuple[IndexCheck, ...] = ()

    @property
    def communications(self) -> tuple[str, ...]:
        """The collectives in the order of execution, one line each."""
        return tuple(launch.communication for launch in self.launches if launch.communication)

    @property
    def size(self) -> int:
        """Number of ranks of the stage."""
        size = 1
        for extent in self.mesh_shape:
            size *= extent
        return size

    def weights_file(self, rank: int) -> str:
        """The path of a rank's data, relative to the artifact folder."""
        return f"{self.folder}/rank{rank}.safetensors"

    @property
    def constants_file(self) -> str:
        """The path of the shared constants."""
        return f"{self.folder}/constants.safetensors"

    @property
    def launcher_file(self) -> str:
        """The path of the launcher library."""
        return f"{self.folder}/launcher.so"

    def kernel_file(self, number: int) -> str:
        """The path of a kernel library."""
        return f"{self.folder}/kernels/{number}.so"

    def libraries_of(self) -> list[str]:
        """The paths of the libraries that were compiled: the launcher's and the kernels'."""
        return [self.launcher_file, *self.kernel_files()]

    def kernel_files(self) -> list[str]:
        """The paths of the kernel libraries, in the order of ``kernels``."""
        return [self.kernel_file(number) for number in range(len(self.kernels))]

    def data_of(self, rank: int) -> list[str]:
        """The paths of the safetensors files with what a rank holds."""
        return [*([self.constants_file] if self.constants else []), self.weights_file(rank)]


@dataclass(frozen=True)
class Manifest:
    """An artifact folder. ``files`` maps each file's path to its size in bytes and SHA-256.

    ``arch`` is what the kernels were compiled for: ``sm_90`` of GPUs, or ``x86-64-v3`` of CPUs, whose processors must
    have the ``cpu_features``, by Linux's names. Stages without a ``pipeline`` are served each by itself.
    """

    hidet_dist_version: str
    hidet_version: str
    abi_version: int
    target: str
    arch: str
    gpu: str | None
    cpu_features: tuple[str, ...]
    world_size: int
    stages: tuple[StageManifest, ...]
    files: Mapping[str, tuple[int, str]]
    pipeline: Pipeline | None = None

    def ranks_of(self, stage: int) -> range:
        """The ranks of a stage, by its number: stages have the ranks in their order."""
        first = sum(own.size for own in self.stages[:stage])
        return range(first, first + self.stages[stage].size)

    def stage_of(self, rank: int) -> int:
        """The number of the stage that a rank is of. Raises ValueError where there is no such rank."""
        for number in range(len(self.stages)):
            if rank in self.ranks_of(number):
                return number
        raise ValueError(f"there is no rank {rank} among {self.world_size}")

    @property
    def identity(self) -> str:
        """The same for equal artifacts, and for no others: in hex."""
        return _checksum(asdict(self))

    def save(self, folder: Path) -> None:
        """Write ``manifest.json`` into a folder, whole or not at all."""
        body = asdict(self)
        body["format"] = FORMAT
        body["checksum"] = _checksum(body)
        write_text(folder / NAME, json.dumps(body, indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, folder: Path, directory: int | None = None) -> Manifest:
        """Read the manifest of an artifact folder, or of that which ``directory`` is the descriptor of.

        Raises
        ------
        ArtifactError
            When there is none, it was altered, it is of another format, or it contradicts itself.
        """
        path = folder / NAME
        body = _read(folder, directory)
        if body.get("format") != FORMAT:
            raise ArtifactError(
                f"{path} has format {body.get('format')!r}, not {FORMAT}; build the artifacts with this version."
            )
        if not _is_whole(body):
            raise ArtifactError(f"{path} was altered: its checksum does not fit. Build the artifacts again.")
        del body["format"], body["checksum"]
        try:
            manifest: Manifest = _read_as(cls, body, "it")
        except ValueError as error:
            raise ArtifactError(f"{path} is not a manifest of format {FORMAT}: {error}.") from error
        try:
            coherence.check(manifest)
        except ValueError as error:
            raise ArtifactError(f"{path} contradicts itself: {error}. Build the artifacts again.") from error
        return manifest


def holds_artifacts(folder: Path) -> bool:
    """Whether a folder has a manifest as it was written, of this format or another one."""
    try:
        return _is_whole(_read(folder, None))
    except ArtifactError:
        return False


def _read(folder: Path, directory: int | None) -> dict[str, Any]:
    path = folder / NAME
    try:
        where = path if directory is None else Path(NAME)
        body = parse_json(read_text(where, MOST_MANIFEST_BYTES, directory, os.O_NOFOLLOW))
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{folder} holds no artifacts: there is no {NAME}. Build them with hidet.distributed.auto_parallel."
        ) from error
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}. Build the artifacts again.") from error
    if not isinstance(body, dict):
        raise ArtifactError(f"{path} is no manifest. Build the artifacts again.")
    return body


def _is_whole(body: Mapping[str, Any]) -> bool:
    return bool(body.get("checksum") == _checksum(body))


def _checksum(body: Mapping[str, Any]) -> str:
    """The SHA-256, in hex, of all else that a manifest says."""
    rest = {key: value for key, value in body.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


_types_of: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def _read_as(kind: Any, value: Any, what: str) -> Any:
    """A value from JSON as what a type annotation says: dataclasses, tuples and mappings of such, or plain values.

    Raises ValueError where it is anything else.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        types = _types_of(kind)
        if value.keys() == types.keys():
            return kind(**{name: _read_as(own, value[name], f"{what}.{name}") for name, own in types.items()})
    elif origin is tuple and isinstance(value, list):
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(value) == len(kinds):
            pairs = enumerate(zip(kinds, value, strict=True))
            return tuple(_read_as(own, each, f"{what}[{n}]") for n, (own, each) in pairs)
    elif origin is Mapping and isinstance(value, dict):
        return {key: _read_as(inner[1], each, f"{what}[{key!r}]") for key, each in value.items()}
    elif origin is UnionType:
        for own in inner:
            with suppress(ValueError):
                return _read_as(own, value, what)
    elif type(value) is kind:
        return value
    raise ValueError(f"{what} cannot be {str(value)[:40]!r}")
