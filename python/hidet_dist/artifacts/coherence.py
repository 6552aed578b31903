"""Consistency checks of manifests: of each field, between fields, and with the descriptions in launchers.

Checksums prove that a folder is as it was written, not that its content is consistent. A launcher library contains a
description of its stage, because only its code determines the order in which it takes data and kernels. This module
compares it with the manifest, and checks the rest of the manifest without reading files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hidet_dist.checks import shown
from hidet_dist.codec import decode, encode
from hidet_dist.errors import SpecError
from hidet_dist.files import parse_json
from hidet_dist.limits import MOST_CANDIDATES
from hidet_dist.patterns.winograd import MATRICES
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.spec.formula import check_formula
from hidet_dist.spec.parts import part_sizes
from hidet_dist.spec.pipeline import Pipeline, StageTensor, StageTensors
from hidet_dist.spec.symbols import local_symbols
from hidet_dist.targets import KINDS_OF_MEMORY, TARGETS
from hidet_dist.weights.header import ITEMSIZE, StoredLayout
from hidet_dist.weights.panels import (
    FEW_BITS,
    HALF_PRECISIONS,
    PANEL_WIDTHS,
    SIZES,
    Panels,
    groups_of,
)

if TYPE_CHECKING:
    from hidet_dist.artifacts.manifest import (
        Manifest,
        ProgramManifest,
        StageManifest,
        StateSignature,
        TensorSignature,
    )

PROGRAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
PROGRAM_NAME_RULE = "up to 64 letters, digits, '_', '-' and '.', the first a letter or a digit"

_SHA256 = re.compile(r"[0-9a-f]{64}")
# The fields of a stage that its launcher's description lacks: its folder, and figures computed by the launcher.
_NOT_DESCRIBED = ("folder", "workspace_bytes")
_TARGET_FIELDS = ("target", "arch", "gpu", "cpu_features", "hidet_version", "abi_version")


def describe(
    stage: StageManifest,
    layouts: Mapping[str, StoredLayout],
    target: Mapping[str, str | int | Sequence[str] | None],
) -> str:
    """Make the description of a stage that its launcher contains, as JSON in ASCII.

    Parameters
    ----------
    stage: StageManifest
        The stage.
    layouts: mapping
        The dtype and local shape of all of the stage's ``data``, by name.
    target: mapping
        The manifest's ``target``, ``arch``, ``gpu``, ``cpu_features``, ``hidet_version`` and ``abi_version``.
    """
    return json.dumps(
        {
            "stage": _described(stage),
            "layouts": {name: _written(layouts[name]) for name in stage.data},
            **{key: target[key] for key in _TARGET_FIELDS},
        },
        sort_keys=True,
        separators=(",", ":"),
    )


def _written(layout: StoredLayout) -> list[Any]:
    return [layout.dtype, layout.shape, *([layout.factors] if layout.factors else [])]


def check_description(
    manifest: Manifest, program: int, number: int, text: bytes, parts: Mapping[str, int]
) -> dict[str, StoredLayout]:
    """Compare a stage with the description in its launcher, and return the layouts of a rank's data.

    ``program`` and ``number`` are the numbers of the program and of its stage. ``parts`` are those of the rank, by the
    names of their symbols.

    Raises
    ------
    ValueError
        For the first field that differs, by name, or a text that is not a description.
    """
    stage, what = manifest.programs[program].stages[number], f"programs[{program}].stages[{number}]"
    try:
        theirs = parse_json(text)
        layouts = {
            name: StoredLayout(dtype, tuple(shape), factors=tuple((dim, part) for dim, part in factors)).at(parts)
            for name, (dtype, shape, factors) in ((name, (*own, [])[:3]) for name, own in theirs["layouts"].items())
        }
        for name, own in theirs["stage"]["panels"].items():
            panels = decode(Panels, own, f"panels[{name!r}]")
            if layouts[name].shape != panels.shape:
                raise ValueError(f"the weight {name!r} has the shape {layouts[name].shape}, unlike its panels")
            layouts[name] = StoredLayout(layouts[name].dtype, panels.at(parts).shape)
        described = {**{key: theirs[key] for key in _TARGET_FIELDS}, what: theirs["stage"]}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the launcher of {what} has no valid description: {error}") from error
    fields = {key: getattr(manifest, key) for key in _TARGET_FIELDS}
    expected = parse_json(json.dumps({**fields, what: _described(stage)}))
    for field, here, there in _differences("", expected, described):
        raise ValueError(f"{field} is {shown(here)}, but the launcher was built for {shown(there)}")
    return layouts


def _described(stage: StageManifest) -> dict[str, Any]:
    plain = encode(stage)
    return {key: value for key, value in plain.items() if key not in _NOT_DESCRIBED}


def _differences(what: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the paths at which two JSON values differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in a:
            yield from _differences(f"{what}.{key}" if what else key, a[key], b[key])
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for number, (item, other) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{what}[{number}]", item, other)
    elif type(a) is not type(b) or a != b:
        yield what, a, b


def check(manifest: Manifest) -> None:
    """Raise ValueError, which names the field, if a manifest contradicts itself."""
    _require(manifest.target in TARGETS, "target", manifest.target, f"one of {', '.join(TARGETS)}")
    names_gpu = "gpu" in TARGETS[manifest.target].manifest_fields
    expected = "given" if names_gpu else "null"
    _require(
        (manifest.gpu is not None) == names_gpu, "gpu", manifest.gpu, f"{expected} for the target {manifest.target!r}"
    )
    _require(len(manifest.programs) > 0, "programs", [], "at least one")
    names = [program.name for program in manifest.programs]
    _require(len(set(names)) == len(names), "programs", names, "of distinct names")
    meshes = [_meshes(program) for program in manifest.programs]
    for number, program in enumerate(manifest.programs):
        _check_program(f"programs[{number}]", manifest, program)
        same = "those of programs[0], in mesh_shape, mesh_axis_names and mesh_shares"
        _require(meshes[number] == meshes[0], f"programs[{number}].stages", meshes[number], same)
    _check_objects(manifest)
    size = manifest.programs[0].world_size
    _require(manifest.world_size == size, "world_size", manifest.world_size, f"{size}, by the mesh_shape of all stages")
    loaded = (name for program in manifest.programs for stage in program.stages for name in stage.files_of())
    for name in (*loaded, *manifest.weights_files):
        requirement = f"a mapping that has {name}, by mesh_shape"
        _require(name in manifest.files, "files", f"{len(manifest.files)} names", requirement)
    for name, (nbytes, digest) in manifest.files.items():
        _require(nbytes >= 0, f"files[{name!r}][0]", nbytes, "a number of bytes")
        _require(_SHA256.fullmatch(digest) is not None, f"files[{name!r}][1]", digest, "a SHA-256 in hex")


def _meshes(program: ProgramManifest) -> list[Any]:
    return [(stage.mesh_shape, stage.mesh_axis_names, stage.mesh_shares) for stage in program.stages]


def _check_program(what: str, manifest: Manifest, program: ProgramManifest) -> None:
    name, pipeline = program.name, program.pipeline
    _require(PROGRAM_NAME.fullmatch(name) is not None, f"{what}.name", name, PROGRAM_NAME_RULE)
    _require(len(program.stages) > 0, f"{what}.stages", [], "at least one")
    single = pipeline is not None or len(program.stages) == 1
    _require(single, f"{what}.stages", f"{len(program.stages)} stages", "one stage without a pipeline")
    for number, stage in enumerate(program.stages):
        place = f"{what}.stages[{number}]"
        folder = f"{manifest.folder_of(program)}stage{number}"
        _check_stage(place, folder, stage, manifest.target, pipeline is not None)
        _check_panels(place, stage, PANEL_WIDTHS.get(manifest.arch))
        _check_interface(place, stage, pipeline or stage)
    if pipeline is not None:
        _check_pipeline(what, program, pipeline)


def _require(condition: bool, what: str, value: Any, requirement: str) -> None:
    if not condition:
        raise ValueError(f"{what} is {shown(value)}; it must be {requirement}")


def _check_stage(what: str, folder: str, stage: StageManifest, target: str, is_part: bool) -> None:
    """Check a stage; ``is_part`` says whether it is one of a pipeline, whose inputs may have computed dims."""
    _require(stage.folder == folder, f"{what}.folder", stage.folder, f"{folder}, as a path within the artifact folder")
    try:
        mesh = stage.mesh
    except SpecError as error:
        fields = (
            "mesh_shape and mesh_axis_names" if not stage.mesh_shares else "mesh_shape, mesh_axis_names and mesh_shares"
        )
        raise ValueError(f"{what}.{fields} do not describe a mesh: {error}") from error
    _require(mesh.shares == stage.mesh_shares, f"{what}.mesh_shares", stage.mesh_shares, "in lowest terms, and unequal")
    try:
        part_sizes(stage.parts, mesh, mesh.coordinate(0))
    except SpecError as error:
        raise ValueError(f"{what}.parts do not fit the mesh: {error}") from error
    names = [symbol.name for symbol in stage.symbols]
    _require(len(set(names)) == len(names), f"{what}.symbols", names, "of distinct names")
    for number, symbol in enumerate(stage.symbols):
        field = f"{what}.symbols[{number}]"
        _require(symbol.multiple_of >= 1, f"{field}.multiple_of", symbol.multiple_of, "1 or more")
        fits = symbol.size >= 1 and symbol.size % symbol.multiple_of == 0
        _require(fits, f"{field}.size", symbol.size, f"a positive multiple of multiple_of, {symbol.multiple_of}")
    local = local_symbols(stage.symbols, mesh)
    _require(
        stage.local_symbols == local, f"{what}.local_symbols", stage.local_symbols, "those of symbols on mesh_shape"
    )
    for kind, tensors in (("inputs", stage.inputs), ("outputs", stage.outputs)):
        for number, tensor in enumerate(tensors):
            _check_signature(f"{what}.{kind}[{number}]", tensor, mesh)
    for number, tensor in enumerate(stage.inputs):
        for dim, extent in enumerate(tensor.shape):
            known = isinstance(extent, int) or any(extent == symbol.name for symbol in local) or is_part
            known = known or not TensorShardSpec.parse(tensor.spec).is_even(dim, mesh)
            _require(known, f"{what}.inputs[{number}].shape[{dim}]", extent, "a size or one of local_symbols")
    _check_kernels(what, stage, target)
    _check_data(what, stage)
    _check_states(what, stage, mesh)


def _check_signature(what: str, tensor: TensorSignature, mesh: DeviceMesh) -> None:
    _require(tensor.dtype in ITEMSIZE or tensor.dtype == "boolean", f"{what}.dtype", tensor.dtype, "a known dtype")
    for field, shape in (("shape", tensor.shape), ("whole_shape", tensor.whole_shape)):
        for dim, extent in enumerate(shape):
            _require(isinstance(extent, str) or extent > 0, f"{what}.{field}[{dim}]", extent, "above 0")
    _check_local_shape(what, tensor, mesh)


def _check_local_shape(what: str, tensor: TensorSignature | StateSignature, mesh: DeviceMesh) -> None:
    """Check that the local shape of a tensor or a state is that of its whole shape and spec."""
    same = len(tensor.shape) == len(tensor.whole_shape)
    _require(same, f"{what}.shape", tensor.shape, f"of {len(tensor.whole_shape)} dims, as whole_shape")
    try:
        spec = TensorShardSpec.parse(tensor.spec)
        # A symbolic dim counts as divisible by all shard counts.
        whole = tuple(mesh.size if isinstance(extent, str) else extent for extent in tensor.whole_shape)
        local = spec.local_shape(whole, mesh)
    except SpecError as error:
        raise ValueError(f"{what}.spec does not fit: {error}") from error
    for dim, (extent, local_extent) in enumerate(zip(tensor.shape, local, strict=True)):
        if not spec.is_even(dim, mesh):
            _require(isinstance(extent, str), f"{what}.shape[{dim}]", extent, "an expression of parts")
        elif isinstance(extent, int) and isinstance(tensor.whole_shape[dim], int):
            _require(extent == local_extent, f"{what}.shape[{dim}]", extent, f"{local_extent}, by whole_shape and spec")


def _check_states(what: str, stage: StageManifest, mesh: DeviceMesh) -> None:
    names = [state.name for state in stage.states]
    _require(len(set(names)) == len(names), f"{what}.states", names, "of distinct names")
    for number, state in enumerate(stage.states):
        field = f"{what}.states[{number}]"
        _require(state.dtype in ITEMSIZE, f"{field}.dtype", state.dtype, "a known dtype")
        _require(all(n > 0 for n in state.whole_shape), f"{field}.whole_shape", state.whole_shape, "above 0")
        _check_local_shape(field, state, mesh)
        spec = TensorShardSpec.parse(state.spec)
        for dim, extent in enumerate(state.shape):
            known = isinstance(extent, int) or not spec.is_even(dim, mesh)
            _require(known, f"{field}.shape[{dim}]", extent, "a number where parts are equal")
        known = not state.initial or state.initial in stage.data
        _require(known, f"{field}.initial", state.initial, "empty, or one of data")


def _check_interface(what: str, stage: StageManifest, whole: StageManifest | Pipeline) -> None:
    """Check that a model's interface has one name for each input and output of its graph (a stage's or pipeline's)."""
    if stage.interface is None:
        return
    for kind, names, tensors in (
        ("input", stage.interface.input_names, whole.inputs),
        ("output", stage.interface.output_names, whole.outputs),
    ):
        fits = len(names) == len(tensors)
        _require(fits, f"{what}.interface.{kind}_names", names, f"{len(tensors)} names, one for each of {kind}s")


def _check_pipeline(what: str, program: ProgramManifest, pipeline: Pipeline) -> None:
    symbols = program.stages[0].symbols
    for number, stage in enumerate(program.stages):
        _require(stage.symbols == symbols, f"{what}.stages[{number}].symbols", stage.symbols, "those of stages[0]")
        _check_formulas(f"{what}.stages[{number}]", stage)

    def seen(stage: StageManifest, tensor: TensorSignature) -> StageTensor:
        per_dim = TensorShardSpec.parse(tensor.spec).mesh_axes_per_dim
        split = tuple(dim for dim, axes in enumerate(per_dim) if any(stage.mesh_shape[axis] > 1 for axis in axes))
        return StageTensor(tensor.dtype, tensor.whole_shape, not split, split)

    stages = [
        StageTensors(stage.size, *(tuple(seen(stage, x) for x in tensors) for tensors in (stage.inputs, stage.outputs)))
        for stage in program.stages
    ]
    try:
        pipeline.check(stages)
    except SpecError as error:
        raise ValueError(f"{what}.pipeline does not fit: {error}") from error


def _check_formulas(what: str, stage: StageManifest) -> None:
    """Check that the whole shapes of a pipeline's tensors can be computed from the sizes of its symbolic dims."""
    known = {symbol.name for symbol in stage.symbols}
    for kind, tensors in (("inputs", stage.inputs), ("outputs", stage.outputs)):
        for number, tensor in enumerate(tensors):
            for dim, extent in enumerate(tensor.whole_shape):
                try:
                    fits = isinstance(extent, int) or check_formula(extent) <= known
                except SpecError:
                    fits = False
                _require(fits, f"{what}.{kind}[{number}].whole_shape[{dim}]", extent, "a size computed from symbols")


def _check_kernels(what: str, stage: StageManifest, target: str) -> None:
    fields = TARGETS[target].manifest_fields
    kernels = len(stage.kernels)
    for field in ("candidates", "cublas", "objects"):
        values = getattr(stage, field)
        _require(len(values) == kernels, f"{what}.{field}", values, f"of {kernels} entries, as kernels")
    for number, digest in enumerate(stage.objects):
        _require(_SHA256.fullmatch(digest) is not None, f"{what}.objects[{number}]", digest, "a SHA-256 in hex")
    for number, count in enumerate(stage.candidates):
        fits = 1 <= count <= MOST_CANDIDATES
        _require(fits, f"{what}.candidates[{number}]", count, f"from 1 to {MOST_CANDIDATES}")
    for number, launch in enumerate(stage.launches):
        known = 0 <= launch.kernel < kernels
        _require(known, f"{what}.launches[{number}].kernel", launch.kernel, f"one of the {kernels} kernels")
    used = {launch.kernel for launch in stage.launches}
    _require(
        len(used) == kernels, f"{what}.launches", len(stage.launches), f"launches of each of the {kernels} kernels"
    )
    never = f"false for the target {target!r}"
    _require("cuda_graph" in fields or not stage.cuda_graph, f"{what}.cuda_graph", stage.cuda_graph, never)
    _require("cublas" in fields or not any(stage.cublas), f"{what}.cublas", stage.cublas, never)


def _check_objects(manifest: Manifest) -> None:
    """Check that kernels which have one library say the same of it."""
    known: dict[str, list[int]] = {}
    for place, program in enumerate(manifest.programs):
        for number, stage in enumerate(program.stages):
            for kernel, (here, *own) in enumerate(zip(stage.objects, stage.candidates, stage.cublas, strict=True)):
                what = f"programs[{place}].stages[{number}].objects[{kernel}]"
                same = known.setdefault(here, own) == own
                _require(same, what, here, "that of a kernel with the same candidates and cublas")


def _check_panels(what: str, stage: StageManifest, width: int | None) -> None:
    """Check the arrangements of weights in panels; ``width`` is that of the architecture's panels, if it has any."""
    for name, panels in stage.panels.items():
        field = f"{what}.panels[{name!r}]"
        known = name in stage.data and name not in stage.constants
        _require(known, f"{what}.panels", name, "of weights among data")
        _require(panels.width == width, f"{field}.width", panels.width, f"{width}, by arch")
        lower, groups = (*HALF_PRECISIONS, *FEW_BITS), groups_of(panels.precision)
        _require(panels.precision in ("", *lower), f"{field}.precision", panels.precision, f"one of {lower}")
        _require(panels.group in groups, f"{field}.group", panels.group, f"one of {groups}, by precision")
        for size, part in panels.parts:
            fits = size in SIZES and part in stage.parts
            _require(fits, f"{field}.parts", [size, part], f"of {', '.join(SIZES)}, by the stage's parts")
        for size in SIZES:
            _require(getattr(panels, size) >= 1, f"{field}.{size}", getattr(panels, size), "positive")
        divides = panels.taps >= 1 and panels.depth % panels.taps == 0
        alone = panels.taps == 1 or (panels.transposed and not panels.precision)
        _require(divides and alone, f"{field}.taps", panels.taps, f"1, or of filters with the depth {panels.depth}")
        plain = replace(panels, precision="", group=0, taps=1, matrices=MATRICES, transposed=True)
        _require(not panels.winograd or panels == plain, f"{field}.winograd", True, "false for any but float32 filters")


def _check_data(what: str, stage: StageManifest) -> None:
    distinct = len(set(stage.data)) == len(stage.data)
    _require(distinct, f"{what}.data", stage.data, "of distinct names")
    tail = stage.data[len(stage.data) - len(stage.constants) :]
    _require(tail == stage.constants, f"{what}.constants", stage.constants, "the last names of data")
    _require(stage.weight_bytes >= 0, f"{what}.weight_bytes", stage.weight_bytes, "0 or more")
    known = stage.workspace_bytes is not None
    sized = "present without symbols and parts only"
    _require(
        known != (bool(stage.symbols) or bool(stage.parts)),
        f"{what}.workspace_bytes",
        stage.workspace_bytes,
        sized,
    )
    for kind, nbytes in (stage.workspace_bytes or {}).items():
        fits = kind in KINDS_OF_MEMORY and nbytes > 0
        _require(fits, f"{what}.workspace_bytes[{kind!r}]", nbytes, f"above 0, of {', '.join(KINDS_OF_MEMORY)}")
