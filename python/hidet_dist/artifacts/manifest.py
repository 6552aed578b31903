"""The manifest of an artifact folder: its data classes, writing and reading."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar
from weakref import WeakValueDictionary

from hidet_dist.artifacts import coherence
from hidet_dist.checks import shown
from hidet_dist.codec import LARGEST, OMITTED, Range, decode, encode, encode_with_format, of_format
from hidet_dist.errors import ArtifactError, ConfigError, SpecError
from hidet_dist.files import parse_json, read_text, write_text
from hidet_dist.limits import MOST_MANIFEST_BYTES
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.spec.formula import evaluate_formula
from hidet_dist.spec.interface import Interface
from hidet_dist.spec.parts import part_sizes
from hidet_dist.spec.pipeline import Pipeline
from hidet_dist.spec.symbols import LocalSymbol, SymbolPlan
from hidet_dist.weights.panels import Panels

FORMAT = 13
NAME = "manifest.json"
MAIN = "main"
"""The name of the only program of artifacts that were built of one graph."""
COORDINATE = "coordinate"
"""The name, in a stage's data, of a rank's coordinate in the stage's mesh: int32, one element per mesh axis."""


@dataclass(frozen=True)
class TensorSignature:
    """An input or output of the local program: dtype name, local shape (elements), whole shape, spec as text.

    A symbolic dim of an input is written by its name, one of an output as an expression.
    """

    dtype: str
    shape: tuple[int | str, ...]
    whole_shape: tuple[int | str, ...]
    spec: str

    @property
    def is_symbolic(self) -> bool:
        """True if the shape depends on symbolic dims."""
        return any(isinstance(extent, str) for extent in self.shape)

    def whole_at(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Compute the whole shape at these whole sizes of symbolic dims. Raises SpecError if one is missing."""
        return tuple(n if isinstance(n, int) else evaluate_formula(n, sizes) for n in self.whole_shape)

    def local_at(self, sizes: Mapping[str, int], mesh: DeviceMesh, rank: int) -> tuple[int, ...]:
        """Compute the shape of a rank's shard at these whole sizes of symbolic dims. Raises SpecError."""
        return TensorShardSpec.parse(self.spec).local_shape(self.whole_at(sizes), mesh, mesh.coordinate(rank))


@dataclass(frozen=True)
class StateSignature:
    """A state of the local program: the user's name, dtype name, local and whole shape (elements), and spec as text.

    Local extents that depend on a rank's unequal parts are expressions.

    ``initial`` is the name, in the stage's data, of its values before the first call; empty for zeros.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    whole_shape: tuple[int, ...]
    spec: str
    initial: str

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a rank's state, which :meth:`StageManifest.at` has resolved."""
        return tuple(map(int, self.shape))


_Signature = TypeVar("_Signature", TensorSignature, StateSignature)


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel in the program: the kernel's number, and the dtypes and shapes of its outputs, as text.

    ``communication`` describes its communication; it is empty for a kernel that only computes.
    """

    kernel: int
    output: str
    communication: str


SignedWhole = Annotated[int, Range(-LARGEST)]
"""A whole number that may be below 0."""

Product = tuple[SignedWhole | str, ...]
"""A product of numbers and of the sizes of local symbols, by name."""


@dataclass(frozen=True)
class IndexCheck:
    """Elements of an input that are indices; each must be from ``-rows`` to ``rows - 1``.

    The elements are a strided view of the input, with shape, strides and offset in elements. The program adds ``shift``
    to them before the lookup.
    """

    input: int
    rows: Product
    shift: SignedWhole
    shape: tuple[Product, ...]
    strides: tuple[Product, ...]
    offset: Product


@dataclass(frozen=True)
class StageManifest:
    """One stage: folder, mesh, signatures, the kernels' names, and the order in which the launcher takes its data.

    ``launches`` are the launches of kernels, in execution order. ``libraries`` are those that kernels need besides the
    runtimes of hidet and hidet_dist. ``symbols`` are the symbolic dims, ``local_symbols`` those of the local program.
    ``mesh_shares`` are the shares of uneven mesh axes (:class:`hidet_dist.spec.DeviceMesh`). ``parts`` are the symbols
    of unequal parts, whose values are those of a rank; extents that depend on them are expressions, which :meth:`at`
    resolves for a rank.
    ``objects`` are the SHA-256 of the kernels' libraries, in hex: equal kernels of stages and programs have one file.
    ``candidates`` is the number of candidates in each kernel's library (``hidet_launch_0`` and so on), and ``cublas``
    whether the last of them calls cuBLAS.
    ``workspace_bytes`` are the bytes of activations by kind of memory (``cpu``, ``cuda``), or None if they depend on
    symbolic dims; ``weight_bytes`` those of one rank's weights. ``cuda_graph`` says whether the program is run as a
    CUDA graph. ``index_checks`` are the checks of a call's inputs before it runs. ``interface`` has the names and
    nesting of the model's arguments and results; it is None for a graph that was not made from a model.
    ``panels`` are the arrangements of the weights that kernels read in panels, by name; all others lie row by row.
    ``states`` are what the program keeps from call to call; the launcher takes their addresses behind those of
    ``data``.
    """

    folder: str
    mesh_shape: tuple[int, ...]
    mesh_axis_names: tuple[str, ...]
    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    kernels: tuple[str, ...]
    data: tuple[str, ...]
    constants: tuple[str, ...]
    launches: tuple[KernelLaunch, ...]
    libraries: tuple[str, ...]
    symbols: tuple[SymbolPlan, ...] = ()
    local_symbols: tuple[LocalSymbol, ...] = ()
    candidates: tuple[int, ...] = ()
    workspace_bytes: Mapping[str, int] | None = None
    weight_bytes: int = 0
    cuda_graph: bool = False
    cublas: tuple[bool, ...] = ()
    index_checks: tuple[IndexCheck, ...] = ()
    interface: Interface | None = None
    mesh_shares: Annotated[tuple[tuple[int, ...], ...], OMITTED] = ()
    panels: Mapping[str, Panels] = field(default_factory=dict)
    states: Annotated[tuple[StateSignature, ...], OMITTED] = ()
    parts: Annotated[tuple[str, ...], OMITTED] = ()
    objects: tuple[str, ...] = ()

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh. Raises SpecError if the fields do not describe one."""
        return DeviceMesh(self.mesh_shape, self.mesh_axis_names, self.mesh_shares)

    def part_sizes(self, rank: int) -> dict[str, int]:
        """Return a rank's parts, by the names of their symbols."""
        return part_sizes(self.parts, self.mesh, self.mesh.coordinate(rank)) if self.parts else {}

    def at(self, rank: int) -> StageManifest:
        """Return the stage with the shapes of tensors, and the checks of inputs, that a rank's parts result in.

        Symbolic dims stay as they are.
        """
        if not self.parts:
            return self
        coordinate, parts = self.mesh.coordinate(rank), self.part_sizes(rank)

        def resolved(tensor: _Signature) -> _Signature:
            spec = TensorShardSpec.parse(tensor.spec)
            shape = tuple(
                extent
                if spec.is_even(dim, self.mesh)
                else spec.split(dim, self.mesh).interval(int(whole), coordinate)[1]
                for dim, (extent, whole) in enumerate(zip(tensor.shape, tensor.whole_shape, strict=True))
            )
            return replace(tensor, shape=shape)

        def product(factors: Product) -> Product:
            return tuple(parts.get(factor, factor) if isinstance(factor, str) else factor for factor in factors)

        checks = (
            replace(
                check,
                rows=product(check.rows),
                shape=tuple(map(product, check.shape)),
                strides=tuple(map(product, check.strides)),
                offset=product(check.offset),
            )
            for check in self.index_checks
        )
        inputs, outputs = (tuple(map(resolved, tensors)) for tensors in (self.inputs, self.outputs))
        states = tuple(map(resolved, self.states))
        return replace(self, inputs=inputs, outputs=outputs, states=states, index_checks=tuple(checks))

    @property
    def communications(self) -> tuple[str, ...]:
        """The collectives in the order of execution, one line each."""
        return tuple(launch.communication for launch in self.launches if launch.communication)

    @property
    def size(self) -> int:
        """The number of ranks of the stage."""
        size = 1
        for extent in self.mesh_shape:
            size *= extent
        return size

    @property
    def constants_file(self) -> str:
        """The path of the shared constants."""
        return f"{self.folder}/constants.safetensors"

    @property
    def launcher_file(self) -> str:
        """The path of the launcher library."""
        return f"{self.folder}/launcher.so"

    def kernel_file(self, number: int) -> str:
        """Return the path of a kernel library."""
        return object_file(self.objects[number])

    def libraries_of(self) -> list[str]:
        """List the paths of the compiled libraries: the launcher's and the kernels'."""
        return [self.launcher_file, *self.kernel_files()]

    def kernel_files(self) -> list[str]:
        """List the paths of the kernel libraries, in the order of ``kernels``."""
        return [self.kernel_file(number) for number in range(len(self.kernels))]

    def files_of(self) -> list[str]:
        """List the paths of the files that all ranks of the stage load: its libraries and constants."""
        return [*self.libraries_of(), *([self.constants_file] if self.constants else [])]


def object_file(digest: str) -> str:
    """Return the path of a kernel's library, by its SHA-256, relative to the artifact folder."""
    return f"kernels/{digest}.so"


def weights_file(rank: int) -> str:
    """Return the path of the data of a rank, for all programs, relative to the artifact folder."""
    return f"weights/rank{rank}.safetensors"


def program_folder(name: str, programs: int) -> str:
    """Return the folder of a program, relative to the artifact folder: the folder itself for the only program."""
    return f"programs/{name}/" if programs > 1 else ""


@dataclass(frozen=True)
class ProgramManifest:
    """A program of artifacts: its name, its stages, and the pipeline that several stages, or micro-batches, make."""

    name: str
    stages: tuple[StageManifest, ...]
    pipeline: Pipeline | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(stage.size for stage in self.stages)

    def ranks_of(self, stage: int) -> range:
        """Return the ranks of a stage, by its number; ranks are numbered stage by stage."""
        first = sum(earlier.size for earlier in self.stages[:stage])
        return range(first, first + self.stages[stage].size)

    def stage_of(self, rank: int) -> int:
        """Return the number of a rank's stage. Raises ValueError if there is no such rank."""
        for number in range(len(self.stages)):
            if rank in self.ranks_of(number):
                return number
        raise ValueError(f"there is no rank {rank} among {self.world_size}")


@dataclass(frozen=True)
class Manifest:
    """The manifest of an artifact folder: a list of programs over one storage.

    ``files`` maps each file's path to its size in bytes and SHA-256. The storage of a rank is the file
    :func:`weights_file`: it has each tensor once that any of its programs reads, by the names in the ``data`` of their
    stages. The stages of all programs have the same meshes, so that a rank has one coordinate, one communicator for
    each group, and one memory.

    ``arch`` is the architecture of the kernels, such as ``sm_90`` for GPUs or ``x86-64-v3`` for CPUs. A CPU must have
    the ``cpu_features``, by Linux's names.
    """

    hidet_dist_version: str
    hidet_version: str
    abi_version: int
    target: str
    arch: str
    gpu: str | None
    cpu_features: tuple[str, ...]
    world_size: int
    programs: tuple[ProgramManifest, ...]
    files: Mapping[str, tuple[int, str]]

    def program(self, name: str | None = None) -> ProgramManifest:
        """Return the program of this name, or the only program.

        Raises
        ------
        ConfigError
            When there is no program of the name, or several and no name; the message lists the names.
        """
        return self.programs[chosen_program([one.name for one in self.programs], name)]

    @property
    def weights_files(self) -> list[str]:
        """The paths of the data of all ranks, relative to the artifact folder."""
        return [weights_file(rank) for rank in range(self.world_size)]

    def files_of(self, rank: int) -> list[str]:
        """List the files that a rank uses: those of its stages, its weights, and those of no stage or rank."""
        number = self.programs[0].stage_of(rank)
        others, own = {name for name in self.weights_files if name != weights_file(rank)}, set[str]()
        for program in self.programs:
            for place, stage in enumerate(program.stages):
                (own if place == number else others).update(stage.files_of())
        return [name for name in self.files if name in own or name not in others]

    def folder_of(self, program: ProgramManifest) -> str:
        """Return the folder of a program, relative to the artifact folder, with a slash behind it; or an empty text."""
        return program_folder(program.name, len(self.programs))

    @cached_property
    def identity(self) -> str:
        """A digest that identifies the artifacts, in hex: equal for equal artifacts only."""
        return _checksum(encode(self))

    def save(self, folder: Path) -> None:
        """Write ``manifest.json`` into a folder, atomically."""
        body = encode_with_format(self, FORMAT)
        body["checksum"] = _checksum(body)
        write_text(folder / NAME, json.dumps(body, indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, folder: Path, directory: int | None = None) -> Manifest:
        """Read the manifest of an artifact folder, or of the folder with the descriptor ``directory``.

        Raises
        ------
        ArtifactError
            When there is none, or it was altered, has a different format, or contradicts itself.
        """
        path = folder / NAME
        text = _text(folder, directory)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if (known := _LOADED.get(digest)) is not None:
            return known
        body = _parsed(text, path)
        try:
            fields = of_format(body, FORMAT)
        except SpecError as error:
            raise ArtifactError(
                f"{path} is not a manifest: {error}. Build the artifacts again with this version, or serve them with "
                "the version that built them."
            ) from error
        if not _is_whole(body):
            raise ArtifactError(f"{path} was altered: its checksum does not fit. Build the artifacts again.")
        del fields["checksum"]
        try:
            manifest = decode(cls, fields, "it")
        except SpecError as error:
            raise ArtifactError(f"{path} is not a manifest of format {FORMAT}: {error}") from error
        try:
            coherence.check(manifest)
        except ValueError as error:
            raise ArtifactError(f"{path} contradicts itself: {error}. Build the artifacts again.") from error
        return _LOADED.setdefault(digest, manifest)


_LOADED: WeakValueDictionary[str, Manifest] = WeakValueDictionary()
"""The manifests that were read and are still in use, by the SHA-256 of their texts."""


def chosen_program(names: Sequence[str], name: str | None) -> int:
    """Return the number of the program of this name, or 0 for the only program. Raises ConfigError otherwise."""
    if name is None and len(names) == 1:
        return 0
    if name not in names:
        wanted = "name one of them" if name is None else f"there is no program {shown(name)}"
        raise ConfigError(f"The artifacts have the programs {', '.join(names)}: {wanted}.")
    return names.index(name)


def holds_artifacts(folder: Path) -> bool:
    """Tell whether a folder has an unaltered manifest, of any format."""
    try:
        return _is_whole(_parsed(_text(folder, None), folder / NAME))
    except ArtifactError:
        return False


def _text(folder: Path, directory: int | None) -> str:
    try:
        where = folder / NAME if directory is None else Path(NAME)
        return read_text(where, MOST_MANIFEST_BYTES, directory, os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{folder} holds no artifacts: there is no {NAME}. Build them with hidet.distributed.auto_parallel."
        ) from error
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{folder / NAME} cannot be read: {error}. Build the artifacts again.") from error


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        body = parse_json(text)
    except ValueError as error:
        raise ArtifactError(f"{path} cannot be read: {error}. Build the artifacts again.") from error
    if not isinstance(body, dict):
        raise ArtifactError(f"{path} is not a manifest. Build the artifacts again.")
    return body


def _is_whole(body: Mapping[str, Any]) -> bool:
    return bool(body.get("checksum") == _checksum(body))


def _checksum(body: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of a manifest without its checksum, in hex."""
    rest = {key: value for key, value in body.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
