"""``hidet-dist run``: artifacts run once by ranks on this machine, with inputs and outputs in .npz files.

Each rank is this module as a program: ``python -m hidet_dist.cli.running DIR INPUT OUTPUT [TRACES]``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hidet_dist import launch
from hidet_dist.artifacts.manifest import Manifest, StageManifest
from hidet_dist.checks import shown
from hidet_dist.cli.request import check_destination
from hidet_dist.errors import ArtifactError, ConfigError, HidetDistError, InputError
from hidet_dist.runtime.partition import load_partition
from hidet_dist.runtime.profile import merge_traces
from hidet_dist.spec import Plan

_Arrays = Mapping[str, np.ndarray]


def run(folder: Path, ranks: int | None, given: Path, output: Path | None, profile: Path | None, as_json: bool) -> int:
    """Run artifacts on this machine, and print what came out.

    Arrays of ``given`` are named as the model's inputs, or as the plan's (``x0`` and so on). The outputs are saved to
    ``output``, and the trace of one more call on all ranks to ``profile``, where these are given. Returns the exit
    status of the ranks.

    Raises
    ------
    ArtifactError
        When the folder holds no artifacts, or artifacts of several stages or of sharded inputs or outputs.
    ConfigError
        When the artifacts are for another number of ranks, or ``given`` cannot be read.
    InputError
        When ``given`` lacks an input, or has another array.
    """
    stage, names = _interface(folder)
    if ranks is not None and ranks != stage.size:
        raise ConfigError(f"{folder} is for {stage.size} ranks; run it with -n {stage.size}, or without -n.")
    for path in (output, profile):
        check_destination(path)
    _ordered(read_arrays(given), names[0], given)
    with tempfile.TemporaryDirectory(prefix="hidet-dist-run-") as place:
        result, traces = Path(place) / "outputs.npz", Path(place) / "traces"
        arguments = ["-n", str(stage.size), "-m", "hidet_dist.cli.running", str(folder), str(given), str(result)]
        if profile is not None:
            traces.mkdir()
            arguments.append(str(traces))
        status = launch.main(arguments, "hidet-dist run")
        if status:
            return status
        arrays = read_arrays(result)
        if profile is not None:
            merge_traces(sorted(traces.iterdir()), profile)
    if output is not None:
        _save(output, arrays)
    if as_json:
        written = {"output": output and str(output), "profile": profile and str(profile)}
        print(json.dumps({"outputs": {name: _summary(array) for name, array in arrays.items()}, **written}, indent=1))
        return 0
    for name, array in arrays.items():
        print(f"{name}: {array.dtype}[{', '.join(map(str, array.shape))}], from {array.min():g} to {array.max():g}")
    for path in filter(None, (output, profile)):
        print(f"Written to {path}.")
    return 0


def _summary(array: np.ndarray) -> dict[str, Any]:
    """Dtype, shape and range of an array. A bound that is not finite is None, as JSON has no such number."""
    least, most = (float(value) if np.isfinite(value) else None for value in (array.min(), array.max()))
    return {"dtype": str(array.dtype), "shape": list(array.shape), "least": least, "most": most}


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npz file; nothing in it is unpickled. Raises ConfigError."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"Cannot read arrays from {path}: {error}. Write it with numpy.savez.") from error


def _save(path: Path, arrays: _Arrays) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _interface(folder: Path) -> tuple[StageManifest, tuple[list[list[str]], list[str]]]:
    """Load the only stage of artifacts, the names that each input may have, and the name of each output."""
    stages = Manifest.load(folder).stages
    plan = Plan.load(folder / "plan.json")
    if len(stages) != 1 or len(plan.stages) != 1:
        raise ArtifactError(f"{folder} has {len(stages)} stages; `run` takes artifacts of one.")
    stage_plan = plan.stages[0]
    if not all(tensor.spec.is_replicated for tensor in (*stage_plan.inputs, *stage_plan.outputs)):
        raise ArtifactError(f"{folder} takes or gives shards; load it in a program of ranks instead.")
    interface = stages[0].interface
    given = [tensor.label for tensor in stage_plan.inputs] if interface is None else interface.input_names
    made = [tensor.label for tensor in stage_plan.outputs] if interface is None else interface.output_names
    inputs = [[name for name in (label, x.name) if name] for label, x in zip(given, stage_plan.inputs, strict=True)]
    return stages[0], (inputs, [name or f"y{number}" for number, name in enumerate(made)])


def _ordered(arrays: _Arrays, names: list[list[str]], path: Path) -> list[np.ndarray]:
    """The arrays in the order of the inputs. Raises InputError."""
    ordered = []
    for allowed in names:
        name = next((name for name in allowed if name in arrays), None)
        if name is None:
            raise InputError(
                f"{path} has no array {allowed[0]!r}; the inputs are {', '.join(one[0] for one in names)}."
            )
        ordered.append(arrays[name])
    known = {name for allowed in names for name in allowed}
    for name in arrays:
        if name not in known:
            inputs = ", ".join(allowed[0] for allowed in names)
            raise InputError(f"{path} has the array {shown(name)}; the inputs are {inputs}.")
    return ordered


def main(folder: str, given: str, output: str, traces: str | None = None) -> int:
    """Run one rank; the first one writes the outputs, and each a trace of one more call where a folder is given."""
    try:
        _, (inputs, outputs) = _interface(Path(folder))
        with load_partition(folder) as model:
            arrays = _ordered(read_arrays(Path(given)), inputs, Path(given))
            results = model.run(arrays)
            if model.rank == 0:
                _save(Path(output), dict(zip(outputs, map(np.asarray, results), strict=True)))
            if traces is not None:
                model.profile(*arrays).save(Path(traces) / f"{model.rank}.json")
    except HidetDistError as error:
        print(f"hidet-dist run: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
