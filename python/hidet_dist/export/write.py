"""Atomic writing of an artifact folder: a staging folder is renamed, so that an interrupted build leaves nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import hidet
import torch

from hidet_dist import native
from hidet_dist.artifacts.manifest import (
    COORDINATE,
    NAME,
    Manifest,
    ProgramManifest,
    StageManifest,
    holds_artifacts,
    program_folder,
    weights_file,
)
from hidet_dist.checks import shown
from hidet_dist.compile import Backend, CompiledProgram
from hidet_dist.compile.targets import default_backend
from hidet_dist.errors import ArtifactError, ConfigError, PlanError
from hidet_dist.files import exchange, folder_beside, sha256, write_text
from hidet_dist.limits import MOST_NAME_BYTES
from hidet_dist.partitioning import Program
from hidet_dist.report.data import Report, report_file
from hidet_dist.runtime.recycling import ALIGNMENT
from hidet_dist.spec import DeviceMesh, Plan, TensorPlan
from hidet_dist.spec.explanation import StageExplanation, explanation_file
from hidet_dist.weights import Source, StoredLayout, shard_blocks, write_safetensors
from hidet_dist.weights.packing import panel_blocks
from hidet_dist.weights.panels import PanelLayout


def check_destination(out_dir: str | Path, recompile: bool) -> Path:
    """Refuse a folder to which artifacts must not or cannot be written, before work starts; return its real path.

    The real path has no links, so that a link to a folder remains when the folder is replaced.

    Raises
    ------
    ConfigError
        When ``out_dir`` is not a path.
    ArtifactError
        When ``out_dir`` is a file, or, without ``recompile``, a folder with other content; when its name is empty or
        too long; when no folder can be made beside it.
    """
    if not isinstance(out_dir, str | Path):
        raise ConfigError(f"out_dir must be the path of a folder; got {shown(out_dir)}.")
    try:
        name_bytes = len(os.fsencode(os.path.basename(out_dir)))
        path = Path(os.path.realpath(out_dir))
    except (OSError, ValueError) as error:  # such as a null byte
        raise ArtifactError(f"out_dir {shown(str(out_dir))} is not a path: {error}.") from error
    if os.path.basename(str(out_dir).rstrip("/")) in ("", ".", ".."):
        raise ArtifactError(f"out_dir must end in the name of a folder to make or replace; got {shown(str(out_dir))}.")
    if max(name_bytes, len(os.fsencode(path.name))) > MOST_NAME_BYTES:
        raise ArtifactError(
            f"The name of out_dir has more than {MOST_NAME_BYTES} bytes: {shown(path.name)}. Choose a shorter one."
        )
    try:
        if os.path.lexists(path) and not path.is_dir():
            raise ArtifactError(f"{out_dir} is not a folder; name another out_dir.")
        if not recompile and path.is_dir() and any(path.iterdir()) and not holds_artifacts(path):
            raise ArtifactError(
                f"{out_dir} is not empty and holds no artifacts of hidet_dist; name another out_dir, or set "
                "optimization_config['recompile'] to move its content aside."
            )
        ancestor = path.parent
        while not ancestor.exists() and ancestor != ancestor.parent:
            ancestor = ancestor.parent
        os.rmdir(tempfile.mkdtemp(dir=ancestor, prefix=f".{path.name}.partial-"))
    except OSError as error:
        raise ArtifactError(
            f"No artifacts can be written to {shown(str(out_dir))}: {error.strerror}. Name another out_dir."
        ) from error
    return path


@contextmanager
def replacing(out_dir: Path) -> Iterator[Path]:
    """Make a staging folder beside ``out_dir`` that replaces it when the block succeeds, and is removed when it fails.

    Old artifacts are removed; any other content is kept as ``<out_dir>.before-<n>``. If the file system can exchange
    folders, ``out_dir`` has artifacts at all times: the old ones or the new ones.

    Raises
    ------
    ArtifactError
        When a file cannot be written, for example on a full disk.
    """
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        staging = folder_beside(out_dir)
        try:
            yield staging
            has_artifacts = holds_artifacts(out_dir)
            if has_artifacts and exchange(staging, out_dir):
                return  # the staging folder, removed below, now has the old artifacts
            aside = _free_name(out_dir)
            removable = has_artifacts or (out_dir.exists() and not any(out_dir.iterdir()))
            if out_dir.exists():
                os.rename(out_dir, aside)
            os.rename(staging, out_dir)
            if removable:
                shutil.rmtree(aside)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ArtifactError(f"The artifacts cannot be written to {out_dir}: {error}.") from error


def _free_name(out_dir: Path) -> Path:
    number = 0
    while (name := out_dir.with_name(f"{out_dir.name}.before-{number}")).exists():
        number += 1
    return name


def _check_room(folder: Path, mesh: DeviceMesh, held_by: Mapping[str, Program]) -> None:
    """Raise ArtifactError if the disk lacks space for the shards of all ranks of a stage."""
    needed = sum(
        _held(program, name)[1].local_nbytes(mesh, mesh.coordinate(rank))
        for name, program in held_by.items()
        if name != COORDINATE
        for rank in range(mesh.size)
    )
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ArtifactError(
            f"The weights of {mesh.size} ranks take {needed} bytes, and the disk of {folder} has {free} left. Free "
            "some space, or name an out_dir on another disk."
        )


def _held(program: Program, name: str) -> tuple[Source, TensorPlan]:
    """Return the whole data and the spec of a weight, or of a state's values before the first call, by its name."""
    for weight in program.weights:
        if weight.name == name:
            return program.sources[name], weight
    return next((program.initial[x.name], x) for x in program.states if program.initial_name(x.name) == name)


@dataclass(frozen=True)
class BuiltProgram:
    """A program to write: its plan, and what was built of it.

    Attributes
    ----------
    plan: the plan.
    stages: the program of each stage, as a graph and compiled. Ranks are numbered stage by stage.
    reports: the data of ``hidet-dist report``, one per stage; or none.
    """

    plan: Plan
    stages: Sequence[tuple[Program, CompiledProgram]]
    reports: Sequence[Report] = ()


def write_artifacts(
    folder: Path,
    programs: Mapping[str, BuiltProgram],
    target: Backend | None = None,
    weights_written: bool = False,
) -> Manifest:
    """Write programs over one storage into a folder, the manifest last.

    Parameters
    ----------
    folder: Path
        The folder, which is empty but for weights.
    programs: mapping
        The programs by name. What one names as another does is one weight, which is stored once: see
        :func:`hidet_dist.export.storage.share_storage`.
    target: Backend, optional
        The target, by default the default one, that the programs are compiled for.
    weights_written: bool
        Whether :func:`write_weights` has written the weights of all stages.

    Raises
    ------
    ArtifactError
        When the disk lacks space for the weights.
    PlanError
        When the programs do not match the plans' stages, or one another, in number or mesh; or several stages are no
        pipeline.
    """
    target = target or default_backend()
    meshes = [program.mesh for program, _ in next(iter(programs.values())).stages]
    for built in programs.values():
        built.plan.check_pipeline()
        program_meshes, stage_meshes = (
            [program.mesh for program, _ in built.stages],
            [stage.mesh for stage in built.plan.stages],
        )
        if program_meshes != stage_meshes or program_meshes != meshes:
            raise PlanError(
                f"The programs are on the meshes {', '.join(map(str, program_meshes))}; the plan's stages are on "
                f"{', '.join(map(str, stage_meshes))}, and those of all plans on {', '.join(map(str, meshes))}. Give "
                "the program of each stage."
            )
    if not weights_written:
        for number in range(len(meshes)):
            of_stage = [built.stages[number] for built in programs.values()]
            write_weights(
                folder, number, [(program, compiled.weight_layouts) for program, compiled in of_stage], meshes
            )
    written = []
    for name, built in programs.items():
        prefix = program_folder(name, len(programs))
        own = folder / prefix
        own.mkdir(parents=True, exist_ok=True)
        built.plan.save(own / "plan.json")
        _write_explanations(own, built.plan)
        for number, report in enumerate(built.reports):
            report.save(own / report_file(number, len(built.reports)))
        stages = [
            _write_stage(folder, f"{prefix}stage{number}", compiled)
            for number, (_, compiled) in enumerate(built.stages)
        ]
        written.append(ProgramManifest(name, tuple(stages), built.plan.pipeline))
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): (path.stat().st_size, sha256(path)) for path in paths}
    assert NAME not in files
    manifest = Manifest(
        version("hidet_dist"),
        hidet.__version__,
        native.ABI_VERSION,
        target.record.name,
        target.arch,
        target.gpu_name,
        target.cpu_features,
        sum(mesh.size for mesh in meshes),
        tuple(written),
        files,
    )
    manifest.save(folder)
    return manifest


def write_weights(
    folder: Path,
    stage: int,
    programs: Sequence[tuple[Program, Mapping[str, StoredLayout]]],
    meshes: Sequence[DeviceMesh],
) -> None:
    """Write the data of all ranks of a stage, before anything else of the stage.

    Parameters
    ----------
    folder: Path
        The folder of the artifacts.
    stage: int
        The number of the stage.
    programs: sequence of pairs
        The stage's program in each program of the artifacts, with the dtype and local shape of each weight that the
        compiled program reads, and of the coordinate if it does. A name is that of one weight in all of them.
    meshes: sequence of DeviceMesh
        The meshes of all stages; ranks are numbered stage by stage.

    Raises
    ------
    ArtifactError
        When the disk lacks space for the weights.
    """
    layouts: dict[str, StoredLayout] = {}
    held_by: dict[str, Program] = {}
    for program, of_program in programs:
        for name, layout in of_program.items():
            assert layouts.setdefault(name, layout) == layout, f"{name} differs between programs"
            held_by.setdefault(name, program)
    mesh, first = meshes[stage], sum(earlier.size for earlier in meshes[:stage])
    _check_room(folder, mesh, held_by)
    for rank in range(mesh.size):
        path = folder / weights_file(first + rank)
        path.parent.mkdir(exist_ok=True)
        parts = {name: part for program, _ in programs for name, part in program.part_sizes(rank).items()}
        of_rank = {name: layout.at(parts) for name, layout in layouts.items()}
        _write_rank(path, mesh, rank, of_rank, held_by)


def _write_explanations(folder: Path, plan: Plan) -> None:
    """Write the explanation of each stage's plan."""
    for number, stage in enumerate(plan.stages):
        # Times of the search are left out, so that the same input gives the same bytes.
        report = None if stage.report is None else stage.report.without_times()
        path = folder / explanation_file(number, len(plan.stages))
        path.parent.mkdir(exist_ok=True)
        write_text(path, StageExplanation(replace(stage, report=report)).to_json())


def _write_stage(folder: Path, name: str, compiled: CompiledProgram) -> StageManifest:
    """Write the libraries and the constants of a stage, but kernels that another stage or program has written."""
    (folder / name).mkdir(parents=True, exist_ok=True)  # a pipeline has explanations there
    stage = replace(compiled.stage, folder=name)
    shutil.copyfile(compiled.launcher, folder / stage.launcher_file)
    for file, kernel in zip(stage.kernel_files(), compiled.kernels, strict=True):
        (folder / file).parent.mkdir(exist_ok=True)
        if not (folder / file).exists():
            shutil.copyfile(kernel, folder / file)
    if compiled.constants:
        constants = {name: c.torch().contiguous() for name, c in compiled.constants.items()}
        layouts = {name: compiled.layouts[name] for name in constants}
        write_safetensors(folder / stage.constants_file, layouts, lambda name: [constants[name]], ALIGNMENT)
    return stage


def _write_rank(
    path: Path, mesh: DeviceMesh, rank: int, layouts: Mapping[str, StoredLayout], held_by: Mapping[str, Program]
) -> None:
    """Write a rank's shards block by block, so that no whole shard is held in memory."""
    coordinate = mesh.coordinate(rank)

    def blocks(name: str) -> Iterable[torch.Tensor]:
        if name == COORDINATE:
            return [torch.tensor(coordinate, dtype=torch.int32)]
        layout, (source, held) = layouts[name], _held(held_by[name], name)
        if isinstance(layout, PanelLayout):
            return panel_blocks(source, held, mesh, coordinate, layout.panels)
        return shard_blocks(source, held, mesh, coordinate)

    write_safetensors(path, layouts, blocks, ALIGNMENT)
