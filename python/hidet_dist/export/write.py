"""Atomic writing of an artifact folder: a staging folder is renamed, so that an interrupted build leaves nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import hidet
import torch

from hidet_dist.artifacts.manifest import COORDINATE, NAME, Manifest, StageManifest, holds_artifacts, weights_file
from hidet_dist.checks import shown
from hidet_dist.compile import Backend, CompiledProgram
from hidet_dist.compile.targets import default_backend
from hidet_dist.errors import ArtifactError, ConfigError, PlanError
from hidet_dist.explain import StageExplanation, explanation_file
from hidet_dist.files import exchange, folder_beside, sha256, write_text
from hidet_dist.limits import MOST_NAME_BYTES
from hidet_dist.partitioning import Program
from hidet_dist.report.data import Report, report_file
from hidet_dist.runtime import native
from hidet_dist.runtime.recycling import ALIGNMENT
from hidet_dist.spec import Plan
from hidet_dist.weights import Layout, UnevenLayout, shard_blocks, write_safetensors


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


def _check_room(folder: Path, programs: Sequence[Program]) -> None:
    """Raise ArtifactError if the disk lacks space for the shards of all ranks."""
    needed = sum(
        weight.local_nbytes(program.mesh, program.mesh.coordinate(rank))
        for program in programs
        for weight in program.weights
        for rank in range(program.mesh.size)
    )
    ranks, free = sum(program.mesh.size for program in programs), shutil.disk_usage(folder).free
    if needed > free:
        raise ArtifactError(
            f"The weights of {ranks} ranks take {needed} bytes, and the disk of {folder} has {free} left. Free some "
            "space, or name an out_dir on another disk."
        )


def write_artifacts(
    folder: Path,
    plan: Plan,
    stages: Sequence[tuple[Program, CompiledProgram]],
    target: Backend | None = None,
    reports: Sequence[Report] = (),
    weights_written: bool = False,
) -> Manifest:
    """Write a plan with the programs of its stages into a folder, the manifest last.

    Parameters
    ----------
    folder: Path
        The folder, which is empty but for weights.
    plan: Plan
        The plan.
    stages: sequence of pairs of Program and CompiledProgram
        The program of each stage. Ranks are numbered stage by stage.
    target: Backend, optional
        The target, by default the default one, that the programs are compiled for.
    reports: sequence of Report, optional
        The data of ``hidet-dist report``, one per stage.
    weights_written: bool
        Whether :func:`write_weights` has written the weights of all stages.

    Raises
    ------
    ArtifactError
        When the disk lacks space for the weights.
    PlanError
        When the programs do not match the plan's stages in number or mesh.
    """
    target = target or default_backend()
    program_meshes, stage_meshes = [program.mesh for program, _ in stages], [stage.mesh for stage in plan.stages]
    if program_meshes != stage_meshes:
        raise PlanError(
            f"The programs are on the meshes {', '.join(map(str, program_meshes))}; the plan's stages are on "
            f"{', '.join(map(str, stage_meshes))}. Give the program of each stage."
        )
    if not weights_written:
        for number, (program, compiled) in enumerate(stages):
            of_ranks = {name: layout for name, layout in compiled.layouts.items() if name not in compiled.constants}
            write_weights(folder, number, program, of_ranks)
    plan.save(folder / "plan.json")
    _write_explanations(folder, plan)
    for number, report in enumerate(reports):
        report.save(folder / report_file(number, len(reports)))
    written = tuple(_write_stage(folder, _folder_of(number), compiled) for number, (_, compiled) in enumerate(stages))
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
        sum(stage.size for stage in written),
        written,
        files,
        plan.pipeline,
    )
    manifest.save(folder)
    return manifest


def write_weights(folder: Path, stage: int, program: Program, layouts: Mapping[str, Layout | UnevenLayout]) -> None:
    """Write the data of all ranks of a stage, before anything else of the stage.

    Parameters
    ----------
    folder: Path
        The folder of the artifacts.
    stage: int
        The number of the stage.
    program: Program
        The stage's program.
    layouts: mapping
        The dtype and local shape of each weight that the compiled program reads, and of the coordinate if it does.

    Raises
    ------
    ArtifactError
        When the disk lacks space for the weights.
    """
    _check_room(folder, [program])
    (folder / _folder_of(stage)).mkdir()
    for rank in range(program.mesh.size):
        shares = program.share_sizes(rank)
        of_rank = {
            name: layout.at(shares) if isinstance(layout, UnevenLayout) else layout for name, layout in layouts.items()
        }
        _write_rank(folder / weights_file(_folder_of(stage), rank), program, rank, of_rank)


def _folder_of(stage: int) -> str:
    return f"stage{stage}"


def _write_explanations(folder: Path, plan: Plan) -> None:
    """Write the explanation of each stage's plan."""
    for number, stage in enumerate(plan.stages):
        # Times of the search are left out, so that the same input gives the same bytes.
        report = None if stage.report is None else stage.report.without_times()
        path = folder / explanation_file(number, len(plan.stages))
        path.parent.mkdir(exist_ok=True)
        write_text(path, StageExplanation(replace(stage, report=report)).to_json())


def _write_stage(folder: Path, name: str, compiled: CompiledProgram) -> StageManifest:
    """Write the libraries and the constants of a stage."""
    (folder / name / "kernels").mkdir()
    stage = replace(compiled.stage, folder=name)
    shutil.copyfile(compiled.launcher, folder / stage.launcher_file)
    for number, kernel in enumerate(compiled.kernels):
        shutil.copyfile(kernel, folder / stage.kernel_file(number))
    if compiled.constants:
        constants = {name: c.torch().contiguous() for name, c in compiled.constants.items()}
        layouts = {
            name: Layout(c.dtype, c.shape) for name in constants if isinstance(c := compiled.layouts[name], Layout)
        }
        write_safetensors(folder / stage.constants_file, layouts, lambda name: [constants[name]], ALIGNMENT)
    return stage


def _write_rank(path: Path, program: Program, rank: int, layouts: Mapping[str, Layout]) -> None:
    """Write a rank's shards block by block, so that no whole shard is held in memory."""
    coordinate = program.mesh.coordinate(rank)
    weights = {weight.name: weight for weight in program.weights}

    def blocks(name: str) -> Iterable[torch.Tensor]:
        if name == COORDINATE:
            return [torch.tensor(coordinate, dtype=torch.int32)]
        return shard_blocks(program.sources[name], weights[name], program.mesh, coordinate)

    write_safetensors(path, layouts, blocks, ALIGNMENT)
